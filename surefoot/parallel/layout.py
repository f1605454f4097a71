"""`Layout`: degrees of parallelism as data, and what a model and a sequence must be for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import PositiveInt

from surefoot.core.config import Config
from surefoot.core.errors import LayoutError
from surefoot.models.spec import ModelSpec

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: what talks most, and cannot hide it, stands innermost (Megatron, torchtitan)."""


class Layout(Config):
    """Degrees of each kind of parallelism; their product is the number of processes.

    `replicate` x `shard` is the data-parallel degree: copies of the model, and shards of one copy (FSDP2); both at once is HSDP.
    `tensor` cuts heads, feed-forward widths and the vocabulary, and the stream between layers along the sequence. `context` cuts
    the sequence. `pipeline` cuts the layers. `expert` cuts experts over the ranks that hold different tokens and adds none.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    attention: Literal["ring", "ulysses"] = "ring"  # how context ranks reach each other's keys
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    stages_per_rank: PositiveInt = 1  # pipeline: of the interleaved schedules

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tokens

    @property
    def tokens(self) -> int:
        """How many ranks of a pipeline stage hold different tokens."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """How many ranks read different samples."""
        return self.replicate * self.shard

    @property
    def chunks(self) -> int:
        """How many pieces a sequence is cut into over the context ranks: two for each under ring attention (zigzag)."""
        return 1 if self.context == 1 else 2 * self.context if self.attention == "ring" else self.context

    def check(self, world_size: int) -> None:
        """Raise `LayoutError` when this layout does not use `world_size` processes."""
        if self.world_size != world_size:
            used = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "one of each"
            raise LayoutError(
                f"{used} is {self.world_size} processes, but {world_size} run",
                where="layout",
                remedy=f"start {self.world_size} (--nproc {self.world_size}), or change a degree",
            )

    def for_world(self, world_size: int) -> Layout:
        """Return this layout, or, where it asks for nothing and several processes run, replicas on all of them."""
        return self.model_copy(update={"replicate": world_size}) if self == Layout() and world_size > 1 else self

    def check_model(self, spec: ModelSpec, sequence: int) -> None:
        """Raise `LayoutError`, naming the nearest degrees that work, when `spec` or a sequence of this length cannot be cut so."""
        kinds = {spec.mixer(layer) for layer in range(spec.layers)}
        dense = any(spec.feed_forward(layer) == "dense" for layer in range(spec.layers))
        attends = spec.attention is not None and bool(kinds & {"attention", "sliding"})
        heads = [(spec.attention.heads, "heads"), (spec.attention.kv_heads, "key/value heads")] if attends and spec.attention else []
        heads += [(spec.mla.heads, "heads")] if spec.mla is not None and "mla" in kinds else []
        widths = [(spec.ffn.hidden, "feed-forward width")] if spec.ffn is not None and dense else []
        widths += [(spec.dim, "channels")] if "conv" in kinds else []
        _divide("tensor", self.tensor, [*heads, *widths])
        piece = -(-spec.vocab_size // self.tensor)
        if piece * (self.tensor - 1) >= spec.vocab_size:
            what = f"a vocabulary of {spec.vocab_size} leaves the last of {self.tensor} tensor ranks nothing"
            raise LayoutError(what, where="layout.tensor", remedy=f"use {-(-spec.vocab_size // piece)} or fewer")
        if self.attention == "ulysses":
            _divide("context", self.context, [(count // self.tensor, f"{what} of a tensor rank") for count, what in heads])
        if self.chunks * self.tensor > 1 and sequence % (self.chunks * self.tensor):
            unit = self.chunks * self.tensor
            raise LayoutError(
                f"{sequence} tokens do not divide into {unit} pieces ({self.chunks} for context, {self.tensor} for tensor)",
                where="data.sequence_length",
                remedy=f"use {max(1, sequence // unit) * unit} or {(sequence // unit + 1) * unit}",
            )
        if self.context > 1 and spec.conv is not None and "conv" in kinds and sequence // self.chunks < spec.conv.width - 1:
            what = f"{sequence} tokens in {self.chunks} pieces are shorter than the convolution's reach of {spec.conv.width - 1}"
            raise LayoutError(what, where="layout.context", remedy="use fewer context ranks or a longer sequence")
        self._check_experts(spec)
        if spec.layers < self.pipeline * self.stages_per_rank:
            raise LayoutError(
                f"{spec.layers} layers are fewer than {self.pipeline} x {self.stages_per_rank} stages",
                where="layout.pipeline",
                remedy=f"use at most {max(1, spec.layers // self.stages_per_rank)}",
            )
        if self.pipeline > 1 and self.shard > 1 and self.schedule in ("zero_bubble", "zbv"):
            what = f"{self.schedule} puts weight gradients off, which sharding would have reduced by then"
            raise LayoutError(what, where="layout.schedule", remedy='use "1f1b" or "interleaved", or replicate instead of shard')

    def _check_experts(self, spec: ModelSpec) -> None:
        if self.expert == 1:
            return
        if spec.moe is None:
            raise LayoutError("the model has no experts", where="layout.expert", remedy="set it to 1")
        _divide("expert", self.expert, [(spec.moe.experts, "experts")])
        ranks = self.tokens if self.shard == 1 else self.tokens // self.replicate
        kind = "token ranks" if self.shard == 1 else "token ranks of a replica"
        _divide("expert", self.expert, [(ranks, f"{kind} (shard x context x tensor{' x replicate' if self.shard == 1 else ''})")])


def _divide(axis: str, degree: int, counts: Iterable[tuple[int, str]]) -> None:
    """Raise `LayoutError` unless `degree` divides every count."""
    found = list(counts)
    common = math.gcd(*(count for count, _ in found)) if found else degree
    wrong = next(((count, what) for count, what in found if count % degree), None)
    if wrong is not None:
        fits = sorted((d for d in range(1, common + 1) if common % d == 0), key=lambda d: abs(d - degree))[:2]
        raise LayoutError(
            f"{wrong[0]} {wrong[1]} do not divide among {degree}", where=f"layout.{axis}", remedy=f"use {' or '.join(map(str, fits))}"
        )
