"""Trackers: sinks that show a run's events in TensorBoard, Weights & Biases or MLflow. The event log stays the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from surefoot.core.errors import ConfigError
from surefoot.core.events import Event

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class Tracker(Protocol):
    """Takes the numbers of a step under their names, and is closed at the end."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers fed from events; call it with each `Event`."""

    def __init__(self, sinks: Iterable[Tracker]) -> None:
        self.sinks = tuple(sinks)

    def __call__(self, event: Event) -> None:
        """Hand the numbers of a `step` or `eval` event to every tracker, named ``train/loss``, ``eval/bits_per_byte``, ..."""
        prefix = {"step": "train", "eval": "eval"}.get(event.kind)
        if prefix is None or not self.sinks:
            return
        numbers = {f"{prefix}/{name}": float(value) for name, value in event.fields.items() if name != "step" and _is_number(value)}
        for sink in self.sinks:
            sink.log(int(event.fields.get("step", 0)), numbers)


@contextmanager
def open_trackers(names: Iterable[TrackerName], run: Path, config: Mapping[str, Any]) -> Iterator[Trackers]:
    """Open the trackers `names` for the run directory `run`, and close them at the end.

    Raises `ConfigError` naming the package to install when a tracker's library is missing.
    """
    makers: dict[TrackerName, Callable[[Path, Mapping[str, Any]], Tracker]] = {
        "tensorboard": _TensorBoard,
        "wandb": _WandB,
        "mlflow": _MLflow,
    }
    trackers = Trackers([makers[name](run, config) for name in names])
    try:
        yield trackers
    finally:
        for sink in trackers.sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        _require("tensorboard")
        module = _require("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(str(run / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {name} = {value}" for name, value in _flat(config).items()))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WandB:
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.run = _require("wandb").init(project="surefoot", name=run.name, dir=str(run), config=dict(config), resume="allow", id=run.name)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.mlflow = _require("mlflow")
        self.mlflow.set_experiment("surefoot")
        self.mlflow.start_run(run_name=run.name)
        self.mlflow.log_params(_flat(config))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


def _require(module: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        missing = error.name or package
        raise ConfigError(
            f"tracker needs '{missing}', which is not installed", where="train.trackers", remedy="pip install 'surefoot[trackers]'"
        ) from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
