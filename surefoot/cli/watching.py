"""The progress bar of a training run, fed by its events."""

from __future__ import annotations

from types import TracebackType

from surefoot.core import terminal
from surefoot.core.events import Event


class TrainingProgress:
    """Shows steps, loss, bits per byte, tokens/s and share of the measured peak; call it with each event. A context manager."""

    def __init__(self, steps: int, *, title: str = "train", quiet: bool = False) -> None:
        self._context = terminal.progress(title, steps, quiet=quiet)
        self._bar: terminal.Progress | None = None

    def __enter__(self) -> TrainingProgress:
        self._bar = self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        if self._bar is not None and event.kind == "step":
            self._bar.update(int(event.fields["step"]), **shown(event))


def shown(event: Event) -> dict[str, str]:
    """Return what stands beside the bar for a `step` event."""
    forms = {
        "loss": ("loss", "{:.3f}"),
        "bits_per_byte": ("bits/byte", "{:.3f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "mfu": ("peak", "{:.0%}"),
    }
    beside = {"step": str(event.fields["step"])}
    for name, (label, form) in forms.items():
        value = event.fields.get(name)
        if isinstance(value, int | float):
            beside[label] = form.format(value)
    return beside
