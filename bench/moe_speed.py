"""Training tokens/s against transformers on the same weights: Qwen3-MoE, and beside it MLA (DeepSeek-V3) and LFM2's hybrid.

    python -m bench.moe_speed --dtype fp32

Figures: train.moe.speed (float32), train.moe.speed.bf16, train.mla.speed[.bf16], train.hybrid.speed[.bf16].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench import families
from bench.common import Figure, Worker, WorkerError, arguments, interleave, run_steps, show, start, write

PEERS = {"moe": "Qwen3-MoE", "mla": "DeepSeek-V3 attention, dense feed-forward", "hybrid": "LFM2"}


def contenders(name: str, model: Path, precision: str, *, quick: bool) -> list[tuple[str, list[str]]]:
    """Return (label, options) of ours and of every form of the peer."""
    common = ["--model", str(model), "--precision", precision]
    compiled = [False] if quick else [False, True]
    experts = ["eager", "grouped_mm"] if name == "moe" else [None]
    found = []
    for use in compiled:
        flag, mark = (["--compile"], " compiled") if use else ([], "")
        found.append((f"surefoot{mark}", [*common, "--side", "surefoot", *flag]))
        for form in experts:
            choice = ["--experts", form] if form else []
            found.append((f"transformers{' ' + form if form else ''}{mark}", [*common, "--side", "transformers", *choice, *flag]))
    return found


def compare(name: str, precision: str, threads: int, scratch: Path, *, quick: bool) -> tuple[Worker, Worker]:
    """Return (ours, best peer) after interleaved rounds."""
    model = families.make(name, scratch)
    alone: dict[str, tuple[Worker, list[str]]] = {}
    for label, options in contenders(name, model, precision, quick=quick):
        try:
            worker = start(label, "bench.peers.family", options, python=sys.executable, threads=threads, scratch=scratch)
            try:
                run_steps(worker, 2, record=False)
                run_steps(worker, 1 if quick else 3)
            finally:
                worker.close()
        except WorkerError as error:
            print(f"{label}: left out, {str(error).splitlines()[-1]}", flush=True)
            continue
        print(f"{name}, {label}: {worker.rate:,.0f} tokens/s, loss {worker.losses[-1]:.4f}", flush=True)
        alone[label] = (worker, options)
    finalists = [
        max((w for w, _ in alone.values() if w.label.startswith(side)), key=lambda w: w.rate) for side in ("surefoot", "transformers")
    ]
    workers = [
        start(w.label, "bench.peers.family", alone[w.label][1], python=sys.executable, threads=threads, scratch=scratch) for w in finalists
    ]
    for worker in workers:
        run_steps(worker, 2, record=False)
    interleave(workers, 2 if quick else 6, lambda worker: run_steps(worker, 1 if quick else 3) and None)
    for worker in workers:
        worker.close()
    return workers[0], workers[1]


def main() -> None:
    args = arguments(
        "training speed of other architectures against transformers",
        dtype={"choices": ["fp32", "bf16"], "default": "fp32"},
        only={"choices": sorted(PEERS), "default": None, "help": "one of the models"},
    )
    precision = "float32" if args.dtype == "fp32" else "autocast"
    suffix = "" if args.dtype == "fp32" else ".bf16"
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    figures, rows = [], []
    for name, peer in PEERS.items():
        if args.only not in (None, name):
            continue
        ours, theirs = compare(name, precision, args.threads, scratch, quick=args.quick)
        ratio = ours.rate / theirs.rate
        gap = max(abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=False))
        note = f"{peer}, {ours.facts['parameters']:,} parameters, {precision}: {ours.label} {ours.rate:,.0f} tokens/s over {theirs.label} "
        note += f"({theirs.facts['version']}) {theirs.rate:,.0f}; losses agree to {gap:.1e} relative"
        figures.append(Figure(f"train.{name}.speed{suffix}", ratio, [rate / theirs.rate for rate in ours.rates], note))
        rows.append([name, ours.label, ours.rate, theirs.label, theirs.rate, ratio, f"{gap:.1e}", ours.facts["rss"], theirs.facts["rss"]])
    header = ["model", "ours", "tokens/s", "peer", "tokens/s", "ratio", "loss gap", "MB", "peer MB"]
    show(f"{families.BATCH} x {families.SEQUENCE} tokens a step, {precision}", header, rows)
    print("wrote", write(f"moe_speed.{args.dtype}" + (f".{args.only}" if args.only else ""), figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
