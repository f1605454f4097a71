"""Data parallelism: replicas whose gradients are summed, and shards of one replica (FSDP2).

Everything is a sum: the loss already holds 1 / N of the global number of trained tokens, so no divisor depends on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from surefoot.models import Transformer
from surefoot.models.moe import MoE
from surefoot.models.parameters import accumulation_dtype
from surefoot.parallel.collectives import Group
from surefoot.parallel.mesh import Mesh
from surefoot.parallel.process import among_peers

BUCKET_BYTES = 25 * 2**20


def shard_model(model: Transformer, mesh: Mesh) -> None:
    """Shard `model` in place: a unit a block, its experts their own, the rest in the root's (FSDP2; HSDP with replicas)."""
    assert mesh.dense_shards is not None and mesh.expert_shards is not None
    # Gradients of bfloat16 weights are summed in float32.
    policy = MixedPrecisionPolicy(reduce_dtype=accumulation_dtype(next(model.parameters()).dtype))
    for block in model.layers.values():
        if isinstance(block.ffn, MoE):
            fully_shard(block.ffn.experts, mesh=mesh.expert_shards, mp_policy=policy)
        fully_shard(block, mesh=mesh.dense_shards, mp_policy=policy)
    fully_shard(model, mesh=mesh.dense_shards, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no pre-multiplied sum, and none is wanted: the divisor is in the loss.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Reduction:
    """How a gradient becomes a sum: over `first` while the backward pass goes on (None: nothing, or FSDP's work), then over `then`."""

    first: Group | None = None
    then: tuple[Group, ...] = ()


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    buffer: Tensor
    group: Group | None
    pending: int = 0
    work: dist.Work | None = None


@dataclass
class GradientSync:
    """Makes each parameter's gradient the sum over micro-batches and over the ranks of its `Reduction`, in float32 or wider.

    With nothing to reduce and one micro-batch nothing is copied. Otherwise parameters have views in flat buckets, in the order in
    which the backward pass finishes them, and a bucket is reduced while the backward pass goes on. Of a `sharded` model FSDP sums
    over processes; only bfloat16 micro-batches are added up here, in float32.
    """

    parameters: Mapping[str, nn.Parameter]
    reductions: Mapping[str, Reduction]
    micro_batches: int
    sharded: bool = False
    _buckets: list[_Bucket] = field(default_factory=list)
    _where: dict[nn.Parameter, tuple[_Bucket, Tensor]] = field(default_factory=dict)
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _last: bool = False
    _next: int = 0

    def __post_init__(self) -> None:
        narrow = self.micro_batches > 1 and next(iter(self.parameters.values())).dtype == torch.bfloat16
        if self.sharded:
            # FSDP reduces in float32, but would add the next micro-batch to a bfloat16 gradient.
            wide = {name: torch.zeros_like(local(parameter), dtype=torch.float32) for name, parameter in self.parameters.items()}
            self._sums = wide if narrow else {}
            return
        bucketed = {name: one for name, one in self.parameters.items() if narrow or self.reductions[name].first is not None}
        for parameter in bucketed.values():
            parameter.register_post_accumulate_grad_hook(self.arrived)
        self._make_buckets(bucketed)

    def start(self, micro_batch: int) -> None:
        """Announce micro-batch `micro_batch` (from 0) of a step; reductions begin with the last one."""
        if micro_batch == 0:
            self.begin()
        self.backward(last=micro_batch == self.micro_batches - 1)

    def begin(self) -> None:
        """Begin a step."""
        self._next = 0
        for total in self._sums.values():
            total.zero_()
        for bucket in self._buckets:
            bucket.buffer.zero_()
            bucket.pending, bucket.work = len(bucket.parameters), None

    def backward(self, *, last: bool) -> None:
        """Announce a backward pass; `last`: it is the last one of the step for the parameters it reaches."""
        self._last = last
        self._collect()

    def finish(self) -> dict[str, Tensor | None]:
        """Return the reduced gradient of every parameter (this process's part), once the last backward pass is over."""
        # A parameter without a gradient never arrived; its zeros are summed all the same.
        with among_peers():
            self._reduce_ready(everything=True)
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
            if self._sums:
                self._collect()
            found = {name: self._gradient(name, parameter) for name, parameter in self.parameters.items()}
            self._reduce_rest(found)
        return found

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        if name in self._sums:
            return self._sums[name]
        if parameter in self._where:
            return self._where[parameter][1]
        return None if parameter.grad is None else local(parameter.grad)

    def _reduce_rest(self, found: dict[str, Tensor | None]) -> None:
        """Sum over the groups of `Reduction.then`, in one flat buffer each."""
        steps: dict[Group, list[str]] = {}
        for name, reduction in self.reductions.items():
            for group in reduction.then:
                steps.setdefault(group, []).append(name)
        for group, names in sorted(steps.items(), key=lambda item: item[0].group_name):
            wide = accumulation_dtype(next(iter(self.parameters.values())).dtype)
            parts = [torch.zeros_like(local(self.parameters[name])) if found[name] is None else found[name] for name in names]
            flat = torch.cat([part.to(wide).flatten() for part in parts if part is not None])
            dist.all_reduce(flat, group=group)
            sizes = [local(self.parameters[name]).numel() for name in names]
            for name, piece in zip(names, flat.split(sizes), strict=True):
                found[name] = piece.view(local(self.parameters[name]).shape)

    def _collect(self) -> None:
        """Add what FSDP left of a micro-batch to the float32 sums."""
        for name, total in self._sums.items():
            parameter = self.parameters[name]
            if parameter.grad is not None:
                total += local(parameter.grad)
                parameter.grad = None

    def _make_buckets(self, parameters: Mapping[str, nn.Parameter]) -> None:
        wide = accumulation_dtype(next(iter(self.parameters.values())).dtype)
        size = torch.empty((), dtype=wide).element_size()
        open_groups: dict[Group | None, list[nn.Parameter]] = {}
        groups: list[tuple[Group | None, list[nn.Parameter]]] = []
        for name, parameter in reversed(list(parameters.items())):
            group = self.reductions[name].first
            members = open_groups.get(group)
            if members is None or sum(one.numel() for one in members) * size + parameter.numel() * size > BUCKET_BYTES:
                members = open_groups[group] = []
                groups.append((group, members))
            members.append(parameter)
        for group, members in groups:
            bucket = _Bucket(members, torch.zeros(sum(one.numel() for one in members), dtype=wide, device=members[0].device), group)
            offset = 0
            for parameter in members:
                self._where[parameter] = (bucket, bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape))
                offset += parameter.numel()
            self._buckets.append(bucket)

    def arrived(self, parameter: Tensor) -> None:
        """Take note of a gradient that a backward pass, or a part of it that was put off, left at `parameter`."""
        assert isinstance(parameter, nn.Parameter)
        if parameter not in self._where or parameter.grad is None:
            return  # nothing to add up here, or the gradient was put off: autograd announces it all the same
        bucket, view = self._where[parameter]
        view += parameter.grad
        parameter.grad = None
        if self._last:
            bucket.pending -= 1
            self._reduce_ready()

    def _reduce_ready(self, *, everything: bool = False) -> None:
        """Start the reductions of finished buckets strictly in their order, the same on every rank."""
        while self._next < len(self._buckets) and (everything or self._buckets[self._next].pending == 0):
            bucket = self._buckets[self._next]
            if bucket.group is not None:
                bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)
            self._next += 1
