"""Does a trial give the same bits when its processes run at other times, and a row the same logits whoever shares its batch?"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor

from surefoot.core.random import generator
from surefoot.models import Transformer, initialise
from surefoot.parallel import Processes
from surefoot.train.config import TrainConfig
from surefoot.train.recording import record
from surefoot.train.setup import DTYPES
from surefoot.trust.repeat import Difference, batch_invariant, repeatable

PAUSE_S = 2e-3  # longest, before an operation of a disturbed run: many times what the operation takes
ROWS, TOKENS, BATCHES = 8, 64, (2, 3, 8)


def unsteady(trial: TrainConfig, processes: Processes, times: int, *, rounded: str | None = None) -> Difference | None:
    """Return this process's first tensor that is not the same in each of `times` runs of `trial`; None: all are, to the bit.

    After the first run every process pauses at random between operations, so that they meet in another order.
    """
    noise = random.Random(processes.rank)
    disturbed = False

    def disturb(run: int) -> None:
        nonlocal disturbed
        disturbed = True
        noise.seed(1000 * processes.rank + run)

    def pause() -> None:
        if disturbed and noise.random() < 0.5:
            time.sleep(noise.uniform(0.0, PAUSE_S))

    def step() -> dict[str, Tensor]:
        recorded = record(trial, processes, rounded=rounded, pause=pause)
        return {f"{one.name} ({one.phase} of step {one.step + 1})": one.part for one in recorded.entries}

    return repeatable(step, times, disturb)


@torch.no_grad()
def shares_batches(config: TrainConfig) -> Difference | None:
    """Return the first row whose logits are not the same bits alone and in a batch, for `config`'s model at its full size; or None."""
    model = Transformer(config.model, dtype=DTYPES[config.train.precision]).eval()
    initialise(model, config.seed)
    length = min(TOKENS, config.model.max_positions)
    rows = torch.randint(config.model.vocab_size, (ROWS, length), generator=generator(config.seed, "rows"))
    return batch_invariant(lambda some: model(some), rows, BATCHES)
