"""Every model kind under every kind of layout is the same computation: float64, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.parallel import Layout, Processes, make_mesh
from tests.parallel.cells import SPECS, Outcome, outcome, worst
from tests.spawning import run_ranks

LAYOUTS: dict[str, dict[str, object]] = {
    "tensor2": {"tensor": 2},
    "ring2": {"context": 2},
    "ulysses2": {"context": 2, "attention": "ulysses"},
    "expert2": {"replicate": 2, "expert": 2},
    "shard2": {"shard": 2},
    "pipeline2": {"pipeline": 2},
    "pipeline2_gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pipeline2_interleaved": {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
    "pipeline2_zero_bubble": {"pipeline": 2, "schedule": "zero_bubble"},
    "pipeline2_zbv": {"pipeline": 2, "schedule": "zbv"},
    "tensor4": {"tensor": 4},
    "ring4": {"context": 4},
    "tensor2_context2": {"tensor": 2, "context": 2},
    "shard2_tensor2": {"shard": 2, "tensor": 2},
    "replicate2_shard2": {"replicate": 2, "shard": 2},
    "pipeline2_tensor2": {"pipeline": 2, "tensor": 2, "schedule": "zbv"},
    "pipeline2_shard2": {"pipeline": 2, "shard": 2},
    "pipeline2_ring2": {"pipeline": 2, "context": 2, "schedule": "zero_bubble"},
    "pipeline4": {"pipeline": 4},
    "shard2_context2_expert4": {"shard": 2, "context": 2, "expert": 4},
    "replicate2_shard2_tensor2_expert2": {"replicate": 2, "shard": 2, "tensor": 2, "expert": 2},
    "pipeline2_replicate2_tensor2_expert4": {"pipeline": 2, "replicate": 2, "tensor": 2, "expert": 4},
    "pipeline2_context2_tensor2": {"pipeline": 2, "context": 2, "tensor": 2, "attention": "ulysses"},
    "shard2_context2_tensor2_expert8": {"shard": 2, "context": 2, "tensor": 2, "expert": 8},
}


def fits(spec_name: str, layout: dict[str, object]) -> bool:
    return SPECS[spec_name].moe is not None or "expert" not in layout


Cells = dict[tuple[str, str], tuple[float, str]]
"""(model, layout) -> its largest relative error, and where."""


def all_models(processes: Processes, layouts: list[dict[str, object]], file: Path) -> Cells:
    expected: dict[str, Outcome] = torch.load(file, weights_only=False)
    found = {}
    for degrees in layouts:
        layout = Layout(**degrees)
        mesh = make_mesh(layout, processes)  # for all models: each group of gloo keeps threads of its own
        for name, spec in SPECS.items():
            if fits(name, degrees):
                found[name, str(degrees)] = worst(outcome(processes, spec, layout, mesh=mesh), expected[name])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("expected") / "outcomes.pt"
    torch.save({name: outcome(Processes(), spec, Layout()) for name, spec in SPECS.items()}, file)
    return file


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_a_layout_changes_nothing(size: int, tmp_path: Path, expected: Path) -> None:
    layouts = [degrees for degrees in LAYOUTS.values() if Layout(**degrees).world_size == size]
    for rank, cells in enumerate(run_ranks(all_models, size, tmp_path, layouts, expected, timeout_s=1200.0)):
        for (model, layout), (error, where) in cells.items():
            assert error < 1e-12, f"rank {rank}, {model} under {layout}: {where} is off by {error:.1e}"
