"""Plots of a run as SVG text, to stand inside a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

Line = tuple[str, Sequence[float], Sequence[float]]
COLOURS = ("#2563a8", "#d9722e", "#3a8f5c")


@dataclass(frozen=True)
class Plot:
    """One panel: lines of (label, x, y); `log` for a logarithmic y axis, `percent` for shares."""

    title: str
    lines: tuple[Line, ...]
    log: bool = False
    percent: bool = False

    @property
    def empty(self) -> bool:
        return not any(len(x) for _, x, _ in self.lines)


def svg(plot: Plot) -> str:
    """Return `plot` as an SVG element without outside references."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title, "font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for (label, x, y), colour in zip(plot.lines, COLOURS, strict=False):
            if len(x):
                few = len(x) < 12
                axes.plot(x, y, label=label, color=colour, linewidth=1.4, marker="o" if few else None, markersize=3.5)
        axes.set_title(plot.title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if plot.log:
            axes.set_yscale("log")
        if plot.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if len(plot.lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
    drawing = text.getvalue()
    return drawing[drawing.index("<svg") :]
