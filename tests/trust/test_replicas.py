from __future__ import annotations

import torch

from surefoot.trust.digest import Digest, digest
from surefoot.trust.replicas import Mismatch, mismatches

GOOD, BAD = digest(torch.zeros(3)), digest(torch.ones(3))


def test_copies_are_compared_within_their_sets_only() -> None:
    sets = {"shared": [[0, 1, 2, 3]], "cut": [[0, 2], [1, 3]]}
    found: dict[int, dict[str, Digest]] = {rank: {"shared": GOOD, "cut": BAD if rank % 2 else GOOD} for rank in range(4)}
    assert mismatches(sets, found) == []
    found[3]["shared"] = BAD
    found[2]["cut"] = BAD
    assert mismatches(sets, found) == [Mismatch("shared", (0, 1, 2, 3), (3,)), Mismatch("cut", (0, 2), ())]


def test_to_lack_a_tensor_is_to_differ() -> None:
    assert mismatches({"w": [[0, 1, 2]]}, {0: {"w": GOOD}, 1: {}, 2: {"w": GOOD}}) == [Mismatch("w", (0, 1, 2), (1,))]
    assert mismatches({"w": [[0, 1, 2]]}, {}) == []
