"""Checkpoints under damage and sudden death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.config import dumps
from surefoot.core.errors import CheckpointError, EngineError
from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.parallel import Processes
from surefoot.train import TrainConfig, checkpoint, fit, load_model
from surefoot.train.checkpoint import list_steps, newest_whole, read_manifest, step_path, verify
from tests.spawning import run_ranks
from tests.train.conftest import Configure

SCRIPT = """
import sys
from surefoot.core.config import load
from surefoot.core.rundir import Run
from surefoot.train import TrainConfig, fit
config = load(TrainConfig, sys.argv[1])
resume = sys.argv[2] == "resume"
with Run.open(config.run) if resume else Run.create(config.run, config) as run:
    print("ready", flush=True)
    fit(config, run, resume=resume)
"""
PAIR = """
import os, sys, time
from contextlib import nullcontext
from pathlib import Path
from surefoot.core.config import load
from surefoot.core.rundir import Run
from surefoot.train import TrainConfig, fit
config = load(TrainConfig, sys.argv[1])
resume, rank = sys.argv[2] == "resume", int(os.environ["RANK"])
with (Run.open(config.run) if resume else Run.create(config.run, config)) if rank == 0 else nullcontext() as run:
    while not Path(config.run).is_dir():
        time.sleep(0.01)
    (Path(config.run) / f"pid{rank}").write_text(str(os.getpid()))
    fit(config, run, resume=resume)
"""


def train(config, *, resume: bool = False) -> None:  # type: ignore[no-untyped-def]
    with Run.open(config.run) if resume else Run.create(config.run, config) as run:
        fit(config, run, resume=resume)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damage_is_refused_and_the_one_before_is_named(configure: Configure, damage: str) -> None:
    config = configure(train={"steps": 4}, checkpoint={"every": 2, "keep_last": 2})
    train(config)
    folder = Path(config.run) / "checkpoints"
    newest = step_path(folder, 4)
    file = max((path for path in newest.iterdir() if path.suffix == ".distcp"), key=lambda path: path.stat().st_size)
    if damage == "flip":
        flip(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "remove":
        file.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        verify(newest)
    assert "step-00000002" in caught.value.remedy
    assert newest_whole(folder) == step_path(folder, 2)
    train(configure(train={"steps": 4}, checkpoint={"every": 2}), resume=True)  # takes up step 2 and goes on
    assert verify(step_path(folder, 4)).step == 4


def test_a_full_disk_leaves_the_previous_checkpoint(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(train={"steps": 2}, checkpoint={"every": 2})
    train(config)
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: 10)
    with pytest.raises(EngineError, match="free"):
        train(configure(train={"steps": 4}), resume=True)
    folder = Path(config.run) / "checkpoints"
    assert list_steps(folder) == [2]
    assert verify(step_path(folder, 2)).step == 2


def test_the_manifest_speaks_canonical_names(configure: Configure) -> None:
    config = configure(train={"ema_decay": 0.9})
    train(config)
    manifest = read_manifest(step_path(Path(config.run) / "checkpoints", 4))
    assert manifest.tensors["model.layers.0.mixer.qkv.weight"] == ["float64", [32, 16]]
    for name in ("optimizer.m.embed.weight", "optimizer.v.norm.weight", "ema.layers.1.ffn.down.weight", "rng.torch"):
        assert name in manifest.tensors
    assert manifest.position == 4 * 8
    assert all(len(digest) == 32 for _, digest in manifest.files.values())


def test_another_model_is_refused_by_tensor(configure: Configure) -> None:
    from tests.train.conftest import MODEL

    config = configure(train={"steps": 2})
    train(config)
    other = configure(train={"steps": 4}, model=MODEL | {"ffn": {"hidden": 32}})
    with pytest.raises(CheckpointError, match="gate_up"):
        train(other, resume=True)


@pytest.mark.slow
def test_killed_at_random_moments_it_resumes_bit_identical(configure: Configure, tmp_path: Path) -> None:
    """SIGKILL, wherever it falls (also inside a save): the run goes on and ends with the same bits."""
    import random

    tables = {"train": {"steps": 40, "precision": "float32"}, "checkpoint": {"every": 1, "keep_last": 2}}
    straight = configure("straight", **tables)
    train(straight)
    expected = load_model(straight.run)[1].state_dict()
    chance = random.Random(int(os.environ.get("SUREFOOT_SEED", "0")))
    for attempt in range(3):
        config = configure(f"killed{attempt}", **tables)
        file = tmp_path / f"killed{attempt}.toml"
        file.write_text(dumps(config))
        for kill in range(6):
            # Before the first checkpoint there is nothing to resume: such a run is started anew.
            started = (Path(config.run) / "checkpoints").is_dir() and newest_whole(Path(config.run) / "checkpoints") is not None
            if not started and Path(config.run).exists():
                import shutil

                shutil.rmtree(config.run)
            child = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(file), "resume" if started else "new"], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            child.stdout.readline()
            if kill < 5:
                time.sleep(chance.uniform(0.3, 2.0))
                child.send_signal(signal.SIGKILL)
            assert child.wait(timeout=120) in (0, -signal.SIGKILL)
            child.stdout.close()
            if child.returncode == 0:
                break
        found = load_model(config.run)[1].state_dict()
        assert newest_whole(Path(config.run) / "checkpoints") == step_path(Path(config.run) / "checkpoints", 40)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_an_interrupt_saves_and_the_continuation_is_the_same(configure: Configure, tmp_path: Path) -> None:
    tables = {"train": {"steps": 200, "precision": "float32"}}
    straight = configure("straight", **tables)
    train(straight)
    config = configure("interrupted", **tables)
    file = tmp_path / "interrupted.toml"
    file.write_text(dumps(config))
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(file), "new"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.readline()
    log = Path(config.run) / "events.jsonl"
    deadline = time.monotonic() + 60
    while sum(event.kind == "step" for event in read(log)) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 0
    child.stdout.close()
    steps = list_steps(Path(config.run) / "checkpoints")
    assert len(steps) == 1
    train(config, resume=True)
    expected, found = load_model(straight.run)[1].state_dict(), load_model(config.run)[1].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_damaged_newest_checkpoint_does_not_cost_the_good_ones(configure: Configure) -> None:
    config = configure(train={"steps": 4}, checkpoint={"every": 2, "keep_last": 2})
    train(config)
    folder = Path(config.run) / "checkpoints"
    (step_path(folder, 4) / "manifest.json").write_text("{")
    again = configure(train={"steps": 3}, checkpoint={"every": 1, "keep_last": 1, "keep_best": 0})
    train(again, resume=True)
    assert list_steps(folder) == [3]
    assert verify(step_path(folder, 3)).position == 3 * 8


def test_another_batch_size_on_resume_goes_on_where_the_data_stood(configure: Configure) -> None:
    config = configure(train={"steps": 2})
    train(config)
    train(configure(train={"steps": 4, "batch_size": 4}), resume=True)
    assert read_manifest(step_path(Path(config.run) / "checkpoints", 4)).position == 2 * 8 + 2 * 4


def test_stopping_right_after_a_resume_leaves_the_checkpoint_alone(configure: Configure) -> None:
    """It is the only one: written again, it would be gone for a moment."""
    config = configure(train={"steps": 2})
    train(config)
    path = step_path(Path(config.run) / "checkpoints", 2)
    before = (path / "manifest.json").stat()
    longer = configure(train={"steps": 6})
    with Run.open(longer.run) as run:
        assert fit(longer, run, resume=True, stop=lambda: True).interrupted
    after = (path / "manifest.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def full_disk_of_the_first(processes: Processes, config: TrainConfig) -> tuple[str, int]:
    if processes.rank == 0:
        checkpoint.free_bytes = lambda path: 10  # type: ignore[assignment]
    steps: list[int] = []
    try:
        if processes.rank == 0:
            with Run.create(config.run, config) as run:
                fit(config, run, lambda kind, fields: steps.append(fields["step"]) if kind == "step" else None)
        else:
            fit(config, None)
    except EngineError as error:
        return str(error), max(steps, default=0)
    return "went on", 0


def test_a_full_disk_ends_all_processes_soon_and_alike(configure: Configure, tmp_path: Path) -> None:
    config = configure(train={"steps": 200}, checkpoint={"every": 100}, layout={"replicate": 2})
    (first, steps), (second, _) = run_ranks(full_disk_of_the_first, 2, tmp_path / "ranks", config)
    assert "free some space" in first
    assert first == second
    assert 100 <= steps < 200, "the failed save was noticed only by the next one"
    assert not list((Path(config.run) / "checkpoints").iterdir())
    assert [event.kind for event in read(Path(config.run) / "events.jsonl")][-1] == "error"


@pytest.mark.parametrize("shards", [2, 3])
def test_a_foreign_layout_loads_bit_for_bit(configure: Configure, tmp_path: Path, shards: int) -> None:
    """One process -> shards (uneven ones too) -> one process: every tensor of model, optimizer and average comes back."""
    tables: dict[str, Any] = {"train": {"steps": 2, "batch_size": 6, "ema_decay": 0.9}, "schedule": {"kind": "constant"}}
    config = configure(**tables)
    train(config)
    folder = Path(config.run) / "checkpoints"
    before = saved_tensors(step_path(folder, 2))
    run_ranks(save_again, shards, tmp_path / "ranks", configure(layout={"shard": shards}, **tables), timeout_s=60)
    after = saved_tensors(step_path(folder, 3))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def saved_tensors(path: Path) -> dict[str, torch.Tensor]:
    shapes = {name: entry for name, entry in verify(path).tensors.items() if name != "rng.torch"}
    tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in shapes.items()}
    checkpoint._read(path, tensors, alone=True)
    return tensors


def save_again(processes: Processes, config: TrainConfig) -> None:
    """Load the newest checkpoint in this layout and write it as that of the next step, without training."""
    from surefoot.train.setup import open_session

    session = open_session(config, processes, resume=True)
    saver = checkpoint.Saver(
        Path(config.run) / "checkpoints", session.state, config.checkpoint, processes, session.facts, on_saved=lambda **fields: None
    )
    session.state.step += 1
    saver.save(loss=None)
    saver.finish()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicate", "shard"])
def test_when_one_of_two_processes_is_killed_the_run_resumes_bit_identical(
    configure: Configure, tmp_path: Path, layout: dict[str, int]
) -> None:
    tables: dict[str, Any] = {"train": {"steps": 150, "precision": "float32"}, "checkpoint": {"every": 1}, "layout": layout}
    straight, broken = configure("straight", **tables), configure("broken", **tables)
    files = {config.run: tmp_path / f"{Path(config.run).name}.toml" for config in (straight, broken)}
    for config in (straight, broken):
        files[config.run].write_text(dumps(config))

    def started(config: TrainConfig, mode: str) -> subprocess.Popen[str]:
        code = (
            f"from surefoot.parallel import launch; import sys; sys.exit(launch(2, ['-c', {PAIR!r}, {str(files[config.run])!r}, '{mode}']))"
        )
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)

    assert started(straight, "new").wait(timeout=600) == 0
    child = started(broken, "new")
    end = time.monotonic() + 60
    while time.monotonic() < end and (newest_whole(Path(broken.run) / "checkpoints") is None):
        time.sleep(0.05)
    time.sleep(0.4)
    os.kill(int((Path(broken.run) / "pid1").read_text()), signal.SIGKILL)
    assert child.wait(timeout=60) == 137
    assert child.stderr is not None
    assert "process 1 (exit code 137)" in child.stderr.read()
    child.stderr.close()
    assert started(broken, "resume").wait(timeout=600) == 0
    expected, found = (saved_tensors(step_path(Path(config.run) / "checkpoints", 150)) for config in (straight, broken))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
