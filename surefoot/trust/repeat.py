"""The same computation twice: does it give the same bits when its timing changes, and when its batch does?

Two different properties, and neither follows from the other: an atomic addition makes a step differ from itself (a race), while a
kernel that picks its order of summation by the batch size makes a row's result depend on who shares the batch (He et al. 2025,
"Defeating nondeterminism in LLM inference").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.trust.digest import Digest, digests, locate


@dataclass(frozen=True)
class Difference:
    """The first tensor that was not the same: `name`, at run or batch size `at`.

    `elements`: the first few that differ as (flat index, bits that differ), where both tensors were still at hand; `missing`: the
    tensor stands in one of the runs only.
    """

    name: str
    at: int
    elements: tuple[tuple[int, int], ...] = ()
    missing: bool = False


def repeatable(step: Callable[[], Mapping[str, Tensor]], times: int = 3, disturb: Callable[[int], None] | None = None) -> Difference | None:
    """Return the first tensor, in the order of `step`'s answer, whose bits are not those of the first run; None: all are alike.

    `step` starts from the same state each time and returns named tensors in data-flow order. `disturb` is called with 1, 2, ...
    before each later run to change its timing (threads, load, sleeps on other processes), never its inputs.
    """
    if times < 2:
        raise ValueError(f"{times} runs have nothing to compare; use 2 or more")
    first = digests(step())
    for run in range(1, times):
        if disturb is not None:
            disturb(run)
        found = digests(step())
        difference = _first(first, found, run)
        if difference is not None:
            return difference
    return None


def _first(expected: Mapping[str, Digest], found: Mapping[str, Digest], run: int) -> Difference | None:
    for name in (*expected, *found):
        if name not in expected or name not in found:
            return Difference(name, run, missing=True)
        if expected[name] != found[name]:
            return Difference(name, run)
    return None


@torch.no_grad()
def batch_invariant(forward: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]) -> Difference | None:
    """Return the first row that is not the same alone and in batches of each of `sizes`; None: every row always is.

    `forward` maps rows [B, ...] to [B, ...], each row for itself; rows: [N, ...]. The rows go through in order, in batches of `size`
    (the last one smaller); `Difference.at` is the size of the batch, `elements` count from the start of the row.
    """
    alone = [forward(rows[index : index + 1]).clone() for index in range(len(rows))]
    for size in sizes:
        for start in range(0, len(rows), size):
            together = forward(rows[start : start + size])
            for index, row in enumerate(together.split(1), start):
                elements = locate(alone[index], row)
                if elements:
                    return Difference(f"row {index}", len(together), tuple(elements))
    return None
