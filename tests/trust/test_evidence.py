"""Evidence prints and goes through JSON unchanged."""

from __future__ import annotations

import json
import math
from itertools import pairwise

from surefoot.trust import Evidence, Finding, Row, Verdict

ROWS = (
    Row("layers.0.mixer", "forward", Verdict.EQUIVALENT, 1e-15, 1e-11),
    Row("layers.1.mixer", "forward", Verdict.WRONG, 1e-3, 1e-11),
    Row("layers.1.ffn", "forward", Verdict.WRONG, math.nan, 0.0, "NaN"),
    Row("head.weight", "reduction", Verdict.LOSSY, 2e-2, 1e-2),
    Row("embed", "forward", Verdict.IDENTICAL, 0.0, 0.0),
)
FINDING = Finding("layers.1.mixer", "forward", 1, (2, 3), Verdict.WRONG, 1e-3, 1e-11, "every element is 2 x the reference")


def test_verdicts_are_ordered() -> None:
    assert all(a.severity < b.severity for a, b in pairwise([Verdict.IDENTICAL, Verdict.EQUIVALENT, Verdict.LOSSY, Verdict.WRONG]))
    assert Verdict.worst([Verdict.EQUIVALENT, Verdict.LOSSY, Verdict.IDENTICAL]) is Verdict.LOSSY
    assert Verdict.worst([]) is Verdict.IDENTICAL


def test_table_is_worst_first_and_short() -> None:
    evidence = Evidence(Verdict.WRONG, {"float64": Verdict.WRONG}, ROWS, FINDING)
    assert [row.name for row in evidence.table()] == ["layers.1.ffn", "layers.1.mixer", "head.weight", "layers.0.mixer", "embed"]
    assert len(evidence.table(2)) == 2


def test_json_round_trip() -> None:
    evidence = Evidence(
        Verdict.WRONG, {"float64": Verdict.WRONG, "working precision": Verdict.LOSSY}, ROWS, FINDING, {"degrees": {"tensor": 2}}
    )
    again = Evidence.from_json(evidence.to_json())
    assert repr(again) == repr(evidence)  # NaN is not equal to itself
    assert again.first == FINDING
    assert Evidence.from_json(Evidence(Verdict.IDENTICAL, {}, ()).to_json()) == Evidence(Verdict.IDENTICAL, {}, ())


def test_json_is_strict() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(Evidence(Verdict.WRONG, {}, ROWS, None, {"clip": math.inf}).to_json(), parse_constant=refuse)
