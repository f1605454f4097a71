"""`surefoot export` and `surefoot import`: to and from the directories of `transformers`."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.cli.face import PATH, common, show
from surefoot.core.terminal import quantity

DTYPE = click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Precision to write.  [default: as it is]")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace the directory if it is a model.")


@click.command("export")
@click.argument("model", type=PATH)
@click.argument("out", type=PATH)
@click.option("--family", help="Architecture to write as, e.g. llama or qwen3.  [default: the first that fits]")
@click.option("--tokenizer", type=PATH, help="tokenizer.json, when the model has none beside it.")
@DTYPE
@OVERWRITE
@common
def export_command(
    model: Path, out: Path, family: str | None, tokenizer: Path | None, dtype: str | None, overwrite: bool, as_json: bool
) -> None:
    """Write MODEL (a run, a checkpoint, a model directory) as OUT, a directory that transformers loads."""
    import torch

    from surefoot.cli.opening import generation_of, open_model
    from surefoot.models.hf import export_model

    opened = open_model(model)
    home = tokenizer or opened.home
    vocabulary = opened.vocabulary(tokenizer) if home else None
    export_model(
        opened.spec,
        opened.model,
        out,
        tokenizer=home,
        generation=generation_of(opened, vocabulary),
        dtype=getattr(torch, dtype) if dtype else None,
        family=family,
        overwrite=overwrite,
    )
    _show("Exported", out, as_json)


@click.command("import")
@click.argument("source", type=PATH)
@click.argument("out", type=PATH)
@DTYPE
@OVERWRITE
@common
def import_command(source: Path, out: Path, dtype: str | None, overwrite: bool, as_json: bool) -> None:
    """Read SOURCE, a transformers directory, into OUT, a model directory of Surefoot."""
    import torch

    from surefoot.models.hf import import_directory

    import_directory(source, out, dtype=getattr(torch, dtype) if dtype else None, overwrite=overwrite)
    _show("Imported", out, as_json)


def _show(title: str, out: Path, as_json: bool) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    rows = [("directory", str(out)), *((name, quantity(size, "B")) for name, size in sizes.items())]
    show(as_json, title, rows, {"path": str(out), "files": sizes})
