"""The cost model of `surefoot plan layout` against published throughput.

    python -m bench.plan_layout

Figures: plan.throughput_err (median relative error), plan.rank (Spearman of predicted with published share of the peak).
"""

from __future__ import annotations

import statistics

from bench.common import Figure, arguments, show, write
from surefoot.models.flops import count_flops
from tests.plan.published import POINTS, Point, cluster_of, predicted


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value, ties by their mean."""
    order = sorted(values)
    return [statistics.mean(place for place, one in enumerate(order) if one == value) for value in values]


def share(point: Point, tokens_per_s: float) -> float:
    """Return the share of the device's peak, by exact causal FLOPs."""
    return tokens_per_s * count_flops(point.spec, point.sequence).training / cluster_of(point).device.peak("bfloat16")


def main() -> None:
    args = arguments("predicted against published throughput")
    found = [(point, predicted(point).tokens_per_s / point.degrees.world_size) for point in POINTS]
    ratios = [guess / point.measured for point, guess in found]
    show(
        "tokens/s of a GPU",
        ["run", "layout", "published", "predicted", "ratio"],
        [(p.name, str(p.degrees), f"{p.measured:.0f}", f"{guess:.0f}", f"{guess / p.measured:.2f}") for p, guess in found],
    )
    measured, guessed = ([share(point, rate) for point, rate in pairs] for pairs in ([(p, p.measured) for p, _ in found], found))
    figures = [
        Figure("plan.throughput_err", statistics.median(abs(ratio - 1) for ratio in ratios), [abs(ratio - 1) for ratio in ratios],
               "12 published runs; the share of its peak that an A100 and an H100 reach is fitted; the two narrowest models are the worst"),
        Figure("plan.rank", statistics.correlation(ranks(measured), ranks(guessed)), [],
               "share of the peak, which differs by 20 %; the runs of 2021 stored attention scores, whose traffic slows narrow models"),
    ]  # fmt: skip
    print("wrote", write("plan_layout", figures, quick=args.quick).name)


if __name__ == "__main__":
    main()
