"""Safetensors files: an index of what a directory holds, read lazily, and sharded writing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from surefoot.core.errors import ModelError, nearest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Stored:
    """One tensor on disk."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `ModelError` when it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "give the directory of a model" if path.parent.is_dir() else "no such directory"
        raise ModelError("no such file", where=str(path), remedy=remedy) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"is not valid JSON: {error}", where=str(path), remedy="fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelError("is not a JSON object", where=str(path), remedy="fetch the file again")
    return value


def stored(directory: Path) -> dict[str, Stored]:
    """Return what every safetensors file of `directory` holds, by name; raise `ModelError` for a missing or cut file."""
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        other = next((path.name for path in sorted(directory.glob("*.bin")) if path.is_file()), None)
        remedy = f"only safetensors are read, not {other}" if other else f"the directory must hold {SINGLE} or {INDEX}"
        raise ModelError("no weights", where=str(directory), remedy=remedy)
    found: dict[str, Stored] = {}
    for name in names:
        path = directory / name
        with _open(path) as file:
            for key in sorted(file.keys()):
                part = file.get_slice(key)
                if part.get_dtype() not in DTYPES:
                    raise ModelError(f"'{key}' is {part.get_dtype()}", where=str(path), remedy=f"only {', '.join(DTYPES)} are read")
                found[key] = Stored(path, tuple(part.get_shape()), DTYPES[part.get_dtype()])
    return found


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelError("no such file", where=str(path), remedy="a shard that the index names is missing; fetch it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"is not a whole safetensors file ({error})", where=str(path), remedy="fetch the file again") from None


def read_tensors(found: dict[str, Stored], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for `names`, in their order; each file is opened once."""
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name in names:
            path = found[name].path
            if path not in files:
                files[path] = stack.enter_context(_open(path))
            yield name, files[path].get_tensor(name)


def check(found: dict[str, Stored], wanted: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise `ModelError` naming the first tensor that is missing, unexpected or of another shape."""
    for name, shape in wanted.items():
        if name not in found:
            count = sum(other not in found for other in wanted)
            spare = [other for other in found if other not in wanted]
            hint = nearest(name, spare) if spare else "fetch the whole model again"
            raise ModelError(f"{count} tensor(s) missing, first '{name}'", where=where, remedy=hint)
        if found[name].shape != shape:
            raise ModelError(
                f"'{name}' is {list(found[name].shape)}, the config asks for {list(shape)}", where=where, remedy="config and weights differ"
            )
    extra = [name for name in found if name not in wanted]
    if extra:
        raise ModelError(f"{len(extra)} unexpected tensor(s), first '{extra[0]}'", where=where, remedy="the config describes another model")


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write `tensors` to `directory`: one file, or shards of at most `max_shard_bytes` (at least one tensor) with an index."""
    shards: list[dict[str, int]] = []  # name -> bytes
    pending: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, directory / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.numel() * tensor.element_size() for name, tensor in pending.items()})
        pending, size = {}, 0

    for name, tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if pending and size + more > max_shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
        size += more
    flush()
    if len(shards) == 1:
        (directory / "part-0").rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(sum(names.values()) for names in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
