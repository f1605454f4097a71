"""What a run shows on a terminal: a progress bar, a short table, a note. Plain lines where there is no terminal.

All of it goes to standard error or standard output through `rich`, which is imported when first shown.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

PLAIN_INTERVAL_S = 10.0
FIRST_ESTIMATE = 0.01  # share done before a time left is worth telling
_NUMBER = re.compile(r"-|[-+]?[\d.,]+(e[-+]?\d+)?( ?[%xkMGT])?")


class Progress(Protocol):
    """A bar under way: `update` sets how much is done and what stands beside it."""

    def update(self, done: float, **fields: str) -> None: ...


@contextmanager
def progress(title: str, total: float, *, quiet: bool = False) -> Iterator[Progress]:
    """Show the progress of `title` towards `total` on standard error: a bar, or a line every ten seconds without a terminal.

    The keyword fields of ``update(done, loss="3.21", ...)`` stand beside the bar; time left is added to them.
    """
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        yield from _bar(title, total)
    else:
        yield _Lines(title, total)


def table(title: str, rows: Mapping[str, Any] | Iterable[Sequence[Any]], *, header: Sequence[str] = ()) -> None:
    """Print `rows` (name to value, or sequences of cells) on standard output in aligned columns."""
    cells = [[_text(cell) for cell in row] for row in (rows.items() if isinstance(rows, Mapping) else rows)]
    columns = [list(header), *cells] if header else cells
    count = max((len(row) for row in columns), default=0)
    widths = [max((len(row[index]) for row in columns if index < len(row)), default=0) for index in range(count)]
    right = [index > 0 and all(index >= len(row) or _NUMBER.fullmatch(row[index]) for row in cells) for index in range(count)]
    print(f"\n{title}" if title else "")
    for number, row in enumerate(columns):
        line = "  ".join(cell.rjust(widths[index]) if right[index] else cell.ljust(widths[index]) for index, cell in enumerate(row))
        print(f"  {line}".rstrip())
        if header and number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line of information on standard error."""
    print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return `seconds` as a person says it: ``8 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def quantity(value: float, unit: str = "") -> str:
    """Return `value` with three significant digits and a decimal prefix: ``12.3 M``, ``1.06 GB``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


class _Silent:
    def update(self, done: float, **fields: str) -> None:
        return None


class _Lines:
    """Progress without a terminal: the first and the last update, and one line every `PLAIN_INTERVAL_S`."""

    def __init__(self, title: str, total: float) -> None:
        self.title, self.total = title, total
        self.start = time.monotonic()
        self.last = -PLAIN_INTERVAL_S

    def update(self, done: float, **fields: str) -> None:
        now = time.monotonic()
        if now - self.last < PLAIN_INTERVAL_S and done < self.total:
            return
        self.last = now
        elapsed = now - self.start
        left = f"left {duration(elapsed * (self.total - done) / done)}" if done >= FIRST_ESTIMATE * self.total else ""
        left = f"took {duration(elapsed)}" if done >= self.total else left
        shown = "  ".join(f"{name} {value}" for name, value in fields.items())
        note(f"{self.title}: {100 * done / max(self.total, 1e-9):.0f} %  {shown}  {left}")


def _bar(title: str, total: float) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[beside]}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Rich(*columns, console=Console(stderr=True), refresh_per_second=4, speed_estimate_period=60) as rich:
        task = rich.add_task(title, total=total, beside="")

        class Bar:
            def update(self, done: float, **fields: str) -> None:
                beside = "  ".join(f"[dim]{name}[/] {value}" for name, value in fields.items())
                rich.update(task, completed=done, beside=beside)

        yield Bar()


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
