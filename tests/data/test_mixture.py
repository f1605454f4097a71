"""Shares of sources: exact at every prefix, through changes, limits and restarts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.mixture import Mixture, MixtureState, Stage, natural, normalised, schedule

ZIPF = normalised([1 / (index + 1) for index in range(306)])


@dataclass
class Lengths:
    """Heavy-tailed lengths of documents, the same ones whenever asked."""

    seed: int
    longest: int = 1

    def __call__(self, source: int, n: int) -> int:
        size = max(1, min(30_000, int(Random(f"{self.seed} {source} {n}").lognormvariate(5, 1.5))))
        self.longest = max(self.longest, size)
        return size


def test_counts_of_306_sources_are_never_off_by_a_whole_document() -> None:
    mixture = Mixture(ZIPF, lambda source, n: 1, by="documents")
    counts = [0] * len(ZIPF)
    for total, draw in enumerate(islice(mixture.draws(), 20_000), start=1):
        counts[draw.source] += 1
        assert max(abs(count - weight * total) for count, weight in zip(counts, ZIPF, strict=True)) < 1.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12), st.integers(0, 1000))
def test_tokens_are_never_off_by_more_than_one_longest_document(weights: list[float], seed: int) -> None:
    shares, lengths = normalised(weights), Lengths(seed)
    mixture = Mixture(shares, lengths)
    given_ = [0] * len(shares)
    for draw in islice(mixture.draws(), 400):
        assert draw.length == lengths(draw.source, draw.n)
        given_[draw.source] += draw.length
        total = sum(given_)
        assert max(abs(tokens - share * total) for tokens, share in zip(given_, shares, strict=True)) <= lengths.longest
    assert mixture.total == sum(given_)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(0, 1000), st.sampled_from(["tokens", "documents"]))
def test_a_mixture_goes_on_from_its_state_as_if_never_stopped(stop: int, seed: int, by: str) -> None:
    shares, lengths = normalised([3.0, 1.0, 0.5]), Lengths(seed)
    whole = list(islice(Mixture(shares, lengths, by).draws(), 300))  # type: ignore[arg-type]
    first = Mixture(shares, lengths, by)  # type: ignore[arg-type]
    head = list(islice(first.draws(), stop))
    rest = Mixture(shares, lengths, by, start=first.state)  # type: ignore[arg-type]
    assert head + list(islice(rest.draws(), 300 - stop)) == whole


def test_a_change_of_weights_neither_repays_nor_forgives() -> None:
    """From the change on, every share is exact again within a document, whatever was given before."""
    mixture = Mixture(normalised([9.0, 1.0]), lambda source, n: 1, by="documents")
    list(islice(mixture.draws(), 1000))
    mixture.reweigh(normalised([1.0, 3.0]))
    later = [draw.source for draw in islice(mixture.draws(), 400)]
    for total in range(1, 401):
        assert abs(sum(later[:total]) - 0.75 * total) <= 2.0


def test_a_source_at_its_limit_leaves_its_part_to_the_others() -> None:
    mixture = Mixture(normalised([1.0, 1.0, 2.0]), lambda source, n: 1, by="documents", limits=(10, None, None))
    draws = [draw.source for draw in islice(mixture.draws(), 400)]
    assert draws.count(0) == 10
    assert mixture.exhausted == [0]
    after = draws[60:]
    assert abs(after.count(2) - 2 * after.count(1)) <= 3
    assert [draw.n for draw in Mixture((1.0,), lambda s, n: 1, limits=(3,)).draws()] == [0, 1, 2]


def test_every_source_gives_its_documents_in_order() -> None:
    seen = [0] * 5
    for draw in islice(Mixture(normalised([1, 2, 3, 4, 5]), Lengths(1)).draws(), 500):
        assert draw.n == seen[draw.source]
        seen[draw.source] += 1


def test_a_new_source_begins_with_nothing_owed() -> None:
    mixture = Mixture(normalised([1.0, 1.0]), lambda source, n: 1, by="documents")
    list(islice(mixture.draws(), 100))
    more = Mixture(normalised([1.0, 1.0, 1.0]), lambda source, n: 1, by="documents", start=mixture.state.extended(3))
    draws = [draw.source for draw in islice(more.draws(), 30)]
    assert [draws.count(source) for source in range(3)] == [10, 10, 10]


def test_weights_by_size_and_temperature() -> None:
    assert natural([100, 300], 1.0) == pytest.approx((0.25, 0.75))
    assert natural([100, 400], 2.0) == pytest.approx((1 / 3, 2 / 3))


def test_a_schedule_steps_and_slides() -> None:
    changes = schedule(["a", "b"], [Stage(0, {"a": 1.0}), Stage(1000, {"a": 1.0, "b": 1.0}), Stage(2000, {"b": 1.0}, "linear")])
    assert changes[0] == (0, (1.0, 0.0))
    assert changes[1] == (1000, (0.5, 0.5))
    assert changes[-1] == (2000, (0.0, 1.0))
    between = [weights for at, weights in changes if 1000 < at < 2000]
    assert len(between) == 63
    assert all(a >= b for a, b in zip([w[0] for w in between], [w[0] for w in between][1:], strict=False))


def test_the_state_is_small() -> None:
    state = MixtureState.fresh(306)
    assert len(state.drawn) == len(state.given) == len(state.earned) == 306
