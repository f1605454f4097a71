"""Checkpoints: torch's distributed format in canonical names, whole or not there at all, and vouched for by hashes.

    RUN/checkpoints/step-00000100/
        manifest.json   what it is, and the size and xxh3_128 of every other file
        spec.json       the model's specification
        *.distcp, .metadata

torch loads a flipped byte without a word, so every file is hashed before anything is read from it. A checkpoint is written aside
and renamed; a kill at any moment leaves the previous ones as they were.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.core.config import parse, to_json
from surefoot.core.errors import CheckpointError, EngineError, SurefootError
from surefoot.core.files import disk_error, free_bytes, fsync_dir, hash_file, write_atomic
from surefoot.models import ModelSpec, Transformer
from surefoot.parallel import Part, Processes
from surefoot.train.config import CheckpointConfig
from surefoot.train.dcp import PartLoadPlanner, PartSavePlanner
from surefoot.train.finite import NotFiniteError, first_not_finite
from surefoot.train.retention import kept
from surefoot.train.state import TrainState, snapshot

MANIFEST, SPEC = "manifest.json", "spec.json"
ROOM_BYTES = 1 << 20  # for the files beside the tensors


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is. `tensors`: canonical name -> [dtype, shape]; `files`: name -> [bytes, xxh3_128]."""

    step: int
    position: int
    loss: float | None
    config_hash: str
    code: str
    layout: dict[str, int]
    tensors: dict[str, tuple[str, list[int]]]
    files: dict[str, tuple[int, str]]
    created: float
    parent: str | None = None
    data: dict[str, Any] | None = None  # where the planning of a mixture stood
    version: int = 1


def step_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` stands."""
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint in `folder`, ascending; what was left aside by a kill does not count."""
    return [step for step in _steps(folder) if (step_path(folder, step) / MANIFEST).is_file()]


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a directory in `folder`, whole or not, ascending."""
    return sorted(int(path.name[5:]) for path in folder.glob("step-" + "[0-9]" * 8) if path.is_dir())


def read_manifest(path: Path) -> Manifest:
    """Read `path`/manifest.json. Raises `CheckpointError` when there is none or it is damaged."""
    try:
        table = json.loads((path / MANIFEST).read_bytes())
        return Manifest(**table)
    except FileNotFoundError:
        raise CheckpointError("no checkpoint is here", where=str(path), remedy=_alternative(path)) from None
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"its manifest cannot be read: {error}", where=str(path), remedy=_alternative(path)) from None


def verify(path: Path) -> Manifest:
    """Hash every file of the checkpoint `path`; raise `CheckpointError` naming the first that is not what was written."""
    manifest = read_manifest(path)
    for name, (size, digest) in manifest.files.items():
        file = path / name
        if not file.is_file():
            problem = "is missing"
        elif file.stat().st_size != size:
            problem = f"is cut short: {file.stat().st_size} bytes instead of {size}"
        elif hash_file(file) != digest:
            problem = "was altered: its hash is not the one recorded"
        else:
            continue
        raise CheckpointError(f"{name} {problem}", where=str(path), remedy=_alternative(path))
    return manifest


def newest_whole(folder: Path, before: int | None = None) -> Path | None:
    """Return the newest checkpoint in `folder` (of a step below `before`) whose every file is intact, or None."""
    for step in reversed(list_steps(folder)):
        if before is None or step < before:
            with contextlib.suppress(CheckpointError):
                verify(step_path(folder, step))
                return step_path(folder, step)
    return None


def _alternative(path: Path) -> str:
    step = int(path.name[5:]) if path.name.startswith("step-") and path.name[5:].isdigit() else None
    with contextlib.suppress(RecursionError):
        whole = None if step is None else newest_whole(path.parent, before=step)
        if whole is not None:
            return f"the newest whole one before it is {whole.name}: remove this one and resume"
    return "name a run or a checkpoint that is whole"


def load(path: Path, state: TrainState, processes: Processes) -> Manifest:
    """Overwrite the live tensors of `state` with the checkpoint `path`, from whatever layout it was saved in.

    Raises `CheckpointError` for damage, or tensors that this model and optimizer do not have.
    """
    manifest = verify(path)
    tensors = state.tensors()
    _compare(path, manifest, tensors)
    _read(path, tensors, processes.size == 1)
    state.loaded(tensors, manifest.step, manifest.position)
    return manifest


def _compare(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor | Part]) -> None:
    remedy = "resume with the configuration the run was started with"
    for name, tensor in tensors.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"holds no tensor {name}", where=str(path), remedy=remedy)
        if list(saved[1]) != list(tensor.shape):
            raise CheckpointError(f"{name} has shape {saved[1]}, not {list(tensor.shape)}", where=str(path), remedy=remedy)
        if saved[0] != _dtype(tensor):
            raise CheckpointError(f"{name} is {saved[0]}, not {_dtype(tensor)}", where=str(path), remedy=remedy)


def _read(path: Path, tensors: Mapping[str, Tensor | Part], alone: bool) -> None:
    try:
        with _quiet():
            dcp_load(dict(tensors), checkpoint_id=path, no_dist=alone, planner=PartLoadPlanner())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"cannot be read: {first}", where=str(path), remedy=_alternative(path)) from error


def load_model(path: Path | str, *, ema: bool = False, dtype: torch.dtype | None = None) -> tuple[ModelSpec, Transformer]:
    """Return the model of a run (its newest whole checkpoint) or of a checkpoint, its weights as they were saved.

    `ema`: the moving average instead of the weights. Raises `CheckpointError`.
    """
    path = Path(path)
    if (path / "checkpoints").is_dir():
        newest = newest_whole(path / "checkpoints")
        if newest is None:
            raise CheckpointError("the run has no whole checkpoint", where=str(path), remedy="train it further, or name another run")
        path = newest
    manifest = verify(path)
    spec = parse(ModelSpec, json.loads((path / SPEC).read_bytes()), where=str(path / SPEC))
    prefix = "ema." if ema else "model."
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    if not saved:
        raise CheckpointError("holds no moving average", where=str(path), remedy="train with train.ema_decay, or leave out --ema")
    if ema:  # the average covers parameters; buffers are the model's
        saved |= {name: entry for name, entry in manifest.tensors.items() if name.endswith("router_bias")}
    tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in saved.items()}
    _read(path, tensors, alone=True)
    kind = dtype or next(iter(tensors.values())).dtype
    model = Transformer(spec, device="meta", dtype=kind)
    state = {name.removeprefix(prefix).removeprefix("model."): tensor for name, tensor in tensors.items()}
    cast = {name: tensor if name.endswith("router_bias") else tensor.to(kind) for name, tensor in state.items()}
    model.load_state_dict(cast, assign=True)
    for layer in model.moe_layers():
        layer.counts = torch.zeros(layer.spec.experts, dtype=torch.int64)
    return spec, model.eval()


@dataclass
class Saver:
    """Writes checkpoints of `state` into `folder`, in a thread.

    The copy that a checkpoint is written from is made by that thread while the next forward and backward passes run; only the
    optimizer changes weights, so `captured` must be awaited just before it does. A save that fails on one process fails on all,
    with the same error; it shows as `failed` and is raised by the next `save` or `finish`.
    """

    folder: Path
    state: TrainState
    config: CheckpointConfig
    processes: Processes
    facts: Mapping[str, Any]  # config_hash, code, layout
    on_saved: Callable[..., None]
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _captured: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _group: dist.ProcessGroup | None = None
    _saved: int = -1

    def __post_init__(self) -> None:
        if self.processes.size > 1:
            # The thread's collectives must not interleave with those of training.
            self._group = dist.new_group(backend="gloo")
        if self.processes.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)
            for step in _steps(self.folder):
                if step > self.state.step:
                    # Damaged, or of a future that this run does not continue: it must not count as the newest.
                    self._remove(step)
        if self.state.step in list_steps(self.folder):
            self._saved = self.state.step  # what the run was taken up from: replacing it could only lose it

    @property
    def failed(self) -> bool:
        """Whether a save went wrong."""
        return self._error is not None

    def save(self, *, loss: float | None, data: dict[str, Any] | None = None) -> float:
        """Begin to save the present state (`data`: where a mixture's planning stands).

        Return the seconds this thread was held up: an earlier save was still being written.
        """
        start = time.perf_counter()
        self.finish()
        if self.state.step == self._saved:
            return time.perf_counter() - start
        self._saved = self.state.step
        tensors = self.state.tensors()
        tensors["rng.torch"] = torch.get_rng_state()
        manifest = Manifest(
            step=self.state.step,
            position=self.state.position,
            loss=loss,
            tensors={name: (_dtype(tensor), list(tensor.shape)) for name, tensor in tensors.items()},
            files={},
            created=time.time(),
            data=data,
            parent=next((step_path(self.folder, step).name for step in reversed(list_steps(self.folder))), None),
            **self.facts,
        )
        self._captured.clear()
        self._thread = threading.Thread(target=self._work, args=(tensors, manifest), name="surefoot-checkpoint")
        self._thread.start()
        if not self.config.background:
            self.finish()
        return time.perf_counter() - start

    def captured(self) -> float:
        """Wait until the copy is made; return the seconds waited. Call before the weights change."""
        start = time.perf_counter()
        if self._thread is not None:
            self._captured.wait()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait until the save under way is on the disk; raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self, tensors: dict[str, Tensor | Part], manifest: Manifest) -> None:
        try:
            start = time.perf_counter()
            copies = snapshot(tensors, self._buffers)
            self._captured.set()
            self._write(copies, manifest)
            self.on_saved(step=manifest.step, path=str(step_path(self.folder, manifest.step)), seconds=time.perf_counter() - start)
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that trains, which raises it
            self._error = error
        finally:
            self._captured.set()

    def _write(self, copies: dict[str, Tensor | Part], manifest: Manifest) -> None:
        # Each pipeline stage knows its own tensors.
        for theirs in self.processes.gather(manifest.tensors, self._group):
            manifest.tensors.update(theirs)
        aside = self.folder / f".step-{manifest.step:08d}.writing"
        try:
            self._together(lambda: self._admit(copies, manifest, aside))
            self._together(lambda: self._store(copies, aside))
            self._together(lambda: self._publish(aside, manifest) if self.processes.rank == 0 else None)
        except SurefootError:
            if self.processes.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _together(self, action: Callable[[], None]) -> None:
        """Do `action` on every process; when it fails on one, raise the error of the first such process on all of them."""
        problem: SurefootError | None = None
        try:
            action()
        except (CheckpointException, OSError, RuntimeError, SurefootError) as error:
            problem = _explain(error, self.folder)
            if problem is not error:
                problem.__cause__ = error
        first = next((one for one in self.processes.gather(problem, self._group) if one is not None), None)
        if first is not None:
            raise first

    def _admit(self, copies: dict[str, Tensor | Part], manifest: Manifest, aside: Path) -> None:
        """Raise unless every number of the checkpoint is finite and there is room for it."""
        name = first_not_finite(copies)
        if name is not None:
            raise NotFiniteError(
                f"step {manifest.step} left {name} not finite",
                where=str(self.folder.parent),
                remedy="it was not saved; resume from the checkpoint before it with a lower optimizer.lr",
                culprit=name,
            )
        if self.processes.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            needed = sum(math.prod(shape) * getattr(torch, kind).itemsize for kind, shape in manifest.tensors.values()) + ROOM_BYTES
            free = free_bytes(self.folder)
            if free < needed:
                what = f"the disk has {free / 1e6:.1f} MB free, a checkpoint needs {needed / 1e6:.1f} MB"
                raise EngineError(what, where=str(self.folder), remedy="free some space, then: surefoot resume")

    def _store(self, copies: dict[str, Tensor | Part], aside: Path) -> None:
        alone = self.processes.size == 1
        with _quiet():
            dcp_save(copies, checkpoint_id=aside, process_group=self._group, no_dist=alone, planner=PartSavePlanner())

    def _publish(self, aside: Path, manifest: Manifest) -> None:
        write_atomic(aside / SPEC, to_json(self.state.model.spec))
        files = sorted(path for path in aside.iterdir() if path.is_file())
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        table = asdict(manifest) | {"files": {file.name: (file.stat().st_size, hash_file(file)) for file in files}}
        write_atomic(aside / MANIFEST, json.dumps(table, indent=1) + "\n")
        fsync_dir(aside)
        target = step_path(self.folder, manifest.step)
        if target.exists():
            self._remove(manifest.step)
        aside.rename(target)
        fsync_dir(self.folder)
        self._retire()

    def _retire(self) -> None:
        losses = {step: read_manifest(step_path(self.folder, step)).loss for step in list_steps(self.folder)}
        for step in sorted(set(losses) - kept(losses, self.config)):
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Out of the way first: a kill during the removal must not leave half a checkpoint under its name.
        doomed = self.folder / f".step-{step:08d}.removing"
        step_path(self.folder, step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _explain(error: BaseException, folder: Path) -> SurefootError:
    """Return what went wrong in writing a checkpoint into `folder` as an error of one line."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    if isinstance(cause, SurefootError):
        return cause
    if isinstance(cause, OSError):
        return disk_error(cause, folder)
    said = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
    if free_bytes(folder) < ROOM_BYTES:  # torch's writer reports a full disk as a failed write, without a cause
        return EngineError(f"the disk is full ({said})", where=str(folder), remedy="free some space, then: surefoot resume")
    return EngineError(f"a checkpoint could not be written: {said}", where=str(folder), remedy="resume from the last one")


def _dtype(tensor: Tensor | Part) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's notices about its own deprecated calls; errors still raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
