"""Evaluation: loss and bits per byte over the validation split, exact on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from surefoot.data import Loader
from surefoot.models import Transformer
from surefoot.parallel import Processes
from surefoot.parallel.pipeline import Pipeline, Rows
from surefoot.train.feed import Feed


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


def together(parts: Iterable[Evaluation]) -> Evaluation:
    """Return the evaluation of several texts as one: means over all their tokens and bytes."""
    known = list(parts)
    tokens, size = sum(one.tokens for one in known), sum(one.bytes for one in known)
    loss = sum(one.loss * one.tokens for one in known) / max(tokens, 1)
    bits = sum(one.bits_per_byte * one.bytes for one in known) / max(size, 1)
    return Evaluation(loss, bits, tokens, size) if len(known) != 1 else known[0]


@torch.no_grad()
def evaluate(
    model: Transformer,
    loader: Loader,
    *,
    rows: int | None = None,
    batch: int = 8,
    processes: Processes | None = None,
    feed: Feed | None = None,
    pipeline: Pipeline | None = None,
) -> Evaluation:
    """Evaluate the first `rows` rows of `loader` (None: one epoch), each data rank taking every so many-th batch.

    Sums of losses and tokens are added over processes, so that the result is the mean over tokens, not a mean of means.
    """
    processes, feed = processes or Processes(), feed or Feed()
    ranks = feed.layout.data
    rows = min(rows or loader.samples, loader.samples)
    training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    losses = torch.zeros((), dtype=torch.float64, device=feed.device)
    starts = list(range(0, rows, batch))
    rounds = -(-len(starts) // ranks)
    for turn in range(rounds):
        # Every process runs the model equally often: a model cut over processes communicates in its forward pass.
        index = turn * ranks + feed.index
        mine = index < len(starts)
        start = starts[index] if mine else 0
        piece = feed.split(loader.batch(start, min(batch, rows - start)))
        if pipeline is not None:
            loss = pipeline.loss(Rows(piece.tokens, piece.positions, piece.documents, piece.labels))
        else:
            loss = model(piece.tokens, piece.positions, piece.documents, labels=piece.labels, normaliser=1).cross_entropy
        if mine:
            totals += torch.tensor([0.0, piece.trained, piece.bytes], dtype=torch.float64)
            losses += loss.double() * float(feed.counts)
    model.train(training)
    totals[0] = float(losses)
    nats, tokens, size = processes.sum(totals).tolist()
    return Evaluation(nats / max(tokens, 1.0), nats / math.log(2.0) / max(size, 1.0), int(tokens), int(size))
