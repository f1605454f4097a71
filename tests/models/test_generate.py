from __future__ import annotations

import pytest
import torch

from surefoot.core.errors import InputError
from surefoot.models import ModelSpec, Sampling, Transformer, generate, initialise
from surefoot.models.spec import AttentionSpec, ConvSpec, FeedForwardSpec, MLASpec

A = AttentionSpec(heads=4, kv_heads=2, head_dim=6, window=5)
SPECS = {
    "gqa": ModelSpec(vocab_size=50, dim=16, layers=2, attention=A, ffn=FeedForwardSpec(hidden=24), pattern=("attention", "sliding")),
    "mla": ModelSpec(
        vocab_size=50, dim=16, layers=2, ffn=FeedForwardSpec(hidden=24), pattern=("mla",),
        mla=MLASpec(heads=2, q_rank=8, kv_rank=6, nope_dim=4, rope_dim=4, value_dim=5),
    ),
    "hybrid": ModelSpec(
        vocab_size=50, dim=16, layers=2, attention=A, ffn=FeedForwardSpec(hidden=24), conv=ConvSpec(), pattern=("conv", "attention"),
    ),
}  # fmt: skip


def model_of(name: str) -> Transformer:
    model = Transformer(SPECS[name], dtype=torch.float64)
    initialise(model, 1)
    for parameter in model.parameters():
        parameter.data.mul_(2.0)  # spread the logits, so that a wrong one shows
    return model.eval()


@pytest.mark.parametrize("name", SPECS)
def test_greedy_with_cache_and_padding_is_the_argmax_without(name: str) -> None:
    model, prompts = model_of(name), [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3]]
    for prompt, found in zip(prompts, generate(model, prompts, 12), strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert found == tokens[len(prompt) :]


def test_stop_tokens_end_a_row() -> None:
    model = model_of("gqa")
    (free,) = generate(model, [[1, 2]], 10)
    (stopped,) = generate(model, [[1, 2]], 10, stop=[free[3]])
    assert stopped == free[: free.index(free[3]) + 1]


def test_samples_depend_on_seed_row_and_step_alone() -> None:
    model, sampling = model_of("gqa"), Sampling(temperature=1.0, seed=5)
    both = generate(model, [[1, 2], [3, 4]], 8, sampling=sampling)
    assert generate(model, [[1, 2]], 8, sampling=sampling)[0] == both[0]
    assert generate(model, [[1, 2]], 8, sampling=Sampling(temperature=1.0, seed=6))[0] != both[0]
    assert generate(model, [[1, 2]], 8, sampling=Sampling(temperature=1.0, top_k=1))[0] == generate(model, [[1, 2]], 8)[0]


@pytest.mark.parametrize("prompts", [[], [[]], [[99]], [[-1]]])
def test_prompts_outside_the_vocabulary_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(InputError):
        generate(model_of("gqa"), prompts, 2)
