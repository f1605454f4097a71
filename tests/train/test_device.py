"""Training on another device, as far as a machine without one can tell: fake tensors know their device, and refuse to meet another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from surefoot.core.errors import ConfigError
from surefoot.parallel import Layout, Processes, make_mesh
from surefoot.parallel.process import device_of
from surefoot.train.recording import trial_rows
from surefoot.train.setup import open_session
from surefoot.train.step import accumulate
from tests.parallel.cells import SPECS
from tests.train.conftest import Configure


@pytest.fixture(scope="module")
def device() -> torch.device:
    """A device of torch's own making that has autograd and no memory."""
    backend_registration._setup_privateuseone_for_python_backend("fictitious")
    torch.fictitious.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return torch.device("fictitious", 0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"train": {"precision": "bfloat16", "ema_decay": 0.9}},
        {"optimizer": {"kind": "muon"}},
    ],
    ids=str,
)
def test_a_step_stays_on_its_device(configure: Configure, device: torch.device, name: str, tables: dict[str, Any]) -> None:
    train = {"micro_batch_size": 4, "precision": "float32"} | tables.get("train", {})
    config = configure(**tables | {"train": train}).model_copy(update={"model": SPECS[name]})
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
        tensors = session.state.tensors()
    del tensors["rng.torch"]
    held = {"loss": sums, "norm": norm, **tensors, **{f"gradient of {name}": part for name, part in parts.items()}}
    assert len(tensors) > 10
    assert {key: str(one.device) for key, one in held.items() if one.device != device} == {}  # type: ignore[union-attr]


def test_the_device_of_a_process_is_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_of("auto", {"LOCAL_RANK": "6"}) == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)]
    assert device_of("cpu", {"LOCAL_RANK": "1"}) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", {}) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"train\.device: this torch sees no GPU"):
        device_of("cuda", {})
