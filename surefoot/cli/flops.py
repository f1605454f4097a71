"""`surefoot flops`: what a model costs, before it is built; and what a budget of FLOPs should buy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.cli.face import PATH, common, show
from surefoot.core.errors import InputError
from surefoot.core.terminal import quantity

if TYPE_CHECKING:
    from surefoot.models import ModelSpec
    from surefoot.plan import ScalingLaw
    from surefoot.plan.suggestion import Suggestion


@click.command("flops")
@click.argument("model", type=PATH, required=False)
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens a row.  [default: the config's, else the model's longest]")
@click.option("--budget", type=float, help="Training FLOPs to spend, e.g. 1e18: suggests parameters and tokens.")
@click.option("--runs", type=PATH, help="With --budget: fit the scaling law to the runs under this folder.")
@common
def flops_command(model: Path | None, sequence_length: int | None, budget: float | None, runs: Path | None, as_json: bool) -> None:
    """Count parameters, FLOPs per token and memory of MODEL: a training TOML, a model directory or a transformers directory."""
    if model is None and budget is None:
        raise click.UsageError("give a MODEL, or --budget")
    if runs is not None and budget is None:
        raise click.UsageError("--runs needs --budget")
    result: dict[str, Any] = {}
    if model is not None:
        spec, configured = read_spec(model)
        result |= model_costs(spec, sequence_length or configured or spec.max_positions)
        if not as_json:
            show(False, f"{model}", _model_rows(spec, result), result)
    if budget is not None:
        from surefoot.plan.suggestion import suggest

        law = _law(runs)
        best, shape = law.allocate(budget), suggest(budget, law)
        result["budget"] = {"flops": budget, "parameters": best.parameters, "tokens": best.tokens, "loss": best.loss, "law": law.__dict__}
        table = shape.spec.model_dump(mode="json", exclude_defaults=True)
        result["budget"]["shape"] = {"model": table, "parameters": shape.parameters, "tokens": shape.tokens, "loss": shape.loss}
        if not as_json:
            show(False, f"{budget:.3g} FLOPs buy most with", [*_budget_rows(law, budget), _shape_row(shape)], result)
    if as_json:
        show(True, "", (), result)


def read_spec(path: Path) -> tuple[ModelSpec, int | None]:
    """Return the architecture in `path` (a TOML with a [model] table, or a directory) and the sequence length it is trained at."""
    from surefoot.core.config import parse, read_toml
    from surefoot.models import ModelSpec
    from surefoot.models.hf import read_config
    from surefoot.models.hf.weights import read_json

    if path.is_dir() and not (path / "config.toml").is_file():
        if (path / "spec.json").is_file():
            return parse(ModelSpec, read_json(path / "spec.json"), where=str(path / "spec.json")), None
        return read_config(path)[1], None
    table = read_toml(path / "config.toml" if path.is_dir() else path)
    if "model" not in table:
        raise InputError("has no [model] table", where=str(path), remedy="give a training config; examples/ has some")
    length = table.get("data", {}).get("sequence_length")
    return parse(ModelSpec, table["model"], where=f"{path}: model"), length


def model_costs(spec: ModelSpec, sequence_length: int) -> dict[str, Any]:
    """Return counts of parameters, training FLOPs per token and bytes of `spec` in rows of `sequence_length`."""
    from surefoot.models.flops import breakdown, count_flops, count_parameters, decode_flops

    counts = count_parameters(spec)
    causal, full = (count_flops(spec, sequence_length, convention=convention) for convention in ("causal", "full"))
    return {
        "sequence_length": sequence_length,
        "parameters": {"total": counts.total, "active": counts.active, "embedding": counts.embedding},
        "parts": {part.name: part.parameters for part in breakdown(spec)},
        "flops_per_token": {
            "six_n": counts.six_n,
            "exact_causal": causal.training,
            "exact_full": full.training,
            "recomputed": causal.training_recomputed,
            "decode": decode_flops(spec, sequence_length),
        },
        "bytes": {
            "weights_float32": 4 * counts.total,
            "training_float32": 16 * counts.total,
            "training_bfloat16": 18 * counts.total,
            "cache_bfloat16": _cache_bytes(spec, sequence_length),
        },
    }


def _cache_bytes(spec: ModelSpec, length: int) -> int:
    """Bytes of the cache of one sequence in bfloat16, read off the cache itself."""
    import torch

    from surefoot.models import Transformer

    cache = Transformer(spec, device="meta", dtype=torch.bfloat16).new_cache(1, length)
    tensors = (value for state in cache.states for value in vars(state).values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _model_rows(spec: ModelSpec, costs: dict[str, Any]) -> list[tuple[str, str]]:
    flops, size, length = costs["flops_per_token"], costs["bytes"], costs["sequence_length"]
    exact, square = flops["exact_causal"], quantity(flops["exact_full"])
    rows = [(f"parameters: {name}", f"{count:,}") for name, count in costs["parts"].items() if count]
    rows.append(("parameters", f"{costs['parameters']['total']:,} ({costs['parameters']['active']:,} active)"))
    rows.append(("training FLOPs/token, 6 N", f"{quantity(flops['six_n'])} ({flops['six_n'] / exact:.2f} of the exact count)"))
    rows.append((f"training FLOPs/token, exact at {length:,}", f"{quantity(exact)} (attention as a full square: {square})"))
    rows.append(("  with activation checkpointing", quantity(flops["recomputed"])))
    rows.append((f"FLOPs of a token generated after {length:,}", quantity(flops["decode"])))
    rows.append(("weights, float32", quantity(size["weights_float32"], "B")))
    rows.append(("weights, gradients and AdamW, float32", quantity(size["training_float32"], "B")))
    rows.append(("the same in bfloat16 with float32 masters", quantity(size["training_bfloat16"], "B")))
    rows.append((f"cache of one sequence of {length:,}, bfloat16", quantity(size["cache_bfloat16"], "B")))
    return rows


def _law(runs: Path | None) -> ScalingLaw:
    from surefoot.plan import fit, observe
    from surefoot.plan.scaling import PUBLISHED

    return PUBLISHED if runs is None else fit(observe(runs))


def _shape_row(found: Suggestion) -> tuple[str, str]:
    spec = found.spec
    sizes = f"dim {spec.dim}, {spec.layers} layers, feed-forward {spec.ffn.hidden if spec.ffn else 0}, vocabulary {spec.vocab_size:,}"
    return "a shape, by exact FLOPs", f"{sizes}: {quantity(found.parameters)} on {quantity(found.tokens)} tokens, loss {found.loss:.3f}"


def _budget_rows(law: ScalingLaw, budget: float) -> list[tuple[str, str]]:
    best = law.allocate(budget)
    rows = [
        ("parameters", quantity(best.parameters)),
        ("tokens", f"{quantity(best.tokens)} ({best.tokens / best.parameters:.0f} a parameter)"),
        ("expected loss", f"{best.loss:.3f} nats per token"),
    ]
    for factor in (0.5, 2.0):
        size = best.parameters * factor
        tokens = budget / 6 / size
        rows.append((f"{factor:g} x the parameters", f"{quantity(size)} on {quantity(tokens)} tokens: loss {law.loss(size, tokens):.3f}"))
    rows.append(("law", f"L = {law.e:.3f} + {law.a:.4g}/N^{law.alpha:.3f} + {law.b:.4g}/D^{law.beta:.3f}"))
    rows.append(("from", law.source))
    return rows
