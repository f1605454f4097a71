"""The loop's promises: what may not change the numbers does not, and what stops a run stops it cleanly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.errors import ConfigError, NumericsError
from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.data import Dataset
from surefoot.models import Transformer, initialise
from surefoot.parallel import Mesh, ParallelModel, Processes
from surefoot.train import TrainConfig, fit, load_model
from tests.spawning import run_ranks
from tests.train.conftest import MOE, Configure


def train(config: TrainConfig, *, resume: bool = False) -> dict[str, torch.Tensor]:
    with Run.open(config.run) if resume else Run.create(config.run, config) as run:
        fit(config, run, resume=resume)
    return load_model(config.run)[1].state_dict()


def train_rank(processes: Processes, config: TrainConfig, resume: bool = False) -> None:
    if processes.rank == 0:
        with Run.open(config.run) if resume else Run.create(config.run, config) as run:
            fit(config, run, resume=resume)
    else:
        fit(config, None, resume=resume)


def train_on(size: int, config: TrainConfig, folder: Path, *, resume: bool = False) -> dict[str, torch.Tensor]:
    run_ranks(train_rank, size, folder, config, resume)
    return load_model(config.run)[1].state_dict()


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-30)) for name in one)


# Adam divides by the root of squares, so where a gradient is nearly zero rounding grows: weights are compared at 1e-9, and a
# wrong normaliser (a mean of means, a factor of two) is off by 1e-3 and more.
SAME = 1e-9


@pytest.mark.parametrize("model", [None, MOE], ids=["dense", "moe"])
def test_micro_batches_and_recomputation_do_not_change_the_result(configure: Configure, model: dict[str, Any] | None) -> None:
    """Documents differ in length, so micro-batches train different numbers of tokens: only a global count weighs them right."""
    tables: dict[str, Any] = {"model": model} if model else {}
    whole = train(configure("whole", **tables))
    assert distance(train(configure("pieces", train={"micro_batch_size": 2}, **tables)), whole) < SAME
    assert distance(train(configure("recomputed", train={"recompute": True}, **tables)), whole) == 0.0


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicate", "shard"])
@pytest.mark.parametrize("model", [None, MOE], ids=["dense", "moe"])
def test_two_processes_equal_one(configure: Configure, tmp_path: Path, layout: dict[str, int], model: dict[str, Any] | None) -> None:
    tables: dict[str, Any] = {"model": model} if model else {}
    alone = train(configure("alone", **tables))
    assert distance(train_on(2, configure("both", layout=layout, **tables), tmp_path / "ranks"), alone) < SAME


def logged(config: TrainConfig, *names: str) -> list[list[float]]:
    return [[event.fields[name] for name in names] for event in read(Path(config.run) / "events.jsonl") if event.kind == "step"]


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicate", "shard"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_and_gradient_norm_agree_to_float64_rounding(configure: Configure, tmp_path: Path, layout: dict[str, int], kind: str) -> None:
    """Before Adam's division blows rounding up there is no excuse: the first step agrees to 1e-12, weighed by the global count."""
    tables: dict[str, Any] = {"optimizer": {"kind": kind, "clip_norm": 0.1}, "train": {"micro_batch_size": 2}}
    alone, both = configure("alone", **tables), configure("both", layout=layout, **tables)
    weights = train(alone)
    assert distance(train_on(2, both, tmp_path / "ranks"), weights) < SAME
    ours, theirs = (logged(config, "loss", "grad_norm", "bits_per_byte") for config in (both, alone))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    assert all(mine == pytest.approx(other, rel=1e-9) for mine, other in zip(ours, theirs, strict=True))


def test_the_first_step_is_the_mean_over_trained_tokens(configure: Configure) -> None:
    """Loss, bits per byte and gradient norm against torch's own cross-entropy over the whole batch at once."""
    config = configure(train={"micro_batch_size": 2, "steps": 1}, data={"sequence_length": 32})
    train(config)
    batch = Dataset.open(config.data.path).loader("train", 32, config.data.seed).batch(0, 8)
    model = Transformer(config.model, dtype=torch.float64)
    initialise(model, config.seed)
    logits = model(batch.tokens, batch.positions, batch.documents)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    loss.backward()  # type: ignore[no-untyped-call]
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    bits = float(loss) * int((batch.labels != -100).sum()) / math.log(2) / batch.bytes
    expected = [float(loss), float(torch.stack(squares).sum().sqrt()), bits]
    assert logged(config, "loss", "grad_norm", "bits_per_byte")[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("train_table", [{}, {"micro_batch_size": 2}, {"recompute": True}], ids=["whole", "pieces", "recomputed"])
def test_experts_are_balanced_by_the_counts_of_the_whole_step(configure: Configure, train_table: dict[str, Any]) -> None:
    """Against one forward pass over the whole batch; a count per micro-batch, or one of a recomputed block twice, would differ."""
    config = configure(model=MOE | {"moe": MOE["moe"] | {"experts": 32}}, train={"steps": 1, **train_table})
    found = train(config)["layers.1.ffn.router_bias"]
    batch = Dataset.open(config.data.path).loader("train", 32, config.data.seed).batch(0, 8)
    model = Transformer(config.model, dtype=torch.float64)
    initialise(model, config.seed)
    model(batch.tokens, batch.positions, batch.documents)
    counts = model.moe_layers()[0].counts.double()
    assert torch.equal(found, 0.01 * torch.sign(counts.mean() - counts))
    assert float(found.abs().max()) > 0


@pytest.mark.slow
def test_hybrid_sharding_on_four_processes_equals_one(configure: Configure, tmp_path: Path) -> None:
    alone = train(configure("alone"))
    config = configure("four", layout={"replicate": 2, "shard": 2})
    assert distance(train_on(4, config, tmp_path / "ranks"), alone) < SAME


def test_a_checkpoint_goes_on_in_another_layout(configure: Configure, tmp_path: Path) -> None:
    """One process, then two shards, then one again: the same as one process throughout."""
    straight = train(configure("straight", train={"steps": 6}))
    train(configure("moved", train={"steps": 2}))
    train_on(2, configure("moved", train={"steps": 4}, layout={"shard": 2}), tmp_path / "ranks", resume=True)
    assert distance(train(configure("moved", train={"steps": 6}), resume=True), straight) > 0  # other schedules: see below
    constant = {"schedule": {"kind": "constant"}}
    straight = train(configure("straight2", train={"steps": 6}, **constant))
    train(configure("moved2", train={"steps": 2}, **constant))
    train_on(2, configure("moved2", train={"steps": 4}, layout={"shard": 2}, **constant), tmp_path / "more", resume=True)
    assert distance(train(configure("moved2", train={"steps": 6}, **constant), resume=True), straight) < SAME


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16_autocast"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resuming_is_bit_identical(configure: Configure, precision: str, kind: str) -> None:
    tables: dict[str, Any] = {
        "train": {"steps": 6, "precision": precision, "ema_decay": 0.9, "micro_batch_size": 4},
        "optimizer": {"kind": kind},
        "checkpoint": {"every": 3, "keep_last": 3},
    }
    straight = train(configure("straight", **tables))
    broken = configure("broken", **tables)
    train(broken)
    import shutil

    shutil.rmtree(Path(broken.run) / "checkpoints" / "step-00000006")
    again = train(broken, resume=True)
    assert all(torch.equal(again[name], straight[name]) for name in straight)
    average = load_model(broken.run, ema=True)[1].state_dict()
    expected = load_model(configure("straight", **tables).run, ema=True)[1].state_dict()
    assert all(torch.equal(average[name], expected[name]) for name in expected)


def test_events_tell_the_run(configure: Configure) -> None:
    config = configure(train={"steps": 3, "eval_every": 2}, checkpoint={"every": 2})
    train(config)
    events = list(read(Path(config.run) / "events.jsonl"))
    kinds = [event.kind for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "finish"
    assert kinds.count("step") == 3
    assert kinds.count("eval") == 2
    assert kinds.count("checkpoint") == 2
    steps = [event.fields for event in events if event.kind == "step"]
    assert [fields["position"] for fields in steps] == [8, 16, 24]
    assert all(fields["tokens"] == 8 * 32 for fields in steps)


def test_a_caller_may_stop_it_and_go_on(configure: Configure) -> None:
    config = configure("stopped", train={"steps": 6})
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    with Run.create(config.run, config) as run:
        summary = fit(config, run, stop=stop)
    assert (summary.step, summary.interrupted) == (3, True)
    again = train(config, resume=True)
    assert distance(again, train(configure("straight", train={"steps": 6}))) == 0.0


def test_training_learns(configure: Configure) -> None:
    config = configure(train={"steps": 60, "precision": "float32"}, optimizer={"lr": 1e-2})
    train(config)
    losses = [event.fields["loss"] for event in read(Path(config.run) / "events.jsonl") if event.kind == "step"]
    assert losses[0] == pytest.approx(5.7, abs=0.1)  # ln 300
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize("name", ["layers.0.mixer.qkv.weight", "layers.1.ffn.down.weight", "norm.weight"])
def test_a_weight_that_is_not_a_number_is_named_and_nothing_is_saved(
    configure: Configure, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.train import setup

    make = setup._make_model

    def poisoned(config: TrainConfig, mesh: Mesh, *, resume: bool) -> ParallelModel:
        parallel = make(config, mesh, resume=resume)
        parallel.parameters[name].data.view(-1)[0] = float("nan")
        return parallel

    monkeypatch.setattr(setup, "_make_model", poisoned)
    config = configure()
    with pytest.raises(NumericsError, match=f"weight {name}"):
        train(config)
    assert not list((Path(config.run) / "checkpoints").glob("step-*"))
    assert any(event.kind == "error" and name in event.fields["culprit"] for event in read(Path(config.run) / "events.jsonl"))


def test_an_activation_that_overflows_is_named(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.models.ffn import FeedForward

    forward = FeedForward.forward
    calls = []

    def overflowing(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return forward(self, x) * (1.0 if self is calls[0] else float("inf"))

    monkeypatch.setattr(FeedForward, "forward", overflowing)
    with pytest.raises(NumericsError, match=r"activation layers\.1"):
        train(configure())


@pytest.mark.parametrize(
    ("tables", "where", "remedy"),
    [
        ({"schedule": {"warmup_steps": 9}}, "schedule.warmup_steps", "at most 3"),
        ({"train": {"micro_batch_size": 3}}, "train.micro_batch_size", "use 2"),
        ({"data": {"sequence_length": 128}}, "data.sequence_length", "at most 64"),
        ({"layout": {"replicate": 3}}, "train.batch_size", "use 6 or 9"),
        ({"train": {"ema_decay": 1.5}}, "train.ema_decay", ""),
        ({"optimizer": {"kind": "adam"}}, "optimizer.kind", "adamw"),
    ],
)
def test_impossible_combinations_are_refused(configure: Configure, tables: dict[str, Any], where: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(**tables)
    assert where in caught.value.where
    assert remedy in (caught.value.remedy or remedy)


def test_a_vocabulary_too_small_is_refused_before_any_work(configure: Configure, dataset_path: Path) -> None:
    from tests.train.conftest import MODEL

    config = configure(model=MODEL | {"vocab_size": 261})
    with pytest.raises(ConfigError, match="300"):
        train(config)
