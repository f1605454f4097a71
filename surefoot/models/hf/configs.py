"""`config.json` <-> the tables of a `ModelSpec`, a pair of pure functions a family.

Read off the modelling code of `transformers` 5.24: a key is honoured here exactly when it is honoured there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.core.errors import ModelError
from surefoot.models.hf.fields import ACTIVATIONS, Fields
from surefoot.models.hf.rope import read_rope, rope_table, write_rope
from surefoot.models.spec import AttentionSpec, ConvSpec, FeedForwardSpec, MLASpec, ModelSpec, MoESpec, RopeSpec

Table = dict[str, Any]
LAYER_TYPES: Table = {"full_attention": "attention", "sliding_attention": "sliding"}
LFM2_TYPES: Table = {"full_attention": "attention", "conv": "conv"}
DEFAULTS: Table = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "sliding_window": None, "use_sliding_window": False, "layer_types": None,
    "max_window_layers": 28, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "first_k_dense_replace": 3, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "q_lora_rank": None, "rope_interleave": True,
}  # fmt: skip
GEMMA2_DEFAULTS: Table = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3_DEFAULTS: Table = {**GEMMA2_DEFAULTS, "final_logit_softcapping": None, "sliding_window_pattern": 6}
LFM2_DEFAULTS: Table = {
    "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
}  # fmt: skip


def refuse_unsupported(f: Fields) -> None:
    """Raise `ModelError` for options that change the function and that Surefoot does not have."""
    f.refuse("quantization_config", (None,), "weights are quantised; use the bfloat16 release of the model")
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
        f.refuse(key, (0.0, None), "Surefoot has no dropout")
    f.refuse("use_bidirectional_attention", (False, None), "attention is causal")
    if f.values.get("model_type") != "phi3":
        f.refuse("partial_rotary_factor", (1.0, None), "this family rotates whole heads")
        params = f.values.get("rope_parameters") or {}
        if params.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                "this family rotates whole heads", where=f"{f.where}: rope_parameters.partial_rotary_factor", remedy="remove it"
            )


def _common(f: Fields, *, eps: str = "rms_norm_eps") -> Table:
    return {
        "vocab_size": f.integer("vocab_size"),
        "dim": f.integer("hidden_size"),
        "layers": f.integer("num_hidden_layers"),
        "max_positions": f.integer("max_position_embeddings"),
        "norm": {"eps": f.number(eps)},
        "tied_embeddings": f.flag("tie_word_embeddings"),
    }


def _common_config(spec: ModelSpec) -> Table:
    # Null token ids stand for "none": a key left out would become the family's own default, and generation would stop there.
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "num_hidden_layers": spec.layers,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm.eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.init.std,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _attention(f: Fields) -> Table:
    heads = f.integer("num_attention_heads")
    head_dim, kv_heads = f.optional_integer("head_dim"), f.optional_integer("num_key_value_heads")
    return {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim or f.integer("hidden_size") // heads}


def _attention_config(spec: ModelSpec) -> Table:
    a = _attn(spec)
    return {"num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, "head_dim": a.head_dim, "attention_dropout": 0.0}


def _attn(spec: ModelSpec) -> AttentionSpec:
    """Return the attention table; a placeholder where the spec has none, whose loss the comparison then reports."""
    return spec.attention or AttentionSpec(heads=1, kv_heads=1, head_dim=2)


def _dense(spec: ModelSpec) -> FeedForwardSpec:
    return spec.ffn or FeedForwardSpec(hidden=1)


def _experts(spec: ModelSpec) -> MoESpec:
    return spec.moe or MoESpec(experts=2, top_k=1, hidden=1, router="sigmoid", shared_hidden=1)


def _ffn(f: Fields, *, key: str = "hidden_act") -> Table:
    return {"hidden": f.integer("intermediate_size"), "activation": f.activation(key)}


def _ffn_config(spec: ModelSpec, *, key: str = "hidden_act") -> Table:
    ffn = _dense(spec)
    return {"intermediate_size": ffn.hidden, key: _activation(ffn.activation)}


def _activation(ours: str) -> str:
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def _window(spec: ModelSpec) -> int | None:
    """Return the window when every layer is sliding, None otherwise (the comparison then finds the mixture)."""
    return _attn(spec).window if all(spec.mixer(layer) == "sliding" for layer in range(spec.layers)) else None


def _layer_types(spec: ModelSpec, kinds: Table = LAYER_TYPES) -> list[str]:
    """Return a name a layer; a mixer that the family does not have becomes full attention, and the comparison reports it."""
    back = {ours: theirs for theirs, ours in kinds.items()}
    return [back.get(spec.mixer(layer), "full_attention") for layer in range(spec.layers)]


def read_llama(f: Fields) -> Table:
    bias = f.flag("attention_bias")
    return _common(f) | {
        "attention": _attention(f) | {"qkv_bias": bias, "out_bias": bias},
        "ffn": _ffn(f) | {"bias": f.flag("mlp_bias")},
        "rope": read_rope(f, 1e4),
    }


def write_llama(spec: ModelSpec) -> Table:
    bias = {"attention_bias": _attn(spec).qkv_bias, "mlp_bias": _dense(spec).bias}
    return _common_config(spec) | _attention_config(spec) | _ffn_config(spec) | bias | {"rope_parameters": write_rope(spec.rope)}


def _windowed(f: Fields) -> Table:
    window = f.optional_integer("sliding_window")
    return {
        "attention": _attention(f) | {"window": window},
        "pattern": ["attention" if window is None else "sliding"],
        "rope": read_rope(f, 1e4),
    }


def read_mistral(f: Fields) -> Table:
    f.refuse("layer_types", (None,), "transformers ignores it for this family")
    return _common(f) | _windowed(f) | {"ffn": _ffn(f)}


def write_mistral(spec: ModelSpec) -> Table:
    rest = {"sliding_window": _window(spec), "rope_parameters": write_rope(spec.rope)}
    return _common_config(spec) | _attention_config(spec) | _ffn_config(spec) | rest


def _qwen_layers(f: Fields) -> tuple[int | None, list[str]]:
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window") else None
    kinds = f.layer_kinds("layer_types", LAYER_TYPES)
    if kinds is None:
        first, layers = f.integer("max_window_layers"), f.integer("num_hidden_layers")
        kinds = ["sliding" if window is not None and layer >= first else "attention" for layer in range(layers)]
    return window, kinds


def _qwen_config(spec: ModelSpec) -> Table:
    window = _attn(spec).window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": spec.layers,
        "layer_types": _layer_types(spec),
        "rope_parameters": write_rope(spec.rope),
    }


def read_qwen2(f: Fields) -> Table:
    window, kinds = _qwen_layers(f)
    attention = _attention(f) | {"qkv_bias": True, "window": window}
    return _common(f) | {"attention": attention, "pattern": kinds, "ffn": _ffn(f), "rope": read_rope(f, 1e4)}


def write_qwen2(spec: ModelSpec) -> Table:
    return _common_config(spec) | _attention_config(spec) | _ffn_config(spec) | _qwen_config(spec)


def read_qwen3(f: Fields) -> Table:
    window, kinds = _qwen_layers(f)
    bias = f.flag("attention_bias")
    attention = _attention(f) | {"qkv_bias": bias, "out_bias": bias, "window": window, "qk_norm": "head"}
    return _common(f) | {"attention": attention, "pattern": kinds, "ffn": _ffn(f), "rope": read_rope(f, 1e4)}


def write_qwen3(spec: ModelSpec) -> Table:
    return write_qwen2(spec) | {"attention_bias": _attn(spec).qkv_bias}


def read_olmo2(f: Fields) -> Table:
    table = read_llama(f)
    table["ffn"]["bias"] = False
    table["attention"]["qk_norm"] = "full"
    table["norm"]["placement"] = "post"
    return table


def write_olmo2(spec: ModelSpec) -> Table:
    bias = {"attention_bias": _attn(spec).qkv_bias}
    return _common_config(spec) | _attention_config(spec) | _ffn_config(spec) | bias | {"rope_parameters": write_rope(spec.rope)}


def read_phi3(f: Fields) -> Table:
    table = _common(f) | _windowed(f) | {"ffn": _ffn(f)}
    if table["rope"]["scaling"] != "none":
        raise ModelError("phi3 knows no rope scaling but longrope", where=f"{f.where}: rope_parameters", remedy="use rope type 'default'")
    fraction = (f.values.get("rope_parameters") or {}).get("partial_rotary_factor", f.values.get("partial_rotary_factor"))
    table["attention"]["rotary_fraction"] = 1.0 if fraction is None else fraction
    return table


def write_phi3(spec: ModelSpec) -> Table:
    rope = write_rope(RopeSpec(theta=spec.rope.theta)) | {"partial_rotary_factor": _attn(spec).rotary_fraction}
    return write_mistral(spec) | {"rope_parameters": rope, "original_max_position_embeddings": spec.max_positions}


def _gemma(f: Fields) -> Table:
    bias, dim = f.flag("attention_bias"), f.integer("hidden_size")
    scale = f.number("query_pre_attn_scalar") ** -0.5
    table = _common(f)
    table["norm"] |= {"placement": "sandwich", "offset": True}
    attention = {"qkv_bias": bias, "out_bias": bias, "window": f.optional_integer("sliding_window"), "scale": scale}
    return table | {
        "attention": _attention(f) | attention,
        "ffn": _ffn(f, key="hidden_activation"),
        "embedding_scale": dim**0.5,
        "logit_softcap": f.optional_number("final_logit_softcapping"),
    }


def _gemma_config(spec: ModelSpec) -> Table:
    a = _attn(spec)
    return _common_config(spec) | _attention_config(spec) | _ffn_config(spec, key="hidden_activation") | {
        "attention_bias": a.qkv_bias,
        "query_pre_attn_scalar": a.head_dim if a.scale is None else round(a.scale**-2),
        "sliding_window": a.window,
        "layer_types": _layer_types(spec),
        "final_logit_softcapping": spec.logit_softcap,
    }  # fmt: skip


def _every(layers: int, period: int) -> list[str]:
    """Sliding layers, with a full one each `period`."""
    return ["sliding" if (layer + 1) % period else "attention" for layer in range(layers)]


def read_gemma2(f: Fields) -> Table:
    table = _gemma(f)
    table["attention"]["softcap"] = f.optional_number("attn_logit_softcapping")
    return table | {"pattern": f.layer_kinds("layer_types", LAYER_TYPES) or _every(table["layers"], 2), "rope": read_rope(f, 1e4)}


def write_gemma2(spec: ModelSpec) -> Table:
    softcap = _attn(spec).softcap
    return _gemma_config(spec) | {"attn_logit_softcapping": softcap, "rope_parameters": write_rope(spec.rope)}


def read_gemma3(f: Fields) -> Table:
    # transformers stores this one and never passes it to the attention, so a value there would mean two different models.
    f.refuse("attn_logit_softcapping", (None,), "transformers ignores it for this family")
    table = _gemma(f)
    table["attention"]["qk_norm"] = "head"
    pattern = f.layer_kinds("layer_types", LAYER_TYPES) or _every(table["layers"], f.integer("sliding_window_pattern"))
    return table | {"pattern": pattern, "rope": _gemma3_rope(f, "full_attention", "rope_theta", 1e6)} | {
        "rope_sliding": _gemma3_rope(f, "sliding_attention", "rope_local_base_freq", 1e4)
    }  # fmt: skip


def _gemma3_rope(f: Fields, layer_type: str, older: str, theta: float) -> Table:
    params = dict((f.values.get("rope_parameters") or {}).get(layer_type) or {})
    if layer_type == "full_attention":
        params |= f.values.get("rope_scaling") or {}
    params.pop("truncate", None)  # transformers looks for it one level up, where it never is: always True
    base = f.values.get(older)
    return rope_table(f, f"rope_parameters.{layer_type}", params, theta if base is None else float(base))


def write_gemma3(spec: ModelSpec) -> Table:
    ropes = {"full_attention": write_rope(spec.rope), "sliding_attention": write_rope(spec.rope_sliding or spec.rope)}
    return _gemma_config(spec) | {"rope_parameters": ropes, "attn_logit_softcapping": None}


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
    return _common(f) | {
        "attention": _attention(f) | {"qkv_bias": bias, "out_bias": bias, "window": window, "qk_norm": "head"},
        "pattern": ["attention" if window is None else "sliding"],
        "ffn": _ffn(f),
        "moe": moe | _moe_aux(f),
        "ffn_pattern": _qwen3_moe_layers(f),
        "rope": read_rope(f, 1e4),
    }


def _dense_layers(spec: ModelSpec) -> list[int]:
    return [layer for layer in range(spec.layers) if spec.feed_forward(layer) == "dense"]


def _moe_ffn_config(spec: ModelSpec, moe: MoESpec) -> Table:
    dense = spec.ffn if _dense_layers(spec) else None
    return {"intermediate_size": dense.hidden if dense else moe.hidden, "hidden_act": _activation(moe.activation)}


def write_qwen3_moe(spec: ModelSpec) -> Table:
    moe = _experts(spec)
    window = _window(spec)
    return _common_config(spec) | _attention_config(spec) | _moe_config(moe) | _moe_ffn_config(spec, moe) | {
        "attention_bias": _attn(spec).qkv_bias,
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
    return _common(f) | _windowed(f) | {"moe": moe, "ffn_pattern": ["moe"], "rope": read_rope(f, 1e6)}


def write_mixtral(spec: ModelSpec) -> Table:
    moe = _experts(spec)
    return _common_config(spec) | _attention_config(spec) | _moe_config(moe) | {
        "intermediate_size": moe.hidden,
        "hidden_act": _activation(moe.activation),
        "num_local_experts": moe.experts,
        "sliding_window": _window(spec),
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
    return _common(f) | {"pattern": ["mla"], "mla": mla, "moe": moe, "ffn": _ffn(f), "ffn_pattern": kinds, "rope": rope}


def write_deepseek_v3(spec: ModelSpec) -> Table:
    mla = spec.mla or MLASpec(heads=1, kv_rank=1, nope_dim=1, rope_dim=2, value_dim=1)
    moe = _experts(spec)
    return _common_config(spec) | _moe_ffn_config(spec, moe) | {
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
    table = _common(f, eps="norm_eps")
    if "tie_embedding" in f.values:
        table["tied_embeddings"] = f.flag("tie_embedding")
    return table | {
        "attention": _attention(f) | {"qk_norm": "head"},
        "conv": {"width": f.integer("conv_L_cache"), "bias": f.flag("conv_bias")},
        "pattern": _lfm2_kinds(f, table["layers"]),
        "ffn": {"hidden": _lfm2_hidden(f)},
        "rope": read_rope(f, 1e6),
    }


def write_lfm2(spec: ModelSpec) -> Table:
    conv = spec.conv or ConvSpec()
    table = _common_config(spec)
    eps = table.pop("rms_norm_eps")
    return table | _attention_config(spec) | {
        "norm_eps": eps,
        "intermediate_size": _dense(spec).hidden,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": conv.bias,
        "conv_L_cache": conv.width,
        "layer_types": _layer_types(spec, LFM2_TYPES),
        "rope_parameters": write_rope(spec.rope),
    }  # fmt: skip
