"""`Trace`: what one step computed, every tensor whole and by its canonical name, whatever the sharding that computed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from surefoot.core.errors import SurefootError

Phase = Literal["forward", "backward", "reduction", "clipping", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In data-flow order: activations, gradients of activations, gradients of parameters, those after clipping, what the step left."""

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

Rectangle = tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]
"""(slices of the part, offsets in the whole, sizes): what a placement of a sharded tensor yields."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TraceError(SurefootError):
    """A trace that cannot be compared because it contradicts itself."""


@dataclass(frozen=True)
class Owner:
    """`rank` computed the elements `slices`: one half-open interval (start, stop) a dimension."""

    rank: int
    slices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Entry:
    """One whole tensor. `order`: its place in the order of execution within the phase; `owners`: who computed which rectangle."""

    name: str
    phase: Phase
    order: int
    tensor: Tensor
    owners: tuple[Owner, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The tensors of a step, and the facts that explain them: effective hyper-parameters, sample ids, step count, precision.

    Facts are compared exactly, but for those under "layout", which say how the work was done and may differ. A (phase, name) is unique:
    several micro-batches or steps need names of their own. Raises `TraceError`.
    """

    entries: tuple[Entry, ...]
    facts: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for entry in self.entries:
            if (entry.phase, entry.name) in seen:
                raise TraceError(f"'{entry.name}' is recorded twice in phase '{entry.phase}'", remedy="give each its own name")
            seen.add((entry.phase, entry.name))

    def ordered(self) -> list[Entry]:
        """Return the entries in data-flow order."""
        return sorted(self.entries, key=lambda entry: (PHASES.index(entry.phase), entry.order))

    def find(self, phase: str, name: str) -> Entry | None:
        """Return the entry of this phase and name, if it was recorded."""
        return next((entry for entry in self.entries if (entry.phase, entry.name) == (phase, name)), None)


def bits(tensor: Tensor) -> Tensor:
    """Return `tensor` as integers of the same width, so that -0.0 is not 0.0 and a NaN is equal to itself."""
    plain = tensor.detach().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain).contiguous()
    return plain.view(BITS[plain.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assemble(
    shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[int, Tensor, Iterable[Rectangle]]]
) -> tuple[Tensor, tuple[Owner, ...], list[str]]:
    """Put the parts of several ranks together: (the whole tensor of `shape`, who owns which rectangle, what does not fit).

    parts: (rank, its tensor, where the rectangles of it belong). An element that two ranks hold must have the same bits on both; the
    first rank's is kept. An element that nobody holds is named and left zero.
    """
    whole = torch.zeros(tuple(shape), dtype=dtype)
    holder = torch.full(tuple(shape), -1, dtype=torch.int32)
    owners: list[Owner] = []
    faults: list[str] = []
    for rank, part, rectangles in parts:
        if part.dtype != dtype:
            faults.append(f"rank {rank} holds {_short(part.dtype)}, not {_short(dtype)}")
            continue
        part = part.detach().cpu()
        for here, offsets, sizes in rectangles:
            there = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            piece = part[here]
            if piece.shape != holder[there].shape:
                faults.append(f"rank {rank} holds {list(piece.shape)} for a rectangle of {list(holder[there].shape)} at {list(offsets)}")
                continue
            taken = holder[there] >= 0
            differs = taken & (bits(piece) != bits(whole[there])) if taken.any() else taken
            if differs.any():
                first = torch.nonzero(differs)[0].tolist()
                element = [start + index for start, index in zip(offsets, first, strict=True)]
                other = int(holder[there][tuple(first)])
                faults.append(f"ranks {other} and {rank} hold different values of {int(differs.sum())} elements, the first at {element}")
            whole[there] = torch.where(taken, whole[there], piece)
            holder[there] = torch.where(taken, holder[there], rank)
            owners.append(Owner(rank, tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))))
    missing = holder < 0
    if missing.any():
        faults.append(f"no rank holds {int(missing.sum())} of {holder.numel()} elements, the first at {torch.nonzero(missing)[0].tolist()}")
    return whole, tuple(owners), faults


def pairs(reference: Trace, candidate: Trace) -> list[tuple[Entry | None, Entry | None]]:
    """Return the entries of both side by side, in data-flow order; None where one lacks it."""
    theirs = {(entry.phase, entry.name): entry for entry in candidate.entries}
    both: list[tuple[Entry | None, Entry | None]] = [(ours, theirs.pop((ours.phase, ours.name), None)) for ours in reference.ordered()]
    both += [(None, extra) for extra in theirs.values()]

    def place(pair: tuple[Entry | None, Entry | None]) -> tuple[int, int]:
        entry = pair[0] or pair[1]
        assert entry is not None
        return PHASES.index(entry.phase), entry.order

    return sorted(both, key=place)


def unlike(ours: Entry | None, theirs: Entry | None) -> str:
    """Return what makes two entries incomparable; nothing if they are not."""
    if theirs is None:
        return "the candidate has no such tensor"
    if ours is None:
        return "the reference has no such tensor"
    x, r = theirs.tensor, ours.tensor
    if x.shape != r.shape:
        return f"its shape is {list(x.shape)}, of the reference {list(r.shape)}"
    if x.is_floating_point() != r.is_floating_point():
        return f"it is {x.dtype}, of the reference {r.dtype}".replace("torch.", "")
    if not x.is_floating_point():
        different = int((x != r).sum())
        return f"{different} of {x.numel()} whole numbers differ" if different else ""
    odd = strange(x, r)
    return f"{odd} of {x.numel()} elements are NaN or infinite, unlike the reference" if odd else ""


def strange(x: Tensor, r: Tensor) -> int:
    """Return how many elements are non-finite on one side only, or another kind of non-finite."""
    odd = (x.isnan() != r.isnan()) | (x.isposinf() != r.isposinf()) | (x.isneginf() != r.isneginf())
    return int(odd.sum())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
