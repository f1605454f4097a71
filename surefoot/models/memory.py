"""Bytes that training and decoding a `ModelSpec` take, as pure functions.

Weights, gradients, masters and optimizer state follow from the parameters' declarations. Activations are what autograd keeps
between forward and backward, layer by layer, as the layers in this package keep them; scratch that lives inside one operation is
not in it, apart from the head's chunk of logits, the largest. Recomputation keeps each block's input, and all of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.models.loss import CHUNK_BYTES
from surefoot.models.parameters import ParamDecl, declarations
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer

Precision = Literal["float32", "bfloat16", "bfloat16_autocast"]
WIDE = 4  # bytes of what statistics, moments and masters are kept in: float32


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process that trains; `head` is the head's gradients, made in the forward pass, and its chunk of logits."""

    weights: int
    gradients: int
    optimizer: int
    masters: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.masters + self.activations + self.head


@dataclass(frozen=True)
class _Widths:
    """Bytes of a value: `compute` of products and their results, `stream` of the residual stream; `copies` of cast weights (autocast)."""

    compute: int
    stream: int
    copies: int


_WIDTHS = {"float32": _Widths(4, 4, 0), "bfloat16": _Widths(2, 2, 0), "bfloat16_autocast": _Widths(2, 4, 2)}


def training_memory(
    spec: ModelSpec,
    batch: int,
    tokens: int,
    *,
    precision: Precision = "float32",
    optimizer: Literal["adamw", "muon"] = "adamw",
    recompute: bool = False,
) -> TrainingMemory:
    """Return the bytes of training on `batch` rows of `tokens`, one micro-batch a step, on one process."""
    decls = declarations(Transformer(spec, device="meta"))
    count = sum(_size(decl) for decl in decls.values())
    single = sum(_size(decl) for decl in decls.values() if optimizer == "muon" and decl.role == "hidden")
    stored = 2 if precision == "bfloat16" else 4
    return TrainingMemory(
        weights=stored * count,
        gradients=stored * count,
        optimizer=WIDE * (2 * count - single),  # AdamW keeps two moments, Muon one
        masters=WIDE * count if precision == "bfloat16" else 0,
        activations=activation_bytes(spec, batch, tokens, precision=precision, recompute=recompute),
        head=head_bytes(spec, batch * tokens, precision=precision),
    )


def activation_bytes(spec: ModelSpec, batch: int, tokens: int, *, precision: Precision = "float32", recompute: bool = False) -> int:
    """Return what autograd keeps from the forward pass: token ids, rotations, every block, the last norm."""
    widths, count = _WIDTHS[precision], batch * tokens
    layers = block_bytes(spec, batch, tokens, precision=precision)
    blocks = sum(layers)
    if recompute:
        blocks = spec.layers * count * spec.dim * widths.stream + max(layers)
    shared = 8 * count + count * _rotation(spec) * widths.compute
    return int(blocks + shared + count * _norm(spec.dim, widths.stream))


def block_bytes(spec: ModelSpec, batch: int, tokens: int, *, precision: Precision = "float32") -> tuple[float, ...]:
    """Return what autograd keeps of each block, when nothing is computed again."""
    kinds = [(spec.mixer(layer), spec.feed_forward(layer)) for layer in range(spec.layers)]
    found = {kind: _layer(spec, kinds.index(kind), batch, tokens, _WIDTHS[precision]) for kind in set(kinds)}
    return tuple(found[kind] for kind in kinds)


def head_bytes(spec: ModelSpec, count: int, *, precision: Precision = "float32") -> int:
    """Return the bytes of the head for `count` tokens: the gradients of its input and weight, and its chunk of logits."""
    return _head(spec, count, _WIDTHS[precision])


def cache_bytes(spec: ModelSpec, batch: int, capacity: int, *, itemsize: int = 2) -> int:
    """Return the bytes of a decoding cache for `batch` sequences of at most `capacity` tokens."""
    return batch * sum(
        capacity * grows * itemsize + fixed * itemsize + documents * 4
        for grows, fixed, documents in (_state(spec, layer) for layer in range(spec.layers))
    )


def cache_bytes_per_token(spec: ModelSpec, *, itemsize: int = 2) -> int:
    """Return by how many bytes the cache grows with each token: keys and values, or MLA's latent; a convolution's does not."""
    return itemsize * sum(_state(spec, layer)[0] for layer in range(spec.layers))


def _state(spec: ModelSpec, layer: int) -> tuple[int, int, int]:
    """Values a token, values a sequence, and document ids a sequence (int32) of one layer's state."""
    kind = spec.mixer(layer)
    if kind == "mla":
        assert spec.mla is not None
        return spec.mla.kv_rank + spec.mla.rope_dim, 0, 0
    if kind == "conv":
        assert spec.conv is not None
        return 0, (spec.conv.width - 1) * spec.dim, spec.conv.width - 1
    assert spec.attention is not None
    return 2 * spec.attention.kv_heads * spec.attention.head_dim, 0, 0


def _size(decl: ParamDecl) -> int:
    size = 1
    for extent in decl.shape:
        size *= extent
    return size


def _norm(size: int, width: int, *, view: bool = False) -> int:
    """Bytes a token that RMSNorm keeps: its input in float32 (`view`: a part of what is kept already), 1 / rms, the normed value."""
    return (0 if view and width == WIDE else size * WIDE) + WIDE + size * width


def _rotation(spec: ModelSpec) -> int:
    """Values a token of cos and sin."""
    kinds = {spec.mixer(layer) for layer in range(spec.layers)}
    if spec.attention is not None and kinds & {"attention", "sliding"}:
        both = spec.rope_sliding is not None and {"attention", "sliding"} <= kinds
        return spec.attention.rotary_dim * (2 if both else 1)
    return spec.mla.rope_dim if spec.mla is not None and "mla" in kinds else 0


def _layer(spec: ModelSpec, layer: int, batch: int, tokens: int, w: _Widths) -> float:
    """Bytes of one block: its norms, mixer and feed-forward."""
    placement = spec.norm.placement
    norms = 2 * _norm(spec.dim, w.stream) if placement != "post" else 0
    if placement != "pre":
        norms += 2 * _norm(spec.dim, w.compute)
    kind = spec.mixer(layer)
    mixer: float
    if kind == "mla":
        mixer, weights = _mla(spec, w)
    elif kind == "conv":
        mixer, weights = _conv(spec, tokens, w)
    else:
        mixer, weights = _attention(spec, kind == "sliding", batch, tokens, w)
    ffn, more = _moe(spec, w) if spec.feed_forward(layer) == "moe" else _ffn(spec, w)
    return batch * tokens * (norms + mixer + ffn) + w.copies * (weights + more)


def _attention(spec: ModelSpec, sliding: bool, batch: int, tokens: int, w: _Widths) -> tuple[float, int]:
    """Bytes a token, and values of the weights: the products' inputs, q and k (rotated), v inside the fused product, the output."""
    assert spec.attention is not None
    a = spec.attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    fused = (q + 2 * kv) * w.compute
    kept = float(spec.dim * w.compute)
    if a.qk_norm != "none":
        heads = (a.heads, a.kv_heads) if a.qk_norm == "head" else (1, 1)
        kept += sum(_norm(size, w.compute, view=True) + (parts - 1) * WIDE for size, parts in zip((q, kv), heads, strict=True))
    if a.softcap is not None:
        # Written out: q, k and v as batches of matrices, the capped scores, the weights (in float32 and as used), a mask.
        kept += 4 * q * w.compute + a.heads * tokens * (w.compute + WIDE + (w.compute if w.compute != WIDE else 0)) + tokens / batch
        return kept, spec.dim * (q + 2 * kv) + q * spec.dim
    kept += fused + (2 * q + kv) * w.compute
    if sliding and a.window is not None and a.window < tokens:
        kept += a.heads * WIDE + tokens * w.compute / batch  # the kernel's log-sum-exp, and the mask as numbers
    return kept, spec.dim * (q + 2 * kv) + q * spec.dim


def _mla(spec: ModelSpec, w: _Widths) -> tuple[int, int]:
    assert spec.mla is not None
    m, c = spec.mla, w.compute
    rows = m.nope_dim + m.rope_dim
    kept = spec.dim * c * (2 if w.copies else 1)  # autocast casts the input anew for each of the two products that read it
    kept += (2 * m.heads * rows + m.heads * (m.nope_dim + m.value_dim) + m.heads * m.value_dim) * c
    kept += (m.kv_rank + m.rope_dim if c == WIDE else m.kv_rank) * WIDE + WIDE + 2 * m.kv_rank * c
    weights = spec.dim * (m.kv_rank + m.rope_dim) + m.kv_rank * m.heads * (m.nope_dim + m.value_dim) + m.heads * m.value_dim * spec.dim
    if m.q_rank is None:
        return kept, weights + spec.dim * m.heads * rows
    return kept + _norm(m.q_rank, c) + m.q_rank * c, weights + m.q_rank * (spec.dim + m.heads * rows)


def _conv(spec: ModelSpec, tokens: int, w: _Widths) -> tuple[float, int]:
    """The input, the fused (b, c, x), the gated input with and without its halo, what is mixed, the output product's input."""
    assert spec.conv is not None
    halo = (spec.conv.width - 1) / tokens
    # The taps' kernel is float32 under autocast, and so is what comes of it.
    mixed = w.compute if w.copies == 0 else WIDE
    kept = spec.dim * (w.compute * (7 + halo) + mixed)
    return kept, 4 * spec.dim * spec.dim


def _ffn(spec: ModelSpec, w: _Widths) -> tuple[int, int]:
    assert spec.ffn is not None
    return (spec.dim + 4 * spec.ffn.hidden) * w.compute, 3 * spec.dim * spec.ffn.hidden


def _moe(spec: ModelSpec, w: _Widths) -> tuple[int, int]:
    """The router's (in float32), who goes where, then rows of every choice: input, gate and up, output."""
    assert spec.moe is not None
    moe, dim = spec.moe, spec.dim
    kept = dim * WIDE + moe.experts * WIDE + moe.top_k * (3 * 8 + WIDE + w.compute) + 2 * WIDE
    kept += moe.top_k * (2 * dim + 2 * moe.hidden) * w.compute
    weights = 3 * moe.experts * dim * moe.hidden
    if moe.shared_hidden:
        kept += 4 * moe.shared_hidden * w.compute + (0 if w.compute == WIDE else dim * w.compute)
        weights += 3 * dim * moe.shared_hidden
    return kept, weights


def _head(spec: ModelSpec, tokens: int, w: _Widths) -> int:
    """The gradients of the head's input and weight, and one chunk of logits, wide and (where narrower) as computed."""
    rows = min(tokens, max(1, CHUNK_BYTES // (spec.vocab_size * WIDE)))
    chunk = rows * spec.vocab_size * (WIDE + (0 if w.compute == WIDE else w.compute))
    wide = WIDE if rows < tokens else w.compute  # a sum over chunks is taken in float32
    return tokens * spec.dim * w.compute + spec.vocab_size * spec.dim * wide + chunk
