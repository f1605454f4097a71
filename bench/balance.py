"""Balance: attention work over context ranks, and tokens over experts.

    python -m bench.balance

Figures: context.imbalance.<split>.<ranks>, the largest over the mean number of (query, key) pairs of a rank, and moe.imbalance.<kind>,
the most over the mean tokens of an expert at the end of a real training, three seeds. No timing: it may run beside other work.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from bench.common import Figure, arguments, show, write
from surefoot.data import Batch
from surefoot.parallel import Layout, Processes
from surefoot.parallel.context import split_sequence
from surefoot.train import TrainConfig
from surefoot.train.setup import open_session
from surefoot.train.step import gradients_of, update

TOKENS = 8192


def document_rows(rows: int, seed: int) -> Tensor:
    """Return rows of real document lengths (this Python's library files, four bytes a token), concatenated and cut: [rows, T] numbers."""
    sizes = [max(1, path.stat().st_size // 4) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:4000]]
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(sizes)[torch.randint(len(sizes), (rows * 64,), generator=chance)]
    stream = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return stream[: rows * TOKENS].view(rows, TOKENS)


def pairs(documents: Tensor) -> Tensor:
    """Return how many keys each query sees: [rows, T]."""
    places = torch.arange(documents.shape[1]).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return places - first + 1


def imbalance(work: Tensor, layout: Layout) -> float:
    """Return the mean over rows of the largest rank's work over the mean: a row's ranks wait for each other."""
    ranks = torch.stack([split_sequence(work, layout, rank).sum(1) for rank in range(layout.context)]).double()
    return float((ranks.amax(0) / ranks.mean(0)).mean())


def routed(balance: str, coefficient: float, seed: int, steps: int) -> float:
    """Train a small model of experts on Zipf-distributed text with structure; return most over mean tokens of an expert, last steps."""
    spec = {
        "vocab_size": 512, "dim": 64, "layers": 2, "max_positions": 128, "ffn_pattern": ["moe"],
        "attention": {"heads": 4, "kv_heads": 4, "head_dim": 16},
        "moe": {"experts": 16, "top_k": 2, "hidden": 32, "router": "sigmoid" if balance == "bias" else "softmax",
                "balance": balance, "aux_coefficient": coefficient, "bias_rate": 0.01},
    }  # fmt: skip
    config = TrainConfig.model_validate(
        {"run": "bench", "seed": seed, "model": spec, "data": {"path": "none", "sequence_length": 128},
         "train": {"steps": steps, "batch_size": 8, "threads": 1}, "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 10}}
    )  # fmt: skip
    session = open_session(config, Processes(), resume=False)
    chance = torch.Generator().manual_seed(seed)
    follow = torch.randint(512, (512, 4), generator=chance)  # a Markov chain: each token has four likely successors
    positions = torch.arange(128).repeat(8, 1)
    found = []
    for step in range(steps):
        rows = torch.empty(8, 129, dtype=torch.int64)
        rows[:, 0] = (torch.rand(8, generator=chance).pow(3) * 512).long()
        for place in range(128):
            rows[:, place + 1] = follow[rows[:, place], torch.randint(4, (8,), generator=chance).pow(2) // 3]
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, torch.zeros(8, 128, dtype=torch.int32), 1024, 1024)
        gradients = gradients_of(session, [batch], 1024)
        if step >= steps - 20:
            found += [float(count.max() / count.double().mean()) for count in session.counts.values()]
        update(session, gradients)
    return statistics.mean(found)


def main() -> None:
    args = arguments("balance of context ranks and experts")
    figures, rows = [], []
    work = {
        "one document": pairs(torch.zeros(1, TOKENS, dtype=torch.int64)),
        "documents": pairs(document_rows(16 if args.quick else 256, 0)),
    }
    for ranks in (2, 4, 8, 16):
        for kind, counts in work.items():
            zigzag, plain = (imbalance(counts, Layout(context=ranks, attention=split)) for split in ("ring", "ulysses"))
            rows.append([kind, ranks, f"{plain:.3f}", f"{zigzag:.3f}"])
            if kind == "documents":
                note = f"rows of {TOKENS} tokens with real document lengths; contiguous pieces {plain:.3f}"
                figures.append(Figure(f"context.imbalance.zigzag.{ranks}", zigzag, [], note))
    show("most over mean work of a context rank", ["row", "ranks", "contiguous", "zigzag"], rows)
    kinds = {"none": ("none", 0.0), "aux": ("aux_loss", 0.01), "bias": ("bias", 0.0)}
    seeds, steps = (1, 40) if args.quick else (3, 300)
    table = []
    for kind, (balance, coefficient) in kinds.items():
        values = [routed(balance, coefficient, seed, steps) for seed in range(seeds)]
        note = f"16 experts, 2 a token, {steps} steps of training, {seeds} seeds, mean of the last 20 steps"
        figures.append(Figure(f"moe.imbalance.{kind}", statistics.mean(values), values, note))
        table.append([kind, *(f"{value:.2f}" for value in values)])
        print(kind, values, file=sys.stderr)
    show("most over mean tokens of an expert", ["balancing", *(f"seed {seed}" for seed in range(seeds))], table)
    print("wrote", write("balance", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
