"""A shuffle without state: entry i of a keyed permutation of 0..n-1, in constant time and memory.

A balanced Feistel network is a bijection on 0..4^h-1 whatever its round function (Luby & Rackoff 1988); cycle walking (Black &
Rogaway 2002, "Ciphers with arbitrary finite domains") restricts it to 0..n-1: an image outside is fed back until it falls inside.
As 4^(h-1) < n, fewer than four rounds of walking are expected.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.core.random import key

Indices = npt.NDArray[np.int64]
_ROUNDS = 6


def shuffled(position: int, count: int, size: int, seed: int | None) -> Indices:
    """Return entries position..position+count-1 of an endless stream: epoch after epoch, each a fresh permutation of 0..size-1.

    `seed` None keeps the natural order in every epoch. Entries depend on (seed, size, position) alone.
    """
    positions = np.arange(position, position + count, dtype=np.int64)
    epochs, entries = np.divmod(positions, size)
    if seed is None:
        return entries
    for epoch in np.unique(epochs):
        here = epochs == epoch
        entries[here] = permute(entries[here], size, key(seed, "shuffle", int(epoch)))
    return entries


def permute(entries: Indices, size: int, secret: int) -> Indices:
    """Map `entries` (each in 0..size-1) through the permutation of 0..size-1 that the 64-bit `secret` selects."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(key(secret, "round", index)) for index in range(_ROUNDS)]
    images = _feistel(entries.astype(np.uint64), half, keys)
    outside = images >= size
    while outside.any():
        images[outside] = _feistel(images[outside], half, keys)
        outside = images >= size
    return images.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for round_key in keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014), arithmetic modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
