"""Before a layout is trained with: a short trial by the run's own processes, held against the plain model.

The evidence stays with the run.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from surefoot.core.config import to_json
from surefoot.core.errors import SurefootError
from surefoot.core.files import write_atomic
from surefoot.models.flops import count_flops
from surefoot.parallel import Mesh, Processes
from surefoot.train.config import TrainConfig
from surefoot.train.recording import record
from surefoot.train.setup import code_version
from surefoot.train.verify import judge, reference, rounding_of, trials_of
from surefoot.trust import Evidence, Verdict

SHARE = 0.01  # of a run's time that a trial may take when nobody asked for it
TRIAL_S = 4.0  # of a trial of two processes on two cores; more take turns
COMPILE_S = 60.0
USUAL_MFU = 0.5


class VerdictError(SurefootError):
    """The layout, precision or compilation does not compute what the plain model does."""

    exit_code = 1


@dataclass(frozen=True)
class Admission:
    """`evidence` is on the first process only, and None where it stood already (`seconds` is 0 then)."""

    verdict: Verdict
    seconds: float
    evidence: Evidence | None


def admit(config: TrainConfig, mesh: Mesh, processes: Processes, peak_flops_per_s: float, kept: Path | None) -> Admission | None:
    """Take one step of a small model as `config` says, on all processes, and of the plain model on the first; compare every tensor.

    kept: where the first process finds evidence of before, which counts for the same layout, settings and code, and writes the new. None
    is returned where there is nothing to prove, or the trial would take more than `SHARE` of the run. Raises `VerdictError`.
    """
    config = config.model_copy(update={"layout": mesh.layout})
    if not _to_prove(config):
        return None
    mark = _mark(config)
    asked = wanted(config, peak_flops_per_s)
    known = _known(kept, mark)
    asked, known = processes.gather((asked, known))[0]  # one machine's clock must not decide otherwise than another's
    if known is not None:
        return Admission(known, 0.0, None)
    if not asked:
        return None
    start = time.perf_counter()
    trials, rounded = trials_of(config), rounding_of(config)
    chance, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        parts = processes.collect([record(trial, processes, 1, rounded=rounded, mesh=mesh) for trial in trials])
        evidence = None
        if parts is not None:
            candidates = [list(recordings) for recordings in zip(*parts, strict=True)]
            evidence = judge(config, [reference(trial, 1, rounded) for trial in trials], candidates)
            evidence = replace(evidence, facts={**evidence.facts, "mark": mark})
            if kept is not None:
                write_atomic(kept, evidence.to_json() + "\n")
    finally:
        torch.set_rng_state(chance)
        torch.set_num_threads(threads)
    told = None if evidence is None else (evidence.verdict, evidence.first)
    verdict, first = next(one for one in processes.gather(told) if one is not None)
    if verdict in (Verdict.LOSSY, Verdict.WRONG):
        why = f": {first.tensor} ({first.phase}): {first.sentence}" if first else ""
        remedy = 'surefoot verify shows every tensor; trust.verify="never" trains all the same'
        raise VerdictError(f"a trial of this layout is {verdict}{why}", where=str(kept) if kept else "layout", remedy=remedy)
    return Admission(verdict, time.perf_counter() - start, evidence)


def _to_prove(config: TrainConfig) -> bool:
    return (config.layout.world_size > 1 or config.train.compile) and config.trust.verify != "never"


def wanted(config: TrainConfig, peak_flops_per_s: float) -> bool:
    """Return whether there is something to prove, and it was asked for or costs next to nothing beside the run."""
    cheap = trial_seconds(config) < SHARE * run_seconds(config, peak_flops_per_s)
    return _to_prove(config) and (config.trust.verify == "always" or cheap)


def trial_seconds(config: TrainConfig) -> float:
    """Return about how long a trial takes."""
    return TRIAL_S * max(1.0, config.layout.world_size / 2.0) + COMPILE_S * config.train.compile


def run_seconds(config: TrainConfig, peak_flops_per_s: float) -> float:
    """Return about how long the whole run takes at `USUAL_MFU`."""
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    return tokens * count_flops(config.model, config.data.sequence_length).training / (USUAL_MFU * peak_flops_per_s)


def _mark(config: TrainConfig) -> str:
    """Return what tells one trial from another: all that its processes read, and the code they run."""
    trials = [to_json(trial) for trial in trials_of(config)]
    return hashlib.sha256("\n".join([*trials, code_version(), torch.__version__]).encode()).hexdigest()[:16]


def _known(kept: Path | None, mark: str) -> Verdict | None:
    """Return the verdict that stands at `kept` for this very trial, unless it was bad, cannot be read, or the code has no name."""
    if kept is None or not kept.is_file():
        return None
    try:
        found = Evidence.from_json(kept.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError):
        return None  # written by other code, or cut short: the trial is taken anew
    bad = found.verdict in (Verdict.LOSSY, Verdict.WRONG)
    return None if bad or found.facts.get("mark") != mark or "dirty" in code_version() else found.verdict
