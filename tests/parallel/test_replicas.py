"""Who holds copies of what, against brute force; and what a check among real processes says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.models import ModelSpec, Transformer, declarations
from surefoot.parallel import Layout, Mesh, Processes, make_mesh, parallelise
from surefoot.parallel.data import local
from surefoot.parallel.pipeline import keep_stages
from surefoot.parallel.placement import coordinates, place, sharded
from surefoot.parallel.replicas import ReplicaError, check_replicas, memberships, parameter_of, replica_sets
from tests.parallel.cells import SPECS
from tests.parallel.test_placement import LAYOUTS
from tests.spawning import run_ranks

PIPELINES = [
    Layout(pipeline=2),
    Layout(pipeline=4, schedule="gpipe"),
    Layout(pipeline=2, schedule="zbv", replicate=2),
    Layout(pipeline=2, schedule="interleaved", stages_per_rank=2, tensor=2),
    Layout(pipeline=2, replicate=2, tensor=2),
    Layout(pipeline=2, shard=2),
    Layout(pipeline=2, replicate=2, tensor=2, expert=4),
]


def by_force(spec: ModelSpec, layout: Layout) -> dict[str, list[list[int]]]:
    """Build every rank's part of the model, its elements numbered, and compare the numbers."""
    holders: dict[tuple[str, bytes], list[int]] = {}
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        model = Transformer(spec, device="meta")
        if layout.pipeline > 1:
            keep_stages(model, Mesh(layout, at, Processes(rank, layout.world_size)))
        for name, decl in declarations(model).items():
            numbers = torch.arange(torch.Size(decl.shape).numel()).view(decl.shape)
            part = sharded(place(decl, layout, at), decl, layout, at).take(numbers)
            if part.numel():
                holders.setdefault((name, part.numpy().tobytes()), []).append(rank)
        for name, _ in model.named_buffers():
            if name.endswith("router_bias"):
                holders.setdefault((name, b""), []).append(rank)
    found: dict[str, list[list[int]]] = {}
    for (name, _), ranks in holders.items():
        if len(ranks) > 1:
            found.setdefault(name, []).append(ranks)
    return found


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", [*LAYOUTS, *PIPELINES], ids=str)
def test_sets_are_the_ranks_whose_parts_are_the_same_elements(name: str, layout: Layout) -> None:
    spec = SPECS[name]
    found = replica_sets(declarations(Transformer(spec, device="meta")), layout, spec)
    expected = by_force(spec, layout)
    assert {key: sorted(sets) for key, sets in found.items()} == {key: sorted(sets) for key, sets in expected.items()}


def test_the_two_ends_of_a_pipeline_share_a_tied_embedding() -> None:
    tied, untied = SPECS["gqa"], SPECS["mla"]
    assert memberships(tied, Layout(pipeline=4)).sets == {"embed.weight": [[0, 3]]}
    assert memberships(untied, Layout(pipeline=4)).sets == {}
    assert memberships(tied, Layout(pipeline=2, schedule="zbv")).sets == {}  # a V: one rank holds both ends


def test_a_process_takes_part_in_few_exchanges_however_many_there_are() -> None:
    layout = Layout(pipeline=2, replicate=4, shard=4, tensor=4, expert=4)
    assert layout.world_size == 128
    assert memberships(SPECS["moe"], layout).most <= 4


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("model.layers.0.ffn.up.weight", "layers.0.ffn.up.weight"),
        ("optimizer.master.embed.weight", "embed.weight"),
        ("ema.norm.weight", "norm.weight"),
        ("layers.0.ffn.up.weight", "layers.0.ffn.up.weight"),
    ],
)
def test_state_follows_its_parameter(name: str, parameter: str) -> None:
    assert parameter_of(name) == parameter


def flips(processes: Processes, spec: ModelSpec, layout: Layout, cases: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """Flip the lowest bit of a tensor on one rank, for each case; return (culprit, message) of each check."""
    parallel = parallelise(spec, make_mesh(layout, processes), 3, dtype=torch.float32)
    tensors = {name: local(parameter.detach()) for name, parameter in parallel.parameters.items()}
    tensors |= {name: buffer for name, buffer in parallel.model.named_buffers() if name.endswith("router_bias")}
    found = []
    for rank, name in [(-1, ""), *cases, (-1, "")]:
        if rank == processes.rank:
            tensors[name].view(-1).view(torch.uint8)[0] ^= 1
        try:
            check_replicas(parallel, tensors, processes, step=7)
            found.append(("", ""))
        except ReplicaError as error:
            found.append((error.culprit, str(error)))
        if rank == processes.rank:
            tensors[name].view(-1).view(torch.uint8)[0] ^= 1
    return found


@pytest.mark.parametrize(
    ("spec", "layout", "cases"),
    [
        (
            "moe",
            Layout(replicate=4, expert=2),
            [
                (2, "norm.weight", "0, 1, 2 and 3 (rank 2 differs from the rest)"),
                (3, "layers.1.ffn.experts.down", "1 and 3 (which of them is right cannot be told)"),
                (0, "layers.3.ffn.router.weight", "0, 1, 2 and 3 (rank 0 differs from the rest)"),
            ],
        ),
        (
            "deepseek",
            Layout(pipeline=2, tensor=2),
            [
                (3, "layers.3.ffn.router_bias", "2 and 3 (which"),
                (1, "layers.0.mixer_norm.weight", "0 and 1 (which"),
                (0, "embed.weight", ""),
            ],
        ),
        ("gqa", Layout(pipeline=2, tensor=2), [(3, "embed.weight", "1 and 3 (which"), (2, "norm.weight", "2 and 3 (which")]),
        ("gqa", Layout(replicate=2, shard=2), [(1, "layers.0.ffn.down.weight", "1 and 3 (which"), (2, "embed.weight", "0 and 2 (which")]),
        ("gqa", Layout(shard=2), [(1, "embed.weight", "")]),
    ],
    ids=str,
)
def test_one_bit_on_one_process_is_found_and_named_by_all(
    spec: str, layout: Layout, cases: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    """What nobody else holds cannot be found, and nothing is said of it."""
    said = run_ranks(flips, layout.world_size, tmp_path, SPECS[spec], layout, [case[:2] for case in cases])
    assert all(one == said[0] for one in said)
    assert said[0][0] == said[0][-1] == ("", "")
    for (_, name, ranks), (culprit, message) in zip(cases, said[0][1:-1], strict=True):
        assert culprit == (name if ranks else "")
        if ranks:
            assert message.startswith(f"step 7: {name} is not the same on its ranks {ranks}")
            assert "\n" not in message
            assert "nothing of this step was saved" in message
