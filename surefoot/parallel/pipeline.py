"""Pipeline parallelism: layers cut into stages, and one executor for every schedule.

A schedule is data (`parallel/schedules.py`): for each rank the order of its forward and backward passes. The executor walks through
a rank's order. Activations go to the next stage and gradients to the one before as soon as they exist; a pass waits for what it
needs. Where a schedule splits the backward pass, the gradient of a stage's input goes on its way first, and the gradients of the
weights, which nobody waits for, are computed later from the inputs kept aside (zero-bubble, Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from surefoot.models import Loss, ModelSpec, Transformer
from surefoot.models.flops import layer_costs
from surefoot.models.parameters import Linear
from surefoot.models.products import product
from surefoot.parallel.data import GradientSync
from surefoot.parallel.layout import Layout
from surefoot.parallel.mesh import Mesh
from surefoot.parallel.process import among_peers
from surefoot.parallel.schedules import Op, Schedule, cut_layers, make_schedule
from surefoot.parallel.tensor import RowLinear

Message = tuple[str, int, int]
"""("F" for an activation or "B" for a gradient, the stage that receives it, micro-batch)."""


def stages(spec: ModelSpec, layout: Layout) -> tuple[range, ...]:
    """Return the layers of each stage, cut so that the costliest stage costs least; the head counts with the last layer."""
    return cut_layers(layer_costs(spec), len(placement(layout)))


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """Return the schedule of `layout`. Raises `LayoutError` when it needs more micro-batches."""
    return make_schedule(layout.schedule, layout.pipeline, micro_batches, layout.stages_per_rank)


def placement(layout: Layout) -> tuple[int, ...]:
    """Return the pipeline rank of each stage."""
    return schedule_of(layout, layout.pipeline).placement


def keep_stages(model: Transformer, mesh: Mesh) -> None:
    """Drop the layers that other pipeline ranks hold. A tied embedding stays at both ends."""
    cut = stages(model.spec, mesh.layout)
    mine = [stage for stage, rank in enumerate(placement(mesh.layout)) if rank == mesh.at.pipeline]
    kept = {layer for stage in mine for layer in cut[stage]}
    for layer in range(model.spec.layers):
        if layer not in kept:
            del model.layers[str(layer)]
    last = len(cut) - 1 in mine
    if 0 not in mine and not (last and model.spec.tied_embeddings):
        del model.embed
    if not last:
        del model.norm
        model.head = None


@dataclass(frozen=True)
class Rows:
    """A micro-batch of this process, each [B, T]."""

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    labels: Tensor


@dataclass
class Pipeline:
    """Runs `model`, this process's stages, over micro-batches in the order of a schedule."""

    model: Transformer
    mesh: Mesh
    put_off: PutOff | None = None
    cut: tuple[range, ...] = ()
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.cut, self.placement = stages(self.model.spec, self.mesh.layout), placement(self.mesh.layout)
        if self.mesh.layout.schedule in ("zero_bubble", "zbv"):
            self.put_off = PutOff()
            self.put_off.attach(self.model)

    def train(self, batches: Sequence[Rows], normaliser: int, sync: GradientSync, after: Callable[[range], None]) -> Tensor:
        """Run forward and backward over `batches`; return the sum of their losses on the last stage's rank (0 elsewhere).

        `after` is called with the layers of a stage when a forward pass of it ends.
        """
        schedule = schedule_of(self.mesh.layout, len(batches))
        step = _Step(self, batches, normaliser, schedule.orders)
        sync.begin()
        for op in schedule.orders[self.mesh.at.pipeline]:
            if op.kind == "F":
                step.forward(op)
                after(self.cut[op.stage])
            elif op.kind == "W":
                assert self.put_off is not None
                sync.backward(last=op.micro_batch == len(batches) - 1)
                self.put_off.catch_up(op, sync)
            else:
                sync.backward(last=op.micro_batch == len(batches) - 1)
                step.backward(op)
        step.finish()
        return step.loss

    def messages(self, order: Sequence[Op], rank: int) -> Iterator[Message]:
        """Yield what `rank`, which works in this `order`, sends to this one: activations forward, gradients backward."""
        here = self.mesh.at.pipeline
        for op in order:
            to, kind = (op.stage + 1, "F") if op.kind == "F" else (op.stage - 1, "B")
            if rank != here and op.kind != "W" and 0 <= to < len(self.placement) and self.placement[to] == here:
                yield kind, to, op.micro_batch

    @torch.no_grad()
    def loss(self, rows: Rows) -> Tensor:
        """Run one micro-batch forward; return its summed loss on the last stage's rank (0 elsewhere)."""
        stages = [(Op("F", stage, 0), rank) for stage, rank in enumerate(self.placement)]
        orders = [[op for op, rank in stages if rank == here] for here in range(self.mesh.layout.pipeline)]
        step = _Step(self, [rows], 1, orders)
        for op in orders[self.mesh.at.pipeline]:
            step.forward(op)
        step.finish()
        return step.loss


class _Step:
    """The activations and messages of one step.

    NCCL knows no tags, so messages of a rank are received in the order in which it sends them, which its schedule tells; one that comes
    before it is needed is kept.
    """

    def __init__(self, pipeline: Pipeline, batches: Sequence[Rows], normaliser: int, orders: Sequence[Sequence[Op]]) -> None:
        self.pipeline, self.batches, self.normaliser = pipeline, batches, normaliser
        self.expected = {rank: deque(pipeline.messages(order, rank)) for rank, order in enumerate(orders)}
        self.arrived: dict[Message, Tensor] = {}
        self.cut = pipeline.cut
        self.kept: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        self.local: dict[tuple[str, int, int], Tensor] = {}
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)

    def forward(self, op: Op) -> None:
        model, layers = self.pipeline.model, self.cut[op.stage]
        rows = self.batches[op.micro_batch]
        inputs = rows.tokens if op.stage == 0 else self._receive("F", op, rows)
        if op.stage > 0 and torch.is_grad_enabled():
            inputs.requires_grad_()
        last = op.stage == len(self.cut) - 1
        labels = rows.labels if last else None
        out: Any = model(inputs, rows.positions, rows.documents, labels=labels, normaliser=self.normaliser, layers=layers)
        if isinstance(out, Loss):
            self.loss += out.cross_entropy.double()
            outputs = [out.total]
        else:
            outputs = [out.stream, out.aux]
            self._send("F", op.stage + 1, op.micro_batch, out.stream.detach())
        if torch.is_grad_enabled():
            self.kept[op.stage, op.micro_batch] = inputs, outputs

    def backward(self, op: Op) -> None:
        inputs, outputs = self.kept.pop((op.stage, op.micro_batch))
        gradients = [torch.ones_like(outputs[-1])]
        if len(outputs) > 1:
            gradients.insert(0, self._receive("B", op, self.batches[op.micro_batch]).to(outputs[0].dtype))
        wanted = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad]
        put_off = self.pipeline.put_off
        if put_off is not None:
            put_off.now = (op.stage, op.micro_batch) if op.kind == "I" else None
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
        if op.stage > 0:
            assert inputs.grad is not None
            self._send("B", op.stage - 1, op.micro_batch, inputs.grad)

    def _send(self, kind: str, stage: int, micro_batch: int, tensor: Tensor) -> None:
        rank = self.pipeline.placement[stage]
        if rank == self.pipeline.mesh.at.pipeline:
            self.local[kind, stage, micro_batch] = tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._process(rank), group=self._group(rank > self.pipeline.mesh.at.pipeline))
        assert work is not None
        self.sends.append((work, tensor))

    def _receive(self, kind: str, op: Op, rows: Rows) -> Tensor:
        """Return what stage `op.stage` waits for: the activation of the stage before, or the gradient of the one after."""
        here = self.local.pop((kind, op.stage, op.micro_batch), None)
        if here is not None:
            return here.clone() if kind == "F" else here
        layout, model = self.pipeline.mesh.layout, self.pipeline.model
        rank, wanted = self.pipeline.placement[op.stage + (-1 if kind == "F" else 1)], (kind, op.stage, op.micro_batch)
        while wanted not in self.arrived:
            shape = (rows.tokens.shape[0], rows.tokens.shape[1] // layout.tensor, model.spec.dim)
            tensor = torch.empty(shape, dtype=next(model.parameters()).dtype, device=rows.tokens.device)
            with among_peers():
                dist.recv(tensor, self._process(rank), group=self._group(rank < self.pipeline.mesh.at.pipeline))
            self.arrived[self.expected[rank].popleft()] = tensor
        return self.arrived.pop(wanted)

    def _group(self, onward: bool) -> dist.ProcessGroup | None:
        return self.pipeline.mesh.pipeline if onward else self.pipeline.mesh.pipeline_back

    def _process(self, rank: int) -> int:
        """Return the process of pipeline rank `rank` at this one's place of a stage: as far apart as a stage has ranks."""
        mesh = self.pipeline.mesh
        return mesh.processes.rank + (rank - mesh.at.pipeline) * mesh.layout.tokens

    def finish(self) -> None:
        with among_peers():
            for work, _ in self.sends:
                work.wait()


class PutOff:
    """Weight gradients that wait for their turn: by (stage, micro-batch), what each product will need."""

    def __init__(self) -> None:
        self.now: tuple[int, int] | None = None
        self.waiting: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor, Tensor]]] = {}

    def attach(self, model: nn.Module) -> None:
        """Make every product of `model` leave its weight's gradient here while `now` is set."""
        for module in model.modules():
            if isinstance(module, Linear | RowLinear):
                module.product = self.linear

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _PutOffProduct.apply(x.reshape(-1, x.shape[-1]), weight, self)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @torch.no_grad()
    def catch_up(self, op: Op, sync: GradientSync) -> None:
        """Compute the weight gradients of `op` and hand them to `sync`."""
        for weight, x, grad in self.waiting.pop((op.stage, op.micro_batch), []):
            found = grad.t() @ x
            weight.grad = found if weight.grad is None else weight.grad + found
            sync.arrived(weight)


class _PutOffProduct(Function):
    """x: [M, K], weight: [N, K] -> x W^T: [M, N]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, put_off: PutOff) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x)
        ctx.weight, ctx.put_off = weight, put_off  # type: ignore[attr-defined]
        return product(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        weight: nn.Parameter = ctx.weight  # type: ignore[attr-defined]
        put_off: PutOff = ctx.put_off  # type: ignore[attr-defined]
        grad = grads[0].contiguous()
        d_x = product(grad, weight.to(grad.dtype).t()) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        if put_off.now is None:
            return d_x, (grad.t() @ x).to(weight.dtype), None
        put_off.waiting.setdefault(put_off.now, []).append((weight, x, grad))
        return d_x, None, None
