"""Exact counts: against published models, and against operations counted while the reference runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from surefoot.core.errors import ConfigError
from surefoot.models import ModelSpec, Transformer, initialise
from surefoot.models.ffn import gate
from surefoot.models.flops import breakdown, count_flops, count_parameters, decode_flops, visible_pairs
from tests.models.specs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, LFM2_1B, LLAMA_8B, QWEN3_30B_A3B, SPECS


@pytest.mark.parametrize(
    ("spec", "total", "active"),
    [
        (DEEPSEEK_V3, 671_026_404_352, 37_552_282_624),
        (DEEPSEEK_V2_LITE, 15_706_484_224, 2_661_150_208),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        (LLAMA_8B, 8_030_261_248, 8_030_261_248),
        (LFM2_1B, 1_170_340_608, 1_170_340_608),
    ],
    ids=["deepseek-v3", "deepseek-v2-lite", "qwen3-30b-a3b", "llama-3.1-8b", "lfm2-1.2b"],
)
def test_published_parameter_counts(spec: ModelSpec, total: int, active: int) -> None:
    counted = count_parameters(spec)
    assert (counted.total, counted.active) == (total, active)


def test_deepseek_v3_training_flops_equal_the_published_250_gflop() -> None:
    """2505.09343, table 2: 250 GFLOPS a token at sequence length 4096, causal."""
    causal = count_flops(DEEPSEEK_V3, 4096)
    assert causal.training / 1e9 == pytest.approx(250.5, abs=0.1)
    assert 3 * causal.weights / 1e9 == pytest.approx(219.75, abs=0.01)
    assert count_flops(DEEPSEEK_V3, 4096, convention="full").training / 1e9 == pytest.approx(281.2, abs=0.1)


def test_llama_8b_reproduces_torchtitan_mfu() -> None:
    """torchtitan's 5,762 tokens/s an H100 (989 TFLOP/s) is its printed 33 % in the full-square convention, sequence 8192."""
    full = count_flops(LLAMA_8B, 8192, convention="full")
    assert full.training / 1e9 == pytest.approx(57.91, abs=0.01)
    assert 5762 * full.training / 989e12 == pytest.approx(0.337, abs=0.001)
    assert 5762 * count_flops(LLAMA_8B, 8192).training / 989e12 == pytest.approx(0.300, abs=0.001)


@pytest.mark.parametrize("name", SPECS)
def test_parameters_equal_the_model(name: str) -> None:
    spec = SPECS[name]
    model = Transformer(spec, device="meta")
    counted = count_parameters(spec)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    assert counted.embedding == model.embed.weight.numel()
    assert sum(part.parameters for part in breakdown(spec)) == counted.total


def one_by_one(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str) -> Tensor:
    """`grouped_ffn`, in products that the counter sees."""
    parts = [gate(part @ gate_up[e].t(), activation) @ down[e].t() for e, part in enumerate(rows.split(counts.tolist()))]
    return torch.cat(parts)


@pytest.mark.parametrize("name", SPECS)
def test_forward_and_backward_equal_counted_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The math kernel of attention computes every pair of a row, so the count is the full-square one.

    The CPU's own operators are opaque to the counter: products are left to torch, attention to its math kernel, experts to a loop.
    """

    def every_pair(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr("surefoot.models.attention.causal_attention", every_pair)
    monkeypatch.setattr("surefoot.models.moe.grouped_ffn", one_by_one)
    monkeypatch.setattr("surefoot.models.products.PREFERS_ONEDNN", False)
    spec, tokens, batch = SPECS[name], 16, 2
    model = Transformer(spec, dtype=torch.float32)
    initialise(model, 0)
    ids = torch.randint(spec.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(ids).square().mean().backward()
    counted = counter.get_total_flops() / (batch * tokens)
    expected = count_flops(spec, tokens, convention="full").training
    if spec.conv is not None:  # taps are elementwise operations, which the counter does not see
        expected -= 3 * 2 * 2 * spec.dim * spec.conv.width
    assert counted == expected


@pytest.mark.parametrize("name", ["gqa", "sliding", "mla", "moe", "conv"])
def test_decoding_equals_counted_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.models.moe.grouped_ffn", one_by_one)
    monkeypatch.setattr("surefoot.models.products.PREFERS_ONEDNN", False)
    spec, context = SPECS[name], 9
    model = Transformer(spec, dtype=torch.float32)
    initialise(model, 0)
    cache = model.new_cache(1, 16)
    with torch.no_grad():
        model(torch.zeros(1, context - 1, dtype=torch.int64), cache=cache)
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), counter:
            model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    expected = decode_flops(spec, context)
    if spec.conv is not None:
        expected -= 2 * 2 * spec.dim * spec.conv.width
    if name == "sliding":  # the mask hides keys beyond the window, the math kernel multiplies them all the same
        assert spec.attention is not None and spec.attention.window is not None
        expected += 2 * 4 * 4 * 8 * (context - spec.attention.window)
    assert counter.get_total_flops() == expected


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), window=st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_equal_a_mask(lengths: list[int], window: int | None) -> None:
    seen = 0
    for length in lengths:
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        seen += int(((key <= query) & (query - key < (window or length))).sum())
    assert seen == sum(visible_pairs(length, window) for length in lengths)


def test_documents_never_cost_more_than_one_document() -> None:
    spec = SPECS["sliding"]
    packed, single = count_flops(spec, 16, documents=(3, 9, 4)), count_flops(spec, 16)
    assert packed.weights == single.weights
    assert packed.attention < single.attention < count_flops(spec, 16, convention="full").attention
    assert count_flops(spec, 16, documents=(16,)).attention == single.attention


def test_recomputation_adds_one_forward_without_the_head() -> None:
    counted = count_flops(SPECS["gqa"], 16)
    assert counted.training_recomputed - counted.training == counted.forward - 2 * 96 * 32


def test_impossible_document_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="sum to 12, the row has 16"):
        count_flops(SPECS["gqa"], 16, documents=(3, 9))
    with pytest.raises(ConfigError, match="full convention"):
        count_flops(SPECS["gqa"], 16, convention="full", documents=(16,))
