"""Evaluation: loss and bits per byte over the validation split, exact on any number of processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from surefoot.data import Loader
from surefoot.models import Transformer
from surefoot.parallel.process import Processes


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats a token, `bits_per_byte` of the text those tokens spell, over `tokens` and `bytes`."""

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: Transformer, loader: Loader, *, rows: int | None = None, batch: int = 8, processes: Processes | None = None
) -> Evaluation:
    """Evaluate the first `rows` rows of `loader` (None: one epoch), each process taking every size-th batch.

    Sums of losses and tokens are added over processes, so that the result is the mean over tokens, not a mean of means.
    """
    processes = processes or Processes()
    rows = min(rows or loader.samples, loader.samples)
    training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    starts = list(range(0, rows, batch))
    rounds = -(-len(starts) // processes.size)
    for turn in range(rounds):
        # Every process runs the model equally often: a sharded model communicates in its forward pass.
        index = turn * processes.size + processes.rank
        mine = index < len(starts)
        start = starts[index] if mine else 0
        piece = loader.batch(start, min(batch, rows - start))
        loss = model(piece.tokens, piece.positions, piece.documents, labels=piece.labels, normaliser=1)
        if mine:
            totals += torch.tensor([float(loss.cross_entropy), piece.trained, piece.bytes], dtype=torch.float64)
    model.train(training)
    nats, tokens, size = processes.sum(totals).tolist()
    return Evaluation(nats / max(tokens, 1.0), nats / math.log(2.0) / max(size, 1.0), int(tokens), int(size))
