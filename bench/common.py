"""The harness of the benches: peers as worker processes, interleaved rounds, medians, and figures as JSON.

Every peer runs in its own process, under its own interpreter, and waits for "run n steps" between its rounds, so that rounds of
all peers interleave (A, B, C, C, B, A) and a slow minute of the machine hits them alike. Only one process computes at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Figure:
    """One measured figure; `note` states regime, peer and version."""

    id: str
    value: float
    samples: Sequence[float] = ()
    note: str = ""


class WorkerError(Exception):
    """A worker died; the message holds the end of what it printed."""


@dataclass
class Worker:
    """A peer in its own process. `label` names it in tables; `rates` gathers its rounds, in units per second."""

    label: str
    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = self.log.read_text(errors="replace").splitlines()[-12:]
            raise WorkerError(f"{self.label} ended with code {self.process.returncode}:\n" + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask(stop=True)
                self.process.wait(timeout=20)
            except (WorkerError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def start(label: str, module: str, arguments: Sequence[str], *, python: str, threads: int, scratch: Path) -> Worker:
    """Start `python -m module arguments` as a worker and wait until it has built its model."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = scratch / f"{label.replace(' ', '_').replace('/', '_')}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [python, "-m", module, "--threads", str(threads), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=environment,
            cwd=scratch,
        )
    worker = Worker(label, process, log)
    worker.facts = worker.hear()
    return worker


def interleave(workers: Sequence[Worker], rounds: int, work: Callable[[Worker], None], between: Callable[[], None] = lambda: None) -> None:
    """Call `work` on each worker, `rounds` times, forwards and backwards in turn; `between` runs after each pass."""
    for turn in range(rounds):
        for worker in workers if turn % 2 == 0 else list(reversed(workers)):
            work(worker)
        between()


def run_steps(worker: Worker, steps: int, *, record: bool = True) -> list[float]:
    """Let `worker` run `steps` training steps; record its rate in tokens/s and return the seconds of each step."""
    answer = worker.ask(steps=steps)
    seconds: list[float] = answer["seconds"]
    worker.losses += answer["losses"]
    worker.facts["rss"] = answer["rss"]
    if record:
        worker.rates += [worker.facts["tokens_per_step"] / value for value in seconds]
    return seconds


def machine() -> dict[str, Any]:
    """Return the record of this machine for a result file."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
        flags = next((line for line in lines if line.startswith("flags")), "")
        cpu += "".join(f", {flag}" for flag in ("avx512_bf16", "amx_bf16") if flag in flags.split())
    except OSError:
        pass
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def write(name: str, figures: Sequence[Figure], *, quick: bool, extra: dict[str, Any] | None = None) -> Path:
    """Write `bench/results/<name>.json`; a quick run, which is no evidence, writes to the system's temporary folder."""
    folder = Path(tempfile.gettempdir()) / "surefoot-bench" if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    rows = [
        {"id": one.id, "value": one.value, "samples": [round(sample, 6) for sample in one.samples], "note": one.note} for one in figures
    ]
    command = "python -m bench." + Path(sys.argv[0]).stem
    options = [word for word in sys.argv[1:] if "/" not in word]
    record = {
        "bench": name,
        "command": " ".join([command, *(word for word in options if not word.endswith("-python"))]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "figures": rows,
        **(extra or {}),
    }
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(record, indent=1) + "\n")
    aside.replace(path)
    return path


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table with aligned columns."""
    text = [
        [
            f"{cell:,.3g}"
            if isinstance(cell, float) and abs(cell) < 100
            else f"{cell:,.0f}"
            if isinstance(cell, int | float)
            else str(cell)
            for cell in row
        ]
        for row in rows
    ]
    widths = [max(len(row[column]) for row in [list(header), *text]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [list(header), ["-" * width for width in widths], *text]:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells), flush=True)


def arguments(description: str, **more: dict[str, Any]) -> argparse.Namespace:
    """Parse the options every bench has, and `more`: name -> add_argument's keywords."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works; no evidence")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each process (default: all cores)")
    for name, keywords in more.items():
        parser.add_argument("--" + name.replace("_", "-"), **keywords)
    return parser.parse_args()
