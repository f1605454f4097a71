"""Rows of fixed length out of documents: which tokens, which labels, and where documents begin.

A row never lets one document see or predict another: `documents` numbers them within the row, positions restart, and the last token
of a document has no label.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from surefoot.data.shards import Stream

IGNORED = -100
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Arrays [rows, length]: tokens and labels int64, positions int64, documents int32 (-1: padding)."""

    tokens: Int64
    labels: Int64
    positions: Int64
    documents: npt.NDArray[np.int32]


class Packing(Protocol):
    """A numbered collection of rows."""

    @property
    def samples(self) -> int:
        """How many rows there are."""

    def rows(self, numbers: Int64) -> Rows:
        """Return the rows of these numbers."""

    def trained(self, numbers: Int64) -> int:
        """Return how many labels those rows hold, without making them."""


@dataclass(frozen=True)
class StreamPacking:
    """The token stream cut every `length` tokens: row k holds tokens k*length.. and predicts k*length+1...

    Neighbouring rows share one token (the last label of one is the first input of the next), so every token is a label exactly once
    an epoch, but for the first of each document, which begins it and is predicted by nothing. The last row is padded.
    """

    stream: Stream
    starts: npt.NDArray[np.uint64]  # of the documents, and the end of the stream
    length: int
    pad: int

    @property
    def samples(self) -> int:
        return -(-(int(self.starts[-1]) - 1) // self.length)

    def rows(self, numbers: Int64) -> Rows:
        total, length = int(self.starts[-1]), self.length
        window = np.full((len(numbers), length + 1), self.pad, dtype=np.int64)
        begins = np.zeros((len(numbers), length + 1), dtype=np.bool_)
        origins = numbers * length
        for row, origin in enumerate(origins.tolist()):
            items = self.stream.read(origin, min(origin + length + 1, total))
            window[row, : len(items)] = items
        low = np.searchsorted(self.starts, origins.astype(np.uint64), side="left")
        high = np.searchsorted(self.starts, (origins + length).astype(np.uint64), side="right")
        which = np.repeat(np.arange(len(numbers)), high - low)
        begins[which, self.starts[_ranges(low, high)].astype(np.int64) - origins[which]] = True
        labels = np.where(begins[:, 1:], IGNORED, window[:, 1:])
        inside = origins[:, None] + np.arange(length) < total
        labels[~inside] = IGNORED
        return _assemble(window[:, :-1], labels, begins[:, :-1], inside)

    def trained(self, numbers: Int64) -> int:
        first = numbers * self.length
        last = np.minimum(first + self.length, int(self.starts[-1]) - 1)
        begun = np.searchsorted(self.starts, last.astype(np.uint64), side="right")
        before = np.searchsorted(self.starts, first.astype(np.uint64), side="right")
        return int((last - first - (begun - before)).sum())


@dataclass(frozen=True)
class ConversationPacking:
    """Whole conversations packed into rows of `length`, best fit decreasing; longer ones are cut to `length` tokens.

    `order` lists the conversations row by row and `bounds` where each row begins in it; `cut` counts those cut and `dropped` those
    with nothing to train on in their first `length` tokens.
    """

    stream: Stream
    flags: Stream
    starts: npt.NDArray[np.uint64]
    length: int
    pad: int
    order: Int64
    bounds: Int64
    labels_per_row: Int64
    cut: int
    dropped: int

    @property
    def samples(self) -> int:
        return len(self.bounds) - 1

    def rows(self, numbers: Int64) -> Rows:
        shape = (len(numbers), self.length)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        begins, inside = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        for row, number in enumerate(numbers.tolist()):
            place = 0
            for member in self.order[self.bounds[number] : self.bounds[number + 1]].tolist():
                start = int(self.starts[member])
                size = min(int(self.starts[member + 1]) - start, self.length)
                here = slice(place, place + size)
                tokens[row, here] = self.stream.read(start, start + size)
                trained = self.flags.read(start + 1, start + size) != 0
                labels[row, place : place + size - 1] = np.where(trained, tokens[row, place + 1 : place + size], IGNORED)
                begins[row, place], inside[row, here] = True, True
                place += size
        return _assemble(tokens, labels, begins, inside)

    def trained(self, numbers: Int64) -> int:
        return int(self.labels_per_row[numbers].sum())


def pack_conversations(stream: Stream, flags: Stream, starts: npt.NDArray[np.uint64], length: int, pad: int) -> ConversationPacking:
    """Assign conversations to rows; a pure function of their lengths and trained tokens."""
    sizes = np.diff(starts.astype(np.int64))
    labels = np.array(
        [
            int(np.count_nonzero(flags.read(start + 1, start + min(size, length))))
            for start, size in zip(starts[:-1].tolist(), sizes.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    usable = np.flatnonzero(labels > 0)
    members = best_fit(np.minimum(sizes[usable], length), length)
    rows = [usable[np.array(row, dtype=np.int64)] for row in members]
    return ConversationPacking(
        stream=stream,
        flags=flags,
        starts=starts,
        length=length,
        pad=pad,
        order=np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64),
        bounds=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        labels_per_row=np.array([labels[row].sum() for row in rows], dtype=np.int64),
        cut=int((sizes[usable] > length).sum()),
        dropped=int(len(sizes) - len(usable)),
    )


def best_fit(sizes: Int64, capacity: int) -> list[list[int]]:
    """Put items of `sizes` into bins of `capacity`, largest first, each into the fullest bin that takes it.

    Best fit decreasing needs at most 11/9 of the fewest bins, plus 4 (Johnson 1974). Costs O(n log n) comparisons.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, bin), sorted
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        place = bisect_left(room, (size, -1))
        if place == len(room):
            bins.append([])
            free, number = capacity, len(bins) - 1
        else:
            free, number = room.pop(place)
        bins[number].append(item)
        if free > size:
            insort(room, (free - size, number))
    return bins


def _assemble(tokens: Int64, labels: Int64, begins: npt.NDArray[np.bool_], inside: npt.NDArray[np.bool_]) -> Rows:
    """Number the documents and positions of each row from the places where documents begin."""
    columns = np.arange(tokens.shape[1], dtype=np.int64)
    begins = begins.copy()
    begins[:, 0] = True  # a row cut out of a document begins it anew
    documents = np.cumsum(begins, axis=1, dtype=np.int32) - np.int32(1)
    positions = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    documents[~inside] = -1
    positions[~inside] = 0
    return Rows(np.ascontiguousarray(tokens), labels, positions, documents)


def _ranges(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Concatenate low[i]..high[i]-1 over i."""
    sizes = high - low
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(low - ends + sizes, sizes), dtype=np.int64)
