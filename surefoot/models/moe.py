"""Mixture of experts: router, dispatch, experts, combine; dropless, so that a token's output depends on that token alone.

Nothing here is cut by tensor parallelism: each process works on its own tokens, and experts are cut among processes by number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.models.context import Context
from surefoot.models.experts import combine, count_choices, gather, grouped_ffn, make_dispatch
from surefoot.models.ffn import FeedForward
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


def balance_loss(routing: Routing, spec: MoESpec, rows: int, counted: Tensor | None, context: Context | None = None) -> Tensor:
    """Sum over sequences of (tokens of the sequence) x its load-balancing loss, plus the z-loss summed over tokens.

    Switch (arXiv 2101.03961, eq. 4) in the scope of one sequence: E / (k T^2) sum_e c_e sum_t p_te, which is 1 when balanced.
    Sequence scope makes it independent of how a batch is cut. `counted`: [S] bool, False for padding. Where a sequence is cut,
    counts (which carry no gradient) are summed over its parts, and what is returned is this part's share: it is linear in p.
    """
    experts = spec.experts
    scores, chosen = routing.scores, routing.chosen
    if spec.router == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    weight = torch.ones(scores.shape[0], dtype=scores.dtype, device=scores.device) if counted is None else counted.to(scores.dtype)
    hits = torch.zeros_like(scores).scatter_(-1, chosen, 1.0) * weight[:, None]
    tokens = weight.view(rows, -1).sum(-1)
    counts = hits.view(rows, -1, experts).sum(1)
    if context is not None and context.exchange is not None:
        tokens, counts = context.exchange.total(torch.cat((tokens[:, None], counts), dim=1)).split((1, experts), dim=1)
        tokens = tokens[:, 0]
    mass = (scores * weight[:, None]).view(rows, -1, experts).sum(1)
    per_sequence = experts / spec.top_k * (counts * mass).sum(-1) / tokens.clamp(min=1.0)
    total = spec.aux_coefficient * per_sequence.sum() if spec.balance == "aux_loss" else scores.new_zeros(())
    if spec.z_coefficient:
        total = total + spec.z_coefficient * (routing.logits.logsumexp(-1).square() * weight).sum()
    return total


class Experts(nn.Module):
    """rows: [R, D] sorted by expert, counts: [E] rows of each -> [R, D], each row through its own expert.

    `gate_up`: [E, 2F, D], `down`: [E, D, F].
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, spec: MoESpec, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.activation, width = spec.activation, spec.hidden
        shape, sections = (spec.experts, 2 * width, dim), (width, width)
        declare(self, "gate_up", *shape, role="hidden", fan_in=dim, sections=sections, expert=True, device=device, dtype=dtype)
        shape = (spec.experts, dim, width)
        declare(self, "down", *shape, role="hidden", fan_in=width, residual=True, expert=True, device=device, dtype=dtype)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate_up: Tensor = self.gate_up
        down: Tensor = self.down
        return grouped_ffn(rows, gate_up.to(rows.dtype), down.to(rows.dtype), counts, self.activation)


class MoE(nn.Module):
    """x: [B, T, D] -> ([B, T, D], auxiliary loss summed over tokens).

    `counts`: int64 [E], tokens sent to each expert in the last forward pass. It is assigned, never added to, so that a
    recomputed forward (activation checkpointing) cannot count twice.
    """

    counts: Tensor
    router_bias: Tensor | None

    def __init__(self, spec: MoESpec, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.router = Linear(dim, spec.experts, role="router", device=device, dtype=dtype)
        self.experts = Experts(spec, dim, device=device, dtype=dtype)
        self.shared: FeedForward | None = None
        if spec.shared_hidden:
            shared = FeedForwardSpec(hidden=spec.shared_hidden, activation=spec.activation)
            self.shared = FeedForward(shared, dim, split=False, device=device, dtype=dtype)
        wide = accumulation_dtype(dtype or torch.get_default_dtype())
        self.register_buffer("router_bias", torch.zeros(spec.experts, device=device, dtype=wide) if spec.has_bias else None)
        self.register_buffer("counts", torch.zeros(spec.experts, device=device, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        spec = self.spec
        flat = x.reshape(-1, x.shape[-1])
        documents = context.documents
        if documents is not None and context.exchange is not None:
            documents = context.exchange.stream(documents)
        counted = None if documents is None else (documents >= 0).flatten()
        wide = accumulation_dtype(self.router.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            routing = route(nn.functional.linear(flat.to(wide), self.router.weight.to(wide)), spec, self.router_bias)
        dispatch = make_dispatch(routing.chosen, spec.experts)
        self.counts = dispatch.counts if counted is None else count_choices(routing.chosen, spec.experts, counted)
        if torch.is_autocast_enabled(x.device.type):
            flat = flat.to(torch.get_autocast_dtype(x.device.type))
        rows = self.experts(gather(flat, dispatch), dispatch.counts)
        y = combine(rows, routing.weights.to(flat.dtype), dispatch).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, balance_loss(routing, spec, x.shape[0], counted, context)


def balanced(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Loss-free balancing (arXiv 2408.15664, alg. 1): raise the bias of starved experts, lower that of crowded ones.

    `counts`: [E] over all tokens of the step, from every rank that holds tokens.
    """
    wide = counts.to(bias.dtype)
    return bias + rate * torch.sign(wide.mean() - wide)
