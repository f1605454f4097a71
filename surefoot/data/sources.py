"""Documents out of files: text and source code, JSONL, Parquet, and the text kinds under gzip or zstd.

A reader yields `Document`s and `Problem`s in file order and decides nothing: whether a problem stops the preparation or is skipped
is the caller's policy.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from surefoot.core.errors import DataError, nearest
from surefoot.data.config import PrepareConfig

Kind = Literal["text", "jsonl", "parquet"]
_JSONL = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class Document:
    """One document: where it stands, and its content (UTF-8 text, or a conversation's messages as canonical JSON)."""

    where: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that cannot be trained on: where it stands, what is wrong, and the remedy. `reason` groups problems in reports."""

    where: str
    reason: str
    what: str
    remedy: str

    def error(self) -> DataError:
        """The problem as an error."""
        return DataError(self.what, where=self.where, remedy=self.remedy)


Item = Document | Problem


def find_files(inputs: Sequence[str], exclude: Sequence[str] = ()) -> list[Path]:
    """Return the files that `inputs` (files, directories, globs) name, sorted, each once.

    From directories and globs, empty files, hidden names, ``__pycache__`` and what `exclude` matches are left out; a file named
    itself is always taken. Raises `DataError` for an input that names nothing, or an empty file named itself.
    """
    found: set[Path] = set()
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError("the file is empty", where=str(path), remedy="give a file with text in it")
            found.add(path)
            continue
        candidates = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True))
        root = path if path.is_dir() else _fixed_part(path)
        files = [file for file in candidates if _wanted(file, root, exclude)]
        if not files:
            missing = not path.exists() and not glob.has_magic(name)
            what = "no such file or directory" if missing else "no file with content was found there"
            raise DataError(what, where=name, remedy="give files, directories or globs such as 'texts/**/*.txt'")
        found.update(files)
    return sorted(found)


def _fixed_part(pattern: Path) -> Path:
    """The leading folders of a glob that hold no wildcard: names the user wrote, hidden or not."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))


def _wanted(file: Path, root: Path, exclude: Sequence[str]) -> bool:
    inside = file.relative_to(root).parts if file.is_relative_to(root) else file.parts
    if any((part.startswith(".") and part not in (".", "..")) or part == "__pycache__" for part in inside):
        return False
    if any(fnmatch.fnmatch(str(file), pattern) or any(fnmatch.fnmatch(part, pattern) for part in inside) for pattern in exclude):
        return False
    return file.is_file() and file.stat().st_size > 0


def read_documents(file: Path, config: PrepareConfig) -> Iterator[Item]:
    """Yield the documents and problems of `file` in order."""
    kind = _kind(file, config)
    if kind == "text" and config.task == "chat":
        yield Problem(str(file), "wrong format", "conversations cannot be read from plain text", "give JSONL or Parquet files")
        return
    try:
        if kind == "parquet":
            yield from _parquet(file, config)
            return
        with _open(file) as stream:
            yield from _jsonl(file, stream, config) if kind == "jsonl" else _text(file, stream, config.max_document_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile, _zstd_error()) as error:
        yield Problem(str(file), "broken compression", f"the compressed data is broken: {error}", "restore or leave out the file")
    except OSError as error:
        yield Problem(str(file), "unreadable", f"cannot be read: {error.strerror or error}", "check that it exists and may be read")


def _kind(file: Path, config: PrepareConfig) -> Kind:
    if config.format != "auto":
        return config.format
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return "jsonl" if last in _JSONL else "parquet" if last in _PARQUET else "text"


def _open(file: Path) -> BinaryIO:
    if file.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if file.suffix.lower() == ".zst":
        return io.BufferedReader(_ZstdReader(file.open("rb")), 1 << 20)
    return file.open("rb")


class _ZstdReader(io.RawIOBase):
    """Zstandard frames as a stream that raises `EOFError`, as gzip does, when the file ends inside a frame."""

    def __init__(self, source: BinaryIO) -> None:
        import zstandard

        self._source = source
        self._factory = zstandard.ZstdDecompressor()
        self._frame = self._factory.decompressobj()
        self._input = self._output = b""
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._frame.eof:
                self._input, self._frame, self._inside = self._frame.unused_data, self._factory.decompressobj(), False
            data = self._input or self._source.read(1 << 18)
            self._input = b""
            if not data:
                if self._inside:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._inside = True
            self._output = self._frame.decompress(data)
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def close(self) -> None:
        self._source.close()
        super().close()


def _zstd_error() -> type[Exception]:
    import zstandard

    return cast(type[Exception], zstandard.ZstdError)


def _text(file: Path, stream: BinaryIO, limit: int) -> Iterator[Item]:
    """Cut a text into documents of at most `limit` bytes, at line ends where there are any."""
    where, line, part, rest = str(file), 1, 0, b""
    while block := rest + stream.read(limit - len(rest)):
        piece, rest = (block, b"") if len(block) < limit else _cut(block)
        problem = check_text(piece, f"{where}:{line}" if line > 1 else where)
        if problem is not None:
            yield problem
            return
        yield Document(where if part == 0 else f"{where}:{line}", piece)
        line += piece.count(b"\n")
        part += 1
    if part == 0:
        yield Problem(where, "empty", "the file holds no text", "give a file with text in it")


def _cut(block: bytes) -> tuple[bytes, bytes]:
    end = block.rfind(b"\n") + 1
    if end == 0:
        end = len(block)
        # A UTF-8 character is at most four bytes: step back to the start of the last one.
        for back in range(1, min(4, len(block) - 1) + 1):
            if block[-back] & 0xC0 != 0x80:
                end = len(block) - back if block[-back] >= 0x80 else len(block)
                break
    return block[:end], block[end:]


def check_text(content: bytes, where: str) -> Problem | None:
    """Return what keeps `content` from being text, or None."""
    if b"\0" in content:
        return Problem(where, "binary", "is a binary file, not text", 'leave it out (exclude = ["*.ext"]) or set on_bad = "skip"')
    try:
        codecs.utf_8_decode(content, "strict", True)
    except UnicodeDecodeError as error:
        what = f"is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}"
        return Problem(where, "not UTF-8", what, 'convert it with iconv, or set on_bad = "skip"')
    return None


def _jsonl(file: Path, stream: BinaryIO, config: PrepareConfig) -> Iterator[Item]:
    empty = True
    for number, line in enumerate(stream, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        empty = False
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            yield Problem(where, "not UTF-8", f"is not UTF-8 at byte {error.start}", "convert the file to UTF-8")
        except (json.JSONDecodeError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            yield Problem(where, "broken JSON", f"the line is not valid JSON: {reason}", "write one JSON object a line")
        else:
            yield _record(record, where, config)
    if empty:
        yield Problem(str(file), "empty", "the file holds no record", "give a file with records in it")


def _record(record: Any, where: str, config: PrepareConfig) -> Item:
    key = config.record_key
    if not isinstance(record, dict):
        return Problem(where, "wrong type", f"the line is a JSON {_json_type(record)}, not an object", f'write {{"{key}": ...}}')
    if key not in record:
        return Problem(where, "missing key", f"there is no key '{key}'", f'set key = "..." ({nearest(key, map(str, record))})')
    return _value(record[key], where, config)


def _value(value: Any, where: str, config: PrepareConfig) -> Item:
    key = config.record_key
    if config.task == "chat":
        return _conversation(value, where)
    if not isinstance(value, str):
        return Problem(where, "wrong type", f"'{key}' is a {_json_type(value)}, not a text", "name the key or column that holds the text")
    if not value:
        return Problem(where, "empty", f"'{key}' is empty", 'remove the record, or set on_bad = "skip"')
    try:
        content = value.encode()
    except UnicodeEncodeError:
        return Problem(where, "not UTF-8", f"'{key}' holds half of a surrogate pair", "write the character itself, or both halves")
    return Document(where, content) if b"\0" not in content else cast(Problem, check_text(content, where))


def _conversation(value: Any, where: str) -> Item:
    if not isinstance(value, list) or not value:
        return Problem(where, "wrong type", "the conversation is not a list of messages", 'write [{"role": ..., "content": ...}, ...]')
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return Problem(where, "wrong type", f"message {index} has no role", 'write {"role": "user", "content": ...}')
        if not isinstance(message.get("content"), str):
            return Problem(where, "wrong type", f"the content of message {index} is not a text", "write its content as a string")
    if not any(message["role"] == "assistant" and message["content"] for message in value):
        return Problem(where, "nothing to train on", "no assistant message has content", 'remove it, or set on_bad = "skip"')
    try:
        return Document(where, json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode())
    except UnicodeEncodeError:
        return Problem(where, "not UTF-8", "the conversation holds half of a surrogate pair", "write the character itself, or both halves")


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _parquet(file: Path, config: PrepareConfig) -> Iterator[Item]:
    import pyarrow
    import pyarrow.parquet

    key = config.record_key
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if key not in names:
                remedy = f'set key = "..." ({nearest(key, names)})'
                yield Problem(str(file), "missing key", f"there is no column '{key}'", remedy)
                return
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[key]):
                for value in batch.column(0).to_pylist():
                    yield _value(_plain(value), f"{file}: row {row}", config)
                    row += 1
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        yield Problem(str(file), "broken Parquet", f"is not a readable Parquet file: {reason}", "restore or leave out the file")
        return
    if row == 0:
        yield Problem(str(file), "empty", "the file holds no row", "give a file with rows in it")


def _plain(value: Any) -> Any:
    """Drop the nulls that Arrow adds to structs for keys a message does not have."""
    if isinstance(value, list):
        return [{name: inner for name, inner in each.items() if inner is not None} if isinstance(each, dict) else each for each in value]
    return value
