"""Context parallelism: a sequence cut over ranks, and how a layer reaches the rest of it.

**Ring attention** (Liu et al. 2023, arXiv 2310.01889): keys and values travel round the ring; each rank adds, block by block, what
its queries find there, by the running log-sum-exp. Backward, keys and values travel again together with their gradients, which
arrive home complete. A causal mask gives later tokens more work, so the sequence is cut into 2c pieces and rank r holds pieces r
and 2c - 1 - r (zigzag): the work is the same on every rank.

**Ulysses** (Jacobs et al. 2023, arXiv 2309.14509): an all-to-all turns a stretch of tokens with all heads into all tokens with
some heads, attention runs as on one device, and a second all-to-all turns it back.

A short convolution needs the last tokens of the piece before its own: the halo.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from surefoot.models.attention import attend_here
from surefoot.models.context import Context
from surefoot.models.parameters import accumulation_dtype
from surefoot.parallel.collectives import Group, all_gather, all_reduce, exchange, gather
from surefoot.parallel.layout import Layout
from surefoot.parallel.mesh import Mesh


def pieces(layout: Layout, rank: int) -> list[int]:
    """Return which of the `layout.chunks` pieces of a sequence context rank `rank` holds, in the order it holds them."""
    if layout.context == 1:
        return [0]
    return [rank, layout.chunks - 1 - rank] if layout.attention == "ring" else [rank]


def split_sequence(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the part of x: [B, T, ...] that context rank `rank` holds, [B, T / c, ...]."""
    if layout.context == 1:
        return x
    cut = x.chunk(layout.chunks, dim=1)
    return torch.cat([cut[piece] for piece in pieces(layout, rank)], dim=1)


@dataclass
class SequenceExchange:
    """`models.context.Exchange` for a sequence cut over the context and tensor ranks of `mesh`."""

    mesh: Mesh
    _documents: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        group = self.mesh.context
        if group is None:
            return attend_here(q, k, v, context, scale=scale, window=window, softcap=softcap)
        documents = None if context.documents is None else self._all_documents(context.documents, group)
        if self.mesh.layout.attention == "ulysses":
            joined = None if documents is None else torch.cat(documents.unbind(0), dim=1)
            whole = replace(context, documents=joined, exchange=None)
            q, k, v = (_to_heads(x, group) for x in (q, k, v))
            out = attend_here(q, k, v, whole, scale=scale, window=window, softcap=softcap)
            return _to_tokens(out, group)
        options = _Ring(self.mesh.layout, group, scale, window, softcap)
        result: Tensor = _RingAttention.apply(q, k, v, documents, options)  # type: ignore[no-untyped-call]
        return result

    def _all_documents(self, documents: Tensor, group: Group) -> Tensor:
        """Every rank's document numbers [c, B, T]; gathered once a forward pass, for all layers."""
        if self._documents is None or self._documents[0] is not documents:
            self._documents = documents, all_gather(documents[None], 0, group)
        return self._documents[1]

    def earlier(self, x: Tensor, documents: Tensor | None, halo: int) -> tuple[Tensor, Tensor | None]:
        found = _shifted(x, self._halos(x, halo, differentiable=True), halo)
        if documents is None:
            return found, None
        return found, _shifted(documents, self._halos(documents, halo, differentiable=False, start=-2), halo)

    def _halos(self, x: Tensor, halo: int, *, differentiable: bool, start: float = 0) -> list[Tensor]:
        """The `halo` tokens before each piece of x: [B, T, ...], a piece that begins the sequence has `start` there."""
        layout, group = self.mesh.layout, self.mesh.context
        mine = pieces(layout, self.mesh.at.context)
        if group is None:
            return [torch.full_like(x[:, :halo], start)]
        tails = torch.stack([piece[:, -halo:] for piece in x.chunk(len(mine), dim=1)])
        every = gather(tails, 0, group) if differentiable else all_gather(tails, 0, group)
        where = {piece: index for index, piece in enumerate(p for rank in range(layout.context) for p in pieces(layout, rank))}
        # What begins the sequence takes part too, so that every rank's backward pass meets the same collectives.
        begins = torch.ones((), dtype=torch.bool, device=x.device)
        return [every[where[piece - 1]] if piece else every[0].masked_fill(begins, start) for piece in mine]

    def stream(self, x: Tensor) -> Tensor:
        return x if self.mesh.tensor is None else x.chunk(self.mesh.layout.tensor, dim=1)[self.mesh.at.tensor]

    def total(self, counts: Tensor) -> Tensor:
        return counts if self.mesh.sequence is None else all_reduce(counts, self.mesh.sequence)


def _shifted(x: Tensor, halos: list[Tensor], halo: int) -> Tensor:
    """x: [B, T, ...] in pieces, each with the tokens before it -> [halo, B, T, ...]."""
    size = x.shape[1] // len(halos)
    extended = [torch.cat((before, piece), dim=1) for before, piece in zip(halos, x.chunk(len(halos), dim=1), strict=True)]
    return torch.stack([torch.cat([piece[:, tap : tap + size] for piece in extended], dim=1) for tap in range(halo)])


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """[B, T/c, H, Q] -> [B, T, H/c, Q]."""
    ranks = group.size()
    ones = [1] * ranks
    by_rank = torch.stack(x.chunk(ranks, dim=2))
    return torch.cat(exchange(by_rank, ones, ones, group).unbind(0), dim=1)


def _to_tokens(x: Tensor, group: Group) -> Tensor:
    """[B, T, H/c, Q] -> [B, T/c, H, Q]."""
    ranks = group.size()
    ones = [1] * ranks
    by_rank = torch.stack(x.chunk(ranks, dim=1))
    return torch.cat(exchange(by_rank, ones, ones, group).unbind(0), dim=2)


@dataclass(frozen=True)
class _Ring:
    layout: Layout
    group: Group
    scale: float
    window: int | None
    softcap: float | None

    @property
    def rank(self) -> int:
        return self.group.rank()

    def source(self, hop: int) -> int:
        """Whose keys are here after `hop` hops."""
        return (self.rank - hop) % self.layout.context

    def start_hop(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Begin to send `tensors` to the next rank and to receive the previous one's."""
        size = self.layout.context
        after = dist.get_global_rank(self.group, (self.rank + 1) % size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % size)
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in arriving]
        works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return arriving, works


@dataclass(frozen=True)
class _Pair:
    """A piece of queries that sees a piece of keys: their slices and the mask [B or 1, Tq, Tk] (None: all of it)."""

    queries: slice
    keys: slice
    mask: Tensor | None


def _pairs(ring: _Ring, source: int, tokens: int, documents: Tensor | None, device: torch.device) -> list[_Pair]:
    mine, theirs = pieces(ring.layout, ring.rank), pieces(ring.layout, source)
    size = tokens // len(mine)
    inside = torch.arange(size, device=device)
    found = []
    for place, piece in enumerate(mine):
        for other, key in enumerate(theirs):
            # The nearest query and key decide whether a window reaches at all.
            if key > piece or (ring.window is not None and (piece - key) * size - (size - 1) >= ring.window):
                continue
            queries, keys = slice(place * size, (place + 1) * size), slice(other * size, (other + 1) * size)
            distance = (piece - key) * size + inside[:, None] - inside[None, :]
            mask = (distance >= 0)[None] if key == piece else None
            if ring.window is not None and (piece - key + 1) * size > ring.window:
                mask = (distance < ring.window)[None] if mask is None else mask & (distance < ring.window)
            if documents is not None:
                same = documents[ring.rank][:, queries, None] == documents[source][:, None, keys]
                if not bool(same.any()):
                    continue
                mask = same if mask is None else mask & same
            found.append(_Pair(queries, keys, mask))
    return found


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
    """q: [B, K, G, Tq, Q], k: [B, K, Tk, Q] -> [B, K, G, Tq, Tk] in float32 or wider."""
    wide = accumulation_dtype(q.dtype)
    scores: Tensor = (q.to(wide) @ k.to(wide)[:, :, None].transpose(-1, -2)).mul_(ring.scale)
    if ring.softcap is not None:
        scores = ring.softcap * torch.tanh(scores / ring.softcap)
    return scores if mask is None else torch.where(mask[:, None, None], scores, float("-inf"))


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, T, H, Q] -> [B, K, H / K, T, Q]."""
    grouped: Tensor = x.unflatten(2, (kv_heads, -1))
    return grouped.permute(0, 2, 3, 1, 4)


def _ungrouped(x: Tensor) -> Tensor:
    """[B, K, G, T, Q] -> [B, T, K G, Q]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _RingAttention(Function):
    """q: [B, T, H, Q], k: [B, T, K, Q], v: [B, T, K, Qv], documents: [c, B, T] or None -> [B, T, H, Qv]."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: _Ring) -> Tensor:
        wide = accumulation_dtype(q.dtype)
        queries = _grouped(q, k.shape[2])
        out = torch.zeros(*queries.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(queries.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        block = [k.contiguous(), v.contiguous()]
        for hop in range(ring.layout.context):
            arriving, work = ring.start_hop(block) if hop < ring.layout.context - 1 else ([], [])
            keys, values = (x.permute(0, 2, 1, 3) for x in block)
            for pair in _pairs(ring, ring.source(hop), q.shape[1], documents, q.device):
                scores = _scores(queries[..., pair.queries, :], keys[:, :, pair.keys], pair.mask, ring)
                _merge(out[..., pair.queries, :], lse[..., pair.queries], scores, values[:, :, pair.keys])
            for item in work:
                item.wait()
            block = arriving
        ctx.save_for_backward(q, k, v, documents, out, lse)  # type: ignore[arg-type]
        ctx.ring = ring  # type: ignore[attr-defined]
        return _ungrouped(out).to(v.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        ring: _Ring = ctx.ring  # type: ignore[attr-defined]
        wide = out.dtype
        queries, grad = _grouped(q, k.shape[2]), _grouped(grads[0], k.shape[2])
        # sum_s P_ts dP_ts = dO_t . O_t (Dao et al. 2022, arXiv 2205.14135, eq. 4)
        row_dot = (grad.to(wide) * out).sum(-1, keepdim=True)
        dq = torch.zeros(queries.shape, dtype=wide, device=q.device)
        block = [k.contiguous(), v.contiguous()]
        sums = [torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v)]
        for hop in range(ring.layout.context):
            last = hop == ring.layout.context - 1
            arriving, work = ([], []) if last else ring.start_hop(block)
            keys, values, d_keys, d_values = (x.permute(0, 2, 1, 3) for x in (*block, *sums))
            for pair in _pairs(ring, ring.source(hop), q.shape[1], documents, q.device):
                rows = (..., pair.queries, slice(None))
                columns = (slice(None), slice(None), pair.keys)
                scores = _scores(queries[rows], keys[columns], pair.mask, ring)
                weights = torch.exp(scores - lse[..., pair.queries, None])
                d_weights = (grad[rows] @ values[columns][:, :, None].transpose(-1, -2)).to(wide)
                d_scores = weights * (d_weights - row_dot[rows]) * ring.scale
                if ring.softcap is not None:
                    d_scores = d_scores * (1.0 - (scores.nan_to_num(neginf=0.0) / ring.softcap).square())
                narrow = d_scores.to(q.dtype)
                dq[rows] += narrow @ keys[columns][:, :, None]
                d_keys[columns] += (narrow.transpose(-1, -2) @ queries[rows]).to(wide).sum(2)
                d_values[columns] += (weights.to(v.dtype).transpose(-1, -2) @ grad[rows]).to(wide).sum(2)
            for item in work:
                item.wait()
            block = arriving
            # The sums follow their keys; after the last hop they are home.
            sums, work = ring.start_hop(sums)
            for item in work:
                item.wait()
        return _ungrouped(dq).to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None, None


def _merge(out: Tensor, lse: Tensor, scores: Tensor, values: Tensor) -> None:
    """Add a block's weighted values to the running `out`: [..., Tq, Qv] and `lse`: [..., Tq], in place."""
    found = scores.logsumexp(-1)
    merged = torch.logaddexp(lse, found)
    # A row that has seen nothing yet is at -inf on both sides: exp(-inf - -inf) must count as nothing.
    safe = merged.masked_fill(merged == float("-inf"), 0.0)
    weights = torch.exp(scores - safe[..., None])
    out.mul_(torch.exp(lse - safe)[..., None]).add_(weights.to(values.dtype) @ values[:, :, None])
    lse.copy_(merged)
