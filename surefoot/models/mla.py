"""Multi-head latent attention (DeepSeek-V2 §2.1, arXiv 2405.04434).

Training expands keys and values from the latent; decoding keeps only the latent and absorbs the up-projections into query and
output, which is exact: (W_uk c) . q = c . (W_uk^T q).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.models.attention import attend
from surefoot.models.cache import LatentState
from surefoot.models.context import Context, visible
from surefoot.models.norm import RMSNorm
from surefoot.models.parameters import Linear, accumulation_dtype
from surefoot.models.rope import rotate, yarn_mscale
from surefoot.models.spec import MLASpec, RopeSpec


class MLA(nn.Module):
    """x: [B, T, D] -> [B, T, D]. The rotary key is one for all heads; each head's query is (nope | rope)."""

    def __init__(
        self,
        spec: MLASpec,
        dim: int,
        rope: RopeSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.interleaved = spec, rope.interleaved
        self.scale = spec.scale if spec.scale is not None else (spec.nope_dim + spec.rope_dim) ** -0.5
        if rope.scaling == "yarn" and rope.mscale_all_dim:
            # DeepSeek puts YaRN's temperature here, and leaves cos and sin alone (mscale = mscale_all_dim).
            self.scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        q_rows, kv_rows = spec.heads * (spec.nope_dim + spec.rope_dim), spec.heads * (spec.nope_dim + spec.value_dim)
        self.q_down: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if spec.q_rank is not None:
            self.q_down = Linear(dim, spec.q_rank, bias=spec.bias, device=device, dtype=dtype)
            self.q_norm = RMSNorm(spec.q_rank, spec.norm_eps, device=device, dtype=dtype)
        self.q_up = Linear(spec.q_rank or dim, q_rows, split="column", device=device, dtype=dtype)
        self.kv_down = Linear(
            dim,
            spec.kv_rank + spec.rope_dim,
            bias=spec.bias,
            sections=(spec.kv_rank, spec.rope_dim),
            device=device,
            dtype=dtype,
        )
        self.kv_norm = RMSNorm(spec.kv_rank, spec.norm_eps, device=device, dtype=dtype)
        self.kv_up = Linear(spec.kv_rank, kv_rows, split="column", device=device, dtype=dtype)
        self.out = Linear(spec.heads * spec.value_dim, dim, bias=spec.bias, split="row", residual=True, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: Context, state: LatentState | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        spec = self.spec
        q = self.q_up(x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)))
        q_nope, q_rope = q.view(batch, tokens, -1, spec.nope_dim + spec.rope_dim).split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x).split((spec.kv_rank, spec.rope_dim), dim=-1)
        latent = self.kv_norm(latent)
        cos, sin = context.rotation(sliding=False)
        q_rope = rotate(q_rope, cos, sin, interleaved=self.interleaved)
        k_rope = rotate(k_rope[:, :, None], cos, sin, interleaved=self.interleaved)
        if state is not None:
            remembered = state.extend(torch.cat((latent, k_rope[:, :, 0]), dim=-1), context.start)
            y = self._absorbed(q_nope, q_rope, remembered, context)
        else:
            y = self._expanded(q_nope, q_rope, latent, k_rope, context)
        out: Tensor = self.out(y.reshape(batch, tokens, -1))
        return out

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, context: Context) -> Tensor:
        spec = self.spec
        kv = self.kv_up(latent).view(*latent.shape[:2], -1, spec.nope_dim + spec.value_dim)
        k_nope, v = kv.split((spec.nope_dim, spec.value_dim), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        return attend(q, k, v, context, scale=self.scale, window=None, softcap=None)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, remembered: Tensor, context: Context) -> Tensor:
        spec = self.spec
        up = self.kv_up.weight.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        up_k, up_v = up.split((spec.nope_dim, spec.value_dim), dim=1)
        latent, k_rope = remembered.split((spec.kv_rank, spec.rope_dim), dim=-1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, up_k), q_rope), dim=-1)
        scores = torch.einsum("bthr,bsr->bhts", q, torch.cat((latent, k_rope), dim=-1)) * self.scale
        scores = scores.masked_fill(~visible(context, q.shape[1], None, q.device), float("-inf"))
        weights = scores.to(accumulation_dtype(scores.dtype)).softmax(-1).to(latent.dtype)
        return torch.einsum("bhts,bsr,hvr->bthv", weights, latent, up_v)
