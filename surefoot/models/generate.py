"""Autoregressive generation with a cache: greedy or sampled, left-padded batches, stop tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from surefoot.core.config import Config
from surefoot.core.errors import InputError
from surefoot.core.random import generator
from surefoot.models.transformer import Transformer


class Sampling(Config):
    """How the next token is chosen; temperature 0 is greedy."""

    temperature: NonNegativeFloat = 0.0
    top_k: int = Field(0, ge=0)  # 0 = all
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int = 0


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    on_token: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Continue each prompt (token ids) by at most `max_new_tokens`, ending after a token of `stop`; return the new tokens only.

    Row i's random numbers depend on (seed, i, step) alone. `on_token` is called with each step's tokens [B].
    """
    sampling = sampling or Sampling()
    if not prompts or min(map(len, prompts)) == 0:
        raise InputError("a prompt is empty", where="generate", remedy="give at least one token, e.g. the end-of-text token")
    outside = next((token for prompt in prompts for token in prompt if not 0 <= token < model.spec.vocab_size), None)
    if outside is not None:
        raise InputError(
            f"token {outside} is outside the model's vocabulary of {model.spec.vocab_size}",
            where="generate",
            remedy="use the tokenizer the model was trained with",
        )
    tokens, positions, documents = _pad(prompts, model.embed.weight.device)
    batch, width = tokens.shape
    cache = model.new_cache(batch, width + max_new_tokens)
    done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    stops = torch.tensor(list(stop), dtype=torch.int64, device=tokens.device)
    chosen: list[Tensor] = []
    for step in range(max_new_tokens):
        hidden, _ = model.hidden(tokens, positions, documents, cache)
        token = _choose(model.logits(hidden[:, -1]), sampling, step)
        chosen.append(token)
        if on_token is not None:
            on_token(token)
        if len(stop):
            done |= torch.isin(token, stops)
            if bool(done.all()):
                break
        tokens, positions = token[:, None], positions[:, -1:] + 1
        documents = None if documents is None else documents[:, -1:]
    return [_until(row, set(stop)) for row in torch.stack(chosen, dim=1).tolist()] if chosen else [[] for _ in prompts]


def _until(row: list[int], stop: set[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(row) if token in stop), len(row))
    return row[:end]


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Left-pad to one width: tokens, positions (0 at each prompt's first token) and documents (None when nothing is padded)."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    documents = torch.full((len(prompts), width), -1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        documents[row, width - len(prompt) :] = 0
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    positions = (torch.arange(width)[None] - (width - lengths)[:, None]).clamp(min=0)
    padded = bool((documents < 0).any())
    return tokens.to(device), positions.to(device), documents.to(device) if padded else None


def _choose(logits: Tensor, sampling: Sampling, step: int) -> Tensor:
    """logits: [B, V] -> tokens [B]."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.masked_fill((before >= sampling.top_p).scatter(-1, index, before >= sampling.top_p), float("-inf"))
    draws = [torch.rand(1, generator=generator(sampling.seed, "sample", row, step)) for row in range(logits.shape[0])]
    cumulative = logits.softmax(-1).cumsum(-1)
    target = torch.stack(draws).to(logits.device) * cumulative[:, -1:]
    # right: the first token whose cumulative sum exceeds the draw, so that a draw of 0 never takes a token of probability 0.
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
