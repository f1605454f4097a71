"""Runs the command as a user does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def surefoot(tmp_path: Path) -> Command:
    """Return a function that runs `surefoot ARGUMENTS` in `tmp_path` and returns the finished process."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "surefoot", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run
