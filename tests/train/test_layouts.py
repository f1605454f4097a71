"""Whole runs under layouts: started in one, resumed in another, evaluated on the way, against one process all along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.core.errors import LayoutError
from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.parallel import Processes
from surefoot.train import TrainConfig, fit
from surefoot.train.checkpoint import step_path
from tests.spawning import run_ranks
from tests.train.conftest import Configure
from tests.train.test_checkpoint import saved_tensors

MODEL = {
    "vocab_size": 300,
    "max_positions": 64,
    "dim": 16,
    "layers": 4,
    "pattern": ["attention", "conv"],
    "ffn_pattern": ["dense", "moe"],
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 8, "qkv_bias": True},
    "conv": {},
    "ffn": {"hidden": 24},
    "moe": {"experts": 4, "top_k": 2, "hidden": 12, "balance": "bias", "router": "sigmoid", "bias_rate": 0.01},
    "tied_embeddings": True,
}
TABLES: dict[str, Any] = {
    "model": MODEL,
    "train": {"steps": 6, "micro_batch_size": 2, "ema_decay": 0.9, "eval_every": 3},
    # A key's gradient for its bias is zero but for rounding, which a small eps would turn into an update.
    "optimizer": {"kind": "muon", "lr": 3e-3, "eps": 1e-5},
    "checkpoint": {"every": 3},
}


def until(processes: Processes, config: TrainConfig, step: int, resume: bool) -> None:
    steps: list[int] = []

    def seen(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            steps.append(fields["step"])

    if processes.rank > 0:
        fit(config, None, None, resume=resume, stop=lambda: False)
        return
    with Run.open(config.run) if resume else Run.create(config.run, config) as run:
        fit(config, run, seen, resume=resume, stop=lambda: step in steps)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tensor": 2}, {"context": 2}),
        ({"pipeline": 2, "schedule": "zero_bubble"}, {"replicate": 2, "expert": 2}),
        ({"shard": 2}, {"pipeline": 2, "schedule": "zbv"}),
        pytest.param({"shard": 2, "tensor": 2, "expert": 2}, {"pipeline": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_may_change_its_layout(configure: Configure, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]) -> None:
    straight = configure("straight", **TABLES)
    until(Processes(), straight, 6, False)
    for name, layout, step in (("first", first, 3), ("then", then, 6)):
        config = configure("run", **TABLES, layout=layout)
        run_ranks(until, config.layout.world_size, tmp_path / name, config, step, name == "then")

    expected, found = (saved_tensors(step_path(tmp_path / name / "checkpoints", 6)) for name in ("straight", "run"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # A second moment of a gradient that is zero but for rounding is zero but for rounding.
        scale = float(tensor.double().abs().max()) + 1e-18
        assert float((found[name].double() - tensor.double()).abs().max()) < 1e-11 * scale, name
    logs = [[event for event in read(tmp_path / name / "events.jsonl") if event.kind in ("step", "eval")] for name in ("straight", "run")]
    assert len(logs[0]) == len(logs[1])
    for ours, theirs in zip(logs[1], logs[0], strict=True):
        for key in {"loss", "bits_per_byte", "grad_norm"} & theirs.fields.keys():
            assert ours.fields[key] == pytest.approx(theirs.fields[key], rel=1e-11), (ours, theirs)


def refused(processes: Processes, config: TrainConfig) -> str:
    with pytest.raises(LayoutError) as caught:
        fit(config, None)
    return str(caught.value)


def test_a_layout_the_model_cannot_take_is_refused_before_anything_is_written(configure: Configure, tmp_path: Path) -> None:
    config = configure(**TABLES, layout={"tensor": 4})
    messages = run_ranks(refused, 4, tmp_path / "ranks", config)
    assert all(r"layout.tensor: 2 key/value heads do not divide among 4 — use 2 or 1" in message for message in messages)
    assert not (tmp_path / "run" / "checkpoints").exists()
