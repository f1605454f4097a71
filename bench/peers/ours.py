"""Surefoot on the bench's model, weights and tokens, through the step that `surefoot train` runs."""

from __future__ import annotations

import torch
from torch import Tensor

from bench import llama, protocol
from bench.peers.session import config_of, make_step
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
    session, train = make_step(config_of(spec_of(shape), args.precision, shape.batch, shape.sequence, compiled=args.compile))
    load(session.model, llama.weights(shape))
    masters = session.state.optimizer.state.get("master", {})
    for name, value in session.model.state_dict().items():
        if name in masters:
            masters[name].copy_(value)

    def step(index: int) -> Tensor:
        return train(*llama.batch(shape, index))

    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    protocol.serve(channel, step, tokens_per_step=shape.tokens_per_step, parameters=parameters, version="surefoot")


if __name__ == "__main__":
    main()
