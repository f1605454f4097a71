"""A number that is not finite stops every process at the same step, and the tensor it began in is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.core.errors import NumericsError
from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.models.ffn import FeedForward
from surefoot.models.norm import RMSNorm
from surefoot.parallel import Mesh, ParallelModel, Processes
from surefoot.train import TrainConfig, fit
from surefoot.train.checkpoint import list_steps
from surefoot.train.finite import first_not_finite
from tests.spawning import run_ranks
from tests.train.conftest import Configure


def spoil(layer: type[Any], index: int, factor: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a forward for `layer` that passes the output of the `index`-th module that is ever called through `factor`."""
    forward = layer.forward
    seen: list[Any] = []

    def spoiled(self: Any, x: Tensor) -> Tensor:
        if self not in seen:
            seen.append(self)
        output: Tensor = forward(self, x)
        return factor(output) if seen.index(self) == index else output

    return spoiled


def infinite(x: Tensor) -> Tensor:
    return x * float("inf")


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


def backward_only(x: Tensor) -> Tensor:
    spoiled: Tensor = InfiniteGradient.apply(x)
    return spoiled


def train(config: TrainConfig) -> None:
    with Run.create(config.run, config) as run:
        fit(config, run)


def culprit_in_log(config: TrainConfig) -> str:
    events = [event for event in read(Path(config.run) / "events.jsonl") if event.kind == "error"]
    assert len(events) == 1
    assert events[0].fields["culprit"] in events[0].fields["message"]
    return str(events[0].fields["culprit"])


def test_a_gradient_is_named_when_every_activation_is_finite(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one computed in the backward pass: the feed-forward's own output matrix, not what lies before it."""
    monkeypatch.setattr(FeedForward, "forward", spoil(FeedForward, 1, backward_only))
    config = configure()
    with pytest.raises(NumericsError, match=r"gradient of layers\.1\.ffn\.down\.weight"):
        train(config)
    assert culprit_in_log(config) == "gradient of layers.1.ffn.down.weight"


def test_a_later_micro_batch_is_replayed_too(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    forward = RMSNorm.forward

    def spoiled(self: RMSNorm, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # Five norms a forward pass: the first of the second micro-batch, then the same one in the replay.
        return forward(self, x) * (float("nan") if calls % 20 == 6 else 1.0)

    monkeypatch.setattr(RMSNorm, "forward", spoiled)
    with pytest.raises(NumericsError, match=r"activation layers\.0\.mixer_norm"):
        train(configure(train={"micro_batch_size": 2}))


def test_inside_a_compiled_block_the_tensor_is_still_named(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an evaluation, whose compiled code a replay without gradients would be given again."""
    from surefoot.train import setup

    make, models = setup._make_model, []

    def kept(config: TrainConfig, mesh: Mesh, *, resume: bool) -> ParallelModel:
        models.append(make(config, mesh, resume=resume))
        return models[0]

    def overflow_after_evaluation(kind: str, fields: dict[str, Any]) -> None:
        if kind == "eval":
            models[0].parameters["layers.1.ffn_norm.weight"].data.fill_(3e38)

    monkeypatch.setattr(setup, "_make_model", kept)
    config = configure(train={"compile": True, "precision": "float32", "eval_every": 1})
    with Run.create(config.run, config) as run, pytest.raises(NumericsError, match=r"activation layers\.1\.ffn_norm"):
        fit(config, run, overflow_after_evaluation)


def spoiled_on_one(processes: Processes, config: TrainConfig) -> str:
    if processes.rank == 1:
        FeedForward.forward = spoil(FeedForward, 1, infinite)  # type: ignore[method-assign]
    try:
        if processes.rank == 0:
            train(config)
        else:
            fit(config, None)
    except NumericsError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicate", "shard"])
def test_what_began_on_another_process_is_named_by_all(configure: Configure, tmp_path: Path, layout: dict[str, int]) -> None:
    """The first process only sees a bad sum of gradients; the cause is in an activation of the second."""
    config = configure(layout=layout)
    messages = run_ranks(spoiled_on_one, 2, tmp_path / "ranks", config)
    assert messages[0] == messages[1]
    assert culprit_in_log(config) == "activation layers.1, process 1"
    assert list_steps(Path(config.run) / "checkpoints") == []


def test_an_update_that_ruins_the_weights_is_not_saved(configure: Configure) -> None:
    """The gradients of step 1 are finite, the weights after it are not: the next step would notice, its checkpoint must not exist."""
    config = configure(train={"precision": "float32", "steps": 3}, optimizer={"lr": 1e38}, checkpoint={"every": 1})
    with pytest.raises(NumericsError, match="not finite"):
        train(config)
    assert list_steps(Path(config.run) / "checkpoints") == []
    tables = {"optimizer": {"lr": 1e38}, "schedule": {"kind": "constant"}}
    final = configure("final", train={"precision": "float32", "steps": 1}, **tables)
    with pytest.raises(NumericsError, match=r"step 1 left model\.embed\.weight not finite"):
        train(final)
    assert [event.kind for event in read(Path(final.run) / "events.jsonl")][-1] == "error"


def test_huge_but_finite_numbers_are_finite() -> None:
    huge = torch.full((8,), 3e38)  # whose sum overflows
    assert first_not_finite({"a": torch.ones(2), "b": huge, "c": torch.tensor([1])}) is None
    huge[3] = float("nan")
    assert first_not_finite({"a": torch.ones(2), "b": huge}) == "b"
