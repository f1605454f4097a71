"""The loader: batches as a pure function of a position, and a thread that makes them ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError
from surefoot.data.packing import IGNORED, Packing
from surefoot.data.shuffle import shuffled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to train on, each tensor [batch, sequence].

    `tokens` int64; `labels` int64, already shifted, -100 where nothing is predicted; `positions` int64 restart in each document;
    `documents` int32 number a row's documents, -1 is padding. `trained` counts the labels that are not -100, `bytes` the UTF-8 bytes
    they spell.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    trained: int
    bytes: int


@dataclass(frozen=True)
class Loader:
    """An endless stream of samples, shuffled anew each epoch; entry `position` depends on (seed, position) alone.

    It keeps no state: a run stores one integer, and rank r of w asks for its own slice of the positions of a step.
    """

    packing: Packing
    token_bytes: npt.NDArray[np.uint32]
    sequence_length: int
    seed: int | None

    @property
    def samples(self) -> int:
        """Samples in one epoch."""
        return self.packing.samples

    def batch(self, position: int, count: int) -> Batch:
        """Return samples position..position+count-1 of the stream."""
        import torch

        rows = self.packing.rows(self._numbers(position, count))
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
        """Return the trained labels of those samples without reading them.

        Every rank can so know the global count of a step, which normalises its loss, without talking to the others.
        """
        return self.packing.trained(self._numbers(position, count))

    def _numbers(self, position: int, count: int) -> npt.NDArray[np.int64]:
        if position < 0 or count < 1:
            raise ConfigError(f"{count} samples from position {position} do not exist", where="loader", remedy="use position >= 0, count >= 1")
        return shuffled(position, count, self.samples, self.seed)


class Prefetcher:
    """Makes the batches of `requests`, (position, count) in order, in a thread, at most `depth` ahead; iterate over it.

    An error in the thread is raised where the batch would have been handed over. Leaving the context, or `close`, ends the thread.
    """

    def __init__(self, loader: Loader, requests: Iterable[tuple[int, int]], *, depth: int = 2) -> None:
        self._loader, self._requests = loader, iter(requests)
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="surefoot-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closing.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Batch):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """End the thread, dropping the batches it made ahead; may be called more than once."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # free a place for the thread that may wait for one
            except queue.Empty:
                continue
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        last: Any = None
        try:
            for position, count in self._requests:
                if self._closing.is_set():
                    return
                self._ready.put(self._loader.batch(position, count))
        except BaseException as error:  # whatever it is, it belongs to the thread that waits for the batch
            last = error
        self._ready.put(last)
