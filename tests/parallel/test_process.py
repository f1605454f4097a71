"""Local groups of processes: exit codes, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.parallel.process import launch

WRITE_PID = "import os, sys, time, pathlib; rank = os.environ['RANK']; pathlib.Path(sys.argv[1], rank).write_text(str(os.getpid())); "


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_success_is_zero_and_every_rank_ran(tmp_path: Path) -> None:
    assert launch(3, ["-c", WRITE_PID, str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(("death", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_the_first_failure_is_the_code_and_the_others_are_ended(
    tmp_path: Path, death: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import functools

    from surefoot.parallel import process

    monkeypatch.setattr(process, "_wait", functools.partial(process._wait, grace_s=0.5))
    start = time.monotonic()
    script = WRITE_PID + f"time.sleep(0.3); {death} if rank == '1' else time.sleep(60)"
    assert launch(3, ["-c", script, str(tmp_path)]) == code
    assert time.monotonic() - start < 20
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_the_last_words_of_another_process_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "sys.stderr.write('Traceback\\nthe disk is full\\n'); sys.exit(3)"
    assert launch(2, ["-c", WRITE_PID + f"time.sleep(0.5) if rank == '0' else ({words.replace(';', ',')})", str(tmp_path)]) == 3
    assert capfd.readouterr().err == "process 1 (exit code 3): the disk is full\n"


def test_a_fault_of_the_input_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    late = "time.sleep(0.3 if rank == '0' else 0); sys.stderr.write('no such file\\n'); sys.exit(2)"
    assert launch(2, ["-c", WRITE_PID + late, str(tmp_path)]) == 2
    assert capfd.readouterr().err == "no such file\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_processes_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    script = WRITE_PID + "time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"from surefoot.parallel import launch; launch(2, ['-c', {script!r}, {str(tmp_path)!r}])"]
    )
    end = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
