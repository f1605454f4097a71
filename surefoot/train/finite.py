"""Which tensor first stopped being a number: the forward pass again, watched, then gradients from the loss backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from surefoot.core.errors import NumericsError
from surefoot.data import Batch
from surefoot.models import Loss, Transformer
from surefoot.parallel import Part, Processes, local

_WEIGHT, _ACTIVATION, _LOSS, _GRADIENT, _NORM = range(5)
Finding = tuple[int, int, str]
"""(stage, order within it, name): the smallest comes first in data-flow order, and processes agree on the order."""


class NotFiniteError(NumericsError):
    """A number that is not finite, first in the tensor `culprit`."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", culprit: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.culprit = culprit


def culprit(model: Transformer, batches: list[Batch], gradients: Mapping[str, Tensor | None], processes: Processes) -> str:
    """Name the first tensor, in data-flow order, that is not finite on any process: a weight, an activation, the loss, a gradient.

    All processes call it together, each with its own micro-batches, and get the same answer. Every one replays all of its
    micro-batches, whatever it finds: a sharded model communicates in its forward pass.
    """
    # Of a pipeline no process has the whole forward pass: weights and gradients tell, in the order of the layers.
    whole = len(model.layers) == model.spec.layers
    replays = [_replay(model, batch) for batch in batches] if whole else []
    order = _parameter_order(model, replays[0].executed) if whole else sorted(gradients, key=_depth)
    weights = {name: model.get_parameter(name).detach() for name in order}
    found = [
        _first(_WEIGHT, "weight", order, weights, whole),
        *(replay.finding for replay in replays),
        # The backward pass runs against the order of the forward pass.
        _first(_GRADIENT, "gradient of", order[::-1], gradients, whole),
        (_NORM, 0, "gradient norm (every gradient is finite: their squares overflow)"),
    ]
    mine = min(finding for finding in found if finding is not None)
    (stage, _, name), rank = min((finding, rank) for rank, finding in enumerate(processes.gather(mine)))
    return f"{name}, process {rank}" if processes.size > 1 and stage in (_ACTIVATION, _LOSS) else name


def first_not_finite(tensors: Mapping[str, Tensor | Part]) -> str | None:
    """Return the name of the first of `tensors` (of this process's part of it) that holds a number that is not finite."""
    mine = {name: tensor.tensor if isinstance(tensor, Part) else tensor for name, tensor in tensors.items()}
    return next((name for name, tensor in mine.items() if tensor.is_floating_point() and not _finite(tensor)), None)


@dataclass
class _Replay:
    """One forward pass, watched: modules in the order in which they ended, and the first output that is not finite."""

    executed: list[str] = field(default_factory=list)
    finding: Finding | None = None


def _replay(model: Transformer, batch: Batch) -> _Replay:
    replay = _Replay()
    names = {module: name for name, module in model.named_modules()}

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        replay.executed.append(names[module])
        tensors = output if isinstance(output, tuple) else (output,)
        if replay.finding is None and any(isinstance(one, Tensor) and one.is_floating_point() and not _finite(one) for one in tensors):
            replay.finding = (_ACTIVATION, len(replay.executed), f"activation {names[module]}")

    leaves = [module for module in model.modules() if "decls" in module.__dict__ or not list(module.children())]
    handles = [module.register_forward_hook(watch) for module in (*leaves, *model.layers.values())]
    try:
        # Code compiled before, for an evaluation, was made without these hooks and would not call them.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            loss = model(batch.tokens, batch.positions, batch.documents, labels=batch.labels, normaliser=max(batch.trained, 1))
    finally:
        for handle in handles:
            handle.remove()
    assert isinstance(loss, Loss)
    if replay.finding is None and not _finite(loss.total):
        replay.finding = (_LOSS, 0, "loss")
    return replay


def _parameter_order(model: Transformer, executed: list[str]) -> list[str]:
    """Return the parameters' names in the order of their use; the head's, which the loss reads without a call, comes last."""
    used = {module: place for place, module in enumerate(executed)}
    return sorted((name for name, _ in model.named_parameters()), key=lambda name: used.get(name.rpartition(".")[0], len(executed)))


def _depth(name: str) -> int:
    """Return the layer of a parameter, -1 for the embedding, more than any layer for the last norm and the head."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1 if name.startswith("embed.") else 1 << 30


def _first(stage: int, kind: str, order: list[str], tensors: Mapping[str, Tensor | None], whole: bool) -> Finding | None:
    for place, name in enumerate(order):
        tensor = tensors[name]
        if tensor is not None and not _finite(local(tensor)):
            # Places of different parts of a model do not compare; depths do.
            return stage, place if whole else _depth(name) * (-1 if stage == _GRADIENT else 1), f"{kind} {name}"
    return None


def _finite(tensor: Tensor) -> bool:
    # A sum is several times cheaper than asking every element; it may overflow where no element does.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
