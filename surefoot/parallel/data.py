"""Data parallelism: replicas whose gradients are summed, and shards of one replica (FSDP2).

Everything is a sum: the loss already holds 1 / N of the global number of trained tokens, so no divisor depends on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from surefoot.core.errors import LayoutError
from surefoot.models import Transformer
from surefoot.models.parameters import accumulation_dtype
from surefoot.parallel.layout import Layout
from surefoot.parallel.process import among_peers

BUCKET_BYTES = 25 * 2**20


def shard_model(model: Transformer, layout: Layout) -> None:
    """Shard `model` in place: a unit a block, the rest in the root's (FSDP2; HSDP where `layout` also replicates)."""
    names = ("replicate", "shard")
    mesh = init_device_mesh(model.embed.weight.device.type, (layout.replicate, layout.shard), mesh_dim_names=names)
    used = mesh if layout.replicate > 1 else mesh["shard"]
    # Gradients of bfloat16 weights are summed in float32.
    policy = MixedPrecisionPolicy(reduce_dtype=accumulation_dtype(model.embed.weight.dtype))
    for unit in (*model.layers.values(), model):
        fully_shard(unit, mesh=used, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no pre-multiplied sum, and none is wanted: the divisor is in the loss.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Give a process's `part` of a tensor the global shape and placement of its `parameter`; no copy."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def whole(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor of which each process holds the `part` that it holds of `parameter` (an all-gather where it is cut)."""
    placed = placed_like(part, parameter)
    return placed.full_tensor() if isinstance(placed, DTensor) else placed


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's part of `tensor`, which every process holds whole, cut like `parameter`."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, parameter.placements).to_local()


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    buffer: Tensor
    pending: int = 0
    work: dist.Work | None = None


@dataclass
class GradientSync:
    """Makes each parameter's gradient the sum over micro-batches and replicas, in float32 or wider.

    With one replica and one micro-batch nothing is copied. Otherwise parameters have views in flat buckets, in the order in which
    the backward pass finishes them, and a bucket is reduced while the backward pass goes on. Of a `sharded` model FSDP sums over
    processes; only bfloat16 micro-batches are added up here, in float32.
    """

    parameters: list[nn.Parameter]
    replicas: int
    micro_batches: int
    sharded: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _where: dict[nn.Parameter, tuple[_Bucket, Tensor]] = field(default_factory=dict)
    _sums: list[Tensor] = field(default_factory=list)
    _last: bool = False
    _next: int = 0

    def __post_init__(self) -> None:
        narrow = self.micro_batches > 1 and self.parameters[0].dtype == torch.bfloat16
        if self.sharded:
            # FSDP reduces in float32, but would add the next micro-batch to a bfloat16 gradient.
            self._sums = [torch.zeros_like(local(parameter), dtype=torch.float32) for parameter in self.parameters if narrow]
            return
        if self.replicas == 1 and not narrow:
            return
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._make_buckets()

    def start(self, micro_batch: int) -> None:
        """Announce micro-batch `micro_batch` (from 0) of a step; reductions begin with the last one."""
        self._last = micro_batch == self.micro_batches - 1
        if micro_batch > 0:
            self._collect()
        else:
            self._next = 0
            for total in self._sums:
                total.zero_()
            for bucket in self._buckets:
                bucket.buffer.zero_()
                bucket.pending, bucket.work = len(bucket.parameters), None

    def finish(self) -> list[Tensor | None]:
        """Return the reduced gradient of every parameter (this process's part), once the last backward pass is over."""
        # A parameter without a gradient never arrived; its zeros are summed all the same.
        with among_peers():
            self._reduce_ready(everything=True)
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
        if self._buckets:
            return [self._where[parameter][1] for parameter in self.parameters]
        if self._sums:
            self._collect()
            return [*self._sums]
        return [None if parameter.grad is None else local(parameter.grad) for parameter in self.parameters]

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _collect(self) -> None:
        """Add what FSDP left of a micro-batch to the float32 sums."""
        for parameter, total in zip(self.parameters, self._sums, strict=False):
            if parameter.grad is not None:
                total += local(parameter.grad)
                parameter.grad = None

    def _make_buckets(self) -> None:
        wide = accumulation_dtype(self.parameters[0].dtype)
        size = torch.empty((), dtype=wide).element_size()
        group: list[nn.Parameter] = []
        groups = [group]
        for parameter in reversed(self.parameters):
            if group and sum(one.numel() for one in group) * size + parameter.numel() * size > BUCKET_BYTES:
                group = []
                groups.append(group)
            group.append(parameter)
        for members in groups:
            bucket = _Bucket(members, torch.zeros(sum(one.numel() for one in members), dtype=wide, device=members[0].device))
            offset = 0
            for parameter in members:
                self._where[parameter] = (bucket, bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape))
                offset += parameter.numel()
            self._buckets.append(bucket)

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket, view = self._where[parameter]
        if parameter.grad is not None:
            view += parameter.grad
            parameter.grad = None
        if self._last:
            bucket.pending -= 1
            self._reduce_ready()

    def _reduce_ready(self, *, everything: bool = False) -> None:
        """Start the reductions of finished buckets strictly in their order, the same on every rank."""
        while self.replicas > 1 and self._next < len(self._buckets) and (everything or self._buckets[self._next].pending == 0):
            bucket = self._buckets[self._next]
            bucket.work = dist.all_reduce(bucket.buffer, async_op=True)
            self._next += 1


def check_replicas(model: nn.Module, size: int) -> None:
    """Raise `LayoutError` unless every replica starts from the same weights, by a checksum of each."""
    if size == 1:
        return
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        names = [name for name, _ in model.named_parameters()]
        first = names[int((low != high).nonzero()[0])]
        raise LayoutError(
            f"replicas start from different weights, first in {first}", where="layout.replicate", remedy="use one seed and one code"
        )
