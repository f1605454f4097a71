"""The families of `transformers` that a `ModelSpec` can be read from and written to.

A family is four facts: how its config becomes a spec, how a spec becomes its config, what its tensors are called, and what its
config may leave out. Whether a family can express a spec is not said again: the config is written, read back and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.core.config import parse
from surefoot.core.errors import ModelError, nearest
from surefoot.models.hf import configs, names
from surefoot.models.hf import configs_sparse as sparse
from surefoot.models.hf.fields import Fields
from surefoot.models.hf.meaning import TRAINING_ONLY, differences, meaning
from surefoot.models.spec import ModelSpec

Table = dict[str, Any]
TRAINING_KEY = "surefoot_training"  # in an exported config: what steers training, which no family can say


@dataclass(frozen=True)
class Family:
    """One `model_type`. `read` and `write` are pure; `names` gives what a layer's tensors are called (see `tensors.py`)."""

    model_type: str
    architecture: str
    read: Callable[[Fields], Table]
    write: Callable[[ModelSpec], Table]
    names: Callable[[ModelSpec, int], names.Names]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    whole_heads: bool = False  # transformers refuses a dim that is not a multiple of the heads, though nothing needs it

    def spec(self, config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """Return the spec that `config` describes; raise `ModelError` or `ConfigError` for what Surefoot does not have."""
        fields = Fields(config, {**configs.DEFAULTS, **self.defaults}, where)
        configs.refuse_unsupported(fields)
        table = self.read(fields)
        for dotted, value in (config.get(TRAINING_KEY) or {}).items():
            owner, _, key = dotted.partition(".")
            if not dotted.startswith(TRAINING_ONLY) or (key and owner not in table):
                raise ModelError("unknown key", where=f"{where}: {TRAINING_KEY}.{dotted}", remedy=nearest(dotted, TRAINING_ONLY))
            (table[owner] if key else table)[key or owner] = value
        return meaning(parse(ModelSpec, table, where=where))

    def config(self, spec: ModelSpec) -> Table:
        """Return the config of `spec`; raise `ModelError` naming the features that this family cannot express."""
        missing = self.misses(spec)
        if missing:
            what = f"{self.model_type} cannot express {', '.join(missing)}"
            raise ModelError(what, where="export", remedy="change the spec or the family")
        written = self._written(spec)
        wanted, found = (_flat(meaning(one).model_dump(mode="json")) for one in (spec, self.spec(written)))
        training = {name: wanted[name] for name in wanted if name.startswith(TRAINING_ONLY) and wanted[name] != found[name]}
        return {**written, TRAINING_KEY: training} if training else written

    def misses(self, spec: ModelSpec) -> list[str]:
        """Return the features of `spec`, as dotted names, that are lost when it is written as this family and read back."""
        lost = differences(spec, self.spec(self._written(spec), "export"))
        heads = 1 if spec.attention is None else spec.attention.heads
        uneven = self.whole_heads and spec.dim % heads
        return [*lost, f"dim = {spec.dim}, which heads = {heads} does not divide"] if uneven else lost

    def _written(self, spec: ModelSpec) -> Table:
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write(meaning(spec))}


def _flat(table: Table) -> Table:
    """Return `table` with its one level of nested tables under dotted names."""
    flat: Table = {}
    for key, value in table.items():
        if isinstance(value, dict) and key != "init":
            flat |= {f"{key}.{inner}": of for inner, of in value.items()}
        else:
            flat[key] = value
    return flat


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", configs.read_llama, configs.write_llama, names.llama, whole_heads=True),
        Family("mistral", "MistralForCausalLM", configs.read_mistral, configs.write_mistral, names.llama, {"sliding_window": 4096}),
        Family("qwen2", "Qwen2ForCausalLM", configs.read_qwen2, configs.write_qwen2, names.llama),
        Family("qwen3", "Qwen3ForCausalLM", configs.read_qwen3, configs.write_qwen3, names.llama, {"head_dim": 128}),
        Family("olmo2", "Olmo2ForCausalLM", configs.read_olmo2, configs.write_olmo2, names.olmo2, {"rms_norm_eps": 1e-5}),
        Family("phi3", "Phi3ForCausalLM", configs.read_phi3, configs.write_phi3, names.phi3, {"rms_norm_eps": 1e-5}),
        Family("gemma2", "Gemma2ForCausalLM", configs.read_gemma2, configs.write_gemma2, names.gemma, configs.GEMMA2_DEFAULTS, True),
        Family("gemma3_text", "Gemma3ForCausalLM", configs.read_gemma3, configs.write_gemma3, names.gemma, configs.GEMMA3_DEFAULTS, True),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", sparse.read_qwen3_moe, sparse.write_qwen3_moe, names.qwen3_moe),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            sparse.read_mixtral,
            sparse.write_mixtral,
            names.mixtral,
            {"rms_norm_eps": 1e-5},
        ),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", sparse.read_deepseek_v3, sparse.write_deepseek_v3, names.deepseek_v3),
        Family("lfm2", "Lfm2ForCausalLM", sparse.read_lfm2, sparse.write_lfm2, names.lfm2, sparse.LFM2_DEFAULTS),
    )
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family that `config` names; raise `ModelError` with the nearest for one that is not supported."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"model_type {kind!r} is not supported", where=where, remedy=nearest(str(kind), FAMILIES))
    return FAMILIES[kind]


def family_for(spec: ModelSpec) -> Family:
    """Return the first family that expresses `spec` exactly; raise `ModelError` with the nearest and what it lacks."""
    misses = {kind: family.misses(spec) for kind, family in FAMILIES.items()}
    closest = min(misses, key=lambda kind: len(misses[kind]))
    if misses[closest]:
        raise ModelError(
            f"no family of transformers has this architecture; the nearest, {closest}, cannot express {', '.join(misses[closest])}",
            where="export",
            remedy="change these in the spec, or keep the model in Surefoot's own format",
        )
    return FAMILIES[closest]
