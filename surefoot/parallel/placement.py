"""Where a parameter lies and how its gradient is summed: the one rule that everything else reads.

A parameter is declared once (`models/parameters.py`): the dimension tensor parallelism cuts, whether its first dimension counts
experts. Everything follows:

| parameter | cut over | gradient summed over |
| --- | --- | --- |
| has `tp_dim` | tensor | replicate, shard, context: ranks with the same part and other tokens |
| `expert` | expert | the token ranks that hold the same experts (all-to-all brought every token here) |
| any other | nothing | replicate, shard, context, tensor: other tokens, or the same tokens through other heads |

A rank's contribution is always partial, never a copy, so everything is a sum; the loss is divided once, by the global number of
trained tokens, and no divisor depends on the layout. Sharding (FSDP) then cuts the first dimension of what a rank holds.

All functions here are pure: a checkpoint, an initialisation, a hash or a memory prediction of any layout needs no process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surefoot.models.parameters import ParamDecl
from surefoot.parallel.layout import AXES, Layout

Run = tuple[int, int, int]
"""(start in the part, start in the whole, length) along one dimension."""
Sum = Literal["dense", "experts", "tokens"]
"""The ranks over which a gradient is summed: see `Mesh`."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on each axis; `expert` is its place among the ranks that share out the experts."""

    pipeline: int = 0
    replicate: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0
    expert: int = 0


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Return the place of `rank`, axes in the order of `AXES`, the last one fastest; expert ranks are neighbours."""
    found, rest = {}, rank
    for axis in reversed(AXES):
        rest, found[axis] = divmod(rest, getattr(layout, axis))
    return Coordinates(**found, expert=rank % layout.tokens % layout.expert)


@dataclass(frozen=True)
class Placement:
    """The part of a tensor of `shape` that lies somewhere: `runs` for each dimension."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, _, length in runs) for runs in self.runs)

    def boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]]:
        """Yield the rectangles of the part: (slices of the part, offsets in the whole, sizes)."""
        for box in itertools.product(*self.runs):
            yield tuple(slice(a, a + n) for a, _, n in box), tuple(g for _, g, _ in box), tuple(n for _, _, n in box)

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of `whole`."""
        part = whole.new_empty(self.local_shape)
        for here, offsets, sizes in self.boxes():
            part[here] = whole[_there(offsets, sizes)]
        return part

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write `part` where it belongs in `whole`."""
        for here, offsets, sizes in self.boxes():
            whole[_there(offsets, sizes)] = part[here]

    def rows(self, start: int, stop: int) -> Placement:
        """Return the placement of rows `start` to `stop` - 1 of this part."""
        kept = []
        for local, whole, length in self.runs[0]:
            first, last = max(local, start), min(local + length, stop)
            if first < last:
                kept.append((first - start, whole + first - local, last - first))
        return Placement(self.shape, (tuple(kept), *self.runs[1:]))


def _there(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def everything(shape: tuple[int, ...]) -> Placement:
    """Return the placement of a whole tensor."""
    return Placement(shape, tuple(((0, 0, size),) for size in shape))


def place(decl: ParamDecl, layout: Layout, at: Coordinates) -> Placement:
    """Return the part of a parameter that the rank `at` computes with (before sharding)."""
    runs: list[tuple[Run, ...]] = [((0, 0, size),) for size in decl.shape]
    if decl.expert:
        runs[0] = (_chunk(0, decl.shape[0], layout.expert, at.expert),)
    elif decl.tp_dim is not None:
        found: list[Run] = []
        start = filled = 0
        # A fused matrix is cut section by section, so that a rank has its own q, k and v heads.
        for size in decl.sections if decl.sections and decl.tp_dim == 0 else (decl.shape[decl.tp_dim],):
            _, whole, length = _chunk(start, size, layout.tensor, at.tensor)
            if found and sum(found[-1][1:]) == whole:  # neighbours: with one rank the sections are the whole
                found[-1] = (*found[-1][:2], found[-1][2] + length)
            else:
                found.append((filled, whole, length))
            start, filled = start + size, filled + length
        runs[decl.tp_dim] = tuple(found)
    return Placement(decl.shape, tuple(runs))


def _chunk(start: int, size: int, parts: int, index: int) -> Run:
    """The `index`-th of `parts` pieces of [start, start + size), all but the last of equal length (as `torch.chunk`)."""
    length = -(-size // parts)
    first = min(index * length, size)
    return 0, start + first, min(length, size - first)


def summed_over(decl: ParamDecl) -> Sum:
    """Return over which ranks a parameter's gradient is a sum."""
    return "experts" if decl.expert else "tokens" if decl.tp_dim is None else "dense"


def shards(decl: ParamDecl, layout: Layout) -> int:
    """Return among how many ranks sharding (FSDP) cuts the part of a rank; 1: it does not."""
    if layout.shard == 1:
        return 1
    return layout.tokens // layout.replicate // layout.expert if decl.expert else layout.shard * layout.context


def sharded(placement: Placement, decl: ParamDecl, layout: Layout, at: Coordinates) -> Placement:
    """Return what sharding leaves at `at` of a rank's part: its piece of the rows, in pieces of equal length but the last."""
    parts = shards(decl, layout)
    if parts == 1:
        return placement
    inside = ((at.shard * layout.context) + at.context) * layout.tensor + at.tensor
    index = inside // layout.expert if decl.expert else at.shard * layout.context + at.context
    _, start, length = _chunk(0, placement.local_shape[0], parts, index)
    return placement.rows(start, start + length)


def copies(decl: ParamDecl, layout: Layout) -> int:
    """Return how many ranks of a pipeline stage hold the same element."""
    parts = layout.expert if decl.expert else layout.tensor if decl.tp_dim is not None else 1
    return layout.tokens // parts // shards(decl, layout)


@dataclass(frozen=True)
class Part:
    """This process's part of a named tensor, and where it belongs in the whole."""

    tensor: Tensor
    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.placement.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def whole(self) -> bool:
        """Whether the part is all of it."""
        return self.placement == everything(self.shape)
