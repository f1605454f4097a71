from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.core.config import Config, load
from surefoot.core.errors import RunError
from surefoot.core.rundir import Run

HOLD = """
import sys
from surefoot.core.rundir import Run
with Run.open(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


class Settings(Config):
    steps: int = 3
    name: str = "x"


def test_create_writes_what_open_finds(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", Settings(steps=7)) as run:
        run.log.append("start")
        assert run.checkpoints.is_dir()
    with Run.open(tmp_path / "run") as run:
        assert load(Settings, run.config_path) == Settings(steps=7)
        assert run.report.parent == run.path
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["python"].count(".") == 2
    assert environment["cores"] >= 1
    assert environment["packages"]["torch"]


def test_a_run_in_use_by_another_process_is_refused_and_a_killed_holder_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Run.create(path, Settings()).close()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"in use by process {holder.pid}"):
            Run.open(path)
        with pytest.raises(RunError, match="in use"):
            Run.create(path, Settings(), overwrite=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    Run.open(path).close()


def test_the_lock_is_per_opening_so_that_one_process_cannot_hold_a_run_twice(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", Settings()), pytest.raises(RunError, match="in use"):
        Run.open(tmp_path / "run")


def test_a_second_run_needs_overwrite_and_overwrite_removes_only_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Run.create(path, Settings()) as run:
        (run.checkpoints / "step-00000001").mkdir()
        run.log.append("start")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="already holds a run"):
        Run.create(path, Settings())
    with Run.create(path, Settings(steps=9), overwrite=True) as run:
        assert list(run.checkpoints.iterdir()) == []
        assert (path / "events.jsonl").read_bytes() == b""
    assert (path / "notes.txt").read_text() == "mine"


def test_other_peoples_folders_and_files_are_never_taken(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(RunError, match=r"not a run \('photo.jpg'\)"):
        Run.create(tmp_path, Settings(), overwrite=True)
    with pytest.raises(RunError, match="is a file"):
        Run.create(tmp_path / "photo.jpg", Settings())
    assert (tmp_path / "photo.jpg").exists()


def test_missing_or_foreign_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run"):
        Run.open(tmp_path / "absent")
    with pytest.raises(RunError, match="is not a run directory"):
        Run.open(tmp_path)
    assert list(tmp_path.iterdir()) == []
