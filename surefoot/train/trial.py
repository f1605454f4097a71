"""A run made small: a model of the same kinds of layers, a few rows, so that a comparison takes seconds."""

from __future__ import annotations

import math
from typing import Any

from surefoot.models import ModelSpec
from surefoot.parallel import Layout
from surefoot.train.config import TrainConfig

TOKENS = 48  # of a row, at least
HEAD_DIM = 8


def shrunk(config: TrainConfig) -> TrainConfig:
    """Return `config` with a small model of the same structure, every kind of layer kept, and rows that its layout can cut."""
    layout = config.layout
    unit = layout.chunks * layout.tensor
    length = -(-TOKENS // unit) * unit
    if config.model.conv is not None:  # a piece must be as long as the convolution reaches
        length = max(length, unit * (config.model.conv.width - 1))
    micro_batches = max(2, layout.pipeline) if config.train.micro_batch_size or layout.pipeline > 1 else 1
    if layout.schedule == "interleaved":
        micro_batches = -(-micro_batches // layout.pipeline) * layout.pipeline
    rows = layout.data * micro_batches * 2
    train: dict[str, Any] = {"batch_size": rows, "micro_batch_size": 2 if micro_batches > 1 else None, "init_from": None, "threads": 1}
    return config.model_copy(
        update={
            "run": "trial",
            "model": shrunk_model(config.model, layout, length),
            "data": config.data.model_copy(update={"sequence_length": length}),
            # A trial takes few steps of the run's schedule, from its start; a warm-up from zero would hide the first update.
            "train": config.train.model_copy(update=train),
            "schedule": config.schedule.model_copy(update={"warmup_steps": min(1, config.schedule.warmup_steps)}),
            "trackers": (),
        }
    )


def shrunk_model(spec: ModelSpec, layout: Layout, length: int) -> ModelSpec:
    """Return a small model with the layer kinds, biases, norms and ratios of `spec` that `layout` can cut."""
    kinds = _kinds(spec)
    stages = layout.pipeline * (2 if layout.schedule == "zbv" else layout.stages_per_rank)
    layers = -(-max(2, stages) // len(kinds)) * len(kinds)
    ways = layout.tensor * (layout.context if layout.attention == "ulysses" else 1)
    update: dict[str, Any] = {
        "vocab_size": max(61, 8 * layout.tensor + 5),
        "dim": 16 * layout.tensor if spec.conv is not None else 32,
        "layers": layers,
        "max_positions": max(64, length),
        "pattern": tuple(mixer for mixer, _ in kinds),
        "ffn_pattern": tuple(ffn for _, ffn in kinds),
    }
    for name in ("rope", "rope_sliding"):
        rope = getattr(spec, name)
        if rope is not None:
            update[name] = rope.model_copy(update={"original_positions": min(rope.original_positions, length // 3)})
    if spec.attention is not None:
        heads = spec.attention
        kv = ways * (1 if heads.kv_heads == 1 or ways > 1 else 2)
        size = HEAD_DIM if int(HEAD_DIM * heads.rotary_fraction) % 2 == 0 and int(HEAD_DIM * heads.rotary_fraction) else heads.head_dim
        window = None if heads.window is None else min(heads.window, length // 4)
        group = min(heads.heads // heads.kv_heads, 3)
        update["attention"] = heads.model_copy(update={"heads": kv * group, "kv_heads": kv, "head_dim": size, "window": window})
    if spec.mla is not None:
        small = {
            "heads": 2 * ways,
            "kv_rank": 8,
            "nope_dim": 6,
            "rope_dim": 4,
            "value_dim": 5,
        }
        update["mla"] = spec.mla.model_copy(update=small | ({"q_rank": 12} if spec.mla.q_rank is not None else {}))
    if spec.ffn is not None:
        update["ffn"] = spec.ffn.model_copy(update={"hidden": 12 * layout.tensor})
    if spec.moe is not None:
        moe = spec.moe
        experts = math.lcm(layout.expert, moe.groups) * (2 if moe.groups > 1 or layout.expert > 1 else 4)
        top_k = min(moe.top_k, 3, experts // moe.groups * moe.top_groups)
        shared = 10 if moe.shared_hidden else 0
        update["moe"] = moe.model_copy(update={"experts": experts, "top_k": top_k, "hidden": 12, "shared_hidden": shared})
    return ModelSpec.model_validate(spec.model_copy(update=update).model_dump())


def _kinds(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the pairs of mixer and feed-forward that occur, in the order in which they first do."""
    found = dict.fromkeys((spec.mixer(layer), spec.feed_forward(layer)) for layer in range(spec.layers))
    return list(found)
