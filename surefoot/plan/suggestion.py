"""A budget of FLOPs turned into a model and an amount of text: the shape that a scaling law expects most of.

The law's closed form speaks of 6 N D; what a model really costs depends on its shape, its vocabulary and the sequence length. So
every shape of a plain ladder is priced exactly, its tokens are what the budget then buys, and the law compares the outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.core.errors import InputError
from surefoot.models.flops import count_flops, count_parameters
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, ModelSpec
from surefoot.plan.scaling import PUBLISHED, ScalingLaw

ASPECT = 64  # width over depth: 768 / 12, 1024 / 16, 2048 / 32
WIDEST = 16_384


@dataclass(frozen=True)
class Suggestion:
    """`spec` trained on `tokens` costs `flops` (exact, causal) and is expected to reach `loss` by `law`."""

    spec: ModelSpec
    parameters: int
    tokens: int
    flops: float
    loss: float
    law: ScalingLaw


def suggest(flops: float, law: ScalingLaw = PUBLISHED, *, vocab_size: int = 32_768, sequence_length: int = 2048) -> Suggestion:
    """Return the best of the ladder's shapes for a budget of `flops`.

    Raises `InputError` when the budget does not pay one sequence of the smallest shape.
    """
    best: Suggestion | None = None
    for spec in ladder(vocab_size, sequence_length):
        price = count_flops(spec, sequence_length).training
        tokens = int(flops / price)
        if tokens < sequence_length:
            break
        parameters = count_parameters(spec).active
        loss = law.loss(parameters, tokens)
        if best is None or loss < best.loss:
            best = Suggestion(spec, parameters, tokens, tokens * price, loss, law)
    if best is None:
        raise InputError(f"{flops:g} FLOPs do not pay one sequence of {sequence_length}", where="--budget", remedy="give more, e.g. 1e15")
    return best


def ladder(vocab_size: int, sequence_length: int) -> list[ModelSpec]:
    """Return Llama-like shapes from narrow to wide: depth = width / 64, feed-forward 8/3 of the width, tied when tables dominate."""
    found = []
    dim = 128
    while dim <= WIDEST:
        head = 64 if dim < 2048 else 128
        hidden = -(-8 * dim // 3 // 64) * 64
        found.append(
            ModelSpec(
                vocab_size=vocab_size,
                dim=dim,
                layers=max(2, round(dim / ASPECT)),
                max_positions=sequence_length,
                attention=AttentionSpec(heads=dim // head, kv_heads=dim // head, head_dim=head),
                ffn=FeedForwardSpec(hidden=hidden),
                tied_embeddings=dim < 1024,
            )
        )
        dim += 64 if dim < 1024 else 128 if dim < 4096 else 512
    return found
