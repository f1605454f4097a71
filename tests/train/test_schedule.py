from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.train.config import ScheduleConfig
from surefoot.train.schedule import learning_rate_fraction


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_linear_and_reaches_the_peak(kind: str) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=4)
    assert [learning_rate_fraction(schedule, step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_closed_forms() -> None:
    cosine = ScheduleConfig(kind="cosine", warmup_steps=10, final_fraction=0.1)
    assert learning_rate_fraction(cosine, 54, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    linear = ScheduleConfig(kind="linear", warmup_steps=0, final_fraction=0.0)
    assert [learning_rate_fraction(linear, step, 4) for step in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    wsd = ScheduleConfig(kind="wsd", warmup_steps=0, decay_fraction=0.5, final_fraction=0.0)
    assert [learning_rate_fraction(wsd, step, 8) for step in range(8)] == pytest.approx([1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


@given(
    kind=st.sampled_from(["cosine", "linear", "wsd"]),
    steps=st.integers(2, 500),
    warmup=st.floats(0, 0.9),
    final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_bounded_ends_at_the_final_fraction_and_never_rises_after_warm_up(
    kind: str, steps: int, warmup: float, final: float, decay: float
) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=int(warmup * steps), final_fraction=final, decay_fraction=decay)
    values = [learning_rate_fraction(schedule, step, steps) for step in range(steps)]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert values[-1] == pytest.approx(final, abs=1e-12) or schedule.warmup_steps == steps
    after = values[schedule.warmup_steps :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
