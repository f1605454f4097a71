from __future__ import annotations

import pytest

from surefoot.core import terminal


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")])
def test_durations_as_said(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(12_345_678, "12.3 MB"), (1.06e9, "1.06 GB"), (7, "7 B"), (2e12, "2 TB")])
def test_quantities_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert terminal.quantity(value, "B") == text


def test_a_table_is_aligned_and_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table("Sizes", [("a", 5, "text"), ("longer", 1234, "x")], header=("name", "count", "note"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["", "Sizes", "  name    count  note", "  ------  -----  ----", "  a           5  text", "  longer   1234  x"]


def test_progress_without_a_terminal_prints_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("train", 100) as bar:
        for done in (1, 2, 50, 100):
            bar.update(done, loss="3.21")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("train: 1 %")
    assert "loss 3.21" in lines[1]
    assert "took" in lines[1]


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("train", 10, quiet=True) as bar:
        bar.update(10)
    assert capsys.readouterr() == ("", "")
