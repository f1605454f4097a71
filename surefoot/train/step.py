"""One training step: gradients of the whole batch, then the update. The loop and `verify` run the same code."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.data import Batch
from surefoot.parallel.pipeline import Rows
from surefoot.train.clip import clip_factor
from surefoot.train.config import Precision
from surefoot.train.schedule import learning_rate_fraction
from surefoot.train.setup import Session


@dataclass(frozen=True)
class Gradients:
    """What a step is made of: this process's parts by name, their global 2-norm, the loss, and the bytes its labels spell."""

    parts: dict[str, Tensor | None]
    norm: float
    loss: float
    bytes: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss)


def gradients_of(session: Session, micro_batches: Sequence[Batch], normaliser: int) -> Gradients:
    """Run forward and backward over this process's `micro_batches`; all processes call it together."""
    partial = accumulate(session, micro_batches, normaliser)
    parts = session.sync.finish()
    norm = float(session.parallel.norm(parts))
    loss, size = session.processes.sum(partial).tolist()
    return Gradients(parts, norm, loss, size)


def update(session: Session, gradients: Gradients) -> float:
    """Clip, update weights, balancing biases and the moving average; return the learning rate used."""
    config, state = session.config, session.state
    lr = config.optimizer.lr * learning_rate_fraction(config.schedule, state.step, config.train.steps)
    state.optimizer.step(gradients.parts, lr=lr, clip=clip_factor(gradients.norm, config.optimizer.clip_norm))
    session.sync.clear()
    session.balance_experts()
    state.update_ema(config.train.ema_decay)
    state.step += 1
    state.position += config.train.batch_size
    return lr


def accumulate(session: Session, micro_batches: Sequence[Batch], normaliser: int) -> Tensor:
    """Run forward and backward over the micro-batches.

    Returns [their summed loss, already divided by the global `normaliser`; the bytes their labels spell], float64.
    """
    device = session.feed.device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    session.counts = {}
    if session.pipeline is not None:
        rows = [Rows(batch.tokens, batch.positions, batch.documents, batch.labels) for batch in micro_batches]
        with autocast(session.config.train.precision, device):
            total[0] = session.pipeline.train(rows, normaliser, session.sync, session.count_experts) * float(session.feed.counts)
        total[1] = sum(batch.bytes for batch in micro_batches)
        return total
    for index, batch in enumerate(micro_batches):
        session.sync.start(index)
        with autocast(session.config.train.precision, device):
            loss = session.model(batch.tokens, batch.positions, batch.documents, labels=batch.labels, normaliser=normaliser)
        session.count_experts()
        loss.total.backward()
        known = loss.cross_entropy.double() * float(session.feed.counts)
        total += torch.stack((known, torch.full_like(known, batch.bytes)))
    return total


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass runs."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16_autocast" else contextlib.nullcontext()
