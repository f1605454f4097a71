"""Is what a layout, a precision or other code computes the same as the reference? Two trial runs, compared tensor by tensor.

The reference is the plain model on one process. First both run in float64, where another algorithm stands out by many orders of
magnitude; then both in the precision of the run, where the candidate may be as far from the float64 truth as the reference is.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.core.errors import EngineError
from surefoot.parallel import Layout, Processes, launch
from surefoot.train.config import Precision, TrainConfig
from surefoot.train.recording import Recorded, Recording, record
from surefoot.train.sums import check_sums, with_sums
from surefoot.train.trial import shrunk
from surefoot.trust import Entry, Evidence, Finding, Row, Trace, Verdict, assemble, compare

STEPS = 2  # the second shows what the first left behind: moments, counters, schedules
TIMEOUT_S = 60.0  # of a collective: a rank that dies must not be waited for


def verify(
    config: TrainConfig,
    *,
    code: Path | None = None,
    low: bool = True,
    steps: int = STEPS,
    repeat: int = 0,
    module: str = "surefoot.train.trial_rank",
) -> Evidence:
    """Compare `config` (its layout, precision and compilation; run by the code at `code`, if given) with the reference.

    `low`: also compare in the precision of `config`. `module`: what the candidate's processes run. Between the first step and the second
    the candidate saves a checkpoint and goes on from it. `repeat`: run the candidate's own precision so many times, under timing noise;
    a tensor that is not the same bits each time is wrong, and `facts["repeat"]` says where. Raises `EngineError` when the candidate does
    not run.
    """
    trials = trials_of(config, low=low)
    rounded = rounding_of(config)
    references = [reference(trial, steps, rounded) for trial in trials]
    candidates = _candidates(trials, steps, rounded, code, module, repeat)
    evidence = judge(config, references, candidates)
    return _with_races(evidence, candidates[-1], repeat) if repeat else evidence


def trials_of(config: TrainConfig, *, low: bool = True) -> list[TrainConfig]:
    """Return `config` made small, in float64 and, if asked, in its own precision."""
    trial = shrunk(config)
    return [_in(trial, "float64")] + ([trial] if low and trial.train.precision != "float64" else [])


def rounding_of(config: TrainConfig) -> str | None:
    """Return the dtype that the first weights are rounded to, so that both precisions begin from the same; None: they do so already."""
    return "bfloat16" if config.train.precision == "bfloat16" else None


def judge(config: TrainConfig, references: list[Recording], candidates: list[list[Recording]]) -> Evidence:
    """Return the evidence of the first step that is not right, or of the last. Each entry is of one trial; candidates by rank."""
    layout = config.layout.model_dump()
    degrees = {axis: degree for axis, degree in layout.items() if isinstance(degree, int) and degree > 1}
    steps = len(references[0].facts)
    for step in range(steps):
        pairs: list[tuple[Trace, Trace]] = []
        faults: list[tuple[Recorded, str]] = []
        sums: list[Row] = []
        for ours, theirs in zip(references, candidates, strict=True):
            one, (two, found) = _trace([ours], step)[0], _trace(theirs, step)
            pairs.append(_common(one, two, config))
            faults = faults or found
            verdict = Verdict.WRONG if len(pairs) == 1 else Verdict.LOSSY  # in float64 there is no precision to lose
            sums += check_sums(two, [recording.added[step] for recording in theirs], verdict)
        evidence = compare(*pairs[0], low=pairs[1] if len(pairs) > 1 else None, after_update=step > 0, degrees=degrees)
        evidence = with_sums(evidence, sums)
        if faults:
            evidence = _with_fault(evidence, pairs[0][1], faults)
        evidence = replace(evidence, facts={**evidence.facts, "step": step + 1, "layout": layout})
        if evidence.verdict in (Verdict.LOSSY, Verdict.WRONG):
            break
    return evidence


def _in(config: TrainConfig, precision: Precision) -> TrainConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def reference(trial: TrainConfig, steps: int, rounded: str | None) -> Recording:
    """Return the recording of `trial` as the plain model on one process."""
    plain = {"compile": False, "recompute": False, "micro_batch_size": None}
    alone = trial.model_copy(update={"layout": Layout(), "train": trial.train.model_copy(update=plain)})
    threads = torch.get_num_threads()
    try:
        return record(alone, Processes(), steps, rounded=rounded)
    finally:
        torch.set_num_threads(threads)


def _candidates(
    trials: list[TrainConfig], steps: int, rounded: str | None, code: Path | None, module: str, repeat: int
) -> list[list[Recording]]:
    """Run the trials as the processes of their layout, the last of them repeatedly; return each one's recordings, by rank."""
    size = trials[0].layout.world_size
    with tempfile.TemporaryDirectory(prefix="surefoot-verify-") as scratch:
        folder = Path(scratch)
        asked = [{"config": trial.model_dump(mode="json"), "steps": steps, "rounded": rounded, "repeat": 0} for trial in trials]
        asked[-1]["repeat"] = repeat
        (folder / "trials.json").write_text(json.dumps(asked), encoding="utf-8")
        path = [] if code is None else [str(code.resolve())]
        environment = {
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "SUREFOOT_TIMEOUT_S": str(TIMEOUT_S),
        }
        failed = launch(size, ["-m", module, str(folder)], threads=1, environment=environment)
        if failed:
            raise EngineError(f"the trial run did not end well (exit code {failed})", where="verify", remedy="see what it said above")
        by_rank = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
        return [list(recordings) for recordings in zip(*by_rank, strict=True)]


def _trace(recordings: list[Recording], step: int) -> tuple[Trace, list[tuple[Recorded, str]]]:
    """Put the parts of all processes together; return the trace and what did not fit, with where."""
    parts: dict[tuple[str, str], list[tuple[int, Recorded]]] = {}
    for rank, recording in enumerate(recordings):
        for one in recording.entries:
            if one.step == step:
                parts.setdefault((one.phase, one.name), []).append((rank, one))
    entries, faults = [], []
    for found in parts.values():
        first = found[0][1]
        pieces = [(rank, one.part, list(one.placement.boxes())) for rank, one in found]
        whole, owners, problems = assemble(first.placement.shape, first.part.dtype, pieces)
        faults += [(first, problem) for problem in problems]
        order = min(one.order for _, one in found)
        entries.append(Entry(first.name, first.phase, order, whole, owners))  # type: ignore[arg-type]
    facts: dict[str, Any] = {}
    for recording in recordings:  # a pipeline rank knows the groups of its own parameters
        known = recording.facts[step]
        facts = {**facts, **known, "groups": {**facts.get("groups", {}), **known["groups"]}}
    return Trace(tuple(entries), facts), faults


def _with_fault(evidence: Evidence, trace: Trace, faults: list[tuple[Recorded, str]]) -> Evidence:
    """Return `evidence` with copies that differ: they are the finding unless another tensor went wrong before, in data-flow order."""
    order: dict[tuple[str, str], int] = {(entry.phase, entry.name): place for place, entry in enumerate(trace.ordered())}
    one, problem = min(faults, key=lambda fault: order[fault[0].phase, fault[0].name])
    layer = int(one.name.split(".")[1]) if one.name.startswith("layers.") else None
    sentence = f"{problem}: copies that must be equal are not, so a sum, an update or a starting value was not the same on all of them"
    finding = Finding(one.name, one.phase, layer, (), Verdict.WRONG, float("inf"), 0.0, sentence)  # type: ignore[arg-type]
    before = evidence.first
    if before is not None and order.get((before.phase, before.tensor), len(order)) < order[one.phase, one.name]:
        finding = before
    return replace(evidence, verdict=Verdict.WRONG, rungs={**evidence.rungs, "float64": Verdict.WRONG}, first=finding)


def _with_races(evidence: Evidence, candidate: list[Recording], times: int) -> Evidence:
    """Return `evidence` with what changed from run to run; it is the finding where nothing worse was found."""
    found = next(((rank, one.unsteady) for rank, one in enumerate(candidate) if one.unsteady is not None), None)
    told: dict[str, Any] = {"times": times, "first": None}
    if found is None:
        return replace(evidence, facts={**evidence.facts, "repeat": told})
    rank, difference = found
    told["first"] = {"tensor": difference.name, "rank": rank, "run": difference.at + 1}
    evidence = replace(evidence, facts={**evidence.facts, "repeat": told})
    if evidence.verdict is Verdict.WRONG:
        return evidence
    name, _, place = difference.name.partition(" (")
    sentence = f"not the same bits in run {difference.at + 1} as in the first: a race, or an order of summation that timing decides"
    phase = place.split(" ")[0]
    finding = Finding(name, phase, None, (rank,), Verdict.WRONG, float("inf"), 0.0, sentence)  # type: ignore[arg-type]
    return replace(evidence, verdict=Verdict.WRONG, first=finding)


def _common(reference: Trace, candidate: Trace, config: TrainConfig) -> tuple[Trace, Trace]:
    """Leave out the streams inside compiled blocks, which only the reference can show."""
    if not config.train.compile:
        return reference, candidate
    known = {(entry.phase, entry.name) for entry in candidate.entries}
    kept = tuple(entry for entry in reference.entries if entry.phase not in ("forward", "backward") or (entry.phase, entry.name) in known)
    return Trace(kept, reference.facts), candidate
