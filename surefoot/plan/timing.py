"""Seconds of a training step on a cluster, as a sum of parts.

Compute is exact FLOPs over the device's achievable rate. Communication is the volume of each axis over the link that the axis
runs on, innermost axes inside a node: tensor, context, shard, replicate, then pipeline. What overlaps with compute is charged by
what sticks out of it. Waiting in the pipeline comes from simulating its schedule with these times, uneven stages and transfers
included.

Volumes, for a micro-batch of S tokens and a width D, on each rank (w bytes a value):

| axis | collective | how often |
| --- | --- | --- |
| tensor | all-gather and reduce-scatter of S D w / context | for each cut block, forward and backward |
| context | keys and values of the other ranks, S (c - 1) / c of them, hop by hop | for each attention, forward once, backward twice |
| expert | all-to-all of S k D w / (context tensor), out and back | for each mixture of experts, forward and backward |
| shard | all-gather of weights, reduce-scatter of float32 gradients | each block forward, backward; in a pipeline once a step |
| replicate | all-reduce of float32 gradients | once a step |
| pipeline | S D w / (context tensor) | for each boundary, forward and backward |
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from surefoot.cluster.hardware import Cluster, exchange_s, gather_s, send_s
from surefoot.models.memory import WIDE
from surefoot.plan.degrees import Degrees
from surefoot.plan.footprint import Cut, cut, schedule_of
from surefoot.plan.workload import COMPUTED_IN, Candidate, Count, Piece, Pipelining, Workload

UNHIDDEN = 0.1
"""Share of communication that overlap does not hide: its kernels take compute units and memory bandwidth (an estimate)."""
FILL = 12
"""At least so many micro-batches are simulated before a round of them is taken to last as long as the one before."""
AXES = ("tensor", "context", "expert", "shard", "replicate", "pipeline")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `parts` sum to `total_s`: each is what it adds, on average over pipeline ranks.

    `communication_s`: all that each axis sends and receives, hidden or not. `simulated`: whether the wait in the pipeline is that of
    its schedule; otherwise it is the least that any order of its operations has.
    """

    total_s: float
    parts: dict[str, float]
    communication_s: dict[str, float]
    simulated: bool

    @property
    def bubble(self) -> float:
        """The share of the step in which a pipeline rank waits for others."""
        return self.parts["bubble"] / self.total_s


@dataclass
class _Pass:
    """Seconds of one piece's passes of one micro-batch; `exposed` and `sent` by axis, forward and backward together."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class _Machine:
    """What the formulas read: a cluster, a layout, and the sizes of a micro-batch."""

    cluster: Cluster
    degrees: Degrees
    rate: float
    micro_tokens: int
    dim: int
    width: int
    recompute: bool

    def stride(self, axis: str) -> int:
        """How far apart the ranks of an axis stand; experts are shared out among neighbours."""
        d = self.degrees
        inner = {"tensor": 1, "expert": 1, "context": d.tensor, "shard": d.tensor, "replicate": d.tensor * d.context * d.shard}
        return inner.get(axis, d.tokens)


def predict_time(workload: Workload, candidate: Candidate, cluster: Cluster, pipelining: Pipelining, *, simulated: bool = True) -> StepTime:
    """Return the seconds of a step of `candidate` on `cluster`; not `simulated`: a bound from below, at a fraction of the work.

    Raises `LayoutError` when there is no such schedule or the layout is larger than the cluster, `ConfigError` when the device has
    no rate for the precision.
    """
    d, precision = candidate.degrees, workload.precision
    machine = _Machine(
        cluster,
        d,
        cluster.device.rate(COMPUTED_IN[precision]),
        candidate.micro_batch * workload.sequence,
        workload.spec.dim,
        WIDE if precision == "float32" else 2,
        candidate.recompute,
    )
    stages = cut(workload, candidate, pipelining)
    layers = {piece: _piece_time(piece, machine) for piece in set(workload.pieces)}
    passes = [_stage_time(stages, stage, workload, layers, machine) for stage in range(len(stages.layers))]
    transfer = send_s(_stream_bytes(machine) / (d.context * d.tensor), d.pipeline, machine.stride("pipeline"), cluster)
    count = candidate.micro_batches(workload)
    makespan = _least_makespan(candidate, count, stages, passes, transfer)
    if simulated and d.pipeline > 1:
        makespan = max(makespan, _makespan(candidate, count, passes, transfer, pipelining))
    parts, sent = _totals(passes, count, d.pipeline)
    parts["bubble"] = makespan - sum(parts.values())
    sent["pipeline"] = 2 * transfer * count * (len(passes) - 1) / d.pipeline
    total = makespan
    for axis, exposed, whole in _once_a_step(workload, stages, machine, passes):
        parts[axis] += exposed
        sent[axis] += whole
        total += exposed
    parts["optimizer"] = _optimizer_s(workload, stages, machine)
    return StepTime(total + parts["optimizer"], dict(parts), {axis: sent[axis] for axis in AXES if sent[axis]}, simulated)


def _piece_time(piece: Piece, m: _Machine) -> _Pass:
    """Seconds of one layer, or of an end of the model."""
    d = m.degrees
    mine = m.micro_tokens / (d.tensor * d.context)
    products, pairs = mine * piece.weight_flops / m.rate, mine * piece.attention_flops / m.rate
    found = _Pass(forward=products + pairs, inputs=products + 2 * pairs, weights=products)
    is_layer = piece.cuts > 0
    tensor = 2 * piece.cuts * gather_s(_stream_bytes(m) / d.context, d.tensor, m.stride("tensor"), m.cluster)
    expert = 0.0
    if piece.routed:
        expert = 2 * exchange_s(mine * piece.routed * m.dim * m.width, d.expert, m.stride("expert"), m.cluster)
    hop = send_s(m.micro_tokens / d.context * piece.kv_values / d.tensor * m.width, d.context, m.stride("context"), m.cluster)
    ring = (d.context - 1) * hop if piece.kv_values else 0.0
    forward = {"tensor": tensor, "expert": expert, "context": _sticking_out(ring, pairs)}
    backward = {"tensor": tensor, "expert": expert, "context": _sticking_out(2 * ring, 2 * pairs)}
    again = 1 if m.recompute and is_layer else 0
    found.again = again * found.forward
    found.inputs += sum(backward.values()) + again * (found.forward + sum(forward.values()))
    found.forward += sum(forward.values())
    _add(found.exposed, forward, 1 + again)
    _add(found.exposed, backward)
    _add(found.sent, {"tensor": (2 + again) * tensor, "expert": (2 + again) * expert, "context": (3 + again) * ring})
    return found


def _stage_time(stages: Cut, stage: int, workload: Workload, layers: dict[Piece, _Pass], m: _Machine) -> _Pass:
    """Sum the pieces of a stage; where FSDP gathers for each micro-batch, add what of it sticks out."""
    found = _Pass()
    held = [workload.pieces[layer + 1] for layer in stages.layers[stage]] + [workload.pieces[-1]] * (stage == len(stages.layers) - 1)
    for piece, times in Counter(held).items():
        one = layers[piece]
        found.forward += times * one.forward
        found.inputs += times * one.inputs
        found.weights += times * one.weights
        found.again += times * one.again
        _add(found.exposed, one.exposed, times)
        _add(found.sent, one.sent, times)
    if m.degrees.shard > 1 and m.degrees.pipeline == 1:
        stored = 2 if workload.precision == "bfloat16" else WIDE
        gather, scatter = (_shard_s(workload.pieces, width, m) for width in (stored, WIDE))
        forward = _sticking_out(gather, found.forward)
        backward = _sticking_out(gather + scatter, found.inputs + found.weights)
        found.forward, found.inputs = found.forward + forward, found.inputs + backward
        found.exposed["shard"] += forward + backward
        found.sent["shard"] += 2 * gather + scatter
    return found


def _shard_s(pieces: Iterable[Piece], width: int, m: _Machine) -> float:
    """Seconds in which FSDP gathers the weights of `pieces` (or scatters their gradients), one after another."""
    d = m.degrees
    seconds = 0.0
    for piece in pieces:
        count = piece.parameters
        seconds += gather_s((count.cut / d.tensor + count.whole) * width, d.dense_shards, m.stride("shard"), m.cluster)
        if count.experts:
            seconds += gather_s(count.experts / d.expert * width, d.expert_shards, d.expert, m.cluster)
    return seconds


def _once_a_step(workload: Workload, stages: Cut, m: _Machine, passes: list[_Pass]) -> list[tuple[str, float, float]]:
    """(axis, seconds that stick out, all seconds) of what happens once a step on the slowest pipeline rank."""
    d = m.degrees
    found: list[tuple[str, float, float]] = []
    stored = 2 if workload.precision == "bfloat16" else WIDE
    for rank in range(d.pipeline):
        held = [workload.pieces[piece] for piece in stages.pieces_of(rank, workload)]
        mine = [one for one, owner in zip(passes, stages.placement, strict=True) if owner == rank]
        forward, backward = sum(one.forward for one in mine), sum(one.inputs + one.weights for one in mine)
        shard, out = 0.0, 0.0
        if d.shard > 1 and d.pipeline > 1:
            gather, scatter = (_shard_s(held, width, m) for width in (stored, WIDE))
            shard, out = gather + scatter, _sticking_out(gather, forward) + _sticking_out(scatter, backward)
        reduce = _replica_s(sum((piece.parameters for piece in held), Count()), m)
        found.append(("shard", out, shard))
        found.append(("replicate", _sticking_out(reduce, backward), reduce))
    return [max((one for one in found if one[0] == axis), key=lambda one: one[1]) for axis in ("shard", "replicate")]


def _replica_s(count: Count, m: _Machine) -> float:
    """Seconds of the all-reduce of gradients over the ranks that hold the same part and saw other tokens."""
    d = m.degrees
    if d.shard > 1:
        dense, routed = d.replicate, d.replicate
        stride, expert_stride = m.stride("replicate"), m.stride("replicate")
    else:
        dense, routed = d.replicate * d.context, d.tokens // d.expert
        stride, expert_stride = d.tensor, d.expert
    size = (count.cut / d.tensor + count.whole) / d.dense_shards * WIDE
    experts = count.experts / d.expert / d.expert_shards * WIDE
    seconds = gather_s(size, dense, stride, m.cluster) + (gather_s(experts, routed, expert_stride, m.cluster) if experts else 0.0)
    return 2 * seconds


def _least_makespan(candidate: Candidate, count: int, stages: Cut, passes: list[_Pass], transfer: float) -> float:
    """Seconds that no order of the operations beats: a rank's work, after its first input arrived, before its last result is used.

    With equal stages it is what 1F1B, GPipe and the interleaved schedule take.
    """
    split = candidate.schedule in ("zero_bubble", "zbv")
    busy: defaultdict[int, float] = defaultdict(float)
    ends: dict[int, float] = {}
    before = 0.0
    for stage, (one, rank) in enumerate(zip(passes, stages.placement, strict=True)):
        if stage and stages.placement[stage - 1] != rank:
            before += transfer * (1 if split else 2)
        ends.setdefault(rank, before)
        busy[rank] += one.forward + one.inputs + one.weights
        # A weight gradient that stands by itself may come last on its rank, so that nobody waits for what precedes it.
        before += one.forward + (0.0 if split else one.inputs + one.weights)
    return max(count * busy[rank] + ends[rank] for rank in busy)


def _makespan(candidate: Candidate, count: int, passes: list[_Pass], transfer: float, pipelining: Pipelining) -> float:
    """Seconds of all micro-batches. Beyond the fill, each further round of micro-batches takes as long as the one before."""
    ranks = candidate.degrees.pipeline
    forward, inputs, weights = [one.forward for one in passes], [one.inputs for one in passes], [one.weights for one in passes]

    def seconds(micro_batches: int) -> float:
        schedule = schedule_of(candidate, micro_batches, pipelining)
        return float(pipelining.simulate(schedule, forward, inputs, weights, transfer).makespan_s)

    short = max(2, -(-FILL // ranks)) * ranks + count % ranks
    if count <= short + ranks:
        return seconds(count)
    first, second = seconds(short), seconds(short + ranks)
    return second + (second - first) * ((count - short) // ranks - 1)


def _totals(passes: list[_Pass], count: int, ranks: int) -> tuple[defaultdict[str, float], defaultdict[str, float]]:
    """Seconds by part, and of communication by axis, of all micro-batches, on average over the pipeline ranks."""
    parts: defaultdict[str, float] = defaultdict(float)
    sent: defaultdict[str, float] = defaultdict(float)
    for one in passes:
        busy = one.forward + one.inputs + one.weights - one.again - math.fsum(one.exposed.values())
        _add(parts, {"compute": busy, "recompute": one.again, **one.exposed}, count / ranks)
        _add(sent, one.sent, count / ranks)
    return parts, sent


def _add(into: defaultdict[str, float], more: Mapping[str, float], times: float = 1.0) -> None:
    for key, value in more.items():
        into[key] += times * value


def _optimizer_s(workload: Workload, stages: Cut, m: _Machine) -> float:
    """Seconds of the update of the largest rank, which reads and writes what it holds: bound by memory bandwidth."""
    values = 0.0
    for rank in range(m.degrees.pipeline):
        count = sum((workload.pieces[piece].parameters for piece in stages.pieces_of(rank, workload)), Count())
        values = max(values, 2 * count.moments(m.degrees) + 3 * count.part(m.degrees, sharded=True))
    return values * WIDE / m.cluster.device.memory_bandwidth


def _stream_bytes(m: _Machine) -> int:
    return m.micro_tokens * m.dim * m.width


def _sticking_out(communication: float, compute: float) -> float:
    """Seconds of `communication` that are not hidden behind `compute`."""
    return max(UNHIDDEN * communication, communication - compute)
