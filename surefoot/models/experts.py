"""The experts' arithmetic, grouped: tokens sorted by expert, one matrix product an expert on its contiguous rows.

There is no loop over tokens and no capacity: every chosen (token, expert) pair is computed. The backward passes are written out
so that a row is gathered, never scattered with additions: gradients are deterministic and each expert's weight gradient is
written once, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class Dispatch:
    """How S tokens x k choices become rows sorted by expert.

    `order`: [S k] flat (token, choice) of each sorted row; `inverse`: [S k] the sorted row of each (token, choice);
    `counts`: rows of each expert; `top_k`: k.
    """

    order: Tensor
    inverse: Tensor
    counts: tuple[int, ...]
    top_k: int


def make_dispatch(chosen: Tensor, experts: int) -> tuple[Dispatch, Tensor]:
    """Return the dispatch for `chosen`: [S, k] expert ids, and the rows of each expert as a tensor [E]."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(flat, minlength=experts)
    return Dispatch(order, inverse, tuple(counts.tolist()), chosen.shape[1]), counts


class _Gather(Function):
    """x: [S, D] -> rows [S k, D] sorted by expert; backward adds the k rows of a token in order of choice."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch  # type: ignore[attr-defined]
        return x.index_select(0, dispatch.order.div(dispatch.top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        dispatch: Dispatch = ctx.dispatch  # type: ignore[attr-defined]
        rows = grads[0].index_select(0, dispatch.inverse)
        return rows.view(-1, dispatch.top_k, rows.shape[-1]).sum(1), None


class _Combine(Function):
    """rows: [S k, D] sorted by expert, weights: [S, k] -> [S, D], the weighted sum over each token's choices."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch  # type: ignore[attr-defined]
        ctx.save_for_backward(rows, weights)
        picked = rows.index_select(0, dispatch.inverse).view(*weights.shape, rows.shape[-1])
        return torch.einsum("skd,sk->sd", picked, weights)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dispatch: Dispatch = ctx.dispatch  # type: ignore[attr-defined]
        rows, weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0].index_select(0, dispatch.order.div(dispatch.top_k, rounding_mode="floor"))
        sorted_weights = weights.flatten().index_select(0, dispatch.order)
        by_row = torch.einsum("rd,rd->r", rows, grad)
        return grad * sorted_weights[:, None], by_row.index_select(0, dispatch.inverse).view(weights.shape), None


class _GroupedLinear(Function):
    """rows: [R, in] sorted by expert, weight: [E, out, in] -> [R, out]."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts  # type: ignore[attr-defined]
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for expert, piece in _pieces(counts):
            torch.mm(rows[piece], weight[expert].t(), out=out[piece])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs: Any = ctx.needs_input_grad  # type: ignore[attr-defined]
        counts: tuple[int, ...] = ctx.counts  # type: ignore[attr-defined]
        grad = grads[0].contiguous()
        d_rows = torch.empty_like(rows) if needs[0] else None
        d_weight = torch.empty_like(weight) if needs[1] else None
        for expert, piece in _pieces(counts):
            if d_rows is not None:
                torch.mm(grad[piece], weight[expert], out=d_rows[piece])
            if d_weight is not None:
                torch.mm(grad[piece].t(), rows[piece], out=d_weight[expert])
        if d_weight is not None:
            for expert, rows_of in enumerate(counts):
                if rows_of == 0:
                    d_weight[expert].zero_()
        return d_rows, d_weight, None


def _pieces(counts: tuple[int, ...]) -> list[tuple[int, slice]]:
    pieces, start = [], 0
    for expert, rows in enumerate(counts):
        if rows:
            pieces.append((expert, slice(start, start + rows)))
        start += rows
    return pieces


def gather(x: Tensor, dispatch: Dispatch) -> Tensor:
    """x: [S, D] -> [S k, D]: a row for every (token, choice), sorted by expert."""
    out: Tensor = _Gather.apply(x, dispatch)  # type: ignore[no-untyped-call]
    return out


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """rows: [S k, D], weights: [S, k] -> [S, D]."""
    out: Tensor = _Combine.apply(rows, weights, dispatch)  # type: ignore[no-untyped-call]
    return out


def grouped_linear(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """rows: [R, in] sorted by expert, weight: [E, out, in] -> [R, out]; each row meets its expert's matrix."""
    out: Tensor = _GroupedLinear.apply(rows, weight, dispatch.counts)  # type: ignore[no-untyped-call]
    return out
