"""Every model kind under every layout against one process, in float64, in real processes.

    python -m bench.layouts

Figures: layouts.cells (proven to 1e-12), layouts.max_rel_err.fp64 (of losses, gradient norms, gradients, updated weights, biases).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from bench.common import Figure, arguments, show, write
from surefoot.parallel import Layout, Processes
from tests.parallel.cells import SPECS, outcome
from tests.parallel.test_layouts import LAYOUTS, all_models
from tests.spawning import run_ranks

BOUND = 1e-12


def main() -> None:
    args = arguments("layouts against one process")
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    expected = scratch / "expected.pt"
    torch.save({name: outcome(Processes(), spec, Layout()) for name, spec in SPECS.items()}, expected)
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for name, degrees in LAYOUTS.items():
        size = Layout(**degrees).world_size
        if args.quick and size > 2:
            continue
        for cells in run_ranks(all_models, size, scratch / name, [degrees], expected, timeout_s=900.0):
            for (model, _), found in cells.items():
                worst[model, name] = max(found, worst.get((model, name), (0.0, "")))
        print(f"{name}: {max(error for (_, layout), (error, _) in worst.items() if layout == name):.1e}", flush=True)
    show(
        "largest relative error in float64",
        ["model", "layout", "error", "where"],
        [(m, n, f"{e:.1e}", w) for (m, n), (e, w) in worst.items()],
    )
    proven = sum(error < BOUND for error, _ in worst.values())
    sizes = sorted({Layout(**degrees).world_size for degrees in LAYOUTS.values()})
    cells = f"{len(worst)} cells of {len(SPECS)} models and {len(LAYOUTS)} layouts on {sizes} processes"
    note = f"{cells}; two steps of AdamW, packed documents, ragged labels"
    error, where = max(worst.values())
    figures = [
        Figure("layouts.cells", proven, [], note),
        Figure("layouts.max_rel_err.fp64", error, [], f"{where}, of a tensor's largest element; eps of AdamW 1e-5"),
    ]
    print("wrote", write("layouts", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
