"""Predicted seconds: closed formulas, monotony, and what others published."""

from __future__ import annotations

import statistics

import pytest

from surefoot.cluster.hardware import DATASHEETS, Cluster, Link
from surefoot.models import ModelSpec
from surefoot.models.spec import AttentionSpec, FeedForwardSpec
from surefoot.parallel import schedules
from surefoot.plan import Candidate, Degrees, Workload, predict_time, rank_layouts
from tests.plan.published import LLAMA_70B, POINTS, cluster_of, predicted

EVEN = ModelSpec(
    vocab_size=64, dim=1024, layers=16, max_positions=512, attention=AttentionSpec(heads=8, kv_heads=8, head_dim=128),
    ffn=FeedForwardSpec(hidden=4096),
)  # fmt: skip


def cluster(bandwidth: float, latency_s: float = 0.0, nodes: int = 2) -> Cluster:
    link = Link(bandwidth=bandwidth, latency_s=latency_s)
    return Cluster(device=DATASHEETS["A100-80GB"], nodes=nodes, intra_node=link, inter_node=link)


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [("gpipe", 1, lambda p, m: (p - 1) / (m + p - 1)), ("1f1b", 1, lambda p, m: (p - 1) / (m + p - 1)),
     ("interleaved", 2, lambda p, m: (p - 1) / (2 * m + p - 1))],
)  # fmt: skip
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_the_bubble_is_that_of_the_formula(schedule: str, stages: int, expected: object, micro_batches: int) -> None:
    """With equal stages and free transfers; the head, which the last stage has more, is a thousandth of a layer here."""
    time = predict_time(Workload(EVEN, micro_batches, 512), Candidate(Degrees(pipeline=4), 1, schedule, stages), cluster(1e15), schedules)
    assert callable(expected)
    rest = time.total_s - time.parts["optimizer"]
    assert time.parts["bubble"] / rest == pytest.approx(expected(4, micro_batches), rel=0.02)


@pytest.mark.parametrize("degrees", [Degrees(replicate=8), Degrees(shard=8), Degrees(tensor=8), Degrees(context=8), Degrees(pipeline=8)])
def test_more_bandwidth_is_never_slower(degrees: Degrees) -> None:
    workload = Workload(EVEN, 8, 512)
    times = [predict_time(workload, Candidate(degrees), cluster(rate), schedules).total_s for rate in (1e9, 1e10, 1e11, 1e12)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_the_best_of_more_schedules_is_no_worse() -> None:
    workload, where = Workload(LLAMA_70B, 64, 4096), cluster_of(POINTS[-2]).model_copy(update={"nodes": 8})
    few = rank_layouts(workload, where, schedules, schedules=(("1f1b", 1),))
    many = rank_layouts(workload, where, schedules)
    assert few[0].fits
    assert many[0].step_s <= few[0].step_s


def test_the_fastest_come_first_and_what_does_not_fit_last() -> None:
    ranked = rank_layouts(Workload(LLAMA_70B, 64, 4096), cluster_of(POINTS[-2]).model_copy(update={"nodes": 8}), schedules)
    assert [one.step_s for one in ranked] == sorted(one.step_s for one in ranked)
    assert not ranked[-1].fits
    assert "does not fit: needs" in ranked[-1].reason
    assert "% faster than the next" in ranked[0].reason


def test_published_throughput_is_predicted() -> None:
    """Two constants were fitted to these tables: what share of its peak an A100 and an H100 reach in matrix products."""
    ratios = [predicted(point).tokens_per_s / point.degrees.world_size / point.measured for point in POINTS]
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.1
    assert all(0.75 < ratio < 1.4 for ratio in ratios), ratios


def test_the_layout_that_megatron_found_best_is_near_our_best() -> None:
    """Narayanan et al. 2021, takeaway 1: tensor parallelism up to the size of a node, then pipelines. Without sharding, as there."""
    point = next(one for one in POINTS if one.name == "145.6B")
    ranked = rank_layouts(Workload(point.spec, point.rows, point.sequence), cluster_of(point), schedules, schedules=(("1f1b", 1),))
    theirs = [one for one in ranked if one.fits and one.degrees.shard == one.degrees.context == 1]
    assert theirs[0].degrees.tensor == 8
    chosen = next(one for one in theirs if one.degrees == point.degrees)
    assert chosen.step_s < 1.1 * theirs[0].step_s
