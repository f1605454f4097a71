"""The event log: everything that happens in a run, one JSON line each, appended and never rewritten.

A line is appended under the kernel's file lock, so several processes may append to one log. A
crash can tear at most the last line; a reader skips it, and the next writer begins on a fresh line.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.files import disk_error

DURABLE = frozenset({"start", "checkpoint", "interrupt", "finish", "error"})
"""Kinds that must survive a power cut: each is flushed to the disk before `append` returns."""


@dataclass(frozen=True)
class Event:
    """One line of the log: `time` in seconds since 1970, `kind`, and the fields of that kind."""

    time: float
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends events to the file `path`, which is made if need be."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event; numbers that are not finite become the strings ``nan``, ``inf`` and ``-inf``, which JSON can hold.

        Raises `EngineError` when the disk is full.
        """
        line = json.dumps({"time": time.time(), "kind": kind, **fields}, default=_plain, allow_nan=True)
        if "NaN" in line or "Infinity" in line:
            line = json.dumps({"time": time.time(), "kind": kind, **_finite(fields)}, default=_plain, allow_nan=False)
        payload = line.encode("utf-8") + b"\n"
        try:
            # Under the lock a file that ends inside a line was torn by a death, not by a writer still at work.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                remaining = b"\n" + payload if self._is_torn() else payload
                while remaining:
                    remaining = remaining[os.write(self._descriptor, remaining) :]
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            if kind in DURABLE:
                os.fsync(self._descriptor)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def close(self) -> None:
        """Close the file; appending afterwards is an error. Closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_torn(self) -> bool:
        """Tell whether the file ends inside a line: a writer died while writing it."""
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"


def read(path: Path | str) -> Iterator[Event]:
    """Yield the events of the log `path` in file order, skipping torn lines; a missing file has none."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - the with statement below owns it
    except FileNotFoundError:
        return
    with file:
        for line in file:
            event = _parse(line)
            if event is not None:
                yield event


def _parse(line: bytes) -> Event | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "time" not in record or "kind" not in record:
        return None
    return Event(float(record.pop("time")), str(record.pop("kind")), record)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    """Return what JSON can hold for a path, a 0-d tensor or a NumPy number."""
    return _finite(value.item()) if hasattr(value, "item") else str(value)
