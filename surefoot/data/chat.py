"""Conversations to tokens, with a mark on what the assistant says.

A rendered conversation is cut into segments: what the assistant wrote (its end token included), and all the rest. Each segment is
tokenised on its own, as at inference, where the prompt is tokenised first and the answer is appended token by token. So for every
answer the ids before it are the ids of the segments a prompt consists of, no token ever straddles the border between prompt and
answer, and decoding the whole gives the rendered text. Where no answer begins with white space the ids also equal those of the
whole text tokenised at once, for a template that puts a control token after each answer.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.data.tokenizer import Vocabulary

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Unicode noncharacters: they never stand in text meant for interchange, so they can bracket what a template marks as generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered conversation; `trained` when the assistant wrote it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja2 chat template as `transformers` writes them; `variables` are bos_token, eos_token and the like.

    `controls` are the texts of control tokens: a message that holds one is refused, because it could forge a turn.
    """

    source: str
    variables: dict[str, str]
    controls: tuple[str, ...]
    where: str = "chat template"

    @staticmethod
    def of(vocabulary: Vocabulary, source: str | None = None) -> ChatTemplate:
        """Return the template `source`, or else the vocabulary's own, or else ChatML.

        Raises `DataError` for ChatML with a tokenizer that lacks its control tokens, and for a template that is not valid Jinja2.
        """
        source = source or vocabulary.template or CHATML
        if source == CHATML and not {"<|im_start|>", "<|im_end|>"} <= set(vocabulary.control_tokens):
            remedy = "give chat_template = FILE, a Jinja2 template for this tokenizer"
            raise DataError("the tokenizer has no chat template, and not the tokens of ChatML", where=vocabulary.where, remedy=remedy)
        template = ChatTemplate(source, vocabulary.names, vocabulary.control_tokens)
        _ = template.compiled  # refuses an invalid template here rather than at the first conversation
        return template

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The template, in a sandbox with what `transformers` offers to templates. Raises `DataError` when it is not valid Jinja2."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            what = f"line {error.lineno} is not valid Jinja2: {error.message}"
            raise DataError(what, where=self.where, remedy="correct the template") from None

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself says what the assistant wrote, with ``{% generation %}`` blocks."""
        return _GENERATION_TAG.search(self.source) is not None

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that asks the assistant for its next turn."""
        return _unmarked(self._render(messages, prompt=True))

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """Cut the rendered conversation into segments.

        Raises `DataError` when a message holds a control token, or the template refuses the conversation or rewrites earlier turns.
        """
        for index, message in enumerate(messages):
            texts = list(_texts(message))
            forged = next((name for name in (*self.controls, _OPEN, _CLOSE) if name and any(name in text for text in texts)), None)
            if forged is not None:
                raise DataError(f"message {index} holds the control token {forged!r}", remedy="remove it from the text")
        found = self._marked(messages) if self.marks_generation else self._by_prefix(messages)
        if not any(segment.trained and segment.text for segment in found):
            raise DataError("the template shows nothing that the assistant wrote", remedy="check the roles, or the template")
        return found

    def _marked(self, messages: Sequence[Message]) -> list[Segment]:
        pieces: list[Segment] = []
        for piece in self._render(messages).split(_OPEN):
            inside, sign, after = piece.partition(_CLOSE)
            pieces += [Segment(inside, True), Segment(after, False)] if sign else [Segment(piece, False)]
        return [piece for piece in pieces if piece.text]

    def _by_prefix(self, messages: Sequence[Message]) -> list[Segment]:
        """Find each answer as what the conversation up to it adds to the prompt before it."""
        whole, done = self._render(messages), 0
        pieces: list[Segment] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], prompt=True)
            upto = self._render(messages[: index + 1])
            if not upto.startswith(before) or not whole.startswith(upto):
                raise DataError(
                    f"the template changes earlier turns when message {index} is added, so its tokens cannot be told apart",
                    remedy="mark the answer in the template with {% generation %} ... {% endgeneration %}",
                )
            end = len(before) + self._answer_length(upto[len(before) :])
            pieces += [Segment(whole[done : len(before)], False), Segment(whole[len(before) : end], True)]
            done = end
        return [piece for piece in [*pieces, Segment(whole[done:], False)] if piece.text]

    def _answer_length(self, text: str) -> int:
        """Cut what a template adds after the answer's last control token (ChatML: a line end), which no model has to produce."""
        ends = [place + len(name) for name in self.controls if (place := text.rfind(name)) >= 0]
        return max(ends, default=len(text))

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return self.compiled.render(messages=list(messages), add_generation_prompt=prompt, **self.variables)
        except (jinja2.TemplateError, TypeError) as error:
            what = f"the chat template refuses the conversation: {error}"
            raise DataError(what, remedy="check the order and the roles of its turns") from None


def encode_conversations(
    vocabulary: Vocabulary, conversations: Sequence[Sequence[Segment]]
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
    """Tokenise each conversation's segments; return its tokens, and which of them are to be predicted."""
    encoded = iter(vocabulary.encode_markup([segment.text for segments in conversations for segment in segments]))
    made = []
    for segments in conversations:
        pieces = [np.array(next(encoded), dtype=np.uint32) for _ in segments]
        flags = [np.full(len(piece), segment.trained) for piece, segment in zip(pieces, segments, strict=True)]
        made.append((np.concatenate(pieces), np.concatenate(flags)))
    return made


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: brackets what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_bracket"), [], [], body).set_lineno(line)

    @staticmethod
    def _bracket(caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
