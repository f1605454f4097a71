"""One step of `surefoot train`, on given tokens: the same session, in the order of `surefoot.train.loop.fit`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench import llama
from surefoot.data import Batch, DataConfig
from surefoot.models import ModelSpec
from surefoot.parallel import Processes
from surefoot.train.config import OptimizerConfig, ScheduleConfig, StepsConfig, TrainConfig
from surefoot.train.setup import Session, open_session
from surefoot.train.step import gradients_of, update

PRECISIONS = {"float32": "float32", "autocast": "bfloat16_autocast", "bfloat16": "bfloat16"}


def config_of(spec: ModelSpec, precision: str, batch: int, sequence: int, *, compiled: bool, source: str | None = None) -> TrainConfig:
    """Return the run the peers' loops correspond to: AdamW, clip 1.0, constant learning rate."""
    return TrainConfig(
        run="bench",
        model=spec,
        data=DataConfig(path="none", sequence_length=sequence),
        train=StepsConfig(steps=10**6, batch_size=batch, precision=PRECISIONS[precision], compile=compiled, init_from=source),
        optimizer=OptimizerConfig(
            lr=llama.LEARNING_RATE, beta1=llama.BETAS[0], beta2=llama.BETAS[1], eps=llama.EPS, weight_decay=llama.WEIGHT_DECAY,
            clip_norm=llama.CLIP,
        ),
        schedule=ScheduleConfig(kind="constant"),
    )  # fmt: skip


def make_step(config: TrainConfig) -> tuple[Session, Callable[[Tensor, Tensor], Tensor]]:
    """Return the session and step(tokens, labels) -> loss, one document a row."""
    processes = Processes.join()
    session = open_session(config, processes, resume=False)
    shape = (config.train.batch_size, config.data.sequence_length)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    documents = torch.zeros(shape, dtype=torch.int32)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        count = labels.numel()
        found = gradients_of(session, [Batch(tokens, labels, positions, documents, count, count)], count)
        update(session, found)
        return torch.tensor(found.loss)

    return session, step
