"""Files to dataset: check everything, split, train or open the tokenizer, tokenise on all cores, publish in one rename."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.config import to_json
from surefoot.core.errors import DataError, EngineError, InputError
from surefoot.core.files import disk_error, free_bytes, fsync_dir, hash_file, write_atomic
from surefoot.data.chat import ChatTemplate, Segment, encode_conversations
from surefoot.data.config import PrepareConfig
from surefoot.data.dataset import Dataset
from surefoot.data.shards import FileRecord, InputRecord, Manifest, SkipRecord, SplitRecord, SplitWriter, read_manifest, record_file
from surefoot.data.sources import Document, Problem, find_files, read_documents
from surefoot.data.split import content_hash, sample_mask, validation_mask
from surefoot.data.tokenizer import CONTROL_TOKENS, Vocabulary, open_tokenizer, train_tokenizer

_CHUNK_BYTES, _CHUNK_DOCUMENTS = 4 << 20, 4096
_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is, in bytes: "check", "tokenizer", "tokens", or "unchanged" when `out` already holds just this dataset."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def prepare(config: PrepareConfig, out: Path | str, on_progress: OnProgress | None = None) -> Dataset:
    """Make the dataset `out` from the files that `config` names, and open it.

    Everything is read and checked before anything is written, and `out` appears complete or not at all. The same files and
    configuration give the same bytes. Where `out` already holds them it is opened as it stands, with the progress "unchanged".

    Raises `DataError` for input that cannot be used (file, line, remedy) or an `out` that holds something else, `EngineError` when
    the disk is full or fails.
    """
    out = Path(out).expanduser()
    report = on_progress or (lambda progress: None)
    files = find_files(config.inputs, config.exclude)
    vocabulary = open_tokenizer(config.tokenizer) if config.tokenizer.path else None
    template = _chat_template(config, vocabulary)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        _check_existing(config, files, out)
        report(Progress("unchanged", 1, 1))
        return Dataset.open(out)
    corpus = _scan(config, files, template, report)
    validation = validation_mask(corpus.hashes, config.validation_fraction)
    if vocabulary is None:
        vocabulary = _train(config, corpus, ~validation, report)
    if template is not None:
        vocabulary = Vocabulary(vocabulary.tokenizer, vocabulary.special, vocabulary.names, template.source, vocabulary.where)
    try:
        with _written_aside(out) as aside:
            _write(config, corpus, validation, vocabulary, aside, report)
    except OSError as error:
        raise disk_error(error, out) from error
    return Dataset.open(out)


@dataclass
class _Corpus:
    """What the first pass found: per accepted document, in reading order, its hash and size; and what was skipped."""

    config: PrepareConfig
    files: Sequence[Path]
    template: ChatTemplate | None
    inputs: InputRecord
    skipped: SkipRecord
    hashes: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]

    def documents(self) -> Iterator[tuple[int, _Text]]:
        """Read the accepted documents again, numbered. Raises `DataError` if they are no longer those of the first pass."""
        number = 0
        for file in self.files:
            for item in _read(file, self.config, self.template):
                if isinstance(item, Problem):
                    continue
                if number >= len(self.hashes) or content_hash(item.document.content) != int(self.hashes[number]):
                    raise _changed(item.document.where)
                yield number, item
                number += 1
        if number != len(self.hashes):
            raise _changed(str(self.files[-1]))


@dataclass(frozen=True, slots=True)
class _Text:
    """A document, and the segments of its conversation (none for text)."""

    document: Document
    segments: list[Segment] | None


def _changed(where: str) -> DataError:
    return DataError("the file changed while it was being read", where=where, remedy="prepare again when nothing writes to it")


def _read(file: Path, config: PrepareConfig, template: ChatTemplate | None) -> Iterator[_Text | Problem]:
    for item in read_documents(file, config):
        if isinstance(item, Problem):
            yield item
        elif template is None:
            yield _Text(item, None)
        else:
            try:
                yield _Text(item, template.segments(json.loads(item.content)))
            except DataError as error:
                yield Problem(item.where, "template", error.what, error.remedy)


@dataclass
class _Skips:
    """The policy for bad records: raise at once, or count up to a limit."""

    config: PrepareConfig
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def meet(self, problem: Problem) -> None:
        if self.config.on_bad == "stop":
            raise problem.error()
        self.reasons[problem.reason] = self.reasons.get(problem.reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{problem.where}: {problem.what}")
        if self.total > self.config.max_skipped:
            raise DataError(
                f"more than max_skipped = {self.config.max_skipped} bad records; the last one: {problem.what}",
                where=problem.where,
                remedy=f"{problem.remedy}; or raise max_skipped",
            )

    @property
    def total(self) -> int:
        return sum(self.reasons.values())


def _scan(config: PrepareConfig, files: Sequence[Path], template: ChatTemplate | None, report: OnProgress) -> _Corpus:
    """Read and check every document."""
    skips = _Skips(config)
    hashes, sizes = array("Q"), array("q")
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        for item in _read(file, config, template):
            if isinstance(item, Problem):
                skips.meet(item)
                continue
            hashes.append(content_hash(item.document.content))
            sizes.append(len(item.document.content))
        done += file.stat().st_size
        report(Progress("check", done, total))
    if not hashes:
        first = skips.examples[0] if skips.examples else "nothing was read"
        raise DataError(f"no document is left ({first})", where="inputs", remedy="correct the files, or name others")
    skipped = SkipRecord(total=skips.total, reasons=dict(sorted(skips.reasons.items())), examples=tuple(skips.examples))
    return _Corpus(
        config, files, template, _input_record(config, files), skipped, np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64)
    )


def _input_record(config: PrepareConfig, files: Sequence[Path]) -> InputRecord:
    state, size = xxhash.xxh3_128(), 0
    tokenizer = Path(config.tokenizer.path).expanduser() if config.tokenizer.path else None
    template = Path(config.chat_template).expanduser() if config.chat_template else None
    if tokenizer is not None and tokenizer.is_dir():
        tokenizer = tokenizer / "tokenizer.json"
    for file in [*files, *(extra for extra in (tokenizer, template) if extra is not None)]:
        state.update(f"{file}\0{hash_file(file)}\n".encode())
    size = sum(file.stat().st_size for file in files)
    return InputRecord(files=len(files), bytes=size, digest=state.hexdigest())


def _chat_template(config: PrepareConfig, vocabulary: Vocabulary | None) -> ChatTemplate | None:
    if config.task != "chat":
        return None
    source = None
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise DataError("cannot be read as a template", where=str(path), remedy="give a Jinja2 file in UTF-8") from None
    # Every tokenizer trained here has the same control tokens, so the smallest one can stand in for that to come.
    return ChatTemplate.of(vocabulary or train_tokenizer([], 261), source)


def _check_existing(config: PrepareConfig, files: Sequence[Path], out: Path) -> None:
    """Raise `DataError` unless `out` holds just what would be made."""
    remedy = "choose another directory, or remove this one"
    try:
        manifest = read_manifest(out) if out.is_dir() else None
    except InputError as error:
        raise DataError(f"exists and is not a whole dataset ({error.what})", where=str(out), remedy=remedy) from None
    if manifest is None:
        raise DataError("exists and is not a directory", where=str(out), remedy=remedy)
    old, new = manifest.config.model_dump(mode="json"), config.model_dump(mode="json")
    changed = sorted(name for name in new if old[name] != new[name])
    if changed:
        what = f"was prepared with another configuration ({', '.join(changed)} differ)"
        raise DataError(what, where=str(out), remedy=remedy)
    if manifest.inputs != _input_record(config, files):
        raise DataError("was prepared from files that have changed since", where=str(out), remedy=remedy)


def _train(config: PrepareConfig, corpus: _Corpus, chosen: npt.NDArray[np.bool_], report: OnProgress) -> Vocabulary:
    """Train the tokenizer on (a sample of) the train split."""
    sample = np.zeros_like(chosen)
    sample[chosen] = sample_mask(corpus.hashes[chosen], corpus.sizes[chosen], config.tokenizer.sample_bytes)
    total = int(corpus.sizes[sample].sum())
    controls = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))

    def texts() -> Iterator[str]:
        done = 0
        for number, item in corpus.documents():
            if not sample[number]:
                continue
            content = item.document.content
            if item.segments is None:
                yield content.decode()
            else:
                # A control token is never part of a learned one.
                yield from controls.split("".join(segment.text for segment in item.segments))
            done += len(content)
            report(Progress("tokenizer", done, total))

    return train_tokenizer(texts(), config.tokenizer.vocab_size)


@contextlib.contextmanager
def _written_aside(out: Path) -> Iterator[Path]:
    """Yield a new directory beside `out`, renamed to `out` on success and removed otherwise.

    A lock on it tells a live one from one that a killed process left behind; those are removed here.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.preparing-"
    for stale in out.parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(stale):
            shutil.rmtree(stale, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        with _locked(aside):
            aside.chmod(out.parent.stat().st_mode & 0o777)
            yield aside
            for directory in (*(each for each in aside.iterdir() if each.is_dir()), aside):
                fsync_dir(directory)
            aside.rename(out)
            fsync_dir(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _write(
    config: PrepareConfig, corpus: _Corpus, validation: npt.NDArray[np.bool_], vocabulary: Vocabulary, aside: Path, report: OnProgress
) -> None:
    """Tokenise the corpus into `aside` and finish it with the manifest."""
    table = np.array([len(spelling) for spelling in vocabulary.spellings()], dtype="<u4")
    dtype = "<u2" if vocabulary.size <= 1 << 16 else "<u4"
    _check_space(int(corpus.sizes.sum()), np.dtype(dtype).itemsize, aside)
    vocabulary.save(aside)
    (aside / "token_bytes.bin").write_bytes(table.tobytes())
    names = ["train", *(["validation"] if validation.any() else [])]
    with contextlib.ExitStack() as stack:
        splits = {}
        for name in names:
            writer = SplitWriter(aside / name, dtype, config.shard_tokens, flags=config.task == "chat")
            splits[name] = _SplitTotals(stack.enter_context(writer), table)
        inexact = _tokenise(corpus, validation, vocabulary, splits, report)
        records = {name: split.finish(aside) for name, split in splits.items()}
    own = sorted(path for path in aside.iterdir() if path.is_file())
    manifest = Manifest(
        vocab_size=vocabulary.size,
        dtype="<u2" if dtype == "<u2" else "<u4",
        inputs=corpus.inputs,
        skipped=corpus.skipped,
        inexact_documents=inexact,
        files=tuple(record_file(aside, path) for path in own),
        splits=records,
        config=config,
    )
    write_atomic(aside / "manifest.json", to_json(manifest) + "\n")


def _check_space(text_bytes: int, itemsize: int, where: Path) -> None:
    # Tokens longer than 8 bytes on average do not occur: less room than this cannot be enough.
    needed, free = text_bytes // 8 * itemsize, free_bytes(where)
    if free < needed:
        what = f"the disk has {free / 1e6:.0f} MB free, the dataset needs at least {needed / 1e6:.0f} MB"
        raise EngineError(what, where=str(where.parent), remedy="free some space or choose another disk")


@dataclass
class _SplitTotals:
    """A split being written, with its counts."""

    writer: SplitWriter
    token_bytes: npt.NDArray[np.uint32]
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    text_bytes: int = 0

    def add(self, tokens: npt.NDArray[Any], flags: npt.NDArray[np.bool_] | None) -> int:
        """Append a document; return the bytes that its trained tokens spell."""
        predicted = tokens[1:] if flags is None else tokens[flags]
        spelled = int(self.token_bytes[predicted].sum(dtype=np.int64))
        self.writer.add(tokens, flags)
        self.documents += 1
        self.tokens += len(tokens)
        self.trained += len(predicted)
        self.text_bytes += spelled
        return spelled

    def finish(self, root: Path) -> SplitRecord:
        files: tuple[FileRecord, ...] = tuple(record_file(root, path) for path in self.writer.close())
        return SplitRecord(documents=self.documents, tokens=self.tokens, trained=self.trained, text_bytes=self.text_bytes, files=files)


def _tokenise(
    corpus: _Corpus, validation: npt.NDArray[np.bool_], vocabulary: Vocabulary, splits: dict[str, _SplitTotals], report: OnProgress
) -> int:
    """Write every document to its split; return how many the tokenizer does not spell exactly."""
    total, done, inexact = int(corpus.sizes.sum()), 0, 0
    special = vocabulary.special
    for chunk in _chunked(corpus.documents()):
        if corpus.template is None:
            encoded = vocabulary.encode_texts([item.document.content.decode() for _, item in chunk])
            for (number, item), ids in zip(chunk, encoded, strict=True):
                tokens = np.array([special.begin, *ids, special.end], dtype=np.uint32)
                spelled = splits["validation" if validation[number] else "train"].add(tokens, None)
                inexact += spelled != len(item.document.content)
        else:
            marked = encode_conversations(vocabulary, [item.segments or [] for _, item in chunk])
            for (number, _), (tokens, flags) in zip(chunk, marked, strict=True):
                flags[0] = False  # nothing predicts the first token
                splits["validation" if validation[number] else "train"].add(tokens, flags)
        done += sum(len(item.document.content) for _, item in chunk)
        report(Progress("tokens", done, total))
    return inexact


def _chunked(documents: Iterator[tuple[int, _Text]]) -> Iterator[list[tuple[int, _Text]]]:
    chunk: list[tuple[int, _Text]] = []
    size = 0
    for entry in documents:
        chunk.append(entry)
        size += len(entry[1].document.content)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
