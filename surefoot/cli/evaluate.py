"""`surefoot eval`: how well a model predicts validation text."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.cli.face import PATH, common, show
from surefoot.core import terminal


@click.command("eval")
@click.argument("model", type=PATH)
@click.option("--data", type=PATH, help="Prepared dataset.  [default: the run's]")
@click.option("--split", default="validation", show_default=True, help="Split of the dataset.")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Tokens a row.  [default: the model's longest, at most 512]")
@click.option("--rows", type=click.IntRange(min=1), help="Read at most this many rows.  [default: all]")
@click.option("--max-bits-per-byte", type=float, help="End with exit code 1 when the model is worse than this.")
@click.option(
    "--by-position", "factor", type=click.FloatRange(min=1.0), help="Show perplexity by position up to this times the trained length."
)
@common
def eval_command(
    model: Path,
    data: Path | None,
    split: str,
    sequence_length: int | None,
    rows: int | None,
    max_bits_per_byte: float | None,
    factor: float | None,
    as_json: bool,
) -> int:
    """Measure loss, perplexity and bits per byte of MODEL: a run, a checkpoint, a model directory or a transformers directory."""
    import torch

    from surefoot.cli.opening import open_model
    from surefoot.train.evaluate import evaluate

    opened = open_model(model)
    if factor is not None:
        from surefoot.cli.positions import by_position

        return by_position(model, opened, data, factor, rows or 64, split, as_json)
    dataset = opened.dataset(data)
    length = sequence_length or min(opened.spec.max_positions, 512)
    loader = dataset.loader(split, length, seed=None)
    with torch.inference_mode():
        result = evaluate(opened.model, loader, rows=rows)
    numbers = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
    table = [
        ("loss (nats per token)", f"{result.loss:.4f}"),
        ("perplexity", f"{result.perplexity:.3f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
        ("tokens", f"{result.tokens:,} ({result.bytes:,} bytes)"),
    ]
    passed = max_bits_per_byte is None or result.bits_per_byte <= max_bits_per_byte
    data_out = {**numbers, "tokens": result.tokens, "bytes": result.bytes, "split": split, "sequence_length": length, "passed": passed}
    show(as_json, f"{model} on {split} text of {dataset.path}", table, data_out)
    if not passed:
        terminal.note(f"surefoot: {result.bits_per_byte:.4f} bits per byte is more than the {max_bits_per_byte} allowed")
    return 0 if passed else 1
