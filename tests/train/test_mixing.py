"""A run on a mixture: exact across restarts, ranks and changes of weights, and a ledger that proves it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.data import Corpus, PrepareConfig, TokenizerConfig, prepare
from surefoot.data.ledger import audit
from surefoot.data.ledger import read as read_ledger
from surefoot.parallel import Processes
from surefoot.train import TrainConfig, fit
from surefoot.train.checkpoint import list_steps, load_model
from surefoot.train.mixing import ask
from tests.spawning import run_ranks
from tests.train.conftest import Configure

Mixture = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixture")
    found: list[dict[str, Any]] = []
    for name, words in (("greek", "alpha beta gamma delta"), ("digits", "one two three four"), ("colours", "red green blue")):
        chance = random.Random(name)
        texts = folder / f"{name}.d"
        texts.mkdir()
        for index in range(40):
            (texts / f"{index}.txt").write_text(" ".join(chance.choices(words.split(), k=chance.choice([4, 12, 60]))))
        tokenizer = TokenizerConfig(path=found[0]["path"]) if found else TokenizerConfig(vocab_size=300)
        prepare(PrepareConfig(inputs=(str(texts),), tokenizer=tokenizer, validation_fraction=0.2), folder / name)
        found.append({"name": name, "path": str(folder / name), "weight": float(3 - len(found))})
    return found


@pytest.fixture
def mixture(configure: Configure, sources: list[dict[str, Any]]) -> Mixture:
    def make(name: str, **tables: Any) -> TrainConfig:
        data = {"sources": sources, "path": None, "sequence_length": 32, **tables.pop("data", {})}
        tables.setdefault("train", {})
        return configure(name, data=data, train={"steps": 8} | tables.pop("train"), **tables)

    return make


def trained(config: TrainConfig, *, resume: bool = False, stop_after: int | None = None) -> None:
    steps = iter(range(1000))
    with Run.open(config.run) if resume else Run.create(config.run, config) as run:
        fit(config, run, resume=resume, stop=None if stop_after is None else lambda: next(steps) >= stop_after)


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return dict(load_model(config.run)[1].state_dict())


def same(one: TrainConfig, other: TrainConfig) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def proven(config: TrainConfig) -> list[str]:
    mixed = Corpus.open(config.data).mixed
    assert mixed is not None
    sources = mixed.sources()
    found = audit(read_ledger(Path(config.run) / "ledger.bin"), mixed.names, lambda source, n: sources[source].place(n)[1])
    assert found.steps == config.train.steps
    return found.problems


@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_run_taken_up_is_the_undisturbed_one_to_the_bit_and_so_is_its_ledger(mixture: Mixture, stop: int) -> None:
    calm, broken = mixture("calm"), mixture("broken")
    trained(calm)
    trained(broken, stop_after=stop)
    trained(broken, resume=True)
    assert same(calm, broken)
    assert proven(broken) == proven(calm) == []
    ledgers = [(Path(config.run) / "ledger.bin").read_bytes() for config in (calm, broken)]
    assert ledgers[0] == ledgers[1]


def test_steps_after_the_checkpoint_are_cut_off_the_ledger(mixture: Mixture) -> None:
    """A run that dies between checkpoints has noted steps that its successor trains again."""
    calm, dead = mixture("calm"), mixture("dead", checkpoint={"every": 3})
    trained(calm)
    with pytest.raises(RuntimeError, match="the power failed"):
        trained_until_death(dead, 5)
    trained(dead, resume=True)
    assert same(calm, dead)
    assert proven(dead) == []


def trained_until_death(config: TrainConfig, step: int) -> None:
    def die(kind: str, fields: dict[str, Any]) -> None:
        if kind == "step" and fields["step"] == step:
            raise RuntimeError("the power failed")

    with Run.create(config.run, config) as run:
        fit(config, run, on_event=die)


def on_a_rank(processes: Processes, config: TrainConfig) -> None:
    if processes.rank == 0:
        with Run.create(config.run, config) as run:
            fit(config, run)
    else:
        fit(config, None)


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}, {"context": 2}], ids=str)
def test_two_processes_train_on_the_same_documents_as_one(mixture: Mixture, tmp_path: Path, layout: dict[str, int]) -> None:
    one, two = mixture("one"), mixture("two", layout=layout)
    trained(one)
    run_ranks(on_a_rank, 2, tmp_path / "ranks", two)
    assert (Path(one.run) / "ledger.bin").read_bytes() == (Path(two.run) / "ledger.bin").read_bytes()
    ours, theirs = weights(one), weights(two)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9


def test_weights_changed_by_hand_hold_at_one_step_also_when_the_run_dies_before(mixture: Mixture) -> None:
    config = mixture("changed", checkpoint={"every": 2}, train={"steps": 14})
    calm = mixture("calm", checkpoint={"every": 2}, train={"steps": 14})
    for one, dies in ((calm, None), (config, 5)):
        with Run.create(one.run, one) as run:

            def at_two(kind: str, fields: dict[str, Any], one: TrainConfig = one, dies: int | None = dies) -> None:
                if kind == "step" and fields["step"] == 2:
                    ask(Path(one.run), {"colours": 1.0}, ["greek", "digits", "colours"])
                if kind == "step" and fields["step"] == dies:
                    raise RuntimeError

            if dies is None:
                fit(one, run, on_event=at_two)
            else:
                with pytest.raises(RuntimeError):
                    fit(one, run, on_event=at_two)
    trained(config, resume=True)
    assert same(calm, config)
    assert proven(config) == []
    told = [event.fields for event in read(Path(calm.run) / "events.jsonl") if event.kind == "mixture"]
    assert [one["why"] for one in told] == ["by hand"]
    assert told[0]["weights"] == {"greek": 0.0, "digits": 0.0, "colours": 1.0}
    entries = {entry.step: entry.pieces for entry in read_ledger(Path(calm.run) / "ledger.bin")}
    assert 2 in entries[14][:, 0].tolist()
    assert told[0]["step"] == 2 + 3 + 1


def test_weights_follow_losses_where_asked_and_every_source_is_evaluated(mixture: Mixture) -> None:
    config = mixture("follow", data={"mixture": {"follow_loss": 5.0}}, train={"eval_every": 2, "steps": 8})
    trained(config)
    events = list(read(Path(config.run) / "events.jsonl"))
    evaluations = [event.fields["sources"] for event in events if event.kind == "eval"]
    assert all(set(losses) == {"greek", "digits", "colours"} for losses in evaluations)
    changes = [event.fields for event in events if event.kind == "mixture"]
    assert [change["why"] for change in changes] == ["by loss"] * len(evaluations)
    assert all(abs(sum(change["weights"].values()) - 1.0) < 1e-12 for change in changes)


def test_a_run_whose_sources_end_keeps_what_it_trained(mixture: Mixture, sources: list[dict[str, Any]]) -> None:
    config = mixture("short", data={"sources": [source | {"max_epochs": 1.0} for source in sources]}, train={"steps": 500})
    with pytest.raises(DataError, match="the sources have given all they may before step"):
        trained(config)
    last = list_steps(Path(config.run) / "checkpoints")[-1]
    assert last > 3
    assert [entry.step for entry in read_ledger(Path(config.run) / "ledger.bin")] == list(range(1, last + 1))


def test_an_impossible_request_is_refused(tmp_path: Path) -> None:
    names = ["greek", "digits"]
    for asked, says in (
        ({"grek": 1.0}, "no source 'grek' — did you mean 'greek'"),
        ({"greek": -1.0}, "the weight of 'greek' is -1.0"),
        ({"greek": 0.0}, "all weights are zero"),
    ):
        with pytest.raises(DataError, match=says):
            ask(tmp_path, asked, names)
    assert not (tmp_path / "reweight.json").exists()
    ask(tmp_path, {"greek": 2.0}, names)
    assert json.loads((tmp_path / "reweight.json").read_text()) == {"greek": 2.0}
