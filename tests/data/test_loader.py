from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.data import Batch, Dataset, Loader, Prefetcher

FIELDS = ("tokens", "labels", "positions", "documents")
relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["text", "chat"])
def dataset(request: pytest.FixtureRequest) -> Dataset:
    found = request.getfixturevalue(f"{request.param}_dataset")
    assert isinstance(found, Dataset)
    return found


def assert_equal(first: Batch, second: Batch) -> None:
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in FIELDS)
    assert (first.trained, first.bytes) == (second.trained, second.bytes)


def join(parts: list[Batch]) -> Batch:
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS}
    return Batch(**tensors, trained=sum(part.trained for part in parts), bytes=sum(part.bytes for part in parts))


@relaxed
@given(position=st.integers(0, 10**9), per_rank=st.integers(1, 4), ranks=st.integers(1, 6), length=st.sampled_from([61, 150]))
def test_slices_of_any_number_of_ranks_make_the_same_global_batch(
    dataset: Dataset, position: int, per_rank: int, ranks: int, length: int
) -> None:
    loader = dataset.loader("train", length, seed=3)
    parts = [loader.batch(position + rank * per_rank, per_rank) for rank in range(ranks)]
    whole = loader.batch(position, per_rank * ranks)
    assert_equal(join(parts), whole)
    assert loader.trained(position, per_rank * ranks) == whole.trained


@relaxed
@given(steps=st.integers(1, 8), stop=st.integers(0, 8), batch=st.integers(1, 7), other=st.integers(1, 7))
def test_a_resumed_stream_equals_the_undisturbed_one(dataset: Dataset, steps: int, stop: int, batch: int, other: int) -> None:
    """Stop anywhere, open the dataset anew, go on with another batch size: the same samples in the same order."""
    stop = min(stop, steps)
    straight = [dataset.loader(seed=7, sequence_length=96).batch(step * batch, batch) for step in range(steps)]
    again = Dataset.open(dataset.path).loader(seed=7, sequence_length=96)
    resumed = [*straight[:stop]]
    position = stop * batch
    while position < steps * batch:
        count = min(other, steps * batch - position)
        resumed.append(again.batch(position, count))
        position += count
    assert_equal(join(resumed), join(straight))


def test_dtypes_and_shapes_are_those_promised(dataset: Dataset) -> None:
    batch = dataset.loader(sequence_length=96).batch(5, 3)
    assert {name: getattr(batch, name).dtype for name in FIELDS} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "positions": torch.int64,
        "documents": torch.int32,
    }
    assert all(getattr(batch, name).shape == (3, 96) for name in FIELDS)
    assert all(getattr(batch, name).is_contiguous() for name in FIELDS)
    assert batch.trained == int((batch.labels != -100).sum())


def test_an_epoch_trains_every_token_of_the_split_and_counts_its_bytes(text_dataset: Dataset, texts: list[str]) -> None:
    """The labels of one epoch are the documents' tokens and ends, as many times as they stand there; the bytes are the texts'."""
    total_bytes = 0
    for split in ("train", "validation"):
        loader = text_dataset.loader(split, 48, seed=1)
        epoch = [loader.batch(position, 1) for position in range(loader.samples)]
        labels = np.bincount(
            np.concatenate([part.labels[part.labels != -100].numpy() for part in epoch]), minlength=text_dataset.vocab_size
        )
        record = text_dataset.split(split)
        assert labels.sum() == record.trained == record.tokens - record.documents
        assert labels[text_dataset.special.end] == record.documents
        assert labels[text_dataset.special.begin] == 0
        assert sum(part.bytes for part in epoch) == record.text_bytes
        total_bytes += record.text_bytes
    assert total_bytes == sum(len(text.encode()) for text in texts)


def test_each_document_of_a_row_is_a_piece_of_one_text(text_dataset: Dataset, texts: list[str]) -> None:
    """No leak across documents: what stands between two boundaries spells part of a single text, and so does it with its labels."""
    spellings, corpus = text_dataset.vocabulary.spellings(), [text.encode() for text in texts]
    batch = text_dataset.loader("train", 40, seed=2).batch(0, 60)
    for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
        for document in range(int(documents.max()) + 1):
            here = documents == document
            inputs, targets = tokens[here].tolist(), labels[here].tolist()
            assert targets[:-1] == inputs[1:]
            piece = [*inputs, *targets[-1:]] if targets[-1] != -100 else inputs
            spelled = b"".join(spellings[token] for token in piece)
            assert any(spelled in text for text in corpus)


def test_a_position_that_does_not_exist_is_refused(text_dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="position -1"):
        text_dataset.loader().batch(-1, 2)
    with pytest.raises(ConfigError, match="no 0 samples"):
        text_dataset.loader().batch(0, 0)


def test_prefetched_batches_are_the_same_in_the_same_order(text_dataset: Dataset) -> None:
    loader = text_dataset.loader(sequence_length=32)
    requests = [(index * 4, 4) for index in range(9)]
    with Prefetcher(loader, requests, depth=3) as ahead:
        found = list(ahead)
    assert len(found) == 9
    for batch, request in zip(found, requests, strict=True):
        assert_equal(batch, loader.batch(*request))


class Counting:
    """Stands in for a loader: counts its calls, and fails at one position."""

    def __init__(self, loader: Loader, fails_at: int = -1) -> None:
        self.loader, self.fails_at, self.calls = loader, fails_at, 0

    def batch(self, position: int, count: int) -> Batch:
        self.calls += 1
        if position == self.fails_at:
            raise OSError("the disk is gone")
        return self.loader.batch(position, count)


def threads() -> int:
    return sum(thread.name.startswith("surefoot-prefetch") for thread in threading.enumerate())


def test_no_more_is_made_ahead_than_asked_and_close_ends_the_thread(text_dataset: Dataset) -> None:
    loader = Counting(text_dataset.loader(sequence_length=32))
    endless = ((position, 1) for position in range(10**9))
    ahead = Prefetcher(loader, endless, depth=3)  # type: ignore[arg-type]
    next(ahead)
    time.sleep(0.1)
    assert loader.calls == 4
    ahead.close()
    ahead.close()
    assert threads() == 0
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_error_reaches_the_step_that_needed_the_batch(text_dataset: Dataset) -> None:
    loader = Counting(text_dataset.loader(sequence_length=32), fails_at=2)
    ahead = Prefetcher(loader, ((position, 1) for position in range(10)), depth=4)  # type: ignore[arg-type]
    next(ahead)
    next(ahead)
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert threads() == 0


def test_a_batch_costs_far_less_than_a_step(text_dataset: Dataset) -> None:
    """32 rows of 512 in well under 2 ms (0.4 ms on an idle core); the limit leaves room for a busy machine."""
    loader = text_dataset.loader(sequence_length=512)
    times = []
    for index in range(30):
        begin = time.perf_counter()
        loader.batch(index * 32, 32)
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3
