"""All kinds of parallelism on one model: `parallelise` makes this process's part of a `Transformer` and connects it to the others.

The reference model is built without storage; each parameter is replaced by this process's part of it, drawn from its key or loaded;
then the exchanges are attached from outside, and what is left is sharded. No layer is written a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from surefoot.core.errors import LayoutError
from surefoot.models import ModelSpec, ParamDecl, Transformer, declarations
from surefoot.models.init import drawn
from surefoot.models.moe import MoE
from surefoot.parallel.collectives import all_gather, all_reduce
from surefoot.parallel.context import SequenceExchange
from surefoot.parallel.data import Reduction, local, shard_model
from surefoot.parallel.expert import spread_experts
from surefoot.parallel.mesh import Mesh
from surefoot.parallel.pipeline import keep_stages
from surefoot.parallel.placement import Part, Placement, coordinates, copies, everything, place, sharded, summed_over
from surefoot.parallel.tensor import split_tensor


@dataclass
class ParallelModel:
    """This process's part of a model. By canonical name: `decls` of its parameters, `placements` of what it holds of them."""

    model: Transformer
    mesh: Mesh
    decls: dict[str, ParamDecl]
    placements: dict[str, Placement]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def part(self, name: str, tensor: Tensor) -> Tensor | Part:
        """Give this process's part of a tensor that is cut like parameter `name` its place in the whole."""
        placement = self.placements[name]
        return tensor if placement == everything(placement.shape) else Part(tensor, placement)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's part of `whole`, cut like parameter `name`."""
        placement = self.placements[name]
        return whole if placement == everything(placement.shape) else placement.take(whole)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor of which each process of the stage holds a part like that of parameter `name`; all of them call it."""
        group, decl, layout = self.mesh.sums["tokens"], self.decls[name], self.mesh.layout
        if group is None or copies(decl, layout) == layout.tokens:
            return tensor
        first = self.mesh.at.pipeline * layout.tokens
        parts = [
            sharded(place(decl, layout, at), decl, layout, at) for at in (coordinates(layout, first + r) for r in range(layout.tokens))
        ]
        sizes = [torch.Size(placement.local_shape).numel() for placement in parts]
        flat = tensor.new_zeros(max(sizes))
        flat[: tensor.numel()] = tensor.flatten()
        every = all_gather(flat[None], 0, group)
        found = tensor.new_empty(decl.shape)
        for placement, size, row in zip(parts, sizes, every, strict=True):
            placement.put(row[:size].view(placement.local_shape), found)
        return found

    def norm(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Return the 2-norm of all gradients of the whole model, 0-d float64, the same on every process.

        Norms of single tensors are taken in float32 or wider, their squares summed in float64, each divided by the number of
        processes that hold it.
        """
        layout, tied = self.mesh.layout, self.mesh.ends is not None and self.model.spec.tied_embeddings
        found = {name: one if one.dtype.itemsize >= 4 else one.float() for name, one in gradients.items() if one is not None}
        held = [copies(self.decls[name], layout) * (2 if tied and name == "embed.weight" else 1) for name in found]
        norms = torch._foreach_norm(list(found.values())) if found else []
        squares = [norm.double().square() / count for norm, count in zip(norms, held, strict=True)]
        square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.processes.size > 1:
            self.mesh.processes.sum(square)
        return square.sqrt()

    def reductions(self) -> dict[str, Reduction]:
        """Return how each parameter's gradient is summed."""
        mesh, found = self.mesh, {}
        for name, decl in self.decls.items():
            kind = summed_over(decl)
            ends = (mesh.ends,) if mesh.ends is not None and name == "embed.weight" and self.model.spec.tied_embeddings else ()
            if mesh.layout.shard > 1:
                rest = (mesh.tensor,) if kind == "tokens" and mesh.tensor is not None else ()
                found[name] = Reduction(None, (*rest, *ends))
            else:
                found[name] = Reduction(mesh.sums[kind], ends)
        return found

    def check_copies(self) -> None:
        """Raise `LayoutError` unless all copies of a parameter start from the same values, by a checksum of each."""
        for kind in ("dense", "experts", "tokens"):
            group = self.mesh.sums[kind]
            names = [name for name, decl in self.decls.items() if summed_over(decl) == kind]
            if group is None or not names or self.mesh.layout.shard > 1:
                continue
            sums = torch.stack([local(self.parameters[name].detach()).double().sum() for name in names])
            high, low = all_reduce(sums, group, largest=True), -all_reduce(-sums, group, largest=True)
            if not torch.equal(low, high):
                first = names[int((low != high).nonzero()[0])]
                what = f"replicas start from different weights, first in {first}"
                raise LayoutError(what, where="layout.replicate", remedy="use one seed and one code")


def parallelise(spec: ModelSpec, mesh: Mesh, seed: int, *, dtype: torch.dtype, source: Mapping[str, Tensor] | None = None) -> ParallelModel:
    """Return this process's part of the model `spec`, its weights drawn from `seed`, or taken from `source` (whole tensors by name).

    The weights are the same whatever the layout.
    """
    model = Transformer(spec, device="meta", dtype=dtype)
    if mesh.layout.pipeline > 1:
        keep_stages(model, mesh)
    decls = declarations(model)
    placements = {name: place(decl, mesh.layout, mesh.at) for name, decl in decls.items()}
    for name, decl in decls.items():
        whole = drawn(name, decl, spec, seed, dtype) if source is None else source[name].to(dtype)
        owner, _, leaf = name.rpartition(".")
        part = whole if placements[name] == everything(decl.shape) else placements[name].take(whole)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(part.to(mesh.device)))
    _make_buffers(model, source, mesh.device)
    if mesh.tensor is not None:
        split_tensor(model, placements, mesh.tensor)
    if mesh.sequence is not None:
        model.exchange = SequenceExchange(mesh)
    if mesh.expert is not None:
        spread_experts(model, mesh.expert)
    if mesh.layout.shard > 1:
        shard_model(model, mesh)
        placements = {name: sharded(place, decls[name], mesh.layout, mesh.at) for name, place in placements.items()}
    parallel = ParallelModel(model, mesh, decls, placements, dict(model.named_parameters()))
    parallel.check_copies()
    return parallel


def _make_buffers(model: Transformer, source: Mapping[str, Tensor] | None, device: torch.device) -> None:
    for name, block in model.layers.items():
        if isinstance(block.ffn, MoE):
            layer = block.ffn
            layer.counts = torch.zeros(layer.spec.experts, dtype=torch.int64, device=device)
            if layer.router_bias is not None:
                bias = torch.zeros(layer.spec.experts, dtype=layer.router_bias.dtype, device=device)
                layer.router_bias = bias if source is None else source[f"layers.{name}.ffn.router_bias"].to(bias, copy=True)
