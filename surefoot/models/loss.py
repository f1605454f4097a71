"""Cross-entropy of a language-model head without ever holding the logits of a whole batch.

Logits of a few rows at a time are turned at once into their contribution to the loss and to both gradients, so memory is one
chunk instead of several float32 copies of [tokens, V], and the head's product is not computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from surefoot.models.parameters import accumulation_dtype
from surefoot.models.products import product

IGNORED = -100
CHUNK_BYTES = 32 * 2**20


class Criterion(Protocol):
    """The loss of a stream: `head_cross_entropy`, or the same over processes."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, *, multiplier: float, softcap: float | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Vocabulary:
    """Which part of a vocabulary cut over processes this one holds: entries from `start` on, and how statistics [2, rows] or [rows]
    are combined over all parts."""

    start: int
    maximum: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """0-d tensors: `total` (to differentiate), `cross_entropy` (sum over trained tokens / N), `aux` (/ N), `tokens` trained."""

    total: Tensor
    cross_entropy: Tensor
    aux: Tensor
    tokens: Tensor


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p(label), 0 where ignored: logits [S, V], labels [S] -> [S], in the accumulation dtype."""
    wide = logits.to(accumulation_dtype(logits.dtype))
    return torch.nn.functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")


class _HeadCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor,
        multiplier: float,
        softcap: float | None,
        vocabulary: Vocabulary | None,
        chunk_rows: int,
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])  # type: ignore[attr-defined]
        wide = accumulation_dtype(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        step = chunk_rows or max(1, CHUNK_BYTES // (weight.shape[0] * (8 if wide == torch.float64 else 4)))
        single = step >= hidden.shape[0]
        d_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            part, d_logits = _chunk(hidden[rows], weight, labels[rows], scale, multiplier, softcap, vocabulary, needs_grad)
            total += part
            if d_hidden is None or d_logits is None:
                continue
            d_hidden[rows] = product(d_logits, weight.t())
            piece = d_logits.t() @ hidden[rows]
            # Chunks are added in float32 (or wider): a sum of rounded bfloat16 gradients would lose the small ones.
            d_weight = piece if single else piece.to(wide) if d_weight is None else d_weight.add_(piece)
        ctx.save_for_backward(d_hidden, d_weight)  # type: ignore[arg-type]
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0]
        if grad.device.type != "cpu" or grad.item() != 1.0:
            d_hidden, d_weight = d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype)
        return d_hidden, d_weight.to(d_hidden.dtype), None, None, None, None, None, None


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    multiplier: float,
    softcap: float | None,
    vocabulary: Vocabulary | None,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the chunk's scaled loss and d loss / d (h W^T), [rows, V] in the dtype of `hidden`."""
    logits = product(hidden, weight).to(accumulation_dtype(hidden.dtype))
    if multiplier != 1.0:
        logits = logits * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    trained = labels != IGNORED
    start = 0 if vocabulary is None else vocabulary.start
    here = trained & (labels >= start) & (labels < start + weight.shape[0])
    target = torch.where(here, labels - start, 0)[:, None]
    picked = torch.where(here[:, None], logits.gather(-1, target), 0.0)
    if vocabulary is None:
        lse = logits.logsumexp(-1, keepdim=True)
    else:
        largest = vocabulary.maximum(logits.amax(-1))[:, None]
        sums, chosen = vocabulary.total(torch.stack(((logits - largest).exp().sum(-1), picked[:, 0])))
        lse, picked = largest + sums.log()[:, None], chosen[:, None]
    weights = trained.to(logits.dtype)[:, None] * scale.to(logits.dtype)
    loss = ((lse - picked) * weights).sum()
    if not needs_grad:
        return loss, None
    slope = multiplier if softcap is None else multiplier * (1.0 - (logits / softcap).square())
    grad = (logits - lse).exp_() if softcap is not None else logits.sub_(lse).exp_()
    grad.scatter_add_(-1, target, -here.to(grad.dtype)[:, None])
    grad *= weights
    if softcap is not None or multiplier != 1.0:
        grad *= slope
    return loss, grad.to(hidden.dtype)


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    vocabulary: Vocabulary | None = None,
    chunk_rows: int = 0,
) -> Tensor:
    """Return sum of -log p(label) * scale over labels != -100.

    hidden: [B, T, D], weight: [V, D], labels: [B, T] int64, scale: 0-d. Logits are `multiplier * h W^T`, then soft-capped. `vocabulary`:
    `weight` is a part of the head's rows; every part returns the whole loss, and gradients through its own rows only. `chunk_rows`:
    rows of logits at a time (0: as many as `CHUNK_BYTES` hold), the same on every part.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if torch.is_autocast_enabled(hidden.device.type):
        narrow = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
    with torch.autocast(hidden.device.type, enabled=False):
        out: Tensor = _HeadCrossEntropy.apply(hidden, weight, labels, scale, multiplier, softcap, vocabulary, chunk_rows)  # type: ignore[no-untyped-call]
    return out
