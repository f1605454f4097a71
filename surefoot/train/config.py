"""`TrainConfig`: everything a training run is asked to be, checked before any work starts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from surefoot.core.config import Config
from surefoot.core.errors import ConfigError
from surefoot.data import Corpus, DataConfig
from surefoot.models import ModelSpec
from surefoot.parallel.layout import Layout

Precision = Literal["float32", "bfloat16", "bfloat16_autocast", "float64"]


class OptimizerConfig(Config):
    """AdamW (Loshchilov & Hutter 2019), or Muon (Jordan 2024) for hidden matrices with AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    muon_lr: PositiveFloat | None = None  # None = lr; Muon's update is scaled to AdamW's size
    muon_momentum: float = Field(0.95, ge=0.0, lt=1.0)
    clip_norm: PositiveFloat | None = 1.0


class ScheduleConfig(Config):
    """The learning rate over the steps: linear warm-up, then constant, cosine, linear, or stable and then a linear decay (WSD)."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    final_fraction: float = Field(0.1, ge=0.0, le=1.0)  # of the peak, at the last step
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)  # wsd: share of the steps that decay


class StepsConfig(Config):
    """How long and in what pieces."""

    steps: PositiveInt
    batch_size: PositiveInt  # sequences a step, over all processes
    micro_batch_size: PositiveInt | None = None  # sequences a forward pass and process; None: all of the process's
    precision: Precision = "float32"
    compile: bool = False  # torch.compile each block
    recompute: bool = False  # activation checkpointing: each block's activations are computed again in the backward pass
    ema_decay: float | None = Field(None, gt=0.0, lt=1.0)
    eval_every: NonNegativeInt = 0  # steps; 0: at the end only
    eval_rows: PositiveInt = 256  # validation sequences an evaluation reads, at most
    log_every: PositiveInt = 1
    init_from: str | None = None  # start from this model: a run, a checkpoint or a model directory
    threads: PositiveInt | None = None  # of this process; None: torch's own choice
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU for each process of a machine if there are any


class CheckpointConfig(Config):
    """When to save, and what to keep: the last, the best by evaluation, and milestones."""

    every: NonNegativeInt = 0  # steps; 0: at the end only
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    milestone_every: NonNegativeInt = 0  # steps; 0: none
    background: bool = True  # write while training goes on


class CheckConfig(Config):
    """How a run is checked: its layout before it begins, and while it goes on that copies of a tensor are the same bits."""

    verify: Literal["auto", "always", "never"] = "auto"  # a trial of the layout before the first step; auto: below 1 % of the run
    hash_every: NonNegativeInt = 10  # steps, and before each checkpoint; 0: never. Costs nothing where nothing is held twice


class TrainConfig(Config):
    """A run: `run` is its directory."""

    run: str
    seed: int = 0
    model: ModelSpec
    data: DataConfig
    train: StepsConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trust: CheckConfig = CheckConfig()
    layout: Layout = Layout()
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, length = self.train.steps, self.data.sequence_length
        if self.schedule.warmup_steps >= steps:
            raise ConfigError(
                f"{self.schedule.warmup_steps} warm-up steps leave none of train.steps = {steps}",
                where="schedule.warmup_steps",
                remedy=f"use at most {steps - 1}, e.g. {max(1, steps // 20)}",
            )
        if length > self.model.max_positions:
            raise ConfigError(
                f"{length} is more than model.max_positions = {self.model.max_positions}",
                where="data.sequence_length",
                remedy=f"use at most {self.model.max_positions}, or raise model.max_positions",
            )
        self.micro_batches(self.layout.data)
        return self

    def micro_batches(self, ranks: int) -> int:
        """Return the micro-batches of a step on each of `ranks` data ranks; raise `ConfigError` when they do not come out even."""
        batch, micro = self.train.batch_size, self.train.micro_batch_size
        if batch % ranks:
            raise ConfigError(
                f"{batch} sequences do not divide among {ranks} data-parallel processes",
                where="train.batch_size",
                remedy=f"use {batch // ranks * ranks or ranks} or {(batch // ranks + 1) * ranks}",
            )
        per_rank = batch // ranks
        if micro is not None and per_rank % micro:
            divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
            closest = min(divisors, key=lambda size: abs(size - micro))
            raise ConfigError(
                f"{micro} does not divide the {per_rank} sequences of a process", where="train.micro_batch_size", remedy=f"use {closest}"
            )
        return 1 if micro is None else per_rank // micro


def check_corpus(config: TrainConfig, corpus: Corpus) -> None:
    """Raise `ConfigError` when the model's vocabulary does not hold the corpus's tokens."""
    if corpus.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{config.model.vocab_size} is smaller than the vocabulary of {', '.join(config.data.paths)}, {corpus.vocab_size}",
            where="model.vocab_size",
            remedy=f"use {corpus.vocab_size}",
        )
