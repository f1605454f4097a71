"""`config.json` <-> the tables of a `ModelSpec` for families with experts, latent attention or convolutions (see `configs.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.core.errors import ModelError
from surefoot.models.hf.configs import (
    activation_name,
    attention_config,
    attention_of,
    attention_table,
    common,
    common_config,
    common_window,
    ffn_of,
    ffn_table,
    layer_types,
    windowed,
)
from surefoot.models.hf.fields import Fields
from surefoot.models.hf.rope import read_rope, write_rope
from surefoot.models.spec import ConvSpec, MLASpec, ModelSpec, MoESpec

Table = dict[str, Any]
LFM2_TYPES: Table = {"full_attention": "attention", "conv": "conv"}
LFM2_DEFAULTS: Table = {
    "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
}  # fmt: skip


def _experts(spec: ModelSpec) -> MoESpec:
    return spec.moe or MoESpec(experts=2, top_k=1, hidden=1, router="sigmoid", shared_hidden=1)


def _moe_aux(f: Fields) -> Table:
    return {"balance": "aux_loss" if f.flag("output_router_logits") else "none", "aux_coefficient": f.number("router_aux_loss_coef")}


def _moe_config(moe: MoESpec) -> Table:
    return {"num_experts_per_tok": moe.top_k, "output_router_logits": False, "router_aux_loss_coef": moe.aux_coefficient}


def _qwen3_moe_layers(f: Fields) -> list[str]:
    dense, step = f.get("mlp_only_layers") or [], f.integer("decoder_sparse_step")
    layers = range(f.integer("num_hidden_layers"))
    return ["moe" if layer not in dense and (layer + 1) % step == 0 else "dense" for layer in layers]


def read_qwen3_moe(f: Fields) -> Table:
    bias = f.flag("attention_bias")
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window") else None
    experts = f.integer("num_experts" if "num_experts" in f.values else "num_local_experts")
    moe = {
        "experts": experts,
        "top_k": f.integer("num_experts_per_tok"),
        "hidden": f.integer("moe_intermediate_size"),
        "normalise": f.flag("norm_topk_prob"),
        "activation": f.activation("hidden_act"),
    }
    return common(f) | {
        "attention": attention_table(f) | {"qkv_bias": bias, "out_bias": bias, "window": window, "qk_norm": "head"},
        "pattern": ["attention" if window is None else "sliding"],
        "ffn": ffn_table(f),
        "moe": moe | _moe_aux(f),
        "ffn_pattern": _qwen3_moe_layers(f),
        "rope": read_rope(f, 1e4),
    }


def _dense_layers(spec: ModelSpec) -> list[int]:
    return [layer for layer in range(spec.layers) if spec.feed_forward(layer) == "dense"]


def _moe_ffn_config(spec: ModelSpec, moe: MoESpec) -> Table:
    dense = spec.ffn if _dense_layers(spec) else None
    return {"intermediate_size": dense.hidden if dense else moe.hidden, "hidden_act": activation_name(moe.activation)}


def write_qwen3_moe(spec: ModelSpec) -> Table:
    moe = _experts(spec)
    window = common_window(spec)
    return common_config(spec) | attention_config(spec) | _moe_config(moe) | _moe_ffn_config(spec, moe) | {
        "attention_bias": attention_of(spec).qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.hidden,
        "norm_topk_prob": moe.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": _dense_layers(spec),
        "rope_parameters": write_rope(spec.rope),
    }  # fmt: skip


def read_mixtral(f: Fields) -> Table:
    experts = f.integer("num_local_experts" if "num_local_experts" in f.values else "num_experts")
    moe: Table = {"experts": experts, "top_k": f.integer("num_experts_per_tok"), "hidden": f.integer("intermediate_size")}
    moe = moe | {"activation": f.activation("hidden_act")} | _moe_aux(f)
    return common(f) | windowed(f) | {"moe": moe, "ffn_pattern": ["moe"], "rope": read_rope(f, 1e6)}


def write_mixtral(spec: ModelSpec) -> Table:
    moe = _experts(spec)
    return common_config(spec) | attention_config(spec) | _moe_config(moe) | {
        "intermediate_size": moe.hidden,
        "hidden_act": activation_name(moe.activation),
        "num_local_experts": moe.experts,
        "sliding_window": common_window(spec),
        "router_jitter_noise": 0.0,
        "rope_parameters": write_rope(spec.rope),
    }  # fmt: skip


def read_deepseek_v3(f: Fields) -> Table:
    heads = f.integer("num_attention_heads")
    f.refuse("num_key_value_heads", (heads, None), "latent attention has one key and value a query head")
    f.refuse("scoring_func", ("sigmoid",), "this family's router is a sigmoid")
    f.refuse("moe_layer_freq", (1,), "every layer after the first dense ones has experts")
    if f.integer("n_shared_experts") < 1:
        raise ModelError("experts without a shared one", where=f"{f.where}: n_shared_experts", remedy="the family always has one")
    dense, layers, hidden = f.integer("first_k_dense_replace"), f.integer("num_hidden_layers"), f.integer("moe_intermediate_size")
    rope = read_rope(f, 1e4) | {"interleaved": f.flag("rope_interleave")}
    mla = {
        "heads": heads, "q_rank": f.optional_integer("q_lora_rank"), "kv_rank": f.integer("kv_lora_rank"),
        "nope_dim": f.integer("qk_nope_head_dim"), "rope_dim": f.integer("qk_rope_head_dim"), "value_dim": f.integer("v_head_dim"),
        "bias": f.flag("attention_bias"), "norm_eps": 1e-6,  # fixed in the modelling code, whatever rms_norm_eps says
    }  # fmt: skip
    moe = {
        "experts": f.integer("n_routed_experts"), "top_k": f.integer("num_experts_per_tok"), "hidden": hidden, "router": "sigmoid",
        "normalise": f.flag("norm_topk_prob"), "scale": f.number("routed_scaling_factor"), "groups": f.integer("n_group"),
        "top_groups": f.integer("topk_group"), "shared_hidden": hidden * f.integer("n_shared_experts"), "balance": "none",
        "selection_bias": True, "activation": f.activation("hidden_act"),
    }  # fmt: skip
    kinds = ["dense" if layer < dense else "moe" for layer in range(layers)]
    return common(f) | {"pattern": ["mla"], "mla": mla, "moe": moe, "ffn": ffn_table(f), "ffn_pattern": kinds, "rope": rope}


def write_deepseek_v3(spec: ModelSpec) -> Table:
    mla = spec.mla or MLASpec(heads=1, kv_rank=1, nope_dim=1, rope_dim=2, value_dim=1)
    moe = _experts(spec)
    return common_config(spec) | _moe_ffn_config(spec, moe) | {
        "num_attention_heads": mla.heads, "num_key_value_heads": mla.heads, "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim, "qk_rope_head_dim": mla.rope_dim, "v_head_dim": mla.value_dim, "attention_bias": mla.bias,
        "attention_dropout": 0.0, "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden, "norm_topk_prob": moe.normalise, "routed_scaling_factor": moe.scale,
        "n_group": moe.groups, "topk_group": moe.top_groups, "n_shared_experts": max(1, moe.shared_hidden // moe.hidden),
        "first_k_dense_replace": len(_dense_layers(spec)), "rope_interleave": spec.rope.interleaved,
        "num_nextn_predict_layers": 0, "rope_parameters": write_rope(spec.rope),
    }  # fmt: skip


def _lfm2_hidden(f: Fields) -> int:
    hidden = f.integer("block_ff_dim" if "block_ff_dim" in f.values else "intermediate_size")
    if not f.flag("block_auto_adjust_ff_dim"):
        return hidden
    hidden = int(2 * hidden / 3)
    multiplier, step = f.optional_number("block_ffn_dim_multiplier"), f.integer("block_multiple_of")
    return hidden if multiplier is None else step * ((int(multiplier * hidden) + step - 1) // step)


def _lfm2_kinds(f: Fields, layers: int) -> Sequence[str]:
    kinds = f.layer_kinds("layer_types", LFM2_TYPES)
    if kinds is not None:
        return kinds
    full = f.values.get("full_attn_idxs")
    return ["attention" if full is None or layer in full else "conv" for layer in range(layers)]


def read_lfm2(f: Fields) -> Table:
    table = common(f, eps="norm_eps")
    if "tie_embedding" in f.values:
        table["tied_embeddings"] = f.flag("tie_embedding")
    return table | {
        "attention": attention_table(f) | {"qk_norm": "head"},
        "conv": {"width": f.integer("conv_L_cache"), "bias": f.flag("conv_bias")},
        "pattern": _lfm2_kinds(f, table["layers"]),
        "ffn": {"hidden": _lfm2_hidden(f)},
        "rope": read_rope(f, 1e6),
    }


def write_lfm2(spec: ModelSpec) -> Table:
    conv = spec.conv or ConvSpec()
    table = common_config(spec)
    eps = table.pop("rms_norm_eps")
    return table | attention_config(spec) | {
        "norm_eps": eps,
        "intermediate_size": ffn_of(spec).hidden,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": conv.bias,
        "conv_L_cache": conv.width,
        "layer_types": layer_types(spec, LFM2_TYPES),
        "rope_parameters": write_rope(spec.rope),
    }  # fmt: skip
