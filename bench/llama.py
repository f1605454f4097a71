"""The one model all peers of `train_speed` train: its shape, its weights, its tokens. Needs torch only.

Weights are drawn here under Hugging Face's names and handed to each peer in its own layout, and the tokens are the same, so
that the losses each peer reports must agree: that is how a reader sees that they do the same work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
ROPE_THETA, NORM_EPS = 10_000.0, 1e-5


@dataclass(frozen=True)
class Shape:
    """A Llama: SwiGLU, RoPE, RMSNorm before each branch, no biases, untied head; `batch` rows of `sequence` tokens a step."""

    name: str
    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    batch: int
    sequence: int = 512

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence


SHAPES = {
    "tiny": Shape("tiny", vocab=512, dim=128, layers=2, heads=2, ffn=256, batch=2, sequence=128),
    "10m": Shape("10m", vocab=4096, dim=320, layers=6, heads=5, ffn=864, batch=4),
    "100m": Shape("100m", vocab=8192, dim=768, layers=12, heads=12, ffn=2048, batch=2),
}


def weights(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float32 weights under Hugging Face's Llama names, std 0.02, norms at one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    found = {"model.embed_tokens.weight": draw(shape.vocab, shape.dim)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[prefix + f"self_attn.{name}.weight"] = draw(shape.dim, shape.dim)
        found[prefix + "mlp.gate_proj.weight"] = draw(shape.ffn, shape.dim)
        found[prefix + "mlp.up_proj.weight"] = draw(shape.ffn, shape.dim)
        found[prefix + "mlp.down_proj.weight"] = draw(shape.dim, shape.ffn)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[prefix + f"{name}.weight"] = torch.ones(shape.dim)
    found["model.norm.weight"] = torch.ones(shape.dim)
    found["lm_head.weight"] = draw(shape.vocab, shape.dim)
    return found


def batch(shape: Shape, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, labels) of `step`, each [batch, sequence] int64; labels are the next tokens.

    Tokens are a Markov chain's, so that there is something to learn and losses move.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    jumps = torch.randint(0, 17, (shape.batch, shape.sequence + 1), generator=generator)
    start = torch.randint(0, shape.vocab, (shape.batch, 1), generator=generator)
    tokens = (start + (jumps * 31).cumsum(1)) % shape.vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def fused_adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.AdamW:
    """Return torch's fused AdamW, decaying matrices only."""
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    others = [parameter for _, parameter in named if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
