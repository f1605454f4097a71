"""Families x awkward configurations x kinds of batch: what parity is claimed for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Table = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`batch`: plain, left_padded or packed; `offset`: position of the first token (long positions)."""

    family: str
    name: str
    config: Table = field(default_factory=dict)
    batch: str = "plain"
    offset: int = 0

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}-{self.batch}"

    def full(self) -> Table:
        return COMMON | BASES[self.family] | self.config


COMMON: Table = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 3e-6,
}  # fmt: skip
_MOE: Table = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "norm_topk_prob": True}
_GEMMA: Table = {"sliding_window": 4, "query_pre_attn_scalar": 7, "tie_word_embeddings": True, "num_hidden_layers": 3}
BASES: dict[str, Table] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 6},
    "olmo2": {},
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "head_dim": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "original_max_position_embeddings": 64,
    },
    "gemma2": _GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    "gemma3_text": _GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "qwen3_moe": _MOE,
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-4,
        "num_hidden_layers": 3, "head_dim": 6,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3, "tie_word_embeddings": True, "norm_eps": 2e-5,
    },
}  # fmt: skip
LINEAR: Table = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC: Table = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LLAMA3: Table = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN: Table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE: Table = {"mscale": 0.7, "mscale_all_dim": 1.1}
SLIDING: Table = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
MIXED: Table = SLIDING | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_hidden_layers": 3}
ODD: Table = {"hidden_size": 22, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}


def _rope(params: Table, **more: Any) -> Table:
    return {"rope_parameters": params, **more}


def _batches(family: str, name: str, config: Table) -> list[Case]:
    return [Case(family, name, config, batch) for batch in ("plain", "left_padded", "packed")]


def _gemma3_rope(full: Table, sliding: Table) -> Table:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


GRID: tuple[Case, ...] = (
    *_batches("llama", "base", {}),
    Case("llama", "kv1-bias-tied", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("llama", "linear-long", _rope(LINEAR), offset=5000),
    *_batches("llama", "dynamic", _rope(DYNAMIC, max_position_embeddings=8)),
    Case("llama", "dynamic-short", _rope(DYNAMIC)),
    Case("llama", "llama3-long", _rope(LLAMA3), offset=3000),
    Case("llama", "yarn-long", _rope(YARN), offset=300),
    Case("llama", "yarn-factor", _rope(YARN | {"attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0}), offset=40),
    # Long enough an original length that the ramp's ends fall between channels, so that truncating them matters.
    Case("llama", "yarn-mscale", _rope(YARN | MSCALE | {"truncate": False, "original_max_position_embeddings": 2048}), "packed"),
    *_batches("mistral", "window", {}),
    Case("mistral", "full-odd", ODD | {"sliding_window": None}),
    Case("mistral", "window-odd-yarn", ODD | _rope(YARN), "packed", 0),
    *_batches("qwen2", "base", {"tie_word_embeddings": True}),
    Case("qwen2", "mixed-windows", MIXED, "left_padded"),
    Case("qwen2", "odd-yarn", ODD | _rope(YARN), offset=100),
    *_batches("qwen3", "base", {}),
    Case("qwen3", "mixed-bias-tied", MIXED | {"attention_bias": True, "tie_word_embeddings": True}, "packed"),
    Case("qwen3", "odd-dynamic", ODD | _rope(DYNAMIC, max_position_embeddings=8)),
    *_batches("olmo2", "base", {}),
    Case("olmo2", "odd-bias-llama3", ODD | {"attention_bias": True, "tie_word_embeddings": True} | _rope(LLAMA3), offset=100),
    *_batches("phi3", "partial", {}),
    Case("phi3", "window", {"sliding_window": 4}, "packed"),
    *_batches("gemma2", "base", {}),
    Case("gemma2", "bias-untied", {"attention_bias": True, "tie_word_embeddings": False, "attn_logit_softcapping": None}),
    Case("gemma2", "kv1-uncapped", {"num_key_value_heads": 1, "final_logit_softcapping": None, "query_pre_attn_scalar": 10}, "packed"),
    *_batches("gemma3_text", "base", {}),
    Case("gemma3_text", "two-ropes", _gemma3_rope(LINEAR | {"factor": 8.0}, {"rope_type": "default", "rope_theta": 500.0}), offset=900),
    Case("gemma3_text", "yarn-bias-capped", _gemma3_rope(YARN, LINEAR) | {"attention_bias": True, "final_logit_softcapping": 2.0}),
    *_batches("qwen3_moe", "base", {}),
    Case("qwen3_moe", "raw-weights-bias", {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}),
    Case("qwen3_moe", "dense-layers", {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 1}),
    Case("qwen3_moe", "every-second-window", {"num_hidden_layers": 4, "decoder_sparse_step": 2} | SLIDING | _rope(YARN), "packed"),
    *_batches("mixtral", "base", {}),
    Case("mixtral", "window-top1-odd", ODD | {"sliding_window": 4, "num_experts_per_tok": 1}, "left_padded"),
    *_batches("deepseek_v3", "base", {}),
    Case("deepseek_v3", "no-q-rank-bias", {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2}),
    Case("deepseek_v3", "yarn-mscale-equal", _rope(YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}), offset=200),
    Case("deepseek_v3", "yarn-mscale-unequal", _rope(YARN | MSCALE), "packed"),
    Case("deepseek_v3", "halves-ungrouped", {"rope_interleave": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    Case("deepseek_v3", "wide-values", {"v_head_dim": 16, "norm_topk_prob": False, "tie_word_embeddings": True}, "left_padded"),
    *_batches("lfm2", "base", {}),
    Case("lfm2", "bias-untied", {"conv_bias": True, "tie_word_embeddings": False, "conv_L_cache": 4}),
    Case("lfm2", "adjusted-width-odd", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 6, "intermediate_size": 41}, "packed"),
    Case("lfm2", "kv1-yarn", {"num_key_value_heads": 1} | _rope(YARN), offset=100),
)

# Tied, a random Gemma says its last token again for ever, and agreement would mean little.
GENERATED: tuple[Case, ...] = (
    *(Case(family, "untied", {"tie_word_embeddings": False}) for family in BASES),
    Case("llama", "dynamic", _rope(DYNAMIC, max_position_embeddings=32)),
    Case("llama", "yarn-bias-kv1", _rope(YARN, num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    Case("deepseek_v3", "no-q-rank-yarn", _rope(YARN | MSCALE, q_lora_rank=None)),
    Case("mistral", "odd", ODD),
)
