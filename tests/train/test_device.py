"""Training on another device, as far as a machine without one can tell: fake tensors know their device, and refuse to meet another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.core.errors import ConfigError
from surefoot.parallel.process import device_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_step_stays_on_its_device() -> None:
    command = [sys.executable, "-m", "tests.train.on_device"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    strayed = json.loads(done.stdout)
    assert len(strayed) == 21
    assert {case: found for case, found in strayed.items() if found} == {}


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
