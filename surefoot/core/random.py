"""Randomness as a key: what is drawn depends on (seed, purpose, ids) alone, never on what was drawn before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def key(seed: int, *ids: str | int) -> int:
    """Return the 64-bit key of (`seed`, `ids`), the same in every process, version and layout (blake2b of the parts).

    Each part is hashed with its type and length, so that ``("a", "b")`` and ``("ab",)``, or ``1`` and ``"1"``, differ.
    """
    state = hashlib.blake2b(digest_size=8)
    for part in (seed, *ids):
        text = str(part).encode("utf-8")
        state.update(b"%c%d:" % (b"s" if isinstance(part, str) else b"i", len(text)))
        state.update(text)
    return int.from_bytes(state.digest(), "little")


def generator(seed: int, *ids: str | int) -> torch.Generator:
    """Return a fresh CPU generator seeded with ``key(seed, *ids)``."""
    import torch

    made = torch.Generator()
    made.manual_seed(key(seed, *ids) & (2**63 - 1))
    return made
