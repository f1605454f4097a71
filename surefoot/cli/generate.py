"""`surefoot generate`: continue a prompt."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from surefoot.cli.face import PATH, common, show
from surefoot.core import terminal


@click.command("generate")
@click.argument("model", type=PATH)
@click.argument("prompt", required=False)
@click.option("--tokens", default=100, show_default=True, type=click.IntRange(min=1), help="Most tokens to add.")
@click.option("--temperature", default=0.8, show_default=True, type=float, help="0 takes the likeliest token each time.")
@click.option("--top-k", default=0, type=int, help="Choose among this many likeliest tokens.  [default: all]")
@click.option("--top-p", default=1.0, type=float, help="Choose among the likeliest tokens of this total probability.  [default: 1]")
@click.option("--seed", default=0, show_default=True, help="Same seed, same text.")
@click.option("--tokenizer", type=PATH, help="tokenizer.json, when the model has none beside it.")
@common
def generate_command(
    model: Path,
    prompt: str | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Continue PROMPT (or standard input) with MODEL: a run, a checkpoint, a model directory or a transformers directory."""
    from surefoot.cli.opening import open_model, prompt_tokens
    from surefoot.core.config import parse
    from surefoot.models import Sampling, generate

    sampling = parse(Sampling, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}, where="command line")
    opened = open_model(model)
    vocabulary = opened.vocabulary(tokenizer)
    text = prompt if prompt is not None else ("" if sys.stdin.isatty() else sys.stdin.read())
    start = time.perf_counter()
    (new,) = generate(opened.model, prompt_tokens(vocabulary, [text]), tokens, sampling=sampling, stop=[vocabulary.special.end])
    seconds = time.perf_counter() - start
    added = vocabulary.tokenizer.decode(new)
    if as_json:
        show(True, "", (), {"prompt": text, "text": added, "tokens": len(new), "seconds": seconds, "tokens_per_s": len(new) / seconds})
        return
    print(text + added)
    terminal.note(f"{len(new)} tokens, {len(new) / seconds:.0f} tokens/s")
