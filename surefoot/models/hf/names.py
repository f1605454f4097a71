"""What each family calls our tensors.

A table maps the end of a canonical name (behind `layers.{i}.`) to theirs (behind `model.layers.{i}.`); a tuple says that ours is
the concatenation of theirs along the rows, `{e}` that ours stacks the experts. A key without `.weight` or `.bias` stands for
both, whichever exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.models.spec import ModelSpec

Table = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Names:
    """`layer`: names inside one layer; `top`: names outside, whole; `squeezed`: canonical ends that theirs has with a middle 1."""

    layer: Table
    top: Table
    squeezed: tuple[str, ...] = field(default=())


_TOP: Table = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
_ATTENTION: Table = {
    "mixer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.out": "self_attn.o_proj",
    "mixer.q_norm": "self_attn.q_norm",
    "mixer.k_norm": "self_attn.k_norm",
}
_FFN: Table = {"ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn.down": "mlp.down_proj"}
_PRE_NORM: Table = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_EXPERTS: Table = {
    "ffn.router": "mlp.gate",
    "ffn.experts.gate_up": ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    "ffn.experts.down": "mlp.experts.{e}.down_proj.weight",
}


def llama(spec: ModelSpec, layer: int) -> Names:
    return Names(_PRE_NORM | _ATTENTION | _FFN, _TOP)


def olmo2(spec: ModelSpec, layer: int) -> Names:
    post: Table = {"mixer_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
    return Names(post | _ATTENTION | _FFN, _TOP)


def phi3(spec: ModelSpec, layer: int) -> Names:
    fused: Table = {
        "mixer.qkv": "self_attn.qkv_proj",
        "mixer.out": "self_attn.o_proj",
        "ffn.gate_up": "mlp.gate_up_proj",
        "ffn.down": "mlp.down_proj",
    }
    return Names(_PRE_NORM | fused, _TOP)


def gemma(spec: ModelSpec, layer: int) -> Names:
    sandwich: Table = {
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
    return Names(sandwich | _ATTENTION | _FFN, _TOP)


def qwen3_moe(spec: ModelSpec, layer: int) -> Names:
    return Names(_PRE_NORM | _ATTENTION | _FFN | _EXPERTS, _TOP)


def mixtral(spec: ModelSpec, layer: int) -> Names:
    experts: Table = {
        "ffn.router": "block_sparse_moe.gate",
        "ffn.experts.gate_up": ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        "ffn.experts.down": "block_sparse_moe.experts.{e}.w2.weight",
    }
    return Names(_PRE_NORM | _ATTENTION | experts, _TOP)


def deepseek_v3(spec: ModelSpec, layer: int) -> Names:
    compressed = spec.mla is not None and spec.mla.q_rank is not None
    latent: Table = {
        "mixer.q_down": "self_attn.q_a_proj",
        "mixer.q_norm": "self_attn.q_a_layernorm",
        "mixer.q_up": "self_attn.q_b_proj" if compressed else "self_attn.q_proj",
        "mixer.kv_down": "self_attn.kv_a_proj_with_mqa",
        "mixer.kv_norm": "self_attn.kv_a_layernorm",
        "mixer.kv_up": "self_attn.kv_b_proj",
        "mixer.out": "self_attn.o_proj",
    }
    shared: Table = {
        "ffn.router_bias": "mlp.gate.e_score_correction_bias",
        "ffn.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "ffn.shared.down": "mlp.shared_experts.down_proj",
    }
    return Names(_PRE_NORM | latent | _FFN | _EXPERTS | shared, _TOP)


def lfm2(spec: ModelSpec, layer: int) -> Names:
    table: Table = {
        "mixer_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "mixer.qkv": _ATTENTION["mixer.qkv"],
        "mixer.out": "conv.out_proj" if spec.mixer(layer) == "conv" else "self_attn.out_proj",
        "mixer.q_norm": "self_attn.q_layernorm",
        "mixer.k_norm": "self_attn.k_layernorm",
        "mixer.in_proj": "conv.in_proj",
        "mixer.kernel": "conv.conv.weight",
        "mixer.kernel_bias": "conv.conv.bias",
        "ffn.gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "ffn.down": "feed_forward.w2",
    }
    return Names(table, _TOP | {"norm.weight": "model.embedding_norm.weight"}, squeezed=("mixer.kernel",))
