"""When do two specs describe the same function? `meaning` brings a spec to one form; `differences` names what differs."""

from __future__ import annotations

from typing import Any

from surefoot.models.spec import AttentionSpec, FeedForward, Mixer, ModelSpec, RopeSpec

# What steers training and leaves the function from tokens to logits alone. `init` is in it except under muP (see below).
TRAINING_ONLY = ("init", "moe.balance", "moe.aux_coefficient", "moe.z_coefficient", "moe.bias_rate")
_ROPE_USES: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_positions"),
    "llama3": ("factor", "original_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_positions", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def meaning(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the same function with the shortest patterns and without values that nothing reads."""
    mixers = [spec.mixer(layer) for layer in range(spec.layers)]
    kinds = [spec.feed_forward(layer) for layer in range(spec.layers)]
    attends = {"attention", "sliding"} & set(mixers)
    update: dict[str, Any] = {
        "pattern": _shortest_mixers(mixers),
        "ffn_pattern": _shortest_ffn(kinds),
        "attention": _attention(spec.attention, "sliding" in mixers) if spec.attention is not None and attends else None,
        "mla": spec.mla if "mla" in mixers else None,
        "conv": spec.conv if "conv" in mixers else None,
        "ffn": spec.ffn if "dense" in kinds else None,
        "moe": None,
    }
    if spec.moe is not None and "moe" in kinds:
        groups = {} if spec.moe.groups > 1 else {"top_groups": 1}
        update["moe"] = spec.moe.model_copy(update={"selection_bias": spec.moe.has_bias, **groups})
    rope, sliding = spec.rope, spec.rope_sliding
    if "sliding" not in mixers:
        sliding = None
    elif "attention" not in mixers and "mla" not in mixers:
        rope, sliding = sliding or rope, None
    rope = _rope(rope, "mla" in mixers) if attends or "mla" in mixers else RopeSpec()
    sliding = None if sliding is None else _rope(sliding, False)
    update |= {"rope": rope, "rope_sliding": None if sliding == rope else sliding}
    return spec.model_copy(update=update)


def differences(first: ModelSpec, second: ModelSpec) -> list[str]:
    """Return the dotted names of the fields in which the two functions differ."""
    found = _compare(meaning(first).model_dump(), meaning(second).model_dump(), "")
    trained = [name for name in found if not name.startswith(TRAINING_ONLY)]
    multipliers = [spec.init.base_dim / spec.dim if spec.init.scheme == "mup" else 1.0 for spec in (first, second)]
    return trained + (["init.scheme"] if multipliers[0] != multipliers[1] else [])


def _compare(first: Any, second: Any, name: str) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        return [hit for key in first for hit in _compare(first[key], second[key], f"{name}.{key}" if name else key)]
    return [] if first == second else [name]


def _attention(attention: AttentionSpec, sliding: bool) -> AttentionSpec:
    update: dict[str, Any] = {} if sliding else {"window": None}
    if attention.scale == attention.head_dim**-0.5:
        update["scale"] = None
    return attention.model_copy(update=update)


def _rope(rope: RopeSpec, mla: bool) -> RopeSpec:
    read = {name: getattr(rope, name) for name in _ROPE_USES[rope.scaling]}
    return RopeSpec(theta=rope.theta, scaling=rope.scaling, interleaved=rope.interleaved and mla, **read)


def _period(names: list[Any]) -> int:
    return next(p for p in range(1, len(names) + 1) if all(name == names[i % p] for i, name in enumerate(names)))


def _shortest_mixers(names: list[Mixer]) -> tuple[Mixer, ...]:
    return tuple(names[: _period(names)])


def _shortest_ffn(names: list[FeedForward]) -> tuple[FeedForward, ...]:
    return tuple(names[: _period(names)])
