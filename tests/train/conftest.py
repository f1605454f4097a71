"""A small prepared dataset and a configuration that trains on it in seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.config import parse
from surefoot.data import PrepareConfig, TokenizerConfig, prepare
from surefoot.train import TrainConfig

MODEL = {
    "vocab_size": 300,
    "dim": 16,
    "layers": 2,
    "max_positions": 64,
    "attention": {"heads": 2, "kv_heads": 1, "head_dim": 8},
    "ffn": {"hidden": 24},
}
MOE = MODEL | {
    "ffn_pattern": ["dense", "moe"],
    "moe": {"experts": 4, "top_k": 2, "hidden": 12, "balance": "bias", "router": "sigmoid", "bias_rate": 0.01},
}


@pytest.fixture(scope="session")
def dataset_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different lengths, so that ranks and micro-batches train different numbers of tokens."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    chance = random.Random(0)
    for index in range(60):
        text = " ".join(chance.choice(words) for _ in range(chance.choice([3, 10, 60, 200])))
        (folder / f"{index}.txt").write_text(f"{index} {text}\n")
    out = folder.parent / "dataset"
    prepare(PrepareConfig(inputs=(str(folder),), tokenizer=TokenizerConfig(vocab_size=300), validation_fraction=0.2), out)
    return out


Configure = Callable[..., TrainConfig]


@pytest.fixture
def configure(dataset_path: Path, tmp_path: Path) -> Configure:
    """Return a maker of configurations; keywords are tables to merge in, e.g. train={"steps": 3}."""

    def make(name: str = "run", **tables: Any) -> TrainConfig:
        base: dict[str, Any] = {
            "run": str(tmp_path / name),
            "seed": 3,
            "model": MODEL,
            "data": {"path": str(dataset_path), "sequence_length": 32},
            "train": {"steps": 4, "batch_size": 8, "precision": "float64", "eval_rows": 8, "threads": 1},
            "optimizer": {"lr": 3e-3},
        }
        for key, value in tables.items():
            base[key] = base.get(key, {}) | value if isinstance(value, dict) and key != "model" else value
        return parse(TrainConfig, base)

    return make
