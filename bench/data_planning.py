"""The planner of mixtures: exactness of shares, time of a plan, evenness of ranks, and what resuming costs.

    python -m bench.data_planning

306 sources with Zipf weights; documents have the lengths of the files of this machine's Python packages (four bytes a token). Figures:
data.mix_error, data.plan_ms.4096, data.imbalance.r64 (also r8 and r512), data.resume_s.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
from itertools import islice
from pathlib import Path

import numpy as np

from bench.common import Figure, arguments, show, write
from surefoot.data.mixture import Mixture, MixtureState, normalised
from surefoot.data.planner import Planner, PlanState, arranged, attention_pairs
from surefoot.data.shuffle import shuffled

SOURCES, LENGTH = 306, 4096


def real_lengths() -> list[np.ndarray]:
    """Return the lengths in tokens of the documents of each source: files dealt to 306 sources by folder, so that sizes are uneven."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    folders: dict[str, list[int]] = {}
    for root in sorted(roots):
        for path in sorted(Path(root).rglob("*.py")):
            folders.setdefault(str(path.parent), []).append(max(8, path.stat().st_size // 4))
    groups: list[list[int]] = [[] for _ in range(SOURCES)]
    for place, folder in enumerate(sorted(folders, key=lambda name: -len(folders[name]))):
        groups[place % SOURCES] += folders[folder]
    return [np.array(group, dtype=np.int64) for group in groups]


class Lengths:
    """(source, n) -> tokens, each source shuffled anew every epoch, worked out in blocks as `data/mixed.py` does."""

    def __init__(self, sizes: list[np.ndarray]) -> None:
        self.sizes, self.blocks = sizes, dict[tuple[int, int], list[int]]()

    def __call__(self, source: int, n: int) -> int:
        block, inside = divmod(n, 256)
        known = self.blocks.get((source, block))
        if known is None:
            sizes = self.sizes[source]
            known = self.blocks[source, block] = sizes[shuffled(block * 256, 256, len(sizes), source)].tolist()
        return known[inside]


def mix_error(weights: tuple[float, ...], draws: int) -> float:
    """Return the largest deviation from the asked shares at any prefix, in documents."""
    mixture, counts, worst = Mixture(weights, lambda source, n: 1, by="documents"), np.zeros(SOURCES), 0.0
    shares = np.array(weights)
    for total, draw in enumerate(islice(mixture.draws(), draws), start=1):
        counts[draw.source] += 1
        worst = max(worst, float(np.abs(counts - shares * total).max()))
    return worst


def main() -> None:
    args = arguments("planning of mixtures")
    weights = normalised([1 / (index + 1) for index in range(SOURCES)])
    lengths = Lengths(real_lengths())
    documents = sum(map(len, lengths.sizes))
    error = mix_error(weights, 5_000 if args.quick else 60_000)

    figures = [Figure("data.mix_error", error, [], f"{SOURCES} sources, Zipf weights, at every prefix of 60,000 documents")]
    table = []
    for ranks in (8, 64, 512):
        per = 8
        planner, state = Planner([(0, weights)], lengths, ranks * per, LENGTH), PlanState.fresh(SOURCES)
        before, after, seconds, padding, samples = [], [], [], [], []
        for step in range(4 if args.quick else 12 if ranks < 512 else 6):
            start = time.perf_counter()
            plan, state = planner.plan(state)
            costs = np.array([attention_pairs(row) for row in plan.rows], dtype=np.float64)
            order = arranged(costs, ranks, 1)
            if step:  # the first fills the pool
                seconds.append(time.perf_counter() - start)
                samples.append(sum(len(row) for row in plan.rows))
                loads = [costs.reshape(ranks, -1).sum(1), costs[order].reshape(ranks, -1).sum(1)]
                before.append(float(loads[0].max() / loads[0].mean()))
                after.append(float(loads[1].max() / loads[1].mean()))
                padding.append(plan.padding(LENGTH))
        table.append([ranks, statistics.mean(before), statistics.mean(after), f"{100 * statistics.mean(padding):.2f} %"])
        each = statistics.median(1e3 * a / b * 4096 for a, b in zip(seconds, samples, strict=True))
        note = f"{ranks * per} rows of {LENGTH} tokens, before {statistics.mean(before):.3f}; real lengths of {documents:,} documents"
        figures.append(Figure(f"data.imbalance.r{ranks}", statistics.mean(after), after, note))
        if ranks == 512:
            note = f"drawing from the mixture, packing into rows and arranging, per 4,096 documents ({samples[-1]:,} in this batch)"
            figures.append(Figure("data.plan_ms.4096", each, [1e3 * a / b * 4096 for a, b in zip(seconds, samples, strict=True)], note))
    show("most over mean attention of a rank", ["ranks", "as planned", "arranged", "padding"], table)

    # A state as after a billion tokens: what a checkpoint keeps, read, and the first step planned from it.
    given = [int(weight * 1e9) for weight in weights]
    drawn = [int(size / max(1.0, float(lengths.sizes[source].mean()))) for source, size in enumerate(given)]
    state = PlanState(10**6, MixtureState(sum(given), tuple(drawn), tuple(given), tuple(weight * sum(given) for weight in weights)))
    _, state = Planner([(0, weights)], lengths, 64, LENGTH).plan(state)
    text = json.dumps(state.to_json())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fresh = Lengths(lengths.sizes)
        Planner([(0, weights)], fresh, 64, LENGTH).plan(PlanState.from_json(json.loads(text)))
        times.append(time.perf_counter() - start)
    note = f"state of {len(text):,} bytes at {sum(given):,} tokens of {SOURCES} sources, to the plan of the next step"
    figures.append(Figure("data.resume_s", statistics.median(times), times, note))
    show("figures", ["id", "value"], [[figure.id, figure.value] for figure in figures])
    print("wrote", write("data_planning", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
