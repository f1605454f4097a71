"""Several datasets as one: rows that are what the plan says, the same on any number of ranks, exact from any state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.core.config import parse
from surefoot.core.errors import ConfigError, DataError
from surefoot.data import DataConfig, PrepareConfig, TokenizerConfig, prepare
from surefoot.data.mixed import Mixed, MixedLoader
from surefoot.data.planner import PlanState
from tests.data.conftest import make_texts

LENGTH, ROWS = 48, 8


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three datasets of one tokenizer, of very different sizes."""
    folder = tmp_path_factory.mktemp("sources")
    found: list[str] = []
    for name, count in (("a", 120), ("b", 40), ("c", 15)):
        texts = folder / f"{name}.d"
        texts.mkdir()
        for number, text in enumerate(make_texts(count, seed=count)):
            (texts / f"{number:03}.txt").write_text(text)
        tokenizer = TokenizerConfig(path=found[0]) if found else TokenizerConfig(vocab_size=300)
        out = folder / name
        prepare(PrepareConfig(inputs=(str(texts),), tokenizer=tokenizer, validation_fraction=0.1), out)
        found.append(str(out))
    return found


def config(paths: list[str], **more: object) -> DataConfig:
    sources = [{"name": Path(path).name, "path": path, "weight": 1.0} for path in paths]
    return parse(DataConfig, {"sources": sources, "sequence_length": LENGTH, "seed": 3, **more}, where="test")


def loader(paths: list[str], state: PlanState | None = None, origin: int = 0, **layout: int) -> MixedLoader:
    return Mixed.open(config(paths)).loader(ROWS, state=state, origin=origin, **layout)


def test_rows_hold_the_documents_that_the_plan_names(paths: list[str]) -> None:
    mixed = loader(paths)
    batch = mixed.batch(0, ROWS)
    rows = mixed._ordered(0, ROWS)
    for index, row in enumerate(rows):
        place = 0
        for number, piece in enumerate(row):
            source = mixed.sources[piece.source]
            document, length = source.place(piece.n)
            start = int(source.starts[document])
            tokens = np.asarray(source.tokens.read(start, start + length), dtype=np.int64)
            here = slice(place, place + piece.size)
            assert batch.tokens[index, here].tolist() == tokens[piece.low : piece.high].tolist()
            wanted = [*tokens[piece.low + 1 : piece.high + 1].tolist(), *([-100] if piece.high == length else [])]
            assert batch.labels[index, here].tolist() == wanted
            assert batch.positions[index, here].tolist() == list(range(piece.size))
            assert set(batch.documents[index, here].tolist()) == {number}
            place += piece.size
        assert set(batch.documents[index, place:].tolist()) <= {-1}
    assert batch.trained == mixed.trained(0, ROWS) == int((batch.labels != -100).sum())


def test_a_step_has_the_same_rows_on_any_number_of_ranks(paths: list[str]) -> None:
    one = loader(paths)
    for ranks, micro_batches in ((2, 1), (4, 2), (8, 1)):
        many = loader(paths, ranks=ranks, micro_batches=micro_batches)
        each = ROWS // ranks
        for step in range(5):
            whole = one.batch(step * ROWS, ROWS)
            parts = [many.batch(step * ROWS + rank * each, each) for rank in range(ranks)]
            mine, theirs = (sorted(map(tuple, x.tolist())) for x in (whole.tokens, torch.cat([part.tokens for part in parts])))
            assert mine == theirs
            assert sum(part.trained for part in parts) == whole.trained
            assert sum(part.bytes for part in parts) == whole.bytes


def test_ranks_have_about_as_much_attention_each(paths: list[str]) -> None:
    mixed = loader(paths, ranks=4)
    costs = []
    for step in range(20):
        documents = mixed.batch(step * ROWS, ROWS).documents
        pairs = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
        costs.append(pairs.sum((1, 2)).view(4, -1).sum(1).double())
    balanced = torch.stack([cost.max() / cost.mean() for cost in costs]).mean()
    assert balanced < 1.25


def test_reading_goes_on_from_a_state(paths: list[str]) -> None:
    whole = loader(paths)
    expected = [whole.batch(step * ROWS, ROWS) for step in range(12)]
    state = PlanState.from_json(whole.state(7).to_json())
    again = loader(paths, state, origin=7 * ROWS)
    for step in range(7, 12):
        assert torch.equal(again.batch(step * ROWS, ROWS).tokens, expected[step].tokens)


def test_weights_set_while_reading_goes_on_hold_from_their_step(paths: list[str]) -> None:
    mixed, plain = loader(paths), loader(paths)
    mixed.batch(5 * ROWS, ROWS)
    mixed.reweigh(4, (0.0, 0.0, 1.0))
    for step in range(3):
        assert torch.equal(mixed.batch(step * ROWS, ROWS).tokens, plain.batch(step * ROWS, ROWS).tokens)
    assert mixed.plan(4).weights == (0.0, 0.0, 1.0)
    again = loader(paths, PlanState.from_json(mixed.state(6).to_json()), origin=6 * ROWS)
    assert torch.equal(again.batch(6 * ROWS, ROWS).tokens, mixed.batch(6 * ROWS, ROWS).tokens)


def test_every_document_of_an_epoch_comes_once(paths: list[str]) -> None:
    source = Mixed.open(config(paths)).sources()[1]
    count = source.documents
    epochs = [[source.place(n)[0] for n in range(epoch * count, (epoch + 1) * count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_sources_end_at_their_epochs(paths: list[str]) -> None:
    sources = [{"name": Path(path).name, "path": path, "weight": 1.0, "max_epochs": 0.5} for path in paths]
    asked = parse(DataConfig, {"sources": sources, "sequence_length": LENGTH}, where="test")
    mixed = Mixed.open(asked).loader(ROWS)
    with pytest.raises(DataError, match="the sources have given all they may before step"):
        for step in range(10_000):
            mixed.batch(step * ROWS, ROWS)


def test_another_tokenizer_is_refused(paths: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("quite another text " * 50)
    prepare(
        PrepareConfig(inputs=(str(tmp_path / "t.txt"),), tokenizer=TokenizerConfig(vocab_size=270), validation_fraction=0.0), tmp_path / "d"
    )
    with pytest.raises(DataError, match="was prepared with another tokenizer"):
        Mixed.open(config([*paths, str(tmp_path / "d")]))


SOURCE = {"name": "a", "path": "x"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, r"data\.path: is missing"),
        ({"path": "x", "sources": [SOURCE]}, "is given beside sources"),
        ({"sources": [SOURCE, SOURCE]}, "two sources are called 'a'"),
        ({"sources": [SOURCE | {"weight": 0.0}]}, "greater than 0"),
        ({"sources": [SOURCE | {"weight": -1.0}]}, "greater than 0"),
        ({"sources": [SOURCE | {"weight": 1.0}, SOURCE | {"name": "b"}]}, "'b' has no weight while 'a' has one"),
        ({"sources": [SOURCE], "mixture": {"stages": [{"at": 5, "weights": {"a": 1}}]}}, "no stage begins at 0"),
        ({"sources": [SOURCE], "mixture": {"stages": [{"at": 0, "weights": {"aa": 1}}]}}, "there is no source 'aa' — did you mean 'a'"),
        ({"sources": [SOURCE], "mixture": {"stages": [{"at": 0, "weights": {"a": 0}}]}}, "all weights are zero"),
        ({"sources": [SOURCE | {"weight": 1}], "mixture": {"stages": [{"at": 0, "weights": {"a": 1}}]}}, "keep one of them"),
    ],
)
def test_bad_mixtures_are_refused(table: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(DataConfig, table, where="test")
