"""Two processes of one thread over one process of two threads: tokens/s of the same run, same global batch, same cores.

    python -m bench.scaling_2proc

The 10M model, 8 x 512 tokens a step, float32, data parallel over gloo. Runs alternate A, B, B, A.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from bench.common import Figure, arguments, show, write
from bench.runs import prepare, train


def main() -> None:
    args = arguments("scaling over local processes", dtype={"choices": ["float32", "bfloat16", "bfloat16_autocast"], "default": "float32"})
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    data = prepare(scratch)
    steps, turns = (6, 1) if args.quick else (12, 2)
    forms = {"1 process x 2 threads": (1, 2), "2 processes x 1 thread": (2, 1)}
    rates: dict[str, list[float]] = {name: [] for name in forms}
    losses: dict[str, float] = {}
    for turn in range(2 * turns):
        for name in list(forms) if turn % 2 == 0 else list(reversed(forms)):
            processes, threads = forms[name]
            done = train(data, scratch, "10m", steps, f'train.precision="{args.dtype}"', processes=processes, threads=threads)
            rates[name] += [done.events[0]["tokens"] / seconds for seconds in done.intervals]
            losses[name] = done.events[-1]["loss"]
    one, two = (statistics.median(rates[name]) for name in forms)
    gap = abs(losses["2 processes x 1 thread"] / losses["1 process x 2 threads"] - 1)
    suffix = "" if args.dtype == "float32" else f".{args.dtype}"
    show("same cores", ["", "tokens/s", "lowest", "highest"], [[name, statistics.median(r), min(r), max(r)] for name, r in rates.items()])
    note = f"10M, {args.dtype}, global batch 8 x 512: {two:,.0f} over {one:,.0f} tokens/s; losses after {steps} steps agree to {gap:.1e}"
    figures = [Figure(f"train.scaling.2proc{suffix}", two / one, [rate / one for rate in rates["2 processes x 1 thread"]], note)]
    show("figures", ["id", "value"], [[figure.id, figure.value] for figure in figures])
    print("wrote", write("scaling_2proc" + suffix, figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
