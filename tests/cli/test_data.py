from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli.app import main
from surefoot.data import Dataset

DOCUMENTS = {f"{number}.txt": f"document {number}\n" + "one two three four five\n" * number for number in range(1, 25)}


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run the command in this process and return what it printed."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured.out if code == 0 else captured.err


@pytest.fixture
def dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "texts").mkdir()
    for name, text in DOCUMENTS.items():
        (tmp_path / "texts" / name).write_text(text)
    told(capsys, "data", "prepare", tmp_path / "texts", "--out", tmp_path / "d", "--vocab-size", 300, "--validation-fraction", 0.2)
    return tmp_path / "d"


def test_inspect_counts_what_was_written(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, "data", "inspect", dataset, "--json"))
    assert set(found["splits"]) == {"train", "validation"}
    assert sum(split["documents"] for split in found["splits"].values()) == len(DOCUMENTS)
    assert found["verified"] is False


def test_the_rows_shown_are_those_that_training_reads(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(told(capsys, "data", "inspect", dataset, "--rows", 3, "--sequence-length", 32, "--json"))["rows"]
    opened = Dataset.open(dataset)
    batch = opened.loader("train", 32).batch(0, 3)
    assert [opened.tokenizer.encode(row, add_special_tokens=False).ids for row in rows] == batch.tokens.tolist()
    assert rows[0] in told(capsys, "data", "inspect", dataset, "--rows", 1, "--sequence-length", 32)


def test_a_changed_byte_is_found_only_by_reading_it_all(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "every file is what was prepared" in told(capsys, "data", "inspect", dataset, "--verify")
    shard = next((dataset / "train").glob("tokens-*"))
    content = bytearray(shard.read_bytes())
    content[8] ^= 1
    shard.write_bytes(content)
    told(capsys, "data", "inspect", dataset)
    message = told(capsys, "data", "inspect", dataset, "--verify", code=2)
    assert str(shard) in message
    assert message.count("\n") == 1


def test_a_split_that_is_not_there_is_refused(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no split 'valid'" in told(capsys, "data", "inspect", dataset, "--rows", 1, "--split", "valid", code=2)
