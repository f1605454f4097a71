"""Local groups of processes: exit codes, and none left behind."""

from __future__ import annotations

import os
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
