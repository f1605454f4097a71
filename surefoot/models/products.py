"""The matrix product behind every linear layer, and which library computes it.

On AMD processors MKL, PyTorch's choice for float32, stays 5 to 50 % below oneDNN for the shapes of a transformer
(`bench/kernels.py` prints both). The choice is made by the processor's maker, not by a timing: a timing could fall differently
when a run is resumed, and the resumed run would no longer be bit-identical.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def _onednn_is_faster() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return False


PREFERS_ONEDNN = _onednn_is_faster()
"""Whether float32 products on this machine's CPU go to oneDNN: built in, and the processor is AMD's."""


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and PREFERS_ONEDNN and not torch.is_autocast_enabled("cpu")


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for x: [M, K], weight: [N, K] (any strides), without autograd."""
    if _suits_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]
    return x @ weight.t()


@torch.library.custom_op("surefoot::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight)


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("surefoot::linear_backward", mutates_args=())
def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool) -> tuple[Tensor, Tensor]:
    # The weight's gradient is the one product that MKL computes as fast, and it comes out contiguous.
    grad = grad.contiguous()
    return product(grad, weight.t()) if needs_x else grad.new_empty(0), grad.t() @ x


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else 0), weight.new_empty(weight.shape)


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    needs_x: bool = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
    d_x, d_weight = _linear_backward(grad, x, weight, needs_x)
    return d_x if needs_x else None, d_weight


_linear.register_autograd(_gradients, setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for x: [..., in], weight: [out, in]."""
    if not _suits_onednn(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    # Without gradients there is nothing to dispatch, which counts when a product takes microseconds.
    opaque = torch.is_grad_enabled() or torch.compiler.is_compiling()
    y: Tensor = _linear(rows, weight) if opaque else product(rows, weight)
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias
