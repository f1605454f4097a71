"""Predicted bytes against tensors that exist: parameters, optimizer state, what autograd saved, caches."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
import torch
from torch import Tensor

from surefoot.models import Transformer, declarations, initialise
from surefoot.models.memory import Precision, activation_bytes, cache_bytes, cache_bytes_per_token, training_memory
from surefoot.train.config import OptimizerConfig
from surefoot.train.optimizer import Optimizer
from tests.models.specs import DEEPSEEK_V3, LFM2_1B, LLAMA_8B, SPECS

BATCH, TOKENS = 2, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "bfloat16_autocast": torch.float32}


def saved_bytes(name: str, precision: Precision) -> int:
    """Bytes of all distinct storages that autograd keeps, but parameters and what the head computes ahead (its gradients)."""
    spec = SPECS[name]
    model = Transformer(spec, dtype=DTYPES[precision])
    initialise(model, 0)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    tokens = torch.randint(spec.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept.setdefault(pointer, tensor)
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16_autocast" else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        loss = model(tokens, labels=tokens, normaliser=tokens.numel())
    width = 4 if precision == "float32" else 2
    head = BATCH * TOKENS * spec.dim * width + spec.vocab_size * spec.dim * width
    assert loss.total.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - head


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("name", SPECS)
def test_activations_equal_what_autograd_saves(name: str, precision: Precision) -> None:
    """Within 2 %: the routers' statistics of whole sequences are left out of the prediction."""
    spec = SPECS[name]
    assert activation_bytes(spec, BATCH, TOKENS, precision=precision) == pytest.approx(saved_bytes(name, precision), rel=0.02)


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["gqa", "mla", "moe", "conv"])
def test_state_equals_the_optimizer(name: str, kind: str, precision: Precision) -> None:
    spec = SPECS[name]
    model = Transformer(spec, dtype=DTYPES[precision])
    initialise(model, 0)
    optimizer = Optimizer(dict(model.named_parameters()), declarations(model), spec, OptimizerConfig(kind=kind))  # type: ignore[arg-type]
    predicted = training_memory(spec, 1, 8, precision=precision, optimizer=kind)  # type: ignore[arg-type]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert predicted.weights == predicted.gradients == weights
    held = {slot: sum(tensor.nbytes for tensor in tensors.values()) for slot, tensors in optimizer.state.items()}
    assert predicted.masters == held.pop("master", 0)
    assert predicted.optimizer == sum(held.values())


@pytest.mark.parametrize("name", SPECS)
def test_cache_equals_its_tensors(name: str) -> None:
    spec = SPECS[name]
    cache = Transformer(spec, dtype=torch.bfloat16).new_cache(3, 20)
    tensors = [value for state in cache.states for value in vars(state).values() if isinstance(value, Tensor)]
    assert cache_bytes(spec, 3, 20) == sum(tensor.nbytes for tensor in tensors)
    assert cache_bytes(spec, 1, 21) - cache_bytes(spec, 1, 20) == cache_bytes_per_token(spec)


def test_published_cache_sizes() -> None:
    """DeepSeek-V3: 70.272 KB a token (2505.09343, table 1). Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes. LFM2: 6 layers."""
    assert cache_bytes_per_token(DEEPSEEK_V3) == 70_272
    assert cache_bytes_per_token(LLAMA_8B) == 131_072
    assert cache_bytes_per_token(LFM2_1B) == 6 * 2 * 8 * 64 * 2


def test_recomputation_keeps_inputs_and_one_block() -> None:
    spec = SPECS["gqa"]
    deep = spec.model_copy(update={"layers": 30})
    full, less = (activation_bytes(deep, BATCH, TOKENS, recompute=again) for again in (False, True))
    one_more = activation_bytes(spec.model_copy(update={"layers": 31}), BATCH, TOKENS, recompute=True) - less
    assert one_more == BATCH * TOKENS * spec.dim * 4
    assert less < full / 8


def test_head_never_needs_all_logits() -> None:
    """At a vocabulary of 150k and 8 x 4096 tokens, float32 logits alone would be 20 GB."""
    spec = SPECS["gqa"].model_copy(update={"vocab_size": 150_000})
    assert training_memory(spec, 8, 4096).head < 0.1e9
