"""`surefoot train` and `surefoot resume`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.face import PATH, common, show
from surefoot.cli.watching import TrainingProgress
from surefoot.core import terminal
from surefoot.core.events import Event
from surefoot.core.files import write_atomic

if TYPE_CHECKING:
    from surefoot.core.rundir import Run
    from surefoot.train import Summary, TrainConfig

NPROC = click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes on this machine.  [default: what the layout asks for]",
)


@click.command("train")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--overwrite", is_flag=True, help="Replace a run that stands in the run directory.")
@NPROC
@common
def train_command(config: Path, overrides: tuple[str, ...], overwrite: bool, nproc: int | None, as_json: bool) -> int:
    """Train as CONFIG (TOML) says, with OVERRIDES such as train.steps=100. Under torchrun this is one of its processes."""
    from surefoot.core.config import load
    from surefoot.train import TrainConfig

    settings = load(TrainConfig, config, overrides)
    count = _processes(settings, nproc)
    if count > 1:
        check(settings, count)
        return _launch(count)
    return _run(settings, fresh=True, overwrite=overwrite, as_json=as_json)


@click.command("resume")
@click.argument("run", type=PATH)
@click.argument("overrides", nargs=-1)
@NPROC
@common
def resume_command(run: Path, overrides: tuple[str, ...], nproc: int | None, as_json: bool) -> int:
    """Go on with RUN from its last whole checkpoint; OVERRIDES may lengthen it, e.g. train.steps=2000."""
    from surefoot.core.config import load
    from surefoot.core.rundir import require
    from surefoot.train import TrainConfig

    settings = load(TrainConfig, require(run) / "config.toml", [*overrides, f"run={json.dumps(str(run))}"])
    count = _processes(settings, nproc)
    if count > 1:
        check(settings, count)
        return _launch(count)
    return _run(settings, fresh=False, overwrite=False, as_json=as_json)


def _processes(settings: TrainConfig, asked: int | None) -> int:
    """Return how many processes to start here: none more where a launcher already started them."""
    return 1 if "WORLD_SIZE" in os.environ else asked or settings.layout.world_size


def _launch(nproc: int) -> int:
    """Start this very command as `nproc` processes of one group."""
    from surefoot.parallel.process import launch

    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--nproc":
            next(arguments, None)
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return launch(nproc, ["-m", "surefoot", *kept])


def _run(settings: TrainConfig, *, fresh: bool, overwrite: bool, as_json: bool) -> int:
    """Run or resume on this process; the first of a group holds the run directory and speaks for all."""
    from surefoot.core.config import dumps
    from surefoot.core.rundir import Run
    from surefoot.train import fit

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check(settings, size)
    if rank > 0:
        return 130 if fit(settings, None, resume=not fresh).interrupted else 0
    with Run.create(settings.run, settings, overwrite=overwrite) if fresh else Run.open(settings.run) as run:
        if not fresh:
            write_atomic(run.config_path, dumps(settings))
            run.record_environment()
        summary = watched_fit(settings, run, resume=not fresh, quiet=as_json)
        _tell(summary, run, as_json)
    return 130 if summary.interrupted else 0


def check(settings: TrainConfig, processes: int) -> None:
    """Raise the `InputError` that training would meet, before a run directory is made."""
    from surefoot.data import Corpus
    from surefoot.parallel.pipeline import schedule_of
    from surefoot.parallel.process import check_device
    from surefoot.train.config import check_corpus

    check_device(settings.train.device)
    check_corpus(settings, Corpus.open(settings.data))
    layout = settings.layout.for_world(processes)
    layout.check(processes)
    layout.check_model(settings.model, settings.data.sequence_length)
    micro_batches = settings.micro_batches(layout.data)
    if layout.pipeline > 1:
        schedule_of(layout, micro_batches)


def watched_fit(settings: TrainConfig, run: Run, *, resume: bool = False, quiet: bool = False, title: str = "train") -> Summary:
    """Train under a progress bar, with the trackers that the settings name."""
    from surefoot.core.trackers import open_trackers
    from surefoot.train import fit

    with (
        open_trackers(settings.trackers, run.path, settings.model_dump(mode="json")) as trackers,
        TrainingProgress(settings.train.steps, title=title, quiet=quiet) as progress,
    ):

        def on_event(kind: str, fields: dict[str, Any]) -> None:
            event = Event(time.time(), kind, fields)
            progress(event)
            trackers(event)

        return fit(settings, run, on_event, resume=resume)


def _tell(summary: Summary, run: Run, as_json: bool) -> None:
    evaluation = summary.evaluation
    rows = [("steps", f"{summary.step:,}"), ("training loss", f"{summary.loss:.4f}"), ("tokens/s", f"{summary.tokens_per_s:,.0f}")]
    if evaluation is not None:
        rows += [("validation loss", f"{evaluation.loss:.4f}"), ("validation bits per byte", f"{evaluation.bits_per_byte:.4f}")]
    rows += [("run", str(run.path)), ("checkpoints", str(run.checkpoints))]
    data = {
        "run": str(run.path),
        "step": summary.step,
        "loss": summary.loss,
        "interrupted": summary.interrupted,
        "tokens_per_s": summary.tokens_per_s,
        "evaluation": evaluation.__dict__ if evaluation else None,
    }
    show(as_json, "Stopped" if summary.interrupted else "Trained", rows, data)
    if summary.interrupted:
        terminal.note(f"saved at step {summary.step}; go on with: surefoot resume {run.path}")
