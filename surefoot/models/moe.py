"""Mixture of experts: router, dispatch, experts, combine; dropless, so that a token's output depends on that token alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.models.experts import combine, gather, grouped_linear, make_dispatch
from surefoot.models.ffn import FeedForward, gate
from surefoot.models.parameters import Linear, accumulation_dtype, declare
from surefoot.models.spec import FeedForwardSpec, MoESpec


@dataclass(frozen=True)
class Routing:
    """`weights`: [S, k], `chosen`: [S, k] expert ids, `scores`: [S, E] before selection, `logits`: [S, E]."""

    weights: Tensor
    chosen: Tensor
    scores: Tensor
    logits: Tensor


def route(logits: Tensor, spec: MoESpec, bias: Tensor | None) -> Routing:
    """Choose k experts a token. `bias` chooses and never weighs (Wang et al. 2024, arXiv 2408.15664)."""
    scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.to(scores.dtype)
    if spec.groups > 1:
        ranked = ranked.masked_fill(~_eligible(ranked, spec), float("-inf"))
    chosen = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.normalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if spec.router == "sigmoid" else total)
    return Routing(weights * spec.scale, chosen, scores, logits)


def _eligible(ranked: Tensor, spec: MoESpec) -> Tensor:
    """Node-limited routing (DeepSeek-V3 §2.1.2): a group scores the sum of its two best; the best groups are eligible."""
    grouped = ranked.detach().unflatten(-1, (spec.groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.top_groups, dim=-1).indices, True)
    return kept.repeat_interleave(grouped.shape[-1], dim=-1)


def balance_loss(routing: Routing, spec: MoESpec, rows: int, counted: Tensor | None) -> Tensor:
    """Sum over sequences of (tokens of the sequence) x its load-balancing loss, plus the z-loss summed over tokens.

    Switch (arXiv 2101.03961, eq. 4) in the scope of one sequence: E / (k T^2) sum_e c_e sum_t p_te, which is 1 when balanced.
    Sequence scope makes it independent of how a batch is cut. `counted`: [S] bool, False for padding.
    """
    experts = spec.experts
    scores, chosen = routing.scores, routing.chosen
    if spec.router == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    weight = torch.ones(scores.shape[0], dtype=scores.dtype, device=scores.device) if counted is None else counted.to(scores.dtype)
    hits = torch.zeros_like(scores).scatter_(-1, chosen, 1.0) * weight[:, None]
    tokens = weight.view(rows, -1).sum(-1)
    counts = hits.view(rows, -1, experts).sum(1)
    mass = (scores * weight[:, None]).view(rows, -1, experts).sum(1)
    per_sequence = experts / spec.top_k * (counts * mass).sum(-1) / tokens.clamp(min=1.0)
    total = spec.aux_coefficient * per_sequence.sum() if spec.balance == "aux_loss" else scores.new_zeros(())
    if spec.z_coefficient:
        total = total + spec.z_coefficient * (routing.logits.logsumexp(-1).square() * weight).sum()
    return total


class MoE(nn.Module):
    """x: [B, T, D] -> ([B, T, D], auxiliary loss summed over tokens).

    `counts`: int64 [E], tokens sent to each expert in the last forward pass. It is assigned, never added to, so that a
    recomputed forward (activation checkpointing) cannot count twice.
    """

    experts_gate_up: nn.Parameter
    experts_down: nn.Parameter
    counts: Tensor
    router_bias: Tensor | None

    def __init__(self, spec: MoESpec, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(dim, spec.experts, role="router", device=device, dtype=dtype)
        width = spec.hidden
        declare(
            self,
            "experts_gate_up",
            spec.experts,
            2 * width,
            dim,
            role="hidden",
            fan_in=dim,
            sections=(width, width),
            tp_dim=1,
            expert=True,
            device=device,
            dtype=dtype,
        )
        declare(
            self,
            "experts_down",
            spec.experts,
            dim,
            width,
            role="hidden",
            fan_in=width,
            tp_dim=2,
            residual=True,
            expert=True,
            device=device,
            dtype=dtype,
        )
        self.shared: FeedForward | None = None
        if spec.shared_hidden:
            shared = FeedForwardSpec(hidden=spec.shared_hidden, activation=spec.activation)
            self.shared = FeedForward(shared, dim, device=device, dtype=dtype)
        wide = accumulation_dtype(dtype or torch.get_default_dtype())
        self.register_buffer("router_bias", torch.zeros(spec.experts, device=device, dtype=wide) if spec.has_bias else None)
        self.register_buffer("counts", torch.zeros(spec.experts, device=device, dtype=torch.int64), persistent=False)

    # Row counts steer Python loops, so this part is not for the compiler.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        spec = self.spec
        flat = x.reshape(-1, x.shape[-1])
        wide = accumulation_dtype(self.router.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            routing = route(nn.functional.linear(flat.to(wide), self.router.weight.to(wide)), spec, self.router_bias)
        dispatch, counts = make_dispatch(routing.chosen, spec.experts)
        counted = None if documents is None else (documents >= 0).flatten()
        self.counts = counts if counted is None else torch.bincount(routing.chosen[counted].flatten(), minlength=spec.experts)
        gate_up: Tensor = self.experts_gate_up
        down: Tensor = self.experts_down
        if torch.is_autocast_enabled(x.device.type):
            narrow = torch.get_autocast_dtype(x.device.type)
            flat, gate_up, down = flat.to(narrow), gate_up.to(narrow), down.to(narrow)
        hidden = gate(grouped_linear(gather(flat, dispatch), gate_up, dispatch), spec.activation)
        y = combine(grouped_linear(hidden, down, dispatch), routing.weights.to(flat.dtype), dispatch).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, balance_loss(routing, spec, x.shape[0], counted)


def balanced(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Loss-free balancing (arXiv 2408.15664, alg. 1): raise the bias of starved experts, lower that of crowded ones.

    `counts`: [E] over all tokens of the step, from every rank that holds tokens.
    """
    wide = counts.to(bias.dtype)
    return bias + rate * torch.sign(wide.mean() - wide)
