"""A model from whatever path a user gives: a run, a checkpoint, a model directory or a `transformers` directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.errors import DataError, ModelError

if TYPE_CHECKING:
    from surefoot.data import Dataset
    from surefoot.data.tokenizer import Vocabulary
    from surefoot.models import ModelSpec, Transformer


@dataclass(frozen=True)
class Opened:
    """A model ready for use; `data` is the dataset directory its run names, if it has one, `home` where its tokenizer lies."""

    path: Path
    spec: ModelSpec
    model: Transformer
    data: Path | None
    home: Path | None

    def dataset(self, given: Path | None) -> Dataset:
        """Open the dataset `given`, or that of the run; raises `DataError` when there is neither or it does not fit the model."""
        from surefoot.data import Dataset

        path = given or self.data
        if path is None:
            raise DataError("no dataset is known for this model", where=str(self.path), remedy="give --data with a prepared dataset")
        dataset = Dataset.open(path)
        dataset.check_model(self.spec.vocab_size)
        return dataset

    def vocabulary(self, given: Path | None = None) -> Vocabulary:
        """Open the tokenizer `given`, or that of the model; raises `ModelError` when there is none or it does not fit the model."""
        from surefoot.data import TokenizerConfig
        from surefoot.data.tokenizer import check_vocabulary, open_tokenizer

        path = given or self.home
        if path is None:
            raise ModelError("no tokenizer is known for this model", where=str(self.path), remedy="give --tokenizer")
        vocabulary = open_tokenizer(TokenizerConfig(path=str(path)))
        check_vocabulary(vocabulary.tokenizer.get_vocab_size(), self.spec.vocab_size, str(path))
        return vocabulary


def open_model(path: Path) -> Opened:
    """Open the model at `path`.

    Raises `ModelError` when `path` is none of the four kinds, and what the reader of that kind raises.
    """
    if not path.exists():
        raise ModelError("no such file or directory", where=str(path), remedy="give a run, a checkpoint, or a model directory")
    if (path / "config.toml").is_file() or _is_checkpoint(path):
        from surefoot.train.checkpoint import load_model

        spec, model = load_model(path)
        data = _data_of(path if (path / "config.toml").is_file() else path.parent.parent)
        return Opened(path, spec, model.eval(), data, _tokenizer_home(path, data))
    if (path / "spec.json").is_file():
        from surefoot.models.hf import load_model_dir

        spec, model = load_model_dir(path)
    elif (path / "config.json").is_file():
        from surefoot.models.hf import import_model

        spec, model = import_model(path)
    else:
        raise ModelError("is not a run, a checkpoint or a model directory", where=str(path), remedy="give a directory that holds one")
    return Opened(path, spec, model.eval(), None, _tokenizer_home(path, None))


def generation_of(opened: Opened, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Return the token ids that go into a generation config."""
    if vocabulary is None:
        return {}
    special = vocabulary.special
    return {"bos_token_id": special.begin, "eos_token_id": special.end, "pad_token_id": special.pad}


def prompt_tokens(vocabulary: Vocabulary, prompts: Sequence[str]) -> list[list[int]]:
    """Encode `prompts` as the beginnings of documents."""
    return [[vocabulary.special.begin, *vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt in prompts]


def _is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file() and (path / "spec.json").is_file()


def _data_of(run: Path) -> Path | None:
    from surefoot.core.config import read_toml

    if not (run / "config.toml").is_file():
        return None
    named = read_toml(run / "config.toml").get("data", {}).get("path")
    return Path(named) if named else None


def _tokenizer_home(path: Path, data: Path | None) -> Path | None:
    """Return the nearest directory that holds the model's tokenizer: the model's own, else its dataset's."""
    places = [path, path / "tokenizer"] + ([data] if data else [])
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def checkpoint_note(path: Path) -> str:
    """Return ``step 100`` for a checkpoint directory, and nothing for a model without one."""
    manifest = path / "manifest.json"
    return f"step {json.loads(manifest.read_text(encoding='utf-8')).get('step')}" if manifest.is_file() else ""
