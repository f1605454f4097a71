"""A small corpus of real text kinds, prepared once."""

from __future__ import annotations

import json
import random

import pytest

from surefoot.data import Dataset, PrepareConfig, TokenizerConfig, prepare

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "model",
    "größe",
    "数据",
    "🙂",
    "def",
    "self.x",
    "=",
    "+",
    "1",
    "\t\n",
    "",
    "None:",
    "<|end|>",
    "é",
]


def make_texts(count: int, seed: int = 0, words: int = 120) -> list[str]:
    """Texts of very different lengths, with characters of one to four bytes and the names of control tokens in them."""
    draw = random.Random(seed)
    return [f"{index} " + " ".join(draw.choices(WORDS, k=draw.choice((1, 5, words)))) + "\n" for index in range(count)]


def make_conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    draw = random.Random(seed)
    words = [word for word in WORDS if not word.startswith("<|")]

    def say(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 20)))}

    made = []
    for _ in range(count):
        turns = [say(role) for _ in range(draw.randint(1, 3)) for role in ("user", "assistant")]
        made.append([say("system"), *turns] if draw.random() < 0.5 else turns)
    return made


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(200)


@pytest.fixture(scope="session")
def text_config(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(texts):
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8", newline="")
    # Shards far smaller than the corpus, so that rows and documents cross their borders.
    return PrepareConfig(inputs=(str(folder),), tokenizer=TokenizerConfig(vocab_size=400), validation_fraction=0.2, shard_tokens=257)


@pytest.fixture(scope="session")
def text_dataset(text_config: PrepareConfig, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare(text_config, tmp_path_factory.mktemp("prepared") / "text")


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    return make_conversations(120)


@pytest.fixture(scope="session")
def chat_config(conversations: list[list[dict[str, str]]], tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations), encoding="utf-8")
    return PrepareConfig(
        inputs=(str(file),), task="chat", tokenizer=TokenizerConfig(vocab_size=400), validation_fraction=0.2, shard_tokens=311
    )


@pytest.fixture(scope="session")
def chat_dataset(chat_config: PrepareConfig, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare(chat_config, tmp_path_factory.mktemp("prepared") / "chat")
