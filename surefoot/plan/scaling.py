"""The scaling law of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3): loss = E + A / N^alpha + B / D^beta.

N parameters, D trained tokens, loss in nats per token. With C = 6 N D FLOPs the best split of a budget has a closed form
(their equation 4). The fit minimises a Huber loss of the logarithm, as theirs does, from a grid of starting points.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.core import events
from surefoot.core.config import parse
from surefoot.core.errors import InputError
from surefoot.models.flops import count_parameters
from surefoot.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

LEAST_OBSERVATIONS = 5
HUBER_DELTA = 1e-3


@dataclass(frozen=True)
class Observation:
    """One trained model: parameters N, tokens D, and the loss it reached (nats per token)."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Allocation:
    """How to spend a budget: `parameters` and `tokens` with 6 N D = FLOPs, and the loss the law expects."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """loss(N, D) = e + a / N^alpha + b / D^beta; `source` says where the constants come from."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the expected loss in nats per token."""
        return self.e + self.a * math.pow(parameters, -self.alpha) + self.b * math.pow(tokens, -self.beta)

    def allocate(self, flops: float) -> Allocation:
        """Return the split of `flops` = 6 N D with the lowest expected loss (Hoffmann et al., equation 4)."""
        if not flops > 0:
            raise InputError(f"{flops:g} is not a budget", where="--budget", remedy="give FLOPs, e.g. 1e18")
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = g * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        tokens = flops / 6 / parameters
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


PUBLISHED = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024 (arXiv 2404.10102), a refit of Hoffmann et al.")
"""Constants for web text and a 32k vocabulary: a first guess where no runs of one's own exist."""


def observe(folder: Path) -> list[Observation]:
    """Return one observation for each finished run under `folder`: its size, its tokens and its last evaluation's loss.

    Raises `InputError` when `folder` has no run.
    """
    found = []
    for config_path in sorted(folder.rglob("config.toml")):
        loss, rows = None, 0
        for event in events.read(config_path.parent / "events.jsonl"):
            loss = event.fields.get("loss", loss) if event.kind == "eval" else loss
            rows = event.fields.get("position", rows) if event.kind == "step" else rows
        table = tomllib.loads(config_path.read_text(encoding="utf-8"))
        tokens = rows * table.get("data", {}).get("sequence_length", 512)
        if isinstance(loss, float) and tokens and isinstance(table.get("model"), dict):
            spec = parse(ModelSpec, table["model"], where=str(config_path))
            found.append(Observation(count_parameters(spec).active, float(tokens), loss))
    if not found:
        raise InputError("holds no run with an evaluation", where=str(folder), remedy="give a folder of runs that `surefoot train` made")
    return found


def fit(observations: Sequence[Observation]) -> ScalingLaw:
    """Return the law that fits `observations` best (Hoffmann et al. 2022, appendix D.2).

    Raises `InputError` when they are too few, or all of one size or one length, to tell its five constants.
    """
    import torch

    sizes, lengths = {o.parameters for o in observations}, {o.tokens for o in observations}
    if len(observations) < LEAST_OBSERVATIONS or len(sizes) < 2 or len(lengths) < 2:
        raise InputError(
            f"{len(observations)} runs of {len(sizes)} sizes and {len(lengths)} lengths cannot tell five constants",
            where="scaling law",
            remedy=f"train at least {LEAST_OBSERVATIONS} models of 2 or more sizes on 2 or more amounts of tokens",
        )
    n, d, y = torch.tensor([(o.parameters, o.tokens, o.loss) for o in observations], dtype=torch.float64).log().unbind(1)

    def objective(theta: torch.Tensor) -> torch.Tensor:
        a, b, e, alpha, beta = theta
        predicted = torch.logsumexp(torch.stack([a - alpha * n, b - beta * d, e.expand_as(n)]), dim=0)
        return torch.nn.functional.huber_loss(predicted, y, reduction="sum", delta=HUBER_DELTA)

    grid = itertools.product((2.0, 8.0), (2.0, 8.0), (0.3,), (0.3, 0.6), (0.3, 0.6))
    found = [_minimise(objective, torch.tensor(start, dtype=torch.float64)) for start in grid]
    a, b, e, alpha, beta = min(found, key=lambda theta: objective(theta).item()).tolist()
    return ScalingLaw(math.exp(e), math.exp(a), math.exp(b), alpha, beta, f"a fit to {len(observations)} runs")


def _minimise(objective: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Return the local minimum of `objective` that L-BFGS reaches from `start`."""
    import torch

    theta = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], max_iter=400, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        value = objective(theta)
        value.backward()
        return value.item()

    optimiser.step(closure)
    return theta.detach()
