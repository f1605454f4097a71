"""`compare`: whether a candidate computed what the reference did, and the first tensor, in data-flow order, that says it did not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from surefoot.trust.evidence import Evidence, Finding, Row, Verdict
from surefoot.trust.explain import culprits, explain
from surefoot.trust.floors import A_PRIORI, apart, confidence, distance, scales, stands_out
from surefoot.trust.precision import LOW, working
from surefoot.trust.trace import Entry, Json, Trace, pairs, same_bits, unlike

HOW = ("layout",)  # facts that say how the work was done, not what was asked for
EXACT = "float64"

Scales = dict[tuple[str, str], float]


def compare(
    reference: Trace,
    candidate: Trace,
    *,
    perturbed: Sequence[Trace] = (),
    low: tuple[Trace, Trace] | None = None,
    after_update: bool = False,
    degrees: Mapping[str, int] | None = None,
) -> Evidence:
    """Return the evidence for `candidate` against `reference`, both run in float64 from the same weights and data.

    perturbed: float64 references that round otherwise (inputs times 1 + u noise, permuted hidden units, another batch split); they measure
    the floors, which are a priori without them. low: (reference, candidate) in the working precision, from weights that it represents
    exactly; their errors are taken from `reference`, the truth. after_update: the traces are of a later step, so that their weights have
    been through updates since they were equal. degrees: of parallelism, by axis, to name a cause.
    """
    degrees = dict(degrees or {})
    scale = scales(reference)
    exact = [_exact(ours, theirs, reference, candidate, perturbed, scale) for ours, theirs in pairs(reference, candidate)]
    facts = _facts(reference.facts, candidate.facts)
    rungs = {EXACT: Verdict.worst([row.verdict for row in exact + facts])}
    rows = exact
    if low is not None:
        lossy = working(reference, *low, scale, after_update=after_update)
        facts += [row for row in _facts(low[0].facts, low[1].facts) if row.name not in {fact.name for fact in facts}]
        rungs[LOW] = Verdict.worst([row.verdict for row in [*lossy.values(), *facts]])
        known = {(row.phase, row.name) for row in exact}
        rows = [_worse(row, lossy.get((row.phase, row.name))) for row in exact] + [row for key, row in lossy.items() if key not in known]
    verdict = Verdict.worst(list(rungs.values()))
    shown: dict[str, Json] = {"degrees": degrees, "reference": reference.facts, "candidate": candidate.facts}
    first = _first(rows, facts, reference, candidate, degrees, scale)
    return Evidence(verdict, rungs, (*rows, *facts), first, shown)


def _exact(ours: Entry | None, theirs: Entry | None, reference: Trace, candidate: Trace, perturbed: Sequence[Trace], scale: Scales) -> Row:
    entry = ours or theirs
    assert entry is not None
    why = unlike(ours, theirs)
    if why or ours is None or theirs is None:
        return Row(entry.name, entry.phase, Verdict.WRONG, math.nan, 0.0, why)
    if same_bits(theirs.tensor, ours.tensor):
        return Row(entry.name, entry.phase, Verdict.IDENTICAL, 0.0, 0.0)
    if not ours.tensor.is_floating_point():
        return Row(entry.name, entry.phase, Verdict.EQUIVALENT, 0.0, 0.0, f"the same numbers as {theirs.tensor.dtype}")
    size, share = scale[ours.phase, ours.name], confidence(ours, reference, candidate, scale)
    found = distance(theirs.tensor, ours.tensor, size, share)
    others = [trace.find(ours.phase, ours.name) for trace in perturbed]
    known = [distance(one.tensor, ours.tensor, size, share) for one in others if one is not None]
    error, floor = stands_out(found, known)
    return Row(entry.name, entry.phase, Verdict.EQUIVALENT if error <= floor else Verdict.WRONG, error, floor)


def _worse(exact: Row, low: Row | None) -> Row:
    return low if low is not None and low.verdict.severity > exact.verdict.severity else exact


def _facts(ours: Mapping[str, Json], theirs: Mapping[str, Json]) -> list[Row]:
    """Return a row for each fact that differs, by its dotted path."""
    a, b = dict(_flat(ours)), dict(_flat(theirs))
    rows = []
    for path in sorted(a.keys() | b.keys()):
        if path.split(".")[0] not in HOW and (path not in a or path not in b or a[path] != b[path]):
            note = f"{a.get(path, 'nothing')} in the reference, {b.get(path, 'nothing')} in the candidate"
            rows.append(Row(path, "facts", Verdict.WRONG, math.nan, 0.0, note))
    return rows


def _flat(value: Json, path: str = "") -> list[tuple[str, Json]]:
    if isinstance(value, Mapping):
        return [leaf for key, one in value.items() for leaf in _flat(one, f"{path}.{key}" if path else str(key))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [(f"{path}.length", len(value)), *(leaf for i, one in enumerate(value) for leaf in _flat(one, f"{path}.{i}"))]
    return [(path, value)]


def _first(
    rows: list[Row], facts: list[Row], reference: Trace, candidate: Trace, degrees: Mapping[str, int], scale: Scales
) -> Finding | None:
    """Return the first wrong tensor in data-flow order, else a wrong fact, else the first lossy tensor."""
    wrong = [row for row in rows if row.verdict is Verdict.WRONG]
    guilty = wrong or facts or [row for row in rows if row.verdict is Verdict.LOSSY]
    if not guilty:
        return None
    row = guilty[0]
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", row.name)
    layer = int(found[1]) if found else None
    ours, theirs = reference.find(row.phase, row.name), candidate.find(row.phase, row.name)
    bad: Tensor | None = None
    ranks: tuple[int, ...] = ()
    if ours is not None and theirs is not None and row.verdict is Verdict.WRONG and ours.tensor.shape == theirs.tensor.shape:
        share = confidence(ours, reference, candidate, scale)
        bad = apart(theirs.tensor, ours.tensor, scale.get((row.phase, row.name), 0.0), row.floor or A_PRIORI, share)
        ranks = culprits(theirs, bad)
    sentence = explain(row, ours, theirs, bad, rows, facts, degrees)
    return Finding(row.name, row.phase, layer, ranks, row.verdict, row.error, row.floor, sentence)
