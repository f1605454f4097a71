"""Tensors of a `transformers` checkpoint as regions of ours: one description, read in either direction.

A `Piece` says that their tensor, in their shape, is a region (expert, rows) of our tensor. Importing writes the regions,
exporting reads them, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from surefoot.core.errors import ModelError
from surefoot.models.hf.families import Family
from surefoot.models.hf.names import Names
from surefoot.models.parameters import declarations
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer


@dataclass(frozen=True)
class Piece:
    """Their tensor `theirs` of `shape` is our tensor `ours`, at `expert` (None: all of it) and its rows `start` to `end`."""

    theirs: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None
    start: int
    end: int

    def region(self, tensor: Tensor) -> Tensor:
        """Return the view of our whole `tensor` that this piece is, in their shape."""
        whole = tensor if self.expert is None else tensor[self.expert]
        return whole[self.start : self.end].view(self.shape)


def shapes(spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (shape, sections) of every tensor that makes up a model of `spec`, by canonical name; nothing is allocated."""
    model = Transformer(spec, device="meta")
    found = {name: (decl.shape, decl.sections) for name, decl in declarations(model).items()}
    kept = model.state_dict()
    return found | {name: (tuple(kept[name].shape), ()) for name in kept if name not in found}


def pieces(family: Family, spec: ModelSpec) -> list[Piece]:
    """Return every tensor of a checkpoint of `family`, in our order."""
    return [piece for name, (shape, sections) in shapes(spec).items() for piece in _of(family, spec, name, shape, sections)]


def _of(family: Family, spec: ModelSpec, name: str, shape: tuple[int, ...], sections: tuple[int, ...]) -> Iterator[Piece]:
    _, _, inside = name.partition("layers.")
    index, _, local = inside.partition(".")
    names = family.names(spec, int(index) if inside else 0)
    theirs = _translate(names, local) if inside else names.top[name]
    prefix = f"model.layers.{index}." if inside else ""
    parts = (theirs,) if isinstance(theirs, str) else theirs
    stacked = "{e}" in parts[0]
    row_shape = shape[1:] if stacked else shape
    sizes = sections if len(parts) > 1 else (row_shape[0],)
    for expert in range(shape[0]) if stacked else (None,):
        start = 0
        for part, rows in zip(parts, sizes, strict=True):
            size = (rows, *row_shape[1:])
            size = (size[0], 1, *size[1:]) if local in names.squeezed else size
            yield Piece(prefix + part.replace("{e}", str(expert)), size, name, expert, start, start + rows)
            start += rows


def _translate(names: Names, local: str) -> str | tuple[str, ...]:
    if local in names.layer:
        return names.layer[local]
    module, _, parameter = local.rpartition(".")
    if module not in names.layer:
        raise ModelError(f"no name for the tensor '{local}'", where="export", remedy="report it: the family's table is incomplete")
    theirs = names.layer[module]
    return f"{theirs}.{parameter}" if isinstance(theirs, str) else tuple(f"{part}.{parameter}" for part in theirs)
