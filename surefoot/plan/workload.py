"""What is to be laid out, as data: a training step, a way to run it, and what each layer costs before it is cut."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from surefoot.core.errors import LayoutError
from surefoot.models.flops import count_flops
from surefoot.models.memory import Precision
from surefoot.models.parameters import ParamDecl, declarations
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer
from surefoot.plan.degrees import Degrees

COMPUTED_IN: dict[str, str] = {"float32": "float32", "bfloat16": "bfloat16", "bfloat16_autocast": "bfloat16"}
"""Precision of training -> dtype of its products."""


class Pipelining(Hashable, Protocol):
    """What a plan asks of pipeline schedules: the module `surefoot.parallel.schedules` is one."""

    def cut_layers(self, costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]: ...
    def make_schedule(self, kind: Any, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Any: ...
    def peak_in_flight(self, schedule: Any, sizes: Sequence[int] | None = None) -> tuple[int, ...]: ...
    def simulate(
        self, schedule: Any, forward_s: Sequence[float], input_s: Sequence[float], weight_s: Sequence[float], transfer_s: float = 0.0
    ) -> Any: ...


@dataclass(frozen=True)
class Workload:
    """A training step: `rows` sequences of `sequence` tokens over all processes. Raises `LayoutError` when that is nothing."""

    spec: ModelSpec
    rows: int
    sequence: int
    precision: Precision = "bfloat16"
    optimizer: Literal["adamw", "muon"] = "adamw"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.sequence < 1:
            what = f"{self.rows} rows of {self.sequence} tokens are no step"
            raise LayoutError(what, where="batch", remedy=f"use a batch of at least one row: {max(1, self.sequence)} tokens")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The embedding, each layer, then the final norm and the head."""
        return _pieces(self.spec, self.sequence, self.optimizer)


@dataclass(frozen=True)
class Candidate:
    """A layout and how a step runs on it: `micro_batch` rows a forward pass of a data rank; the pipeline's schedule."""

    degrees: Degrees
    micro_batch: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False

    def micro_batches(self, workload: Workload) -> int:
        return workload.rows // (self.degrees.data * self.micro_batch)


@dataclass(frozen=True)
class Count:
    """Parameters by how they are cut: by `tensor`, not at all, by `expert`; `moments` an optimizer keeps of each, on average."""

    cut: int = 0
    whole: int = 0
    experts: int = 0
    cut_moments: int = 0
    whole_moments: int = 0
    expert_moments: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def part(self, degrees: Degrees, *, sharded: bool) -> float:
        """Parameters on one rank, with or without what sharding cuts."""
        return self._part(self.cut, self.whole, self.experts, degrees, sharded)

    def moments(self, degrees: Degrees) -> float:
        """Optimizer moments on one rank."""
        return self._part(self.cut_moments, self.whole_moments, self.expert_moments, degrees, True)

    @staticmethod
    def _part(cut: int, whole: int, experts: int, d: Degrees, sharded: bool) -> float:
        dense, routed = cut / d.tensor + whole, experts / d.expert
        return dense / d.dense_shards + routed / d.expert_shards if sharded else dense + routed


@dataclass(frozen=True)
class Piece:
    """One layer, or one end of the model: its parameters, and the forward FLOPs of a token.

    `weight_flops` are products with weights, `attention_flops` products between activations, averaged over a row. `cuts`: blocks
    that start and end whole and are cut by tensor parallelism inside; `kv_values`: keys and values of a token; `routed`: experts
    that a token is sent to.
    """

    parameters: Count
    weight_flops: float = 0.0
    attention_flops: float = 0.0
    cuts: int = 0
    kv_values: int = 0
    routed: int = 0


def _pieces(spec: ModelSpec, sequence: int, optimizer: str) -> tuple[Piece, ...]:
    counts = [Count()] * (spec.layers + 2)
    for name, decl in declarations(Transformer(spec, device="meta")).items():
        words = name.split(".")
        place = int(words[1]) + 1 if words[0] == "layers" else 0 if decl.role == "embedding" else spec.layers + 1
        counts[place] += _count(decl, optimizer)
    layers = [_layer(spec, layer, sequence, counts[layer + 1]) for layer in range(spec.layers)]
    return Piece(counts[0]), *layers, Piece(counts[-1], weight_flops=2.0 * spec.vocab_size * spec.dim)


def _count(decl: ParamDecl, optimizer: str) -> Count:
    size = math.prod(decl.shape)
    moments = size * (1 if optimizer == "muon" and decl.role == "hidden" else 2)
    if decl.expert:
        return Count(experts=size, expert_moments=moments)
    return Count(whole=size, whole_moments=moments) if decl.tp_dim is None else Count(cut=size, cut_moments=moments)


def _layer(spec: ModelSpec, layer: int, sequence: int, parameters: Count) -> Piece:
    mixer, feed = spec.mixer(layer), spec.feed_forward(layer)
    alone = spec.model_copy(update={"layers": 1, "pattern": (mixer,), "ffn_pattern": (feed,)})
    flops = count_flops(alone, sequence)
    kv = 0
    if mixer in ("attention", "sliding") and spec.attention is not None:
        kv = 2 * spec.attention.kv_heads * spec.attention.head_dim
    elif mixer == "mla" and spec.mla is not None:
        kv = spec.mla.heads * (spec.mla.nope_dim + spec.mla.rope_dim + spec.mla.value_dim)
    routed = spec.moe.top_k if feed == "moe" and spec.moe is not None else 0
    return Piece(parameters, flops.weights - flops.head, flops.attention, cuts=1 + int(feed == "dense"), kv_values=kv, routed=routed)
