"""Steps on a device of torch's own making that has autograd and no memory: python -m tests.train.on_device prints what strayed from it.

In a process of its own: autograd learns of devices when it first runs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from surefoot.core.config import parse
from surefoot.parallel import Layout, Processes, make_mesh
from surefoot.train import TrainConfig
from surefoot.train.recording import trial_rows
from surefoot.train.setup import open_session
from surefoot.train.step import accumulate
from tests.parallel.cells import SPECS

RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"train": {"precision": "bfloat16", "ema_decay": 0.9}},
    "muon": {"optimizer": {"kind": "muon"}},
}


def strayed(name: str, tables: dict[str, Any], device: torch.device) -> dict[str, str]:
    """Take a step of the model `name`; return the tensors that are not on `device`, and where they are."""
    train = {"steps": 4, "batch_size": 8, "micro_batch_size": 4} | tables.get("train", {})
    base = {"run": "none", "model": {}, "data": {"path": "none", "sequence_length": 32}, "train": train}
    spec = SPECS[name]
    config = parse(TrainConfig, base | tables | {"train": train, "model": spec.model_dump(mode="json")}, where="here")
    rows = trial_rows(config, 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(getattr(rows, name)) for name in ("tokens", "labels", "positions", "documents")}
        session = open_session(config, Processes(), resume=False, mesh=make_mesh(Layout(), Processes(), device))
        part = session.feed.split(replace(rows, **fakes))
        sums = accumulate(session, [part, part], 10)
        parts = session.sync.finish()
        norm = session.parallel.norm(parts)
        session.state.optimizer.step(parts, lr=1e-3, clip=0.5)
        session.balance_experts()
        session.state.update_ema(config.train.ema_decay)
        held = {"loss": sums, "norm": norm, **session.state.tensors(), **{f"gradient of {name}": part for name, part in parts.items()}}
    del held["rng.torch"]
    assert len(held) > 20
    return {key: str(one.device) for key, one in held.items() if one is not None and one.device != device}


if __name__ == "__main__":
    backend_registration._setup_privateuseone_for_python_backend("fictitious")
    torch.fictitious.get_amp_supported_dtype = lambda: [torch.bfloat16]
    where = torch.device("fictitious", 0)
    print(json.dumps({f"{name}, {run}": strayed(name, tables, where) for name in SPECS for run, tables in RUNS.items()}))
