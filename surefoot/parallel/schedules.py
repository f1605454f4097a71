"""Pipeline schedules as data: which rank computes what, in which order, and how long it waits.

The layers are cut into stages, each stage lies on a rank, and the samples of a step are cut into micro-batches. A schedule is one
order of operations for each rank. It is run with blocking receives and buffered sends: an operation starts when those before it on
its rank are over and what it needs has arrived.

With p ranks, v stages a rank, m micro-batches, and F, I, W the seconds of a rank's forward pass, input gradients and weight
gradients of one micro-batch (B = I + W), each rank idles for

| schedule | idle | micro-batches held by rank r | source |
| --- | --- | --- | --- |
| gpipe | (p - 1)(F + B) | m | Huang et al. 2018, arXiv 1811.06965 |
| 1f1b | (p - 1)(F + B) | p - r | Narayanan et al. 2020, arXiv 2006.09503 |
| interleaved | (p - 1)(F + B) / v | (2(p - r) - 1 + (v - 1)p) / v | Narayanan et al. 2021, arXiv 2104.04473 |
| zero_bubble | (p - 1)(F + I - W) while W <= F and W <= I | p | ZB-H1 of Qi et al. 2024, arXiv 2401.10241 |
| zbv | (p - 1)F / 2 if F = I = W, before its first operation and after its last | p | ZB-V of the same |

for m of at least p (zbv: 2p - 1); fewer micro-batches are run too, and idle longer.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, cast, get_args

from surefoot.core.errors import LayoutError, nearest

OpKind = Literal["F", "B", "I", "W"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
_OP = re.compile(r"(\d+)([FBIW])(\d+)")


class Op(NamedTuple):
    """One piece of work: F forward, B backward, or its halves I (gradients of the inputs) and W (of the weights).

    Written ``2F5``, stage 2, micro-batch 5, as in `torch.distributed.pipelining`.
    """

    kind: OpKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The order of operations of each rank. `placement`: the rank of each stage, stages in data-flow order."""

    name: str
    ranks: int
    stages_per_rank: int
    micro_batches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in data-flow order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def to_json(self) -> str:
        """Return this schedule as JSON, one line a rank; `from_json` reads it back to an equal value."""
        head = {key: value for key, value in asdict(self).items() if key != "orders"}
        orders = ",\n".join("  " + json.dumps([str(op) for op in order]) for order in self.orders)
        return f'{json.dumps(head)[:-1]}, "orders": [\n{orders}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read what `to_json` wrote, and check that it can run; raises `LayoutError`."""
        try:
            table = json.loads(text)
            orders = tuple(tuple(_parse_op(word) for word in order) for order in table.pop("orders"))
            schedule = Schedule(**table | {"placement": tuple(table["placement"])}, orders=orders)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutError(f"is not a schedule: {error}", where="schedule", remedy="write one with Schedule.to_json") from None
        validate(schedule)
        return schedule


def make_schedule(kind: ScheduleKind, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule `kind` for `ranks` pipeline ranks.

    `stages_per_rank` is for `interleaved`, which needs at least 2; `zbv` has two whether 1 or 2 is given.
    Raises `LayoutError` when there is no such schedule.
    """
    _check_request(kind, ranks, micro_batches, stages_per_rank)
    stages_per_rank = 2 if kind == "zbv" else stages_per_rank
    place: Callable[[int], int] = (lambda stage: min(stage, 2 * ranks - 1 - stage)) if kind == "zbv" else (lambda stage: stage % ranks)
    placement = tuple(place(stage) for stage in range(ranks * stages_per_rank))
    orders = tuple(tuple(_order(kind, rank, ranks, micro_batches, stages_per_rank)) for rank in range(ranks))
    return Schedule(kind, ranks, stages_per_rank, micro_batches, placement, orders)


def _check_request(kind: str, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    if kind not in get_args(ScheduleKind):
        raise LayoutError(f"'{kind}' is not a schedule", where="layout.schedule", remedy=nearest(kind, get_args(ScheduleKind)))
    for value, where in ((ranks, "layout.pipeline"), (micro_batches, "micro-batches"), (stages_per_rank, "layout.stages_per_rank")):
        if value < 1:
            raise LayoutError(f"{value} is too few", where=where, remedy="use 1 or more")
    if kind == "interleaved" and stages_per_rank < 2:
        remedy = 'use 2 or more, or schedule = "1f1b"'
        raise LayoutError("interleaved needs several stages on a rank", where="layout.stages_per_rank", remedy=remedy)
    if kind == "interleaved" and micro_batches % ranks:
        above = -(-micro_batches // ranks) * ranks
        even = f"{above - ranks} or {above}" if above > ranks else f"{above}"
        remedy = f'use {even}, or schedule = "1f1b"'
        raise LayoutError(f"interleaved sends {micro_batches} in groups of {ranks}", where="micro-batches", remedy=remedy)
    if kind == "zbv" and stages_per_rank > 2:
        raise LayoutError(f"zbv has 2 stages a rank, not {stages_per_rank}", where="layout.stages_per_rank", remedy="use 2")
    if kind in ("gpipe", "1f1b", "zero_bubble") and stages_per_rank > 1:
        remedy = 'use 1, or schedule = "interleaved"'
        raise LayoutError(f"{kind} has 1 stage a rank, not {stages_per_rank}", where="layout.stages_per_rank", remedy=remedy)


def _order(kind: ScheduleKind, rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterable[Op]:
    if kind == "zbv":
        return _v_order(rank, ranks, micro_batches)
    if kind == "interleaved":
        groups = [range(start, start + ranks) for start in range(0, micro_batches, ranks)]
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forward = [Op("F", stage, k) for group in groups for stage in stages for k in group]
        backward = [Op("B", stage, k) for group in groups for stage in reversed(stages) for k in group]
        return _alternate(forward, backward, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    forward, backward = ([Op(half, rank, k) for k in range(micro_batches)] for half in cast("tuple[OpKind, ...]", ("F", "B")))
    order = _alternate(forward, backward, micro_batches if kind == "gpipe" else ranks - rank - 1)
    return _put_off(order, rank) if kind == "zero_bubble" else order


def _alternate(forward: list[Op], backward: list[Op], warm_up: int) -> list[Op]:
    """`warm_up` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    warm_up = min(warm_up, len(forward))
    pairs = zip(forward[warm_up:], backward, strict=False)
    return [*forward[:warm_up], *(op for pair in pairs for op in pair), *backward[len(backward) - warm_up :]]


def _put_off(order: list[Op], count: int) -> Iterator[Op]:
    """Split each backward pass, and keep `count` weight gradients back: they fill the wait for the ranks behind."""
    waiting: deque[Op] = deque()
    for op in order:
        yield op._replace(kind="I") if op.kind == "B" else op
        if op.kind == "B":
            waiting.append(op._replace(kind="W"))
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _v_order(rank: int, ranks: int, micro_batches: int) -> list[Op]:
    """A rank holds one stage on the way down the V and one on the way up, and turns each micro-batch around as it comes back."""
    down, up = rank, 2 * ranks - 1 - rank
    # The phases need so many micro-batches; what is beyond those there are is left out at the end.
    count = max(micro_batches, 2 * ranks - 1)
    order: list[Op] = []
    done: Counter[tuple[str, int]] = Counter()

    def do(kinds: str, stage: int, times: int = 1) -> None:
        for _ in range(times):
            for kind in kinds:
                order.append(Op(cast(OpKind, kind), stage, done[kind, stage]))
                done[kind, stage] += 1

    do("F", down, 2 * (ranks - rank) - 1)
    for _ in range(rank):
        do("F", up)
        do("F", down)
    do("FIW", up, ranks - rank)
    while done["F", up] < count:
        do("F", down, int(done["F", down] < count))
        do("IW", down)
        do("FIW", up)
    for _ in range(rank):
        do("I", down)
        do("I", up)
    do("IW", down, ranks - rank)
    do("W", up, rank)
    do("W", down, rank)
    return [op for op in order if op.micro_batch < micro_batches]


def validate(schedule: Schedule) -> None:
    """Raise `LayoutError` unless every micro-batch passes every stage once, forward and back, and no rank waits for ever."""
    _check_shape(schedule)
    _check_complete(schedule)
    for _ in _play(schedule):
        pass


def _check_shape(schedule: Schedule) -> None:
    held = Counter(schedule.placement)
    even = all(held[rank] == schedule.stages_per_rank for rank in range(schedule.ranks))
    if not even or len(held) != schedule.ranks or len(schedule.orders) != schedule.ranks:
        raise LayoutError(
            f"{len(schedule.placement)} stages and {len(schedule.orders)} orders are not {schedule.ranks} ranks of "
            f"{schedule.stages_per_rank} stages each",
            where="schedule",
            remedy="give each rank its stages and its order",
        )


def _check_complete(schedule: Schedule) -> None:
    kinds: dict[tuple[int, int], str] = {}
    for rank, order in enumerate(schedule.orders):
        for op in order:
            if not (0 <= op.stage < schedule.stages and 0 <= op.micro_batch < schedule.micro_batches):
                what = f"there are {schedule.stages} stages and {schedule.micro_batches} micro-batches"
                raise LayoutError(f"{op} on rank {rank} does not exist", where="schedule", remedy=what)
            if schedule.placement[op.stage] != rank:
                owner = schedule.placement[op.stage]
                raise LayoutError(f"{op} stands on rank {rank}", where="schedule", remedy=f"stage {op.stage} is on rank {owner}")
            place = op.stage, op.micro_batch
            kinds[place] = kinds.get(place, "") + op.kind
    for place in ((stage, k) for stage in range(schedule.stages) for k in range(schedule.micro_batches)):
        found = "".join(sorted(kinds.get(place, "")))
        if found not in ("BF", "FIW"):
            what = f"stage {place[0]} does {'+'.join(found) or 'nothing'} for micro-batch {place[1]}"
            raise LayoutError(what, where="schedule", remedy="each does F and B, or F, I and W, once")


def _play(schedule: Schedule) -> Iterator[tuple[int, Op]]:
    """Yield (rank, operation) in an order in which each finds what it needs.

    Raises `LayoutError` that names the first operation that never does.
    """
    done: set[Op] = set()
    at = [0] * schedule.ranks
    awaited: dict[Op, list[int]] = {}
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        order = schedule.orders[rank]
        while at[rank] < len(order):
            op = order[at[rank]]
            missing = next((need for need in _needs(op, schedule.stages) if need not in done), None)
            if missing is not None:
                awaited.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            done.add(_result(op))
            yield rank, op
            ready.extend(awaited.pop(_result(op), ()))
    stuck = [(schedule.placement[need.stage] != rank, rank, need) for need, ranks in awaited.items() for rank in ranks]
    if stuck:
        elsewhere, rank, need = min(stuck)
        named = next(op for order in schedule.orders for op in order if _result(op) == need)
        owner = schedule.placement[need.stage]
        behind = f"on rank {owner}, which waits at {schedule.orders[owner][at[owner]]}" if elsewhere else "later on the same rank"
        what = f"{schedule.orders[rank][at[rank]]} on rank {rank} can never run: it waits for {named}, {behind}"
        raise LayoutError(what, where="schedule", remedy="change the order")


def _result(op: Op) -> Op:
    """What others wait for: of a backward pass, whole or split, the gradient of its input."""
    return op._replace(kind="I") if op.kind == "B" else op


def _needs(op: Op, stages: int) -> Iterator[Op]:
    if op.kind == "F":
        if op.stage > 0:
            yield Op("F", op.stage - 1, op.micro_batch)
    elif op.kind == "W":
        yield Op("I", op.stage, op.micro_batch)
    else:
        yield Op("F", op.stage, op.micro_batch)
        if op.stage < stages - 1:
            yield Op("I", op.stage + 1, op.micro_batch)


class Slot(NamedTuple):
    """One operation on the clock."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what. `peak_in_flight`: (stage, micro-batch) pairs whose activations a rank holds at most at once."""

    schedule: Schedule
    slots: tuple[tuple[Slot, ...], ...]
    peak_in_flight: tuple[int, ...]

    @cached_property
    def makespan_s(self) -> float:
        return max((slots[-1].end_s for slots in self.slots), default=0.0)

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(self.makespan_s - math.fsum(slot.end_s - slot.start_s for slot in slots) for slots in self.slots)

    @property
    def idle_fraction(self) -> float:
        """The bubble: the share of all ranks' time that is idle."""
        whole = self.makespan_s * len(self.slots)
        return math.fsum(self.idle_s) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    input_s: float | Sequence[float],
    weight_s: float | Sequence[float],
    transfer_s: float = 0.0,
) -> Timeline:
    """Return the timeline of `schedule`, given the seconds of one micro-batch on each stage (one number: the same on all).

    A whole backward pass takes `input_s` + `weight_s`. `transfer_s` passes between the end of an operation and its result's
    arrival on another rank; the links carry any number of results at once. Raises `LayoutError` when the schedule cannot run.
    """
    stages = schedule.stages
    forward, backward, weight = (_per_stage(value, stages) for value in (forward_s, input_s, weight_s))
    took = {"F": forward, "I": backward, "W": weight, "B": [i + w for i, w in zip(backward, weight, strict=True)]}
    ends: dict[Op, float] = {}
    slots: list[list[Slot]] = [[] for _ in schedule.orders]
    for rank, op in _play(schedule):
        start = slots[rank][-1].end_s if slots[rank] else 0.0
        for need in _needs(op, stages):
            start = max(start, ends[need] + (transfer_s if schedule.placement[need.stage] != rank else 0.0))
        end = start + took[op.kind][op.stage]
        ends[_result(op)] = end
        slots[rank].append(Slot(op, start, end))
    return Timeline(schedule, tuple(map(tuple, slots)), peak_in_flight(schedule))


def _per_stage(value: float | Sequence[float], stages: int) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(values) != stages or min(values) < 0:
        what = f"{values} are not the seconds of {stages} stages"
        raise LayoutError(what, where="schedule", remedy="give one number, or one for each stage, none negative")
    return [float(one) for one in values]


def peak_in_flight(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the most that each rank holds at once of activations: from a forward pass to the end of its backward (B or W).

    `sizes`: of each stage, e.g. in bytes; None counts (stage, micro-batch) pairs.
    """
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for op in order:
            size = 1 if sizes is None else sizes[op.stage]
            held += size if op.kind == "F" else -size if op.kind in "BW" else 0
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def cut_layers(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Return the layers of each stage: contiguous, none empty, with the least possible cost of the dearest stage.

    Among those, the costs' sum of squares is least. `costs` of the layers; `first` and `last` are what the two end stages do
    besides, such as the embedding and the head. Raises `LayoutError` when there are fewer layers than stages.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise LayoutError(f"{count} layers do not make {stages} stages", where="layout.pipeline", remedy=f"use 1 to {count} stages")
    if min(*costs, first, last) < 0:
        raise LayoutError("a layer has a negative cost", where="layout.pipeline", remedy="give costs of 0 or more")
    # Each end stage has a layer, so what it does besides may as well belong to that layer.
    sums = list(accumulate([costs[0] + first + (last if count == 1 else 0), *costs[1:-1], costs[-1] + last][:count], initial=0.0))
    bounds = sorted({sums[j] - sums[i] for j in range(1, count + 1) for i in range(j)})
    bound = bounds[bisect_left(bounds, True, key=lambda most: _fits(sums, stages, most))]
    # best[j]: (least sum of squares of the first j layers in the stages so far, where the last of these stages starts).
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * count
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        row: list[tuple[float, int]] = [(math.inf, 0)] * (count + 1)
        for j in range(stage, count - (stages - stage) + 1):
            for i in range(j - 1, stage - 2, -1):
                cost = sums[j] - sums[i]
                if cost > bound:
                    break
                row[j] = min(row[j], (best[i][0] + cost * cost, i))
        best = row
        starts.append([start for _, start in row])
    ends = [count]
    for row_starts in reversed(starts):
        ends.append(row_starts[ends[-1]])
    ends.reverse()
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _fits(sums: list[float], stages: int, bound: float) -> bool:
    """Whether at most `stages` pieces, each of a cost of at most `bound`, hold all layers; `sums` are the costs' running sums."""
    start, used = 0, 0
    while start < len(sums) - 1:
        stop = start
        while stop + 1 < len(sums) and sums[stop + 1] - sums[start] <= bound:
            stop += 1
        if stop == start:
            return False
        start, used = stop, used + 1
    return used <= stages


def _parse_op(word: Any) -> Op:
    found = _OP.fullmatch(word) if isinstance(word, str) else None
    if found is None:
        raise ValueError(f"{word!r} is not an operation such as 2F5")
    return Op(cast(OpKind, found[2]), int(found[1]), int(found[3]))
