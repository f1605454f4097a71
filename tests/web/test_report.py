from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from surefoot.core.config import Config
from surefoot.core.errors import RunError
from surefoot.core.events import Event
from surefoot.core.rundir import Run
from surefoot.web import Sample, write_report
from surefoot.web.history import read_history
from surefoot.web.plots import Plot, svg


class Settings(Config):
    name: str = "<b>&"


def _run(path: Path) -> Path:
    with Run.create(path, Settings()) as run:
        run.log.append("start", step=0)
        for step in range(1, 6):
            run.log.append(
                "step", step=step, loss=5.0 / step, bits_per_byte=2.0 / step, lr=1e-3, grad_norm=1.0, tokens=100, tokens_per_s=50.0, mfu=0.4
            )
        run.log.append("eval", step=5, loss=1.1, bits_per_byte=0.5)
        run.log.append("checkpoint", step=5, path="checkpoints/step-00000005", stall_s=0.01, seconds=0.2)
        run.log.append("finish", step=5)
    return path


def test_the_page_holds_everything_and_refers_to_nothing(tmp_path: Path) -> None:
    page = write_report(_run(tmp_path / "run"), samples=[Sample("<script>", "x < y")], extra={"Compared": [("xz", "1.4")]}).read_text()
    assert page.count("<svg") == page.count("</svg>") == 6
    assert not re.search(r"(src|href)=[\"'](?!#)", page)
    assert "<script" not in page
    for text in ("&lt;script&gt;", "x &lt; y", "&lt;b&gt;&amp;", "finished", "step-00000005", "Compared", "500", "40%", "python"):
        assert text in page, text


def test_plots_are_well_formed_and_the_same_each_time() -> None:
    plot = Plot("loss", (("training", [1, 2, 3], [3.0, 2.0, 1.0]), ("validation", [3], [1.5])), log=True)
    ElementTree.fromstring(svg(plot))
    assert svg(plot) == svg(plot)


def test_a_step_done_again_after_a_resume_counts_as_done_last() -> None:
    events = [
        Event(0.0, "start"),
        Event(1.0, "step", {"step": 1, "loss": 3.0, "tokens": 10}),
        Event(2.0, "step", {"step": 2, "loss": 2.5, "tokens": 10}),
        Event(100.0, "start"),
        Event(101.0, "step", {"step": 2, "loss": 2.0, "tokens": 10}),
        Event(102.0, "step", {"step": 3, "loss": "nan", "tokens": 10}),
        Event(103.0, "error", {"message": "not finite"}),
    ]
    history = read_history(events)
    assert history.series("loss") == ([1.0, 2.0], [3.0, 2.0])
    assert (history.starts, history.tokens, history.ending) == (2, 30, "failed: not finite")
    assert history.wall_s == pytest.approx(2.0 + 3.0)  # the pause between the starts is not training


def test_a_run_without_steps_has_no_report(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", Settings()).close()
    with pytest.raises(RunError, match="no training step"):
        write_report(tmp_path / "run")
    with pytest.raises(RunError, match="no such run"):
        write_report(tmp_path / "absent")
