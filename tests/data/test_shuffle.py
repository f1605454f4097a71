from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.shuffle import permute, shuffled

SEEDS = st.integers(0, 2**63 - 1)


@given(size=st.integers(1, 3000), secret=SEEDS)
def test_permute_is_a_permutation(size: int, secret: int) -> None:
    images = permute(np.arange(size), size, secret)
    assert sorted(images.tolist()) == list(range(size))


@given(size=st.integers(1, 500), seed=SEEDS, position=st.integers(0, 10**12), count=st.integers(1, 300), cut=st.integers(0, 300))
def test_any_slice_equals_the_same_part_of_a_larger_one(size: int, seed: int, position: int, count: int, cut: int) -> None:
    cut = min(cut, count - 1)
    whole = shuffled(position, count, size, seed)
    parts = [shuffled(position, cut, size, seed), shuffled(position + cut, count - cut, size, seed)]
    assert np.array_equal(whole, np.concatenate(parts))


@given(size=st.integers(1, 200), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_holds_every_entry_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(epoch * size, size, size, seed).tolist()) == list(range(size))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [shuffled(epoch * 100, 100, 100, seed).tolist() for epoch in range(5) for seed in range(5)]
    assert len({tuple(order) for order in orders}) == 25


def test_no_seed_keeps_the_natural_order() -> None:
    assert shuffled(3, 6, 5, None).tolist() == [3, 4, 0, 1, 2, 3]


def test_each_place_is_hit_equally_often() -> None:
    """Chi-square over seeds: where entry 0, the middle and the last go; 11 sizes of which some need much cycle walking."""
    draws = 1000
    for size in (2, 3, 5, 7, 10, 17, 33):
        for entry in {0, size // 2, size - 1}:
            counts = np.bincount([int(permute(np.array([entry]), size, seed)[0]) for seed in range(draws)], minlength=size)
            expected = draws / size
            chi_square = float(((counts - expected) ** 2 / expected).sum())
            degrees = size - 1
            assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 5, (size, entry, counts)


def test_neighbours_do_not_stay_neighbours() -> None:
    images = permute(np.arange(100_000), 100_000, 1)
    assert abs(float(np.corrcoef(images[:-1], images[1:])[0, 1])) < 0.02
    assert np.mean(np.abs(np.diff(images)) == 1) < 1e-3


@settings(max_examples=10)
@given(seed=SEEDS)
def test_a_position_costs_the_same_however_large_the_set(seed: int) -> None:
    begin = time.perf_counter()
    entries = shuffled(10**15, 64, 10**12 + 7, seed)
    assert time.perf_counter() - begin < 0.5
    assert len(set(entries.tolist())) == 64
    assert entries.min() >= 0
    assert entries.max() < 10**12 + 7
