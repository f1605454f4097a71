"""`import_model` and `export_model`: directories of `transformers`, as plain JSON and safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.models.hf.aside import TOKEN_IDS, new_directory, write_sides
from surefoot.models.hf.families import FAMILIES, Family, family_for, family_of
from surefoot.models.hf.tensors import Piece, pieces, shapes
from surefoot.models.hf.weights import Stored, check, read_json, read_tensors, stored, write_shards
from surefoot.models.parameters import accumulation_dtype
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer

SHARD_BYTES = 5_000_000_000
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")  # older checkpoints stored what the config already says


def read_config(directory: Path | str) -> tuple[Family, ModelSpec, dict[str, Any]]:
    """Return the family, the spec and the plain config of a `transformers` directory, without touching its weights."""
    path = Path(directory) / "config.json"
    config = read_json(path)
    family = family_of(config, str(path))
    return family, family.spec(config, str(path)), config


def import_model(directory: Path | str, *, dtype: torch.dtype | None = None) -> tuple[ModelSpec, Transformer]:
    """Return the spec and the model in a `transformers` directory, in `dtype` (None: as stored, which is bit-exact).

    Raises `ModelError` or `ConfigError`, before any weight is read, for an unknown family, an option Surefoot does not have, and
    tensors that are missing, unexpected, of another shape or in a file cut short.
    """
    directory = Path(directory)
    family, spec, config = read_config(directory)
    table = {piece.theirs: piece for piece in pieces(family, spec)}
    found = _relevant(stored(directory), spec, config)
    redundant_head = spec.tied_embeddings and "lm_head.weight" in found
    head = found.pop("lm_head.weight") if redundant_head else None
    check(found, {name: piece.shape for name, piece in table.items()}, str(directory))
    if head is not None:
        _check_tied(found, head, directory)
    model = Transformer(spec, dtype=dtype or _stored_dtype(found, table))
    _fill(model, read_tensors(found, table), table)
    return spec, model


def _relevant(found: dict[str, Stored], spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Leave out tensors of multi-token-prediction modules, which follow the last layer, and stored rotary frequencies."""
    extra = range(spec.layers, spec.layers + int(config.get("num_nextn_predict_layers") or 0))
    ahead = tuple(f"model.layers.{layer}." for layer in extra)
    return {name: of for name, of in found.items() if not name.startswith(ahead or ("\0",)) and not _COMPUTED.search(name)}


def _check_tied(found: dict[str, Stored], head: Stored, directory: Path) -> None:
    both = {"embed": found["model.embed_tokens.weight"], "lm_head.weight": head}
    embed = dict(read_tensors({"model.embed_tokens.weight": both["embed"]}, ["model.embed_tokens.weight"]))
    stored_head = dict(read_tensors({"lm_head.weight": head}, ["lm_head.weight"]))
    if not torch.equal(embed["model.embed_tokens.weight"], stored_head["lm_head.weight"]):
        raise ModelError(
            "tie_word_embeddings is true but lm_head.weight is another matrix than the embedding",
            where=str(directory),
            remedy="set tie_word_embeddings to false in config.json",
        )


def _stored_dtype(found: Mapping[str, Stored], table: Mapping[str, Piece]) -> torch.dtype:
    """Return the narrowest dtype that holds every stored parameter exactly."""
    dtypes = {found[name].dtype for name, piece in table.items() if not piece.ours.endswith("router_bias")}
    widest = dtypes.pop()
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


@torch.no_grad()
def _fill(model: Transformer, tensors: Iterator[tuple[str, Tensor]], table: Mapping[str, Piece]) -> None:
    ours = model.state_dict()
    for name, tensor in tensors:
        piece = table[name]
        piece.region(ours[piece.ours]).copy_(tensor)
    for layer in model.moe_layers():
        layer.counts.zero_()


def export_model(
    spec: ModelSpec,
    model: nn.Module | Mapping[str, Tensor],
    out: Path | str,
    *,
    tokenizer: Tokenizer | Path | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    family: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory that `transformers` loads: config, sharded safetensors, tokenizer, generation config. Return its path.

    `model`: a module or its state by canonical name. `dtype` None keeps the tensors as they are. `family` None chooses the first
    that expresses `spec`. `generation` may hold the token ids (bos, eos, pad) and any other key of a generation config.
    Raises `ModelError`, before anything is written, when no family can express the spec or a tensor is missing, extra or misshapen.
    """
    out = Path(out)
    if family is not None and family not in FAMILIES:
        family_of({"model_type": family}, "export")
    chosen = family_for(spec) if family is None else FAMILIES[family]
    state = model.state_dict() if isinstance(model, nn.Module) else dict(model)
    check_state(spec, state)
    dtype = dtype or state["embed.weight"].dtype
    generation = dict(generation or {})
    config = chosen.config(spec) | {key: generation[key] for key in TOKEN_IDS if key in generation}
    config["dtype"] = str(dtype).removeprefix("torch.")
    with new_directory(out, overwrite=overwrite) as directory:
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_sides(directory, spec, tokenizer, generation, chat_template)
        write_shards(directory, _theirs(chosen, spec, state, dtype), max_shard_bytes)
    return out


def check_state(spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` naming the first tensor of `state` that is missing, extra or of another shape than `spec` says."""
    here = {name: Stored(Path(), tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    check(here, {name: shape for name, (shape, _) in shapes(spec).items()}, "model")


def _theirs(family: Family, spec: ModelSpec, state: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for piece in pieces(family, spec):
        # The selection bias stays wide: its steps are far below the spacing of bfloat16.
        wanted = accumulation_dtype(dtype) if piece.ours.endswith("router_bias") else dtype
        yield piece.theirs, piece.region(state[piece.ours].detach()).to(device="cpu", dtype=wanted)
