"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).

Between layers each tensor rank holds its own stretch of the sequence. A mixer or a dense feed-forward layer gathers the whole
sequence, computes with its own heads or columns, and leaves a partial sum, of which each rank gets back its stretch:

    stream [B, T/t, D] -> gather -> [B, T, D] -> layer with 1/t of the heads -> partial [B, T, D] -> scatter_sum -> [B, T/t, D]

Both are attached to the layer from outside. Layers of experts are not touched: they work on the stretch (`parallel/expert.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.models.attention import Attention
from surefoot.models.conv import ShortConv
from surefoot.models.ffn import FeedForward
from surefoot.models.loss import CHUNK_BYTES, Vocabulary, head_cross_entropy
from surefoot.models.mla import MLA
from surefoot.models.norm import RMSNorm
from surefoot.models.parameters import Linear, accumulation_dtype
from surefoot.models.transformer import Block, Embedding, Transformer
from surefoot.parallel.collectives import Group, all_reduce, gather, scatter_sum, total
from surefoot.parallel.placement import Placement

SEQUENCE = 1


def split_tensor(model: Transformer, placements: dict[str, Placement], group: Group) -> None:
    """Attach the exchanges of tensor parallelism to `model`, whose parameters are already this rank's parts (`placements`)."""
    rank = group.rank()
    for block in model.layers.values():
        assert isinstance(block, Block)
        for layer in (block.mixer, block.ffn):
            if isinstance(layer, Attention | MLA | ShortConv | FeedForward):
                _bracket(layer, group)
                name = "down" if isinstance(layer, FeedForward) else "out"
                out = getattr(layer, name)
                if out.bias is not None:
                    setattr(layer, name, RowLinear(out, bias=rank == 0))
        if isinstance(block.mixer, Attention) and block.mixer.spec.qk_norm == "full":
            for name in ("q_norm", "k_norm"):
                setattr(block.mixer, name, SplitNorm(getattr(block.mixer, name), group))
    if "embed.weight" in placements:
        _, start, length = placements["embed.weight"].runs[0][0]
        model.embed = SplitEmbedding(model.embed, start, length, group)
    name = "embed.weight" if model.spec.tied_embeddings else "head.weight"
    if name in placements:
        ((_, start, _),) = placements[name].runs[0]
        model.loss = SplitLoss(Vocabulary(start, lambda x: all_reduce(x, group, largest=True), lambda x: all_reduce(x, group)), group)


def _bracket(layer: nn.Module, group: Group) -> None:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather(inputs[0], SEQUENCE, group), *inputs[1:]

    def after(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return scatter_sum(out, SEQUENCE, group)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _adopt(module: nn.Module, other: nn.Module) -> None:
    """Give `module` the parameters of `other`, with their declarations and names."""
    for name, parameter in other.named_parameters(recurse=False):
        module.register_parameter(name, parameter)
    module.__dict__["decls"] = other.__dict__["decls"]


class RowLinear(nn.Module):
    """A product whose inputs are cut: ranks leave partial sums, so one alone adds the bias (and the others' gradient of it is 0)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, whole: Linear, *, bias: bool) -> None:
        super().__init__()
        _adopt(self, whole)
        self.share, self.product = 1.0 if bias else 0.0, whole.product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias * self.share)


class SplitNorm(RMSNorm):
    """A norm over all heads together, of which this rank holds some."""

    def __init__(self, whole: RMSNorm, group: Group) -> None:
        nn.Module.__init__(self)
        _adopt(self, whole)
        self.eps, self.offset, self.group = whole.eps, whole.offset, group

    def mean_square(self, x: Tensor) -> Tensor:
        return total(x.square().sum(-1, keepdim=True), self.group) / (x.shape[-1] * self.group.size())


class SplitEmbedding(Embedding):
    """An embedding of which this rank holds entries `start` to `start + length` - 1: tokens [B, T] -> its stretch [B, T/t, D]."""

    def __init__(self, whole: Embedding, start: int, length: int, group: Group) -> None:
        nn.Module.__init__(self)
        _adopt(self, whole)
        self.scale, self.start, self.length, self.group = whole.scale, start, length, group

    def forward(self, tokens: Tensor) -> Tensor:
        here = (tokens >= self.start) & (tokens < self.start + self.length)
        x = nn.functional.embedding(torch.where(here, tokens - self.start, 0), self.weight) * here[..., None]
        x = scatter_sum(x, SEQUENCE, self.group)
        return x if self.scale is None else x * torch.full((), self.scale, dtype=x.dtype, device=x.device)


class SplitLoss:
    """`head_cross_entropy` of a stream cut along the sequence and a head cut along the vocabulary."""

    def __init__(self, vocabulary: Vocabulary, group: Group) -> None:
        self.vocabulary, self.group = vocabulary, group

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, *, multiplier: float, softcap: float | None
    ) -> Tensor:
        # As many rows at a time as on the rank with the most entries: the chunks are collective.
        most = int(all_reduce(torch.full((1,), weight.shape[0], device=weight.device), self.group, largest=True))
        rows = max(1, CHUNK_BYTES // (most * accumulation_dtype(hidden.dtype).itemsize))
        return head_cross_entropy(
            gather(hidden, SEQUENCE, self.group),
            weight,
            labels,
            scale,
            multiplier=multiplier,
            softcap=softcap,
            vocabulary=self.vocabulary,
            chunk_rows=rows,
        )
