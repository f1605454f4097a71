"""How much two tensors may differ by rounding alone: floors in float64, and the ratio of two errors in a working precision.

In float64 a result that differs in the order of its operations differs by a few u = 2^-53, times sqrt(K) of its sums (Higham & Mary
2019, SIAM J. Sci. Comput. 41), times the growth through layers (C^L with C about 1.01 to 1.05, TTrace, arXiv 2506.09280, theorem 5.3):
in all below about 1e3 u. A change of logic that matters in any working precision is at least 1e-8 = 1e8 u. `A_PRIORI` stands between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.trust.trace import Entry, Trace

U64 = 2.0**-53
A_PRIORI = 1e5 * U64  # where nothing but the model of rounding above is known
MEASURED = 2.0**10 * U64  # where perturbed references say how far rounding goes, which they may do by luck too low
MINOR = 1e-2  # of the phase's typical RMS: a tensor smaller than this is measured against its fellows, not against itself
SENSITIVE = 1e-3  # of a gradient's RMS: an adaptive update blows up the rounding of elements below it
NORM, SLOPE, LARGEST = 4.0, 8.0, 4.0  # by how much a candidate may exceed perturbed references
KAPPA = 1.5  # a ratio of two errors in the same precision: fused kernels and other orders of rounding stay below
FALSE_ALARMS = 1e-3  # chance that any tensor of an honest candidate is called lossy


def rms(x: Tensor) -> float:
    """Return the root mean square of the finite elements."""
    x = x.detach().double()
    x = x[torch.isfinite(x)]
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def scales(trace: Trace) -> dict[tuple[str, str], float]:
    """Return for each (phase, name) the size that its errors are relative to.

    It is the tensor's RMS, but at least `MINOR` of the median of its kind: the gradient of an attention key's bias is zero but for
    rounding, and rounding relative to itself is no error. A kind is a phase; among updates, parameters and each moment apart.
    """
    gradients = {entry.name for entry in trace.entries if entry.phase == "reduction"}
    sizes, kinds = {}, {}
    members: dict[tuple[str, str], list[float]] = {}
    for entry in trace.entries:
        if not entry.tensor.is_floating_point():
            continue
        key = (entry.phase, entry.name)
        suffix = ""
        if entry.phase == "update" and entry.name not in gradients:
            stem, _, last = entry.name.rpartition(".")
            suffix = last if stem in gradients or not gradients else ""
        sizes[key], kinds[key] = rms(entry.tensor), (entry.phase, suffix)
        if sizes[key] > 0:
            members.setdefault(kinds[key], []).append(sizes[key])
    typical = {kind: statistics.median(values) for kind, values in members.items()}
    return {key: max(size, MINOR * typical.get(kinds[key], 0.0)) for key, size in sizes.items()}


def confidence(entry: Entry, reference: Trace, candidate: Trace, scale: dict[tuple[str, str], float]) -> Tensor | None:
    """Return what the difference of each element of an update counts, 0 to 1; None: all of it.

    Adam divides by the gradient's magnitude: where that is nothing but rounding, so is the update, as large as any other. An element
    whose gradient is below `SENSITIVE` of the tensor's scale counts in proportion. A gradient of exactly zero on both sides counts fully.
    """
    if entry.phase != "update":
        return None
    for name in (entry.name, entry.name.rpartition(".")[0]):
        ours, theirs = reference.find("reduction", name), candidate.find("reduction", name)
        if ours is not None and theirs is not None and ours.tensor.shape == theirs.tensor.shape == entry.tensor.shape:
            size = torch.maximum(ours.tensor.detach().abs(), theirs.tensor.detach().abs()).double()
            share = (size / (SENSITIVE * scale["reduction", name] or 1.0)).clamp(max=1.0)
            return torch.where(size == 0, 1.0, share)
    return None


@dataclass(frozen=True)
class Distance:
    """How far one tensor is from another: `norm` RMS of the difference, `largest` element of it, and `slope` along the other,
    each relative to the scale; an element is held against the scale and its own magnitude together."""

    norm: float
    largest: float
    slope: float


def distance(x: Tensor, r: Tensor, scale: float, share: Tensor | None = None) -> Distance:
    """Return how far `x` is from `r`, of equal shapes; elements that are not finite in `r` are left out."""
    d, r = x.detach().double() - r.detach().double(), r.detach().double()
    finite = torch.isfinite(r)
    d = torch.where(finite, d, 0.0) if share is None else torch.where(finite, d * share, 0.0)
    r = torch.where(finite, r, 0.0)
    if not d.numel() or not d.any():
        return Distance(0.0, 0.0, 0.0)
    if scale == 0.0:
        return Distance(math.inf, math.inf, math.inf)
    return Distance(rms(d) / scale, float((d.abs() / (scale + r.abs())).max()), float((d * r).mean() / scale**2))


def apart(x: Tensor, r: Tensor, scale: float, floor: float, share: Tensor | None = None) -> Tensor:
    """Return which elements differ by more than `floor` allows, as booleans."""
    x, r = x.detach().double(), r.detach().double()
    d = (x - r).abs() if share is None else (x - r).abs() * share
    return (d > floor * (scale + r.abs())) | (x.isfinite() != r.isfinite())


def stands_out(found: Distance, others: Sequence[Distance]) -> tuple[float, float]:
    """Return (error, floor) of the statistic that stands highest above its floor, in float64.

    `others`: of perturbed references, which then set the floors: norm and largest element may be 4 times theirs, the slope 8 of its
    standard deviations (which finds a coherent scaling below a large floor). Without them everything is held against `A_PRIORI`.
    """
    if not others:
        return max(found.norm, found.largest), A_PRIORI
    spread = math.sqrt(sum(other.slope**2 for other in others) / len(others))
    tests = (
        (found.norm, NORM * max(other.norm for other in others)),
        (found.largest, LARGEST * max(other.largest for other in others)),
        (abs(found.slope), SLOPE * spread),
    )
    return max(((error, max(floor, MEASURED)) for error, floor in tests), key=lambda pair: pair[0] / pair[1])


def quantile(tensors: int) -> float:
    """Return how many standard deviations make `FALSE_ALARMS` over so many tensors (Šidák)."""
    return -statistics.NormalDist().inv_cdf(-math.expm1(math.log1p(-FALSE_ALARMS) / max(tensors, 1)))


def kappa(elements: float, tensors: int) -> float:
    """Return the largest honest ratio of the RMS errors of two roundings of a tensor with so many independent elements.

    The square of such a ratio is distributed as F(n, n); the bound is its quantile, by Paulson's normal approximation (1942, Ann. Math.
    Stat. 13), at the level that makes `FALSE_ALARMS` over all `tensors` (Šidák), times `KAPPA` for honest differences in the number of
    roundings. Infinite for about six elements or fewer: two draws of one error say nothing about its size.
    """
    z = quantile(tensors)
    b = 2.0 / (9.0 * max(elements, 1.0))
    a, q = (1.0 - b) ** 2, z * z * b
    if q >= a:
        return math.inf
    cube_root = (a + math.sqrt(a * a - (a - q) ** 2)) / (a - q)
    return KAPPA * float(cube_root**1.5)


def independent(error: Tensor) -> float:
    """Return how many elements share the squared error: 3 (sum e^2)^2 / sum e^4, which is n for Gaussian errors."""
    square = error.double().square()
    total = float(square.square().sum())
    return min(float(error.numel()), 3.0 * float(square.sum()) ** 2 / total) if total > 0 else float(error.numel())
