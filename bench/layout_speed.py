"""Training speed of each layout on two processes of one thread, beside a stand-in built from torch's own parallel APIs.

    python -m bench.layout_speed

The same weights, tokens and AdamW in float32; rounds of the two alternate inside the same two processes. Figures: layouts.speed.<layout>,
ours over the stand-in (`bench/peers/parallel.py`); where torch has nothing to stand in, ours over our own replicas.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common import ROOT, Figure, arguments, show, write

if TYPE_CHECKING:
    import torch

    from surefoot.parallel import Processes
    from surefoot.train import TrainConfig

LAYOUTS: dict[str, dict[str, object]] = {
    "replicate": {"replicate": 2},
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "ulysses": {"context": 2, "attention": "ulysses"},
}
PEERS = ("replicate", "shard", "tensor", "pipeline")
ROWS, LR = 8, 1e-3


Step = Callable[["torch.Tensor", "torch.Tensor"], float]


def _ours(config: TrainConfig, processes: Processes) -> Step:
    """Return step(tokens, labels) -> loss of `surefoot train` under the layout of `config`, on the same rows on every rank."""
    import torch

    from surefoot.data import Batch
    from surefoot.train.setup import open_session
    from surefoot.train.step import gradients_of, update

    session = open_session(config, processes, resume=False)
    length = config.data.sequence_length
    positions, documents = torch.arange(length).repeat(ROWS, 1), torch.zeros(ROWS, length, dtype=torch.int32)
    mine = ROWS // session.feed.layout.data
    micro = mine // session.micro_batches
    starts = [session.feed.index * mine + micro * index for index in range(session.micro_batches)]
    pieces = [slice(start, start + micro) for start in starts]

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        batches = [session.feed.split(Batch(tokens[p], labels[p], positions[p], documents[p], 1, 1)) for p in pieces]
        found = gradients_of(session, batches, labels.numel())
        update(session, found)
        return found.loss

    return step


def worker(layout: str, rounds: int, steps: int, out: str) -> None:
    """One of two processes: time both, in turn."""
    import torch
    import torch.distributed as dist

    from bench.peers.parallel import Shape, stand_in
    from surefoot.models import ModelSpec, Transformer, initialise
    from surefoot.parallel import Layout, Processes
    from surefoot.parallel.process import leave
    from surefoot.train import TrainConfig

    torch.set_num_threads(1)
    processes = Processes.join()
    shape = Shape(vocab=4096, dim=384, layers=6, heads=6, ffn=1024, sequence=512)
    spec = ModelSpec.model_validate(
        {
            "vocab_size": shape.vocab, "dim": shape.dim, "layers": shape.layers, "max_positions": shape.sequence,
            "attention": {"heads": shape.heads, "kv_heads": shape.heads, "head_dim": shape.dim // shape.heads},
            "ffn": {"hidden": shape.ffn},
        }
    )  # fmt: skip
    config = TrainConfig.model_validate(
        {
            "run": "bench", "model": spec, "data": {"path": "none", "sequence_length": shape.sequence},
            "train": {"steps": 10**6, "batch_size": ROWS, "threads": 1, "micro_batch_size": 1 if layout == "pipeline" else None},
            "layout": LAYOUTS[layout], "optimizer": {"lr": LR, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0},
            "schedule": {"kind": "constant", "warmup_steps": 0},
        }
    )  # fmt: skip

    runs = {"ours": _ours(config, processes)}
    if layout in PEERS:
        whole = Transformer(spec)
        initialise(whole, config.seed)
        runs["beside"] = stand_in(layout, shape, whole.state_dict(), LR, ROWS)
    else:
        runs["beside"] = _ours(config.model_copy(update={"layout": Layout(replicate=2)}), processes)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    chance = {name: torch.Generator().manual_seed(0) for name in runs}
    for turn in range(rounds + 1):  # the first warms up
        for name in list(runs) if turn % 2 == 0 else list(reversed(runs)):
            for _ in range(steps):
                row = torch.randint(shape.vocab, (ROWS, shape.sequence + 1), generator=chance[name])
                dist.barrier()
                start = time.perf_counter()
                losses[name].append(runs[name](row[:, :-1].contiguous(), row[:, 1:].contiguous()))
                if turn:
                    seconds[name].append(time.perf_counter() - start)
    if processes.rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "losses": losses}))
    leave()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "worker":
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    from surefoot.parallel import launch

    args = arguments("speed of layouts on two processes")
    rounds, steps = (1, 2) if args.quick else (6, 3)
    figures, rows = [], []
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for layout in LAYOUTS:
            out = Path(scratch) / f"{layout}.json"
            failed = launch(
                2, ["-m", "bench.layout_speed", "worker", layout, str(rounds), str(steps), str(out)], threads=1, environment=environment
            )
            if failed:
                raise SystemExit(f"{layout} ended with code {failed}")
            found = json.loads(out.read_text())
            rates = {name: ROWS * 512 / statistics.median(times) for name, times in found["seconds"].items()}
            other = rates["beside"]
            first = [losses[:3] for losses in found["losses"].values()]
            gap = max(abs(a / b - 1) for a, b in zip(*first, strict=True))
            against = "torch's own APIs" if layout in PEERS else "our own replicas (torch has no stand-in on a CPU)"
            samples = [ROWS * 512 / value / other for value in found["seconds"]["ours"]]
            note = f"{rates['ours']:,.0f} tokens/s over {other:,.0f} of {against}; 12M parameters, float32, losses agree to {gap:.0e}"
            figures.append(Figure(f"layouts.speed.{layout}", rates["ours"] / other, samples, note))
            rows.append([layout, rates["ours"], other, rates["ours"] / other])
    show("tokens/s", ["layout", "ours", "beside", "ratio"], rows)
    print("wrote", write("layout_speed", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
