"""The report of a run: one HTML file that holds everything it shows."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from surefoot.core import events, rundir
from surefoot.core.errors import RunError
from surefoot.core.files import write_atomic
from surefoot.core.terminal import duration, quantity
from surefoot.web.history import History, read_history
from surefoot.web.plots import Plot, svg


@dataclass(frozen=True)
class Sample:
    """A text the model wrote: what it was given, and what it added."""

    prompt: str
    text: str


def write_report(run: Path, *, samples: Sequence[Sample] = (), extra: Mapping[str, Sequence[Sequence[Any]]] | None = None) -> Path:
    """Write ``report.html`` into the run directory `run` and return its path.

    `extra`: further tables, title -> rows. Raises `RunError` when `run` is none or has no step to show.
    """
    run = rundir.require(run)
    history = read_history(events.read(run / "events.jsonl"))
    if not history.steps:
        raise RunError("has no training step to report on yet", where=str(run), remedy="train it first")
    page = render(run, history, samples, extra or {})
    path = run / "report.html"
    write_atomic(path, page)
    return path


def render(run: Path, history: History, samples: Sequence[Sample], extra: Mapping[str, Sequence[Sequence[Any]]]) -> str:
    """Return the page as text."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        package_files("surefoot.web").joinpath("report.html").read_text(encoding="utf-8")
    )
    config = (run / "config.toml").read_text(encoding="utf-8")
    return template.render(
        name=run.name,
        summary=summary(history),
        plots=[svg(plot) for plot in plots(history) if not plot.empty],
        samples=samples,
        extra=extra,
        checkpoints=checkpoint_rows(history),
        environment=_environment_rows(run / "environment.json"),
        config=[(name, value) for name, value in _flat(tomllib.loads(config)).items()],
    )


def summary(history: History) -> list[tuple[str, str]]:
    """Return the few numbers a reader wants first."""
    last = history.steps[-1]
    best = min(history.eval_series("bits_per_byte")[1], default=None)
    mfu = history.median("mfu")
    rows = [
        ("ended", history.ending),
        ("steps", f"{int(last['step']):,}"),
        ("tokens", quantity(history.tokens)),
        ("time", duration(history.wall_s) + (f", in {history.starts} starts" if history.starts > 1 else "")),
        ("last training loss", _number(history.last("loss"))),
        ("best validation bits per byte", _number(best)),
        ("tokens/s (median)", _number(history.median("tokens_per_s"), ",.0f")),
        ("share of matmul peak (median)", None if mfu is None else f"{mfu:.0%}"),
    ]
    return [(name, value) for name, value in rows if value is not None]


def plots(history: History) -> list[Plot]:
    """Return the panels of the page; those without data are empty."""
    return [
        Plot("loss (nats per token)", (("training", *history.series("loss")), ("validation", *history.eval_series("loss")))),
        Plot("bits per byte", (("training", *history.series("bits_per_byte")), ("validation", *history.eval_series("bits_per_byte")))),
        Plot("learning rate", (("learning rate", *history.series("lr")),)),
        Plot("gradient norm", (("gradient norm", *history.series("grad_norm")),), log=True),
        Plot("tokens/s", (("tokens/s", *history.series("tokens_per_s")),)),
        Plot("share of measured matmul peak", (("MFU", *history.series("mfu")),), percent=True),
    ]


def checkpoint_rows(history: History) -> list[tuple[str, str, str]]:
    """Return (step, folder, cost) of each checkpoint written."""
    rows = []
    for record in history.checkpoints:
        cost = ", ".join(f"{name.removesuffix('_s')} {float(record[name]):.2f} s" for name in ("stall_s", "seconds") if name in record)
        rows.append((str(record.get("step", "")), Path(str(record.get("path", ""))).name, cost))
    return rows


def _environment_rows(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        return []
    return [(name, str(value)) for name, value in _flat(json.loads(path.read_text(encoding="utf-8"))).items()]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _number(value: float | None, form: str = ".3f") -> str | None:
    return None if value is None else format(value, form)
