"""One step of training of a small model under a layout, in float64: what the matrix of models and layouts is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data import Batch
from surefoot.models import ModelSpec
from surefoot.models.spec import AttentionSpec, ConvSpec, FeedForwardSpec, MLASpec, MoESpec, NormSpec, RopeSpec
from surefoot.parallel import GradientSync, Layout, Mesh, Processes, make_mesh, parallelise
from surefoot.parallel.pipeline import Pipeline, Rows
from surefoot.train.config import OptimizerConfig
from surefoot.train.feed import Feed
from surefoot.train.optimizer import Optimizer

ROWS, TOKENS, VOCAB, MICRO_BATCHES = 8, 32, 37, 2

_ATTENTION = AttentionSpec(heads=4, kv_heads=4, head_dim=8)
_FFN = FeedForwardSpec(hidden=24)
_BASE = {"vocab_size": VOCAB, "dim": 16, "max_positions": 64}

SPECS: dict[str, ModelSpec] = {
    "gqa": ModelSpec(
        **_BASE,
        layers=4,
        attention=AttentionSpec(heads=8, kv_heads=4, head_dim=6, qkv_bias=True, out_bias=True, qk_norm="head"),
        ffn=FeedForwardSpec(hidden=24, bias=True),
        tied_embeddings=True,
    ),
    "full_norm": ModelSpec(
        **_BASE,
        layers=4,
        attention=AttentionSpec(heads=4, kv_heads=4, head_dim=4, qk_norm="full"),
        ffn=_FFN,
        norm=NormSpec(placement="post"),
    ),
    "gemma": ModelSpec(
        **_BASE,
        layers=4,
        pattern=("sliding", "attention"),
        attention=AttentionSpec(heads=4, kv_heads=4, head_dim=4, window=9, softcap=20.0),
        ffn=FeedForwardSpec(hidden=24, activation="gelu_tanh"),
        norm=NormSpec(placement="sandwich", offset=True),
        embedding_scale=4.0,
        logit_softcap=10.0,
        tied_embeddings=True,
    ),
    "mla": ModelSpec(
        **_BASE,
        layers=4,
        pattern=("mla",),
        mla=MLASpec(heads=4, q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
        ffn=_FFN,
        rope=RopeSpec(interleaved=True),
    ),
    "moe": ModelSpec(
        **_BASE,
        layers=4,
        ffn_pattern=("dense", "moe"),
        attention=_ATTENTION,
        ffn=_FFN,
        moe=MoESpec(experts=8, top_k=2, hidden=12, shared_hidden=10, z_coefficient=1e-2, aux_coefficient=0.1),
    ),
    "deepseek": ModelSpec(
        **_BASE,
        layers=4,
        pattern=("mla",),
        ffn_pattern=("dense", "moe"),
        mla=MLASpec(heads=4, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=8),
        ffn=_FFN,
        moe=MoESpec(experts=8, top_k=3, hidden=12, router="sigmoid", groups=4, top_groups=2, balance="bias", bias_rate=0.01, scale=2.0),
    ),
    "hybrid": ModelSpec(
        **_BASE,
        layers=4,
        pattern=("conv", "conv", "attention", "conv"),
        attention=_ATTENTION,
        conv=ConvSpec(width=4, bias=True),
        ffn=_FFN,
        tied_embeddings=True,
    ),
}


def rows(step: int) -> Batch:
    """Return the rows of a step: packed documents, padding, and labels that are not all trained."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    documents, positions = torch.zeros(ROWS, TOKENS, dtype=torch.int32), torch.arange(TOKENS).repeat(ROWS, 1)
    for row in range(ROWS):
        for cut in torch.randint(1, TOKENS, (row % 4,), generator=generator).sort().values.tolist():
            documents[row, cut:] += 1
            positions[row, cut:] = torch.arange(TOKENS - cut)
        labels[row, torch.rand(TOKENS, generator=generator) < 0.1 * (row % 3)] = -100
    documents[-1, TOKENS - 5 :], labels[-1, TOKENS - 5 :] = -1, -100
    return Batch(tokens, labels, positions, documents, int((labels != -100).sum()), ROWS * TOKENS)


@dataclass(frozen=True)
class Outcome:
    """Of two steps: losses, gradient norms, then by name the first gradients and the last weights, and the router's counts."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]


def outcome(
    processes: Processes,
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    mesh: Mesh | None = None,
) -> Outcome:
    """Train `spec` for some steps under `layout`; every process gets the whole tensors of its stage."""
    layout.check_model(spec, TOKENS)
    mesh = mesh or make_mesh(layout, processes)
    parallel = parallelise(spec, mesh, 3, dtype=dtype)
    feed = Feed(layout, mesh.at)
    micro_batches = max(MICRO_BATCHES, layout.pipeline) if layout.pipeline > 1 else MICRO_BATCHES
    pipeline = Pipeline(parallel.model, mesh) if layout.pipeline > 1 else None
    sync = GradientSync(parallel.parameters, parallel.reductions(), micro_batches, sharded=layout.shard > 1)
    # Gradients that are zero but for rounding (a key's bias) would be blown up by a small eps to updates of their own.
    optimizer = Optimizer(parallel.parameters, parallel.decls, spec, OptimizerConfig(lr=1e-2, eps=1e-5), parallel)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        whole = rows(step)
        mine = ROWS // layout.data
        size = mine // micro_batches
        loss = torch.zeros((), dtype=torch.float64)
        counts = {name: torch.zeros_like(block.ffn.counts) for name, block in parallel.model.layers.items() if hasattr(block.ffn, "counts")}

        def count(layers: range, counts: dict[str, Tensor] = counts) -> None:
            for name, total in counts.items():
                if int(name) in layers:
                    total += parallel.model.layers[name].ffn.counts

        pieces = [slice(start, start + size) for start in range(feed.index * mine, (feed.index + 1) * mine, size)]
        batches = [feed.split(Batch(whole.tokens[p], whole.labels[p], whole.positions[p], whole.documents[p], size, size)) for p in pieces]
        if pipeline is not None:
            parts = [Rows(batch.tokens, batch.positions, batch.documents, batch.labels) for batch in batches]
            loss = pipeline.train(parts, whole.trained, sync, count) * float(feed.counts)
        else:
            for micro, batch in enumerate(batches):
                sync.start(micro)
                found = parallel.model(batch.tokens, batch.positions, batch.documents, labels=batch.labels, normaliser=whole.trained)
                count(range(spec.layers))
                found.total.backward()
                loss += found.cross_entropy.double() * float(feed.counts)
        reduced = sync.finish()
        norms.append(float(parallel.norm(reduced)))
        losses.append(float(processes.sum(loss)))
        if step == 0:
            gradients = {
                name: parallel.whole(name, torch.zeros_like(parallel.take(name, parallel.parameters[name])) if one is None else one).clone()
                for name, one in reduced.items()
            }
        optimizer.step(reduced, lr=1e-2, clip=min(1.0, 0.1 / norms[-1]))
        sync.clear()
        if counts:
            stacked = torch.stack(list(counts.values()))
            if mesh.sums["tokens"] is not None:
                torch.distributed.all_reduce(stacked, group=mesh.sums["tokens"])
            parallel.model.update_balance(list(stacked))
    state = {name: parallel.whole(name, value).clone() for name, value in optimizer.parameters.items()}
    biases = {name: value.clone() for name, value in parallel.model.named_buffers() if name.endswith("router_bias")}
    return Outcome(losses, norms, gradients, state, biases)


def worst(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """Return the largest relative error and where it is: of a tensor's largest element."""
    errors = [(abs(a - b) / abs(b), f"loss {i}") for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True))]
    errors += [(abs(a - b) / abs(b), f"norm {i}") for i, (a, b) in enumerate(zip(found.norms, expected.norms, strict=True))]
    for kind in ("gradients", "weights", "biases"):
        for name, tensor in getattr(found, kind).items():
            other = getattr(expected, kind)[name]
            errors.append((float((tensor - other).abs().max() / other.abs().max().clamp(min=1e-30)), f"{kind} {name}"))
    return max(errors)
