"""What comparing copies costs, and what it sees: time of one check in ten steps over step time, and the share of flipped bits found.

    python -m bench.hash_overhead

Two processes hold the same 10M model and train on; after every step the weights and both moments of AdamW are compared, and each
comparison is timed inside the run, with its waiting for the other process. The difference of whole runs would drown in their noise.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import Figure, arguments, show, write
from bench.runs import CONFIG, SIZES, prepare
from surefoot.core.config import load
from surefoot.core.rundir import Run
from surefoot.parallel import launch
from surefoot.train import TrainConfig, fit, loop
from surefoot.trust.digest import digest

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
EVERY = 10


def worker(path: Path) -> None:
    """Train as `path` says, one of two processes; the first writes the seconds of each check and of each step beside it."""
    config = load(TrainConfig, path)
    checks: list[float] = []
    ends: list[float] = []
    check = loop.check_replicas

    def timed(*given: Any, **named: Any) -> None:
        start = time.perf_counter()
        check(*given, **named)
        ends.append(time.perf_counter())
        checks.append(ends[-1] - start)

    loop.check_replicas = timed  # type: ignore[attr-defined]
    if loop.Processes.join().rank > 0:  # type: ignore[attr-defined]
        fit(config, None)
        return
    with Run.create(config.run, config) as run:
        fit(config, run)
    steps = [after - before - check for before, after, check in zip(ends, ends[1:], checks[1:], strict=False)]
    path.with_suffix(".json").write_text(json.dumps({"checks": checks[3:-1], "steps": steps[2:-1]}))


def measure(scratch: Path, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each check and of each step, without its check."""
    path = scratch / "run.toml"
    layout = "[layout]\nreplicate = 2\n[trust]\nhash_every = 1\n"
    text = CONFIG.format(**SIZES["10m"]) + layout
    text = text.replace('run = "none"', f'run = "{scratch / "run"}"').replace('path = "none"', f'path = "{scratch / "data"}"')
    path.write_text(text.replace("steps = 10", f"steps = {steps}\nthreads = 1"))
    code = launch(2, ["-m", "bench.hash_overhead", "--worker", str(path)], threads=1)
    if code:
        raise RuntimeError(f"training ended with code {code}")
    found = json.loads(path.with_suffix(".json").read_text())
    return found["checks"], found["steps"]


def recall(each: int) -> tuple[int, int]:
    """Return (found, made) of flips at every bit position of every dtype, `each` times, at random places of a weight's bits."""
    chance, found, made = random.Random(0), 0, 0
    for dtype in DTYPES:
        tensor = (torch.randn(320, 865) * 0.02 if dtype.is_floating_point else torch.randint(0, 2, (320, 865))).to(dtype)
        data: Tensor = tensor.view(-1).view(torch.uint8)
        width, before = tensor.element_size(), digest(tensor)
        for bit in list(range(1 if dtype == torch.bool else 8 * width)) * each:
            place = chance.randrange(tensor.numel()) * width + bit // 8
            data[place] ^= 1 << bit % 8
            found, made = found + (digest(tensor) != before), made + 1
            data[place] ^= 1 << bit % 8
    return found, made


def main() -> None:
    args = arguments("cost and recall of comparing copies", worker={"default": None, "help": "be one of the two processes (internal)"})
    if args.worker:
        worker(Path(args.worker))
        return
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    prepare(scratch)
    checks, steps = measure(scratch, 10 if args.quick else 40)
    check, step = statistics.median(checks), statistics.median(steps)
    found, made = recall(3 if args.quick else 20)
    show("10M model, replicate = 2, one thread each, median seconds", ["", "s"], [["step", step], ["check", check]])
    note = f"one check of weights and moments ({check * 1e3:.0f} ms, exchange and wait included) in {EVERY} steps of {step:.2f} s"
    flips = f"{found} of {made} flips, every bit position of {len(DTYPES)} dtypes, random places of 320 x 865 elements"
    figures = [
        Figure("hash.overhead", check / (EVERY * step), [one / (EVERY * step) for one in checks], note),
        Figure("hash.flip_recall", found / made, (), flips),
    ]
    show("figures", ["id", "value"], [[figure.id, figure.value] for figure in figures])
    print("wrote", write("hash_overhead", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
