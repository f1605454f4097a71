"""Gated feed-forward layer: down(act(gate x) * up x), gate and up in one product (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.models.parameters import Linear, Split
from surefoot.models.spec import FeedForwardSpec


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """act(first half) * second half, of the last dimension: [..., 2F] -> [..., F]."""
    first, second = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return nn.functional.silu(first) * second
    return nn.functional.gelu(first, approximate="tanh" if activation == "gelu_tanh" else "none") * second


def gate_backward(grad: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return `gate(gate_up)` again, [..., F], and the gradient of `gate_up`, [..., 2F], for the gradient of the output."""
    first, second = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        active = nn.functional.silu(first)
        d_first = torch.ops.aten.silu_backward(grad * second, first)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        active = nn.functional.gelu(first, approximate=approximate)
        d_first = torch.ops.aten.gelu_backward(grad * second, first, approximate=approximate)
    return active * second, torch.cat((d_first, grad * active), dim=-1)


class FeedForward(nn.Module):
    """x: [B, T, D] -> [B, T, D]. `split`: whether tensor parallelism cuts it."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        dim: int,
        *,
        split: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = spec.activation
        width = spec.hidden
        column: Split = "column" if split else None
        row: Split = "row" if split else None
        self.gate_up = Linear(dim, 2 * width, bias=spec.bias, split=column, sections=(width, width), device=device, dtype=dtype)
        self.down = Linear(width, dim, bias=spec.bias, split=row, residual=True, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(gate(self.gate_up(x), self.activation))
        return out
