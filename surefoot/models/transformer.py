"""`Transformer`: the one reference model, built from a `ModelSpec`."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from surefoot.models.attention import Attention
from surefoot.models.cache import Cache, ConvState, KVState, LatentState, State
from surefoot.models.context import Context, Exchange, make_context
from surefoot.models.conv import ShortConv
from surefoot.models.ffn import FeedForward
from surefoot.models.loss import IGNORED, Criterion, Loss, head_cross_entropy
from surefoot.models.mla import MLA
from surefoot.models.moe import MoE, balanced
from surefoot.models.norm import RMSNorm
from surefoot.models.parameters import Linear, accumulation_dtype, declare
from surefoot.models.products import linear
from surefoot.models.spec import ModelSpec


class Embedding(nn.Module):
    """tokens: [B, T] -> [B, T, D], times `scale` (rounded to the weight's dtype, as Gemma does)."""

    weight: nn.Parameter

    def __init__(self, spec: ModelSpec, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.scale = spec.embedding_scale
        declare(self, "weight", spec.vocab_size, spec.dim, role="embedding", fan_in=spec.dim, tp_dim=0, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.weight)
        return x if self.scale is None else x * torch.full((), self.scale, dtype=x.dtype, device=x.device)


class Block(nn.Module):
    """x: [B, T, D] -> ([B, T, D], auxiliary loss or None): a mixer and a feed-forward, each a residual branch."""

    def __init__(self, spec: ModelSpec, layer: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mixer = _mixer(spec, layer, device, dtype)
        self.ffn: FeedForward | MoE
        if spec.feed_forward(layer) == "moe":
            assert spec.moe is not None
            self.ffn = MoE(spec.moe, spec.dim, device=device, dtype=dtype)
        else:
            assert spec.ffn is not None
            self.ffn = FeedForward(spec.ffn, spec.dim, device=device, dtype=dtype)
        self.mixer_norm: RMSNorm | None = None
        self.ffn_norm: RMSNorm | None = None
        self.mixer_post_norm: RMSNorm | None = None
        self.ffn_post_norm: RMSNorm | None = None
        before, after = spec.norm.placement in ("pre", "sandwich"), spec.norm.placement in ("post", "sandwich")
        for name, wanted in (("mixer_norm", before), ("ffn_norm", before), ("mixer_post_norm", after), ("ffn_post_norm", after)):
            if wanted:
                setattr(self, name, RMSNorm(spec.dim, spec.norm.eps, offset=spec.norm.offset, device=device, dtype=dtype))

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Tensor | None]:
        y = self.mixer(x if self.mixer_norm is None else self.mixer_norm(x), context, state)
        x = x + (y if self.mixer_post_norm is None else self.mixer_post_norm(y))
        y = x if self.ffn_norm is None else self.ffn_norm(x)
        aux = None
        if isinstance(self.ffn, MoE):
            y, aux = self.ffn(y, context)
        else:
            y = self.ffn(y)
        return x + (y if self.ffn_post_norm is None else self.ffn_post_norm(y)), aux


def _mixer(spec: ModelSpec, layer: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    kind = spec.mixer(layer)
    if kind == "mla":
        assert spec.mla is not None
        return MLA(spec.mla, spec.dim, spec.rope, device=device, dtype=dtype)
    if kind == "conv":
        assert spec.conv is not None
        return ShortConv(spec.conv, spec.dim, device=device, dtype=dtype)
    assert spec.attention is not None
    return Attention(spec.attention, spec.dim, spec.norm, sliding=kind == "sliding", device=device, dtype=dtype)


class Activation(NamedTuple):
    """What a stretch of layers leaves: the stream [B, T, D], and its share of the loss, 0-d, already divided by N."""

    stream: Tensor
    aux: Tensor


class Transformer(nn.Module):
    """A decoder-only language model. Its parameters are uninitialised: see `initialise`, or load them."""

    def __init__(self, spec: ModelSpec, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec, device=device, dtype=dtype)
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer, device=device, dtype=dtype) for layer in range(spec.layers)})
        self.norm = RMSNorm(spec.dim, spec.norm.eps, offset=spec.norm.offset, device=device, dtype=dtype)
        self.head: Linear | None = None
        if not spec.tied_embeddings:
            self.head = Linear(spec.dim, spec.vocab_size, role="head", split="column", device=device, dtype=dtype)
        # muP (Yang et al. 2022, arXiv 2203.03466, table 8): the head's output shrinks with the width.
        # Where the vocabulary or the sequence is cut over processes, how the parts are brought together; None: all is here.
        self.exchange: Exchange | None = None
        self.loss: Criterion = head_cross_entropy
        self.logit_multiplier = spec.init.base_dim / spec.dim if spec.init.scheme == "mup" else 1.0

    @overload
    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, *, cache: Cache | None = None
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        labels: Tensor,
        normaliser: Tensor | int,
    ) -> Loss: ...
    @overload
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        normaliser: Tensor | int,
        layers: range,
    ) -> Loss | Activation: ...
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        normaliser: Tensor | int | None = None,
        cache: Cache | None = None,
        layers: range | None = None,
    ) -> Tensor | Loss | Activation:
        """Return logits [B, T, V], or with `labels` the `Loss` divided by `normaliser`.

        tokens: [B, T] int64. positions: [B, T] int64, restarting in each document; None counts from 0 (or goes on from `cache`).
        documents: [B, T] int32, attention stays within equal ids, -1 is padding; None is one document a row. labels: [B, T],
        already shifted, -100 where nothing is learned. normaliser: the global number of trained tokens of the step.

        `layers`: run this stretch of the model only, for a pipeline: `tokens` is then, unless it begins with the first layer, what
        the layer before it left, [B, T, D]; unless it ends with the last, an `Activation` is returned.
        """
        stretch = range(self.spec.layers) if layers is None else layers
        last = stretch.stop == self.spec.layers
        x, aux = self._run(tokens, positions, documents, cache, stretch)
        if last and labels is None:
            return self.logits(x)
        # A whole number would be inverted in float32, whatever the model's precision.
        wide = accumulation_dtype(x.dtype)
        count = normaliser if normaliser is not None else 1 if labels is None else labels.numel()
        scale = 1.0 / (count if isinstance(count, Tensor) else torch.full((), count, device=x.device)).to(wide)
        scaled = torch.zeros((), dtype=wide, device=x.device) if aux is None else aux.to(wide) * scale
        if not last or labels is None:
            return Activation(x, scaled)
        weight = self.embed.weight if self.head is None else self.head.weight
        nll = self.loss(x, weight, labels, scale, multiplier=self.logit_multiplier, softcap=self.spec.logit_softcap)
        return Loss(nll + scaled, nll.detach(), scaled.detach(), (labels != IGNORED).sum())

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the normed output of the last block [B, T, D] and the auxiliary loss summed over layers and tokens."""
        return self._run(tokens, positions, documents, cache, range(self.spec.layers))

    def _run(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None, layers: range
    ) -> tuple[Tensor, Tensor | None]:
        start = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        seen = None if cache is None else cache.see(documents, tokens.shape[1])
        if documents is None and seen is not None:
            documents = seen[:, -tokens.shape[1] :]
        x = self.embed(tokens) if layers.start == 0 else tokens
        narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        context = make_context(self.spec, positions, documents, narrow, start=start, seen=seen, exchange=self.exchange)
        total: Tensor | None = None
        for index in layers:
            x, aux = self.layers[str(index)](x, context, None if cache is None else cache.states[index])
            if aux is not None:
                total = aux if total is None else total + aux
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.norm(x) if layers.stop == self.spec.layers else x, total

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D] -> logits [..., V]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        logits = linear(hidden, weight, None)
        if self.logit_multiplier != 1.0:
            logits = logits * self.logit_multiplier
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    def moe_layers(self) -> list[MoE]:
        """The mixture-of-experts layers, first to last."""
        return [block.ffn for block in self.layers.values() if isinstance(block, Block) and isinstance(block.ffn, MoE)]

    @torch.no_grad()
    def update_balance(self, counts: list[Tensor]) -> None:
        """Move each layer's selection bias by the step's `counts` ([E] a MoE layer, summed over every rank with tokens)."""
        for layer, of_layer in zip(self.moe_layers(), counts, strict=True):
            if layer.spec.balance == "bias" and layer.router_bias is not None:
                layer.router_bias.copy_(balanced(layer.router_bias, of_layer.to(layer.router_bias.device), layer.spec.bias_rate))

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for `batch` sequences of at most `capacity` tokens."""
        weight = self.embed.weight
        return Cache([self._state(layer, batch, capacity, weight) for layer in range(self.spec.layers)], capacity)

    def _state(self, layer: int, batch: int, capacity: int, like: Tensor) -> State:
        spec, kind = self.spec, self.spec.mixer(layer)
        if kind == "mla":
            assert spec.mla is not None
            return LatentState(like.new_zeros(batch, capacity, spec.mla.kv_rank + spec.mla.rope_dim))
        if kind == "conv":
            assert spec.conv is not None
            halo = spec.conv.width - 1
            nothing = torch.full((batch, halo), -2, dtype=torch.int32, device=like.device)
            return ConvState(like.new_zeros(batch, halo, spec.dim), nothing)
        assert spec.attention is not None
        shape = (batch, capacity, spec.attention.kv_heads, spec.attention.head_dim)
        return KVState(like.new_zeros(shape), like.new_zeros(shape))
