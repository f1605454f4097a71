"""Expert parallelism: experts cut over ranks by number; each token travels to its experts and back.

Every rank holds other tokens (also tensor ranks, whose stream is cut along the sequence), so that nothing is computed twice. What
arrives is sorted by expert again and goes through this rank's experts as on one device. Dropless: the sizes of what travels follow
the routing, and a token's output depends on that token alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.models.moe import Experts, MoE
from surefoot.models.transformer import Transformer
from surefoot.parallel.collectives import Group, exchange


def spread_experts(model: Transformer, group: Group) -> None:
    """Make each layer of experts, whose parameters are already this rank's experts, reach those of the whole `group`."""
    for block in model.layers.values():
        if isinstance(block.ffn, MoE):
            block.ffn.experts = SpreadExperts(block.ffn.experts, group)


class SpreadExperts(Experts):
    """rows: [R, D] sorted by expert, counts: [E] rows of each of all experts -> [R, D]."""

    def __init__(self, own: Experts, group: Group) -> None:
        nn.Module.__init__(self)
        for name, parameter in own.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.__dict__["decls"] = own.__dict__["decls"]
        self.activation, self.group = own.activation, group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        size, here = self.group.size(), self.gate_up.shape[0]
        sent = counts.view(size, here)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent.contiguous(), group=self.group)
        out, back = sent.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = exchange(rows, out, back, self.group)
        order, inverse = _by_expert(arriving)
        done = super().forward(_Permute.apply(arrived, order, inverse), arriving.sum(0))  # type: ignore[no-untyped-call]
        return exchange(_Permute.apply(done, inverse, order), back, out, self.group)  # type: ignore[no-untyped-call]


def _by_expert(arriving: Tensor) -> tuple[Tensor, Tensor]:
    """arriving: [ranks, experts] rows, which lie rank by rank; return the order that sorts them by expert, and its inverse."""
    expert = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    order = torch.argsort(expert.repeat_interleave(arriving.flatten()), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return order, inverse


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient is gathered, never scattered with additions."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, inverse), None, None
