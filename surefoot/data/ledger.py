"""The ledger: which pieces of which documents each step trained on, and the audit that proves that nothing was lost or repeated.

A record holds one step: the pieces [source, n, lo, hi] (tokens lo..hi-1 of the n-th document its source gave, counted over epochs), and
a digest that chains it to the step before. Records are appended when a step is done; a run that is taken up from a checkpoint first cuts
off what that checkpoint does not know. A death can tear the last record at most, and a torn one is cut off too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from surefoot.core.errors import DataError
from surefoot.core.files import disk_error

_HEAD = struct.Struct("<4sQII16s")  # mark, step, pieces, bytes of the compressed pieces, digest
_MARK = b"SfL1"
_NOTHING = b"\0" * 16

Pieces = npt.NDArray[np.int64]
"""[pieces, 4]: source, n, lo, hi."""


@dataclass(frozen=True)
class Entry:
    """One step. `digest` stands for all pieces of all steps up to this one."""

    step: int
    pieces: Pieces
    digest: bytes


def chained(before: bytes, step: int, pieces: Pieces) -> bytes:
    """Return the digest of `step` after a history with the digest `before`."""
    payload = np.ascontiguousarray(pieces, dtype="<i8").tobytes()
    return xxhash.xxh3_128_digest(before + step.to_bytes(8, "little") + payload)


class Ledger:
    """Appends to the file `path`, from the step after `step`; what stands there of later steps is cut off.

    Raises `DataError` when the file does not reach back to `step`, or holds something else.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path, self.step, self.digest = path, step, _NOTHING
        end, last = 0, 0
        for entry, stop in _scan(path):
            if entry.step > step:
                break
            end, last, self.digest = stop, entry.step, entry.digest
        if last != step:
            what = f"ends at step {last}, the run goes on after step {step}"
            raise DataError(what, where=str(path), remedy="the ledger was cut or belongs to another run; restore it")
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(end)
        except OSError as error:
            raise disk_error(error, path) from error

    def append(self, step: int, pieces: Pieces) -> None:
        """Note that `step`, the one after the last, was trained on `pieces`."""
        if step != self.step + 1:
            raise ValueError(f"step {step} cannot follow step {self.step}")
        self.digest = chained(self.digest, step, pieces)
        packed = zstandard.compress(np.ascontiguousarray(pieces, dtype="<i8").tobytes())
        try:
            self._file.write(_HEAD.pack(_MARK, step, len(pieces), len(packed), self.digest) + packed)
        except OSError as error:
            raise disk_error(error, self.path) from error
        self.step = step

    def sync(self) -> None:
        """Flush to the disk: called before a checkpoint that counts on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Entry]:
    """Yield the steps in order, up to a torn record. Raises `DataError` when a record is not what was written."""
    for entry, _ in _scan(path):
        yield entry


def _scan(path: Path) -> Iterator[tuple[Entry, int]]:
    if not path.exists():
        return
    before, place = _NOTHING, 0
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            mark, step, count, size, digest = _HEAD.unpack(head)
            packed = file.read(size)
            if len(packed) < size:
                return
            place += _HEAD.size + size
            pieces = _unpacked(packed, count) if mark == _MARK else None
            if pieces is None or chained(before, step, pieces) != digest:
                raise DataError(f"the record of step {step} is damaged", where=str(path), remedy="restore the file from a copy")
            before = digest
            yield Entry(step, pieces, digest), place


def _unpacked(packed: bytes, count: int) -> Pieces | None:
    try:
        flat = np.frombuffer(zstandard.decompress(packed, max_output_size=32 * count), dtype="<i8")
    except zstandard.ZstdError:
        return None
    return flat.reshape(count, 4) if flat.size == 4 * count else None


@dataclass
class Audit:
    """What a ledger proves. By source: `documents` given without a gap and trained whole, `tokens` trained. `unfinished`: documents
    given and not yet trained whole, which wait in the packer's state. `problems`: what does not add up, in words."""

    steps: int = 0
    digest: bytes = _NOTHING
    documents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unfinished: int = 0
    problems: list[str] = field(default_factory=list)


def audit(entries: Iterator[Entry], names: Sequence[str], length: Callable[[int, int], int]) -> Audit:
    """Check that every step follows the one before, that no token of a document is trained twice, and none is left out of a document
    that is done, nor a document of those that each source gave.

    length: (source, n) -> tokens of that document. What a run has begun and not yet ended is `unfinished`, not lost.
    """
    found = Audit(documents=[0] * len(names), tokens=[0] * len(names))
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of documents that are not whole yet
    whole: list[set[int]] = [set() for _ in names]  # documents that are whole, beyond the first `documents`
    for entry in entries:
        if entry.step != found.steps + 1:
            found.problems.append(f"step {entry.step} follows step {found.steps}")
        found.steps, found.digest = entry.step, entry.digest
        for source, n, low, high in entry.pieces.tolist():
            size = length(source, n)
            if not 0 <= low < high <= size:
                found.problems.append(f"step {entry.step}: document {n} of '{names[source]}' has no tokens {low} to {high}")
                continue
            known = parts.setdefault((source, n), [])
            done = n < found.documents[source] or n in whole[source]
            if done or any(low < stop and start < high for start, stop in known):
                found.problems.append(f"step {entry.step}: tokens {low} to {high} of document {n} of '{names[source]}' are trained twice")
            known.append((low, high))
            found.tokens[source] += high - low
            if done or sum(stop - start for start, stop in known) == size:
                del parts[source, n]
                whole[source].add(n)
                while found.documents[source] in whole[source]:
                    whole[source].remove(found.documents[source])
                    found.documents[source] += 1
    for source, ahead in enumerate(whole):
        last = max([*ahead, *(n for one, n in parts if one == source)], default=-1)
        found.unfinished += max(0, last + 1 - found.documents[source]) - len(ahead)
    return found
