"""The second rung: in the working precision, the candidate's distance from the float64 truth held against the reference's own."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from surefoot.trust.evidence import Row, Verdict
from surefoot.trust.floors import KAPPA, independent, kappa, quantile, rms
from surefoot.trust.trace import Entry, Trace, pairs, same_bits, unlike

LOW = "working precision"
LARGEST = 2.5  # the largest of many errors fluctuates more than their RMS, by so much
HOPELESS = 64.0  # where too few elements bound a ratio of errors, this and the typical error of the phase do
MEDIAN = 0.6745  # median of the magnitude of a normal deviate
ROUNDING = 0.425  # RMS of one rounding of generic data, in units of u
OUTLIER = 6.0  # standard deviations: where an adaptive update has been, an element that is further off counts as one that is so far
DRIFT = 0.25  # of one rounding: while everything before agrees to this, a tensor's difference arose in its own module

Scales = dict[tuple[str, str], float]


def working(truth: Trace, ours: Trace, theirs: Trace, scale: Scales, *, after_update: bool = False) -> dict[tuple[str, str], Row]:
    """Return a row for each tensor of either trace: its error from `truth` against that of the reference in the same precision.

    An adaptive update divides by the gradient: where that is rounding alone, a weight is off by a whole step in whichever trace drew it.
    So in the phase of updates, and everywhere when the traces began `after_update`, the many speak and not the few.

    Errors are inherited, and a module that adds twice what it should hides in what it inherits. So where reference and candidate agree
    in all that came before, the errors that arose in this module alone are compared as well.
    """
    sides = pairs(ours, theirs)
    errors: dict[str, list[float]] = {}
    for r, _ in sides:
        t = None if r is None else truth.find(r.phase, r.name)
        if t is not None and r is not None and r.tensor.is_floating_point() and t.tensor.shape == r.tensor.shape:
            errors.setdefault(r.phase, []).append(rms(r.tensor.double() - t.tensor.double()) / (scale[r.phase, r.name] or 1.0))
    typical = {phase: statistics.median(values) for phase, values in errors.items()}
    rows: dict[tuple[str, str], Row] = {}
    drift = 0.0
    for r, x in sides:
        entry = r or x
        assert entry is not None
        key = (entry.phase, entry.name)
        t = truth.find(*key)
        why = _incomparable(t, r, x)
        if why:
            rows[key] = Row(entry.name, entry.phase, Verdict.WRONG, math.nan, 0.0, f"in {LOW}, {why}")
        elif t is not None and r is not None and x is not None:
            size = scale.get(key, 0.0)
            rows[key] = _judge(t, r, x, size, typical.get(r.phase, 0.0), len(sides), drift, after_update or r.phase == "update")
            if r.tensor.is_floating_point() and size and r.tensor.numel():
                difference = rms(x.tensor.double() - r.tensor.double()) / size
                drift = max(drift, difference / _one_rounding(r.tensor))
    return rows


def _incomparable(t: Entry | None, r: Entry | None, x: Entry | None) -> str:
    if r is None or x is None or r.tensor.is_floating_point():
        why = unlike(r, x)
        if why or t is None or r is None or t.tensor.shape == r.tensor.shape:
            return why
        return f"its shape is {list(r.tensor.shape)}, of the truth {list(t.tensor.shape)}"
    # Whole numbers may be choices, which rounding can turn.
    return (
        "" if r.tensor.shape == x.tensor.shape and (t is None or t.tensor.shape == r.tensor.shape) else unlike(r, x) or "its shape differs"
    )


def _one_rounding(like: Tensor) -> float:
    return ROUNDING * torch.finfo(like.dtype).eps / 2


def _judge(t: Entry, r: Entry, x: Entry, scale: float, typical: float, tensors: int, drift: float, updated: bool) -> Row:
    name, phase = t.name, t.phase
    if same_bits(x.tensor, r.tensor) or not t.tensor.numel():
        return Row(name, phase, Verdict.IDENTICAL, 0.0, 0.0)
    if not t.tensor.is_floating_point():
        turned, expected = (int((one.tensor != t.tensor).sum()) for one in (x, r))
        allowed = KAPPA * expected + 6.0 * math.sqrt(expected + 1.0)
        verdict = Verdict.LOSSY if turned > allowed else Verdict.EQUIVALENT
        note = f"{turned} choices fall otherwise than in float64, of the reference {expected}"
        return Row(name, phase, verdict, turned / x.tensor.numel(), allowed / x.tensor.numel(), note)
    good = torch.isfinite(t.tensor) & torch.isfinite(r.tensor)
    found, own = ((one.tensor.double() - t.tensor.double())[good] for one in (x, r))
    if not own.numel():
        return Row(name, phase, Verdict.EQUIVALENT, 0.0, 0.0)
    if updated:
        usual = max(float(own.abs().median()) / MEDIAN, _one_rounding(r.tensor) * scale)
        found, own = (error.clamp(-OUTLIER * usual, OUTLIER * usual) for error in (found, own))
    # One rounding of the stored result is nobody's fault, even where the reference happens to be exact.
    base = max(rms(own), _one_rounding(r.tensor) * scale)
    bound = kappa(independent(own), tensors)
    if bound > HOPELESS:
        bound, base = HOPELESS, max(base, typical * scale)
    ratio, of = rms(found) / base if base else math.inf, "own error"
    local, likely = _local(found, own, _one_rounding(r.tensor) * scale, tensors) if drift <= DRIFT else (0.0, 0.0)
    if local / KAPPA > ratio / bound and own.numel() > 1:
        ratio, bound, of = local, KAPPA, "error in this module alone"
    shown = likely if of != "own error" else ratio
    peak = float(found.abs().max()) / max(float(own.abs().max()), 3.0 * base) if base else math.inf
    note = f"{shown:.3g} x the reference's {of} in {LOW}"
    if peak / (LARGEST * bound) > max(1.0, ratio / bound):
        note, ratio, bound = f"one element is off by {peak:.3g} x the reference's largest error in {LOW}", peak, LARGEST * bound
    unit = base / (scale or 1.0)
    return Row(name, phase, Verdict.LOSSY if ratio > bound else Verdict.EQUIVALENT, ratio * unit, bound * unit, note)


def _local(found: Tensor, own: Tensor, rounding: float, tensors: int) -> tuple[float, float]:
    """Return the ratio of the errors that arose here, of candidate and reference, where both inherited the same error I.

    found = I + a, own = I + b: the mean of found^2 - own^2 is E = a^2 - b^2 up to a standard error from the product of I and a - b, and
    the mean of (found - own)^2 is D = a^2 + b^2, so b^2 = (D - E) / 2, at least one rounding of the result; the ratio is
    sqrt(1 + E / b^2), first with E at the low end of its confidence interval, then as is.
    """
    d = found - own
    excess = found.square() - own.square()
    n = excess.numel()
    error = float(excess.square().mean().sqrt()) / math.sqrt(n)
    mean = float(excess.mean())
    b = max((float(d.square().mean()) - mean) / 2.0, rounding**2)
    if not b:
        return (math.inf, math.inf) if mean > quantile(tensors) * error else (1.0, 1.0)
    sure, likely = (math.sqrt(1.0 + max(value, 0.0) / b) for value in (mean - quantile(tensors) * error, mean))
    return sure, likely
