"""A tiny dataset and the command, run as a user runs it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Started = Callable[..., subprocess.Popen[str]]

CONFIG = """
run = "run"
seed = 3
[model]
vocab_size = 400
dim = 32
layers = 2
max_positions = 64
tied_embeddings = true
[model.attention]
heads = 2
kv_heads = 1
head_dim = 16
[model.ffn]
hidden = 64
[data]
path = "data"
sequence_length = 64
[train]
steps = 40
batch_size = 4
eval_every = 20
threads = 1
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 4
[checkpoint]
every = 10
"""


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start `surefoot ARGUMENTS` in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "surefoot", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def done(folder: Path, *arguments: object, code: int = 0) -> str:
    """Run `surefoot ARGUMENTS` in `folder` to its end and return its standard output."""
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, f"{arguments}: exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return out


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a prepared dataset `data` and a config `c.toml`."""
    folder = tmp_path_factory.mktemp("e2e")
    draw = random.Random(5)
    words = ["def", "return", "if", "else", "for", "x", "y", "total", "count", "print", "(", ")", ":", "=", "+", "1", "2"]
    (folder / "texts").mkdir()
    for number in range(60):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(40))
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines) + "\n")
    (folder / "c.toml").write_text(CONFIG)
    done(folder, "data", "prepare", "texts", "--out", "data", "--vocab-size", "400", "--validation-fraction", "0.1")
    return folder
