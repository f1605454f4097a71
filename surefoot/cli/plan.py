"""`surefoot plan`: decisions ahead of a run, by prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.face import PATH, common
from surefoot.cli.flops import read_spec
from surefoot.core import terminal
from surefoot.core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from surefoot.plan import Prediction, Workload

PRECISIONS = ("float32", "bfloat16", "bfloat16_autocast")
HEADER = ("", "layout", "micro-batches", "schedule", "GB", "s/step", "tokens/s", "MFU %", "waits %", "sends %")


@click.group("plan")
def plan_command() -> None:
    """Decide ahead of a run, by prediction."""


@plan_command.command("layout")
@click.argument("model", type=PATH)
@click.option("--cluster", "cluster_path", type=PATH, required=True, help="TOML of the hardware; examples/cluster.toml is one.")
@click.option("--world", type=click.IntRange(min=1), help="Processes, one a device.  [default: all devices of the cluster]")
@click.option("--sequence", type=click.IntRange(min=1), help="Tokens a row.  [default: the config's, else the model's longest]")
@click.option("--batch", type=click.IntRange(min=1), help="Tokens a step, over all processes.  [default: the config's]")
@click.option("--precision", type=click.Choice(PRECISIONS), help="[default: the config's, else bfloat16]")
@click.option("--top", type=click.IntRange(min=1), default=8, show_default=True, help="Layouts to show.")
@common
def layout_command(
    model: Path,
    cluster_path: Path,
    world: int | None,
    sequence: int | None,
    batch: int | None,
    precision: str | None,
    top: int,
    as_json: bool,
) -> int:
    """Rank every way to train MODEL on a cluster by predicted memory and time.

    MODEL is a training TOML, a model directory or a transformers directory. Ends with exit code 1 when no layout fits.
    """
    from surefoot.cluster.hardware import Cluster
    from surefoot.core.config import load
    from surefoot.parallel import schedules
    from surefoot.plan import rank_layouts

    workload = _workload(model, sequence, batch, precision)
    cluster = load(Cluster, cluster_path)
    ranked = rank_layouts(workload, cluster, schedules, world=world, exact=top)
    fitting = sum(one.fits for one in ranked)
    if as_json:
        shown = {
            "layouts": [one.to_dict() | {"settings": _settings(one)} for one in ranked[:top]],
            "considered": len(ranked),
            "fitting": fitting,
        }
        print(json.dumps(shown), flush=True)
    else:
        devices = f"{world or cluster.devices} x {cluster.device.name}"
        title = f"{model}, {workload.rows} rows of {workload.sequence:,} tokens a step, {workload.precision}, on {devices}"
        terminal.table(title, [_row(place, one) for place, one in enumerate(ranked[:top], 1)], header=HEADER)
        print(f"\n{fitting} of {len(ranked)} layouts fit. {ranked[0].degrees}: {ranked[0].reason}.")
        if fitting:
            terminal.note(f"train with it: surefoot train CONFIG {' '.join(_settings(ranked[0]))}")
    return 0 if fitting else 1


def _workload(path: Path, sequence: int | None, batch: int | None, precision: str | None) -> Workload:
    from surefoot.core.config import read_toml
    from surefoot.plan import Workload

    spec, configured = read_spec(path)
    sequence = sequence or configured or spec.max_positions
    file = path / "config.toml" if path.is_dir() else path
    table: dict[str, Any] = read_toml(file) if file.is_file() else {}
    train = table.get("train", {})
    precision = precision or train.get("precision", "bfloat16")
    if precision not in PRECISIONS:
        raise ConfigError(f"no memory is predicted for {precision}", where=f"{path}: train.precision", remedy="give --precision bfloat16")
    rows = train.get("batch_size")
    if batch is not None:
        if batch % sequence:
            below = max(1, batch // sequence) * sequence
            raise InputError(f"{batch} tokens are no whole rows of {sequence}", where="--batch", remedy=f"use {below} or another multiple")
        rows = batch // sequence
    if not isinstance(rows, int):
        raise InputError("does not say how large a step is", where=str(path), remedy="give --batch TOKENS, e.g. --batch 1048576")
    optimizer = table.get("optimizer", {}).get("kind", "adamw")
    return Workload(spec, rows, sequence, precision, optimizer)  # type: ignore[arg-type]


def _settings(one: Prediction) -> list[str]:
    """Return what turns a configuration into one of this layout."""
    candidate = one.candidate
    found = [f"layout.{axis}={degree}" for axis, degree in vars(one.degrees).items() if degree > 1]
    if one.degrees.pipeline > 1:
        found += [f"layout.schedule={candidate.schedule}"]
        found += [f"layout.stages_per_rank={candidate.stages_per_rank}"] if candidate.schedule == "interleaved" else []
    found += [f"train.micro_batch_size={candidate.micro_batch}"]
    return found + (["train.recompute=true"] if candidate.recompute else [])


def _row(place: int, one: Prediction) -> tuple[str, ...]:
    candidate, time = one.candidate, one.time
    schedule = candidate.schedule if one.degrees.pipeline > 1 else "-"
    batches = f"{one.micro_batches} of {candidate.micro_batch}" + (", recomputed" if candidate.recompute else "")
    head = (str(place), str(one.degrees), batches, schedule, f"{one.memory.total / 1e9:.1f}")
    if time is None:
        return *head, "does not fit", "-", "-", "-", "-"
    least = "" if time.simulated else ">"
    sends = sum(time.parts.get(axis, 0.0) for axis in ("tensor", "context", "expert", "shard", "replicate")) / time.total_s
    return (
        *head,
        f"{least}{time.total_s:.3g}",
        f"{one.tokens_per_s:,.0f}",
        f"{100 * one.mfu:.1f}",
        f"{100 * time.bubble:.1f}",
        f"{100 * sends:.1f}",
    )
