"""`config.json` <-> the tables of a `ModelSpec`, a pair of pure functions a family.

Read off the modelling code of `transformers` 5.24: a key is honoured here exactly when it is honoured there.
"""

from __future__ import annotations

from typing import Any

from surefoot.core.errors import ModelError
from surefoot.models.hf.fields import ACTIVATIONS, Fields
from surefoot.models.hf.rope import read_rope, rope_table, write_rope
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec

Table = dict[str, Any]
LAYER_TYPES: Table = {"full_attention": "attention", "sliding_attention": "sliding"}
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


def common(f: Fields, *, eps: str = "rms_norm_eps") -> Table:
    return {
        "vocab_size": f.integer("vocab_size"),
        "dim": f.integer("hidden_size"),
        "layers": f.integer("num_hidden_layers"),
        "max_positions": f.integer("max_position_embeddings"),
        "norm": {"eps": f.number(eps)},
        "tied_embeddings": f.flag("tie_word_embeddings"),
    }


def common_config(spec: ModelSpec) -> Table:
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


def attention_table(f: Fields) -> Table:
    heads = f.integer("num_attention_heads")
    head_dim, kv_heads = f.optional_integer("head_dim"), f.optional_integer("num_key_value_heads")
    return {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim or f.integer("hidden_size") // heads}


def attention_config(spec: ModelSpec) -> Table:
    a = attention_of(spec)
    return {"num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, "head_dim": a.head_dim, "attention_dropout": 0.0}


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """Return the attention table; a placeholder where the spec has none, whose loss the comparison then reports."""
    return spec.attention or AttentionSpec(heads=1, kv_heads=1, head_dim=2)


def ffn_of(spec: ModelSpec) -> FeedForwardSpec:
    return spec.ffn or FeedForwardSpec(hidden=1)


def ffn_table(f: Fields, *, key: str = "hidden_act") -> Table:
    return {"hidden": f.integer("intermediate_size"), "activation": f.activation(key)}


def ffn_config(spec: ModelSpec, *, key: str = "hidden_act") -> Table:
    ffn = ffn_of(spec)
    return {"intermediate_size": ffn.hidden, key: activation_name(ffn.activation)}


def activation_name(ours: str) -> str:
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def common_window(spec: ModelSpec) -> int | None:
    """Return the window when every layer is sliding, None otherwise (the comparison then finds the mixture)."""
    return attention_of(spec).window if all(spec.mixer(layer) == "sliding" for layer in range(spec.layers)) else None


def layer_types(spec: ModelSpec, kinds: Table = LAYER_TYPES) -> list[str]:
    """Return a name a layer; a mixer that the family does not have becomes full attention, and the comparison reports it."""
    back = {ours: theirs for theirs, ours in kinds.items()}
    return [back.get(spec.mixer(layer), "full_attention") for layer in range(spec.layers)]


def read_llama(f: Fields) -> Table:
    bias = f.flag("attention_bias")
    return common(f) | {
        "attention": attention_table(f) | {"qkv_bias": bias, "out_bias": bias},
        "ffn": ffn_table(f) | {"bias": f.flag("mlp_bias")},
        "rope": read_rope(f, 1e4),
    }


def write_llama(spec: ModelSpec) -> Table:
    bias = {"attention_bias": attention_of(spec).qkv_bias, "mlp_bias": ffn_of(spec).bias}
    return common_config(spec) | attention_config(spec) | ffn_config(spec) | bias | {"rope_parameters": write_rope(spec.rope)}


def windowed(f: Fields) -> Table:
    window = f.optional_integer("sliding_window")
    return {
        "attention": attention_table(f) | {"window": window},
        "pattern": ["attention" if window is None else "sliding"],
        "rope": read_rope(f, 1e4),
    }


def read_mistral(f: Fields) -> Table:
    f.refuse("layer_types", (None,), "transformers ignores it for this family")
    return common(f) | windowed(f) | {"ffn": ffn_table(f)}


def write_mistral(spec: ModelSpec) -> Table:
    rest = {"sliding_window": common_window(spec), "rope_parameters": write_rope(spec.rope)}
    return common_config(spec) | attention_config(spec) | ffn_config(spec) | rest


def _qwen_layers(f: Fields) -> tuple[int | None, list[str]]:
    window = f.optional_integer("sliding_window") if f.flag("use_sliding_window") else None
    kinds = f.layer_kinds("layer_types", LAYER_TYPES)
    if kinds is None:
        first, layers = f.integer("max_window_layers"), f.integer("num_hidden_layers")
        kinds = ["sliding" if window is not None and layer >= first else "attention" for layer in range(layers)]
    return window, kinds


def _qwen_config(spec: ModelSpec) -> Table:
    window = attention_of(spec).window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": spec.layers,
        "layer_types": layer_types(spec),
        "rope_parameters": write_rope(spec.rope),
    }


def read_qwen2(f: Fields) -> Table:
    window, kinds = _qwen_layers(f)
    attention = attention_table(f) | {"qkv_bias": True, "window": window}
    return common(f) | {"attention": attention, "pattern": kinds, "ffn": ffn_table(f), "rope": read_rope(f, 1e4)}


def write_qwen2(spec: ModelSpec) -> Table:
    return common_config(spec) | attention_config(spec) | ffn_config(spec) | _qwen_config(spec)


def read_qwen3(f: Fields) -> Table:
    window, kinds = _qwen_layers(f)
    bias = f.flag("attention_bias")
    attention = attention_table(f) | {"qkv_bias": bias, "out_bias": bias, "window": window, "qk_norm": "head"}
    return common(f) | {"attention": attention, "pattern": kinds, "ffn": ffn_table(f), "rope": read_rope(f, 1e4)}


def write_qwen3(spec: ModelSpec) -> Table:
    return write_qwen2(spec) | {"attention_bias": attention_of(spec).qkv_bias}


def read_olmo2(f: Fields) -> Table:
    table = read_llama(f)
    table["ffn"]["bias"] = False
    table["attention"]["qk_norm"] = "full"
    table["norm"]["placement"] = "post"
    return table


def write_olmo2(spec: ModelSpec) -> Table:
    bias = {"attention_bias": attention_of(spec).qkv_bias}
    return common_config(spec) | attention_config(spec) | ffn_config(spec) | bias | {"rope_parameters": write_rope(spec.rope)}


def read_phi3(f: Fields) -> Table:
    table = common(f) | windowed(f) | {"ffn": ffn_table(f)}
    if table["rope"]["scaling"] != "none":
        raise ModelError("phi3 knows no rope scaling but longrope", where=f"{f.where}: rope_parameters", remedy="use rope type 'default'")
    fraction = (f.values.get("rope_parameters") or {}).get("partial_rotary_factor", f.values.get("partial_rotary_factor"))
    table["attention"]["rotary_fraction"] = 1.0 if fraction is None else fraction
    return table


def write_phi3(spec: ModelSpec) -> Table:
    rope = write_rope(RopeSpec(theta=spec.rope.theta)) | {"partial_rotary_factor": attention_of(spec).rotary_fraction}
    return write_mistral(spec) | {"rope_parameters": rope, "original_max_position_embeddings": spec.max_positions}


def _gemma(f: Fields) -> Table:
    bias, dim = f.flag("attention_bias"), f.integer("hidden_size")
    scale = f.number("query_pre_attn_scalar") ** -0.5
    table = common(f)
    table["norm"] |= {"placement": "sandwich", "offset": True}
    attention = {"qkv_bias": bias, "out_bias": bias, "window": f.optional_integer("sliding_window"), "scale": scale}
    return table | {
        "attention": attention_table(f) | attention,
        "ffn": ffn_table(f, key="hidden_activation"),
        "embedding_scale": dim**0.5,
        "logit_softcap": f.optional_number("final_logit_softcapping"),
    }


def _gemma_config(spec: ModelSpec) -> Table:
    a = attention_of(spec)
    return common_config(spec) | attention_config(spec) | ffn_config(spec, key="hidden_activation") | {
        "attention_bias": a.qkv_bias,
        "query_pre_attn_scalar": a.head_dim if a.scale is None else round(a.scale**-2),
        "sliding_window": a.window,
        "layer_types": layer_types(spec),
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
    softcap = attention_of(spec).softcap
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
