"""`rope_parameters` of `transformers` (5, and the older `rope_scaling` with `rope_theta`) <-> `RopeSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.core.errors import ModelError, nearest
from surefoot.models.hf.fields import Fields
from surefoot.models.spec import RopeSpec

Table = dict[str, Any]
# rope_type -> (our scaling, the keys it reads beside rope_type and rope_theta: theirs -> ours)
_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_positions",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_positions",
            "attention_factor": "attention_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
        },
    ),
}
_SPELLED = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def read_rope(fields: Fields, theta: float) -> Table:
    """Return the `[rope]` table of a config with one rotary embedding; `theta` is the family's default base."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    params = fields.values.get(key) or {}
    base = fields.values.get("rope_theta")
    return rope_table(fields, key, params, theta if base is None else float(base))


def rope_table(fields: Fields, key: str, params: Mapping[str, Any], theta: float) -> Table:
    """Return the `[rope]` table for `params`, one dict of rope parameters found under `key`."""
    where = f"{fields.where}: {key}"
    if not isinstance(params, Mapping):
        raise ModelError(f"must be a table, got {params!r}", where=where, remedy="correct the config")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(f"rope type {kind!r} is not supported", where=where, remedy=nearest(str(kind), _KINDS))
    scaling, names = _KINDS[kind]
    unknown = sorted(set(params) - set(names) - _SPELLED)
    if unknown:
        raise ModelError(
            f"key '{unknown[0]}' means nothing to rope type '{kind}'", where=where, remedy=nearest(unknown[0], [*names, *_SPELLED])
        )
    found = {ours: params[theirs] for theirs, ours in names.items() if params.get(theirs) is not None}
    limit = fields.integer("max_position_embeddings")
    if kind in ("dynamic", "llama3", "yarn"):
        found.setdefault("original_positions", limit)
    if kind != "default" and "factor" not in found:
        if kind != "yarn":
            raise ModelError(f"rope type '{kind}' needs a factor", where=where, remedy="add it")
        found["factor"] = limit / found["original_positions"]
    base = params.get("rope_theta")
    return {"theta": theta if base is None else base, "scaling": scaling, **found}


def write_rope(rope: RopeSpec) -> Table:
    """Return `rope` as one dict of rope parameters."""
    kind, names = next((kind, names) for kind, (scaling, names) in _KINDS.items() if scaling == rope.scaling)
    values = {theirs: getattr(rope, ours) for theirs, ours in names.items()}
    return {"rope_type": kind, "rope_theta": rope.theta, **{key: value for key, value in values.items() if value is not None}}
