from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surefoot.train.config import CheckpointConfig
from surefoot.train.retention import kept

STEPS = st.dictionaries(st.integers(1, 1000), st.none() | st.floats(0, 10), min_size=1, max_size=20)


@given(steps=STEPS, last=st.integers(1, 5), best=st.integers(0, 3), every=st.integers(0, 50))
def test_what_stays(steps: dict[int, float | None], last: int, best: int, every: int) -> None:
    stays = kept(steps, CheckpointConfig(keep_last=last, keep_best=best, milestone_every=every))
    assert stays <= set(steps)
    assert set(sorted(steps)[-last:]) <= stays
    scored = sorted(loss for loss in steps.values() if loss is not None)
    for step, loss in steps.items():
        if every and step % every == 0:
            assert step in stays
        if loss is not None and best and loss < (scored[best] if best < len(scored) else float("inf")):
            assert step in stays, "one of the best was dropped"
    assert len(stays) <= last + best + (sum(step % every == 0 for step in steps) if every else 0)
