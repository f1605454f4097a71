"""Surefoot on the bench's model, weights and tokens, through the step that `surefoot train` runs."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from bench import llama, protocol
from surefoot.models import ModelSpec, Transformer
from surefoot.models.spec import AttentionSpec, FeedForwardSpec, NormSpec, RopeSpec


def spec_of(shape: llama.Shape) -> ModelSpec:
    return ModelSpec(
        vocab_size=shape.vocab,
        dim=shape.dim,
        layers=shape.layers,
        max_positions=shape.sequence,
        attention=AttentionSpec(heads=shape.heads, kv_heads=shape.heads, head_dim=shape.head_dim),
        ffn=FeedForwardSpec(hidden=shape.ffn),
        norm=NormSpec(eps=llama.NORM_EPS),
        rope=RopeSpec(theta=llama.ROPE_THETA),
    )


def load(model: Transformer, source: dict[str, Tensor]) -> None:
    state = {
        "embed.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "head.weight": source["lm_head.weight"],
    }
    for layer in range(model.spec.layers):
        theirs, own = f"model.layers.{layer}.", f"layers.{layer}."
        state[own + "mixer.qkv.weight"] = torch.cat([source[theirs + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        state[own + "mixer.out.weight"] = source[theirs + "self_attn.o_proj.weight"]
        state[own + "ffn.gate_up.weight"] = torch.cat([source[theirs + f"mlp.{x}_proj.weight"] for x in ("gate", "up")])
        state[own + "ffn.down.weight"] = source[theirs + "mlp.down_proj.weight"]
        state[own + "mixer_norm.weight"] = source[theirs + "input_layernorm.weight"]
        state[own + "ffn_norm.weight"] = source[theirs + "post_attention_layernorm.weight"]
    model.load_state_dict(state)


def main() -> None:
    args = protocol.parse()
    channel = protocol.open_channel(args.threads)
    shape = llama.SHAPES[args.size]
    model = Transformer(spec_of(shape), dtype=torch.float32)
    load(model, llama.weights(shape))
    if args.precision == "bfloat16":
        model.bfloat16()
    optimizer = llama.fused_adamw(list(model.named_parameters()))
    if args.compile:
        for layer in model.layers:
            layer.compile()

    def step(index: int) -> Tensor:
        tokens, labels = llama.batch(shape, index)
        narrow = torch.autocast("cpu", torch.bfloat16) if args.precision == "autocast" else contextlib.nullcontext()
        with narrow:
            loss = model(tokens, labels=labels, normaliser=labels.numel())
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), llama.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.cross_entropy

    parameters = sum(parameter.numel() for parameter in model.parameters())
    protocol.serve(channel, step, tokens_per_step=shape.tokens_per_step, parameters=parameters, version="surefoot")


if __name__ == "__main__":
    main()
