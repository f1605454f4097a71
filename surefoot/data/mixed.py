"""Several prepared datasets as one: rows of a planned mixture, behind the same two calls as a single dataset's loader.

Every process plans every step for itself: planning reads document lengths, which are memory-mapped, and takes milliseconds; tokens are
read only for the rows that a process trains on. There is nothing to send and nothing that could get out of step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.random import key
from surefoot.data.config import DataConfig
from surefoot.data.dataset import Dataset
from surefoot.data.loader import Batch
from surefoot.data.mixture import Stage, natural, normalised, schedule
from surefoot.data.packing import IGNORED, Rows, _assemble
from surefoot.data.planner import OutOfDocuments, Piece, Planner, PlanState, Row, StepPlan, arranged, attention_pairs
from surefoot.data.shards import Stream
from surefoot.data.shuffle import shuffled

_BLOCK = 256  # documents whose place in the permutation is worked out at once
_KEPT = 64  # steps that stay planned behind the newest one
Int64 = npt.NDArray[np.int64]


class EndOfDataError(DataError):
    """The sources of a mixture have given all they may; every process meets this at the same step."""


@dataclass
class Source:
    """One split of one dataset, its documents in an order that depends on (seed, name, epoch) alone."""

    name: str
    dataset: Dataset
    split: str
    seed: int
    _blocks: dict[int, tuple[Int64, Int64]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> npt.NDArray[np.uint64]:
        return self.dataset.document_starts(self.split)

    @cached_property
    def tokens(self) -> Stream:
        return self.dataset.stream(self.split, "tokens")

    @cached_property
    def flags(self) -> Stream | None:
        return self.dataset.stream(self.split, "trained") if self.dataset.manifest.config.task == "chat" else None

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def place(self, n: int) -> tuple[int, int]:
        """Return (number in the dataset, length in tokens) of the n-th document given, counted over epochs."""
        block, inside = divmod(n, _BLOCK)
        if block not in self._blocks:
            if len(self._blocks) > 8:
                self._blocks.pop(next(iter(self._blocks)))
            numbers = shuffled(block * _BLOCK, _BLOCK, self.documents, key(self.seed, "source", self.name))
            lengths = (self.starts[numbers + 1] - self.starts[numbers]).astype(np.int64)
            self._blocks[block] = numbers, lengths
        numbers, lengths = self._blocks[block]
        return int(numbers[inside]), int(lengths[inside])

    def read(self, piece: Piece) -> tuple[Int64, Int64]:
        """Return tokens [size] and labels [size] of a piece; the label of its last token is the next piece's first, if there is one."""
        number, length = self.place(piece.n)
        start = int(self.starts[number])
        stop = min(piece.high + 1, length)
        items = self.tokens.read(start + piece.low, start + stop).astype(np.int64)
        labels = np.full(piece.size, IGNORED, dtype=np.int64)
        after = items[1:]
        if self.flags is None:
            labels[: len(after)] = after
        else:
            trained = self.flags.read(start + piece.low + 1, start + stop) != 0
            labels[: len(after)] = np.where(trained, after, IGNORED)
        return items[: piece.size], labels

    def trained(self, piece: Piece) -> int:
        """Return how many labels `read` gives."""
        number, length = self.place(piece.n)
        stop = min(piece.high + 1, length)
        if self.flags is None:
            return stop - piece.low - 1
        start = int(self.starts[number])
        return int(np.count_nonzero(self.flags.read(start + piece.low + 1, start + stop)))


@dataclass
class MixedLoader:
    """Rows of the mixture in the order of its steps. Two threads may use it.

    `ranks`, `micro_batches`: how the rows of a step are laid out, so that each has about as much attention to compute. `start`: the
    state after the last step that counts, at which `origin` rows were consumed; what lies before cannot be had.
    """

    sources: Sequence[Source]
    planner: Planner
    token_bytes: npt.NDArray[np.uint32]
    pad: int
    ranks: int
    micro_batches: int
    start: PlanState
    origin: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._states = {self.start.step: self.start}
        self._plans: dict[int, StepPlan] = {}
        self._orders: dict[int, list[int]] = {}

    def batch(self, position: int, count: int) -> Batch:
        """Return rows position..position+count-1, of one step."""
        import torch

        rows = self._rows(self._ordered(position, count))
        kept = rows.labels[rows.labels != IGNORED]
        return Batch(
            tokens=torch.from_numpy(rows.tokens),
            labels=torch.from_numpy(rows.labels),
            positions=torch.from_numpy(rows.positions),
            documents=torch.from_numpy(rows.documents),
            trained=len(kept),
            bytes=int(self.token_bytes[kept].sum(dtype=np.int64)),
        )

    def trained(self, position: int, count: int) -> int:
        """Return how many labels rows position..position+count-1 hold, without making them."""
        return sum(self.sources[piece.source].trained(piece) for row in self._ordered(position, count) for piece in row)

    def plan(self, step: int) -> StepPlan:
        """Return the plan of `step` (the first is 1). Raises `EndOfDataError` when the sources have no more to give."""
        with self._lock:
            while step not in self._plans:
                newest = max(self._states)
                if step <= newest:
                    raise ValueError(f"step {step} was planned and forgotten; the newest is {newest}")
                try:
                    found, self._states[newest + 1] = self.planner.plan(self._states[newest])
                except OutOfDocuments:
                    what = f"the sources have given all they may before step {newest + 1}"
                    raise EndOfDataError(what, where="data.sources", remedy="raise max_epochs, or lower train.steps") from None
                self._plans[newest + 1] = found
                costs = np.array([attention_pairs(row) for row in found.rows], dtype=np.float64)
                self._orders[newest + 1] = arranged(costs, self.ranks, self.micro_batches)
                for known in (self._states, self._plans, self._orders):
                    known.pop(newest - _KEPT, None)
            return self._plans[step]

    def imbalance(self, step: int) -> tuple[float, float]:
        """Return the attention of the busiest rank over the mean, of the rows of `step` as planned and as arranged."""
        costs = np.array([attention_pairs(row) for row in self.plan(step).rows], dtype=np.float64)
        each = [costs.reshape(self.ranks, -1).sum(1), costs[self._orders[step]].reshape(self.ranks, -1).sum(1)]
        before, after = (float(loads.max() / loads.mean()) for loads in each)
        return before, after

    def state(self, step: int) -> PlanState:
        """Return where planning stands after `step`: what a checkpoint keeps."""
        if step > self.start.step:
            self.plan(step)
        return self._states[step]

    def reweigh(self, step: int, weights: tuple[float, ...]) -> None:
        """From `step` on draw with `weights`; what was planned from there on is planned anew.

        Every process calls it with the same values, before it has trained `step`.
        """
        with self._lock:
            for known in (self._plans, self._orders):
                for later in [one for one in known if one >= step]:
                    del known[later]
            for later in [one for one in self._states if one >= step]:
                del self._states[later]
            newest = max(self._states)
            state = self._states[newest]
            kept = tuple(change for change in state.changes if change[0] != step)
            self._states[newest] = replace(state, changes=(*kept, (step, weights)))

    def _ordered(self, position: int, count: int) -> list[Row]:
        step, first = divmod(position - self.origin, self.planner.rows)
        step += self.start.step
        if first + count > self.planner.rows:
            raise ConfigError(f"{count} rows from {position} lie in two steps", where="loader", remedy="ask for rows of one step")
        rows = self.plan(step + 1).rows
        return [rows[number] for number in self._orders[step + 1][first : first + count]]

    def _rows(self, rows: Sequence[Row]) -> Rows:
        shape = (len(rows), self.planner.length)
        tokens, labels = np.full(shape, self.pad, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        begins, inside = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        for index, row in enumerate(rows):
            place = 0
            for piece in row:
                here = slice(place, place + piece.size)
                tokens[index, here], labels[index, here] = self.sources[piece.source].read(piece)
                begins[index, place], inside[index, here] = True, True
                place += piece.size
        return _assemble(tokens, labels, begins, inside)


@dataclass(frozen=True)
class Mixed:
    """The datasets of a configuration with several sources."""

    config: DataConfig
    datasets: tuple[Dataset, ...]

    @staticmethod
    def open(config: DataConfig) -> Mixed:
        """Open every dataset. Raises `DataError` when one is missing or damaged, or they were prepared with different tokenizers."""
        datasets = tuple(Dataset.open(path) for path in config.paths)
        first = datasets[0]
        for dataset in datasets[1:]:
            if _tokenizer(dataset) != _tokenizer(first):
                what = f"was prepared with another tokenizer than {first.path}"
                raise DataError(what, where=str(dataset.path), remedy=f'prepare it with tokenizer.path = "{first.path}"')
        return Mixed(config, datasets)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.config.sources)

    def weights(self) -> list[tuple[int, tuple[float, ...]]]:
        """Return (tokens, weights) of every change that the configuration asks for."""
        stages = self.config.mixture.stages
        if stages:
            return schedule(self.names, [Stage(stage.at, stage.weights, stage.shape) for stage in stages])
        given = [source.weight for source in self.config.sources if source.weight is not None]
        sizes = [dataset.split("train").tokens for dataset in self.datasets]
        return [(0, normalised(given) if given else natural(sizes, self.config.mixture.temperature))]

    def sources(self, split: str = "train") -> tuple[Source, ...]:
        named = zip(self.config.sources, self.datasets, strict=True)
        return tuple(Source(source.name, dataset, split, self.config.seed) for source, dataset in named)

    def loader(self, rows: int, ranks: int = 1, micro_batches: int = 1, state: PlanState | None = None, origin: int = 0) -> MixedLoader:
        """Return the loader of steps of `rows` rows; `state`: where a checkpoint says that planning stood, after `origin` rows."""
        sources = self.sources()
        limits = tuple(
            None if source.max_epochs is None else max(1, int(source.max_epochs * found.documents))
            for source, found in zip(self.config.sources, sources, strict=True)
        )
        planner = Planner(
            self.weights(), lambda source, n: sources[source].place(n)[1], rows, self.config.sequence_length, self.config.mixture.by, limits
        )
        first = self.datasets[0]
        start = state or PlanState.fresh(len(sources))
        return MixedLoader(sources, planner, first.token_bytes, first.special.pad, ranks, micro_batches, start, origin)


def _tokenizer(dataset: Dataset) -> str:
    return next(record.hash for record in dataset.manifest.files if record.path == "tokenizer.json")
