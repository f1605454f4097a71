"""The loader: batches as a pure function of a position, and a thread that makes them ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import ConfigError
from surefoot.data.packing import IGNORED, Packing
from surefoot.data.shuffle import shuffled

if TYPE_CHECKING:
    import torch

    from surefoot.data.corpus import Batches


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
            what = f"there are no {count} samples from position {position}"
            raise ConfigError(what, where="loader", remedy="use position >= 0 and count >= 1")
        return shuffled(position, count, self.samples, self.seed)


class Prefetcher:
    """Makes the batches of `requests`, (position, count) in order, in one thread, at most `depth` ahead; iterate over it.

    An error in the thread is raised where the batch would have been handed over. Leaving the context, or `close`, ends the thread.
    """

    def __init__(self, loader: Batches, requests: Iterable[tuple[int, int]], *, depth: int = 2) -> None:
        self._loader, self._requests = loader, iter(requests)
        self._thread = ThreadPoolExecutor(1, "surefoot-prefetch")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(depth):
            self._ask()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            batch = self._ahead.popleft().result()
            self._ask()
        except BaseException:
            self.close()
            raise
        return batch

    def close(self) -> None:
        """End the thread, dropping the batches it made ahead; may be called more than once."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._ahead.append(self._thread.submit(self._loader.batch, *request))
