"""Exact parameters and FLOPs of a `ModelSpec`, as pure functions.

A multiply-add is 2 FLOPs. Counted: every product with a weight (linear layers, router, active experts, convolution taps, the
head once even when tied) and every product between activations (attention scores and their mix of values). Not counted, as in
the literature: norms, rotations, softmax, gates, biases and the embedding lookup. Backward is twice forward, training three times.

Attention has three conventions, and a figure without its convention is worthless: `full` counts every pair of a row, whatever the
mask (PaLM, nanoGPT, torchtitan; what a dense mask computes), `causal` the pairs a model without documents may see (windows
included), and document lengths the pairs that are seen in packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.models.spec import FeedForwardSpec, ModelSpec, MoESpec

Convention = Literal["full", "causal"]


@dataclass(frozen=True)
class Part:
    """One kind of work, summed over the layers that do it.

    `parameters`: all of them; `active`: those a token passes; `multiplied`: those of the active that enter a product with each
    token; `pair_flops`: forward FLOPs per attended (query, key) pair, summed over layers, by window (None: no window).
    """

    name: str
    parameters: int
    active: int
    multiplied: int
    pair_flops: tuple[tuple[int | None, int], ...] = ()


@dataclass(frozen=True)
class ParameterCount:
    """`total` trainable parameters, those `active` for a token (lookup table included), and the lookup table itself."""

    total: int
    active: int
    embedding: int
    multiplied: int

    @property
    def six_n(self) -> int:
        """The rule of thumb, training FLOPs per token = 6 N (Kaplan et al. 2020), with N = active parameters, embeddings included."""
        return 6 * self.active


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs per token, averaged over a row of `tokens`: products with weights, products between activations."""

    weights: int
    attention: float
    head: int
    tokens: int
    convention: str

    @property
    def forward(self) -> float:
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward: what MFU counts."""
        return 3 * self.forward

    @property
    def training_recomputed(self) -> float:
        """Hardware FLOPs when every block runs forward again in backward (the head does not): what HFU counts."""
        return 4 * self.forward - self.head


def breakdown(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parts of `spec`, in data-flow order; their sums are the model."""
    kinds = [spec.mixer(layer) for layer in range(spec.layers)]
    feeds = [spec.feed_forward(layer) for layer in range(spec.layers)]
    parts = [Part("embedding", spec.vocab_size * spec.dim, spec.vocab_size * spec.dim, 0)]
    full, sliding = kinds.count("attention"), kinds.count("sliding")
    if full or sliding:
        parts += _attention(spec, full, sliding)
    if "mla" in kinds:
        parts += _mla(spec, kinds.count("mla"))
    if "conv" in kinds:
        parts.append(_conv(spec, kinds.count("conv")))
    if "dense" in feeds and spec.ffn is not None:
        weights, bias = _ffn(spec.ffn.hidden, spec.dim, spec.ffn)
        layers = feeds.count("dense")
        parts.append(Part("feed-forward", layers * (weights + bias), layers * (weights + bias), layers * weights))
    if "moe" in feeds and spec.moe is not None:
        parts += _moe(spec.moe, spec.dim, feeds.count("moe"))
    norms = (2 * spec.layers * (2 if spec.norm.placement == "sandwich" else 1) + 1) * spec.dim
    parts.append(Part("norms", norms, norms, 0))
    head = spec.vocab_size * spec.dim
    own = 0 if spec.tied_embeddings else head
    parts.append(Part("head", own, own, head))
    return tuple(parts)


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Return the exact counts of `spec`; they equal those of `Transformer(spec)`."""
    parts = breakdown(spec)
    return ParameterCount(
        total=sum(part.parameters for part in parts),
        active=sum(part.active for part in parts),
        embedding=spec.vocab_size * spec.dim,
        multiplied=sum(part.multiplied for part in parts),
    )


def layer_costs(spec: ModelSpec) -> list[int]:
    """Return the weights each layer multiplies a token with; the head counts with the last layer."""
    costs = []
    for layer in range(spec.layers):
        alone = {"layers": 1, "pattern": (spec.mixer(layer),), "ffn_pattern": (spec.feed_forward(layer),)}
        costs.append(sum(part.multiplied for part in breakdown(spec.model_copy(update=alone)) if part.name != "head"))
    costs[-1] += spec.vocab_size * spec.dim
    return costs


def count_flops(spec: ModelSpec, tokens: int, *, convention: Convention = "causal", documents: Sequence[int] | None = None) -> Flops:
    """Return the FLOPs per token of rows of `tokens`.

    `documents`: the lengths of the documents packed in one row (they sum to `tokens`), for the exact count of packed rows.
    Raises `ConfigError` when the lengths do not fill the row or are given with the `full` convention.
    """
    if tokens < 1:
        raise ConfigError(f"{tokens} is not a sequence length", where="tokens", remedy="use at least 1")
    if documents is not None and convention == "full":
        raise ConfigError("the full convention ignores documents", where="documents", remedy="use convention = 'causal'")
    if documents is not None and (sum(documents) != tokens or min(documents) < 1):
        raise ConfigError(f"lengths sum to {sum(documents)}, the row has {tokens} tokens", where="documents", remedy="fill the row")
    lengths = (tokens,) if documents is None else tuple(documents)
    attention = 0.0
    for part in breakdown(spec):
        for window, flops in part.pair_flops:
            pairs = tokens * tokens if convention == "full" else sum(visible_pairs(length, window) for length in lengths)
            attention += flops * pairs / tokens
    named = "full square" if convention == "full" else "exact causal" if documents is None else "exact causal, documents"
    return Flops(
        weights=2 * count_parameters(spec).multiplied,
        attention=attention,
        head=2 * spec.vocab_size * spec.dim,
        tokens=tokens,
        convention=named,
    )


def visible_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs in a causal document of `length` whose tokens see at most `window` tokens, themselves included."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def decode_flops(spec: ModelSpec, context: int) -> int:
    """Forward FLOPs of one new token that sees `context` cached tokens, itself included; MLA in its absorbed form."""
    attention = 0
    for layer in range(spec.layers):
        mixer = spec.mixer(layer)
        if mixer in ("attention", "sliding") and spec.attention is not None:
            window = spec.attention.window if mixer == "sliding" else None
            seen = context if window is None else min(context, window)
            attention += 4 * spec.attention.heads * spec.attention.head_dim * seen
        elif mixer == "mla" and spec.mla is not None:
            attention += 2 * spec.mla.heads * (2 * spec.mla.kv_rank + spec.mla.rope_dim) * context
    return 2 * count_parameters(spec).multiplied + attention


def _attention(spec: ModelSpec, full: int, sliding: int) -> list[Part]:
    assert spec.attention is not None
    a, dim, layers = spec.attention, spec.dim, full + sliding
    rows, q_rows = (a.heads + 2 * a.kv_heads) * a.head_dim, a.heads * a.head_dim
    weights = dim * rows + q_rows * dim
    extra = (rows if a.qkv_bias else 0) + (dim if a.out_bias else 0)
    extra += {"none": 0, "head": 2 * a.head_dim, "full": q_rows + a.kv_heads * a.head_dim}[a.qk_norm]
    pair = 4 * a.heads * a.head_dim
    pairs = tuple((window, count * pair) for window, count in ((None, full), (a.window, sliding)) if count)
    return [
        Part("attention projections", layers * (weights + extra), layers * (weights + extra), layers * weights),
        Part("attention", 0, 0, 0, pairs),
    ]


def _mla(spec: ModelSpec, layers: int) -> list[Part]:
    """Multi-head latent attention in its expanded (training) form: per pair nope + rope for the score, value for the mix."""
    assert spec.mla is not None
    m, dim = spec.mla, spec.dim
    qk = m.nope_dim + m.rope_dim
    weights = dim * (m.kv_rank + m.rope_dim) + m.kv_rank * m.heads * (m.nope_dim + m.value_dim) + m.heads * m.value_dim * dim
    extra = m.kv_rank + ((m.kv_rank + m.rope_dim + dim) if m.bias else 0)
    if m.q_rank is None:
        weights += dim * m.heads * qk
    else:
        weights += dim * m.q_rank + m.q_rank * m.heads * qk
        extra += m.q_rank + (m.q_rank if m.bias else 0)
    return [
        Part("MLA projections", layers * (weights + extra), layers * (weights + extra), layers * weights),
        Part("MLA", 0, 0, 0, ((None, layers * 2 * m.heads * (qk + m.value_dim)),)),
    ]


def _conv(spec: ModelSpec, layers: int) -> Part:
    assert spec.conv is not None
    dim = spec.dim
    weights = 4 * dim * dim + dim * spec.conv.width
    bias = 5 * dim if spec.conv.bias else 0  # in_proj 3, kernel 1, out 1
    return Part("short convolution", layers * (weights + bias), layers * (weights + bias), layers * weights)


def _ffn(hidden: int, dim: int, spec: FeedForwardSpec | None = None) -> tuple[int, int]:
    return 3 * hidden * dim, 2 * hidden + dim if spec is not None and spec.bias else 0


def _moe(moe: MoESpec, dim: int, layers: int) -> list[Part]:
    expert, _ = _ffn(moe.hidden, dim)
    router = layers * moe.experts * dim
    chosen = layers * moe.top_k * expert
    parts = [Part("router", router, router, router), Part("experts", layers * moe.experts * expert, chosen, chosen)]
    if moe.shared_hidden:
        shared = layers * _ffn(moe.shared_hidden, dim)[0]
        parts.append(Part("shared expert", shared, shared, shared))
    return parts
