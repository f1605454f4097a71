"""Grouped-query attention: full or sliding, with the variants of the families in `models/hf`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.models.blocked_attention import causal_attention
from surefoot.models.cache import KVState
from surefoot.models.context import Context, visible
from surefoot.models.norm import RMSNorm
from surefoot.models.parameters import Linear, accumulation_dtype
from surefoot.models.rope import rotate
from surefoot.models.spec import AttentionSpec, NormSpec


def attend(q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """softmax(q k^T scale + mask) v for q: [B, T, H, Q], k: [B, S, K, Q], v: [B, S, K, Qv]; returns [B, T, H, Qv]."""
    if context.exchange is not None:
        return context.exchange.attend(q, k, v, context, scale=scale, window=window, softcap=softcap)
    return attend_here(q, k, v, context, scale=scale, window=window, softcap=softcap)


def attend_here(q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """`attend` where every key of the sequence is at hand.

    One algorithm, and the fastest kernel that computes it: on a CPU our own blocks, elsewhere SDPA; an explicit mask for windows
    (and packed rows where a device has no kernel for them), and plain matrix products where scores are capped.
    """
    tokens, keys = q.shape[1], k.shape[1]
    if torch.is_autocast_enabled(q.device.type):
        # A norm with float32 weights widens q and k under autocast; the products are to run in v's narrow dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
    if window is not None and window >= keys:
        window = None
    if softcap is not None:
        return _capped(q, k, v, visible(context, tokens, window, q.device), scale, softcap)
    plain = window is None and (tokens == keys or tokens == 1)
    if plain and tokens == keys and tokens > 1 and q.device.type == "cpu":
        return causal_attention(q, k, v, context.documents, scale)
    if window is None and tokens == 1 and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _decode(q, k, v, None if context.documents is None else visible(context, 1, None, q.device), scale)
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:
        # Flash kernels want equal head sizes; zero columns of v come out as zero columns and are cut off.
        v = nn.functional.pad(v, (0, q.shape[-1] - value_dim))
    mask = None if plain and context.documents is None else visible(context, tokens, window, q.device)
    out = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and tokens > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)[..., :value_dim]


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query a row, in bfloat16 on a CPU, where SDPA's kernel is several times slower than two products; scores in float32."""
    batch, _, heads, size = q.shape
    grouped = q.view(batch, k.shape[2], -1, size).float()
    scores = (grouped @ k.permute(0, 2, 3, 1).float()).mul_(scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v.transpose(1, 2)).view(batch, 1, heads, -1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores capped by `softcap * tanh(scores / softcap)` (Gemma 2), softmax in float32 or wider."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthq,bshq->bhts", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.to(accumulation_dtype(scores.dtype)).softmax(-1).to(v.dtype)
    return torch.einsum("bhts,bshq->bthq", weights, v)


class Attention(nn.Module):
    """x: [B, T, D] -> [B, T, D]. One product makes q, k and v; rows of its weight are all q heads, all k heads, all v heads."""

    def __init__(
        self,
        spec: AttentionSpec,
        dim: int,
        norm: NormSpec,
        *,
        sliding: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.sliding = spec, sliding
        self.window = spec.window if sliding else None
        self.scale = spec.scale if spec.scale is not None else spec.head_dim**-0.5
        q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rows = (q_rows, kv_rows, kv_rows)
        self.qkv = Linear(dim, sum(rows), bias=spec.qkv_bias, split="column", sections=rows, device=device, dtype=dtype)
        self.out = Linear(q_rows, dim, bias=spec.out_bias, split="row", residual=True, device=device, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            # Heads share a per-head norm; a full norm is cut with the heads.
            q_size, k_size = (spec.head_dim, spec.head_dim) if per_head else (q_rows, kv_rows)
            cut = None if per_head else 0
            for name, size in (("q_norm", q_size), ("k_norm", k_size)):
                layer = RMSNorm(
                    size,
                    norm.eps,
                    offset=norm.offset,
                    tp_dim=cut,
                    device=device,
                    dtype=dtype,
                )
                setattr(self, name, layer)

    def forward(self, x: Tensor, context: Context, state: KVState | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x)
        kv_rows = qkv.shape[-1] * self.spec.kv_heads // (self.spec.heads + 2 * self.spec.kv_heads)
        q, k, v = qkv.split((qkv.shape[-1] - 2 * kv_rows, kv_rows, kv_rows), dim=-1)
        if self.q_norm is not None and self.k_norm is not None and self.spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.view(batch, tokens, -1, self.spec.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.rotation(self.sliding)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if state is not None:
            k, v = state.extend(k, v, context.start)
        y = attend(q, k, v, context, scale=self.scale, window=self.window, softcap=self.spec.softcap)
        out: Tensor = self.out(y.reshape(batch, tokens, -1))
        return out
