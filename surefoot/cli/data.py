"""`surefoot data`: text files to a dataset, and a look at what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.face import PATH, common, show
from surefoot.cli.mixture import audit_command, plan_command, reweight_command
from surefoot.core import terminal

if TYPE_CHECKING:
    from surefoot.data import Dataset, PrepareConfig


@click.group("data")
def data_command() -> None:
    """Prepare text for training, look at what was prepared, and plan, change and audit mixtures."""


for command in (plan_command, reweight_command, audit_command):
    data_command.add_command(command)


@data_command.command("prepare")
@click.argument("inputs", nargs=-1)
@click.option("--out", type=PATH, required=True, help="Directory to make; it appears complete or not at all.")
@click.option("--config", "config_path", type=PATH, help="TOML of the same settings; the options here override it.")
@click.option("--vocab-size", type=int, help="Size of the tokenizer to train.  [default: 8192]")
@click.option("--tokenizer", help="Use this tokenizer.json (or a directory that has one) instead of training one.")
@click.option("--format", "file_format", help="auto, text, jsonl or parquet.  [default: auto]")
@click.option("--task", help="text, or chat for conversations.  [default: text]")
@click.option("--key", help="The JSONL key or Parquet column that holds the text.")
@click.option("--exclude", multiple=True, help="Glob of paths to leave out; may be given again.")
@click.option("--validation-fraction", type=float, help="Share of documents kept for validation.  [default: 0.02]")
@click.option("--on-bad", help="stop at a bad record, or skip it.  [default: stop]")
@common
def prepare_command(inputs: tuple[str, ...], out: Path, config_path: Path | None, as_json: bool, **options: Any) -> None:
    """Turn INPUTS (files, directories, globs; text, JSONL, Parquet, .gz, .zst) into the dataset --out."""
    from surefoot.core.config import load, parse
    from surefoot.data import PrepareConfig

    table = load(PrepareConfig, config_path).model_dump(exclude_unset=True) if config_path else {}
    config = parse(PrepareConfig, _merge(table, inputs, options), where="command line")
    dataset = prepare_with_progress(config, out, quiet=as_json)
    rows = dataset.describe()
    show(as_json, "Dataset", rows, {"path": str(out), **dict(rows)})


@data_command.command("inspect")
@click.argument("dataset", type=PATH)
@click.option("--rows", default=0, show_default=True, type=click.IntRange(min=0), help="Rows to print, as training sees them.")
@click.option("--split", default="train", show_default=True, help="Split that the rows are taken from.")
@click.option("--sequence-length", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens a row.")
@click.option("--verify", is_flag=True, help="Read every file and compare its hash with the manifest's.")
@common
def inspect_command(dataset: Path, rows: int, split: str, sequence_length: int, verify: bool, as_json: bool) -> None:
    """Tell what DATASET, a directory made by `data prepare`, holds."""
    from surefoot.data import Dataset

    opened = Dataset.open(dataset)
    batch = opened.loader(split, sequence_length).batch(0, rows) if rows else None
    texts = [opened.tokenizer.decode(row, skip_special_tokens=False) for row in batch.tokens.tolist()] if batch else []
    if verify:
        opened.verify()
    table = [*opened.describe(), *([("hashes", "every file is what was prepared")] if verify else [])]
    splits = {name: record.model_dump(exclude={"files"}) for name, record in opened.manifest.splits.items()}
    data = {"path": str(dataset), "vocab_size": opened.vocab_size, "splits": splits, "verified": verify, "rows": texts}
    show(as_json, "Dataset", table, data)
    for text in () if as_json else texts:
        print(f"\n{text}")


def prepare_with_progress(config: PrepareConfig, out: Path, *, quiet: bool = False) -> Dataset:
    """Prepare `out` under a progress bar."""
    from surefoot.data import prepare
    from surefoot.data.prepare import Progress

    shares = {"check": (0.0, 0.2), "tokenizer": (0.2, 0.3), "tokens": (0.5, 0.5), "unchanged": (0.0, 1.0)}
    with terminal.progress("prepare", 1.0, quiet=quiet) as bar:

        def on_progress(progress: Progress) -> None:
            start, share = shares[progress.phase]
            size = f"{progress.done / 1e6:,.1f} of {progress.total / 1e6:,.1f} MB" if progress.total > 1 else ""
            bar.update(start + share * progress.done / max(progress.total, 1), **{progress.phase: size})

        return prepare(config, out, on_progress)


def _merge(table: dict[str, Any], inputs: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the file with those given on the command line over them."""
    names = {"file_format": "format", "vocab_size": "tokenizer.vocab_size", "tokenizer": "tokenizer.path"}
    merged = dict(table) | ({"inputs": inputs} if inputs else {})
    for option, value in options.items():
        if value is None or value == ():
            continue
        name, _, inner = names.get(option, option).partition(".")
        merged[name] = {**merged.get(name, {}), inner: value} if inner else value
    return merged
