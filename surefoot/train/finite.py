"""Which tensor first stopped being a number: the forward pass again, watched, then gradients from the loss backwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surefoot.data import Batch
from surefoot.models import Loss, Transformer


def culprit(model: Transformer, batches: list[Batch], gradients: Mapping[str, Tensor | None]) -> str:
    """Name the first tensor, in data-flow order, that is not finite: a weight, an activation, the loss, or a gradient."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"weight {name}"
    for batch in batches:
        found = _activation(model, batch)
        if found is not None:
            return found
    # The backward pass runs against the order of the forward pass: the last parameter's gradient is the first computed.
    for name in reversed(list(gradients)):
        gradient = gradients[name]
        if gradient is not None and not _finite(gradient):
            return f"gradient of {name}"
    return "gradient norm (every gradient is finite: their squares overflow)"


def _activation(model: Transformer, batch: Batch) -> str | None:
    first: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not first and any(isinstance(one, Tensor) and one.is_floating_point() and not _finite(one) for one in tensors):
            first.append(f"activation {names[module]}" if names[module] else "logits")

    leaves = [module for module in model.modules() if "decls" in module.__dict__ or not list(module.children())]
    handles = [module.register_forward_hook(watch) for module in (*leaves, *model.layers)]
    try:
        with torch.no_grad():
            loss = model(batch.tokens, batch.positions, batch.documents, labels=batch.labels, normaliser=max(batch.trained, 1))
    finally:
        for handle in handles:
            handle.remove()
    if first:
        return first[0]
    assert isinstance(loss, Loss)
    return None if _finite(loss.total) else "loss"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
