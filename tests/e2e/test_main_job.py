"""What a user does, from text to a model that others load, with the accidents that happen on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from surefoot.core.events import read
from surefoot.train.checkpoint import load_model

from .conftest import done, start


def _wait_for(process: subprocess.Popen[str], run: Path, kind: str, step: int, timeout_s: float = 120.0) -> None:
    """Wait until the log of `run` has an event `kind` of at least `step`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        if any(event.kind == kind and event.fields.get("step", 0) >= step for event in read(run / "events.jsonl")):
            return
        time.sleep(0.02)
    pytest.fail(f"no {kind} of step {step}: {process.communicate()[1] if process.poll() is not None else 'too slow'}")


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run)[1].state_dict()


def _same(first: Path, second: Path) -> bool:
    ours, theirs = _weights(first), _weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def undisturbed(prepared: Path) -> Path:
    """Return a run that trained to its end without an accident."""
    done(prepared, "train", "c.toml", "run=calm")
    return prepared / "calm"


def test_a_run_killed_at_any_moment_resumes_bit_identical(prepared: Path, undisturbed: Path) -> None:
    process = start(prepared, "train", "c.toml", "run=killed")
    _wait_for(process, prepared / "killed", "step", 15)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done(prepared, "resume", "killed")
    assert _same(prepared / "killed", undisturbed)


def test_ctrl_c_saves_and_says_how_to_go_on(prepared: Path, undisturbed: Path) -> None:
    process = start(prepared, "train", "c.toml", "run=stopped")
    _wait_for(process, prepared / "stopped", "step", 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: surefoot resume stopped" in err
    done(prepared, "resume", "stopped")
    assert _same(prepared / "stopped", undisturbed)


def test_a_run_in_use_is_refused(prepared: Path, undisturbed: Path) -> None:
    process = start(prepared, "train", "c.toml", "run=busy", "train.steps=100000")
    try:
        _wait_for(process, prepared / "busy", "step", 1)
        other = start(prepared, "resume", "busy")
        _, err = other.communicate(timeout=60)
        assert other.returncode == 2
        assert f"in use by process {process.pid}" in err
    finally:
        process.kill()
        process.communicate()


def test_a_finished_run_is_not_overwritten_unasked(prepared: Path, undisturbed: Path) -> None:
    before = (undisturbed / "events.jsonl").read_bytes()
    process = start(prepared, "train", "c.toml", "run=calm")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "already holds a run" in err
    assert (undisturbed / "events.jsonl").read_bytes() == before


def test_it_learns_and_eval_agrees_with_the_log(prepared: Path, undisturbed: Path) -> None:
    told = json.loads(done(prepared, "eval", "calm", "--sequence-length", "64", "--json"))
    logged = [event.fields for event in read(undisturbed / "events.jsonl") if event.kind == "eval"]
    assert [record["step"] for record in logged] == [20, 40]
    assert told["loss"] == pytest.approx(logged[-1]["loss"], rel=1e-5)
    assert told["bits_per_byte"] == pytest.approx(logged[-1]["bits_per_byte"], rel=1e-5)
    assert logged[-1]["loss"] < logged[0]["loss"] < 6.0
    done(prepared, "eval", "calm", "--max-bits-per-byte", "0.01", code=1)


def test_generation_is_repeatable(prepared: Path, undisturbed: Path) -> None:
    first = done(prepared, "generate", "calm", "def", "--tokens", "20", "--seed", "1")
    assert first.startswith("def")
    assert done(prepared, "generate", "calm", "def", "--tokens", "20", "--seed", "1") == first


def test_export_and_import_keep_every_bit(prepared: Path, undisturbed: Path) -> None:
    done(prepared, "export", "calm", "exported")
    done(prepared, "import", "exported", "back")
    wanted = done(prepared, "eval", "calm", "--json")
    for copy in ("exported", "back"):
        told = json.loads(done(prepared, "eval", copy, "--data", "data", "--json"))
        assert told["loss"] == json.loads(wanted)["loss"]
    greedy = [done(prepared, "generate", name, "def", "--tokens", "20", "--temperature", "0") for name in ("calm", "exported", "back")]
    assert len(set(greedy)) == 1


def test_the_report_shows_the_run(prepared: Path, undisturbed: Path) -> None:
    done(prepared, "report", "calm")
    page = (undisturbed / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "What it writes" in page
    assert "finished" in page


def test_a_damaged_checkpoint_is_named(prepared: Path, undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(undisturbed, tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    piece = next(newest.glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:-8])
    process = start(prepared, "eval", newest)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is cut short" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(prepared: Path, undisturbed: Path) -> None:
    told = json.loads(done(prepared, "train", "c.toml", "run=two", "--nproc", "2", "--json"))
    assert told["step"] == 40
    ours, theirs = _weights(prepared / "two"), _weights(undisturbed)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in ours)
