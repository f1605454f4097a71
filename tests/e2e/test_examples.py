"""The configs that a user starts from: each is valid, runs what its first lines say, and says what is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
import torch

from surefoot.cli import demonstration
from surefoot.cli.app import root
from surefoot.core.config import load
from surefoot.data import Dataset
from surefoot.models import Transformer
from surefoot.train import TrainConfig

FILES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))
EXAMPLES = [path for path in FILES if "[model]" in path.read_text()]
SIZE = re.compile(r"(\d+) million parameters")
PAGES = [*FILES, EXAMPLES[0].parents[1] / "README.md"]


def commands(page: Path) -> list[list[str]]:
    """Return the `surefoot` commands that stand in comments or indented blocks of `page`."""
    lines = re.findall(r"^(?:#   |    )surefoot (.*)$", page.read_text(), flags=re.MULTILINE)
    return [shlex.split(re.split(r"\s{3,}", line)[0], comments=True) for line in lines]


def is_called_for(path: str) -> bool:
    return not path.startswith("examples/") or (EXAMPLES[0].parents[1] / path).is_file()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_has_a_run_of_its_own(example: Path) -> None:
    config = load(TrainConfig, example)
    others = {load(TrainConfig, other).run for other in EXAMPLES if other != example}
    assert config.run not in others
    assert commands(example), "its first lines say how it is run"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_that_is_told_parses_and_names_files_that_exist(page: Path) -> None:
    for arguments in commands(page):
        command: click.Command = root
        rest = list(arguments)
        while isinstance(command, click.Group):
            name = rest.pop(0)
            found = command.get_command(click.Context(command), name)
            assert found is not None, arguments
            command = found
        command.make_context(command.name, rest)  # raises UsageError for an option that does not exist
        assert all(is_called_for(argument) for argument in arguments), arguments


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_overrides_that_are_told_are_valid(example: Path) -> None:
    for arguments in commands(example):
        if arguments[0] == "train":
            load(TrainConfig, EXAMPLES[0].parents[1] / arguments[1], [word for word in arguments[2:] if "=" in word])


@pytest.mark.parametrize("example", [path for path in EXAMPLES if SIZE.search(path.read_text())], ids=lambda path: path.stem)
def test_the_size_that_is_told_is_the_size(example: Path) -> None:
    told = SIZE.search(example.read_text())
    assert told is not None
    model = Transformer(load(TrainConfig, example).model, device="meta")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == int(told[1])


def test_models_that_continue_another_have_its_shape() -> None:
    by_run = {config.run: config for config in (load(TrainConfig, example) for example in EXAMPLES)}
    heirs = [config for config in by_run.values() if config.train.init_from]
    assert heirs
    for heir in heirs:
        parent = by_run[str(heir.train.init_from)]
        shapes = [{n: p.shape for n, p in Transformer(c.model, device="meta").named_parameters()} for c in (heir, parent)]
        assert shapes[0] == shapes[1]


def test_the_demo_by_hand_is_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "fastest_precision", lambda: "float32")
    by_hand = load(TrainConfig, next(path for path in EXAMPLES if path.stem == "demo"))
    dataset = cast(Dataset, SimpleNamespace(vocab_size=by_hand.model.vocab_size, path=Path(by_hand.data.path)))
    schedule = by_hand.schedule.model_dump(exclude={"warmup_steps"})
    made = demonstration.demo_config(dataset, Path(by_hand.run), steps=by_hand.train.steps, schedule=schedule)
    kept = {"train": by_hand.train.model_copy(update={"eval_every": 0}), "checkpoint": made.checkpoint}
    assert made == by_hand.model_copy(update=kept)


@pytest.mark.parametrize("example", [path for path in EXAMPLES if "init_from" not in path.read_text()], ids=lambda path: path.stem)
def test_an_example_model_has_a_finite_loss_and_gradients(example: Path) -> None:
    from surefoot.models import initialise

    spec = load(TrainConfig, example).model
    model = Transformer(spec)
    initialise(model, 0)
    tokens = torch.randint(0, spec.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, labels=tokens.roll(-1, 1), normaliser=16)
    loss.total.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    # At the start every token is about equally likely: log V nats.
    assert float(loss.cross_entropy) == pytest.approx(torch.tensor(float(spec.vocab_size)).log().item(), rel=0.15)
