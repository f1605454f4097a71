"""Training tokens/s, peak memory and share of the matmul peak, against every peer that runs on a CPU.

    python -m bench.train_speed --size 10m --dtype bf16 --litgpt-python PYTHON --titan-python PYTHON

All peers train the same Llama from the same weights on the same tokens with AdamW and clipping; their losses are compared. Every
variant (eager, compiled; for bf16 also autocast and pure bf16) is first tried alone; then the best variant of ours and of the
peers run interleaved, and the figure is the ratio of their medians. Interpreters of peers that need their own environment are
given by flag; a peer without one is left out and the note says so.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.common import Figure, Worker, WorkerError, arguments, interleave, run_steps, show, start, write
from bench.llama import SHAPES, Shape


@dataclass(frozen=True)
class Variant:
    """One way of running one peer."""

    peer: str
    module: str
    python: str
    precision: str
    compiled: bool

    @property
    def label(self) -> str:
        precision = {"float32": "", "autocast": " autocast", "bfloat16": " pure bf16"}[self.precision]
        return f"{self.peer}{precision}{' compiled' if self.compiled else ''}"

    def start(self, size: str, threads: int, scratch: Path) -> Worker:
        options = ["--size", size, "--precision", self.precision, *(["--compile"] if self.compiled else [])]
        return start(self.label, self.module, options, python=self.python, threads=threads, scratch=scratch)


def variants(dtype: str, interpreters: dict[str, str | None], *, compiled: bool) -> list[Variant]:
    """Return every variant of `dtype`; float32 has one precision, bf16 has autocast and pure bf16."""
    precisions = ["float32"] if dtype == "fp32" else ["autocast", "bfloat16"]
    own = sys.executable
    peers = [
        ("surefoot", "bench.peers.ours", own),
        ("nanoGPT-style", "bench.peers.nano", own),
        ("transformers Trainer", "bench.peers.hf_trainer", own),
        ("litgpt", "bench.peers.litgpt_loop", interpreters["litgpt"]),
        ("torchtitan", "bench.peers.titan", interpreters["torchtitan"]),
    ]
    found = []
    for name, module, python in peers:
        for precision in precisions:
            for use_compiler in [False, True] if compiled else [False]:
                if python is not None:
                    found.append(Variant(name, module, python, precision, use_compiler))
    return found


def model_flops(shape: Shape) -> float:
    """Training FLOPs a token, exact causal count."""
    from surefoot.models.flops import count_flops
    from surefoot.models.spec import AttentionSpec, FeedForwardSpec, ModelSpec

    spec = ModelSpec(
        vocab_size=shape.vocab,
        dim=shape.dim,
        layers=shape.layers,
        ffn=FeedForwardSpec(hidden=shape.ffn),
        attention=AttentionSpec(heads=shape.heads, kv_heads=shape.heads, head_dim=shape.head_dim),
    )
    return count_flops(spec, shape.sequence).training


def try_alone(variant: Variant, size: str, threads: int, scratch: Path, steps: int) -> Worker | None:
    """Run `variant` by itself; None, with the reason on the screen, when it does not run here."""
    try:
        worker = variant.start(size, threads, scratch)
        try:
            warm = run_steps(worker, 2, record=False)
            run_steps(worker, steps)
            worker.facts["first_step"] = warm[0]
        finally:
            worker.close()
    except WorkerError as error:
        print(f"{variant.label}: left out, {error}", flush=True)
        return None
    print(f"{variant.label}: {worker.rate:,.0f} tokens/s, {worker.facts['rss']:,.0f} MB, first step {warm[0]:.1f} s", flush=True)
    return worker


def disagreement(workers: list[Worker]) -> float:
    """Largest relative difference of the losses of the first steps, between any worker and the first."""
    steps = min(len(worker.losses) for worker in workers)
    reference = workers[0].losses[:steps]
    return max(abs(a - b) / b for worker in workers for a, b in zip(worker.losses[:steps], reference, strict=True))


def main() -> None:
    args = arguments(
        "training speed against peers",
        size={"choices": sorted(SHAPES), "default": "10m"},
        dtype={"choices": ["fp32", "bf16"], "default": "fp32"},
        litgpt_python={"default": None, "help": "interpreter of an environment with litgpt"},
        titan_python={"default": None, "help": "interpreter of an environment with torchtitan"},
        no_compile={"action": "store_true", "help": "leave the compiled variants out"},
        rounds={"type": int, "default": 6, "help": "interleaved rounds"},
    )
    import torch

    from surefoot.cluster import matmul_peak

    shape = SHAPES[args.size]
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    alone = {}
    interpreters = {"litgpt": args.litgpt_python, "torchtitan": args.titan_python}
    for variant in variants(args.dtype, interpreters, compiled=not (args.no_compile or args.quick)):
        worker = try_alone(variant, args.size, args.threads, scratch, 1 if args.quick else 3)
        if worker is not None:
            alone[variant] = worker
    ours = max((v for v in alone if v.peer == "surefoot"), key=lambda v: alone[v].rate)
    best: dict[str, Variant] = {}
    for variant, worker in alone.items():
        if variant.peer != "surefoot" and (variant.peer not in best or worker.rate > alone[best[variant.peer]].rate):
            best[variant.peer] = variant
    # Memory holds few large models at once: then only the two best peers come into the final rounds.
    finalists = [ours, *sorted(best.values(), key=lambda v: -alone[v].rate)[: 1 if args.quick else 2 if args.size == "100m" else 4]]
    workers = [variant.start(args.size, args.threads, scratch) for variant in finalists]
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    peaks: list[float] = []
    for worker in workers:
        run_steps(worker, 2, record=False)
    steps = max(1, round((1.0 if args.quick else 4.0) * alone[ours].rate / shape.tokens_per_step))
    interleave(
        workers,
        2 if args.quick else args.rounds,
        lambda worker: run_steps(worker, steps) and None,
        lambda: peaks.append(matmul_peak(dtype, args.threads, fresh=True).rate),
    )
    for worker in workers:
        worker.close()
    report(args.size, args.dtype, shape, alone, workers, statistics.median(peaks), quick=args.quick)


def report(size: str, dtype: str, shape: Shape, alone: dict[Variant, Worker], final: list[Worker], peak: float, *, quick: bool) -> None:
    """Print the tables and write the figures."""
    flops = model_flops(shape)
    show(
        f"alone: {size} ({alone[next(iter(alone))].facts['parameters']:,} parameters), {dtype}, {shape.batch} x {shape.sequence} tokens",
        ["variant", "tokens/s", "peak MB", "first step s", "last loss"],
        [[v.label, w.rate, w.facts["rss"], w.facts["first_step"], f"{w.losses[-1]:.4f}"] for v, w in alone.items()],
    )
    show(
        f"interleaved, {len(final[0].rates)} steps each; matmul peak {peak / 1e9:,.0f} GFLOP/s in the same run",
        ["variant", "tokens/s", "lowest", "highest", "of peak", "ratio"],
        [[w.label, w.rate, min(w.rates), max(w.rates), w.rate * flops / peak, final[0].rate / w.rate] for w in final],
    )
    ours, peers = final[0], final[1:]
    best = max(peers, key=lambda worker: worker.rate)
    ratio = ours.rate / best.rate
    pairs = [a / best.rate for a in ours.rates]
    missing = sorted({"litgpt", "torchtitan"} - {v.peer for v in alone})
    left_out = f"; not run: {', '.join(missing)}" if missing else ""
    note = f"{ours.label} {ours.rate:,.0f} tokens/s over {best.label} ({best.facts['version']}) {best.rate:,.0f}, interleaved{left_out}"
    note += f"; losses agree to {disagreement(list(alone.values())):.1e} relative"
    figures = [Figure(f"train.speed.{size}.{dtype}", ratio, pairs, note)]
    share = ours.rate * flops / peak
    figures.append(
        Figure(
            f"train.mfu.{size}.{dtype}",
            share,
            [rate * flops / peak for rate in ours.rates],
            f"exact causal FLOPs, peak {peak / 1e9:,.0f} GFLOP/s measured between the rounds; {best.label}: {best.rate * flops / peak:.3f}",
        )
    )
    leanest = min((w for v, w in alone.items() if v.peer != "surefoot"), key=lambda worker: worker.facts["rss"])
    own = min((w for v, w in alone.items() if v.peer == "surefoot"), key=lambda worker: worker.facts["rss"])
    used = alone[next(v for v in alone if v.label == ours.label)]
    memory = f"peak resident MB of the process, libraries included: {used.label} {used.facts['rss']:,.0f} "
    memory += f"(our leanest variant {own.label} {own.facts['rss']:,.0f}) over {leanest.label} {leanest.facts['rss']:,.0f}; {dtype}"
    suffix = "" if dtype == "fp32" else ".bf16"
    figures.append(Figure(f"train.memory.{size}{suffix}", used.facts["rss"] / leanest.facts["rss"], (), memory))
    path = write(
        f"train_speed.{size}.{dtype}", figures, quick=quick, extra={"alone": {w.label: w.facts | {"rate": w.rate} for w in alone.values()}}
    )
    show("figures", ["id", "value"], [[figure.id, float(figure.value)] for figure in figures])
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
