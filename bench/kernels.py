"""What Surefoot's CPU kernel choices are worth, each against what PyTorch does by default, interleaved in one process.

    python -m bench.kernels [--threads 2] [--quick]

Products: MKL (torch's float32 choice) against oneDNN. Attention: torch's CPU flash kernel against our blocks, forward and
backward, with the error of each from float64. Allocator: a training step with and without `keep_freed_memory`, in two processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from bench.common import Figure, arguments, show, write
from surefoot.models.blocked_attention import _backward, _forward
from surefoot.models.products import PREFERS_ONEDNN, _suits_onednn

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each in rounds A, B, B, A."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (first, second)[which]()
            if turn:
                times[which].append(time.perf_counter() - start)
    return times


def products(rounds: int) -> list[Figure]:
    figures, rows = [], []
    for name, m, k, n in (
        ("qkv 10m", 2048, 320, 960),
        ("gate_up 10m", 2048, 320, 1728),
        ("qkv 100m", 1024, 768, 2304),
        ("down 100m", 1024, 2048, 768),
    ):
        x, w = torch.randn(m, k), torch.randn(n, k)
        mkl, onednn = interleaved(lambda: x @ w.t(), lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), rounds)  # noqa: B023
        work = 2e-9 * m * k * n
        rates = [work / statistics.median(times) for times in (mkl, onednn)]
        rows.append((name, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / rates[0]:.2f}"))
        figures.append(Figure(f"kernels.product.{name.replace(' ', '.')}", rates[1] / rates[0], note="oneDNN over MKL, float32, forward"))
    show("float32 products, GFLOP/s", ("shape", "MKL", "oneDNN", "ratio"), rows)
    print(f"chosen here: {'oneDNN' if PREFERS_ONEDNN else 'MKL'} (suits 64 rows: {_suits_onednn(torch.ones(64, 8), torch.ones(8, 8))})")
    return figures


def attention(rounds: int) -> list[Figure]:
    figures, rows = [], []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad = (torch.randn(4, 512, 5, 64).to(dtype) for _ in range(4))
        views = [x.transpose(1, 2) for x in (q, k, v)]
        out, _ = FLASH(*views, 0.0, True, scale=0.125)
        ours = _forward(q, k, v, None, 0.125)
        wide = [x.double().transpose(1, 2) for x in (q, k, v)]
        truth, _ = FLASH(*wide, 0.0, True, scale=0.125)

        def flash() -> None:
            o, norm = FLASH(*views, 0.0, True, scale=0.125)  # noqa: B023
            FLASH_BACKWARD(grad.transpose(1, 2), *views, o, norm, 0.0, True, scale=0.125)  # noqa: B023

        def blocks() -> None:
            _backward(grad, q, k, v, _forward(q, k, v, None, 0.125), None, 0.125)  # noqa: B023

        theirs, own = interleaved(flash, blocks, rounds)
        ratio = statistics.median(theirs) / statistics.median(own)
        errors = [float((x.double() - truth).norm() / truth.norm()) for x in (out, ours.transpose(1, 2))]
        name = str(dtype).removeprefix("torch.")
        rows.append(
            (
                name,
                f"{statistics.median(theirs) * 1e3:.1f}",
                f"{statistics.median(own) * 1e3:.1f}",
                f"{ratio:.2f}",
                f"{errors[0]:.1e}",
                f"{errors[1]:.1e}",
            )
        )
        figures.append(
            Figure(f"kernels.attention.{name}", ratio, note="flash for CPU over ours, time of forward and backward, 4 x 512 x 5 x 64")
        )
    show("causal attention, forward and backward, ms", ("dtype", "flash", "ours", "speed-up", "flash error", "our error"), rows)
    return figures


STEP = """
import sys, time, torch
from surefoot.core.allocator import keep_freed_memory
torch.set_num_threads(int(sys.argv[1]))
if sys.argv[2] == "keep": keep_freed_memory()
from bench.peers.ours import spec_of
from bench import llama
from surefoot.models import Transformer, initialise
shape = llama.SHAPES["10m"]
model = Transformer(spec_of(shape), dtype=torch.bfloat16); initialise(model, 0)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
times = []
for index in range(int(sys.argv[3])):
    start = time.perf_counter()
    tokens, labels = llama.batch(shape, index)
    model(tokens, labels=labels, normaliser=labels.numel()).total.backward()
    optimizer.step(); optimizer.zero_grad()
    times.append(time.perf_counter() - start)
print(sorted(times)[len(times) // 2])
"""


def allocator(threads: int, steps: int) -> list[Figure]:
    times: dict[str, list[float]] = {"default": [], "keep": []}
    for which in ("default", "keep", "keep", "default", "default", "keep"):
        done = subprocess.run([sys.executable, "-c", STEP, str(threads), which, str(steps)], capture_output=True, text=True, check=True)
        times[which].append(float(done.stdout.split()[-1]))
    medians = {which: statistics.median(found) for which, found in times.items()}
    ratio = medians["default"] / medians["keep"]
    show("step of the 10m model, bfloat16, s", ("allocator", "seconds"), [(which, f"{seconds:.3f}") for which, seconds in medians.items()])
    return [Figure("kernels.allocator", ratio, note="step time, glibc's default over keep_freed_memory")]


def main() -> None:
    args = arguments("What Surefoot's CPU kernel choices are worth.")
    torch.set_num_threads(args.threads)
    rounds = 5 if args.quick else 15
    figures = products(rounds) + attention(rounds) + allocator(args.threads, 4 if args.quick else 12)
    write("kernels", figures, quick=args.quick)


if __name__ == "__main__":
    main()
