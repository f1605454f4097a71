"""Which processes hold copies of the same values, derived from the layout, and the check that they still do.

Copies are made alike and get the same sums, so after every step they are the same bits. Where they are not, memory or arithmetic
failed on one process, or a sum that should have been made was not; the loss shows neither for a long time.

What has one owner only (a shard without replicas, a tensor rank's part under tensor parallelism alone) cannot be checked so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.core.errors import NumericsError
from surefoot.models import ModelSpec, ParamDecl, Transformer, declarations
from surefoot.parallel.compose import ParallelModel
from surefoot.parallel.layout import Layout
from surefoot.parallel.pipeline import placement as pipeline_ranks
from surefoot.parallel.pipeline import stages
from surefoot.parallel.placement import Part, Placement, coordinates, everything, place, sharded
from surefoot.parallel.process import Processes, among_peers
from surefoot.trust.digest import Digest, Tree, digests, layer_of, tree
from surefoot.trust.replicas import Mismatch, mismatches

Group = tuple[int, ...]


class ReplicaError(NumericsError):
    """Copies of a tensor are not the same bits; `mismatches` are all that were found, `culprit` the first tensor."""

    def __init__(self, what: str, *, where: str, remedy: str, mismatches: tuple[Mismatch, ...]) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.mismatches, self.culprit = mismatches, mismatches[0].name


def replica_sets(decls: Mapping[str, ParamDecl], layout: Layout, spec: ModelSpec) -> dict[str, list[list[int]]]:
    """Return, for each parameter and router bias by canonical name, the sets of two or more ranks that hold the same part of it.

    decls: of the whole model. What nobody holds twice is left out.
    """
    holders = _pipeline_holders(decls, layout, spec)
    parts: dict[ParamDecl, list[Placement]] = {}
    for decl in set(decls.values()):  # layers repeat a few declarations
        at = (coordinates(layout, rank) for rank in range(layout.tokens))  # pipeline ranks do not differ in their parts
        parts[decl] = [sharded(place(decl, layout, one), decl, layout, one) for one in at]
    found = {name: _alike(parts[decl], holders[layer_of(name)], layout) for name, decl in decls.items()}
    if spec.moe is not None and spec.moe.has_bias:
        whole = [everything((spec.moe.experts,))] * layout.tokens
        for layer in range(spec.layers):
            if spec.feed_forward(layer) == "moe":
                found[f"layers.{layer}.ffn.router_bias"] = _alike(whole, holders[f"layers.{layer}"], layout)
    return {name: sets for name, sets in found.items() if sets}


def _pipeline_holders(decls: Mapping[str, ParamDecl], layout: Layout, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the pipeline ranks that hold each layer, and each tensor outside the layers."""
    cut, ranks = stages(spec, layout), pipeline_ranks(layout)
    found = {f"layers.{layer}": (rank,) for layers, rank in zip(cut, ranks, strict=True) for layer in layers}
    ends = {ranks[0], ranks[-1]} if spec.tied_embeddings else {ranks[0]}
    outside = (name for name in decls if layer_of(name) == name)
    return found | {name: tuple(sorted(ends)) if name == "embed.weight" else (ranks[-1],) for name in outside}


def _alike(parts: list[Placement], pipeline: tuple[int, ...], layout: Layout) -> list[list[int]]:
    """Group the ranks of the `pipeline` ranks by the part they hold: `parts`, by place among the ranks of a pipeline rank."""
    groups: dict[Placement, list[int]] = {}
    for stage in pipeline:
        for rank, part in enumerate(parts):
            if all(part.local_shape):
                groups.setdefault(part, []).append(stage * layout.tokens + rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


@dataclass(frozen=True)
class Memberships:
    """`sets` as `replica_sets` has them; `of`: for each rank its groups, sorted; `most`: the largest number of groups of a rank."""

    sets: dict[str, list[list[int]]]
    of: dict[int, list[Group]]
    most: int


@lru_cache(maxsize=8)
def memberships(spec: ModelSpec, layout: Layout) -> Memberships:
    """Return who compares what with whom: the same on every process, without asking one."""
    sets = replica_sets(declarations(Transformer(spec, device="meta")), layout, spec)
    of: dict[int, set[Group]] = {}
    for group in {tuple(ranks) for held in sets.values() for ranks in held}:
        for rank in group:
            of.setdefault(rank, set()).add(group)
    return Memberships(sets, {rank: sorted(groups) for rank, groups in of.items()}, max(map(len, of.values()), default=0))


def check_replicas(parallel: ParallelModel, tensors: Mapping[str, Tensor | Part], processes: Processes, *, step: int = 0) -> None:
    """Raise `ReplicaError` on every process unless all copies of `tensors` are the same bits. Every process calls this.

    tensors: this process's parts, by canonical name ("model.<parameter>", "optimizer.<slot>.<parameter>", "ema.<parameter>", or
    the parameter's own); those that belong to no set are passed over. One small exchange when all is well.
    """
    known = memberships(parallel.model.spec, parallel.mesh.layout)
    if processes.size == 1 or known.most == 0:
        return
    members: dict[Group, list[str]] = {group: [] for group in known.of.get(processes.rank, [])}
    for name in tensors:
        for ranks in known.sets.get(parameter_of(name), ()):
            if processes.rank in ranks:
                members[tuple(ranks)].append(name)
    held = {name: tensors[name] for names in members.values() for name in names}
    found = digests({name: one.tensor if isinstance(one, Part) else one for name, one in held.items()})
    trees = {group: tree({name: found[name] for name in names}) for group, names in members.items()}
    suspect = _disagreeing(known, trees, processes)
    if suspect:
        mine = {group: {name: found[name] for name in names} for group, names in members.items() if group in suspect}
        raise _error(_walk_down(mine, trees, processes), step)


def _walk_down(mine: Mapping[Group, Mapping[str, Digest]], trees: Mapping[Group, Tree], processes: Processes) -> list[Mismatch]:
    """Return the tensors that differ: hashes of layers are exchanged first, then digests in the layers that differ.

    mine: of this process's groups that disagree.
    """
    layers = processes.gather({group: {layer: one.hash for layer, one in trees[group].layers.items()} for group in mine})
    sent: dict[str, tuple[Group, Digest]] = {}
    for group, found in mine.items():
        bad = {layer for rank in group for layer, said in layers[rank][group].items() if said != layers[group[0]][group].get(layer)}
        sent |= {name: (group, one) for name, one in found.items() if layer_of(name) in bad}
    answers = processes.gather(sent)
    sets: dict[str, list[Group]] = {}
    for answer in answers:
        for name, (group, _) in answer.items():
            if group not in sets.setdefault(name, []):
                sets[name].append(group)
    return mismatches(sets, {rank: {name: one for name, (_, one) in answer.items()} for rank, answer in enumerate(answers)})


def _disagreeing(known: Memberships, trees: Mapping[Group, Tree], processes: Processes) -> set[Group]:
    """Return the groups whose roots are not all the same, by one exchange of [most groups of a rank, 2] int64 from each process."""
    roots = torch.zeros(known.most, 2, dtype=torch.int64)
    for index, group in enumerate(known.of.get(processes.rank, [])):
        data = bytes.fromhex(trees[group].root)
        roots[index] = torch.tensor([int.from_bytes(data[:8], "little", signed=True), int.from_bytes(data[8:], "little", signed=True)])
    every = [torch.empty_like(roots) for _ in range(processes.size)]
    with among_peers():
        dist.all_gather(every, roots)
    said: dict[Group, set[tuple[int, ...]]] = {}
    for rank, groups in known.of.items():
        for group, root in zip(groups, every[rank].tolist(), strict=False):
            said.setdefault(group, set()).add(tuple(root))
    return {group for group, values in said.items() if len(values) > 1}


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor of a run's state belongs to: "optimizer.m.norm.weight" to "norm.weight"."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        return rest.partition(".")[2]
    return rest if kind in ("model", "ema") else name


def _error(wrong: list[Mismatch], step: int) -> ReplicaError:
    first = wrong[0]
    ranks = f"{', '.join(map(str, first.ranks[:-1]))} and {first.ranks[-1]}"
    suspects = ", ".join(map(str, first.suspects))
    told = f"rank {suspects} differs from the rest" if suspects else "which of them is right cannot be told"
    more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    return ReplicaError(
        f"{first.name} is not the same on its ranks {ranks} ({told}{more})",
        where=f"step {step}" if step else "",
        remedy="nothing of this step was saved; resume from the last checkpoint, on another machine if it comes again",
        mismatches=tuple(wrong),
    )
