"""What a user may ask of the data: how it is prepared, and how a run reads it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from surefoot.core.config import Config
from surefoot.core.errors import ConfigError, nearest


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


class SourceConfig(Config):
    """One of several datasets that a run draws from."""

    name: str = Field(min_length=1)
    path: str  # the directory `prepare` wrote
    weight: PositiveFloat | None = None  # share beside the others' weights; None, for all: by size, see mixture.temperature
    max_epochs: PositiveFloat | None = None  # so often at most; then the others share its part. None: no limit


class StageConfig(Config):
    """From `at` tokens on, these weights; a name that is left out gives nothing."""

    at: NonNegativeInt
    weights: dict[str, NonNegativeFloat]
    shape: Literal["step", "linear"] = "step"  # linear: in a straight line from the stage before


class MixtureConfig(Config):
    """In what shares the sources give."""

    by: Literal["tokens", "documents"] = "tokens"
    temperature: PositiveFloat = 1.0  # without weights: shares are sizes^(1 / temperature); 1 is natural, larger is flatter
    stages: tuple[StageConfig, ...] = ()  # a curriculum; the first one begins at 0
    follow_loss: PositiveFloat | None = None  # at each evaluation give more to sources whose loss rose, at this rate; None: do not


class DataConfig(Config):
    """What a run reads: one prepared dataset, or several in a mixture."""

    path: str | None = None  # the directory `prepare` wrote
    sources: tuple[SourceConfig, ...] = ()
    mixture: MixtureConfig = MixtureConfig()
    sequence_length: PositiveInt = 512
    seed: int = 0  # of the shuffle
    prefetch: int = Field(2, ge=1)  # batches made ahead of the step that needs them

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (not self.sources):
            what = "is given beside sources" if self.sources else "is missing"
            raise ConfigError(what, where="data.path", remedy='name one dataset (path = "...") or several ([[data.sources]])')
        names = [source.name for source in self.sources]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ConfigError(f"two sources are called '{name}'", where="data.sources", remedy="give each its own name")
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(names):
            without = next(name for name in names if name not in weighted)
            what = f"'{without}' has no weight while '{weighted[0]}' has one"
            raise ConfigError(what, where="data.sources", remedy="give all of them a weight, or none")
        self._check_stages(names, bool(weighted))
        return self

    def _check_stages(self, names: list[str], weighted: bool) -> None:
        stages = self.mixture.stages
        if stages and weighted:
            raise ConfigError("weights stand in the stages and beside the sources", where="data.mixture.stages", remedy="keep one of them")
        if stages and min(stage.at for stage in stages) > 0:
            raise ConfigError("no stage begins at 0", where="data.mixture.stages", remedy="add one with at = 0")
        for number, stage in enumerate(stages):
            unknown = next((name for name in stage.weights if name not in names), None)
            where = f"data.mixture.stages[{number}]"
            if unknown is not None:
                raise ConfigError(
                    f"there is no source '{unknown}'", where=where, remedy=nearest(unknown, names) if names else "name sources"
                )
            if not any(stage.weights.values()):
                raise ConfigError("all weights are zero", where=where, remedy="give at least one source a weight")

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of all datasets."""
        return tuple(source.path for source in self.sources) if self.path is None else (self.path,)
