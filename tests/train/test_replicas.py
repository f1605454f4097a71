"""A bit that flips on one process of a run is found, named, and never saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.parallel import Processes
from surefoot.parallel.replicas import ReplicaError
from surefoot.train import TrainConfig, fit
from surefoot.train.checkpoint import list_steps
from surefoot.train.setup import Session
from surefoot.train.state import held
from tests.spawning import run_ranks
from tests.train.conftest import MODEL, MOE, Configure

balance_experts = Session.balance_experts


def flipping(name: str, step: int) -> Any:
    """Return what ends a step, with a flip of the lowest bit of tensor `name` at the end of `step`."""

    def flipped(session: Session) -> None:
        balance_experts(session)
        if session.state.step + 1 == step:
            held(session.state.tensors()[name]).view(-1).view(torch.uint8)[0] ^= 1

    return flipped


def message(processes: Processes, config: TrainConfig) -> str:
    try:
        if processes.rank == 0:
            with Run.create(config.run, config) as run:
                fit(config, run)
        else:
            fit(config, None)
    except ReplicaError as error:
        return str(error)
    return ""


def clean_and_flipped(processes: Processes, clean: TrainConfig, flipped: TrainConfig, name: str, rank: int, step: int) -> tuple[str, str]:
    first = message(processes, clean)
    if processes.rank == rank:
        Session.balance_experts = flipping(name, step)  # type: ignore[method-assign]
    return first, message(processes, flipped)


@pytest.mark.parametrize(
    ("tables", "name", "rank", "says"),
    [
        ({"layout": {"replicate": 2}, "train": {"precision": "bfloat16"}}, "model.layers.1.ffn.down.weight", 1, "0 and 1 (which"),
        (
            {"layout": {"replicate": 3}, "train": {"batch_size": 6}},
            "optimizer.m.layers.0.mixer.qkv.weight",
            1,
            "0, 1 and 2 (rank 1 differs",
        ),
        (
            {"layout": {"tensor": 2}, "model": MODEL | {"attention": {"heads": 2, "kv_heads": 2, "head_dim": 8}}},
            "optimizer.v.norm.weight",
            0,
            "",
        ),
        ({"layout": {"pipeline": 2}, "model": MODEL | {"tied_embeddings": True}}, "model.embed.weight", 1, "0 and 1 (which"),
        ({"layout": {"replicate": 2, "expert": 2}, "model": MOE}, "model.layers.1.ffn.router_bias", 0, "0 and 1 (which"),
        pytest.param(
            {"layout": {"replicate": 2, "shard": 2}, "train": {"ema_decay": 0.9}},
            "ema.embed.weight",
            3,
            "1 and 3 (which",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_flipped_bit_halts_the_run_before_it_is_saved(
    configure: Configure, tmp_path: Path, tables: dict[str, Any], name: str, rank: int, says: str
) -> None:
    """Two steps of a clean run pass; the flip of step 3 is found before the checkpoint of step 4, and that of step 2 stands."""
    every = {"checkpoint": {"every": 2}, "trust": {"hash_every": 1}}
    tables = {"train": {}} | tables
    clean, flipped = configure("clean", **tables, **every), configure("flipped", **tables, **every)
    size = clean.layout.world_size
    found = run_ranks(clean_and_flipped, size, tmp_path / "ranks", clean, flipped, name, rank, 3)
    assert all(one == found[0] for one in found)
    assert found[0][0] == ""
    assert found[0][1].startswith(f"step 3: {name} is not the same on its ranks {says}")
    assert list_steps(Path(clean.run) / "checkpoints") == [2, 4]
    assert list_steps(Path(flipped.run) / "checkpoints") == [2]
    errors = [event for event in read(Path(flipped.run) / "events.jsonl") if event.kind == "error"]
    assert [event.fields["culprit"] for event in errors] == [name]


@pytest.mark.parametrize(("hash_every", "saved"), [(100, []), (0, [4])])
def test_the_check_comes_before_each_save_unless_it_is_off(configure: Configure, tmp_path: Path, hash_every: int, saved: list[int]) -> None:
    """Of a weight, which keeps the flip; a moment's lowest bit is forgotten within steps, and no harm done."""
    tables = {"layout": {"replicate": 2}, "trust": {"hash_every": hash_every}}
    clean, flipped = configure("clean", **tables), configure("flipped", **tables)
    found = run_ranks(clean_and_flipped, 2, tmp_path / "ranks", clean, flipped, "model.norm.weight", 1, 2)
    assert list_steps(Path(flipped.run) / "checkpoints") == saved
    assert bool(found[0][1]) == (not saved)
    assert found[0][1].startswith("step 4: " if hash_every else "")
