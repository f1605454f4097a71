"""A candidate with a planted bug: SUREFOOT_MUTATION=name python -m tests.trust.mutant FOLDER."""

from __future__ import annotations

import os
import sys
from typing import Any

from surefoot.data import DataConfig
from surefoot.parallel import Layout
from surefoot.train.config import CheckpointConfig, OptimizerConfig, ScheduleConfig, StepsConfig, TrainConfig
from surefoot.trust import Evidence
from tests.parallel.cells import SPECS
from tests.trust.mutations import KNOWN, Mutation, with_dropout
from tests.trust.own_mutations import OWN

ALL = {one.name: one for one in (*KNOWN, *OWN)}


def config_of(mutation: Mutation) -> TrainConfig:
    """Return the run whose trial has the bug in it."""
    spec = SPECS[mutation.model] if mutation.model in SPECS else SPECS["gqa"]
    tables: dict[str, Any] = {"train": {"precision": "float64"}, "optimizer": {"lr": 1e-2}} | mutation.tables
    train = {"steps": 100, "batch_size": 64, "precision": "float64"} | tables["train"]
    return TrainConfig(
        run="trial",
        model=spec,
        data=DataConfig(path="none", sequence_length=32),
        train=StepsConfig(**train),
        optimizer=OptimizerConfig(**{"lr": 1e-2} | tables["optimizer"]),
        schedule=ScheduleConfig(**tables.get("schedule", {})),
        checkpoint=CheckpointConfig(),
        layout=Layout(**mutation.layout),
    )


def judge(mutation: Mutation) -> Evidence:
    """Return what `verify` says of the bug; leaves this process as it was."""
    from surefoot.models.ffn import FeedForward
    from surefoot.train.verify import verify

    os.environ["SUREFOOT_MUTATION"] = mutation.name
    forward = FeedForward.forward
    if mutation.name == "recompute_draws_anew":
        with_dropout()  # the reference has it too
    try:
        return verify(config_of(mutation), module="tests.trust.mutant")
    finally:
        FeedForward.forward = forward  # type: ignore[method-assign]
        del os.environ["SUREFOOT_MUTATION"]


if __name__ == "__main__":
    from surefoot.train import trial_rank

    name = os.environ.get("SUREFOOT_MUTATION", "")
    if name:
        ALL[name].plant()
    trial_rank.main(sys.argv[1:])
