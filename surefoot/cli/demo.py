"""`surefoot demo`: the main job from beginning to end on text that every machine has."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.cli.face import PATH, common, show


@click.command("demo")
@click.option("--data", type=PATH, help="Folder or file of text.  [default: the sources of Python's standard library]")
@click.option("--minutes", default=5.0, show_default=True, type=click.FloatRange(min=0.05), help="How long to train.")
@click.option("--out", type=PATH, default=Path("runs/demo"), show_default=True, help="Directory for all that it makes.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier demo in --out.")
@common
def demo_command(data: Path | None, minutes: float, out: Path, overwrite: bool, as_json: bool) -> int:
    """Train a tokenizer and a small model, measure it beside xz, let it write, report, and export it for transformers.

    Ends with exit code 1 when transformers does not continue a prompt identically.
    """
    from surefoot.cli.demonstration import demonstrate

    result = demonstrate(data, out, minutes=minutes, overwrite=overwrite, quiet=as_json)
    if not as_json:
        result.show()
    else:
        show(True, "", (), result.numbers())
    return 0 if result.same_in_transformers is not False else 1
