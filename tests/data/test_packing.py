from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.packing import IGNORED, Packing, StreamPacking, best_fit, pack_conversations
from surefoot.data.shards import SplitWriter, Stream

PAD = 9999


def write(
    folder: Path, documents: list[np.ndarray], shard: int, flags: list[np.ndarray] | None = None
) -> tuple[Stream, Stream, np.ndarray]:
    with SplitWriter(folder / "split", "<u2", shard, flags=flags is not None) as writer:
        for index, document in enumerate(documents):
            writer.add(document, None if flags is None else flags[index])
        paths = writer.close()
    found = {kind: [path for path in paths if path.name.startswith(kind)] for kind in ("tokens", "trained")}
    starts = np.fromfile(folder / "split" / "documents.bin", dtype="<u8")
    return Stream.open(found["tokens"], "<u2", shard), Stream.open(found["trained"], "u1", shard), starts


def numbered(sizes: list[int]) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that a token says where it stands."""
    ends = np.cumsum([0, *sizes])
    return [np.arange(low, high, dtype=np.uint32) for low, high in pairwise(ends)]


def pairs(packing: Packing, numbers: list[int]) -> list[tuple[int, int]]:
    """Every (input, label) of the rows, after checking what holds for each row by itself."""
    rows = packing.rows(np.array(numbers, dtype=np.int64))
    assert packing.trained(np.array(numbers, dtype=np.int64)) == int((rows.labels != IGNORED).sum())
    found = []
    for tokens, labels, positions, documents in zip(rows.tokens, rows.labels, rows.positions, rows.documents, strict=True):
        seen: dict[int, int] = {}
        for column, (token, label, position, document) in enumerate(zip(tokens, labels, positions, documents, strict=True)):
            if document < 0:
                assert (token, label) == (PAD, IGNORED)
                assert (documents[column:] == -1).all()
                break
            assert position == seen.get(int(document), 0)
            seen[int(document)] = int(position) + 1
            if label != IGNORED:
                found.append((int(token), int(label)))
        assert sorted(seen) == list(range(len(seen)))
    return found


@settings(deadline=None)
@given(sizes=st.lists(st.integers(2, 12), min_size=1, max_size=25), length=st.integers(1, 20), shard=st.integers(1, 40))
def test_every_token_but_a_documents_first_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, shard: int
) -> None:
    stream, _, starts = write(tmp_path_factory.mktemp("rows"), numbered(sizes), shard)
    packing = StreamPacking(stream, starts, length, PAD)
    found = pairs(packing, list(range(packing.samples)))
    firsts = set(np.cumsum([0, *sizes]).tolist())
    assert sorted(label for _, label in found) == [token for token in range(sum(sizes)) if token not in firsts]
    # The label is the input's successor, and of the same document: the successor is no document's first token.
    assert all(label == token + 1 for token, label in found)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(2, 12), min_size=1, max_size=25), length=st.integers(1, 20))
def test_documents_within_a_row_are_the_documents_of_the_stream(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int
) -> None:
    stream, _, starts = write(tmp_path_factory.mktemp("rows"), numbered(sizes), 1 << 20)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    packing = StreamPacking(stream, starts, length, PAD)
    rows = packing.rows(np.arange(packing.samples))
    for tokens, documents in zip(rows.tokens, rows.documents, strict=True):
        real = documents >= 0
        assert np.array_equal(documents[real], owner[tokens[real]] - owner[tokens[0]])


@settings(deadline=None)
@given(data=st.data(), length=st.integers(2, 24), shard=st.integers(1, 40))
def test_conversations_are_packed_whole_and_only_marked_tokens_are_labels(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, length: int, shard: int
) -> None:
    sizes = data.draw(st.lists(st.integers(2, 16), min_size=1, max_size=25))
    documents = numbered(sizes)
    flags = [np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))) for size in sizes]
    stream, marks, starts = write(tmp_path_factory.mktemp("rows"), documents, shard, flags)
    packing = pack_conversations(stream, marks, starts, length, PAD)
    found = pairs(packing, list(range(packing.samples)))
    wanted = [
        int(token)
        for document, marked in zip(documents, flags, strict=True)
        for token, mark in zip(document[1:length], marked[1:length], strict=True)
        if mark
    ]
    assert sorted(label for _, label in found) == sorted(wanted)
    assert all(label == token + 1 for token, label in found)
    usable = [size for size, marked in zip(sizes, flags, strict=True) if marked[1:length].any()]
    assert packing.dropped == len(sizes) - len(usable)
    assert packing.cut == sum(size > length for size in usable)


@given(sizes=st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_takes_every_item_once_into_few_bins(sizes: list[int]) -> None:
    bins = best_fit(np.array(sizes, dtype=np.int64), 50)
    assert sorted(item for each in bins for item in each) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in each) <= 50 for each in bins)
    fewest = -(-sum(sizes) // 50)
    assert len(bins) <= 11 / 9 * max(fewest, sum(size > 25 for size in sizes)) * 1.5 + 4


def test_best_fit_finds_a_perfect_packing() -> None:
    bins = best_fit(np.array([6, 4, 7, 3, 5, 5, 10]), 10)
    assert len(bins) == 4
    assert len(best_fit(np.array([9, 1, 9, 1]), 10)) == 2
