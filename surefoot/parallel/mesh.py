"""`Mesh`: the process groups of a layout, all views of one list of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot.core.errors import LayoutError
from surefoot.parallel.layout import AXES, Layout
from surefoot.parallel.placement import Coordinates, Sum, coordinates
from surefoot.parallel.process import CPU, Processes


@dataclass(frozen=True)
class Mesh:
    """This process's place in `layout`, and its groups; a group is None where it would hold this process alone.

    `tensor`, `context`, `expert`, `pipeline`: the ranks along one axis; `pipeline_back`: the same once more, for what travels to lower
    ranks: on one NCCL connection it would wait behind what travels to higher ones. `sequence`: those that share a sequence (context,
    tensor). `sums`: over which a gradient is summed, by kind (`parallel/placement.py`). `ends`: the first and the last pipeline stage,
    on their ranks. `dense_shards`, `expert_shards`: meshes (replicas, shards) for FSDP. `device`: where this process computes.
    """

    layout: Layout
    at: Coordinates
    processes: Processes
    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    pipeline_back: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None
    sums: dict[Sum, dist.ProcessGroup | None] = field(default_factory=dict)
    dense_shards: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None
    device: torch.device = CPU


def make_mesh(layout: Layout, processes: Processes, device: torch.device = CPU) -> Mesh:
    """Join the groups of `layout`. Every process of the run calls this, at the same point, with its own `device`.

    Raises `LayoutError` when the layout is not for this number of processes.
    """
    layout.check(processes.size)
    at = coordinates(layout, processes.rank)
    if processes.size == 1:
        return Mesh(layout, at, processes, sums={"dense": None, "experts": None, "tokens": None}, device=device)
    world = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)
    dense = world["replicate", "shard", "context"]._flatten("dense")
    tokens = world["replicate", "shard", "context", "tensor"]._flatten("tokens")
    sequence = world["context", "tensor"]._flatten("sequence")
    # The same token ranks, arranged for experts: replicas, shards of the experts of a rank, ranks that share the experts out.
    replicas = layout.replicate if layout.shard > 1 else 1
    shape = (replicas, layout.tokens // replicas // layout.expert, layout.expert)
    experts = tokens._unflatten(0, shape, ("expert_replicate", "expert_shard", "expert"))
    same_experts = experts["expert_replicate", "expert_shard"]._flatten("same_experts")
    sharded = layout.shard > 1
    dense_shards = None
    if sharded:
        shards = world["shard", "context"]._flatten("dense_shard")
        dense_shards = world["replicate", "dense_shard"] if layout.replicate > 1 else shards
    expert_shards = None
    if sharded:
        expert_shards = experts["expert_replicate", "expert_shard"] if layout.replicate > 1 else experts["expert_shard"]
    return Mesh(
        layout,
        at,
        processes,
        tensor=_group(world["tensor"]),
        context=_group(world["context"]),
        expert=_group(experts["expert"]),
        pipeline=_group(world["pipeline"]),
        pipeline_back=_pipelines(layout),
        sequence=_group(sequence),
        ends=_ends(layout, processes.rank),
        sums={"dense": _group(dense), "experts": _group(same_experts), "tokens": _group(tokens)},
        dense_shards=dense_shards,
        expert_shards=expert_shards,
        device=device,
    )


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None


def _pipelines(layout: Layout) -> dist.ProcessGroup | None:
    if layout.pipeline == 1:
        return None
    mine, _ = dist.new_subgroups_by_enumeration([list(range(start, layout.world_size, layout.tokens)) for start in range(layout.tokens)])
    return mine if isinstance(mine, dist.ProcessGroup) else None


def _ends(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    if layout.pipeline == 1 or layout.schedule == "zbv":  # a V puts both ends on the same rank
        return None
    pairs = [[start, start + (layout.pipeline - 1) * layout.tokens] for start in range(layout.tokens)]
    mine, _ = dist.new_subgroups_by_enumeration(pairs)
    if any(rank in pair for pair in pairs) and mine is None:
        raise LayoutError("the group of the first and the last stage was not made", where="layout.pipeline", remedy="report it")
    return mine if isinstance(mine, dist.ProcessGroup) else None
