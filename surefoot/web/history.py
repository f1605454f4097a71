"""A run as its event log tells it: series over steps, evaluations, checkpoints and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.core.events import Event


@dataclass(frozen=True)
class History:
    """What happened, in step order. A step that was done again after a resume counts as it was done last."""

    steps: tuple[Mapping[str, Any], ...]
    evals: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[Mapping[str, Any], ...]
    starts: int
    ending: str
    wall_s: float

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (steps, values) of the numbers recorded under `name`."""
        return _series(self.steps, name)

    def eval_series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (steps, values) of the evaluations' `name`."""
        return _series(self.evals, name)

    @property
    def tokens(self) -> float:
        """Tokens of all recorded steps."""
        return sum(self.series("tokens")[1])

    def last(self, name: str) -> float | None:
        """Return the latest number recorded under `name` by a step."""
        values = self.series(name)[1]
        return values[-1] if values else None

    def median(self, name: str) -> float | None:
        """Return the median over steps of `name`."""
        values = sorted(self.series(name)[1])
        return values[len(values) // 2] if values else None


def read_history(events: Iterable[Event]) -> History:
    """Return the `History` that `events` tell; pure."""
    by_step: dict[int, Mapping[str, Any]] = {}
    evals: dict[int, Mapping[str, Any]] = {}
    checkpoints: dict[str, Mapping[str, Any]] = {}
    starts, ending, wall_s = 0, "not ended", 0.0
    began = previous = None
    for event in events:
        step = int(event.fields.get("step") or 0)
        match event.kind:
            case "start":
                starts, ending, began = starts + 1, "under way, or cut off", event.time
            case "step":
                by_step[step] = event.fields
            case "eval":
                evals[step] = event.fields
            case "checkpoint":
                checkpoints[str(event.fields.get("path", step))] = event.fields
            case "finish" | "interrupt" | "error":
                words = {"finish": "finished", "interrupt": "interrupted", "error": f"failed: {event.fields.get('message', '')}"}
                ending = words[event.kind]
        if previous is not None and began is not None and event.kind != "start":
            wall_s += max(0.0, event.time - previous)
        previous = event.time
    ordered = tuple(by_step[step] for step in sorted(by_step))
    return History(ordered, tuple(evals[step] for step in sorted(evals)), tuple(checkpoints.values()), starts, ending, wall_s)


def _series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    points = [(float(record["step"]), float(record[name])) for record in records if _number(record.get(name)) and "step" in record]
    return [step for step, _ in points], [value for _, value in points]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
