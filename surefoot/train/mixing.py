"""Weights of a mixture that change while a run goes on: by hand, by measured losses, and again when the run is taken up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.errors import DataError, nearest
from surefoot.core.files import write_atomic
from surefoot.data.config import DataConfig
from surefoot.data.ledger import Ledger
from surefoot.data.mixed import MixedLoader
from surefoot.data.mixture import by_excess_loss, normalised
from surefoot.parallel import Processes

ASKED, DONE, LEDGER = "reweight.json", "mixture.jsonl", "ledger.bin"
"""In the run directory: a request that the next step takes up; every change with the step from which it holds; what was trained on."""


def ask(run: Path, weights: Mapping[str, float], names: Sequence[str]) -> None:
    """Leave a request in `run` to draw with `weights` (names that are left out give nothing). Raises `DataError`."""
    unknown = next((name for name in weights if name not in names), None)
    if unknown is not None:
        raise DataError(f"the run has no source '{unknown}'", where=str(run), remedy=nearest(unknown, names))
    wrong = next((name for name, weight in weights.items() if not 0.0 <= weight < float("inf")), None)
    if wrong is not None or not any(weights.values()):
        what = f"the weight of '{wrong}' is {weights[wrong]}" if wrong is not None else "all weights are zero"
        raise DataError(what, where=str(run), remedy="give weights of at least 0, one of them above")
    write_atomic(run / ASKED, json.dumps(dict(weights)))


@dataclass
class Mixing:
    """What a run does about its mixture, on every process at the same step; with a single dataset (`loader` None) nothing.

    `ahead`: how many steps may be prepared already; a change holds after them. `run`: the run directory, and `ledger` in it, on the first
    process only.
    """

    loader: MixedLoader | None
    names: Sequence[str]
    processes: Processes
    report: Callable[..., None]
    ahead: int
    rate: float | None
    run: Path | None = None
    ledger: Ledger | None = None
    best: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(config: DataConfig, loader: object, run: Path | None, processes: Processes, report: Callable[..., None], step: int) -> Mixing:
        """Go on after `step`: cut the ledger back to it, and apply again what was changed for later steps before the run ended."""
        mixed = loader if isinstance(loader, MixedLoader) else None
        names = [source.name for source in config.sources]
        found = Mixing(mixed, names, processes, report, config.prefetch + 1, config.mixture.follow_loss)
        if mixed is not None:
            if run is not None:
                found.run, found.ledger = run, Ledger(run / LEDGER, step)
            found._take_up(step)
        return found

    def state(self, step: int) -> dict[str, Any] | None:
        """Return what a checkpoint of `step` keeps, after making sure that the ledger reaches it."""
        if self.ledger is not None:
            self.ledger.sync()
        return None if self.loader is None else self.loader.state(step).to_json()

    def trained(self, step: int) -> None:
        """Note that `step` is done."""
        if self.ledger is not None and self.loader is not None:
            self.ledger.append(step, self.loader.plan(step).pieces())

    def asked(self, step: int) -> None:
        """Apply what was asked for by hand since the last call; `step` is the last one done."""
        if self.loader is None:
            return
        waits = self.run is not None and (self.run / ASKED).exists()
        if not self.processes.any(waits):
            return
        weights: Mapping[str, float] = {}
        if self.run is not None:
            weights = json.loads((self.run / ASKED).read_text(encoding="utf-8"))
            (self.run / ASKED).unlink()
        weights = self.processes.gather(weights)[0]
        self._apply(step, normalised([weights.get(name, 0.0) for name in self.names]), "by hand")

    def measured(self, step: int, losses: Mapping[str, float]) -> None:
        """Follow the validation `losses` of the sources, where the configuration asks for it."""
        if self.loader is None or self.rate is None or set(losses) != set(self.names):
            return
        now = self.loader.planner.weights_at(self.loader.state(step), step + 1)
        weights, self.best = by_excess_loss(now, [losses[name] for name in self.names], self.best, self.names, self.rate)
        self._apply(step, weights, "by loss")

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def _take_up(self, step: int) -> None:
        assert self.loader is not None
        lines = (self.run / DONE).read_text(encoding="utf-8").splitlines() if self.run and (self.run / DONE).is_file() else []
        later = [one for one in map(json.loads, filter(lambda line: line.endswith("}"), lines)) if one["step"] > step]
        for change in self.processes.gather(later)[0]:
            self.loader.reweigh(change["step"], tuple(change["weights"].get(name, 0.0) for name in self.names))

    def _apply(self, step: int, weights: tuple[float, ...], why: str) -> None:
        assert self.loader is not None
        told = {"step": step + self.ahead + 1, "weights": dict(zip(self.names, weights, strict=True)), "why": why}
        if self.run is not None:
            with (self.run / DONE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.loader.reweigh(step + self.ahead + 1, weights)
        self.report("mixture", **told)
