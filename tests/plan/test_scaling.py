from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from surefoot.core.errors import InputError
from surefoot.core.events import EventLog
from surefoot.plan import Observation, ScalingLaw, fit, observe
from surefoot.plan.scaling import PUBLISHED


def test_a_law_is_found_again_from_its_own_losses() -> None:
    law = ScalingLaw(1.5, 300.0, 900.0, 0.4, 0.3, "made up")
    runs = [Observation(n, d, law.loss(n, d)) for n, d in itertools.product((1e6, 1e7, 1e8), (1e7, 1e8, 1e9))]
    found = fit(runs)
    assert (found.e, found.a, found.b, found.alpha, found.beta) == pytest.approx((1.5, 300.0, 900.0, 0.4, 0.3), rel=1e-3)


@pytest.mark.parametrize("budget", [1e15, 1e18, 1e21, 5.76e23])
def test_an_allocation_spends_the_budget_and_no_other_split_is_better(budget: float) -> None:
    best = PUBLISHED.allocate(budget)
    assert 6 * best.parameters * best.tokens == pytest.approx(budget)
    for factor in (0.5, 0.9, 1.1, 2.0):
        size = best.parameters * factor
        assert PUBLISHED.loss(size, budget / 6 / size) > best.loss


def test_the_published_law_gives_chinchilla_about_seventy_billion_parameters() -> None:
    # Hoffmann et al. 2022 trained 70 B parameters on 1.4 T tokens for 5.76e23 FLOPs; the refit agrees with that choice.
    best = PUBLISHED.allocate(5.76e23)
    assert best.parameters == pytest.approx(70e9, rel=0.1)
    assert best.tokens == pytest.approx(1.4e12, rel=0.1)


@pytest.mark.parametrize(
    "runs",
    [[], [Observation(1e6, 1e7, 3.0)] * 9, [Observation(1e6, d, 3.0) for d in (1e6, 2e6, 3e6, 4e6, 5e6)], [Observation(1e6, 1e6, 3.0)] * 4],
)
def test_runs_that_cannot_tell_are_refused(runs: list[Observation]) -> None:
    with pytest.raises(InputError, match="cannot tell five constants"):
        fit(runs)


def test_runs_are_read_from_their_directories(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "tiny.toml"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(example.read_text())
    log = EventLog(tmp_path / "a" / "events.jsonl")
    log.append("step", step=1, position=8)
    log.append("eval", step=1, loss=4.0)
    log.append("step", step=2, position=16)
    log.append("eval", step=2, loss=3.5)
    (found,) = observe(tmp_path)
    assert found == Observation(5_476_352, 16 * 512, 3.5)
    with pytest.raises(InputError, match="holds no run"):
        observe(tmp_path / "nothing")
