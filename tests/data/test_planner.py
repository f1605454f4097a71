"""Plans: no token lost or doubled, rows full, the same whatever the ranks, exact across restarts and changes of weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.data.ledger import Ledger, audit, read
from surefoot.data.mixture import normalised
from surefoot.data.planner import OutOfDocuments, Planner, PlanState, StepPlan, arranged, attention_pairs

LENGTH, ROWS = 64, 6
WEIGHTS = normalised([5.0, 2.0, 1.0])


def length(source: int, n: int) -> int:
    return max(2, min(400, int(Random(f"{source} {n}").lognormvariate(3, 1.2))))


def planner(**options: object) -> Planner:
    return Planner([(0, WEIGHTS)], length, ROWS, LENGTH, **options)  # type: ignore[arg-type]


def planned(steps: int, maker: Planner | None = None, state: PlanState | None = None) -> tuple[list[StepPlan], PlanState]:
    maker, state = maker or planner(), state or PlanState.fresh(3)
    plans = []
    for _ in range(steps):
        plan, state = maker.plan(state)
        plans.append(plan)
    return plans, state


def test_no_token_is_lost_or_doubled() -> None:
    """What was drawn is what rows hold and what waits, piece beside piece."""
    plans, state = planned(60)
    pieces = [piece for plan in plans for row in plan.rows for piece in row]
    tokens = Counter((p.source, p.n, t) for p in [*pieces, *state.full, *state.waiting] for t in range(p.low, p.high))
    expected = Counter((s, n, t) for s in range(3) for n in range(state.mixture.drawn[s]) for t in range(length(s, n)))
    assert tokens == expected


def test_rows_are_full_and_never_too_long() -> None:
    plans, _ = planned(60)
    assert all(0 < sum(piece.size for piece in row) <= LENGTH for plan in plans for row in plan.rows)
    assert all(len(plan.rows) == ROWS for plan in plans)
    assert np.mean([plan.padding(LENGTH) for plan in plans]) < 0.005


def test_nothing_waits_for_long() -> None:
    """Half of each row that is no piece of a long document is for the oldest: 32 rows' worth of tokens wait, and go in twice as many."""
    state, drawn, short = PlanState.fresh(3), {}, 0.0
    for step in range(1, 201):
        before = state.mixture.drawn
        plan, state = planner().plan(state)
        drawn |= {(s, n): step for s in range(3) for n in range(before[s], state.mixture.drawn[s])}
        short += sum(piece.size < LENGTH for row in plan.rows for piece in row[:1])
        allowed = 2 * 32 / max(1.0, short / step) + 8
        assert all(step - drawn[piece.source, piece.n] <= allowed for row in plan.rows for piece in row)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 30))
def test_planning_goes_on_from_a_state_written_down(stop: int) -> None:
    whole, _ = planned(30)
    head, state = planned(stop)
    tail, _ = planned(30 - stop, state=PlanState.from_json(json.loads(json.dumps(state.to_json()))))
    assert head + tail == whole


def test_weights_set_by_hand_hold_from_their_step_on() -> None:
    _, state = planned(20)
    changed = PlanState(state.step, state.mixture, state.full, state.waiting, ((25, (0.0, 0.0, 1.0)),))
    plans, _ = planned(60, state=changed)
    assert plans[3].weights == WEIGHTS
    assert plans[4].weights == (0.0, 0.0, 1.0)
    last = [piece.source for plan in plans[45:] for row in plan.rows for piece in row]
    assert set(last) == {2}


def test_a_schedule_changes_weights_at_its_tokens() -> None:
    maker = Planner([(0, (1.0, 0.0, 0.0)), (4000, (0.0, 1.0, 0.0))], length, ROWS, LENGTH)
    plans, state = planned(40, maker)
    given_ = [sum(length(s, n) for n in range(state.mixture.drawn[s])) for s in range(3)]
    assert 4000 <= given_[0] < 4400
    assert given_[2] == 0
    assert plans[-1].weights == (0.0, 1.0, 0.0)


def test_the_end_of_all_sources_ends_planning() -> None:
    maker = planner(limits=(20, 20, 20))
    state, steps = PlanState.fresh(3), 0
    with pytest.raises(OutOfDocuments):
        while True:
            _, state = maker.plan(state)
            steps += 1
    left = sum(piece.size for piece in (*state.full, *state.waiting))
    trained = sum(piece.size for plan in planned(steps, maker)[0] for row in plan.rows for piece in row)
    assert trained + left == sum(length(s, n) for s in range(3) for n in range(20))
    assert left < ROWS * LENGTH


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (3, 2), (6, 1), (1, 6)]), st.integers(0, 100))
def test_arrangements_hold_the_same_rows_equally_many_each(shape: tuple[int, int], seed: int) -> None:
    costs = np.array([Random(f"{seed} {row}").lognormvariate(0, 2) for row in range(24)])
    order = arranged(costs, *shape)
    assert sorted(order) == list(range(24))
    loads = costs[order].reshape(shape[0], -1).sum(1)
    plain = costs.reshape(shape[0], -1).sum(1)
    assert loads.max() <= plain.max() * 1.5 + 1e-9
    assert loads.max() <= costs.sum() / shape[0] + costs.max()  # list scheduling (Graham 1966), but for full bins


def test_cost_is_the_pairs_of_the_mask() -> None:
    row = planned(1)[0][0].rows[0]
    numbers = np.repeat(np.arange(len(row)), [piece.size for piece in row])
    mask = (numbers[:, None] == numbers[None, :]) & np.tri(len(numbers), dtype=bool)
    assert attention_pairs(row) == int(mask.sum())


def test_the_ledger_proves_what_was_planned_and_sees_what_was_not(tmp_path: Path) -> None:
    plans, _ = planned(40)
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    for plan in plans:
        ledger.append(plan.step, plan.pieces())
    ledger.close()
    found = audit(read(path), ["a", "b", "c"], length)
    assert found.problems == []
    assert found.steps == 40
    assert sum(found.tokens) == sum(piece.size for plan in plans for row in plan.rows for piece in row)
    entries = list(read(path))
    for planted, says in (
        ([*entries[:10], *entries[11:]], "step 12 follows step 10"),
        ([*entries, entries[-1]], "trained twice"),
    ):
        assert any(says in problem for problem in audit(iter(planted), ["a", "b", "c"], length).problems)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_torn_ledger_is_cut_and_goes_on(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.bin"
    plans, _ = planned(8)
    ledger, ends = Ledger(path), [0]
    for plan in plans:
        ledger.append(plan.step, plan.pieces())
        ends.append(path.stat().st_size)
    ledger.close()
    cut = data.draw(st.integers(0, ends[-1]))
    with path.open("r+b") as file:
        file.truncate(cut)
    whole = max(step for step, end in enumerate(ends) if end <= cut)
    assert [entry.step for entry in read(path)] == list(range(1, whole + 1))
    back = data.draw(st.integers(0, whole))
    again = Ledger(path, back)
    for plan in plans[back:]:
        again.append(plan.step, plan.pieces())
    again.close()
    assert again.digest == ledger.digest
    assert path.stat().st_size == ends[-1]


def test_a_ledger_that_is_altered_or_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.bin"
    ledger = Ledger(path)
    for plan in planned(3)[0]:
        ledger.append(plan.step, plan.pieces())
    ledger.close()
    with pytest.raises(DataError, match="ends at step 3, the run goes on after step 9"):
        Ledger(path, 9)
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="the record of step 1 is damaged"):
        list(read(path))
