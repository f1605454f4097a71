"""A directory that is whole or absent, and the files that travel with a model's weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tokenizers import Tokenizer

from surefoot.core.errors import EngineError, ModelError
from surefoot.core.files import disk_error, fsync_dir
from surefoot.models.hf.weights import read_json
from surefoot.models.spec import ModelSpec

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@contextmanager
def new_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary directory beside `out`; flush it and rename it to `out` at the end, or remove it after an error.

    Raises `ModelError` when `out` exists (unless it is empty or `overwrite`), `EngineError` when it cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise ModelError("is a file", where=str(out), remedy="give a directory that does not exist yet")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise ModelError("is not empty", where=str(out), remedy="give a new directory, or ask to overwrite it")
    aside: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield aside
        _flush(aside)
        _swap(aside, out)
    except OSError as error:
        raise disk_error(error, out) from error
    except SafetensorError as error:
        raise EngineError(f"cannot be written: {error}", where=str(out), remedy="free some space or choose another disk") from error
    finally:
        if aside is not None and aside.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _flush(directory: Path) -> None:
    os.chmod(directory, 0o755)
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    fsync_dir(directory)


def _swap(new: Path, out: Path) -> None:
    old: Path | None = None
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        os.replace(out, old / out.name)
    os.replace(new, out)
    fsync_dir(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def generation_of(directory: Path, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the generation config kept in `directory`; token ids that it lacks come from `config`."""
    path = directory / GENERATION
    found = read_json(path) if path.is_file() else {}
    ids = {key: config[key] for key in TOKEN_IDS if config is not None and config.get(key) is not None}
    return {**ids, **found}


def write_sides(
    directory: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer | Path | None,
    generation: Mapping[str, Any],
    chat_template: str | None = None,
) -> None:
    """Write the tokenizer (an object, a `tokenizer.json`, or a directory whose files are copied), chat template, generation config."""
    check_tokenizer(spec, tokenizer)
    if isinstance(tokenizer, Path) and tokenizer.is_dir():
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, directory / name)
    elif tokenizer is not None:
        loaded = Tokenizer.from_file(str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
        loaded.save(str(directory / "tokenizer.json"))
        tokens = {key.removesuffix("_id"): loaded.id_to_token(generation[key]) for key in TOKEN_IDS if isinstance(generation.get(key), int)}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_positions, **tokens}
        _write_json(directory / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if generation:
        _write_json(directory / GENERATION, dict(generation))


def check_tokenizer(spec: ModelSpec, tokenizer: Tokenizer | Path | None) -> None:
    """Raise `ModelError` when the tokenizer is missing, broken, or has more tokens than the model has rows."""
    if isinstance(tokenizer, Path):
        path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        if not path.is_file():
            if tokenizer.is_dir():
                return  # other kinds of tokenizer files are handed on as they are
            raise ModelError("no such file", where=str(path), remedy="give a tokenizer.json")
        size = len(read_json(path).get("model", {}).get("vocab", ()))
    else:
        size = 0 if tokenizer is None else tokenizer.get_vocab_size()
    if size > spec.vocab_size:
        raise ModelError(
            f"has {size} tokens, the model {spec.vocab_size}", where="tokenizer", remedy="use the tokenizer the model was trained with"
        )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
