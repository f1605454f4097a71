"""A nanoGPT-style loop, with the Llama architecture of `bench.llama`: one file, plain modules, autocast, fused AdamW.

After karpathy/nanoGPT's `model.py` and `train.py` (one QKV product, SDPA, cross-entropy over all logits), with SwiGLU, RoPE and
RMSNorm in place of GELU, learned positions and LayerNorm.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import llama, protocol


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, shape: llama.Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = (nn.RMSNorm(shape.dim, eps=llama.NORM_EPS) for _ in range(2))
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        parts = self.qkv(self.norm_1(x)).split(dim, dim=-1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Nano(nn.Module):
    def __init__(self, shape: llama.Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=llama.NORM_EPS)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        theta = llama.ROPE_THETA ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.arange(shape.sequence)[:, None] * theta
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load(model: Nano, source: dict[str, Tensor]) -> None:
    state = {
        "embed.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "head.weight": source["lm_head.weight"],
    }
    for index in range(len(model.blocks)):
        theirs, own = f"model.layers.{index}.", f"blocks.{index}."
        state[own + "qkv.weight"] = torch.cat([source[theirs + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        state[own + "out.weight"] = source[theirs + "self_attn.o_proj.weight"]
        for name in ("gate", "up", "down"):
            state[own + f"{name}.weight"] = source[theirs + f"mlp.{name}_proj.weight"]
        state[own + "norm_1.weight"] = source[theirs + "input_layernorm.weight"]
        state[own + "norm_2.weight"] = source[theirs + "post_attention_layernorm.weight"]
    model.load_state_dict(state)


def main() -> None:
    args = protocol.parse()
    channel = protocol.open_channel(args.threads)
    shape = llama.SHAPES[args.size]
    model = Nano(shape)
    load(model, llama.weights(shape))
    if args.precision == "bfloat16":
        model.bfloat16()
    optimizer = llama.fused_adamw(list(model.named_parameters()))
    compiled = torch.compile(model) if args.compile else model

    def step(index: int) -> Tensor:
        tokens, labels = llama.batch(shape, index)
        narrow = torch.autocast("cpu", torch.bfloat16) if args.precision == "autocast" else contextlib.nullcontext()
        with narrow:
            loss = compiled(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), llama.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    parameters = sum(parameter.numel() for parameter in model.parameters())
    protocol.serve(channel, step, tokens_per_step=shape.tokens_per_step, parameters=parameters, version=f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
