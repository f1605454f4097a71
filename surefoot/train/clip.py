"""The global gradient norm, whatever the layout, and the factor that bounds it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def global_norm(gradients: list[Tensor | None], shards: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients as a 0-d float64 tensor.

    Norms of single tensors are taken in float32 or wider, their squares summed in float64. `shards`: the group over which each
    gradient is cut, whose squares are summed too.
    """
    found = [gradient if gradient.dtype.itemsize >= 4 else gradient.float() for gradient in gradients if gradient is not None]
    if not found:
        return torch.zeros((), dtype=torch.float64)
    square = torch.stack([norm.double() for norm in torch._foreach_norm(found)]).square().sum()
    if shards is not None:
        dist.all_reduce(square, group=shards)
    return square.sqrt()


def clip_factor(norm: float, largest: float | None) -> float:
    """Return what gradients are multiplied by so that their norm is at most `largest`."""
    return 1.0 if largest is None or norm <= largest else largest / norm
