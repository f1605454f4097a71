"""torch's distributed checkpoint format for tensors of which a process holds several rectangles (`Part`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from surefoot.parallel import Part


@dataclass(frozen=True)
class _Boxes:
    """A `Part` as torch's planners want to see it."""

    part: Part

    def size(self) -> torch.Size:
        return torch.Size(self.part.shape)

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part.tensor)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = self.part.placement.boxes()
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in boxes if all(sizes)]

    def at(self, offset: torch.Size | None) -> Tensor:
        """Return the rectangle that begins at `offset` of the whole, a view."""
        return next(
            self.part.tensor[here] for here, offsets, _ in self.part.placement.boxes() if offset is None or offsets == tuple(offset)
        )


def _shown(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _Boxes(value) if isinstance(value, Part) else value for name, value in state.items()}


class PartSavePlanner(DefaultSavePlanner):
    """Writes each rectangle once, whichever of its holders does it; torch checks that together they cover every tensor."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(_shown(state_dict), *args, **kwargs)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, _Boxes) else super().lookup_object(index)


class PartLoadPlanner(DefaultLoadPlanner):
    """Reads into each rectangle what it needs, from whatever rectangles were written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # Names are flat and every tensor has its memory: there is nothing to prepare.
        self.state_dict = self.original_state_dict = _shown(state_dict)
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, _Boxes) else super().lookup_tensor(index)
