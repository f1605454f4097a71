"""`ModelSpec`: an architecture as data. Everything else about a model is derived from it.

Symbols in shapes, here and in the layers: B batch, T sequence, D width (`dim`), H query heads, K key/value heads, Q head
size, F feed-forward width, E experts, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from surefoot.core.config import Config
from surefoot.core.errors import ConfigError

Mixer = Literal["attention", "sliding", "mla", "conv"]
FeedForward = Literal["dense", "moe"]


class RopeSpec(Config):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and how it is stretched beyond its trained length."""

    theta: PositiveFloat = 10_000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = Field(1.0, ge=1.0)
    original_positions: PositiveInt = 2048  # the length the frequencies were trained on (dynamic, llama3, yarn)
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None  # YaRN: multiplies cos and sin; None = 0.1 ln(factor) + 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    interleaved: bool = False  # pairs (2i, 2i+1) as in DeepSeek, instead of halves (i, i + d/2)


class AttentionSpec(Config):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245); used by the mixers `attention` and `sliding`."""

    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # over each head (Qwen3) or over all heads together (OLMo2)
    window: PositiveInt | None = None  # a token sees this many tokens, itself included; `sliding` layers only
    softcap: PositiveFloat | None = None  # scores -> cap * tanh(scores / cap)
    scale: PositiveFloat | None = None  # None = 1 / sqrt(head_dim)
    rotary_fraction: float = Field(1.0, gt=0.0, le=1.0)

    @property
    def rotary_dim(self) -> int:
        """Leading channels of each head that are rotated (even)."""
        return int(self.head_dim * self.rotary_fraction)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ConfigError(f"{self.kv_heads} does not divide heads = {self.heads}", where="kv_heads", remedy=f"use one of {divisors}")
        if self.rotary_dim % 2 or self.rotary_dim == 0:
            raise ConfigError(
                f"head_dim * rotary_fraction = {self.rotary_dim} channels cannot be rotated in pairs",
                where="head_dim",
                remedy="make it even",
            )
        return self


class MLASpec(Config):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank keys and values, decoupled RoPE."""

    heads: PositiveInt
    q_rank: PositiveInt | None = None  # None: queries are not compressed
    kv_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    bias: bool = False  # on the two down-projections and the output
    norm_eps: PositiveFloat = 1e-6  # of the latents' norms, which DeepSeek keeps apart from `norm.eps`
    scale: PositiveFloat | None = None  # None = 1 / sqrt(nope_dim + rope_dim), times YaRN's mscale^2 where it applies

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rope_dim % 2:
            raise ConfigError(f"{self.rope_dim} channels cannot be rotated in pairs", where="rope_dim", remedy="make it even")
        return self


class ConvSpec(Config):
    """Gated short convolution (LFM2): depthwise, causal, `width` taps."""

    width: int = Field(3, ge=2)
    bias: bool = False


class FeedForwardSpec(Config):
    """Gated feed-forward layer (Shazeer 2020, arXiv 2002.05202): down(act(gate x) * up x)."""

    hidden: PositiveInt
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    bias: bool = False


class MoESpec(Config):
    """Mixture of experts: routed gated feed-forward layers, top-k, dropless."""

    experts: PositiveInt
    top_k: PositiveInt
    hidden: PositiveInt
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # chosen weights divided by their sum
    scale: PositiveFloat = 1.0  # chosen weights times this
    groups: PositiveInt = 1  # node-limited routing: experts in groups, only the best `top_groups` eligible
    top_groups: PositiveInt = 1
    shared_hidden: int = Field(0, ge=0)  # width of the always-on expert; 0 = none
    balance: Literal["none", "aux_loss", "bias"] = "aux_loss"
    selection_bias: bool = False  # a per-expert bias that only chooses (DeepSeek-V3); implied by balance = "bias"
    aux_coefficient: float = Field(1e-2, ge=0.0)  # Switch (2101.03961) load-balancing loss, sequence scope
    z_coefficient: float = Field(0.0, ge=0.0)  # ST-MoE (2202.08906) router z-loss
    bias_rate: float = Field(1e-3, ge=0.0)  # step of the loss-free balancing bias (2408.15664)
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"

    @property
    def has_bias(self) -> bool:
        return self.selection_bias or self.balance == "bias"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ConfigError(f"{self.top_k} is more than experts = {self.experts}", where="top_k", remedy=f"use 1 to {self.experts}")
        if self.experts % self.groups:
            raise ConfigError(f"{self.groups} does not divide experts = {self.experts}", where="groups", remedy="use a divisor")
        if self.top_groups > self.groups:
            raise ConfigError(
                f"{self.top_groups} is more than groups = {self.groups}", where="top_groups", remedy=f"use 1 to {self.groups}"
            )
        if self.top_k > self.experts // self.groups * self.top_groups:
            raise ConfigError("the eligible groups hold fewer experts than top_k", where="top_k", remedy="raise top_groups")
        return self


class NormSpec(Config):
    """RMSNorm (Zhang & Sennrich 2019) and where it stands in a block."""

    eps: PositiveFloat = 1e-6
    placement: Literal["pre", "post", "sandwich"] = "pre"  # before a branch, after it (OLMo2), or both (Gemma)
    offset: bool = False  # multiply by 1 + weight (Gemma)


class InitSpec(Config):
    """Initialisation theory: see `models/init.py`."""

    scheme: Literal["fan_in", "fixed", "mup"] = "fan_in"
    std: PositiveFloat = 0.02  # fixed: of every matrix; fan_in and mup: of the embedding
    base_dim: PositiveInt = 256  # mup: width at which the hyper-parameters were tuned
    depth_scaling: bool = True  # residual outputs divided by sqrt(2 layers)


class ModelSpec(Config):
    """A decoder-only language model as data; `pattern` and `ffn_pattern` are repeated over the layers."""

    vocab_size: PositiveInt
    dim: PositiveInt
    layers: PositiveInt
    max_positions: PositiveInt = 2048
    pattern: tuple[Mixer, ...] = ("attention",)
    ffn_pattern: tuple[FeedForward, ...] = ("dense",)
    attention: AttentionSpec | None = None
    mla: MLASpec | None = None
    conv: ConvSpec | None = None
    ffn: FeedForwardSpec | None = None
    moe: MoESpec | None = None
    rope: RopeSpec = RopeSpec()
    rope_sliding: RopeSpec | None = None  # `sliding` layers' own rotary embedding (Gemma 3); None = `rope`
    norm: NormSpec = NormSpec()
    tied_embeddings: bool = False
    embedding_scale: PositiveFloat | None = None  # embeddings times this (Gemma: sqrt(dim))
    logit_softcap: PositiveFloat | None = None
    init: InitSpec = InitSpec()

    def mixer(self, layer: int) -> Mixer:
        """The mixer of `layer`."""
        return self.pattern[layer % len(self.pattern)]

    def feed_forward(self, layer: int) -> FeedForward:
        """The kind of feed-forward of `layer`."""
        return self.ffn_pattern[layer % len(self.ffn_pattern)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.pattern or not self.ffn_pattern:
            raise ConfigError("is empty", where="pattern" if not self.pattern else "ffn_pattern", remedy="name at least one kind")
        kinds = {self.mixer(layer) for layer in range(self.layers)} | {self.feed_forward(layer) for layer in range(self.layers)}
        needs = {"attention": "attention", "sliding": "attention", "mla": "mla", "conv": "conv", "dense": "ffn", "moe": "moe"}
        for kind in sorted(kinds):
            if getattr(self, needs[kind]) is None:
                raise ConfigError(f"a layer is '{kind}' but there is no such table", where=needs[kind], remedy=f"add [model.{needs[kind]}]")
        if self.rope.interleaved and kinds & {"attention", "sliding"}:
            remedy = "set it to false and permute the rows of q and k; 'mla' layers take it"
            raise ConfigError("grouped-query attention rotates halves", where="rope.interleaved", remedy=remedy)
        if "sliding" in kinds and self.attention is not None and self.attention.window is None:
            raise ConfigError("a layer is 'sliding' but no window is given", where="attention.window", remedy="set the window in tokens")
        return self
