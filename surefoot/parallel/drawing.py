"""A pipeline schedule as a drawing: one line a rank, time to the right, as text for a terminal or as SVG for a page."""

from __future__ import annotations

from surefoot.parallel.schedules import Op, Schedule, Timeline, simulate

IDLE = "."
_COLOURS = {"F": ("#3b6fb6", "#8fb3e0"), "B": ("#2f8f6b", "#8ed1b5"), "I": ("#2f8f6b", "#8ed1b5"), "W": ("#c9922e", "#eccb8b")}
"""Of a rank's first stage, and of its later ones."""
_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_ROW, _LEFT, _TOP = 26, 52, 28


def draw(drawn: Schedule | Timeline, *, width: int | None = None) -> str:
    """Return text with a line for each rank; a schedule is drawn with forward, input and weight gradients of one second each.

    Operations are named ``F5`` (micro-batch 5), or ``2F5`` where a rank has several stages, and cut short where there is no room.
    `width`: characters for the whole time; None: as many as the shortest operation's name needs.
    """
    timeline = _timeline(drawn)
    several = timeline.schedule.stages_per_rank > 1
    slots = [slot for row in timeline.slots for slot in row if slot.end_s > slot.start_s]
    if not slots:
        return ""
    if width is None:
        room = max(len(_name(slot.op, several)) for slot in slots) + 1
        width = round(room * timeline.makespan_s / min(slot.end_s - slot.start_s for slot in slots))
    scale = width / timeline.makespan_s
    margin = len(f"rank {len(timeline.slots) - 1}")
    lines = []
    for rank, row in enumerate(timeline.slots):
        cells = [IDLE] * width
        for slot in row:
            start, stop = round(slot.start_s * scale), round(slot.end_s * scale)
            # The last cell stays blank where there are two or more, so that neighbours are told apart.
            cells[start:stop] = _name(slot.op, several)[: max(1, stop - start - 1)].ljust(stop - start)[: stop - start]
        lines.append(f"{f'rank {rank}':<{margin}}  {''.join(cells)}".rstrip())
    return "\n".join([*lines, _summary(timeline)]) + "\n"


def draw_svg(drawn: Schedule | Timeline, *, width: int = 960) -> str:
    """Return a self-contained SVG image, `width` pixels wide, of what `draw` shows."""
    timeline = _timeline(drawn)
    several = timeline.schedule.stages_per_rank > 1
    height = _TOP + _ROW * len(timeline.slots) + 30
    scale = (width - _LEFT - 8) / timeline.makespan_s if timeline.makespan_s else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{_summary(timeline)}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="17" font-size="12">{_summary(timeline)}</text>',
    ]
    for rank, row in enumerate(timeline.slots):
        top = _TOP + _ROW * rank
        first = min(timeline.schedule.stages_of(rank), default=0)
        parts.append(f'<text x="8" y="{top + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top + 2}" width="{width - _LEFT - 8}" height="{_ROW - 4}" fill="#eeeeee"/>')
        for slot in row:
            left, wide = _LEFT + slot.start_s * scale, (slot.end_s - slot.start_s) * scale
            dark = slot.op.stage == first
            parts.append(
                f'<rect x="{left:.2f}" y="{top + 2}" width="{wide:.2f}" height="{_ROW - 4}" '
                f'fill="{_COLOURS[slot.op.kind][0 if dark else 1]}" stroke="#ffffff" stroke-width="0.6">'
                f"<title>{_title(slot.op)}: {slot.start_s:.4g} to {slot.end_s:.4g} s</title></rect>"
            )
            label = str(slot.op.micro_batch) if not several or wide < 30 else str(slot.op)
            if wide > 7 * len(label):
                ink = "#ffffff" if dark else "#222222"
                parts.append(f'<text x="{left + wide / 2:.2f}" y="{top + 17}" text-anchor="middle" fill="{ink}">{label}</text>')
    parts += _legend(timeline, _TOP + _ROW * len(timeline.slots) + 18)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(timeline: Timeline, y: int) -> list[str]:
    used = [kind for kind in _NAMES if any(slot.op.kind == kind for row in timeline.slots for slot in row)]
    parts = []
    for place, kind in enumerate(used):
        left = _LEFT + 140 * place
        parts.append(f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[kind][0]}"/>')
        parts.append(f'<text x="{left + 18}" y="{y}">{_NAMES[kind]}</text>')
    return parts


def _timeline(drawn: Schedule | Timeline) -> Timeline:
    return simulate(drawn, 1.0, 1.0, 1.0) if isinstance(drawn, Schedule) else drawn


def _name(op: Op, several: bool) -> str:
    return str(op) if several else f"{op.kind}{op.micro_batch}"


def _title(op: Op) -> str:
    return f"{_NAMES[op.kind]}, stage {op.stage}, micro-batch {op.micro_batch}"


def _summary(timeline: Timeline) -> str:
    s = timeline.schedule
    held = max(timeline.peak_in_flight, default=0)
    ranks, batches = f"{s.ranks} rank{'s' * (s.ranks > 1)}", f"{s.micro_batches} micro-batch{'es' * (s.micro_batches > 1)}"
    holds = f"holds at most {held} micro-batch{'es' * (held > 1)}" + (" of a stage" if s.stages_per_rank > 1 else "")
    return f"{s.name}, {ranks}, {batches}: idle {100 * timeline.idle_fraction:.1f} %, a rank {holds}"
