"""Causal attention on a CPU: exact softmax attention, a block of queries at a time, inside each document.

PyTorch's CPU flash kernel runs bfloat16 products at float32 speed or worse and spends its time in small tiles. Batched matrix
products of one block of queries against all keys up to it run at the machine's matmul peak, and a block of scores stays in the
cache. Nothing of size T x T is ever held: the backward pass computes the scores of a block again.

Packed rows cost the sum of their documents' squares, not T^2. The operators are opaque to `torch.compile`, so that a new set of
document boundaries never recompiles a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from surefoot.models.parameters import accumulation_dtype

BLOCK = 128


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


def _heads(x: Tensor, kv_heads: int) -> Tensor:
    """[B, T, H, Q] -> contiguous [B K, H / K, T, Q]: the query heads that share a key head lie together."""
    batch, tokens, heads, size = x.shape
    grouped = x.view(batch, tokens, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    return grouped.reshape(batch * kv_heads, heads // kv_heads, tokens, size)


def _unheads(x: Tensor, batch: int) -> Tensor:
    """Undo `_heads`: [B K, G, T, Q] -> [B, T, H, Q] (a view)."""
    groups, tokens, size = x.shape[1:]
    return x.view(batch, -1, groups, tokens, size).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _probabilities(q: Tensor, k: Tensor, start: int, scale: float) -> Tensor:
    """softmax over keys 0 .. start + block - 1 of a block of queries: q [N, G, block, Q], k [N, keys, Q] -> [N, G block, keys].

    Scores are taken in float32 or wider also for bfloat16 inputs: a score of 20 rounded to bfloat16 is off by 6 %.
    """
    count, groups, block, size = q.shape
    scores = torch.bmm(q.reshape(count, groups * block, size), k.transpose(1, 2)).mul_(scale)
    if block > 1:
        future = torch.full((block, block), float("-inf"), dtype=scores.dtype).triu_(1)
        scores.view(count, groups, block, -1)[..., start:] += future
    return torch.softmax(scores, -1, out=scores)


def _span_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q: [N, G, T, Q], k, v: [N, T, Q] -> [N, G, T, Qv]."""
    count, groups, tokens, _ = q.shape
    out = q.new_empty(count, groups, tokens, v.shape[-1])
    wide = accumulation_dtype(q.dtype)
    q_wide, k_wide = q.to(wide), k.to(wide)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        weights = _probabilities(q_wide[:, :, start:end], k_wide[:, :end], start, scale).to(v.dtype)
        out[:, :, start:end] = torch.bmm(weights, v[:, :end]).view(count, groups, end - start, -1)
    return out


def _span_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `_span_forward`; those of k and v are summed over blocks in float32 or wider."""
    count, groups, tokens, size = q.shape
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    q_wide, k_wide = q.to(wide), k.to(wide)
    # sum_s P_ts dP_ts = dO_t . O_t (Dao et al. 2022, arXiv 2205.14135, eq. 4)
    row_dot = torch.linalg.vecdot(grad.to(wide), out.to(wide)).unsqueeze(-1)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        rows = groups * (end - start)
        weights = _probabilities(q_wide[:, :, start:end], k_wide[:, :end], start, scale)
        d_out = grad[:, :, start:end].reshape(count, rows, -1)
        _add_product(dv[:, :end], weights.to(v.dtype).transpose(1, 2), d_out)
        d_weights = torch.bmm(d_out, v[:, :end].transpose(1, 2)).to(wide)
        d_scores = d_weights.sub_(row_dot[:, :, start:end].reshape(count, rows, 1)).mul_(weights).mul_(scale).to(q.dtype)
        dq[:, :, start:end] = torch.bmm(d_scores, k[:, :end]).view(count, groups, end - start, size)
        _add_product(dk[:, :end], d_scores.transpose(1, 2), q[:, :, start:end].reshape(count, rows, size))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    if target.dtype == left.dtype:
        target.baddbmm_(left, right)
    else:
        target += torch.bmm(left, right)


@torch.library.custom_op("surefoot::causal_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    out = q.new_empty(batch, tokens, heads, v.shape[-1])
    for top, bottom, start, end in [(0, batch, 0, tokens)] if documents is None else spans(documents):
        q_, k_, v_ = (_heads(x[top:bottom, start:end], kv_heads) for x in (q, k, v))
        out[top:bottom, start:end] = _unheads(_span_forward(q_, k_[:, 0], v_[:, 0], scale), bottom - top)
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("surefoot::causal_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, documents: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _, _ = q.shape
    kv_heads = k.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for top, bottom, start, end in [(0, batch, 0, tokens)] if documents is None else spans(documents):
        piece = (slice(top, bottom), slice(start, end))
        grad_, q_, k_, v_, out_ = (_heads(x[piece], kv_heads) for x in (grad, q, k, v, out))
        found = _span_backward(grad_, q_, k_[:, 0], v_[:, 0], out_, scale)
        for target, part in zip((dq, dk, dv), found, strict=True):
            target[piece] = _unheads(part if part.dim() == 4 else part[:, None], bottom - top)
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, documents: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    q, k, v, documents, scale = inputs
    ctx.save_for_backward(q, k, v, output, documents)  # type: ignore[arg-type]
    ctx.scale = scale  # type: ignore[attr-defined]


def _gradients(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, documents = ctx.saved_tensors  # type: ignore[attr-defined]
    return (*_backward(grad, q, k, v, out, documents, ctx.scale), None, None)  # type: ignore[attr-defined]


_forward.register_autograd(_gradients, setup_context=_save)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
    """Return [B, T, H, Qv] for q: [B, T, H, Q], k: [B, T, K, Q], v: [B, T, K, Qv] on a CPU.

    Token t sees s <= t of the same document; `documents`: [B, T] int32, contiguous runs, None = one document a row.
    """
    out: Tensor = _forward(q, k, v, documents, scale)
    return out
