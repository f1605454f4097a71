"""What a run reads: one dataset or a mixture of several, behind one door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.data.config import DataConfig
from surefoot.data.dataset import Dataset
from surefoot.data.loader import Batch, Loader
from surefoot.data.mixed import Mixed, MixedLoader
from surefoot.data.planner import PlanState


class Batches(Protocol):
    """An endless stream of rows, numbered; any process may ask for any of them."""

    def batch(self, position: int, count: int) -> Batch:
        """Return rows position..position+count-1."""

    def trained(self, position: int, count: int) -> int:
        """Return how many labels those rows hold, without making them."""


@dataclass(frozen=True)
class Corpus:
    """The datasets of a configuration; `mixed` where there are several."""

    config: DataConfig
    datasets: tuple[Dataset, ...]
    mixed: Mixed | None

    @staticmethod
    def open(config: DataConfig) -> Corpus:
        """Open every dataset. Raises `DataError` when one is missing or damaged, or their tokenizers differ."""
        if config.sources:
            mixed = Mixed.open(config)
            return Corpus(config, mixed.datasets, mixed)
        return Corpus(config, tuple(Dataset.open(path) for path in config.paths), None)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(dataset.vocab_size for dataset in self.datasets)

    def train(self, rows: int, ranks: int, micro_batches: int, state: dict[str, Any] | None, position: int) -> Loader | MixedLoader:
        """Return the training rows, steps of `rows`; `state`, `position`: of the checkpoint that is taken up."""
        if self.mixed is None:
            return self.datasets[0].loader("train", self.config.sequence_length, self.config.seed)
        known = None if state is None else PlanState.from_json(state)
        return self.mixed.loader(rows, ranks, micro_batches, known, position)

    def validation(self) -> dict[str, Loader]:
        """Return the validation rows of each source that has any."""
        names = [source.name for source in self.config.sources] or ["validation"]
        named = zip(names, self.datasets, strict=True)
        length = self.config.sequence_length
        return {name: dataset.loader("validation", length, seed=None) for name, dataset in named if "validation" in dataset.manifest.splits}
