"""`surefoot data plan`, `reweight` and `audit`: a mixture before, during and after a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.cli.face import PATH, common, show
from surefoot.core import terminal

if TYPE_CHECKING:
    from surefoot.data.mixed import Mixed
    from surefoot.train import TrainConfig


@click.command("plan")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1)
@click.option("--steps", default=50, show_default=True, type=click.IntRange(min=1), help="Steps to plan.")
@common
def plan_command(config: Path, overrides: tuple[str, ...], steps: int, as_json: bool) -> None:
    """Plan the first steps of CONFIG's mixture: shares, padding, and how even the ranks are; nothing is trained."""
    from surefoot.core.config import load
    from surefoot.train import TrainConfig

    settings = load(TrainConfig, config, overrides)
    mixed = _mixed(settings)
    ranks, batch = settings.layout.data, settings.train.batch_size
    loader = mixed.loader(batch, ranks, settings.micro_batches(ranks))
    given, padding, uneven, even = [0] * len(mixed.names), [], [], []
    for step in range(1, steps + 1):
        plan = loader.plan(step)
        for row in plan.rows:
            for piece in row:
                given[piece.source] += piece.size
        padding.append(plan.padding(settings.data.sequence_length))
        before, after = loader.imbalance(step)
        uneven.append(before)
        even.append(after)
    total = max(1, sum(given))
    asked = loader.plan(steps).weights
    sizes = [int(source.starts[-1]) for source in loader.sources]
    shares = [tokens / total for tokens in given]
    empty, before, after = (sum(values) / steps for values in (padding, uneven, even))
    if as_json:
        told = {
            name: {"documents": source.documents, "tokens": size, "asked": weight, "given": share, "epochs": tokens / size}
            for name, source, size, weight, share, tokens in zip(mixed.names, loader.sources, sizes, asked, shares, given, strict=True)
        }
        found = {"steps": steps, "padding": empty, "imbalance_before": before, "imbalance_after": after, "sources": told}
        print(json.dumps(found))
        return
    rows = [
        (name, f"{source.documents:,}", f"{size:,}", f"{100 * weight:.2f}", f"{100 * share:.2f}", f"{tokens / size:.2f}")
        for name, source, size, weight, share, tokens in zip(mixed.names, loader.sources, sizes, asked, shares, given, strict=True)
    ]
    terminal.table(f"{steps} steps of {batch} rows", rows, header=("source", "documents", "tokens", "asked %", "given %", "epochs"))
    terminal.note(f"padding {100 * empty:.2f} %")
    if ranks > 1:
        terminal.note(f"attention of the busiest of {ranks} ranks over the mean: {before:.3f} as planned, {after:.3f} as arranged")


@click.command("reweight")
@click.argument("run", type=PATH)
@click.argument("weights", nargs=-1, required=True)
@common
def reweight_command(run: Path, weights: tuple[str, ...], as_json: bool) -> None:
    """Give RUN, which may be training, other WEIGHTS, such as web=2 code=1; sources that are left out give nothing from then on."""
    from surefoot.core.config import load
    from surefoot.core.errors import ConfigError
    from surefoot.core.rundir import require
    from surefoot.train import TrainConfig
    from surefoot.train.mixing import ask

    settings = load(TrainConfig, require(run) / "config.toml")
    names = [source.name for source in settings.data.sources]
    if not names:
        raise ConfigError("trains on a single dataset", where=str(run), remedy="weights are for runs with [[data.sources]]")
    found: dict[str, float] = {}
    for word in weights:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"'{word}' is not a weight", where="command line", remedy="write name=number, e.g. web=2") from None
    ask(run, found, names)
    rows = [(name, f"{weight:g}") for name, weight in found.items()]
    show(as_json, "Asked for; the run takes it up at its next step", rows, {"run": str(run), "weights": found})


@click.command("audit")
@click.argument("run", type=PATH)
@common
def audit_command(run: Path, as_json: bool) -> int:
    """Prove from RUN's ledger that no token was trained twice and none was lost. Exit code 1 when something does not add up."""
    from surefoot.core.config import load
    from surefoot.core.rundir import require
    from surefoot.data.ledger import audit, read
    from surefoot.train import TrainConfig
    from surefoot.train.mixing import LEDGER

    settings = load(TrainConfig, require(run) / "config.toml")
    mixed = _mixed(settings)
    sources = mixed.sources()
    found = audit(read(run / LEDGER), mixed.names, lambda source, n: sources[source].place(n)[1])
    total = max(1, sum(found.tokens))
    counts = list(zip(mixed.names, found.documents, found.tokens, strict=True))
    if as_json:
        told = {name: {"documents": documents, "tokens": tokens} for name, documents, tokens in counts}
        print(json.dumps({"steps": found.steps, "digest": found.digest.hex(), "sources": told, "problems": found.problems}))
    else:
        table = [(name, f"{documents:,}", f"{tokens:,}", f"{100 * tokens / total:.2f}") for name, documents, tokens in counts]
        terminal.table(f"{run}: {found.steps:,} steps", table, header=("source", "documents, whole", "tokens", "%"))
        for problem in found.problems[:20]:
            terminal.note(problem)
        verdict = f"{len(found.problems)} problems" if found.problems else "nothing lost, nothing twice"
        terminal.note(f"{verdict}; {found.unfinished} documents wait to be ended; digest {found.digest.hex()}")
    return 1 if found.problems else 0


def _mixed(settings: TrainConfig) -> Mixed:
    from surefoot.core.errors import ConfigError
    from surefoot.data import Corpus

    mixed = Corpus.open(settings.data).mixed
    if mixed is None:
        raise ConfigError("names a single dataset", where="data.path", remedy="mixtures are planned and audited: name [[data.sources]]")
    return mixed
