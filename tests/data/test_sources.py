from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.data.config import PrepareConfig
from surefoot.data.sources import Document, Problem, find_files, read_documents


def config(**given: Any) -> PrepareConfig:
    return PrepareConfig(inputs=("unused",), **given)


def contents(file: Path, **given: Any) -> list[bytes]:
    items = list(read_documents(file, config(**given)))
    assert all(isinstance(item, Document) for item in items), items
    return [item.content for item in items if isinstance(item, Document)]


def write_parquet(file: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), file)
    return file


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.py", "README"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str, suffix: str) -> None:
    content = "línea 1\r\nline 2\n\n".encode()
    pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    file = tmp_path / (name + suffix)
    file.write_bytes(pack[suffix](content))
    assert contents(file) == [content]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_lines_are_documents(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"body": text}).encode() + b"\n" for text in ("a\nb", "ünï", "🙂")]
    raw = b"\xef\xbb\xbf" + lines[0] + b"\n" + lines[1] + lines[2].rstrip()
    pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(pack[suffix](raw))
    assert contents(file, key="body") == [b"a\nb", "ünï".encode(), "🙂".encode()]


def test_zstd_frames_one_after_another_are_all_read(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.zst"
    file.write_bytes(zstandard.compress(b"first ") + zstandard.compress(b"second"))
    assert contents(file) == [b"first second"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    assert contents(write_parquet(tmp_path / "a.parquet", text=["a", "b"], other=[1, 2])) == [b"a", b"b"]


def test_conversations_are_equal_however_they_are_stored(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    parquet = write_parquet(tmp_path / "a.parquet", messages=[[*talk[:1], {**talk[1], "name": "x"}], talk])
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [*talk[:1], {**talk[1], "name": "x"}]}) + "\n" + json.dumps({"messages": talk}))
    assert contents(parquet, task="chat") == contents(file, task="chat")


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300), limit=st.integers(4, 40))
def test_a_long_text_is_cut_without_loss_at_character_borders(tmp_path_factory: pytest.TempPathFactory, text: str, limit: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_bytes(text.encode())
    parts = contents(file, max_document_bytes=limit)
    assert b"".join(parts) == text.encode()
    assert all(0 < len(part) <= limit and part.decode() is not None for part in parts)


def test_a_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\nthree\n" * 10)
    items = [item for item in read_documents(file, config(max_document_bytes=10)) if isinstance(item, Document)]
    assert all(item.content.endswith(b"\n") for item in items)
    assert [item.where for item in items[:3]] == [str(file), f"{file}:3", f"{file}:5"]


BAD = [
    ("a.txt", b"text\0more", {}, "", "binary"),
    ("a.txt", b"good\nbad \xff\n", {}, "", "not UTF-8: byte 0xff at offset 9"),
    ("a.txt", b"cut short \xe2\x82", {}, "", "not UTF-8"),
    ("a.txt.gz", gzip.compress(b"text" * 1000)[:-9], {}, "", "compressed data is broken"),
    ("a.txt.gz", b"not gzip", {}, "", "compressed data is broken"),
    ("a.txt.zst", zstandard.compress(b"text" * 1000)[:-3], {}, "", "compressed data is broken"),
    ("a.txt.zst", b"not zstd", {}, "", "compressed data is broken"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', {}, ":2", "not valid JSON"),
    ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', {}, ":3", "no key 'text'"),
    ("a.jsonl", b'{"text": "a\xff"}\n', {}, ":1", "not UTF-8"),
    ("a.jsonl", b"[1]\n", {}, ":1", "JSON list, not an object"),
    ("a.jsonl", b'{"text": 3}\n', {}, ":1", "'text' is a number, not a text"),
    ("a.jsonl", b'{"text": null}\n', {}, ":1", "'text' is a null"),
    ("a.jsonl", b'{"text": ""}\n', {}, ":1", "'text' is empty"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', {}, ":1", "surrogate"),
    ("a.jsonl", b'{"text": "a\\u0000"}\n', {}, ":1", "binary"),
    ("a.jsonl", b"[" * 100_000, {}, ":1", "not valid JSON: nested too deeply"),
    ("a.jsonl", b"\n\n", {}, "", "no record"),
    ("a.parquet", b"not parquet", {}, "", "not a readable Parquet file"),
    ("a.txt", b"hello", {"task": "chat"}, "", "conversations cannot be read from plain text"),
    ("a.jsonl", b'{"messages": "hi"}', {"task": "chat"}, ":1", "not a list of messages"),
    ("a.jsonl", b'{"messages": [{"content": "hi"}]}', {"task": "chat"}, ":1", "message 0 has no role"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": 1}]}', {"task": "chat"}, ":1", "content of message 0 is not a text"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}', {"task": "chat"}, ":1", "no assistant message"),
]


@pytest.mark.parametrize(("name", "raw", "given", "line", "what"), BAD, ids=[f"{index}-{case[0]}" for index, case in enumerate(BAD)])
def test_bad_input_names_the_place_and_the_remedy(
    tmp_path: Path, name: str, raw: bytes, given: dict[str, Any], line: str, what: str
) -> None:
    file = tmp_path / name
    file.write_bytes(raw)
    problems = [item for item in read_documents(file, config(**given)) if isinstance(item, Problem)]
    assert len(problems) == 1
    assert problems[0].where == f"{file}{line}"
    assert what in problems[0].what
    assert problems[0].remedy
    assert "\n" not in str(problems[0].error())


def test_a_missing_parquet_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", texts=["a"])
    (problem,) = read_documents(file, config())
    assert isinstance(problem, Problem)
    assert "no column 'text'" in problem.what
    assert "did you mean 'texts'?" in problem.remedy


def test_files_are_found_once_in_order_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden/x.txt", "__pycache__/y.txt", "sub/c.txt", "sub/skip.log", "empty.txt", ".dot.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("" if name == "empty.txt" else "text")
    found = find_files([str(tmp_path), str(tmp_path / "*.txt"), str(tmp_path / "a.txt")], ["*.log"])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.txt", "b.txt", "sub/c.txt"]
    inside = find_files([str(tmp_path / ".hidden" / "*")])  # a hidden folder that the user named is taken
    assert [file.name for file in inside] == ["x.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "missing/**/*.txt", "empty.txt", "folder"])
def test_an_input_that_names_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no such file|no file with content|is empty"):
        find_files([str(tmp_path / name)])
