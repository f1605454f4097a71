from __future__ import annotations

import pytest
import torch

from surefoot.core.errors import InputError
from surefoot.models import ModelSpec, Sampling, Transformer, generate, initialise
from surefoot.models.generate import _choose
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


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pieces", [[1] * 9, [9], [4, 3, 2], [1, 8]])
def test_a_cache_filled_in_pieces_gives_the_logits_of_the_whole(name: str, pieces: list[int]) -> None:
    model, tokens = model_of(name), torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    cache = model.new_cache(2, 11)
    found = torch.cat([model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(found, model(tokens), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", SPECS)
def test_a_reordered_cache_goes_on_with_the_kept_rows(name: str) -> None:
    model, tokens = model_of(name), torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(3, 7)
    model(tokens[:, :5], cache=cache)
    kept = torch.tensor([2, 0])
    cache.reorder(kept)
    torch.testing.assert_close(model(tokens[kept, 5:], cache=cache), model(tokens[kept])[:, 5:], rtol=1e-10, atol=1e-11)


def test_every_row_ends_at_its_own_stop_and_callers_see_each_step() -> None:
    model, prompts = model_of("gqa"), [[1, 2], [3], [4, 5, 6]]
    free = generate(model, prompts, 10)
    stops, seen = [free[0][2], free[1][5]], []
    found = generate(model, prompts, 10, stop=stops, on_token=lambda tokens: seen.append(tokens.tolist()))
    for row, whole in zip(found, free, strict=True):
        ends = [index for index, token in enumerate(whole) if token in stops]
        assert row == (whole[: ends[0] + 1] if ends else whole)
    assert len(seen) == max(map(len, found))
    assert [step[0] for step in seen[: len(found[0])]] == found[0]
    assert generate(model, prompts, 0) == [[], [], []]


def test_sampled_frequencies_are_the_models_probabilities() -> None:
    """2000 rows of one prompt: independent draws, within five standard errors; filters remove what they should."""
    model, rows = model_of("gqa"), 2000
    probabilities = model(torch.tensor([[1, 2]]))[0, -1].div(0.7).softmax(-1)
    ordered, index = probabilities.sort(descending=True)
    nucleus = set(index[: int((ordered.cumsum(0) < 0.6).sum()) + 1].tolist())
    drawn = {
        name: [row[0] for row in generate(model, [[1, 2]] * rows, 1, sampling=Sampling(temperature=0.7, **options))]
        for name, options in (("all", {}), ("top_k", {"top_k": 3}), ("top_p", {"top_p": 0.6}))
    }
    frequencies = torch.bincount(torch.tensor(drawn["all"]), minlength=50) / rows
    assert bool(((frequencies - probabilities).abs() < 5.0 * (probabilities * (1 - probabilities) / rows).sqrt() + 1e-9).all())
    assert set(drawn["top_k"]) == set(index[:3].tolist())
    assert set(drawn["top_p"]) <= nucleus
    assert len(set(drawn["top_p"])) > 1


def test_a_draw_of_zero_is_no_token_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.rand` does return 0.0; token 0, filtered out here, must not come of it."""
    monkeypatch.setattr(torch, "rand", lambda size, generator=None: torch.zeros(size))
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert _choose(logits, Sampling(temperature=1.0, top_k=1), 0).tolist() == [1]


def test_a_refusal_names_the_token_at_fault() -> None:
    with pytest.raises(InputError, match="token -3 "):
        generate(model_of("gqa"), [[5, -3]], 2)
    with pytest.raises(InputError, match="token 50 "):
        generate(model_of("gqa"), [[5], [50]], 2)
