"""The experts' arithmetic, grouped: tokens sorted by expert, one matrix product an expert on its contiguous rows.

There is no loop over tokens and no capacity: every chosen (token, expert) pair is computed. The backward passes are written out
so that a row is gathered, never scattered with additions: gradients are deterministic and each expert's weight gradient is
written once, in place. An expert's two products and the activation between them run back to back, while its rows are in the
cache. Row counts stay inside an operator, so that `torch.compile` sees fixed shapes; and products are MKL's here, not oneDNN's
(`models/products.py`), which would make a new kernel for every new number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from surefoot.models.ffn import gate, gate_backward


@dataclass(frozen=True)
class Dispatch:
    """How S tokens x k choices become rows sorted by expert.

    `order`: [S k] flat (token, choice) of each sorted row; `inverse`: [S k] the sorted row of each (token, choice);
    `counts`: [E] rows of each expert; `top_k`: k.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    top_k: int


def make_dispatch(chosen: Tensor, experts: int) -> Dispatch:
    """Return the dispatch for `chosen`: [S, k] expert ids."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return Dispatch(order, inverse, count_choices(chosen, experts, None), chosen.shape[1])


def count_choices(chosen: Tensor, experts: int, counted: Tensor | None) -> Tensor:
    """Return how many of `chosen`: [S, k] fell on each expert, int64 [E]; `counted`: [S] bool, which tokens count."""
    ones = torch.ones_like(chosen) if counted is None else counted[:, None].expand_as(chosen).to(torch.int64)
    return chosen.new_zeros(experts).scatter_add_(0, chosen.flatten(), ones.flatten())


class _Gather(Function):
    """x: [S, D] -> rows [S k, D] sorted by expert; backward adds the k rows of a token in order of choice."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k  # type: ignore[attr-defined]
        return x.index_select(0, order.div(top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = grads[0].index_select(0, inverse)
        return rows.view(-1, ctx.top_k, rows.shape[-1]).sum(1), None, None, None  # type: ignore[attr-defined]


class _Combine(Function):
    """rows: [S k, D] sorted by expert, weights: [S, k] -> [S, D], the weighted sum over each token's choices."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        picked = rows.index_select(0, inverse).view(*weights.shape, rows.shape[-1])
        return (picked * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0].index_select(0, order.div(weights.shape[1], rounding_mode="floor"))
        by_row = (rows * grad).sum(-1).index_select(0, inverse).view(weights.shape)
        return grad * weights.flatten().index_select(0, order)[:, None], by_row, None, None


def gather(x: Tensor, dispatch: Dispatch) -> Tensor:
    """x: [S, D] -> [S k, D]: a row for every (token, choice), sorted by expert."""
    out: Tensor = _Gather.apply(x, dispatch.order, dispatch.inverse, dispatch.top_k)  # type: ignore[no-untyped-call]
    return out


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """rows: [S k, D], weights: [S, k] -> [S, D]."""
    out: Tensor = _Combine.apply(rows, weights, dispatch.order, dispatch.inverse)  # type: ignore[no-untyped-call]
    return out


def grouped_ffn(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str) -> Tensor:
    """Each row through its own expert: down(act(gate x) * up x).

    rows: [R, D] sorted by expert, gate_up: [E, 2F, D], down: [E, D, F], counts: [E] int64 with sum R -> [R, D].
    """
    out: Tensor = _grouped_ffn(rows, gate_up, down, counts, activation)[0]
    return out


def _pieces(counts: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, rows in enumerate(counts.tolist()):
        if rows:
            yield expert, slice(start, start + rows)
        start += rows


@torch.library.custom_op("surefoot::grouped_ffn", mutates_args=())
def _grouped_ffn(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the output [R, D] and, for the backward pass, what the first product gave [R, 2F]."""
    out = torch.empty_like(rows)
    inner = rows.new_empty(rows.shape[0], gate_up.shape[1])
    for expert, piece in _pieces(counts):
        torch.mm(rows[piece], gate_up[expert].t(), out=inner[piece])
        torch.mm(gate(inner[piece], activation), down[expert].t(), out=out[piece])
    return out, inner


@_grouped_ffn.register_fake
def _(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], gate_up.shape[1])


@torch.library.custom_op("surefoot::grouped_ffn_backward", mutates_args=())
def _grouped_ffn_backward(
    grad: Tensor, rows: Tensor, inner: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    d_rows = torch.empty_like(rows)
    # An expert that no token chose has a gradient of zero.
    d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    for expert, piece in _pieces(counts):
        d_out, x = grad[piece].contiguous(), rows[piece]
        hidden, d_inner = gate_backward(torch.mm(d_out, down[expert]), inner[piece], activation)
        torch.mm(d_out.t(), hidden, out=d_down[expert])
        torch.mm(d_inner.t(), x, out=d_gate_up[expert])
        torch.mm(d_inner, gate_up[expert], out=d_rows[piece])
    return d_rows, d_gate_up, d_down


@_grouped_ffn_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, inner: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(gate_up), torch.empty_like(down)


def _save(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, gate_up, down, counts, ctx.activation = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(rows, output[1], gate_up, down, counts)  # type: ignore[arg-type]


def _gradients(ctx: FunctionCtx, grad: Tensor, of_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, inner, gate_up, down, counts = ctx.saved_tensors  # type: ignore[attr-defined]
    found = _grouped_ffn_backward(grad, rows, inner, gate_up, down, counts, ctx.activation)  # type: ignore[attr-defined]
    return (*found, None, None)


_grouped_ffn.register_autograd(_gradients, setup_context=_save)
