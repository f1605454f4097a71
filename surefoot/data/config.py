"""What a user may ask of the data: how it is prepared, and how a run reads it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from surefoot.core.config import Config
from surefoot.core.errors import ConfigError


class TokenizerConfig(Config):
    """A tokenizer to train on the text itself, or (with `path`) one that exists."""

    path: str | None = None  # a tokenizer.json, or a directory that holds one: a transformers model, a prepared dataset
    vocab_size: int = Field(8192, ge=261, le=1 << 24)  # 256 bytes and 5 control tokens are always there
    sample_bytes: PositiveInt = 64 << 20  # training reads about this much of the train split
    begin: str | None = None  # names of control tokens in a given tokenizer; None: from its tokenizer_config.json
    end: str | None = None
    pad: str | None = None


class PrepareConfig(Config):
    """The files to read, what a record is in them, and how they become shards."""

    inputs: tuple[str, ...] = Field(min_length=1)  # files, directories and globs
    exclude: tuple[str, ...] = ()  # globs of paths (or parts of paths) to leave out of directories and globs
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"  # auto: by file name
    task: Literal["text", "chat"] = "text"
    key: str | None = None  # JSONL key or Parquet column; None: "text", or "messages" for chat
    chat_template: str | None = None  # a Jinja2 file; None: the tokenizer's own, else ChatML
    tokenizer: TokenizerConfig = TokenizerConfig()
    validation_fraction: float = Field(0.02, ge=0.0, le=0.5)  # of the documents, chosen by the hash of their content
    max_document_bytes: int = Field(64 << 10, ge=4)  # a longer text file becomes several documents, cut at line ends
    on_bad: Literal["stop", "skip"] = "stop"
    max_skipped: NonNegativeInt = 1000  # with on_bad = "skip": more bad records than this stop the preparation
    shard_tokens: PositiveInt = 1 << 28

    @property
    def record_key(self) -> str:
        """The JSONL key or Parquet column that holds the document."""
        return self.key or ("messages" if self.task == "chat" else "text")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.task == "chat" and self.format == "text":
            raise ConfigError("conversations cannot be read from plain text", where="format", remedy='use "jsonl" or "parquet"')
        if self.task == "text" and self.chat_template is not None:
            raise ConfigError("is given but the task is 'text'", where="chat_template", remedy='set task = "chat" or leave it out')
        return self


class DataConfig(Config):
    """How a run reads a prepared dataset."""

    path: str  # the directory `prepare` wrote
    sequence_length: PositiveInt = 512
    seed: int = 0  # of the shuffle
    prefetch: int = Field(2, ge=1)  # batches made ahead of the step that needs them
