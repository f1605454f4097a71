"""`Evidence`: the outcome of a comparison, as a value that prints and goes through JSON unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from surefoot.trust.trace import Json, Phase


class Verdict(StrEnum):
    """Bit for bit the same; differs as rounding must; the same algorithm with more error than it should have; another algorithm."""

    IDENTICAL = "identical"
    EQUIVALENT = "equivalent"
    LOSSY = "lossy"
    WRONG = "wrong"

    @property
    def severity(self) -> int:
        """0 for identical to 3 for wrong."""
        return list(Verdict).index(self)

    @staticmethod
    def worst(verdicts: list[Verdict]) -> Verdict:
        """Return the most severe, identical if there are none."""
        return max(verdicts, key=lambda verdict: verdict.severity, default=Verdict.IDENTICAL)


Place = Phase | Literal["facts"]


@dataclass(frozen=True)
class Row:
    """One tensor or fact. `error` and `floor`: relative to the tensor's scale; above `floor` it is no longer rounding. NaN: no number."""

    name: str
    phase: Place
    verdict: Verdict
    error: float
    floor: float
    note: str = ""

    @property
    def excess(self) -> float:
        """How many times its floor the error is; infinite where the difference is no number."""
        return self.error / self.floor if math.isfinite(self.error) and self.floor > 0 else (0.0 if self.error == 0 else math.inf)


@dataclass(frozen=True)
class Finding:
    """The first divergence in data-flow order. `layer`: of the canonical name, `ranks`: those whose part is wrong, if only some are."""

    tensor: str
    phase: Place
    layer: int | None
    ranks: tuple[int, ...]
    verdict: Verdict
    error: float
    floor: float
    sentence: str


@dataclass(frozen=True)
class Evidence:
    """`rungs`: the verdict at each precision; `rows`: every tensor in data-flow order, then facts that differ; `first`: the culprit."""

    verdict: Verdict
    rungs: Mapping[str, Verdict]
    rows: tuple[Row, ...]
    first: Finding | None = None
    facts: Mapping[str, Json] = field(default_factory=dict)

    def table(self, n: int = 10) -> list[Row]:
        """Return at most `n` rows, worst first: by verdict, then by how far the error stands above its floor."""
        return sorted(self.rows, key=lambda row: (row.verdict.severity, row.excess), reverse=True)[:n]

    def to_json(self) -> str:
        """Return one JSON object; numbers that JSON lacks (inf, nan) are written as strings."""
        return json.dumps(
            {
                "verdict": self.verdict,
                "rungs": dict(self.rungs),
                "first": None if self.first is None else _plain(self.first),
                "rows": [_plain(row) for row in self.rows],
                "facts": _finite(self.facts),
            },
            allow_nan=False,
        )

    @staticmethod
    def from_json(text: str) -> Evidence:
        """Undo `to_json`."""
        found = json.loads(text)
        first = found["first"]
        return Evidence(
            Verdict(found["verdict"]),
            {name: Verdict(verdict) for name, verdict in found["rungs"].items()},
            tuple(Row(**_numbers(row)) for row in found["rows"]),
            None if first is None else Finding(**_numbers(first) | {"ranks": tuple(first["ranks"])}),
            found["facts"],
        )


def _finite(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Row | Finding) -> dict[str, Any]:
    fields = dict(vars(value))
    for name in ("error", "floor"):
        if not math.isfinite(fields[name]):
            fields[name] = str(fields[name])
    return fields


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"verdict": Verdict(fields["verdict"]), "error": float(fields["error"]), "floor": float(fields["floor"])}
