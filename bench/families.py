"""Models of other families than Llama, as `transformers` directories with random weights that both sides load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH, SEQUENCE, VOCAB = 4, 512, 4096


def config(name: str) -> Any:
    """Return the `transformers` config: `moe` (Qwen3-MoE), `mla` (DeepSeek-V3, dense), `hybrid` (LFM2), `llama` (100M, for decoding)."""
    import transformers as hf

    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "max_position_embeddings": 1024,
        **none,
    }
    if name == "moe":
        return hf.Qwen3MoeConfig(
            **small,
            num_key_value_heads=5,
            head_dim=64,
            intermediate_size=864,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=224,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            output_router_logits=False,
        )
    if name == "mla":
        return hf.DeepseekV3Config(
            **small,
            num_key_value_heads=5,
            intermediate_size=864,
            first_k_dense_replace=6,
            q_lora_rank=160,
            kv_lora_rank=96,
            qk_nope_head_dim=32,
            qk_rope_head_dim=32,
            v_head_dim=64,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=224,
            tie_word_embeddings=False,
        )
    if name == "hybrid":
        kinds = ["conv", "conv", "full_attention"] * 2
        return hf.Lfm2Config(
            **small,
            num_key_value_heads=5,
            intermediate_size=864,
            block_auto_adjust_ff_dim=False,
            layer_types=kinds,
            conv_L_cache=3,
            conv_bias=False,
            tie_word_embeddings=True,
        )
    return hf.LlamaConfig(
        **none,
        vocab_size=8192,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def make(name: str, directory: Path) -> Path:
    """Write the model `name` with random weights (seed 0) and return its directory."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    target = directory / name
    AutoModelForCausalLM.from_config(config(name)).save_pretrained(target)
    return target


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, labels) of `step`, each [batch, sequence]; labels are the next tokens."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(2000 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def prompt(rows: int, length: int, vocab: int) -> Tensor:
    """Return prompts [rows, length] of random tokens."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(7))
