"""The share of a step in which pipeline ranks wait: measured in real processes, simulated from the same schedule, and by formula.

    python -m bench.bubble

Two ranks on two cores; eight micro-batches of a 12-layer model whose head is small, so that stages are nearly equal. The simulation is
fed with the measured seconds of each stage's passes; the formula with equal ones. Figures: pipeline.bubble.<schedule>, measured, and
pipeline.bubble_err, the largest difference between measured and simulated, in shares of the step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.common import Figure, arguments, show, write
from surefoot.parallel import Processes
from surefoot.parallel.schedules import make_schedule, simulate
from tests.spawning import run_ranks

MICRO_BATCHES = 8
SCHEDULES: dict[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}


def formula(name: str, ranks: int, micro_batches: int, stages: int) -> float | None:
    """Return the idle share of equal stages, a backward pass twice as long as a forward pass, its two halves equal."""
    p, m = ranks, micro_batches
    if name in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if name == "interleaved":
        return (p - 1) / (stages * m + p - 1)
    return (p - 1) / (3 * m + p - 1) if name == "zero_bubble" else None


def measured(processes: Processes, schedule: str, stages: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Return the idle share of this rank in each step, and the median seconds of its passes by kind and stage ("F0")."""
    import torch
    import torch.distributed as dist

    from surefoot.parallel import pipeline
    from surefoot.train import TrainConfig
    from surefoot.train.recording import trial_rows
    from surefoot.train.setup import open_session

    torch.set_num_threads(1)
    config = TrainConfig.model_validate(
        {
            "run": "bench",
            "model": {
                "vocab_size": 128, "dim": 256, "layers": 12, "max_positions": 512,
                "attention": {"heads": 4, "kv_heads": 4, "head_dim": 64}, "ffn": {"hidden": 768},
            },
            "data": {"path": "none", "sequence_length": 512},
            "train": {"steps": 100, "batch_size": MICRO_BATCHES, "micro_batch_size": 1, "threads": 1},
            "layout": {"pipeline": processes.size, "schedule": schedule, "stages_per_rank": stages if schedule == "interleaved" else 1},
        }
    )  # fmt: skip
    session = open_session(config, processes, resume=False)
    assert session.pipeline is not None
    rows = trial_rows(config, 0)
    batches = [
        pipeline.Rows(*(x[i : i + 1] for x in (rows.tokens, rows.positions, rows.documents, rows.labels))) for i in range(MICRO_BATCHES)
    ]
    waited = 0.0
    took: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def run(self: Any, op: Any, *rest: Any) -> Any:
            nonlocal waited
            waited, start = 0.0, time.perf_counter()
            result = original(self, op, *rest)
            took[f"{op.kind}{op.stage}"].append(time.perf_counter() - start - waited)
            return result

        setattr(owner, name, run)

    timed(pipeline._Step, "forward")
    timed(pipeline._Step, "backward")
    timed(pipeline.PutOff, "catch_up")
    receive = pipeline._Step._receive

    def waiting(self: Any, *args: Any) -> Any:
        nonlocal waited
        start = time.perf_counter()
        result = receive(self, *args)
        waited += time.perf_counter() - start
        return result

    pipeline._Step._receive = waiting  # type: ignore[method-assign]
    idle = []
    for step in range(steps + 1):
        before = sum(map(sum, took.values()))
        dist.barrier()
        start = time.perf_counter()
        session.sync.begin()
        session.pipeline.train(batches, rows.trained, session.sync, lambda layers: None)
        dist.barrier()
        whole = time.perf_counter() - start
        session.sync.finish()
        session.sync.clear()
        if step:
            idle.append(1.0 - (sum(map(sum, took.values())) - before) / whole)
    return idle, {kind: statistics.median(times) for kind, times in took.items()}


def main() -> None:
    args = arguments("pipeline bubbles")
    steps = 2 if args.quick else 7
    rows, figures, errors = [], [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for name, stages in SCHEDULES.items():
            found = run_ranks(measured, 2, Path(scratch) / name, name, stages, steps, timeout_s=300.0)
            shares = [statistics.mean(pair) for pair in zip(*(one[0] for one in found), strict=True)]
            seconds = {kind: value for one in found for kind, value in one[1].items()}
            schedule = make_schedule(name, 2, MICRO_BATCHES, stages)
            count = schedule.stages
            forward = [seconds[f"F{stage}"] for stage in range(count)]
            halves = name in ("zero_bubble", "zbv")
            inputs = [seconds.get(f"I{stage}", seconds.get(f"B{stage}", 0.0)) for stage in range(count)]
            weights = [seconds.get(f"W{stage}", 0.0) if halves else 0.0 for stage in range(count)]
            guess = simulate(schedule, forward, inputs, weights).idle_fraction
            share, equal = statistics.median(shares), formula(name, 2, MICRO_BATCHES, stages)
            errors.append(abs(share - guess))
            rows.append([name, f"{share:.3f}", f"{guess:.3f}", "-" if equal is None else f"{equal:.3f}"])
            note = f"2 ranks, {MICRO_BATCHES} micro-batches; simulated {guess:.3f}" + ("" if equal is None else f", formula {equal:.3f}")
            figures.append(Figure(f"pipeline.bubble.{name}", share, shares, note))
    show("idle share of a step", ["schedule", "measured", "simulated", "formula"], rows)
    figures.append(Figure("pipeline.bubble_err", max(errors), errors, "largest |measured - simulated|, in shares of the step"))
    print("wrote", write("bubble", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
