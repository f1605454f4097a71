"""Which checkpoints stay: a pure decision."""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.train.config import CheckpointConfig


def kept(steps: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Return the steps to keep of `steps` (step -> evaluated loss or None): the last k, the k best, and milestones.

    At least the last one stays.
    """
    last = sorted(steps)[-config.keep_last :]
    scored = sorted((loss, step) for step, loss in steps.items() if loss is not None)
    best = [step for _, step in scored[: config.keep_best]]
    every = config.milestone_every
    return {*last, *best, *(step for step in steps if every and step % every == 0)}
