"""Configs in old and new spellings, and which family a spec is written as."""

from __future__ import annotations

from typing import Any

import pytest
from grid import COMMON, GRID, LINEAR, YARN, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from surefoot.core.errors import ModelError
from surefoot.models import ModelSpec
from surefoot.models.hf import FAMILIES, family_for
from surefoot.models.hf.meaning import differences, meaning
from surefoot.models.spec import AttentionSpec, ConvSpec, FeedForwardSpec, InitSpec, MLASpec, MoESpec, NormSpec, RopeSpec

DENSE = ModelSpec(vocab_size=50, dim=24, layers=3, attention=AttentionSpec(heads=4, kv_heads=2, head_dim=6), ffn=FeedForwardSpec(hidden=32))
LATENT = MLASpec(heads=2, kv_rank=4, nope_dim=4, rope_dim=4, value_dim=4)
OLD: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling": ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama3 without the original length": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "no rope at all": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen window unused": ("qwen3", {"sliding_window": 7}),
    "gemma2 alternates": ("gemma2", {"num_hidden_layers": 5}),
    "gemma3 pattern": ("gemma3_text", {"num_hidden_layers": 7, "rope_theta": 2e6, "rope_local_base_freq": 2e4}),
    "gemma3 scaled": ("gemma3_text", {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "lfm2 widths": ("lfm2", {"block_ff_dim": 100, "full_attn_idxs": [1], "block_multiple_of": 16}),
    "deepseek": ("deepseek_v3", {"rope_theta": 3e4, "rope_scaling": YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.5, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_older_spellings_mean_what_transformers_takes_them_for(name: str) -> None:
    """The spec of the old config equals the spec of what `AutoConfig` writes after reading it."""
    family, extra = OLD[name]
    config = COMMON | Case(family, name).full() | {"model_type": family}
    config.pop("layer_types", None)
    if "rope_scaling" in extra or "rope_theta" in extra or family == "phi3":
        config.pop("rope_parameters", None)
    config |= extra
    modern = AutoConfig.for_model(**config).to_dict()
    assert FAMILIES[family].spec(config) == FAMILIES[family].spec(modern)


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.id)
def test_config_round_trip(case: Case) -> None:
    """spec -> config -> spec is the identity, and some family (its own, or an equal one) is found for it."""
    family = FAMILIES[case.family]
    spec = family.spec(case.full() | {"model_type": case.family})
    assert family.spec(family.config(spec)) == spec
    assert differences(spec, family_for(spec).spec(family_for(spec).config(spec))) == []


EXPRESSED: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "llama"),
    "heads that do not divide dim": ({"dim": 22}, "mistral"),
    "windows": ({"pattern": ("sliding",), "attention": DENSE.attention.model_copy(update={"window": 8})}, "mistral"),
    "qkv bias": ({"attention": DENSE.attention.model_copy(update={"qkv_bias": True})}, "qwen2"),
    "head norm": ({"attention": DENSE.attention.model_copy(update={"qk_norm": "head"})}, "qwen3"),
    "partial rotary": ({"attention": DENSE.attention.model_copy(update={"rotary_fraction": 1 / 3})}, "phi3"),
    "full norm after": ({"attention": DENSE.attention.model_copy(update={"qk_norm": "full"}), "norm": NormSpec(placement="post")}, "olmo2"),
    "experts": ({"ffn": None, "ffn_pattern": ("moe",), "moe": MoESpec(experts=4, top_k=1, hidden=8)}, "mixtral"),
    "latent, all dense": ({"pattern": ("mla",), "mla": LATENT}, "deepseek_v3"),
    "convolutions": (
        {"pattern": ("conv", "attention"), "conv": ConvSpec(), "attention": DENSE.attention.model_copy(update={"qk_norm": "head"})},
        "lfm2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSED)
def test_family_for(name: str) -> None:
    update, family = EXPRESSED[name]
    assert family_for(DENSE.model_copy(update=update)).model_type == family


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "capped plain": ({"logit_softcap": 9.0}, "llama", "logit_softcap"),
    "offset": ({"norm": NormSpec(offset=True)}, "llama", r"norm\.offset"),
    "mup": ({"init": InitSpec(scheme="mup", base_dim=8)}, "llama", r"init\.scheme"),
    "dynamic length": ({"rope": RopeSpec(scaling="dynamic", factor=2.0, original_positions=99)}, "llama", r"rope\.original_positions"),
    "no family's mixture": ({"pattern": ("conv", "mla"), "conv": ConvSpec(), "mla": LATENT}, "deepseek_v3", "pattern, conv"),
    "experts without a shared one": (
        {"pattern": ("mla",), "mla": LATENT, "ffn": None, "ffn_pattern": ("moe",),
         "moe": MoESpec(experts=4, top_k=2, hidden=8, router="sigmoid", balance="bias")}, "deepseek_v3", r"moe\.shared_hidden",
    ),
    "softmax bias": (
        {"ffn": None, "ffn_pattern": ("moe",), "moe": MoESpec(experts=4, top_k=2, hidden=8, balance="bias")}, "mixtral",
        r"moe\.selection_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_family_expresses_is_refused_with_the_nearest(name: str) -> None:
    update, family, feature = REFUSED[name]
    with pytest.raises(ModelError, match=f"no family of transformers .*{family}.*{feature}"):
        family_for(DENSE.model_copy(update=update))


@settings(max_examples=60, deadline=None)
@given(
    pattern=st.lists(st.sampled_from(["attention", "sliding"]), min_size=1, max_size=5),
    layers=st.integers(1, 9),
    window=st.integers(1, 9),
    linear=st.booleans(),
)
def test_meaning_keeps_every_layer_and_is_idempotent(pattern: list[Any], layers: int, window: int, linear: bool) -> None:
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=4, window=window, scale=0.5)
    rope = RopeSpec(scaling="linear" if linear else "none", factor=LINEAR["factor"], beta_fast=7.0)
    spec = DENSE.model_copy(update={"pattern": tuple(pattern), "layers": layers, "attention": attention, "rope": rope})
    plain = meaning(spec)
    assert [plain.mixer(i) for i in range(layers)] == [spec.mixer(i) for i in range(layers)]
    assert meaning(plain) == plain and differences(plain, spec) == [] and len(plain.pattern) <= layers
    assert plain.rope.beta_fast == RopeSpec().beta_fast and plain.attention is not None and plain.attention.scale is None
