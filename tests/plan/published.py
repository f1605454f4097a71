"""Published training throughput of whole clusters, to hold predictions against. TFLOP/s and tokens/s are per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.cluster.hardware import DATASHEETS, Cluster, Link
from surefoot.models import ModelSpec
from surefoot.models.spec import AttentionSpec, FeedForwardSpec
from surefoot.parallel import schedules
from surefoot.plan import Candidate, Degrees, Prediction, Workload, predict_memory, predict_time


@dataclass(frozen=True)
class Point:
    """`measured`: tokens/s of a GPU. `micro_batch` rows; `stages` a pipeline rank holds."""

    source: str
    name: str
    spec: ModelSpec
    device: str
    degrees: Degrees
    rows: int
    sequence: int
    measured: float
    micro_batch: int = 1
    schedule: str = "1f1b"
    stages: int = 1
    recompute: bool = False


def gpt(hidden: int, layers: int, heads: int) -> ModelSpec:
    """A GPT-3-like model: its two feed-forward matrices of width 4 D have the size of three of width 8/3 D."""
    return ModelSpec(
        vocab_size=51_200,
        dim=hidden,
        layers=layers,
        max_positions=2048,
        attention=AttentionSpec(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        ffn=FeedForwardSpec(hidden=8 * hidden // 3 // 64 * 64),
        tied_embeddings=True,
    )


def llama(dim: int, layers: int, heads: int, hidden: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=128_256,
        dim=dim,
        layers=layers,
        max_positions=1 << 18,
        attention=AttentionSpec(heads=heads, kv_heads=8, head_dim=128),
        ffn=FeedForwardSpec(hidden=hidden),
    )


LLAMA_8B, LLAMA_70B, LLAMA_405B = llama(4096, 32, 32, 14_336), llama(8192, 80, 64, 28_672), llama(16_384, 126, 128, 53_248)

_MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, table 1 (full recomputation; 8 A100-80GB a node, 200 Gb/s a GPU)"
_TITAN = "torchtitan benchmarks and arXiv 2410.06511 (H100, bfloat16 with compile)"
# billions of parameters, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s
_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10_240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12_288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16_384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20_480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25_600, 128, 8, 64, 3072, 3072, 163),
)


def _megatron() -> list[Point]:
    points = []
    for size, heads, hidden, layers, tensor, pipeline, gpus, batch, tflops in _TABLE_1:
        degrees = Degrees(replicate=gpus // tensor // pipeline, tensor=tensor, pipeline=pipeline)
        # Their equation 3: FLOPs of an iteration, the recomputed forward pass included.
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51_200 / (16 * layers * hidden))
        measured = tflops * 1e12 / flops * batch * 2048
        points.append(Point(_MEGATRON, f"{size}B", gpt(hidden, layers, heads), "A100-80GB", degrees, batch, 2048, measured, recompute=True))
    return points


POINTS: tuple[Point, ...] = (
    *_megatron(),
    Point(_TITAN, "8B, 8 GPUs", LLAMA_8B, "H100-SXM", Degrees(shard=8), 8, 8192, 6667),
    Point(_TITAN, "8B, 128 GPUs", LLAMA_8B, "H100-SXM", Degrees(shard=128), 128, 8192, 6514),
)


def cluster_of(point: Point) -> Cluster:
    """Return the cluster of `point`: nodes of eight, joined by 200 Gb/s (A100) or 400 Gb/s (H100) a GPU."""
    bandwidth = 25e9 if point.device.startswith("A100") else 50e9
    nodes = -(-point.degrees.world_size // 8)
    return Cluster(device=DATASHEETS[point.device], nodes=nodes, inter_node=Link(bandwidth=bandwidth, latency_s=8e-6))


def predicted(point: Point) -> Prediction:
    """Return what the cost model says of `point`."""
    workload = Workload(point.spec, point.rows, point.sequence, "bfloat16")
    candidate = Candidate(point.degrees, point.micro_batch, point.schedule, point.stages, point.recompute)
    cluster = cluster_of(point)
    memory = max(predict_memory(workload, candidate, schedules), key=lambda one: one.total)
    time = predict_time(workload, candidate, cluster, schedules)
    rate = point.rows * point.sequence / time.total_s
    return Prediction(candidate, candidate.micro_batches(workload), memory, memory.total <= cluster.device.room_bytes, time, rate)
