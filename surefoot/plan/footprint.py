"""Bytes that each rank of a layout holds.

Dense parameters are cut by tensor parallelism (norms, routers and row biases are not), experts by expert parallelism over the ranks
that hold different tokens, layers by the pipeline; where a replica is sharded, FSDP cuts what is left over the shard and context
ranks (experts: over the token ranks of a replica that hold the same ones). Divisions are taken as even: padding is not counted.

Activations are cut by tensor (the stream along the sequence, heads and widths inside a block) and context ranks, and held for as
many micro-batches as the schedule has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.models.memory import WIDE, activation_bytes, block_bytes, head_bytes
from surefoot.plan.degrees import Degrees
from surefoot.plan.workload import Candidate, Count, Pipelining, Workload


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one process. `gathered`: what FSDP brings together for use; `head`: its gradients and its chunk of logits."""

    weights: int
    gradients: int
    optimizer: int
    masters: int
    gathered: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(vars(self).items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Cut:
    """A pipeline's stages: the layers of each, and the rank that each lies on."""

    layers: tuple[range, ...]
    placement: tuple[int, ...]

    def pieces_of(self, rank: int, workload: Workload) -> list[int]:
        """The pieces on `rank`: 0 the embedding, layer i as i + 1, and the last one the head."""
        mine = [stage for stage, owner in enumerate(self.placement) if owner == rank]
        has_head = len(self.layers) - 1 in mine
        # A tied head that lies elsewhere than the embedding has a copy of it.
        has_table = 0 in mine or (has_head and workload.spec.tied_embeddings)
        layers = [layer + 1 for stage in mine for layer in self.layers[stage]]
        return [0] * has_table + layers + [len(workload.pieces) - 1] * has_head


def cut(workload: Workload, candidate: Candidate, pipelining: Pipelining) -> Cut:
    """Return the stages of `candidate`, balanced by exact FLOPs. Raises `LayoutError` where there is no such schedule."""
    placement = schedule_of(candidate, candidate.degrees.pipeline, pipelining).placement
    return Cut(_balanced(workload, len(placement), pipelining), placement)


@lru_cache(maxsize=256)
def _balanced(workload: Workload, stages: int, pipelining: Pipelining) -> tuple[range, ...]:
    _, *layers, head = workload.pieces
    costs = [piece.weight_flops + piece.attention_flops for piece in layers]
    return pipelining.cut_layers(costs, stages, last=head.weight_flops)


def schedule_of(candidate: Candidate, micro_batches: int, pipelining: Pipelining) -> Any:
    """Return the schedule of `candidate` for so many micro-batches."""
    return _schedule(candidate.schedule, candidate.degrees.pipeline, micro_batches, candidate.stages_per_rank, pipelining)


@lru_cache(maxsize=256)
def _schedule(kind: str, ranks: int, micro_batches: int, stages_per_rank: int, pipelining: Pipelining) -> Any:
    return pipelining.make_schedule(kind, ranks, micro_batches, stages_per_rank)


def predict_memory(workload: Workload, candidate: Candidate, pipelining: Pipelining) -> tuple[RankMemory, ...]:
    """Return the bytes of a process of each pipeline rank; all processes of a rank hold equally much.

    Raises `LayoutError` when the model has too few layers for the pipeline, or there is no such schedule.
    """
    stages = cut(workload, candidate, pipelining)
    activations = _activations(workload, candidate, stages, pipelining)
    return tuple(
        _rank_memory(workload, candidate, stages.pieces_of(rank, workload), activations[rank]) for rank in range(candidate.degrees.pipeline)
    )


def _rank_memory(workload: Workload, candidate: Candidate, held: list[int], activations: float) -> RankMemory:
    d = candidate.degrees
    total = sum((workload.pieces[piece].parameters for piece in held), Count())
    count, narrow = total.part(d, sharded=True), workload.precision == "bfloat16"
    stored = 2 if narrow else WIDE
    # Gradients of bfloat16 weights are summed over micro-batches and over the ranks that hold the same ones in float32.
    several = candidate.micro_batches(workload) > 1
    dense = WIDE if several or (d.data * d.context > 1 and d.shard == 1) else stored
    routed = WIDE if several or (d.tokens > d.expert and d.shard == 1) else stored
    experts = Count(experts=total.experts).part(d, sharded=True)
    rows = candidate.micro_batch * workload.sequence // d.context
    has_head = len(workload.pieces) - 1 in held
    return RankMemory(
        weights=round(stored * count),
        gradients=round(dense * (count - experts) + routed * experts),
        optimizer=round(WIDE * total.moments(d)),
        masters=round(WIDE * count) if narrow else 0,
        gathered=round(stored * _gathered(workload, d, held)),
        activations=round(activations),
        head=head_bytes(workload.spec, rows, precision=workload.precision) // d.tensor if has_head else 0,
    )


def _gathered(workload: Workload, d: Degrees, held: list[int]) -> float:
    """Values that FSDP has whole at once: the weights of this block, of the next, and of what lies outside the blocks.

    In a pipeline, where every micro-batch would gather them anew, all weights and gradients stay whole for the step.
    """
    if d.shard == 1:
        return 0.0
    sizes = {piece: workload.pieces[piece].parameters.part(d, sharded=False) for piece in held}
    if d.pipeline > 1:
        return 2 * sum(sizes.values())
    ends = {0, len(workload.pieces) - 1}
    return 2 * max(size for piece, size in sizes.items() if piece not in ends) + sum(sizes[end] for end in ends)


def _activations(workload: Workload, candidate: Candidate, stages: Cut, pipelining: Pipelining) -> list[float]:
    """Bytes of activations on each pipeline rank at its peak."""
    d = candidate.degrees
    blocks, ends, kept = _blocks(workload, candidate.micro_batch)
    parts = d.tensor * d.context
    # Each product that is cut by columns keeps its input, which tensor parallelism has gathered along the sequence.
    whole = kept / d.context * (1.0 - 1.0 / d.tensor)
    block = [size / parts + workload.pieces[layer + 1].cuts * whole for layer, size in enumerate(blocks)]
    working = [0.0] * d.pipeline
    sizes = []
    for stage, layers in enumerate(stages.layers):
        size = sum(kept / parts if candidate.recompute else block[layer] for layer in layers)
        sizes.append(round(size + (ends / parts if stage == len(stages.layers) - 1 else 0.0)))
        if candidate.recompute:
            rank = stages.placement[stage]
            working[rank] = max(working[rank], *(block[layer] for layer in layers))
    schedule = schedule_of(candidate, _enough(candidate, candidate.micro_batches(workload)), pipelining)
    return [held + extra for held, extra in zip(pipelining.peak_in_flight(schedule, sizes), working, strict=True)]


def _enough(candidate: Candidate, micro_batches: int) -> int:
    """So many micro-batches that more would not be in flight at once (with GPipe all are)."""
    ranks = candidate.degrees.pipeline
    if candidate.schedule == "gpipe" or micro_batches <= 3 * ranks:
        return micro_batches
    return 2 * ranks + micro_batches % ranks


@lru_cache(maxsize=256)
def _blocks(workload: Workload, micro_batch: int) -> tuple[tuple[float, ...], float, float]:
    """Bytes that one micro-batch keeps: each block's, what lies outside the blocks, and a block's input."""
    spec, sequence, precision = workload.spec, workload.sequence, workload.precision
    blocks = block_bytes(spec, micro_batch, sequence, precision=precision)
    ends = activation_bytes(spec, micro_batch, sequence, precision=precision) - sum(blocks)
    stream = 2 if precision == "bfloat16" else WIDE
    return blocks, ends, float(micro_batch * sequence * spec.dim * stream)
