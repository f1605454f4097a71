"""Planted bugs are found and named, honest changes are left alone: a sample; `python -m bench.mutations` runs all of them."""

from __future__ import annotations

import re

import pytest

from surefoot.train.verify import verify
from surefoot.trust import Verdict
from tests.trust.changes import CHANGES
from tests.trust.mutant import ALL, judge

QUICK = ("optimizer_holds_old_parameters", "last_norm_not_summed_over_tensor", "gradients_summed_in_bfloat16")
SLOW = [name for name in list(ALL)[::4] if name not in QUICK and ALL[name].layout.get("tensor") != 8]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_bug_is_found_and_its_first_tensor_named(name: str) -> None:
    bug = ALL[name]
    evidence = judge(bug)
    assert evidence.verdict == (Verdict.LOSSY if bug.lossy else Verdict.WRONG)
    assert evidence.first is not None
    assert re.search(bug.tensor, evidence.first.tensor), evidence.first
    assert evidence.first.phase in bug.phase.split("|"), evidence.first
    assert evidence.first.sentence


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if index == 0 else pytest.mark.slow) for index, name in enumerate(list(CHANGES)[::5])]
)
def test_an_honest_change_is_not_blamed(name: str) -> None:
    evidence = verify(CHANGES[name])
    assert evidence.verdict in (Verdict.IDENTICAL, Verdict.EQUIVALENT), evidence.first
