from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from surefoot.core.errors import DataError, ModelError
from surefoot.data.config import TokenizerConfig
from surefoot.data.tokenizer import CONTROL_TOKENS, Vocabulary, check_vocabulary, open_tokenizer, train_tokenizer

SAMPLE = ["def f(x):\n    return x + 1\n" * 3, "The quick brown fox, größer als 数据 🙂. " * 5, "12345 67890\t\t\n\n  end"] * 4


@functools.cache
def trained(size: int = 320) -> Vocabulary:
    return train_tokenizer(SAMPLE, size)


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from([*CONTROL_TOKENS, " ", "\n", "a", "é", "<|"])).map("".join)))
def test_every_text_round_trips_and_spells_its_bytes(text: str) -> None:
    """Whatever the text, the names of control tokens included: decoding gives it back, and its tokens spell its bytes."""
    vocabulary = trained()
    text = text.encode("utf-8", "ignore").decode()
    (ids,) = vocabulary.encode_texts([text])
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == text
    table = vocabulary.spellings()
    assert b"".join(table[token] for token in ids) == text.encode()
    assert not set(ids) & {vocabulary.special.begin, vocabulary.special.end, vocabulary.special.pad}


def test_control_tokens_count_in_markup_only() -> None:
    vocabulary = trained()
    assert vocabulary.encode_markup(["<|end|>"]) == [[vocabulary.special.end]]
    assert len(vocabulary.encode_texts(["<|end|>"])[0]) > 1
    assert vocabulary.encode_markup(["<|end|>"]) == [[vocabulary.special.end]]


def test_training_is_deterministic_and_ignores_order() -> None:
    first = trained().tokenizer.to_str()
    assert train_tokenizer(SAMPLE, 320).tokenizer.to_str() == first
    assert train_tokenizer(SAMPLE[::-1], 320).tokenizer.to_str() == first


def test_the_vocabulary_is_bytes_control_tokens_and_merges() -> None:
    assert trained().size == 320
    table = train_tokenizer([], 261).spellings()
    assert sorted(spelling for spelling in table if spelling) == [bytes([byte]) for byte in range(256)]
    assert len(table) == 256 + len(CONTROL_TOKENS)


def test_saved_and_opened_it_is_the_same(tmp_path: Path) -> None:
    vocabulary = Vocabulary(trained().tokenizer, trained().special, trained().names, "{{ messages }}")
    vocabulary.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = open_tokenizer(TokenizerConfig(path=str(path)))
        assert again.tokenizer.to_str() == vocabulary.tokenizer.to_str()
        assert (again.special, again.names, again.template) == (vocabulary.special, vocabulary.names, vocabulary.template)


def test_transformers_reads_it_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained().save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def größer(x): 🙂\n\n   return 数据 12345"
    assert theirs(text, add_special_tokens=False)["input_ids"] == trained().encode_texts([text])[0]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert theirs.decode(theirs(text)["input_ids"]) == text


def sentencepiece_like(folder: Path, *, fallback: bool) -> Path:
    """A Llama-2-like vocabulary: spaces as U+2581, bytes as <0x..>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if fallback), "▁", "a", "b", "▁a"]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, [("▁", "a")], unk_token="<unk>", byte_fallback=fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    return path


def test_a_byte_fallback_vocabulary_spells_its_bytes(tmp_path: Path) -> None:
    vocabulary = open_tokenizer(TokenizerConfig(path=str(sentencepiece_like(tmp_path, fallback=True))))
    text = "a a é\n🙂 b"
    (ids,) = vocabulary.encode_texts([text])
    table = vocabulary.spellings()
    assert b"".join(table[token] for token in ids) == text.encode()
    assert (vocabulary.special.begin, vocabulary.special.end, vocabulary.special.pad) == (1, 2, 2)


def test_a_vocabulary_that_cannot_spell_bytes_is_refused(tmp_path: Path) -> None:
    vocabulary = open_tokenizer(TokenizerConfig(path=str(sentencepiece_like(tmp_path, fallback=False))))
    with pytest.raises(DataError, match="does not spell text byte by byte"):
        vocabulary.spellings()


def test_truncation_and_padding_of_a_given_tokenizer_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(trained().tokenizer.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = open_tokenizer(TokenizerConfig(path=str(tmp_path), end="<|end|>"))
    assert vocabulary.encode_texts(SAMPLE) == trained().encode_texts(SAMPLE)


@pytest.mark.parametrize(
    ("content", "given", "what"),
    [
        (None, {}, "no such tokenizer"),
        (b"{}", {}, "is not a tokenizer.json"),
        (b"\xff\xfe", {}, "is not a tokenizer.json"),
        ("own", {}, "does not say which token ends a document"),
        ("own", {"end": "<|ende|>"}, "did you mean '<|end|>'"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | str | None, given: dict[str, str], what: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(trained().tokenizer.to_str().encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        open_tokenizer(TokenizerConfig(path=str(path), **given))
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_with_too_small_a_vocabulary_is_refused() -> None:
    check_vocabulary(300, 300, "here")
    check_vocabulary(300, 512, "here")
    with pytest.raises(ModelError, match=r"set model.vocab_size = 300"):
        check_vocabulary(300, 299, "here")


def test_byte_level_is_recognised_wherever_it_stands() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġ": 1, "<e>": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens(["<e>"])
    table = Vocabulary(tokenizer, trained().special, {}).spellings()
    assert table == [b"a", b" ", b""]
