"""Which layout a model should train with on a cluster: every possible one, predicted and ranked, with the reason.

For each layout the micro-batch, the pipeline schedule and recomputation are chosen by the same prediction: what fits and is fastest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.cluster.hardware import Cluster
from surefoot.core.errors import LayoutError
from surefoot.models.flops import count_flops
from surefoot.plan.degrees import Degrees, enumerate_layouts
from surefoot.plan.footprint import RankMemory, predict_memory
from surefoot.plan.timing import StepTime, predict_time
from surefoot.plan.workload import COMPUTED_IN, Candidate, Pipelining, Workload

SCHEDULES: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2))
"""Schedules to try, with their stages a rank."""
MICRO_BATCHES = (1, 2, 4, 8)  # rows
BUSY_TOKENS = 4096
"""Tokens at once that keep a device busy: in a pipeline, where larger micro-batches only wait longer, there is no need for more."""
_CAUSES = {
    "compute": "stages of unequal work",
    "recompute": "computing activations again",
    "bubble": "waiting in the pipeline",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "shard": "gathering sharded weights",
    "replicate": "reducing gradients over replicas",
    "optimizer": "the optimizer's update",
}


@dataclass(frozen=True)
class Prediction:
    """One layout. `memory`: of the fullest rank. `mfu`: exact causal FLOPs over the peak. `reason`: one sentence.

    `time` is None where it does not fit.
    """

    candidate: Candidate
    micro_batches: int
    memory: RankMemory
    fits: bool
    time: StepTime | None = None
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    reason: str = ""

    @property
    def degrees(self) -> Degrees:
        return self.candidate.degrees

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite where the layout does not fit."""
        return self.time.total_s if self.time else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        table = asdict(self) | {"memory_bytes": self.memory.total}
        return table | ({"step_s": self.time.total_s, "bubble": self.time.bubble} if self.time else {})


def rank_layouts(
    workload: Workload,
    cluster: Cluster,
    pipelining: Pipelining,
    *,
    world: int | None = None,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    exact: int = 16,
) -> list[Prediction]:
    """Return a prediction for every layout of `world` processes (None: all devices), fastest first, then what does not fit.

    The `exact` fastest are simulated; of the others a bound from below shows that they are slower.
    Raises `LayoutError` when no layout can take the model and the batch, or the cluster has too few devices.
    """
    world = cluster.devices if world is None else world
    if world > cluster.devices:
        remedy = f"use at most {cluster.devices}, or raise nodes"
        raise LayoutError(f"{world} processes do not fit {cluster.devices} devices", where="world", remedy=remedy)
    layouts = enumerate_layouts(workload.spec, world, workload.rows, workload.sequence)
    options = [_options(workload, degrees, cluster, pipelining, schedules) for degrees in layouts]
    found: list[Prediction] = []
    times: list[float] = []
    for ways in sorted((ways for ways in options if ways), key=lambda ways: _order(ways[0])):
        first = ways[0]
        if first.fits and (len(times) < exact or first.step_s <= times[exact - 1]):
            first = _fastest(ways, workload, cluster, pipelining)
            insort(times, first.step_s)
        found.append(first)
    found.sort(key=_order)
    return [replace(one, reason=_reason(one, place, found, cluster)) for place, one in enumerate(found)]


def predict(
    workload: Workload, degrees: Degrees, cluster: Cluster, pipelining: Pipelining, schedules: Sequence[tuple[str, int]] = SCHEDULES
) -> Prediction:
    """Return the prediction of `degrees` run in the fastest way that fits, or the one that needs least memory where none does.

    Raises `LayoutError` when none of `schedules` can run it.
    """
    ways = _options(workload, degrees, cluster, pipelining, schedules)
    if not ways:
        names = ", ".join(name for name, _ in schedules)
        raise LayoutError(f"{degrees} cannot run as {names}", where="schedule", remedy='allow "1f1b", or use fewer pipeline ranks')
    return _fastest(ways, workload, cluster, pipelining)


def _order(prediction: Prediction) -> tuple[bool, float, int, str]:
    return not prediction.fits, prediction.step_s, prediction.memory.total, str(prediction.degrees)


def _options(
    workload: Workload, degrees: Degrees, cluster: Cluster, pipelining: Pipelining, schedules: Sequence[tuple[str, int]]
) -> list[Prediction]:
    """Return the ways to run `degrees`, by a bound from below of their time, then those that do not fit."""
    found = []
    for candidate in _candidates(workload, degrees, schedules):
        for recompute in (False, True):
            found.append(_predict(workload, replace(candidate, recompute=recompute), cluster, pipelining, simulated=False))
            if found[-1].fits:  # recomputation would only take longer
                break
    return sorted(found, key=_order)


def _fastest(ways: Sequence[Prediction], workload: Workload, cluster: Cluster, pipelining: Pipelining) -> Prediction:
    """Return the fastest of `ways` by simulation; those whose bound is above the best need none."""
    best = ways[0]
    for way in ways:
        if not way.fits or (best.time and best.time.simulated and way.step_s >= best.step_s):
            break
        found = _predict(workload, way.candidate, cluster, pipelining, simulated=True)
        if not (best.time and best.time.simulated) or found.step_s < best.step_s:
            best = found
    return best


def _candidates(workload: Workload, degrees: Degrees, schedules: Sequence[tuple[str, int]]) -> Iterator[Candidate]:
    rows = workload.rows // degrees.data
    for micro_batch in (size for size in MICRO_BATCHES if rows % size == 0):
        tokens = micro_batch * workload.sequence // (degrees.tensor * degrees.context)
        if degrees.pipeline > 1 and micro_batch > 1 and tokens > BUSY_TOKENS:
            break
        count = rows // micro_batch
        for name, stages in schedules if degrees.pipeline > 1 else (("1f1b", 1),):
            if degrees.pipeline * stages > workload.spec.layers:
                continue
            if name == "interleaved" and count % degrees.pipeline:
                continue
            # A put-off weight gradient is not there yet when sharding would reduce it.
            if name in ("zero_bubble", "zbv") and degrees.shard > 1:
                continue
            yield Candidate(degrees, micro_batch, name, stages)


def _predict(workload: Workload, candidate: Candidate, cluster: Cluster, pipelining: Pipelining, *, simulated: bool) -> Prediction:
    memory = max(predict_memory(workload, candidate, pipelining), key=lambda one: one.total)
    count = candidate.micro_batches(workload)
    if memory.total > cluster.device.room_bytes:
        return Prediction(candidate, count, memory, fits=False)
    time = predict_time(workload, candidate, cluster, pipelining, simulated=simulated)
    rate = workload.rows * workload.sequence / time.total_s
    peak = cluster.device.peak(COMPUTED_IN[workload.precision]) * candidate.degrees.world_size
    mfu = rate * count_flops(workload.spec, workload.sequence).training / peak
    return Prediction(candidate, count, memory, True, time, rate, mfu)


def _reason(one: Prediction, place: int, ranked: Sequence[Prediction], cluster: Cluster) -> str:
    """Say what makes `one` the best, or what it loses to the best, or what of it does not fit."""
    room = cluster.device.room_bytes
    if not one.fits or one.time is None:
        name = one.memory.largest
        return (
            f"does not fit: needs {_gigabytes(one.memory.total)} of {_gigabytes(room)} GB, "
            f"{_gigabytes(getattr(one.memory, name))} of them for {name.replace('gathered', 'gathered weights')}"
        )
    best = ranked[0]
    if place and best.time is not None:
        slower = 100 * (one.step_s / best.step_s - 1)
        cause, lost = _loss(one.time, best.time)
        least = "" if one.time.simulated else "at least "
        return f"{least}{slower:.{0 if slower >= 1 else 1}f} % slower than the best: {_milliseconds(lost)} a step more for {cause}"
    used = f"the fullest device holds {_gigabytes(one.memory.total)} of {_gigabytes(room)} GB"
    second = ranked[1] if len(ranked) > 1 else None
    if second is None or second.time is None:
        return f"the only layout that fits: {used}"
    gain = 100 * (second.step_s / one.step_s - 1)
    cause, lost = _loss(second.time, one.time)
    return f"{gain:.1f} % faster than the next ({second.degrees}), which takes {_milliseconds(lost)} a step more for {cause}; {used}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _loss(slower: StepTime, faster: StepTime) -> tuple[str, float]:
    """Return on what `slower` spends most more than `faster`, and how many seconds."""
    more = {part: slower.parts.get(part, 0.0) - faster.parts.get(part, 0.0) for part in _CAUSES}
    part = max(more, key=lambda name: more[name])
    return _CAUSES[part], more[part]


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"
