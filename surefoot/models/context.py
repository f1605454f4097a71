"""What all layers of one forward pass share: positions turned into rotations, documents turned into masks.

It is computed once, outside the layers, so that a layer is a function of its input and of this value. A layer reaches other tokens
only through it: where a sequence is cut over several processes, `exchange` brings the rest of it, and no layer is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.models.rope import rotation
from surefoot.models.spec import ModelSpec


class Exchange(Protocol):
    """How the processes that share a sequence reach each other's tokens. A process holds tokens [B, T] of it, in some order."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """`models.attention.attend` over the keys of all processes: q [B, T, H, Q] -> [B, T, H, Qv]."""
        ...

    def earlier(self, x: Tensor, documents: Tensor | None, halo: int) -> tuple[Tensor, Tensor | None]:
        """For x: [B, T, D] return for every token the `halo` before it in the sequence, [halo, B, T, D], oldest first, zero before
        its start, and their documents [halo, B, T] (-2 there)."""
        ...

    def stream(self, x: Tensor) -> Tensor:
        """Return the part of x: [B, T] that belongs to this process's part of the residual stream."""
        ...

    def total(self, counts: Tensor) -> Tensor:
        """Sum over the processes that share the sequence; not differentiated."""
        ...


@dataclass(frozen=True)
class Context:
    """`documents`: [B, T] int32 or None (one document a row); `seen`: [B, S] the documents of the cached keys and these.

    `start`: index of the first of these tokens among the keys (0 without a cache).
    """

    cos: Tensor | None
    sin: Tensor | None
    sliding_cos: Tensor | None
    sliding_sin: Tensor | None
    documents: Tensor | None
    seen: Tensor | None
    start: int = 0
    exchange: Exchange | None = None

    def rotation(self, sliding: bool) -> tuple[Tensor, Tensor]:
        cos, sin = (self.sliding_cos, self.sliding_sin) if sliding else (self.cos, self.sin)
        assert cos is not None and sin is not None
        return cos, sin


def make_context(
    spec: ModelSpec,
    positions: Tensor,
    documents: Tensor | None,
    dtype: torch.dtype,
    *,
    start: int = 0,
    seen: Tensor | None = None,
    exchange: Exchange | None = None,
) -> Context:
    """Return the context of tokens at `positions`: [B, T]."""
    kinds = {spec.mixer(layer) for layer in range(spec.layers)}
    cos = sin = sliding_cos = sliding_sin = None
    if spec.attention is not None and kinds & {"attention", "sliding"}:
        cos, sin = rotation(spec.rope, spec.attention.rotary_dim, positions, dtype)
        sliding_cos, sliding_sin = cos, sin
        if spec.rope_sliding is not None and "sliding" in kinds:
            sliding_cos, sliding_sin = rotation(spec.rope_sliding, spec.attention.rotary_dim, positions, dtype)
    elif spec.mla is not None and "mla" in kinds:
        cos, sin = rotation(spec.rope, spec.mla.rope_dim, positions, dtype)
    return Context(cos, sin, sliding_cos, sliding_sin, documents, seen, start, exchange)


def visible(context: Context, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return the boolean mask [B or 1, 1, T, S]: query t sees key s, by causality, window and document."""
    query = torch.arange(context.start, context.start + tokens, device=device)[:, None]
    key = torch.arange(context.start + tokens, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (query - key < window)
    mask = mask[None, None]
    if context.documents is not None:
        seen = context.documents if context.seen is None else context.seen
        mask = mask & (context.documents[:, None, :, None] == seen[:, None, None, :])
    return mask
