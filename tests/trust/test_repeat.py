from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from surefoot.trust.repeat import batch_invariant, repeatable


def test_the_first_tensor_that_changes_from_run_to_run_is_named() -> None:
    runs = itertools.count()

    def step() -> dict[str, Tensor]:
        run = next(runs)
        return {
            "embed": torch.ones(4),
            "layers.0": torch.full((4,), 1.0 + 2**-23 * (run == 2)),
            "layers.1": torch.full((4,), float(run > 1)),
        }

    found = repeatable(step, times=4)
    assert found is not None
    assert (found.name, found.at) == ("layers.0", 2)


def test_a_race_shows_when_the_timing_is_disturbed() -> None:
    """A sum in order of arrival: the same bits until somebody is late."""
    parts, late = [torch.tensor(1e8), torch.tensor(-1e8), torch.tensor(0.1)], 0

    def step() -> dict[str, Tensor]:
        total = torch.tensor(0.0)
        for index in range(3):
            total = total + parts[(index + late) % 3]
        return {"sum": total}

    def disturb(run: int) -> None:
        nonlocal late
        late = run - 1

    assert repeatable(step, times=5) is None
    found = repeatable(step, times=3, disturb=disturb)
    assert found is not None
    assert (found.name, found.at) == ("sum", 2)


def test_a_tensor_of_one_run_only_is_a_difference() -> None:
    runs = itertools.count()
    found = repeatable(lambda: {"a": torch.zeros(1)} | ({"b": torch.zeros(1)} if next(runs) else {}))
    assert found is not None
    assert (found.name, found.missing) == ("b", True)
    with pytest.raises(ValueError, match="nothing to compare"):
        repeatable(dict, times=1)


def test_a_step_may_reuse_its_buffers() -> None:
    buffer, runs = torch.zeros(3), itertools.count()

    def step() -> dict[str, Tensor]:
        return {"x": buffer.fill_(float(next(runs)))}

    assert repeatable(step, times=2) is not None


def test_rows_by_themselves_are_invariant_and_rows_that_meet_are_not() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert batch_invariant(lambda x: (x * 3.0).cumsum(1), rows, sizes=(2, 3, 7)) is None
    found = batch_invariant(lambda x: x + 1e-3 * (len(x) > 2), rows, sizes=(2, 3, 7))
    assert found is not None
    assert (found.name, found.at) == ("row 0", 3)
    assert [place for place, _ in found.elements] == list(range(5))
