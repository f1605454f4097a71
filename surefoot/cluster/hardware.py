"""Hardware as data: a device, the links between devices, a cluster of equal nodes; and how long its collectives take.

Datasheets tell peaks. `efficiency` says what share of a peak training reaches, and is what to replace by measurement first.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from surefoot.core.config import Config
from surefoot.core.errors import ConfigError, LayoutError, nearest


class Link(Config):
    """What one device sends, in one direction, while all others send too."""

    bandwidth: PositiveFloat  # bytes/s
    latency_s: NonNegativeFloat = 5e-6  # of one message
    efficiency: float = Field(0.8, gt=0.0, le=1.0)  # share of the bandwidth that a large collective reaches

    @property
    def rate(self) -> float:
        """Achievable bytes/s."""
        return self.bandwidth * self.efficiency


class Device(Config):
    """One accelerator, by its datasheet."""

    name: str
    flops: dict[str, PositiveFloat]  # dense FLOP/s by dtype, a multiply-add is 2
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat  # bytes/s
    link: Link | None = None  # to the other devices of its node
    efficiency: float = Field(0.45, gt=0.0, le=1.0)  # share of `flops` that forward and backward passes reach when nothing waits
    usable_memory: float = Field(0.92, gt=0.0, le=1.0)  # share of the memory left for tensors by the driver, libraries and gaps

    def rate(self, dtype: str) -> float:
        """Achievable FLOP/s; raises `ConfigError` when the device's rate for `dtype` is not known."""
        return self.peak(dtype) * self.efficiency

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s; raises `ConfigError` when it is not known for `dtype`."""
        if dtype not in self.flops:
            raise ConfigError(f"{self.name} has no rate for {dtype}", where="device.flops", remedy=nearest(dtype, self.flops))
        return self.flops[dtype]

    @property
    def room_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_memory)


def _device(
    name: str, flops: dict[str, float], gigabytes: float, bandwidth: float, link: float, efficiency: float
) -> Device:  # fmt: skip
    return Device(
        name=name,
        flops=flops,
        memory_bytes=int(gigabytes * 1e9),
        memory_bandwidth=bandwidth,
        link=Link(bandwidth=link, latency_s=3e-6),
        efficiency=efficiency,
    )


DATASHEETS: dict[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA A100 datasheet (80GB SXM): float32 is TF32; NVLink 600 GB/s is both directions. The paper of Megatron-LM
        # (arXiv 2104.04473, table 1) reaches 44 to 52 % of the peak, communication and bubble included.
        _device("A100-80GB", {"bfloat16": 312e12, "float32": 156e12}, 80, 2.039e12, 300e9, 0.55),
        # NVIDIA H100 and H200 datasheets (SXM): their figures with sparsity halved. torchtitan's benchmarks
        # (llama3_h100_202412_torchtitan.md) reach 39 % compiled, attention counted as a full square: 35 % of exact FLOPs.
        _device("H100-SXM", {"bfloat16": 989.4e12, "float32": 494.7e12, "float8": 1978.9e12}, 80, 3.35e12, 450e9, 0.36),
        _device("H200-SXM", {"bfloat16": 989.4e12, "float32": 494.7e12, "float8": 1978.9e12}, 141, 4.8e12, 450e9, 0.36),
        # NVIDIA HGX B200 datasheet, an eighth of the board, dense; the efficiency is a guess.
        _device("B200", {"bfloat16": 2250e12, "float32": 1125e12, "float8": 4500e12}, 180, 8e12, 900e9, 0.4),
        # AMD Instinct MI300X datasheet; seven Infinity Fabric links of 64 GB/s a direction; the efficiency is a guess.
        _device("MI300X", {"bfloat16": 1307.4e12, "float32": 653.7e12, "float8": 2614.9e12}, 192, 5.3e12, 448e9, 0.35),
    )
}


class Cluster(Config):
    """`nodes` equal nodes. In a file, `device` is a table, or the name of one of `DATASHEETS`."""

    device: Device
    devices_per_node: PositiveInt = 8
    nodes: PositiveInt = 1
    intra_node: Link | None = None  # None: the device's own
    inter_node: Link | None = None  # a device's share of the network

    @field_validator("device", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value not in DATASHEETS:
                remedy = f"{nearest(value, DATASHEETS)} — or describe it in a [device] table"
                raise ConfigError(f"'{value}' is not a device on record", remedy=remedy)
            return DATASHEETS[value]
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.devices_per_node > 1 and self.intra_node is None and self.device.link is None:
            raise ConfigError("nothing joins the devices of a node", where="intra_node", remedy="add [intra_node] with a bandwidth")
        if self.nodes > 1 and self.inter_node is None:
            raise ConfigError(f"nothing joins the {self.nodes} nodes", where="inter_node", remedy="add [inter_node] with a bandwidth")
        return self

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def link(self, *, across: bool) -> Link:
        """The link between devices of one node, or `across` nodes; raises `LayoutError` when there is none."""
        found = self.inter_node if across else self.intra_node or self.device.link
        if found is None:
            raise LayoutError("the group is larger than the cluster", where="cluster", remedy="use fewer processes, or more nodes")
        return found


def gather_s(size_bytes: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds in which `ranks` devices, `stride` apart, all-gather or reduce-scatter a whole of `size_bytes`.

    Each receives (ranks - 1) / ranks of it. A group that spans nodes uses the network links of all its devices in a node at once.
    """
    if ranks == 1:
        return 0.0
    near = _neighbours(ranks, stride, cluster)
    moved = size_bytes * (ranks - 1) / ranks
    if near == ranks:
        inside = cluster.link(across=False)
        return moved / inside.rate + (ranks - 1) * inside.latency_s
    across = cluster.link(across=True)
    rate = across.rate
    seconds = (ranks / near - 1) * across.latency_s
    if near > 1:
        inside = cluster.link(across=False)
        rate = min(inside.rate, near * across.rate)
        seconds += (near - 1) * inside.latency_s
    return moved / rate + seconds


def exchange_s(size_bytes: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of an all-to-all in which each of `ranks` devices holds `size_bytes` and keeps its own share."""
    if ranks == 1:
        return 0.0
    near = _neighbours(ranks, stride, cluster)
    inside = cluster.link(across=False) if near > 1 else None
    seconds = size_bytes * (near - 1) / ranks / inside.rate + inside.latency_s if inside else 0.0
    if near < ranks:
        across = cluster.link(across=True)
        seconds = max(seconds, size_bytes * (ranks - near) / ranks / across.rate + across.latency_s)
    return seconds


def send_s(size_bytes: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds in which each of `ranks` devices, `stride` apart, sends `size_bytes` to the next one."""
    if ranks == 1:
        return 0.0
    link = cluster.link(across=ranks * stride > cluster.devices_per_node)
    return size_bytes / link.rate + link.latency_s


def _neighbours(ranks: int, stride: int, cluster: Cluster) -> int:
    """How many of a group's devices stand in one node."""
    return min(ranks, max(1, cluster.devices_per_node // stride))
