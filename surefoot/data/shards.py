"""A split on disk: a stream of tokens in memory-mapped shards, an index of its documents, and the manifest that vouches for both.

``tokens-00000.bin`` holds uint16 or uint32 tokens, little-endian; token i of the stream stands in shard i // shard_tokens.
``trained-00000.bin`` (conversations only) holds one byte a token, 1 where it is to be predicted. ``documents.bin`` holds the uint64
start of each document in the stream, and the stream's length.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from surefoot.core.config import Config, parse
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.files import hash_file
from surefoot.data.config import PrepareConfig

Array = npt.NDArray[Any]
VERSION = 1


class FileRecord(Config):
    """A file of the dataset by its path inside it, with its size and xxh3_128."""

    path: str
    bytes: int
    hash: str


class SplitRecord(Config):
    """One split: `trained` counts the tokens that are predicted, `text_bytes` the UTF-8 bytes that those spell."""

    documents: int
    tokens: int
    trained: int
    text_bytes: int
    files: tuple[FileRecord, ...]


class SkipRecord(Config):
    """Records left out, by reason, and the first of them."""

    total: int = 0
    reasons: dict[str, int] = Field(default_factory=dict)
    examples: tuple[str, ...] = ()


class InputRecord(Config):
    """What was read: `digest` covers the name, size and hash of every file."""

    files: int
    bytes: int
    digest: str


class Manifest(Config):
    """What a dataset directory holds and how it was made."""

    version: Literal[1] = 1
    vocab_size: int
    dtype: Literal["<u2", "<u4"]
    inputs: InputRecord
    skipped: SkipRecord
    inexact_documents: int  # whose tokens do not spell their bytes: only where a given tokenizer rewrites text
    files: tuple[FileRecord, ...]  # tokenizer and byte lengths
    splits: dict[str, SplitRecord]
    config: PrepareConfig


def read_manifest(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json and the size of every file it names.

    Raises `DataError` when there is no dataset there, or a file is missing or cut short.
    """
    path = directory / "manifest.json"
    remedy = "make one with: surefoot data prepare"
    if not path.is_file():
        raise DataError("there is no prepared dataset here", where=str(directory), remedy=remedy)
    try:
        table = json.loads(path.read_bytes())
        manifest = parse(Manifest, table, where=str(path))
    except (json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
        raise DataError(f"the manifest cannot be read: {error}", where=str(path), remedy="prepare the data again") from None
    for record in all_files(manifest):
        file = directory / record.path
        size = file.stat().st_size if file.is_file() else None
        if size != record.bytes:
            what = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise DataError(what, where=str(file), remedy="the dataset is damaged: prepare it again")
    return manifest


def all_files(manifest: Manifest) -> list[FileRecord]:
    """Every file that `manifest` vouches for."""
    return [*manifest.files, *(record for split in manifest.splits.values() for record in split.files)]


def record_file(root: Path, path: Path) -> FileRecord:
    """Flush `path` (inside `root`) to the disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(path=path.relative_to(root).as_posix(), bytes=path.stat().st_size, hash=hash_file(path))


class SplitWriter:
    """Writes one split's shards; documents are appended in order."""

    def __init__(self, directory: Path, dtype: str, shard_tokens: int, *, flags: bool) -> None:
        directory.mkdir()
        self.directory = directory
        self._tokens = _ShardedFile(directory, "tokens", np.dtype(dtype), shard_tokens)
        self._flags = _ShardedFile(directory, "trained", np.dtype("u1"), shard_tokens) if flags else None
        self._starts = [0]

    def add(self, tokens: Array, trained: Array | None = None) -> None:
        """Append a document; `trained` marks the tokens to predict (conversations only)."""
        self._tokens.write(tokens)
        if self._flags is not None and trained is not None:
            self._flags.write(trained)
        self._starts.append(self._starts[-1] + len(tokens))

    def close(self) -> list[Path]:
        """Finish the files and return them."""
        index = self.directory / "documents.bin"
        index.write_bytes(np.asarray(self._starts, dtype="<u8").tobytes())
        flags = self._flags.close() if self._flags is not None else []
        return [*self._tokens.close(), *flags, index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._tokens, self._flags):
            if file is not None:
                file.close()


class _ShardedFile:
    def __init__(self, directory: Path, name: str, dtype: np.dtype[Any], limit: int) -> None:
        self._directory, self._name, self._dtype, self._limit = directory, name, dtype, limit
        self._paths: list[Path] = []
        self._room = 0
        self._file: BinaryIO | None = None

    def write(self, items: Array) -> None:
        while len(items):
            if self._room == 0:
                self._next()
            assert self._file is not None
            head, items = items[: self._room], items[self._room :]
            self._file.write(head.astype(self._dtype).tobytes())
            self._room -= len(head)

    def close(self) -> list[Path]:
        if self._file is not None:
            self._file.close()
            self._file, self._room = None, 0
        return self._paths

    def _next(self) -> None:
        self.close()
        self._paths.append(self._directory / f"{self._name}-{len(self._paths):05d}.bin")
        self._file, self._room = self._paths[-1].open("wb"), self._limit


@dataclass(frozen=True)
class Stream:
    """Items of a split in stream order over memory-mapped shards of `limit` items each."""

    shards: tuple[Array, ...]
    limit: int

    @staticmethod
    def open(paths: Sequence[Path], dtype: str, limit: int) -> Stream:
        """Map `paths` into memory."""
        # A plain ndarray view: slicing np.memmap itself costs several times as much.
        return Stream(tuple(np.asarray(np.memmap(path, dtype=dtype, mode="r")) for path in paths), limit)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def read(self, start: int, stop: int) -> Array:
        """Return items start..stop-1, without copying when they lie in one shard."""
        first, last = start // self.limit, max(start, stop - 1) // self.limit
        if first == last:
            base = first * self.limit
            return self.shards[first][start - base : stop - base]
        cuts = [start, *range((first + 1) * self.limit, stop, self.limit), stop]
        return np.concatenate([self.read(low, high) for low, high in pairwise(cuts)])
