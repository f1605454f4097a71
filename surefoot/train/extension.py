"""Context extension: what a model loses at each position when its rotary embedding is stretched, and how.

A model trained on `length` tokens is read at several times that length as it is (plain extrapolation), with linear interpolation
(Chen et al. 2023, arXiv 2306.15595), with YaRN (arXiv 2309.00071), and after being trained on with one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data import Loader
from surefoot.models import ModelSpec, Transformer
from surefoot.models.loss import IGNORED, token_losses
from surefoot.models.spec import RopeSpec


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss in nats of labels predicted from positions `start` <= p < `end` of their documents, over `tokens` labels."""

    start: int
    end: int
    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def with_rope(model: Transformer, rope: RopeSpec, max_positions: int) -> Transformer:
    """Return a model that shares the weights of `model` and rotates by `rope`."""
    spec: ModelSpec = model.spec.model_copy(update={"rope": rope, "max_positions": max_positions})
    other = Transformer(spec, device="meta", dtype=model.embed.weight.dtype)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def variants(spec: ModelSpec, length: int, factor: float) -> dict[str, RopeSpec]:
    """Return the ways to read `factor` times the trained `length`, by name."""
    stretched = {"factor": factor, "original_positions": length}
    return {
        "extrapolated": spec.rope,
        "linear": spec.rope.model_copy(update={"scaling": "linear", **stretched}),
        "yarn": spec.rope.model_copy(update={"scaling": "yarn", **stretched}),
    }


@torch.no_grad()
def losses_by_position(model: Transformer, loader: Loader, *, rows: int, batch: int, edges: tuple[int, ...]) -> list[PositionLoss]:
    """Return the loss between each two `edges`, over the first `rows` rows of `loader`."""
    total, count = torch.zeros(len(edges) - 1, dtype=torch.float64), torch.zeros(len(edges) - 1, dtype=torch.float64)
    inner = torch.tensor(edges[1:-1])
    for position in range(0, rows, batch):
        piece = loader.batch(position, min(batch, rows - position))
        logits = model(piece.tokens, piece.positions, piece.documents)
        losses: Tensor = token_losses(logits.flatten(0, 1), piece.labels.flatten()).double()
        bucket = torch.bucketize(piece.positions.flatten(), inner, right=True)
        kept = (piece.labels.flatten() != IGNORED) & (piece.positions.flatten() < edges[-1])
        total.index_add_(0, bucket[kept], losses[kept])
        count.index_add_(0, bucket[kept], torch.ones_like(losses[kept]))
    return [
        PositionLoss(low, high, float(loss / tokens) if tokens else math.nan, int(tokens))
        for low, high, loss, tokens in zip(edges, edges[1:], total, count, strict=False)
    ]
