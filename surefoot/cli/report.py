"""`surefoot report`: a page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.cli.face import PATH, common, show

if TYPE_CHECKING:
    from surefoot.web import Sample

PROMPT_TOKENS, SAMPLE_TOKENS = 32, 160


@click.command("report")
@click.argument("run", type=PATH)
@click.option("--samples", default=3, show_default=True, type=click.IntRange(min=0), help="Texts the model is asked to continue.")
@common
def report_command(run: Path, samples: int, as_json: bool) -> None:
    """Write RUN/report.html: plots, samples of text, settings and checkpoints in one file that needs nothing else."""
    from surefoot.core.rundir import require
    from surefoot.web import write_report

    require(run)
    texts = validation_samples(run, samples) if samples and any((run / "checkpoints").glob("step-*")) else []
    page = write_report(run, samples=texts)
    show(as_json, "Report", [("page", str(page))], {"page": str(page)})


def validation_samples(run: Path, count: int) -> list[Sample]:
    """Let the run's last checkpoint continue the beginnings of `count` validation rows."""
    from surefoot.cli.opening import open_model
    from surefoot.models import Sampling, generate
    from surefoot.web import Sample

    opened = open_model(run)
    dataset = opened.dataset(None)
    tokenizer, special = dataset.tokenizer, dataset.special
    count = min(count, dataset.samples("validation", 2 * PROMPT_TOKENS))
    rows = dataset.loader("validation", 2 * PROMPT_TOKENS, seed=0).batch(0, count).tokens[:, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=0.7, top_p=0.95, seed=0)
    written = generate(opened.model, rows, SAMPLE_TOKENS, sampling=sampling, stop=[special.end])
    return [Sample(tokenizer.decode(row), tokenizer.decode(new)) for row, new in zip(rows, written, strict=True)]
