"""A prepared dataset: opened from its directory, read through loaders, described in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from surefoot.core.errors import DataError, nearest
from surefoot.core.files import hash_file
from surefoot.data.chat import ChatTemplate
from surefoot.data.config import TokenizerConfig
from surefoot.data.loader import Loader
from surefoot.data.packing import Packing, StreamPacking, pack_conversations
from surefoot.data.shards import Manifest, SplitRecord, Stream, all_files, read_manifest
from surefoot.data.tokenizer import SpecialTokens, Vocabulary, check_vocabulary, open_tokenizer

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Dataset:
    """The dataset in directory `path`; nothing is read before it is needed."""

    path: Path
    manifest: Manifest = field(repr=False)

    @staticmethod
    def open(path: Path | str) -> Dataset:
        """Open a directory that `prepare` wrote.

        Raises `DataError` when there is none, or a file of it is missing or cut short.
        """
        return Dataset(Path(path), read_manifest(Path(path)))

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self.manifest.vocab_size

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer with its control tokens and chat template."""
        return open_tokenizer(TokenizerConfig(path=str(self.path)))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ``dataset.path / "tokenizer.json"`` is the same one as a file."""
        return self.vocabulary.tokenizer

    @property
    def special(self) -> SpecialTokens:
        """Ids of the tokens that begin, end and pad documents."""
        return self.vocabulary.special

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template, to write prompts with. Raises `DataError` when there is none that fits the tokenizer."""
        return ChatTemplate.of(self.vocabulary)

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.uint32]:
        """UTF-8 bytes that each token spells, by id; control tokens spell none."""
        return np.fromfile(self.path / "token_bytes.bin", dtype="<u4")

    def check_model(self, vocab_size: int) -> None:
        """Raise `ModelError` when a model of this vocabulary size cannot read the dataset."""
        check_vocabulary(self.vocab_size, vocab_size, str(self.path))

    def verify(self) -> None:
        """Read every file and raise `DataError` for the first whose hash is not the manifest's."""
        for record in all_files(self.manifest):
            if hash_file(self.path / record.path) != record.hash:
                what = "the content is not what was prepared (its hash differs)"
                raise DataError(what, where=str(self.path / record.path), remedy="prepare the data again")

    def split(self, name: str) -> SplitRecord:
        """Return the counts of split `name`. Raises `DataError` when the dataset has no such split."""
        if name not in self.manifest.splits:
            remedy = nearest(name, self.manifest.splits)
            if name == "validation":
                remedy = "prepare the data with validation_fraction > 0"
            raise DataError(f"there is no split '{name}'", where=str(self.path), remedy=remedy)
        return self.manifest.splits[name]

    def loader(self, split: str = "train", sequence_length: int = 512, seed: int | None = 0) -> Loader:
        """Return the loader of `split`, with rows of `sequence_length`; `seed` None keeps the order of the files.

        Raises `DataError` when the split is absent or holds nothing to train on at this length.
        """
        packing = self.packing(split, sequence_length)
        if packing.samples == 0:
            what = f"nothing to train on within {sequence_length} tokens of any conversation of '{split}'"
            raise DataError(what, where=str(self.path), remedy="raise sequence_length")
        return Loader(packing, self.token_bytes, sequence_length, seed)

    def samples(self, split: str, sequence_length: int) -> int:
        """Return the rows of `sequence_length` in one epoch of `split`."""
        return self.packing(split, sequence_length).samples

    def packing(self, split: str, sequence_length: int) -> Packing:
        """Return how the documents of `split` fall into rows."""
        tokens, starts, pad = self.stream(split, "tokens"), self.document_starts(split), self.special.pad
        if self.manifest.config.task == "text":
            return StreamPacking(tokens, starts, sequence_length, pad)
        return pack_conversations(tokens, self.stream(split, "trained"), starts, sequence_length, pad)

    def bytes_per_token(self, split: str = "train") -> float:
        """Return the UTF-8 bytes of text per trained token of `split`."""
        record = self.split(split)
        return record.text_bytes / record.trained

    def validation_bytes(self) -> bytes:
        """Return the text of the validation documents, one after the other, spelled from their tokens."""
        spellings = self.vocabulary.spellings()
        tokens = self.stream("validation", "tokens")
        return b"".join(b"".join([spellings[token] for token in chunk.tolist()]) for chunk in _chunks(tokens))

    def unigram_bits_per_byte(self, split: str = "validation") -> float:
        """Return the bits per byte of `split` under a unigram model of tokens: train counts, add-one smoothing."""
        record = self.split(split)
        train = self._label_counts("train") + 1
        cost = np.log2(train.sum()) - np.log2(train)
        return float((self._label_counts(split) * cost).sum() / record.text_bytes)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows (what, value) for a table."""
        manifest = self.manifest
        rows = [
            ("directory", str(self.path)),
            ("read", f"{manifest.inputs.files:,} files, {manifest.inputs.bytes / 1e6:,.1f} MB"),
            ("vocabulary", f"{manifest.vocab_size:,} tokens, {self.bytes_per_token('train'):.2f} bytes per token"),
        ]
        for name, split in manifest.splits.items():
            text = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes / 1e6:,.1f} MB"
            rows.append((name, text if manifest.config.task == "text" else f"{text} trained ({split.trained:,} tokens)"))
        if manifest.skipped.total:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(manifest.skipped.reasons.items()))
            rows.append(("skipped", f"{manifest.skipped.total:,} ({reasons})"))
        if manifest.inexact_documents:
            rows.append(("rewritten", f"{manifest.inexact_documents:,} documents that the tokenizer does not spell exactly"))
        return rows

    def _label_counts(self, split: str) -> npt.NDArray[np.int64]:
        """How often each token is predicted in an epoch: conversations by their marks, text without each document's first token."""
        tokens = self.stream(split, "tokens")
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        if self.manifest.config.task == "chat":
            for chunk, flags in zip(_chunks(tokens), _chunks(self.stream(split, "trained")), strict=True):
                counts += np.bincount(chunk[flags != 0], minlength=self.vocab_size)
            return counts
        for chunk in _chunks(tokens):
            counts += np.bincount(chunk, minlength=self.vocab_size)
        counts[self.special.begin] -= self.split(split).documents
        return counts

    def stream(self, split: str, kind: Literal["tokens", "trained"]) -> Stream:
        """Return all tokens of `split`, or for conversations the bytes that mark what is trained, memory-mapped."""
        paths = [self.path / record.path for record in self.split(split).files if Path(record.path).name.startswith(f"{kind}-")]
        return Stream.open(paths, self.manifest.dtype if kind == "tokens" else "u1", self.manifest.config.shard_tokens)

    def document_starts(self, split: str) -> npt.NDArray[np.uint64]:
        """Return where each document of `split` begins in its stream, and the stream's length, memory-mapped."""
        self.split(split)
        return np.asarray(np.memmap(self.path / split / "documents.bin", dtype="<u8", mode="r"))


def _chunks(stream: Stream) -> Iterator[npt.NDArray[Any]]:
    total = len(stream)
    for start in range(0, total, _CHUNK_TOKENS):
        yield stream.read(start, min(start + _CHUNK_TOKENS, total))
