"""Fifty steps end on the same loss curve, whatever the layout.

    python -m bench.curves

A hybrid of attention, experts and short convolutions is trained under each layout and on one process, on the same rows. Figures:
layouts.curve.float64, the largest difference of a loss over the fifty steps, and layouts.curve.float32, the same divided by the floor: what
one process differs from itself when it only cuts its batch into other micro-batches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.common import Figure, arguments, show, write
from surefoot.parallel import Layout, Processes
from tests.spawning import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate 2": {"replicate": 2},
    "shard 2": {"shard": 2},
    "tensor 2": {"tensor": 2},
    "context 2": {"context": 2},
    "pipeline 2, expert 2": {"pipeline": 2, "replicate": 2, "expert": 2},
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "pipeline 2, context 2, tensor 2, expert 4": {"pipeline": 2, "context": 2, "tensor": 2, "expert": 4},
    "replicate 2, shard 2, tensor 2, expert 4": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 4},
}


def curve(processes: Processes, degrees: dict[str, Any], precision: str, micro_batch: int | None, steps: int) -> list[float]:
    """Return the loss of each step."""
    from surefoot.data import Batch
    from surefoot.train import TrainConfig
    from surefoot.train.recording import trial_rows
    from surefoot.train.setup import open_session
    from surefoot.train.step import gradients_of, update

    config = TrainConfig.model_validate(
        {
            "run": "bench",
            "model": {
                "vocab_size": 128, "dim": 64, "layers": 4, "max_positions": 64, "pattern": ["attention", "conv"],
                "ffn_pattern": ["dense", "moe"], "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16}, "ffn": {"hidden": 128},
                "conv": {"width": 3}, "moe": {"experts": 8, "top_k": 2, "hidden": 48, "shared_hidden": 32},
            },
            "data": {"path": "none", "sequence_length": 64},
            "train": {"steps": steps, "batch_size": 8, "precision": precision, "threads": 1, "micro_batch_size": micro_batch},
            "layout": degrees, "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 5},
        }
    )  # fmt: skip
    session = open_session(config, processes, resume=False)
    mine = 8 // session.feed.layout.data
    micro = mine // session.micro_batches
    losses = []
    for step in range(steps):
        rows = trial_rows(config, step % 10)  # the same ten batches over and over: there is something to learn
        names = ("tokens", "labels", "positions", "documents")
        starts = [session.feed.index * mine + micro * index for index in range(session.micro_batches)]
        batches = [session.feed.split(Batch(*(getattr(rows, name)[start : start + micro] for name in names), 1, 1)) for start in starts]
        found = gradients_of(session, batches, rows.trained)
        update(session, found)
        losses.append(found.loss)
    return losses


def main() -> None:
    args = arguments("loss curves of layouts")
    steps = 8 if args.quick else 50
    figures, rows = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for precision in ("float64", "float32"):
            alone = curve(Processes(), {}, precision, None, steps)
            floor = max(
                abs(a - b) for size in (1, 2, 4) for a, b in zip(alone, curve(Processes(), {}, precision, size, steps), strict=True)
            )
            worst = []
            for name, degrees in LAYOUTS.items():
                layout = Layout(**degrees)
                if args.quick and layout.world_size > 4:
                    continue
                micro = 8 // layout.data // 2 if layout.pipeline > 1 else None
                folder = Path(scratch) / f"{precision}-{name}".replace(" ", "_")
                found = run_ranks(curve, layout.world_size, folder, degrees, precision, micro, steps, timeout_s=600.0)[0]
                apart = max(abs(a - b) for a, b in zip(alone, found, strict=True))
                worst.append(apart if precision == "float64" else apart / floor)
                rows.append([precision, name, f"{alone[0]:.3f}", f"{found[-1]:.3f}", f"{apart:.1e}", f"{floor:.1e}"])
                print(rows[-1], flush=True)
            note = f"{len(worst)} layouts of up to 8 processes, {steps} steps, loss {alone[0]:.2f} to {alone[-1]:.2f}; floor {floor:.1e}"
            figures.append(Figure(f"layouts.curve.{precision}", max(worst), worst, note))
    show("loss curves", ["precision", "layout", "first", "last", "largest difference", "floor"], rows)
    print("wrote", write("curves", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
