"""Bugs of our own design, in every component: see `mutations`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.trust.mutations import Mutation, gradients, only, reduction_of, wrap


def positions_off_by_one_on_a_rank() -> None:
    from surefoot.train.feed import Feed

    def split(original: Any, self: Any, batch: Any) -> Any:
        found = original(self, batch)
        return replace(found, positions=found.positions + 1) if self.at.context == 1 else found

    only(Feed, "split", split)


def ring_sees_the_future() -> None:
    from surefoot.parallel import context

    def pairs(original: Any, *args: Any) -> Any:
        return [replace(pair, mask=None) for pair in original(*args)]

    wrap(context, "_pairs", pairs)


def ring_forgets_documents() -> None:
    from surefoot.parallel import context

    wrap(context, "_pairs", lambda original, ring, source, tokens, documents, device: original(ring, source, tokens, None, device))


def ring_merges_without_the_running_sum() -> None:
    from surefoot.parallel import context

    def merge(original: Any, out: Tensor, lse: Tensor, scores: Tensor, values: Tensor) -> None:
        before = lse.clone()
        original(out, lse, scores, values)
        lse.copy_(torch.maximum(before, scores.logsumexp(-1)))

    wrap(context, "_merge", merge)


def halo_from_the_wrong_piece() -> None:
    from surefoot.parallel.context import SequenceExchange

    only(SequenceExchange, "_halos", lambda original, self, x, halo, **kwargs: original(self, x, halo, **kwargs)[::-1])


def halo_gradient_dropped() -> None:
    from surefoot.parallel.context import SequenceExchange

    def halos(original: Any, self: Any, x: Tensor, halo: int, **kwargs: Any) -> list[Tensor]:
        return [piece.detach() for piece in original(self, x, halo, **kwargs)]

    only(SequenceExchange, "_halos", halos)


def head_norm_not_summed() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: name.endswith("k_norm.weight"), lambda one, mesh: Reduction(None, one.then))


def fused_matrix_cut_in_one_piece() -> None:
    from surefoot.parallel import compose

    def place(original: Any, decl: Any, layout: Any, at: Any) -> Any:
        return original(replace(decl, sections=()), layout, at)

    wrap(compose, "place", place)


def softmax_without_the_other_vocabulary() -> None:
    from surefoot.parallel import tensor

    class Local(tensor.SplitLoss):
        def __init__(self, vocabulary: Any, group: Any) -> None:
            super().__init__(replace(vocabulary, total=lambda x: torch.stack((x[0], vocabulary.total(x)[1]))), group)

    tensor.SplitLoss = Local  # type: ignore[misc]


def embedding_of_other_ranks_not_masked() -> None:
    from surefoot.parallel.tensor import SplitEmbedding

    def forward(original: Any, self: Any, tokens: Tensor) -> Tensor:
        return original(self, tokens.clamp(self.start, self.start + self.length - 1))

    only(SplitEmbedding, "forward", forward)


def gather_keeps_only_its_own_gradient() -> None:
    from surefoot.parallel import collectives

    def backward(ctx: Any, *grads: Tensor) -> Any:
        group = ctx.group
        return grads[0].chunk(group.size(), ctx.dim)[group.rank()].contiguous(), None, None

    collectives._Gather.backward = staticmethod(backward)


def experts_come_back_in_another_order() -> None:
    from surefoot.parallel import expert

    def by_expert(original: Any, arriving: Tensor) -> Any:
        order, _ = original(arriving)
        return order, torch.arange(order.numel())

    wrap(expert, "_by_expert", by_expert)


def routing_weights_forgotten() -> None:
    from surefoot.models import moe

    wrap(moe, "combine", lambda original, rows, weights, dispatch: original(rows, torch.ones_like(weights) / weights.shape[1], dispatch))


def balance_counted_on_one_rank() -> None:
    from surefoot.parallel.context import SequenceExchange

    only(SequenceExchange, "total", lambda original, self, counts: counts)


def balance_biases_from_own_tokens() -> None:
    from surefoot.train import setup

    wrap(setup, "all_reduce", lambda original, counts, group: counts)


def norm_counts_copies_twice() -> None:
    from surefoot.parallel import compose

    wrap(compose, "copies", lambda original, decl, layout: 1)


def clipped_by_the_local_norm() -> None:
    from surefoot.parallel.compose import ParallelModel

    def norm(original: Any, self: Any, found: Any) -> Tensor:
        original(self, found)
        return torch.stack([one.double().square().sum() for one in found.values() if one is not None]).sum().sqrt()

    only(ParallelModel, "norm", norm)


def norms_decay_too() -> None:
    from surefoot.models.parameters import ParamDecl

    ParamDecl.decays = property(lambda self: True)  # type: ignore[assignment, misc]


def moments_mixed_up() -> None:
    from surefoot.train import optimizer

    def update(original: Any, *args: Any, beta1: float, beta2: float, **kwargs: Any) -> None:
        original(*args, beta1=beta2, beta2=beta1, **kwargs)

    wrap(optimizer.torch, "_fused_adamw_", update)


def learning_rate_of_the_next_step() -> None:
    from surefoot.train import step

    wrap(step, "learning_rate_fraction", lambda original, schedule, at, steps: original(schedule, at + 1, steps))


def average_moves_the_wrong_way() -> None:
    from surefoot.train.state import TrainState

    only(TrainState, "update_ema", lambda original, self, decay: original(self, 1.0 - decay))


def documents_ignored() -> None:
    from surefoot.models.transformer import Transformer

    def forward(original: Any, self: Any, tokens: Tensor, positions: Any = None, documents: Any = None, **kwargs: Any) -> Any:
        return original(self, tokens, positions, None, **kwargs)

    only(Transformer, "forward", forward)


def padding_is_trained() -> None:
    from surefoot.models import loss

    loss.IGNORED = -200
    wrap(loss, "_chunk", lambda original, hidden, weight, labels, *rest: original(hidden, weight, labels.clamp(min=0), *rest))


def scores_not_scaled() -> None:
    from surefoot.models.attention import Attention

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scale *= 1.01

    only(Attention, "__init__", init)


def weight_gradient_of_another_micro_batch() -> None:
    from surefoot.parallel import pipeline

    def catch_up(original: Any, self: Any, op: Any, sync: Any) -> None:
        mine = self.waiting.get((op.stage, op.micro_batch))
        if mine and op.micro_batch > 0 and hasattr(self, "old"):
            self.waiting[op.stage, op.micro_batch] = [(w, x, grad) for (w, _, grad), (_, x, _) in zip(mine, self.old, strict=True)]
        self.old = mine
        original(self, op, sync)

    only(pipeline.PutOff, "catch_up", catch_up)


def stages_swap_micro_batches() -> None:
    from surefoot.parallel import pipeline

    def messages(original: Any, self: Any, order: Any, rank: int) -> Any:
        known = list(original(self, order, rank))
        most = max((micro_batch for _, _, micro_batch in known), default=0)
        return [(kind, stage, most - micro_batch if kind == "F" else micro_batch) for kind, stage, micro_batch in known]

    only(pipeline.Pipeline, "messages", messages)


def shards_averaged() -> None:
    from surefoot.parallel import data

    def shard_model(original: Any, model: Any, mesh: Any) -> None:
        original(model, mesh)
        for module in model.modules():
            if isinstance(module, data.FSDPModule):
                module.set_gradient_divide_factor(2.0)

    from surefoot.parallel import compose

    wrap(compose, "shard_model", shard_model)


def seed_of_the_rank() -> None:
    from surefoot.parallel import compose

    def parallelise(original: Any, spec: Any, mesh: Any, seed: int, **kwargs: Any) -> Any:
        only(compose.ParallelModel, "check_copies", lambda check, self: None)
        return original(spec, mesh, seed + mesh.at.replicate, **kwargs)

    from surefoot.train import setup

    wrap(setup, "parallelise", parallelise)


def cap_without_its_slope() -> None:
    from surefoot.models import loss

    def chunk(
        original: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, multiplier: float, softcap: Any, *rest: Any
    ) -> Any:
        value, grad = original(hidden, weight, labels, scale, multiplier, softcap, *rest)
        if grad is None or softcap is None:
            return value, grad
        logits = hidden @ weight.t() * multiplier
        return value, grad / (1.0 - torch.tanh(logits / softcap).square())

    wrap(loss, "_chunk", chunk)


def one_element_of_one_gradient() -> None:
    def change(found: dict[str, Any], sync: Any) -> None:
        one = found.get("layers.0.ffn.gate_up.weight")
        if one is not None:
            one.view(-1)[3] *= 1.5

    gradients(change)


OWN = [
    Mutation(
        "positions_off_by_one_on_a_rank",
        "own",
        positions_off_by_one_on_a_rank,
        "forward",
        r"layers\.0\.mixer$",
        {"context": 2},
        model="gqa_learned",
    ),
    Mutation("ring_sees_the_future", "own", ring_sees_the_future, "forward", r"layers\.0\.mixer$", {"context": 2}),
    Mutation("ring_forgets_documents", "own", ring_forgets_documents, "forward", r"layers\.0\.mixer$", {"context": 2}),
    Mutation(
        "ring_merges_without_the_running_sum", "own", ring_merges_without_the_running_sum, "forward", r"layers\.0\.mixer$", {"context": 2}
    ),
    Mutation(
        "halo_from_the_wrong_piece", "own", halo_from_the_wrong_piece, "forward", r"layers\.\d\.mixer$", {"context": 2}, model="hybrid"
    ),
    Mutation("halo_gradient_dropped", "own", halo_gradient_dropped, "backward", r"layers\.\d", {"context": 2}, model="hybrid"),
    Mutation("head_norm_not_summed", "own", head_norm_not_summed, "reduction", r"k_norm", {"tensor": 2}),
    Mutation("fused_matrix_cut_in_one_piece", "own", fused_matrix_cut_in_one_piece, "forward", r"layers\.0\.mixer$", {"tensor": 2}),
    Mutation("softmax_without_the_other_vocabulary", "own", softmax_without_the_other_vocabulary, "forward", r"loss", {"tensor": 2}),
    Mutation("embedding_of_other_ranks_not_masked", "own", embedding_of_other_ranks_not_masked, "forward", r"embed", {"tensor": 2}),
    Mutation("gather_keeps_only_its_own_gradient", "own", gather_keeps_only_its_own_gradient, "backward", r"norm", {"tensor": 2}),
    Mutation(
        "experts_come_back_in_another_order",
        "own",
        experts_come_back_in_another_order,
        "forward",
        r"layers\.\d\.ffn$",
        {"replicate": 2, "expert": 2},
        model="moe",
    ),
    Mutation("routing_weights_forgotten", "own", routing_weights_forgotten, "forward", r"layers\.\d\.ffn$", model="moe"),
    Mutation("balance_counted_on_one_rank", "own", balance_counted_on_one_rank, "backward", r"layers\.\d", {"context": 2}, model="moe"),
    Mutation(
        "balance_biases_from_own_tokens",
        "own",
        balance_biases_from_own_tokens,
        "update",
        r"router_bias",
        {"replicate": 2},
        model="deepseek",
    ),
    Mutation("norm_counts_copies_twice", "own", norm_counts_copies_twice, "clipping", r"gradient_norm", {"replicate": 2}),
    Mutation("clipped_by_the_local_norm", "own", clipped_by_the_local_norm, "clipping", r"gradient_norm", {"shard": 2}),
    Mutation("norms_decay_too", "own", norms_decay_too, "update|facts", r".*"),
    Mutation("moments_mixed_up", "own", moments_mixed_up, "update", r"m\.|v\.|.*"),
    Mutation(
        "learning_rate_of_the_next_step",
        "own",
        learning_rate_of_the_next_step,
        "update|facts",
        r".*",
        tables={"schedule": {"kind": "linear"}},
    ),
    Mutation("average_moves_the_wrong_way", "own", average_moves_the_wrong_way, "update", r"ema\.", tables={"train": {"ema_decay": 0.9}}),
    Mutation("documents_ignored", "own", documents_ignored, "forward", r"layers\.0\.mixer$"),
    Mutation("padding_is_trained", "own", padding_is_trained, "forward", r"loss"),
    Mutation("scores_not_scaled", "own", scores_not_scaled, "forward", r"layers\.0\.mixer$"),
    Mutation(
        "weight_gradient_of_another_micro_batch",
        "own",
        weight_gradient_of_another_micro_batch,
        "reduction",
        r"weight",
        {"pipeline": 2, "schedule": "zero_bubble"},
    ),
    Mutation("stages_swap_micro_batches", "own", stages_swap_micro_batches, "forward", r".*", {"pipeline": 2, "schedule": "gpipe"}),
    Mutation("shards_averaged", "own", shards_averaged, "reduction", r".*", {"shard": 2}),
    Mutation("seed_of_the_rank", "own", seed_of_the_rank, "forward", r"embed", {"replicate": 2}),
    Mutation("cap_without_its_slope", "own", cap_without_its_slope, "backward", r"norm", model="gemma"),
    Mutation("one_element_of_one_gradient", "own", one_element_of_one_gradient, "reduction", r"layers\.0\.ffn\.gate_up"),
]
