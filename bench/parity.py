"""Parity with `transformers`: every family, awkward config and kind of batch, logits, loss, all gradients, generation.

The peer is the judge itself: `transformers`, eager attention, float64 throughout (tests/models/hf/float64.py). The limit in
float64 is 1e-10 relative; in float32 our distance from the float64 truth is held against `transformers`' own distance from it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.common import Figure, arguments, show, write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "models" / "hf"))

import grid  # type: ignore[import-not-found]
import judge  # type: ignore[import-not-found]

LIMIT = 1e-10


def main() -> None:
    options = arguments("Parity with transformers over families x awkward configs x batches.")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    seeds = (1,) if options.quick else (1, 2, 3)
    found: dict[str, list[tuple[str, dict[str, float], dict[str, float]]]] = {}
    for case in grid.GRID:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                evidence = judge.evaluate(case, Path(folder), seed)
            found.setdefault(case.family, []).append((f"{case.id} seed {seed}", evidence.float64, evidence.ratios))
    equal, compared = _generation()
    figures, rows = _summary(found)
    figures.append(
        Figure("parity.generation.equal", equal / compared, note=f"{equal} of {compared} rows of 64 greedy tokens, left-padded, float64")
    )
    show("parity with transformers " + transformers.__version__, ("family", "cases", "logits", "loss", "gradients", "fp32 / floor"), rows)
    print(f"generation: {equal} of {compared} rows of 64 greedy tokens equal; limit of float64 errors {LIMIT}")
    print(write("parity", figures, quick=options.quick, extra={"cases": _cases(found)}))


def _generation() -> tuple[int, int]:
    equal = compared = 0
    for case in grid.GENERATED:
        with tempfile.TemporaryDirectory() as folder:
            theirs, mine = judge.generations(case, Path(folder))
        equal += sum(first == second for first, second in zip(theirs, mine, strict=True))
        compared += len(theirs)
    return equal, compared


def _summary(found: dict[str, list[Any]]) -> tuple[list[Figure], list[list[str]]]:
    peer = f"against transformers {transformers.__version__}, eager, random weights, tiny widths"
    figures: list[Figure] = []
    rows: list[list[str]] = []
    worst: list[float] = []
    medians: list[float] = []
    for family, cases in found.items():
        errors = [error for _, error, _ in cases]
        each = [max(error.values()) for error in errors]
        ratios = [statistics.median(ratio.values()) for _, _, ratio in cases]
        kinds = [max(of) for of in zip(*(_by_kind(error) for error in errors), strict=True)]
        rows.append([family, str(len(cases)), *(f"{kind:.1e}" for kind in kinds), f"{statistics.median(ratios):.2f}"])
        figures.append(Figure(f"parity.{family}.max_rel_err.fp64", max(each), note=f"{len(cases)} cases {peer}"))
        worst += each
        medians += ratios
    note = f"{len(worst)} cases, {len(found)} families, logits, loss and every parameter's gradient, {peer}"
    figures.insert(0, Figure("parity.max_rel_err.fp64", max(worst), note=note))
    note = "float32: our distance from the float64 truth over transformers' own, median over tensors, then over cases"
    figures.insert(1, Figure("parity.floor_ratio.fp32", statistics.median(medians), note=note))
    return figures, rows


def _by_kind(error: dict[str, float]) -> tuple[float, float, float]:
    return error["logits"], error["loss"], max(value for name, value in error.items() if name.startswith("grad "))


def _cases(found: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Each case's worst tensor in float64 and its worst ratio in float32."""
    table = {}
    for cases in found.values():
        for name, error, ratio in cases:
            first, second = max(error, key=error.__getitem__), max(ratio, key=ratio.__getitem__)
            table[name] = {"fp64": error[first], "tensor": first, "fp32_ratio": round(ratio[second], 2), "fp32_tensor": second}
    return table


if __name__ == "__main__":
    main()
