from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.trackers import Trackers, open_trackers


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.seen.append((step, numbers))

    def close(self) -> None:
        return None


def test_numbers_of_steps_and_evaluations_reach_every_sink() -> None:
    first, second = Recorder(), Recorder()
    trackers = Trackers([first, second])
    trackers(Event(0.0, "start", {"seed": 1}))
    trackers(Event(1.0, "step", {"step": 5, "loss": 2.5, "note": "text", "flag": True}))
    trackers(Event(2.0, "eval", {"step": 5, "bits_per_byte": 1.5}))
    assert first.seen == second.seen == [(5, {"train/loss": 2.5}), (5, {"eval/bits_per_byte": 1.5})]


def test_a_missing_library_is_a_config_error_with_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'surefoot\[trackers\]'"), open_trackers(["wandb"], tmp_path, {}):
        pass


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_trackers(["tensorboard"], tmp_path, {"seed": 1}) as trackers:
        trackers(Event(1.0, "step", {"step": 1, "loss": 2.0}))
        trackers(Event(1.0, "step", {"step": 2, "loss": 1.0}))
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [(point.step, point.value) for point in reader.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
