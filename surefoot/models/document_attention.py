"""Causal attention inside documents, for rows that pack several: one flash kernel a document, nothing across.

Masking a whole row costs T^2 whatever the documents; a kernel a document costs the sum of their squares. The operator is opaque
to `torch.compile`, so a new set of boundaries never recompiles a block. CPU only; other devices take the masked path.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def spans(documents: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first_row, last_row + 1, start, end): runs of equal ids in documents: [B, T], equal spans of adjacent rows joined."""
    ids = documents.numpy()
    rows, tokens = ids.shape
    changes = ids[:, 1:] != ids[:, :-1]
    boundaries = [np.concatenate(([0], np.flatnonzero(row) + 1, [tokens])) for row in changes]
    row = 0
    while row < rows:
        last = row + 1
        while last < rows and np.array_equal(boundaries[last], boundaries[row]):
            last += 1
        for start, end in zip(boundaries[row][:-1].tolist(), boundaries[row][1:].tolist(), strict=True):
            yield row, last, start, end
        row = last


@torch.library.custom_op("surefoot::document_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    out = torch.empty(batch, tokens, heads, v.shape[-1], dtype=q.dtype)
    lse = torch.empty(batch, tokens, heads, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for top, bottom, start, end in spans(documents):
        piece = (slice(top, bottom), slice(start, end))
        o, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[piece].transpose(1, 2), k[piece].transpose(1, 2), v[piece].transpose(1, 2), 0.0, True, scale=scale
        )
        out[piece], lse[piece] = o.transpose(1, 2), norm.transpose(1, 2)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, tokens, heads, v.shape[-1]), q.new_empty(batch, tokens, heads, dtype=wide)


@torch.library.custom_op("surefoot::document_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for top, bottom, start, end in spans(documents):
        piece = (slice(top, bottom), slice(start, end))
        parts = (x[piece].transpose(1, 2) for x in (grad, q, k, v, out, lse))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, 0.0, True, scale=scale)
        for target, part in zip((dq, dk, dv), found, strict=True):
            target[piece] = part.transpose(1, 2)
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, scale = inputs
    ctx.save_for_backward(q, k, v, *output, documents)  # type: ignore[arg-type]
    ctx.scale = scale  # type: ignore[attr-defined]


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, documents = ctx.saved_tensors  # type: ignore[attr-defined]
    return (*_backward(grad, q, k, v, out, lse, documents, ctx.scale), None, None)  # type: ignore[attr-defined]


_forward.register_autograd(_gradients, setup_context=_save)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> Tensor:
    """Return [B, T, H, Qv] for q: [B, T, H, Q], k, v: [B, T, K, Q]; token t sees s <= t of the same document and run."""
    out, _ = _forward(q, k, v, documents, scale)
    return out
