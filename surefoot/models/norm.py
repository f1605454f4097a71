"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.models.parameters import accumulation_dtype, declare


class RMSNorm(nn.Module):
    """Normalise the last dimension; statistics in float32 (float64 for float64), whatever the input.

    `offset`: multiply by 1 + weight, in the accumulation dtype, as Gemma does.
    """

    weight: nn.Parameter

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        offset: bool = False,
        tp_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        declare(self, "weight", dim, role="norm", tp_dim=tp_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        normed = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
        if self.offset:
            return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * normed.to(x.dtype)

    def mean_square(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., 1]."""
        return x.square().mean(-1, keepdim=True)
