"""Gradient sums held against what was added: each process's gradient of each micro-batch, as autograd left it.

A gradient is a sum over micro-batches and ranks and nothing else, kept in float32 or wider. In whatever order n numbers are added with
unit roundoff u, the result is within n u times the sum of their magnitudes (Higham 2002, "Accuracy and Stability of Numerical
Algorithms", section 4.2): a bound without statistics, which a sum in bfloat16 breaks by orders of magnitude, though its error may be
below what the gradients themselves inherited from bfloat16 products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.parallel import Placement, local
from surefoot.train.setup import Session
from surefoot.trust import Evidence, Finding, Row, Trace, Verdict
from surefoot.trust.trace import PHASES

Added = tuple[Tensor, Tensor, int]
"""Of one process: the sum of what autograd left, in float64; the sum of its magnitudes; how many there were."""


class Addends:
    """Keeps, by parameter, what this process adds to its gradient in a step.

    Not where FSDP holds the parameters, or weight gradients are put off: those do not pass through autograd's hands.
    """

    def __init__(self, session: Session) -> None:
        self.found: dict[str, Added] = {}
        put_off = session.pipeline is not None and session.pipeline.put_off is not None
        if session.feed.layout.shard == 1 and not put_off:
            for name, parameter in session.parallel.parameters.items():
                parameter.register_hook(lambda grad, name=name: self._add(name, grad))

    def _add(self, name: str, grad: Tensor) -> None:
        exact = local(grad.detach()).double().cpu()
        total, size, count = self.found.get(name, (torch.zeros_like(exact), torch.zeros_like(exact), 0))
        self.found[name] = (total + exact, size + exact.abs(), count + 1)


def check_sums(trace: Trace, addends: Sequence[dict[str, tuple[Added, Placement]]], verdict: Verdict) -> Iterator[Row]:
    """Yield a row of `verdict` for each gradient of `trace` that is not the sum of the `addends` of all ranks."""
    names = dict.fromkeys(name for known in addends for name in known)
    for name in names:
        entry = trace.find("reduction", name)
        if entry is None:
            continue
        total, size = torch.zeros(entry.tensor.shape, dtype=torch.float64), torch.zeros(entry.tensor.shape, dtype=torch.float64)
        count = 0
        for (part, magnitude, times), placement in (known[name] for known in addends if name in known):
            count += times
            for here, offsets, sizes in placement.boxes():
                there = tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))
                total[there] += part[here]
                size[there] += magnitude[here]
        u = torch.finfo(torch.float64 if entry.tensor.dtype == torch.float64 else torch.float32).eps / 2
        off = (entry.tensor.double() - total).abs()
        allowed = (count + 1) * u
        worst = float((off / size.clamp(min=torch.finfo(torch.float64).tiny)).max()) if off.numel() else 0.0
        if worst > allowed and bool((off > allowed * size).any()):
            note = f"off by {worst:.2g} of the sum of magnitudes, where {count} numbers added in float32 allow {allowed:.2g}"
            yield Row(name, "reduction", verdict, worst, allowed, note)


def with_sums(evidence: Evidence, rows: Sequence[Row]) -> Evidence:
    """Return `evidence` with sums that are off; the first of them is the finding unless something before the sums went wrong."""
    if not rows:
        return evidence
    first = evidence.first
    before = first is not None and (
        first.verdict is Verdict.WRONG or (first.phase in PHASES and PHASES.index(first.phase) < PHASES.index("reduction"))
    )
    if not before:
        row = rows[0]
        layer = int(row.name.split(".")[1]) if row.name.startswith("layers.") else None
        sentence = f"the gradient of {row.name} is {row.note}: it was summed over micro-batches or ranks in too low a precision"
        first = Finding(row.name, "reduction", layer, (), row.verdict, row.error, row.floor, sentence)
    worst = Verdict.worst([evidence.verdict, *(row.verdict for row in rows)])
    known = {(row.phase, row.name): row for row in rows}
    merged = tuple(known.get((row.phase, row.name), row) if row.verdict is not Verdict.WRONG else row for row in evidence.rows)
    return replace(evidence, verdict=worst, rows=merged, first=first)
