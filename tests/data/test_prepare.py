from __future__ import annotations

import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.core.errors import ConfigError, DataError, EngineError
from surefoot.data import Dataset, PrepareConfig, Progress, TokenizerConfig, prepare
from surefoot.data import prepare as prepare_function
from surefoot.data.shards import Manifest


def hashes(manifest: Manifest) -> dict[str, str]:
    records = [*manifest.files, *(record for split in manifest.splits.values() for record in split.files)]
    return {record.path: record.hash for record in records}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def with_changes(config: PrepareConfig, **changes: Any) -> PrepareConfig:
    return PrepareConfig.model_validate({**config.model_dump(), **changes})


def documents_of(dataset: Dataset, split: str) -> list[str]:
    """The documents of a split, read back from the shards with the tokenizer's own decoder."""
    tokens = np.concatenate([np.fromfile(path, dtype=dataset.manifest.dtype) for path in sorted((dataset.path / split).glob("tokens-*"))])
    starts = np.fromfile(dataset.path / split / "documents.bin", dtype="<u8").astype(int)
    pieces = [tokens[low:high].tolist() for low, high in pairwise(starts)]
    assert all(piece[0] == dataset.special.begin and piece[-1] == dataset.special.end for piece in pieces)
    return [dataset.tokenizer.decode(piece[1:-1], skip_special_tokens=False) for piece in pieces]


def test_the_shards_hold_every_text_unchanged_in_file_order(text_dataset: Dataset, texts: list[str]) -> None:
    train, validation = documents_of(text_dataset, "train"), documents_of(text_dataset, "validation")
    assert sorted([*train, *validation]) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train
    assert len(validation) > 10
    assert text_dataset.manifest.inexact_documents == 0
    assert text_dataset.validation_bytes() == "".join(validation).encode()
    text_dataset.verify()


def test_two_preparations_give_the_same_bytes(text_config: PrepareConfig, text_dataset: Dataset, tmp_path: Path) -> None:
    again = prepare(text_config, tmp_path / "again")
    assert hashes(again.manifest) == hashes(text_dataset.manifest)
    assert (tmp_path / "again/manifest.json").read_bytes() == (text_dataset.path / "manifest.json").read_bytes()


def test_the_split_does_not_depend_on_file_names_or_order(text_dataset: Dataset, texts: list[str], tmp_path: Path) -> None:
    mixed = texts.copy()
    random.Random(5).shuffle(mixed)
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in mixed))
    other = prepare(
        PrepareConfig(inputs=(str(file),), tokenizer=TokenizerConfig(vocab_size=400), validation_fraction=0.2), tmp_path / "out"
    )
    for split in ("train", "validation"):
        assert sorted(documents_of(other, split)) == sorted(documents_of(text_dataset, split))
    assert other.tokenizer.to_str() == text_dataset.tokenizer.to_str()


def test_the_same_again_is_said_and_changes_nothing(text_config: PrepareConfig, tmp_path: Path) -> None:
    prepare(text_config, tmp_path / "out")
    before = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    seen: list[Progress] = []
    prepare(text_config, tmp_path / "out", seen.append)
    assert [progress.phase for progress in seen] == ["unchanged"]
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == before


def test_progress_runs_through_the_phases_to_their_end(text_config: PrepareConfig, tmp_path: Path) -> None:
    seen: list[Progress] = []
    prepare(text_config, tmp_path / "out", seen.append)
    assert list(dict.fromkeys(progress.phase for progress in seen)) == ["check", "tokenizer", "tokens"]
    for phase in ("check", "tokenizer", "tokens"):
        last = [progress for progress in seen if progress.phase == phase][-1]
        assert last.done == last.total


def test_a_directory_that_holds_something_else_is_refused(text_config: PrepareConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text_config, out)
    with pytest.raises(DataError, match="another configuration \\(max_document_bytes differ"):
        prepare(with_changes(text_config, max_document_bytes=100), out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(DataError, match="not a whole dataset"):
        prepare(text_config, tmp_path / "mine")
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="not a directory"):
        prepare(text_config, tmp_path / "file")


def test_files_that_changed_since_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text one\n" * 9)
    config = PrepareConfig(inputs=(str(file),), validation_fraction=0, tokenizer=TokenizerConfig(vocab_size=300))
    prepare(config, tmp_path / "out")
    file.write_text("text two\n" * 9)
    with pytest.raises(DataError, match="changed since"):
        prepare(config, tmp_path / "out")


def test_a_file_that_changes_while_it_is_read_is_noticed(text_config: PrepareConfig, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    shutil.copytree(text_config.inputs[0], folder)

    def meddle(progress: Progress) -> None:
        if progress.phase == "tokenizer":
            (folder / "199.txt").write_text("another text")

    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(with_changes(text_config, inputs=(str(folder),)), tmp_path / "out", meddle)
    assert leftovers(tmp_path) == ["texts"]


def test_a_given_tokenizer_is_kept_and_a_dataset_can_lend_its_own(
    text_dataset: Dataset, text_config: PrepareConfig, tmp_path: Path
) -> None:
    config = with_changes(text_config, tokenizer={"path": str(text_dataset.path)})
    other = prepare(config, tmp_path / "out")
    assert other.tokenizer.to_str() == text_dataset.tokenizer.to_str()
    assert documents_of(other, "train") == documents_of(text_dataset, "train")


def bad_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"text number {index}, good and long enough\n")
    (folder / "3.bin").write_bytes(b"\x7fELF\0\0")
    (folder / "4.latin").write_bytes("größe".encode("latin-1"))
    (folder / "5.jsonl").write_text('{"text": "good"}\nbroken\n{"text": "fine"}\n')
    return folder


def test_bad_records_stop_by_default_and_nothing_is_written(tmp_path: Path) -> None:
    folder = bad_folder(tmp_path)
    with pytest.raises(DataError, match=r"3\.bin: is a binary file"):
        prepare(PrepareConfig(inputs=(str(folder),)), tmp_path / "out")
    assert leftovers(tmp_path) == ["texts"]


def test_bad_records_are_skipped_counted_and_limited(tmp_path: Path) -> None:
    folder = bad_folder(tmp_path)
    config = PrepareConfig(inputs=(str(folder),), on_bad="skip", tokenizer=TokenizerConfig(vocab_size=300))
    dataset = prepare(config, tmp_path / "out")
    assert dataset.manifest.skipped.reasons == {"binary": 1, "broken JSON": 1, "not UTF-8": 1}
    assert f"{folder / '5.jsonl'}:2" in dataset.manifest.skipped.examples[-1]
    assert sum(split.documents for split in dataset.manifest.splits.values()) == 22
    assert any(name == "skipped" and value.startswith("3 ") for name, value in dataset.describe())
    with pytest.raises(DataError, match="more than max_skipped = 2"):
        prepare(with_changes(config, max_skipped=2), tmp_path / "limited")


def test_when_nothing_is_left_the_first_reason_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"no document is left .*binary"):
        prepare(PrepareConfig(inputs=(str(tmp_path / "a.bin"),), on_bad="skip"), tmp_path / "out")


def test_a_full_disk_leaves_nothing_and_says_so(text_config: PrepareConfig, tmp_path: Path) -> None:
    """The limit on file sizes makes a real write fail in a process of its own, as a full disk does."""
    code = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from surefoot.data import PrepareConfig, prepare\nfrom surefoot.core.errors import EngineError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n    prepare(PrepareConfig.model_validate_json(sys.argv[1]), sys.argv[2])\n"
        "except EngineError as error:\n    print(error)\n    sys.exit(7)\n"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, text_config.model_dump_json(), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert str(out) in done.stdout
    assert leftovers(tmp_path) == []


def test_too_little_space_is_seen_before_writing(text_config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["surefoot.data.prepare"], "free_bytes", lambda path: 10)
    with pytest.raises(EngineError, match="needs at least"):
        prepare(text_config, tmp_path / "out")
    assert leftovers(tmp_path) == []


KILLED = (
    "import sys, time\nfrom surefoot.data import PrepareConfig, prepare\n"
    "def wait(progress):\n    if progress.phase == 'tokens':\n        print('now', flush=True)\n        time.sleep(60)\n"
    "prepare(PrepareConfig.model_validate_json(sys.argv[1]), sys.argv[2], wait)\n"
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_leaves_no_dataset_and_the_next_run_cleans_up(text_config: PrepareConfig, tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, text_config.model_dump_json(), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        assert len(leftovers(tmp_path)) == 1  # it is being written aside
        os.kill(process.pid, how)
    assert not out.exists()
    assert len(leftovers(tmp_path)) == (1 if how == signal.SIGKILL else 0)
    prepare(text_config, out).verify()
    assert leftovers(tmp_path) == ["out"]


def test_a_preparation_under_way_is_not_taken_for_a_dead_one(text_config: PrepareConfig, tmp_path: Path) -> None:
    def second(progress: Progress) -> None:
        if progress.phase == "tokens" and progress.done == progress.total and not (tmp_path / "out").exists():
            prepare_function(text_config, tmp_path / "out").verify()
            assert [name.startswith(".out.preparing-") for name in leftovers(tmp_path)] == [True, False]

    with pytest.raises(EngineError, match="out"):
        prepare(text_config, tmp_path / "out", second)  # loses the race, and leaves the winner's dataset alone
    Dataset.open(tmp_path / "out").verify()
    assert leftovers(tmp_path) == ["out"]


def damaged(dataset: Dataset, folder: Path) -> Path:
    shutil.copytree(dataset.path, folder / "copy")
    return folder / "copy"


def test_a_damaged_dataset_is_refused(text_dataset: Dataset, tmp_path: Path) -> None:
    copy = damaged(text_dataset, tmp_path)
    shard = copy / "train/tokens-00000.bin"
    raw = shard.read_bytes()
    shard.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DataError, match=r"tokens-00000.bin: the content is not what was prepared"):
        Dataset.open(copy).verify()
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match="bytes instead of"):
        Dataset.open(copy)
    shard.unlink()
    with pytest.raises(DataError, match="is missing"):
        Dataset.open(copy)
    (copy / "manifest.json").write_text('{"version": 1, "voc')
    with pytest.raises(DataError, match="manifest cannot be read"):
        Dataset.open(copy)
    with pytest.raises(DataError, match="no prepared dataset"):
        Dataset.open(tmp_path)


def test_an_absent_split_is_named(text_config: PrepareConfig, tmp_path: Path) -> None:
    dataset = prepare(with_changes(text_config, validation_fraction=0.0), tmp_path / "out")
    assert list(dataset.manifest.splits) == ["train"]
    with pytest.raises(DataError, match="validation_fraction > 0"):
        dataset.loader("validation")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": "chat", "format": "text"}, "conversations cannot be read from plain text"),
        ({"chat_template": "x.jinja"}, "the task is 'text'"),
        ({"inputs": ()}, "at least 1"),
        ({"tokenizer": {"vocab_size": 100}}, "greater than or equal to 261"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], what: str) -> None:
    from surefoot.core.config import parse

    with pytest.raises(ConfigError, match=what):
        parse(PrepareConfig, {"inputs": ["a"], **changes})


def test_unigram_bits_per_byte_is_that_of_a_direct_count(text_dataset: Dataset) -> None:
    def labels(split: str) -> list[int]:
        batch = text_dataset.loader(split, 64, seed=None)
        rows = batch.batch(0, batch.samples).labels
        return rows[rows != -100].tolist()

    train, size = labels("train"), text_dataset.vocab_size
    counts = {token: train.count(token) for token in set(train)}
    bits = -sum(np.log2((counts.get(token, 0) + 1) / (len(train) + size)) for token in labels("validation"))
    expected = bits / len(text_dataset.validation_bytes())
    assert text_dataset.unigram_bits_per_byte("validation") == pytest.approx(expected, rel=1e-12)
    assert expected > 8 * len(lzma.compress(text_dataset.validation_bytes())) / len(text_dataset.validation_bytes()) * 0.5


def test_conversations_are_trained_on_what_the_assistant_says(chat_dataset: Dataset, conversations: list[list[dict[str, str]]]) -> None:
    spellings = chat_dataset.vocabulary.spellings()
    answers = sorted(message["content"] for talk in conversations for message in talk if message["role"] == "assistant")
    end = chat_dataset.tokenizer.token_to_id("<|im_end|>")
    found = []
    for split in ("train", "validation"):
        loader = chat_dataset.loader(split, 2048, seed=0)
        batch = loader.batch(0, loader.samples)
        said = b""
        for label in batch.labels[batch.labels != -100].tolist():
            if label == end:
                found.append(said.decode())
                said = b""
            else:
                said += spellings[label]
        assert said == b""
        assert batch.bytes == chat_dataset.split(split).text_bytes
        assert batch.trained == chat_dataset.split(split).trained
    assert sorted(found) == answers


def test_a_conversation_the_template_refuses_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}]}
    file.write_text("\n".join(json.dumps(each) for each in (good, bad)))
    with pytest.raises(DataError, match=r"chats.jsonl:2: message 0 holds the control token"):
        prepare(PrepareConfig(inputs=(str(file),), task="chat"), tmp_path / "out")


def test_a_conversation_that_begins_with_the_answer_trains_all_but_its_first_token(tmp_path: Path) -> None:
    file, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    file.write_text(json.dumps({"messages": [{"role": "assistant", "content": "hello"}]}))
    template.write_text("{% generation %}{{ messages[0].content }}<|im_end|>{% endgeneration %}")
    config = PrepareConfig(
        inputs=(str(file),),
        task="chat",
        chat_template=str(template),
        tokenizer=TokenizerConfig(vocab_size=261),
        validation_fraction=0,
    )
    dataset = prepare(config, tmp_path / "out")
    batch = dataset.loader(sequence_length=8).batch(0, 1)
    assert (dataset.split("train").trained, dataset.split("train").text_bytes) == (batch.trained, batch.bytes) == (5, 4)


def test_importing_the_front_door_does_not_import_torch() -> None:
    code = "import sys, surefoot.data; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - begin < 10
