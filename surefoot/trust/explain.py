"""One sentence on what the pattern of the first divergence usually means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.trust.evidence import Row, Verdict
from surefoot.trust.trace import PHASES, Entry

SUBJECT = {
    "forward": "the output of {}",
    "backward": "the gradient of the output of {}",
    "reduction": "the gradient of {}",
    "clipping": "the clipped {}",
    "update": "the updated {}",
    "facts": "the fact {}",
}
HINTS = {
    "forward": "something in this module's arithmetic differs, with inputs that agree: a mask, a scale, or an order of dimensions",
    "backward": "every activation agrees, so the loss or a backward pass between here and the loss differs",
    "reduction": "every activation and every output's gradient agrees, so the sum over ranks or micro-batches differs",
    "clipping": "every gradient agrees, so the norm or the clipping factor differs",
    "update": "every gradient agrees, so the optimizer differs: step count, hyper-parameters or moments, or stale or replaced parameters",
}


def explain(
    row: Row,
    reference: Entry | None,
    candidate: Entry | None,
    bad: Tensor | None,
    rows: Sequence[Row],
    facts: Sequence[Row],
    degrees: Mapping[str, int],
) -> str:
    """Return one sentence on the first divergence `row`.

    reference, candidate: its entries, None where one lacks it. bad: which elements differ by more than rounding, booleans of the tensor's
    shape. rows: of all tensors, in data-flow order. facts: those that differ. degrees: of parallelism, by axis.
    """
    if row.phase == "facts":
        return f"the runs were not asked for the same thing, although every recorded tensor agrees: {_facts(facts)}"
    subject = SUBJECT[row.phase].format(row.name)
    told = f"; and these facts differ: {_facts(facts)}" if facts else ""
    if row.verdict is Verdict.LOSSY:
        return f"{subject} is right in float64, but {row.note}: {_loss_of_precision(row, degrees)}"
    if reference is None or candidate is None or reference.tensor.shape != candidate.tensor.shape:
        return f"{subject} cannot be compared: {row.note}{told}"
    if not candidate.tensor.is_floating_point():
        return f"{subject}: {row.note}{_where(bad)}: other data, or a choice made from something else{told}"
    if math.isnan(row.error):
        return f"{subject}: {row.note}{_where(bad)}: an overflow, a division by zero, or memory read before it was written{told}"
    hint = HINTS[row.phase] if _earlier(row, rows) else "nothing before it was recorded, so the cause may lie before it"
    x, r = candidate.tensor.detach().double(), reference.tensor.detach().double()
    pattern = _ratio(x, r, degrees) or _part(candidate, x, r, bad, degrees) or _moved(x, r) or _size(row, bad)
    if row.phase in ("reduction", "update"):
        same = [other for other in rows if other.phase == row.phase]
        hint += f" ({sum(other.verdict is Verdict.WRONG for other in same)} of {len(same)} such tensors are wrong)"
    return f"{subject}: {pattern}; {hint}{told}"


def culprits(entry: Entry, bad: Tensor) -> tuple[int, ...]:
    """Return the ranks whose rectangles hold wrong elements, if other ranks' are right; otherwise none."""
    wrong = {owner.rank for owner in entry.owners if bool(bad[_box(owner.slices)].any())}
    return tuple(sorted(wrong)) if wrong < {owner.rank for owner in entry.owners} else ()


def _box(slices: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in slices)


def _earlier(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether what comes before in data flow was recorded, so that its agreement means something."""
    if row.phase in ("forward", "facts"):
        return True
    return any(PHASES.index(other.phase) < PHASES.index(row.phase) for other in rows if other.phase != "facts")


def _facts(facts: Sequence[Row]) -> str:
    return ", ".join(f"{fact.name} ({fact.note})" for fact in facts[:4]) + (f" and {len(facts) - 4} more" if len(facts) > 4 else "")


def _ratio(x: Tensor, r: Tensor, degrees: Mapping[str, int], *, all_of: str = "every element") -> str:
    """Say that `x` is a constant multiple of `r`, if it is."""
    square = float((r * r).sum())
    if not square or not math.isfinite(square):
        return ""
    c = float((x * r).sum()) / square
    if not x.any():
        return f"{all_of} is zero: it was never computed, never added or never sent" if x.numel() > 1 else "it is zero"
    rest = float((x - c * r).square().sum().sqrt()) / math.sqrt(square)
    if rest > 1e-6 * abs(c - 1.0) or x.numel() < 2:
        return ""
    axes = [f"the {axis} degree" for axis, degree in degrees.items() if degree > 1 and any(_near(c, k) for k in (degree, 1 / degree))]
    known = f", which is {' or '.join(axes)}" if axes else ""
    over = f", which is 1/{' or 1/'.join(axes)}" if axes else ""
    if _near(c, -1.0):
        return f"{all_of} has the opposite sign"
    if c > 1.5 and _near(c, round(c)):
        return f"{all_of} is {round(c)} x the reference{known}: a sum taken twice or too often, or a divisor that left a factor out"
    if 0 < c < 0.75 and _near(1 / c, round(1 / c)):
        return f"{all_of} is 1/{round(1 / c)} of the reference{over}: a partial sum forgotten, or divided once too often"
    return f"{all_of} is {c:.9g} x the reference: a scale factor that the reference does not have"


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-7 * abs(b)


def _part(candidate: Entry, x: Tensor, r: Tensor, bad: Tensor | None, degrees: Mapping[str, int]) -> str:
    """Say that only a part is wrong: some ranks' rectangles, one element, one index of a dimension, or all from some index on."""
    if bad is None or not bad.any():
        return ""
    ranks = culprits(candidate, bad)
    if ranks:
        boxes = [_box(owner.slices) for owner in candidate.owners if owner.rank in ranks]
        a, b = (torch.cat([whole[box].flatten() for box in boxes]) for whole in (x, r))
        how = _ratio(a, b, degrees, all_of="every element there")
        which = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        return f"only what {which} responsible for is wrong, the other ranks agree{': ' + how if how else ''}"
    if int(bad.sum()) == 1:
        return f"one element of {bad.numel()} is wrong, {torch.nonzero(bad)[0].tolist()}: a flipped bit, or an index off by one at an edge"
    for dim, size in enumerate(bad.shape):
        at = torch.nonzero(bad.movedim(dim, 0).reshape(bad.shape[dim], -1).any(1))[:, 0].tolist()
        if len(at) == 1 and size > 1:
            how = _ratio(x.select(dim, at[0]), r.select(dim, at[0]), degrees, all_of="every element there")
            return f"only index {at[0]} of dimension {dim} (of {size}) is wrong{': ' + how if how else ''}"
        if len(at) < size:
            run = at == list(range(at[0], at[-1] + 1))
            where = f"indices {at[0]} to {at[-1]}" if run else f"{len(at)} of {size} indices, the first {at[0]},"
            return f"only {where} of dimension {dim} (of {size}) are wrong"
    return ""


def _moved(x: Tensor, r: Tensor) -> str:
    """Say that the values are right and in the wrong place."""
    if x.numel() < 4:
        return ""

    def close(a: Tensor, b: Tensor) -> bool:
        return bool(a.numel()) and bool(b.any()) and torch.allclose(a, b, rtol=1e-9, atol=1e-12 * float(b.abs().max()))

    for dim, size in enumerate(x.shape):
        if size > 2 and close(x.narrow(dim, 1, size - 1), r.narrow(dim, 0, size - 1)):
            return f"the values are shifted by one along dimension {dim}"
        if size > 2 and close(x.narrow(dim, 0, size - 1), r.narrow(dim, 1, size - 1)):
            return f"the values are shifted by one along dimension {dim}"
    if close(x.flatten().sort().values, r.flatten().sort().values):
        return "the same values in another order: dimensions, heads, shards or tokens are laid out differently"
    return ""


def _where(bad: Tensor | None) -> str:
    return f", the first at {torch.nonzero(bad)[0].tolist()}" if bad is not None and bad.dim() and bad.any() else ""


def _size(row: Row, bad: Tensor | None) -> str:
    share = f"{int(bad.sum())} of {bad.numel()} elements are wrong" if bad is not None and bad.any() else "it is wrong as a whole"
    for name, unit in (("float32", 2.0**-24), ("bfloat16", 2.0**-8)):
        if unit / 16 < row.error < unit * 16:
            return f"{share} without structure, by about the rounding of {name}: a product or sum may be cast to {name} even in float64"
    return f"{share} without structure, by {row.error:.2g} of its scale"


def _loss_of_precision(row: Row, degrees: Mapping[str, int]) -> str:
    """Hold the ratio against that of p partial sums in low precision, sqrt(1 + (p + 1) / 2 - 1 / p) roundings
    one after the other where the reference has one."""
    usual = "sums, or a residual, kept in too low a precision"
    if not row.note.endswith("working precision") or row.note.startswith("one element"):
        return f"{usual}, or one value that overflowed or was rounded away"
    ratio = float(row.note.split(" x ")[0].split()[-1])
    fits = [
        f"{axis} = {degree}"
        for axis, degree in degrees.items()
        if degree > 1 and 0.8 < ratio / math.sqrt(1 + (degree + 1) / 2 - 1 / degree) < 1.25
    ]
    if fits:
        return f"{usual}; it is what partial sums over {' or '.join(fits)} in low precision would give, and then grows with that degree"
    return f"{usual}; run it at another degree: an error that grows with it comes from partial sums in low precision"
