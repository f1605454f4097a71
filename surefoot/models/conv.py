"""Gated short convolution (LFM2): y = W_out(c * conv(b * x)), depthwise and causal, (b, c, x) = W_in u."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.models.cache import ConvState
from surefoot.models.context import Context
from surefoot.models.parameters import Linear, declare
from surefoot.models.spec import ConvSpec


class ShortConv(nn.Module):
    """u: [B, T, D] -> [B, T, D]. `kernel`: [D, width], its last column multiplies the present token.

    A tap that would reach into another document (or padding) contributes nothing.
    """

    kernel: nn.Parameter
    kernel_bias: nn.Parameter | None

    def __init__(self, spec: ConvSpec, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.width = spec.width
        self.in_proj = Linear(dim, 3 * dim, bias=spec.bias, split="column", sections=(dim, dim, dim), device=device, dtype=dtype)
        declare(self, "kernel", dim, spec.width, role="kernel", fan_in=spec.width, tp_dim=0, device=device, dtype=dtype)
        if spec.bias:
            declare(self, "kernel_bias", dim, role="bias", fan_in=spec.width, tp_dim=0, device=device, dtype=dtype)
        else:
            self.register_parameter("kernel_bias", None)
        self.out = Linear(dim, dim, bias=spec.bias, split="row", residual=True, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context, state: ConvState | None = None) -> Tensor:
        b, c, u = self.in_proj(x).chunk(3, dim=-1)
        gated = b * u
        batch, tokens, _ = gated.shape
        halo = self.width - 1
        documents = context.documents
        mixed = self.kernel[:, -1] * gated
        if context.exchange is not None:
            earlier, theirs = context.exchange.earlier(gated, documents, halo)
            for tap in range(halo):
                reached = earlier[tap]
                if documents is not None and theirs is not None:
                    reached = reached * (theirs[tap] == documents)[..., None]
                mixed = mixed + self.kernel[:, tap] * reached
            return self._finish(c, mixed)
        if state is not None:
            own = documents if documents is not None else torch.zeros(batch, tokens, dtype=torch.int32, device=x.device)
            inputs, documents = torch.cat((state.inputs, gated), dim=1), torch.cat((state.documents, own), dim=1)
            state.inputs, state.documents = inputs[:, -halo:], documents[:, -halo:]
        else:
            inputs = nn.functional.pad(gated, (0, 0, halo, 0))
            if documents is not None:
                documents = nn.functional.pad(documents, (halo, 0), value=-2)  # no document: these taps are zero anyway
        for tap in range(halo):
            earlier = inputs[:, tap : tap + tokens]
            if documents is not None:
                earlier = earlier * (documents[:, tap : tap + tokens] == documents[:, halo:])[..., None]
            mixed = mixed + self.kernel[:, tap] * earlier
        return self._finish(c, mixed)

    def _finish(self, c: Tensor, mixed: Tensor) -> Tensor:
        if self.kernel_bias is not None:
            mixed = mixed + self.kernel_bias
        out: Tensor = self.out(c * mixed)
        return out
