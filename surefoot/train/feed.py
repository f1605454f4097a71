"""What one process sees of a batch: its part of every sequence, and whether a sum over processes may count it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from surefoot.data import Batch
from surefoot.parallel import Coordinates, Layout
from surefoot.parallel.context import split_sequence
from surefoot.parallel.process import CPU


@dataclass(frozen=True)
class Feed:
    """Rows are dealt out to data ranks; the ranks of one of them hold the same rows, or parts of them."""

    layout: Layout = field(default_factory=Layout)
    at: Coordinates = field(default_factory=Coordinates)
    device: torch.device = CPU

    @property
    def index(self) -> int:
        """Which of the `layout.data` data ranks this is."""
        return self.at.replicate * self.layout.shard + self.at.shard

    @property
    def counts(self) -> bool:
        """Whether this process's sums of losses count: tensor ranks all know the loss of their tokens."""
        return self.at.tensor == 0

    @property
    def first(self) -> bool:
        """Whether this process counts what is the same on all processes that see its rows."""
        return self.at.tensor == self.at.context == self.at.pipeline == 0

    def split(self, batch: Batch) -> Batch:
        """Return this process's part of the rows, on its device; `trained` and `bytes`, of whole rows, stay with the first process."""
        parts = {name: split_sequence(getattr(batch, name), self.layout, self.at.context) for name in _TENSORS}
        tensors = {name: part.to(self.device, non_blocking=True) for name, part in parts.items()}
        return replace(batch, **tensors, trained=batch.trained if self.first else 0, bytes=batch.bytes if self.first else 0)


_TENSORS = ("tokens", "labels", "positions", "documents")
