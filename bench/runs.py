"""Whole runs of `surefoot train` on real text, and what their event logs say."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import ROOT

CONFIG = """
run = "none"
[model]
vocab_size = 4096
dim = {dim}
layers = {layers}
max_positions = 512
[model.attention]
heads = {heads}
kv_heads = {heads}
head_dim = 64
[model.ffn]
hidden = {ffn}
[data]
path = "none"
sequence_length = 512
[train]
steps = 10
batch_size = 8
eval_rows = 8
[schedule]
kind = "constant"
"""
SIZES = {"10m": {"dim": 320, "layers": 6, "heads": 5, "ffn": 864}, "2m": {"dim": 128, "layers": 4, "heads": 2, "ffn": 384}}


@dataclass(frozen=True)
class Steps:
    """The steps of one run after its first ones: `events` in order, and `intervals`, the wall seconds from one to the next."""

    events: list[dict[str, Any]]
    intervals: list[float]

    def median(self, key: str) -> float:
        return statistics.median(event[key] for event in self.events)

    @property
    def tokens_per_s(self) -> float:
        return self.events[0]["tokens"] / statistics.median(self.intervals)


def prepare(scratch: Path) -> Path:
    """Prepare some of the standard library's sources as a dataset of 4,096 tokens; return its directory."""
    library = Path(sysconfig.get_paths()["stdlib"])
    inputs = [str(library / name) for name in ("asyncio", "email", "http", "json", "unittest", "xml", "multiprocessing", "concurrent")]
    call(["data", "prepare", *inputs, "--out", str(scratch / "data"), "--vocab-size", "4096"], scratch, 1)
    return scratch / "data"


def call(arguments: list[str], scratch: Path, threads: int) -> None:
    """Run the command line and raise with the end of its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", "surefoot", *arguments], cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"surefoot {' '.join(arguments)} ended with code {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")


def train(data: Path, scratch: Path, size: str, steps: int, *overrides: str, processes: int = 1, threads: int = 1, skip: int = 3) -> Steps:
    """Train `size` for `steps` on `processes` x `threads` and return its steps but the first `skip`."""
    config = scratch / f"{size}.toml"
    config.write_text(CONFIG.format(**SIZES[size]))
    run = scratch / "run"
    given = [f'run="{run}"', f'data.path="{data}"', f"train.steps={steps}", f"train.threads={threads}", *overrides]
    call(["train", str(config), *given, "--overwrite", "--nproc", str(processes), "--json"], scratch, threads)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "step"]
    times = [line["time"] for line in found]
    return Steps(found[skip:], [after - before for before, after in zip(times[skip - 1 :], times[skip:], strict=False)])
