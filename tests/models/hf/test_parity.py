"""Logits, loss, every gradient and greedy generation against `transformers`, over families x awkward configs x batches."""

from __future__ import annotations

import statistics
from pathlib import Path

import judge
import pytest
import torch
from grid import COMMON, GENERATED, GRID, Case

from surefoot.models.hf import FAMILIES, import_model


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.id)
def test_agrees_with_transformers(case: Case, tmp_path: Path) -> None:
    """float64: 1e-10 relative for logits, loss and each gradient. float32: as near the float64 truth as `transformers` itself is.

    The bound on float32: the median tensor within twice, no tensor beyond eight times its distance (of tensors with few elements
    the largest rounding error varies that much between two equally good orders of summation).
    """
    evidence = judge.evaluate(case, tmp_path)
    assert max(evidence.float64.values()) < 1e-10, max(evidence.float64.items(), key=lambda item: item[1])
    assert statistics.median(evidence.ratios.values()) < 2.0
    assert max(evidence.ratios.values()) < 8.0, max(evidence.ratios.items(), key=lambda item: item[1])


def test_grid_has_every_family_in_every_kind_of_batch() -> None:
    assert {(case.family, case.batch) for case in GRID} == {(f, b) for f in FAMILIES for b in ("plain", "left_padded", "packed")}


@pytest.mark.parametrize("case", GENERATED, ids=lambda case: case.id)
def test_generates_the_same_64_tokens(case: Case, tmp_path: Path) -> None:
    theirs, mine = judge.generations(case, tmp_path)
    assert [len(row) for row in mine] == [64, 64]
    assert mine == theirs
    assert all(len(set(row)) > 5 for row in mine)  # a model that repeats one token would agree by accident


def test_judge_is_sensitive(tmp_path: Path) -> None:
    """A change of one weight by 1e-8 is seen: the agreement is not an artefact of the comparison."""
    case = Case("qwen3", "base")
    model = judge.make_judge(case, torch.float64)
    spec, mine = import_model(judge.save(model, tmp_path))
    with torch.no_grad():
        mine.get_parameter("layers.1.mixer.qkv.weight")[5, 3] += 1e-8
    batch = judge.make_batch(case)
    found = judge.errors(judge.ours(mine, batch), judge.judge(model, case, batch, spec))
    assert found["logits"] > 1e-10 and max(found.values()) < 1e-5
    assert COMMON["vocab_size"] == spec.vocab_size
