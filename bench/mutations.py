"""What `surefoot verify` finds: planted bugs, and honest changes it must leave alone.

    python -m bench.mutations

Figures: verify.recall.known, verify.recall.own, verify.first_tensor, verify.false_wrong, verify.seconds.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass

from bench.common import Figure, arguments, show, write
from surefoot.core.errors import SurefootError
from surefoot.train.verify import verify
from surefoot.trust import Verdict
from tests.trust.changes import CHANGES
from tests.trust.mutant import judge
from tests.trust.mutations import KNOWN, Mutation
from tests.trust.own_mutations import OWN


@dataclass(frozen=True)
class Outcome:
    """What was said of one bug; `found`: the verdict it should have, `placed`: the first tensor and phase it should name."""

    name: str
    verdict: str
    found: bool
    placed: bool
    first: str
    seconds: float


def try_bug(mutation: Mutation) -> Outcome:
    start = time.perf_counter()
    try:
        evidence = judge(mutation)
    except SurefootError as error:  # it did not even run: a user sees that too, but it is no verdict
        return Outcome(mutation.name, "did not run", False, False, str(error)[:60], time.perf_counter() - start)
    first = evidence.first
    found = evidence.verdict == (Verdict.LOSSY if mutation.lossy else Verdict.WRONG)
    placed = found and first is not None and bool(re.search(mutation.tensor, first.tensor)) and first.phase in mutation.phase.split("|")
    return Outcome(
        mutation.name,
        evidence.verdict,
        found,
        placed,
        "" if first is None else f"{first.phase} {first.tensor}",
        time.perf_counter() - start,
    )


def main() -> None:
    args = arguments("what verify finds")
    known, own, changes = KNOWN, OWN, list(CHANGES.items())
    if args.quick:
        known, own, changes = known[:2], own[:2], changes[:2]
    tried = {"known": [try_bug(one) for one in known], "own": [try_bug(one) for one in own]}
    for kind, outcomes in tried.items():
        rows = [
            (one.name, one.verdict, "yes" if one.found else "MISSED", "yes" if one.placed else "no", one.first, one.seconds)
            for one in outcomes
        ]
        show(f"planted bugs, {kind}", ["bug", "verdict", "found", "named", "first", "s"], rows)
    verdicts, seconds = {}, [one.seconds for outcomes in tried.values() for one in outcomes]
    for name, config in changes:
        start = time.perf_counter()
        verdicts[name] = verify(config).verdict
        seconds.append(time.perf_counter() - start)
    show("honest changes", ["change", "verdict"], list(verdicts.items()))
    every = [one for outcomes in tried.values() for one in outcomes]
    found = [one for one in every if one.found]
    blamed = [name for name, verdict in verdicts.items() if verdict in (Verdict.WRONG, Verdict.LOSSY)]
    missed = {kind: [one.name for one in outcomes if not one.found] for kind, outcomes in tried.items()}
    figures = [
        Figure(
            f"verify.recall.{kind}",
            sum(one.found for one in outcomes) / len(outcomes),
            [],
            f"{len(outcomes)} bugs; missed: {missed[kind] or 'none'}",
        )
        for kind, outcomes in tried.items()
    ]
    figures += [
        Figure("verify.first_tensor", sum(one.placed for one in found) / max(1, len(found)), [], f"of {len(found)} bugs found"),
        Figure("verify.false_wrong", len(blamed), [], f"of {len(verdicts)} honest changes, called wrong or lossy: {blamed or 'none'}"),
        Figure("verify.seconds", statistics.median(seconds), seconds, "median of all, start of processes included"),
    ]
    print("wrote", write("mutations", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
