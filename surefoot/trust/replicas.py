"""Copies that must hold the same bits, and do not: which tensor, and where it can be told, whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.trust.digest import Digest, vote


@dataclass(frozen=True)
class Mismatch:
    """Tensor `name` is not the same on `ranks`, all that hold this part of it; `suspects` are at odds with a majority of them."""

    name: str
    ranks: tuple[int, ...]
    suspects: tuple[int, ...]


def mismatches(sets: Mapping[str, Sequence[Sequence[int]]], digests: Mapping[int, Mapping[str, Digest]]) -> list[Mismatch]:
    """Return every set of copies that are not alike, in the order of `sets`.

    `sets`: for each tensor, the ranks that hold equal parts of it. `digests`: by rank and name; to lack a tensor that others of the
    set hold is to differ.
    """
    found = []
    for name, held in sets.items():
        for ranks in held:
            values = {rank: digests.get(rank, {}).get(name) for rank in ranks}
            if len(set(values.values())) > 1:
                found.append(Mismatch(name, tuple(ranks), vote(values)))
    return found
