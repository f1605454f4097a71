"""Schedules against the formulas of the papers that published them, and against a checker that knows nothing of how they are made."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import LayoutError
from surefoot.parallel.drawing import draw, draw_svg
from surefoot.parallel.schedules import (
    Op,
    Schedule,
    ScheduleKind,
    Timeline,
    cut_layers,
    make_schedule,
    peak_in_flight,
    simulate,
    validate,
)

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
SECONDS = [(1, 1, 1), (2, 3, 1), (3, 4, 2), (5, 5, 3), (4, 7, 4)]
"""Forward, input gradients, weight gradients; the zero-bubble formulas hold where the last is not the longest."""


def shapes(kind: ScheduleKind) -> Iterator[tuple[int, int, int]]:
    """Ranks, micro-batches and stages a rank."""
    for ranks, micro_batches in itertools.product(range(1, 8), (1, 2, 3, 5, 8, 12, 15, 24)):
        for chunks in (2, 3, 4) if kind == "interleaved" else (1,):
            if kind != "interleaved" or micro_batches % ranks == 0:
                yield ranks, micro_batches, chunks


def idle(timeline: Timeline) -> list[float]:
    return [round(seconds, 9) for seconds in timeline.idle_s]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("f", "i", "w"), SECONDS)
def test_gpipe_and_1f1b_idle_as_published(kind: ScheduleKind, f: int, i: int, w: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: (p - 1)(F + B), a share (p - 1) / m of the ideal time."""
    for p, m, _ in shapes(kind):
        found = simulate(make_schedule(kind, p, m), f, i, w)
        assert idle(found) == [(p - 1) * (f + i + w)] * p
        assert found.idle_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("f", "i", "w"), SECONDS)
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_rank(f: int, i: int, w: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: (p - 1)(F + B) / v."""
    for p, m, v in shapes("interleaved"):
        found = simulate(make_schedule("interleaved", p, m, v), f, i, w)  # seconds of a stage: a v-th of the rank's
        assert idle(found) == [(p - 1) * (f + i + w)] * p


@pytest.mark.parametrize(("f", "i", "w"), SECONDS)
def test_zero_bubble_fills_with_weight_gradients(f: int, i: int, w: int) -> None:
    """Qi et al. 2024, table 2, ZB-H1: (p - 1)(F + I - W)."""
    for p, m, _ in shapes("zero_bubble"):
        found = simulate(make_schedule("zero_bubble", p, m), f, i, w)
        if m >= p:
            assert idle(found) == [(p - 1) * (f + i - w)] * p
        assert found.makespan_s <= simulate(make_schedule("1f1b", p, m), f, i, w).makespan_s + 1e-9


def test_the_v_has_no_idle_time_inside() -> None:
    """Qi et al. 2024, ZB-V: with F = I = W a rank never waits between its first and its last operation."""
    for p, m, _ in shapes("zbv"):
        found = simulate(make_schedule("zbv", p, m), 1, 1, 1)
        if m >= 2 * p - 1:
            assert [row[-1].end_s - row[0].start_s for row in found.slots] == [6 * m] * p
            assert [row[0].start_s for row in found.slots] == list(range(p))
            assert found.makespan_s == 6 * m + p - 1


def test_activations_held_are_as_published() -> None:
    """GPipe m; 1F1B p - r; ZB-H1 p; ZB-V p (two half-sized stages); interleaved p (1 + (p - 1) / (p v)) on the first rank."""
    for kind in KINDS:
        for p, m, v in shapes(kind):
            held = peak_in_flight(make_schedule(kind, p, m, v))
            if kind == "gpipe":
                assert held == (m,) * p
            elif kind == "1f1b":
                assert held == tuple(min(p - r, m) for r in range(p))
            elif kind == "zero_bubble":
                assert held == (min(p, m),) * p
            elif kind == "zbv":
                assert max(held) <= 2 * min(p, m)
                assert held == (2 * p,) * p or m < 2 * p - 1
            else:
                assert held == tuple(min(2 * (p - r) - 1 + (v - 1) * p, v * m) for r in range(p))
                if m > p:
                    assert Fraction(held[0], v) == p * (1 + Fraction(p - 1, p * v))


def test_sizes_weigh_what_is_held() -> None:
    schedule = make_schedule("zbv", 3, 9)
    assert peak_in_flight(schedule, [7] * 6) == tuple(7 * count for count in peak_in_flight(schedule))
    # Rank 0 of 1F1B with 3 ranks holds three micro-batches of stage 0, rank 2 one of stage 2.
    assert peak_in_flight(make_schedule("1f1b", 3, 6), [5, 1, 2]) == (15, 2, 2)


def run_naively(schedule: Schedule) -> set[tuple[str, int, int]]:
    """Run every rank's order, one operation a sweep, and check each operation's needs by the definition; return what was done."""
    done: set[tuple[str, int, int]] = set()
    rest = [list(order) for order in schedule.orders]
    while any(rest):
        before = set(done)
        for order in rest:
            if not order:
                continue
            kind, stage, k = order[0]
            backward = {(letter, stage + 1, k) for letter in "BI"}
            needs = {
                "F": stage == 0 or ("F", stage - 1, k) in before,
                "B": ("F", stage, k) in before and (stage == schedule.stages - 1 or bool(backward & before)),
                "I": ("F", stage, k) in before and (stage == schedule.stages - 1 or bool(backward & before)),
                "W": ("I", stage, k) in before,
            }
            if needs[kind]:
                done.add((kind, stage, k))
                order.pop(0)
        if done == before:
            raise RuntimeError("stuck")
    return done


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 20), st.integers(2, 4))
def test_every_schedule_runs_to_its_end_and_does_everything_once(kind: ScheduleKind, p: int, m: int, v: int) -> None:
    interleaved = kind == "interleaved"
    schedule = make_schedule(kind, p, m * p if interleaved else m, v if interleaved else 1)
    validate(schedule)
    done = run_naively(schedule)
    kinds = "FIW" if kind in ("zero_bubble", "zbv") else "FB"
    assert done == set(itertools.product(kinds, range(schedule.stages), range(schedule.micro_batches)))
    assert sum(map(len, schedule.orders)) == len(done)
    assert Schedule.from_json(schedule.to_json()) == schedule


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_timeline_obeys_every_wait_and_wastes_no_time(data: st.DataObject) -> None:
    """Uneven stages and a transfer time: each operation starts at the latest of what it must wait for, and at no later time."""
    kind = data.draw(st.sampled_from(KINDS))
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    schedule = make_schedule(kind, p, m * p, 2 if kind == "interleaved" else 1)
    costs = [[data.draw(st.integers(0, 9)) for _ in range(schedule.stages)] for _ in range(3)]
    transfer = data.draw(st.integers(0, 5))
    found = simulate(schedule, *costs, transfer_s=transfer)
    spans = {slot.op: slot for row in found.slots for slot in row}
    took = {"F": costs[0], "I": costs[1], "W": costs[2], "B": [i + w for i, w in zip(costs[1], costs[2], strict=True)]}
    for rank, row in enumerate(found.slots):
        for place, (op, start, end) in enumerate(row):
            assert end - start == took[op.kind][op.stage]
            waits = [row[place - 1].end_s if place else 0.0]
            if op.kind == "F" and op.stage > 0:
                waits.append(spans[Op("F", op.stage - 1, op.micro_batch)].end_s + transfer * (schedule.placement[op.stage - 1] != rank))
            if op.kind in "BI" and op.stage < schedule.stages - 1:
                above = spans[Op(op.kind, op.stage + 1, op.micro_batch)]
                waits.append(above.end_s + transfer * (schedule.placement[op.stage + 1] != rank))
            assert start == max(waits)
    assert found.makespan_s == max(slot.end_s for slot in spans.values())
    busy = sum(m * p * (took["F"][s] + took["B"][s]) for s in range(schedule.stages))
    assert sum(found.idle_s) == pytest.approx(p * found.makespan_s - busy)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_exchange_of_two_operations_is_judged_as_running_it_does(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    schedule = make_schedule(kind, 3, 6, 2 if kind == "interleaved" else 1)
    rank = data.draw(st.integers(0, 2))
    order = list(schedule.orders[rank])
    a, b = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    order[a], order[b] = order[b], order[a]
    changed = replace(schedule, orders=(*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]))
    try:
        run_naively(changed)
    except RuntimeError:
        with pytest.raises(LayoutError, match="can never run"):
            validate(changed)
    else:
        validate(changed)


def test_what_is_wrong_is_named() -> None:
    good = make_schedule("1f1b", 2, 2)  # rank 0: 0F0 0F1 0B0 0B1, rank 1: 1F0 1B0 1F1 1B1

    def with_order(rank: int, *ops: Op) -> Schedule:
        return replace(good, orders=tuple(ops if r == rank else order for r, order in enumerate(good.orders)))

    f0, f1, b0, b1 = good.orders[0]
    with pytest.raises(LayoutError, match=r"0B1 on rank 0 can never run: it waits for 0F1, later on the same rank"):
        validate(with_order(0, f0, b1, f1, b0))
    # Each waits for the other: rank 0 for a gradient of micro-batch 0, rank 1 for micro-batch 1.
    c0, e0, c1, e1 = good.orders[1]
    with pytest.raises(LayoutError, match=r"0B0 on rank 0 can never run: it waits for 1B0, on rank 1, which waits at 1F1"):
        validate(replace(good, orders=((f0, b0, f1, b1), (c0, c1, e0, e1))))
    with pytest.raises(LayoutError, match="stage 0 does B for micro-batch 1"):
        validate(with_order(0, f0, b0, b1))
    with pytest.raises(LayoutError, match=r"stage 0 does B\+F\+F for micro-batch 0"):
        validate(with_order(0, f0, f0, f1, b0, b1))
    with pytest.raises(LayoutError, match="1F0 stands on rank 0 — stage 1 is on rank 1"):
        validate(with_order(0, f0, f1, b0, b1, Op("F", 1, 0)))
    with pytest.raises(LayoutError, match="0F2 on rank 0 does not exist"):
        validate(with_order(0, f0, f1, b0, b1, Op("F", 0, 2)))
    with pytest.raises(LayoutError, match="2 stages and 1 orders"):
        validate(replace(good, orders=good.orders[:1]))
    with pytest.raises(LayoutError, match=r"0W0 on rank 0 can never run: it waits for 0I0, later"):
        split = make_schedule("zero_bubble", 1, 1)
        validate(replace(split, orders=(tuple(sorted(split.orders[0], reverse=True)),)))


@pytest.mark.parametrize(
    ("kind", "ranks", "micro_batches", "stages", "message"),
    [
        ("1f2b", 2, 2, 1, "did you mean '1f1b'"),
        ("1f1b", 0, 2, 1, "use 1 or more"),
        ("gpipe", 2, 0, 1, "use 1 or more"),
        ("interleaved", 2, 4, 1, "use 2 or more"),
        ("interleaved", 4, 6, 2, "use 4 or 8"),
        ("interleaved", 4, 3, 2, "use 4, or schedule"),
        ("zbv", 2, 4, 3, "use 2"),
        ("zero_bubble", 2, 4, 2, "use 1, or schedule"),
    ],
)
def test_a_schedule_that_is_none_is_refused(kind: ScheduleKind, ranks: int, micro_batches: int, stages: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_schedule(kind, ranks, micro_batches, stages)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"orders": [["0X1"]]}', '{"orders": [], "placement": 3}', '{"orders": 5}'])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="is not a schedule"):
        Schedule.from_json(text)


def test_seconds_must_be_of_every_stage() -> None:
    with pytest.raises(LayoutError, match="one for each stage"):
        simulate(make_schedule("1f1b", 3, 3), [1, 2], 1, 1)
    with pytest.raises(LayoutError, match="none negative"):
        simulate(make_schedule("1f1b", 3, 3), -1, 1, 1)


def partitions(count: int, stages: int) -> Iterator[tuple[range, ...]]:
    for inner in itertools.combinations(range(1, count), stages - 1):
        ends = (0, *inner, count)
        yield tuple(range(a, b) for a, b in itertools.pairwise(ends))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
def test_layers_are_cut_as_well_as_by_trying_everything(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 15))

    def score(cut: tuple[range, ...]) -> tuple[int, int]:
        sums = [sum(costs[layer] for layer in stage) for stage in cut]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(value * value for value in sums)

    found = cut_layers(costs, stages, first=first, last=last)
    assert found in set(partitions(len(costs), stages))
    assert score(found) == min(map(score, partitions(len(costs), stages)))


def test_a_heavy_head_leaves_its_stage_fewer_layers() -> None:
    assert [len(stage) for stage in cut_layers([1.0] * 10, 3, last=3.0)] == [4, 4, 2]
    with pytest.raises(LayoutError, match="use 1 to 3 stages"):
        cut_layers([1.0] * 3, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_shows_every_operation(kind: ScheduleKind) -> None:
    schedule = make_schedule(kind, 2, 4, 2 if kind == "interleaved" else 1)
    lines = draw(schedule).splitlines()
    assert len(lines) == 3
    for rank, order in enumerate(schedule.orders):
        shown = lines[rank].removeprefix(f"rank {rank}").replace(".", " ").split()
        assert shown == [str(op) if schedule.stages_per_rank > 1 else str(op)[1:] for op in order]
    image = ET.fromstring(draw_svg(schedule))
    assert len(image.findall(".//{*}title")) == sum(map(len, schedule.orders))
    assert max(len(line) for line in draw(schedule, width=40).splitlines()[:2]) <= 48
