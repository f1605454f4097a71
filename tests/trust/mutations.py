"""Bugs that were really made, and others, each planted into the running code of a trial. Tests only: product code knows nothing of it.

`python -m tests.trust.mutant FOLDER` with SUREFOOT_MUTATION=name is a candidate with the bug. `KNOWN`: 25 bugs of published trackers and
talks (the source stands beside each); `OWN`: more of every component.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Tables = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """`plant` breaks the code; the trial runs `model` under `layout` with `tables` merged in.

    `phase`, `tensor` (a regular expression): where it must be seen first. `lossy`: the verdict is lossy instead of wrong.
    """

    name: str
    source: str
    plant: Callable[[], None]
    phase: str
    tensor: str
    layout: Tables = field(default_factory=dict)
    model: str = "gqa"
    tables: Tables = field(default_factory=dict)
    lossy: bool = False


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that is given the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def only(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by one that is given the original and the object."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original, self, *args, **kwargs)

    setattr(owner, name, method)


def reduction_of(names: Callable[[str], bool], change: Callable[[Any, Any], Any]) -> None:
    """Change the `Reduction` of the parameters that `names` accepts."""
    from surefoot.parallel.compose import ParallelModel

    def reductions(original: Any, self: Any) -> Any:
        return {name: change(one, self.mesh) if names(name) else one for name, one in original(self).items()}

    only(ParallelModel, "reductions", reductions)


def gradients(change: Callable[[dict[str, Tensor | None], Any], None]) -> None:
    """Change reduced gradients, in place, before anyone reads them."""
    from surefoot.parallel.data import GradientSync

    def finish(original: Any, self: Any) -> Any:
        found = original(self)
        change(found, self)
        return found

    only(GradientSync, "finish", finish)


# --- the 25 known ones


def clip_on_one_tensor_rank() -> None:
    from surefoot.parallel.placement import summed_over
    from surefoot.train.optimizer import Optimizer

    def step(original: Any, self: Any, found: Any, *, lr: float, clip: float = 1.0) -> None:
        if self.parallel.mesh.at.tensor > 0:
            copied = {name for name, decl in self.decls.items() if summed_over(decl) == "tokens"}
            found = {name: one / clip if name in copied and one is not None else one for name, one in found.items()}
        original(self, found, lr=lr, clip=clip)

    only(Optimizer, "step", step)


def reduce_returns_the_original() -> None:
    from surefoot.parallel import tensor

    def bad(original: Any, layer: Any, group: Any) -> None:
        summing, tensor.scatter_sum = tensor.scatter_sum, lambda x, dim, g: x.chunk(g.size(), dim)[g.rank()]
        original(layer, group)
        del summing

    keep = tensor.scatter_sum
    wrap(tensor, "_bracket", bad)
    only(
        tensor.SplitEmbedding, "forward", lambda original, self, tokens: _with(tensor, "scatter_sum", keep, lambda: original(self, tokens))
    )


def _with(owner: Any, name: str, value: Any, run: Callable[[], Any]) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return run()
    finally:
        setattr(owner, name, before)


def bias_on_every_rank() -> None:
    from surefoot.parallel.tensor import RowLinear

    def init(original: Any, self: Any, whole: Any, *, bias: bool) -> None:
        original(self, whole, bias=True)

    only(RowLinear, "__init__", init)


def last_norm_not_summed_over_tensor() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: name == "norm.weight", lambda one, mesh: Reduction(mesh.sums["dense"], one.then))


def depth_counted_in_the_stage() -> None:
    from surefoot.parallel import compose

    def drawn(original: Any, name: str, decl: Any, spec: Any, seed: int, dtype: Any) -> Tensor:
        return original(name, decl, spec.model_copy(update={"layers": max(1, spec.layers // 2)}), seed, dtype)

    wrap(compose, "drawn", drawn)


def every_stage_divides() -> None:
    from surefoot.parallel import pipeline

    def receive(original: Any, self: Any, kind: str, op: Any, rows: Any) -> Tensor:
        found = original(self, kind, op, rows)
        return found / len(self.batches) if kind == "B" else found

    only(pipeline._Step, "_receive", receive)


def tied_sum_before_the_data_sum() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: name == "embed.weight", lambda one, mesh: Reduction(None, one.then))


def gathered_in_the_wrong_order() -> None:
    from surefoot.parallel import context

    def to_heads(original: Any, x: Tensor, group: Any) -> Tensor:
        found = original(x, group)
        return torch.cat(found.chunk(group.size(), dim=1)[::-1], dim=1)

    wrap(context, "_to_heads", to_heads)


def divisor_without_context() -> None:
    def change(found: Any, sync: Any) -> None:
        for one in found.values():
            if one is not None:
                one.mul_(2.0)

    gradients(change)


def experts_scaled_otherwise() -> None:
    def change(found: Any, sync: Any) -> None:
        for name, one in found.items():
            if ".experts." in name and one is not None:
                one.mul_(2.0)

    gradients(change)


def router_gradient_not_summed() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: name.endswith("router.weight"), lambda one, mesh: Reduction(None, one.then))


def reduction_starts_too_early() -> None:
    from surefoot.parallel import data

    def arrived(original: Any, self: Any, parameter: Any) -> None:
        if parameter in self._where and parameter.grad is not None and self._last:
            bucket, _ = self._where[parameter]
            if bucket.pending == 1 and bucket.work is None and bucket.group is not None:
                stale = bucket.buffer.clone()  # what a reduction on another stream would read
                dist.all_reduce(stale, group=bucket.group)
                original(self, parameter)
                if bucket.work is not None:
                    bucket.work.wait()
                bucket.buffer.copy_(stale)
                return
        original(self, parameter)

    only(data.GradientSync, "arrived", arrived)


def boundary_micro_batch_added_after() -> None:
    from surefoot.parallel import data

    def arrived(original: Any, self: Any, parameter: Any) -> None:
        if parameter in self._where and parameter.grad is not None and self._last:
            self.__dict__.setdefault("aside", {})[parameter] = parameter.grad.clone()
            parameter.grad.zero_()
        original(self, parameter)

    def finish(original: Any, self: Any) -> Any:
        found = original(self)
        for parameter, grad in self.__dict__.pop("aside", {}).items():
            self._where[parameter][1].add_(grad)
        return found

    only(data.GradientSync, "arrived", arrived)
    only(data.GradientSync, "finish", finish)


def wrapper_bypassed() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: True, lambda one, mesh: Reduction())


def one_size_never_reduced() -> None:
    from surefoot.parallel.data import Reduction

    reduction_of(lambda name: name == "layers.0.ffn.down.weight", lambda one, mesh: Reduction())


def dummy_step_at_the_start() -> None:
    from surefoot.train.optimizer import Optimizer

    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.step({name: torch.zeros_like(one) for name, one in self.parameters.items()}, lr=self.config.lr)

    only(Optimizer, "__init__", init)


def optimizer_holds_old_parameters() -> None:
    from surefoot.train.optimizer import Optimizer

    def init(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.parameters["layers.0.ffn.down.weight"] = self.parameters["layers.0.ffn.down.weight"].clone()

    only(Optimizer, "__init__", init)


def partial_sums_in_bfloat16() -> None:
    from surefoot.parallel import collectives

    def reduce_scatter(original: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        if x.dtype != torch.bfloat16:
            return original(x, dim, group)
        sent = torch.stack(x.chunk(group.size(), dim=dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total

    wrap(collectives, "reduce_scatter", reduce_scatter)


def gradients_summed_in_bfloat16() -> None:
    from surefoot.parallel import data

    data.accumulation_dtype = lambda dtype: dtype  # type: ignore[assignment]


def mean_of_means() -> None:
    from surefoot.models.transformer import Transformer

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is not None:
            own = int((kwargs["labels"] != -100).sum())
            kwargs["normaliser"] = own * 2  # micro-batches
        return original(self, *args, **kwargs)

    only(Transformer, "forward", forward)


def all_ranks_read_the_same_rows() -> None:
    from surefoot.train.feed import Feed

    Feed.index = property(lambda self: 0)  # type: ignore[assignment, misc]


def resume_begins_again() -> None:
    from surefoot.train.state import TrainState

    only(TrainState, "loaded", lambda original, self, tensors, step, position: original(self, tensors, step, 0))


def corrupt_shard_loaded_unseen() -> None:
    from surefoot.train import checkpoint

    def read(original: Any, path: Any, tensors: Any, alone: bool) -> None:
        original(path, tensors, alone)
        name = next(name for name in sorted(tensors) if name.startswith("model.layers.0.ffn"))
        held = tensors[name].tensor if hasattr(tensors[name], "placement") else tensors[name]
        held.view(-1)[0] *= -1.5

    wrap(checkpoint, "_read", read)


def groups_collapse_on_load() -> None:
    from dataclasses import replace

    from surefoot.train.state import TrainState

    def loaded(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        first = self.optimizer.groups[0]
        self.optimizer.groups = [
            replace(one, lr_multiplier=first.lr_multiplier, weight_decay=first.weight_decay) for one in self.optimizer.groups
        ]

    only(TrainState, "loaded", loaded)


def with_dropout() -> None:
    """Not a bug: dropout drawn from torch's generator, in the reference too."""
    from surefoot.models.ffn import FeedForward

    only(FeedForward, "forward", lambda original, self, x: original(self, x) * (torch.rand(x.shape, dtype=x.dtype) < 0.9))


def recompute_draws_anew() -> None:
    with_dropout()
    from surefoot.train import setup

    wrap(setup, "checkpoint", lambda original, *args, **kwargs: original(*args, preserve_rng_state=False, **kwargs))


KNOWN = [
    Mutation(
        "clip_on_one_tensor_rank",
        "DeepSpeed #1801 (BLOOM-176B)",
        clip_on_one_tensor_rank,
        "update",
        r"norm|bias",
        {"tensor": 2},
        tables={"optimizer": {"clip_norm": 1e-3}},
    ),
    Mutation(
        "reduce_returns_the_original", "Megatron-LM #5338", reduce_returns_the_original, "forward", r"layers\.0\.mixer$", {"tensor": 2}
    ),
    Mutation("bias_on_every_rank", "torchtitan #4245", bias_on_every_rank, "reduction", r"(ffn\.down|mixer\.out)\.bias", {"tensor": 2}),
    Mutation(
        "last_norm_not_summed_over_tensor",
        "Megatron-LM #1446",
        last_norm_not_summed_over_tensor,
        "reduction",
        r"^norm\.weight",
        {"tensor": 2},
    ),
    Mutation(
        "depth_counted_in_the_stage", "Megatron-LM !2592", depth_counted_in_the_stage, "forward", r"layers\.0\.mixer$", {"pipeline": 2}
    ),
    Mutation("every_stage_divides", "DeepSpeed #8154", every_stage_divides, "backward", r"layers\.0", {"pipeline": 2}, model="moe"),
    Mutation(
        "tied_sum_before_the_data_sum",
        "Megatron-LM #844",
        tied_sum_before_the_data_sum,
        "reduction",
        r"embed\.weight",
        {"pipeline": 2, "replicate": 2},
    ),
    Mutation(
        "gathered_in_the_wrong_order",
        "torchtitan #3206",
        gathered_in_the_wrong_order,
        "forward",
        r"layers\.0\.mixer$",
        {"context": 2, "attention": "ulysses"},
    ),
    Mutation("divisor_without_context", "Megatron-LM !1923", divisor_without_context, "reduction", r".*", {"context": 2}),
    Mutation(
        "experts_scaled_otherwise",
        "Megatron-LM 3373641f, DeepSpeed #6546",
        experts_scaled_otherwise,
        "reduction",
        r"experts",
        {"replicate": 2, "expert": 2},
        model="moe",
    ),
    Mutation(
        "router_gradient_not_summed",
        "torchtitan #2416",
        router_gradient_not_summed,
        "reduction",
        r"router\.weight",
        {"tensor": 2},
        model="moe",
    ),
    Mutation("reduction_starts_too_early", "DeepSpeed #7898", reduction_starts_too_early, "reduction", r".*", {"replicate": 2}),
    Mutation(
        "boundary_micro_batch_added_after",
        "DeepSpeed #7985",
        boundary_micro_batch_added_after,
        "reduction",
        r".*",
        {"replicate": 2},
        tables={"train": {"micro_batch_size": 2}},
    ),
    Mutation("wrapper_bypassed", "TrainCheck x-jxmnop-ddp", wrapper_bypassed, "reduction", r".*", {"replicate": 2}),
    Mutation(
        "one_size_never_reduced", "DeepSpeed #4321", one_size_never_reduced, "reduction", r"layers\.0\.ffn\.down\.weight", {"replicate": 2}
    ),
    Mutation("dummy_step_at_the_start", "Megatron-LM #5976", dummy_step_at_the_start, "forward", r".*"),
    Mutation(
        "optimizer_holds_old_parameters", "accelerate #2665", optimizer_holds_old_parameters, "update", r"layers\.0\.ffn\.down\.weight"
    ),
    Mutation(
        "partial_sums_in_bfloat16",
        "Poolside (McHardy & Abdin 2026)",
        partial_sums_in_bfloat16,
        "forward",
        r".*",
        {"tensor": 8},
        model="wide",
        tables={"train": {"precision": "bfloat16"}},
        lossy=True,
    ),
    Mutation(
        "gradients_summed_in_bfloat16",
        "DeepSpeed #5170",
        gradients_summed_in_bfloat16,
        "reduction",
        r".*",
        {"replicate": 2},
        tables={"train": {"precision": "bfloat16", "micro_batch_size": 2}},
        lossy=True,
    ),
    Mutation("mean_of_means", "transformers #35203", mean_of_means, "forward", r"loss", tables={"train": {"micro_batch_size": 2}}),
    Mutation("all_ranks_read_the_same_rows", "PyTorch #5059", all_ranks_read_the_same_rows, "forward", r"embed", {"replicate": 2}),
    Mutation("resume_begins_again", "prime-rl #3332", resume_begins_again, "facts", r"position"),
    Mutation("corrupt_shard_loaded_unseen", "Megatron-LM #5281", corrupt_shard_loaded_unseen, "forward", r"layers\.0\.ffn"),
    Mutation("groups_collapse_on_load", "Megatron-LM #4705", groups_collapse_on_load, "facts|update", r".*"),
    Mutation(
        "recompute_draws_anew", "OLMo-core #828", recompute_draws_anew, "backward|reduction", r".*", tables={"train": {"recompute": True}}
    ),
]
