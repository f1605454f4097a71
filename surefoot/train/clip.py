"""The factor that bounds the gradient's norm."""

from __future__ import annotations


def clip_factor(norm: float, largest: float | None) -> float:
    """Return what gradients are multiplied by so that their norm is at most `largest`."""
    return 1.0 if largest is None or norm <= largest else largest / norm
