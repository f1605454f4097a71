"""The run directory: resolved config, environment, event log, checkpoints and report of one run, held by one process.

    RUN/config.toml        the resolved configuration
    RUN/environment.json   versions, hardware, git commit and command line of each start
    RUN/events.jsonl       the event log, which everything else is read from
    RUN/checkpoints/       step-00000100/, ...
    RUN/ledger.bin         of a mixture: which pieces of which documents each step trained on
    RUN/mixture.jsonl      and every change of its weights
    RUN/evidence.json      of the trial of its layout, tensor by tensor
    RUN/report.html        made by `surefoot report`

One process at a time writes to it; any number may read.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.core.config import Config, dumps
from surefoot.core.environment import environment
from surefoot.core.errors import RunError
from surefoot.core.events import EventLog
from surefoot.core.files import disk_error, write_atomic

_OWN = (
    "config.toml",
    "environment.json",
    "events.jsonl",
    "checkpoints",
    "evidence.json",
    "ledger.bin",
    "mixture.jsonl",
    "reweight.json",
    "report.html",
)


class Run:
    """A run directory under lock; use as a context manager. Make one with `Run.create` or `Run.open`.

    The lock is the kernel's (``flock``), so a process that dies, however it dies, leaves the directory free.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.log = EventLog(path / "events.jsonl")

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @classmethod
    def create(cls, path: Path | str, config: Config, *, overwrite: bool = False) -> Self:
        """Make the directory `path` for a new run of `config`, lock it and record config and environment.

        Raises `RunError` when it is in use, holds a run already (unless `overwrite`), or holds anything else.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise RunError("is a file, not a directory", where=str(path), remedy="choose another path for the run")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, path) from error
        lock = _acquire(path)
        try:
            _clear(path, overwrite)
            run = cls(path, lock)
        except BaseException:
            os.close(lock)
            raise
        run.checkpoints.mkdir(exist_ok=True)
        write_atomic(run.config_path, dumps(config))
        run.record_environment()
        return run

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Lock the existing run at `path`; raises `RunError` when there is none or it is in use."""
        path = require(path)
        lock = _acquire(path)
        try:
            run = cls(path, lock)
        except BaseException:
            os.close(lock)
            raise
        run.checkpoints.mkdir(exist_ok=True)
        return run

    def record_environment(self) -> None:
        """Write where and with what this process runs to ``environment.json``."""
        write_atomic(self.path / "environment.json", json.dumps(environment(), indent=2, sort_keys=True) + "\n")

    def close(self) -> None:
        """Close the log and free the directory; closing twice is harmless."""
        self.log.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def require(path: Path | str) -> Path:
    """Return `path` when it is a run directory; raises `RunError` otherwise. Takes no lock: reading a live run is fine."""
    path = Path(path)
    if not path.exists():
        raise RunError("no such run directory", where=str(path), remedy="check the path; `surefoot train` makes one")
    if not (path / "config.toml").is_file():
        raise RunError(
            "is not a run directory (it has no config.toml)", where=str(path), remedy="give the directory that `surefoot train` made"
        )
    return path


def _acquire(path: Path) -> int:
    """Return a descriptor that holds the lock of `path`; raises `RunError` when another process has it."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        held = f"in use by process {owner}" if owner else "in use by another process"
        raise RunError(held, where=str(path), remedy="wait for it to end, stop it, or choose another run directory") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _clear(path: Path, overwrite: bool) -> None:
    """Leave `path` without a run, or refuse: only what a run itself makes is ever removed."""
    present = {entry.name for entry in path.iterdir()} - {".lock"}
    foreign = sorted(present - set(_OWN))
    if foreign and "config.toml" not in present:
        raise RunError(f"holds something that is not a run ('{foreign[0]}')", where=str(path), remedy="choose an empty or new directory")
    if present and not overwrite:
        raise RunError(
            "already holds a run", where=str(path), remedy=f"go on with `surefoot resume {path}`, or add --overwrite to start anew"
        )
    for name in sorted(present & set(_OWN)):
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
