"""Published architectures, and a tiny one of every kind."""

from __future__ import annotations

from surefoot.models import ModelSpec
from surefoot.models.spec import AttentionSpec, ConvSpec, FeedForwardSpec, MLASpec, MoESpec, NormSpec

DEEPSEEK_V3 = ModelSpec(
    vocab_size=129280, dim=7168, layers=61, pattern=("mla",), ffn_pattern=("dense",) * 3 + ("moe",) * 58,
    mla=MLASpec(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ffn=FeedForwardSpec(hidden=18432),
    moe=MoESpec(experts=256, top_k=8, hidden=2048, shared_hidden=2048, router="sigmoid", balance="bias", groups=8, top_groups=4),
)  # fmt: skip
DEEPSEEK_V2_LITE = ModelSpec(
    vocab_size=102400, dim=2048, layers=27, pattern=("mla",), ffn_pattern=("dense",) + ("moe",) * 26,
    mla=MLASpec(heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ffn=FeedForwardSpec(hidden=10944),
    moe=MoESpec(experts=64, top_k=6, hidden=1408, shared_hidden=2816),
)  # fmt: skip
QWEN3_30B_A3B = ModelSpec(
    vocab_size=151936, dim=2048, layers=48, ffn_pattern=("moe",),
    attention=AttentionSpec(heads=32, kv_heads=4, head_dim=128, qk_norm="head"), moe=MoESpec(experts=128, top_k=8, hidden=768),
)  # fmt: skip
LLAMA_8B = ModelSpec(
    vocab_size=128256, dim=4096, layers=32,
    attention=AttentionSpec(heads=32, kv_heads=8, head_dim=128), ffn=FeedForwardSpec(hidden=14336),
)  # fmt: skip
LFM2_1B = ModelSpec(
    vocab_size=65536, dim=2048, layers=16, tied_embeddings=True,
    pattern=tuple("attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)),
    attention=AttentionSpec(heads=32, kv_heads=8, head_dim=64, qk_norm="head"), conv=ConvSpec(), ffn=FeedForwardSpec(hidden=8192),
)  # fmt: skip

TINY = {"vocab_size": 96, "dim": 32, "layers": 3}
FFN = FeedForwardSpec(hidden=48)
SPECS = {
    "gqa": ModelSpec(**TINY, attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8), ffn=FFN),
    "bias": ModelSpec(
        **TINY, tied_embeddings=True, norm=NormSpec(placement="sandwich"), ffn=FeedForwardSpec(hidden=48, bias=True),
        attention=AttentionSpec(heads=4, kv_heads=1, head_dim=12, qkv_bias=True, out_bias=True, qk_norm="full"),
    ),
    "post": ModelSpec(
        **TINY, norm=NormSpec(placement="post"), attention=AttentionSpec(heads=2, kv_heads=2, head_dim=8, qk_norm="head"), ffn=FFN
    ),
    "sliding": ModelSpec(
        **TINY, pattern=("sliding", "attention"), attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, window=5), ffn=FFN
    ),
    "softcap": ModelSpec(**TINY, attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, softcap=20.0), ffn=FFN),
    "mla": ModelSpec(
        **TINY, pattern=("mla",), mla=MLASpec(heads=2, q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12), ffn=FFN
    ),
    "mla_direct": ModelSpec(
        **TINY, pattern=("mla",), mla=MLASpec(heads=2, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=12, bias=True), ffn=FFN
    ),
    "moe": ModelSpec(
        **TINY, ffn_pattern=("dense", "moe", "moe"), attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8), ffn=FFN,
        moe=MoESpec(experts=6, top_k=2, hidden=16, shared_hidden=24, balance="bias"),
    ),
    "conv": ModelSpec(
        **TINY, pattern=("conv", "attention", "conv"), conv=ConvSpec(width=4, bias=True),
        attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8), ffn=FFN,
    ),
}  # fmt: skip
