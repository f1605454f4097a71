"""Share of step time spent waiting for data, from the event log of a real run: 2M parameters, the hard case, and 10M.

python -m bench.data_share
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.common import Figure, arguments, show, write
from bench.runs import prepare, train


def main() -> None:
    args = arguments("share of step time waiting for data")
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    data = prepare(scratch)
    rows, figures = [], []
    for size in ("10m", "2m"):
        steps = train(data, scratch, size, 8 if args.quick else 25, threads=args.threads)
        shares = [event["data_wait_s"] / event["step_s"] for event in steps.events]
        waited, total = (sum(event[key] for event in steps.events) for key in ("data_wait_s", "step_s"))
        rows.append([size, steps.tokens_per_s, total / len(shares) * 1e3, waited / len(shares) * 1e3, waited / total])
        name = "train.data_share" if size == "10m" else f"train.data_share.{size}"
        figures.append(Figure(name, waited / total, shares, f"{size}, 8 x 512 tokens a step, float32, {args.threads} threads"))
    show("waiting for data", ["model", "tokens/s", "step ms", "waiting ms", "share"], rows)
    print("wrote", write("data_share", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
