"""litgpt's `GPT`, trained as its `pretrain.py` does: logits, `chunked_cross_entropy`, clip, fused AdamW."""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor

from bench import llama, protocol


def load(model: GPT, shape: llama.Shape, source: dict[str, Tensor]) -> None:
    state = {
        "lm_head.weight": source["lm_head.weight"],
        "transformer.wte.weight": source["model.embed_tokens.weight"],
        "transformer.ln_f.weight": source["model.norm.weight"],
    }
    for layer in range(shape.layers):
        theirs, own = f"model.layers.{layer}.", f"transformer.h.{layer}."
        state[own + "attn.qkv.weight"] = torch.cat([source[theirs + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        state[own + "attn.proj.weight"] = source[theirs + "self_attn.o_proj.weight"]
        for name, other in (("fc_1", "gate"), ("fc_2", "up"), ("proj", "down")):
            state[own + f"mlp.{name}.weight"] = source[theirs + f"mlp.{other}_proj.weight"]
        state[own + "norm_1.weight"] = source[theirs + "input_layernorm.weight"]
        state[own + "norm_2.weight"] = source[theirs + "post_attention_layernorm.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not missing, (missing, unexpected)


def main() -> None:
    args = protocol.parse()
    channel = protocol.open_channel(args.threads)
    shape = llama.SHAPES[args.size]
    config = Config(
        block_size=shape.sequence,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.dim,
        n_query_groups=shape.heads,
        head_size=shape.head_dim,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=llama.NORM_EPS,
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.ffn,
        rope_base=int(llama.ROPE_THETA),
    )
    model = GPT(config)
    load(model, shape, llama.weights(shape))
    model.max_seq_length = shape.sequence
    if args.precision == "bfloat16":
        model.bfloat16()
    optimizer = llama.fused_adamw(list(model.named_parameters()))
    compiled = torch.compile(model) if args.compile else model

    def step(index: int) -> Tensor:
        tokens, labels = llama.batch(shape, index)
        narrow = torch.autocast("cpu", torch.bfloat16) if args.precision == "autocast" else contextlib.nullcontext()
        with narrow:
            logits = compiled(tokens)
            loss = chunked_cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), llama.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    parameters = sum(parameter.numel() for parameter in model.parameters())
    protocol.serve(channel, step, tokens_per_step=shape.tokens_per_step, parameters=parameters, version=f"litgpt {version('litgpt')}")


if __name__ == "__main__":
    main()
