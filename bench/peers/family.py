"""One side of a comparison over a `transformers` directory: `--side transformers` or `--side surefoot`, to train or to generate.

Both sides load the same weights and see the same tokens. transformers runs each implementation of its experts that works here;
the bench keeps the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import families, llama, protocol


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--side", choices=["transformers", "surefoot"], required=True)
    parser.add_argument("--task", choices=["train", "generate"], default="train")
    parser.add_argument("--experts", default=None, help="transformers: eager, grouped_mm or batched_mm")
    parser.add_argument("--cache", default="dynamic", help="transformers: dynamic or static")


def load(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    if args.side == "surefoot":
        from surefoot.models.hf import import_model

        return import_model(args.model, dtype=dtype)[1]
    from transformers import AutoModelForCausalLM

    extra = {"experts_implementation": args.experts} if args.experts else {}
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **extra)


def own_trainer(args: argparse.Namespace) -> tuple[Any, Callable[[int], Tensor]]:
    """Return Surefoot's model and its training step, balancing losses off as in the peer."""
    from bench.peers.session import config_of, make_step
    from surefoot.models.hf import read_config

    spec = read_config(args.model)[1]
    if spec.moe is not None:
        spec = spec.model_copy(update={"moe": spec.moe.model_copy(update={"balance": "none"})})
    config = config_of(spec, args.precision, families.BATCH, families.SEQUENCE, compiled=args.compile, source=args.model)
    session, train = make_step(config)
    return session.model, lambda index: train(*families.batch(index))


def trainer(model: Any, args: argparse.Namespace) -> Callable[[int], Tensor]:
    """Return the peer's training step: cross-entropy over all tokens, backward, clip, AdamW."""
    model.train()
    optimizer = llama.fused_adamw(list(model.named_parameters()))
    if args.compile:
        for layer in model.model.layers:
            layer.compile()

    def step(index: int) -> Tensor:
        tokens, labels = families.batch(index)
        with torch.autocast("cpu", torch.bfloat16) if args.precision == "autocast" else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), llama.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@torch.inference_mode()
def decode(model: Any, args: argparse.Namespace, tokens: Tensor, new: int) -> list[list[int]]:
    """Continue `tokens` greedily by `new` tokens; return the new ones."""
    if args.side == "surefoot":
        from surefoot.models import generate

        return generate(model, tokens.tolist(), new)
    cache = {"cache_implementation": "static"} if args.cache == "static" else {}
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **cache
    )
    found: list[list[int]] = out[:, tokens.shape[1] :].tolist()
    return found


def serve_generation(channel: protocol.Channel, model: Any, args: argparse.Namespace, **facts: Any) -> None:
    """Answer `{"rows", "length", "new"}` with the seconds and the tokens of one generation."""
    model.eval()
    vocab = model.spec.vocab_size if args.side == "surefoot" else model.config.vocab_size
    channel.say(**facts)
    while (command := channel.hear()) is not None:
        tokens = families.prompt(command["rows"], command["length"], vocab)
        begin = time.perf_counter()
        found = decode(model, args, tokens, command["new"])
        channel.say(seconds=time.perf_counter() - begin, tokens=found, rss=protocol.peak_mb())
    channel.end()


def main() -> None:
    args = protocol.parse(options)
    channel = protocol.open_channel(args.threads)
    version = "surefoot"
    if args.side == "transformers":
        import transformers

        version = f"transformers {transformers.__version__}"
    if args.task == "generate":
        model = load(args, torch.bfloat16 if args.precision == "bfloat16" else torch.float32)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        serve_generation(channel, model, args, parameters=parameters, version=version)
        return
    if args.side == "surefoot":
        model, step = own_trainer(args)
    else:
        model = load(args, torch.bfloat16 if args.precision == "bfloat16" else torch.float32)
        step = trainer(model, args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    protocol.serve(channel, step, tokens_per_step=families.BATCH * families.SEQUENCE, parameters=parameters, version=version)


if __name__ == "__main__":
    main()
