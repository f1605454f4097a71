from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from surefoot.core import files
from surefoot.core.errors import EngineError


def test_write_atomic_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, "old")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_at_any_step_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, "old")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(EngineError, match=r"a\.txt: the disk is full — free some space"):
        files.write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_usual_file_mode_is_given(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "a", "")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_hash_is_xxh3_128(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert files.hash_file(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"  # XXH3_128("") of the xxHash specification
    (tmp_path / "big").write_bytes(b"a" * (files.HASH_CHUNK_BYTES + 1))
    (tmp_path / "other").write_bytes(b"a" * files.HASH_CHUNK_BYTES + b"b")
    assert files.hash_file(tmp_path / "big") != files.hash_file(tmp_path / "other")


def test_free_bytes_looks_at_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "not" / "yet") > 0
