"""Surefoot's own model directory: `spec.json`, safetensors in canonical names, tokenizer and generation config beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from surefoot.core.config import parse, to_json
from surefoot.models.hf.aside import generation_of, new_directory, write_sides
from surefoot.models.hf.io import SHARD_BYTES, check_state, export_model, import_model
from surefoot.models.hf.tensors import shapes
from surefoot.models.hf.weights import check, read_json, read_tensors, stored, write_shards
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer

SPEC = "spec.json"


def save_model(
    out: Path | str,
    spec: ModelSpec,
    model: nn.Module | Mapping[str, Tensor],
    tokenizer: Tokenizer | Path | None = None,
    *,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write a model directory, whole or not at all; return its path. `tokenizer`: an object, a file, or a directory to copy from."""
    out = Path(out)
    state = model.state_dict() if isinstance(model, nn.Module) else dict(model)
    check_state(spec, state)
    with new_directory(out, overwrite=overwrite) as directory:
        (directory / SPEC).write_text(to_json(spec) + "\n", encoding="utf-8")
        write_sides(directory, spec, tokenizer, generation or {})
        write_shards(directory, ((name, state[name].detach().cpu()) for name in shapes(spec)), max_shard_bytes)
    return out


def load_model_dir(path: Path | str, *, dtype: torch.dtype | None = None) -> tuple[ModelSpec, Transformer]:
    """Return the spec and the model of a directory written by `save_model`, in `dtype` (None: as stored).

    Raises `ModelError` or `ConfigError` for a directory that is not one, is cut short, or whose tensors do not fit its spec.
    """
    path = Path(path)
    spec = parse(ModelSpec, read_json(path / SPEC), where=str(path / SPEC))
    found = stored(path)
    check(found, {name: shape for name, (shape, _) in shapes(spec).items()}, str(path))
    model = Transformer(spec, dtype=dtype or found["embed.weight"].dtype)
    ours = model.state_dict()
    with torch.no_grad():
        for name, tensor in read_tensors(found, found):
            ours[name].copy_(tensor)
    for layer in model.moe_layers():
        layer.counts.zero_()
    return spec, model


def import_directory(source: Path | str, out: Path | str, *, dtype: torch.dtype | None = None, overwrite: bool = False) -> Path:
    """Turn a `transformers` directory into a model directory, tokenizer, chat template and generation config included."""
    source = Path(source)
    spec, model = import_model(source, dtype=dtype)
    generation = generation_of(source, read_json(source / "config.json"))
    return save_model(out, spec, model, source, generation=generation, overwrite=overwrite)


def export_directory(
    source: Path | str,
    out: Path | str,
    *,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Turn a model directory into a `transformers` directory, the inverse of `import_directory`."""
    source = Path(source)
    spec, model = load_model_dir(source)
    return export_model(
        spec, model, out, tokenizer=source, generation=generation_of(source), dtype=dtype, family=family,
        max_shard_bytes=max_shard_bytes, overwrite=overwrite,
    )  # fmt: skip
