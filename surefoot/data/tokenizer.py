"""Tokenizers: byte-level BPE trained here, or any byte-exact `tokenizer.json`.

A token spells a fixed string of bytes; control tokens spell none. Bits per byte, the raw text of a split and the check that
tokenising loses nothing all derive from that one table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from surefoot.core.errors import DataError, ModelError, nearest
from surefoot.data.config import TokenizerConfig

# Words with a leading space or punctuation mark, digits in threes, runs of marks, line ends, spaces: the pattern of Llama 3, which
# spends about 5 % fewer tokens on source code than GPT-2's.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (BEGIN, END, PAD, TURN_BEGIN, TURN_END)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the control tokens around a document: `begin` predicts its first token, `end` is predicted after its last."""

    begin: int
    end: int
    pad: int


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with what the data needs to know of it; `template` is the chat template that came with it."""

    tokenizer: Tokenizer
    special: SpecialTokens
    names: dict[str, str]  # bos_token, eos_token, pad_token, as in a tokenizer_config.json
    template: str | None = None
    where: str = "tokenizer"

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """The texts that stand for control tokens."""
        return tuple(sorted(token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special))

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise plain texts on all cores; a control token's name inside a text is ordinary text."""
        return self._encode(texts, plain=True)

    def encode_markup(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise rendered chat text on all cores; the names of control tokens become those tokens."""
        return self._encode(texts, plain=False)

    def _encode(self, texts: Sequence[str], *, plain: bool) -> list[list[int]]:
        self.tokenizer.encode_special_tokens = plain
        try:
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        finally:
            self.tokenizer.encode_special_tokens = False

    def spellings(self) -> list[bytes]:
        """Return, by token id, the bytes of text that each token stands for; control tokens and unused ids stand for none.

        Raises `DataError` for a tokenizer whose tokens do not spell bytes (WordPiece, or a vocabulary without byte fallback).
        """
        described = json.loads(self.tokenizer.to_str())
        added = {int(index): token for index, token in self.tokenizer.get_added_tokens_decoder().items()}
        if _mentions(described, "ByteLevel"):
            spell = _spell_byte_level
        elif described["model"].get("byte_fallback"):
            spell = _spell_with_fallback
        else:
            raise DataError(
                f"the tokenizer ({described['model'].get('type')}) does not spell text byte by byte",
                where=self.where,
                remedy="use a byte-level or byte-fallback BPE tokenizer, or let prepare train one",
            )
        table = [b""] * self.size
        for text, index in self.tokenizer.get_vocab(with_added_tokens=False).items():
            table[index] = spell(text)
        for index, token in added.items():
            table[index] = b"" if token.special else token.content.encode()
        return table

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja, as `transformers` reads them."""
        (directory / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.names}
        (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if self.template is not None:
            (directory / "chat_template.jinja").write_text(self.template, encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int, template: str | None = None) -> Vocabulary:
    """Train byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909) on `texts`: every text round-trips, nothing is unknown.

    The same texts give the same tokenizer. The vocabulary is smaller than `vocab_size` when the texts have too few distinct pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in CONTROL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    return Vocabulary(tokenizer, _special(tokenizer, names, "tokenizer"), names, template)


def open_tokenizer(config: TokenizerConfig) -> Vocabulary:
    """Open the tokenizer at `config.path`: a tokenizer.json (and the tokenizer_config.json beside it), or a directory of them.

    Raises `DataError` when it is missing or broken, or when it does not say which token ends a document.
    """
    path = Path(config.path or "").expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError("no such tokenizer", where=str(path), remedy="give a tokenizer.json, or leave tokenizer.path out to train one")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:  # what `tokenizers` raises for every malformed file
        raise DataError(f"is not a tokenizer.json: {error}", where=str(path), remedy="save it again with the tokenizers library") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = _read_description(path.with_name("tokenizer_config.json"))
    asked = {"bos_token": config.begin, "eos_token": config.end, "pad_token": config.pad}
    names = {role: name for role, given in asked.items() if (name := given or _token_name(described.get(role)))}
    if "eos_token" not in names:
        remedy = 'set tokenizer.end = "<|endoftext|>", or whatever token ends a document'
        raise DataError("does not say which token ends a document", where=str(path), remedy=remedy)
    names = {"bos_token": names["eos_token"], "pad_token": names["eos_token"], **names}
    template_file = path.with_name("chat_template.jinja")
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else described.get("chat_template")
    template = template if isinstance(template, str) else None
    return Vocabulary(tokenizer, _special(tokenizer, names, str(path)), names, template, str(path))


def check_vocabulary(dataset_size: int, model_size: int, where: str) -> None:
    """Raise `ModelError` when a model of `model_size` tokens cannot read a dataset whose token ids go up to `dataset_size` - 1."""
    if model_size < dataset_size:
        raise ModelError(
            f"the model knows {model_size} tokens but the dataset's tokenizer has {dataset_size}",
            where=where,
            remedy=f"set model.vocab_size = {dataset_size} (or more), or prepare the data with the model's tokenizer",
        )


def _special(tokenizer: Tokenizer, names: dict[str, str], where: str) -> SpecialTokens:
    ids = {}
    for role, name in names.items():
        index = tokenizer.token_to_id(name)
        if index is None:
            known = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
            raise DataError(f"{role} '{name}' is not one of its tokens", where=where, remedy=nearest(name, known))
        ids[role] = index
    return SpecialTokens(begin=ids["bos_token"], end=ids["eos_token"], pad=ids["pad_token"])


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        described = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"is not valid JSON: {error}", where=str(path), remedy="restore it, or remove it and set tokenizer.end") from None
    return described if isinstance(described, dict) else {}


def _token_name(value: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object with its `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _mentions(node: Any, kind: str) -> bool:
    if isinstance(node, dict):
        if node.get("type") == kind:
            return True
        within = ("pre_tokenizer", "decoder", "pretokenizers", "decoders")
        return any(_mentions(node[name], kind) for name in within if name in node)
    return isinstance(node, list) and any(_mentions(inner, kind) for inner in node)


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes (GPT-2): printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}


_ALPHABET = _byte_alphabet()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # a control token kept in the model's own vocabulary
        return b""


def _spell_with_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
