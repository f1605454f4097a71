"""Layouts as degrees of parallelism, and all those that a model and a batch can take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.core.errors import LayoutError
from surefoot.models.spec import ModelSpec


@dataclass(frozen=True)
class Degrees:
    """Degrees of each kind of parallelism, named as in a config's [layout]; `expert` shares out the ranks of the others."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tokens

    @property
    def tokens(self) -> int:
        """How many ranks of a pipeline stage hold different tokens."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """How many ranks read different rows."""
        return self.replicate * self.shard

    @property
    def dense_shards(self) -> int:
        """Among how many ranks sharding (FSDP) cuts a rank's part of a dense parameter."""
        return self.shard * self.context if self.shard > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Among how many ranks sharding cuts a rank's experts."""
        return self.tokens // self.replicate // self.expert if self.shard > 1 else 1

    def __str__(self) -> str:
        used = [f"{name} {degree}" for name, degree in vars(self).items() if degree > 1]
        return ", ".join(used) or "one process"


def enumerate_layouts(spec: ModelSpec, world: int, rows: int, sequence: int) -> tuple[Degrees, ...]:
    """Return every layout of `world` processes that `spec` and a step of `rows` sequences of `sequence` tokens can take.

    Raises `LayoutError` when there is none.
    """
    if world < 1:
        raise LayoutError(f"{world} processes cannot train", where="world", remedy="use 1 or more")
    found = tuple(
        degrees
        for replicate, shard, tensor, pipeline, context in _factors(world, 5)
        for degrees in _with_experts(spec, Degrees(replicate, shard, tensor, pipeline, context))
        if obstacle(spec, degrees, rows, sequence) is None
    )
    if not found:
        plain = obstacle(spec, Degrees(shard=world), rows, sequence)
        remedy = "use a batch that is a multiple of the number of processes, or fewer processes"
        what = f"no layout of {world} processes fits this model and batch: with shard {world}, {plain}"
        raise LayoutError(what, where="world", remedy=remedy)
    return found


def obstacle(spec: ModelSpec, degrees: Degrees, rows: int, sequence: int) -> str | None:
    """Return why `spec` or the step cannot be cut by `degrees`, or None when they can."""
    d = degrees
    for count, what in _divided_by_tensor(spec):
        if count % d.tensor:
            return f"{count} {what} do not divide among {d.tensor}"
    if -(-spec.vocab_size // d.tensor) * (d.tensor - 1) >= spec.vocab_size:
        return f"a vocabulary of {spec.vocab_size} leaves the last of {d.tensor} tensor ranks nothing"
    pieces = d.tensor * (2 * d.context if d.context > 1 else 1)
    if sequence % pieces:
        return f"{sequence} tokens do not divide into {pieces} pieces"
    reach = spec.conv.width - 1 if spec.conv is not None and "conv" in spec.pattern else 0
    if d.context > 1 and sequence // (2 * d.context) < reach:
        return f"pieces of a sequence are shorter than the convolution's reach of {reach}"
    if rows % d.data:
        return f"{rows} rows do not divide among {d.data} data ranks"
    if d.pipeline > spec.layers:
        return f"{spec.layers} layers are fewer than {d.pipeline} stages"
    return _expert_obstacle(spec, d)


def _expert_obstacle(spec: ModelSpec, d: Degrees) -> str | None:
    if d.expert == 1:
        return None
    if spec.moe is None or "moe" not in spec.ffn_pattern:
        return "the model has no experts"
    if spec.moe.experts % d.expert:
        return f"{spec.moe.experts} experts do not divide among {d.expert}"
    ranks = d.tokens if d.shard == 1 else d.tokens // d.replicate
    return f"{ranks} token ranks do not divide among {d.expert} expert ranks" if ranks % d.expert else None


def _divided_by_tensor(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    mixers = {spec.mixer(layer) for layer in range(spec.layers)}
    if spec.attention is not None and mixers & {"attention", "sliding"}:
        yield spec.attention.heads, "heads"
        yield spec.attention.kv_heads, "key/value heads"
    if spec.mla is not None and "mla" in mixers:
        yield spec.mla.heads, "heads"
    if "conv" in mixers:
        yield spec.dim, "channels"
    feeds = {spec.feed_forward(layer) for layer in range(spec.layers)}
    if spec.ffn is not None and "dense" in feeds:
        yield spec.ffn.hidden, "feed-forward channels"


def _with_experts(spec: ModelSpec, degrees: Degrees) -> Iterator[Degrees]:
    limit = spec.moe.experts if spec.moe is not None and "moe" in spec.ffn_pattern else 1
    for expert in range(1, min(limit, degrees.tokens) + 1):
        if limit % expert == 0 and degrees.tokens % expert == 0:
            yield Degrees(degrees.replicate, degrees.shard, degrees.tensor, degrees.pipeline, degrees.context, expert)


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `product` as `count` ordered factors."""
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factors(product // first, count - 1):
                yield first, *rest
