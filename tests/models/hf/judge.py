"""`transformers` as the judge: the same weights, tokens and labels through both, compared tensor by tensor."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from float64 import Float64
from grid import Case
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from surefoot.models import ModelSpec, Transformer, generate
from surefoot.models.hf import import_model
from surefoot.models.hf.families import FAMILIES
from surefoot.models.hf.tensors import Piece, pieces

LENGTH = 13


@dataclass(frozen=True)
class Batch:
    """All [B, T]; `mask` is 1 at real tokens. `lengths`: documents of each row, in order."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    mask: Tensor
    lengths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What a model said: logits at real tokens, loss, gradients by canonical tensor."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def make_batch(case: Case, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = {"plain": ((LENGTH,), (LENGTH,)), "left_padded": ((LENGTH,), (9,), (4,)), "packed": ((5, 1, 7), (8, 5))}[case.batch]
    shape = (len(rows), LENGTH)
    tokens = torch.randint(0, case.full()["vocab_size"], shape, generator=generator)
    documents, positions = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for row, lengths in enumerate(rows):
        start = LENGTH - sum(lengths)
        for index, length in enumerate(lengths):
            end = start + length
            documents[row, start:end] = index
            positions[row, start:end] = torch.arange(length) + case.offset
            labels[row, start : end - 1] = tokens[row, start + 1 : end]
            start = end
    mask = (documents >= 0).long()
    return Batch(tokens, labels, positions, None if case.batch == "plain" else documents, mask, rows)


def make_judge(case: Case, dtype: torch.dtype, seed: int = 1) -> Any:
    """Return a `transformers` model with every parameter and buffer random, in `dtype` but with float32-exact values."""
    config = AutoConfig.for_model(case.family, **case.full())
    with Float64() if dtype == torch.float64 else nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    named = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if "score_correction" in name)]
    for name, tensor in named:
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            centre = 0.0 if case.family.startswith("gemma") else 1.0
            values = centre + 0.3 * noise
        elif tensor.dim() == 1:
            values = 0.5 * noise
        else:
            # Gemma multiplies embeddings by sqrt(dim); the stream should start of order 1 there too, or the blocks hardly matter.
            plain = "embed" in name and not case.family.startswith("gemma")
            values = noise if plain else noise * (1.0 if "embed" in name else 1.5) / tensor.shape[-1] ** 0.5
        tensor.data.copy_(values)
    if dtype == torch.float64:
        frequencies = [b for name, b in model.named_buffers() if "inv_freq" in name]
        assert frequencies and all(b.dtype == torch.float64 for b in frequencies)
    return model.eval()


def judge(model: Any, case: Case, batch: Batch, spec: ModelSpec) -> Outcome:
    """Return what `transformers` says, gradients under our names."""
    model.zero_grad(set_to_none=True)
    count = int((batch.labels != -100).sum())
    with Float64() if model.dtype == torch.float64 else nullcontext():
        # LFM2's convolution cannot tell packed documents apart there, so each is judged alone.
        run = _alone if case.family == "lfm2" and case.batch == "packed" else _together
        logits, loss = run(model, batch, count)
        loss.backward()
    grads: dict[str, Tensor] = {}
    ours = Transformer(spec, device="meta").state_dict()
    for piece in pieces(FAMILIES[case.family], spec):
        if piece.ours.endswith("router_bias"):
            continue
        whole = grads.setdefault(piece.ours, torch.zeros(ours[piece.ours].shape, dtype=model.dtype))
        grad = _gradient(model, piece)
        if grad is not None:
            piece.region(whole).copy_(grad)
    return Outcome(logits.detach()[batch.mask.bool()], loss.detach(), grads)


def _together(model: Any, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    padded = bool((batch.mask == 0).any())
    out = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=batch.mask if padded else None,
        labels=batch.labels,
        shift_labels=batch.labels,
        num_items_in_batch=count,
        use_cache=False,
    )
    return out.logits, out.loss


def _alone(model: Any, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    rows, total = [], torch.zeros((), dtype=model.dtype)
    for row, lengths in enumerate(batch.lengths):
        start, parts = 0, []
        for length in lengths:
            piece = (slice(row, row + 1), slice(start, start + length))
            labels = batch.labels[piece]
            out = model(
                input_ids=batch.tokens[piece], position_ids=batch.positions[piece], labels=labels, shift_labels=labels,
                num_items_in_batch=count, use_cache=False,
            )  # fmt: skip
            total = total + out.loss
            parts.append(out.logits)
            start += length
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), total


def _gradient(model: Any, piece: Piece) -> Tensor | None:
    """The gradient of `piece`; in memory `transformers` 5 stacks experts and calls Mixtral's block `mlp`."""
    name = piece.theirs.replace("block_sparse_moe", "mlp")
    if piece.expert is None:
        grad = model.get_parameter(name).grad
        return None if grad is None else grad.reshape(piece.shape)
    stacked = name.split(".experts.")[0] + (".experts.gate_up_proj" if piece.ours.endswith("gate_up") else ".experts.down_proj")
    grad = model.get_parameter(stacked).grad
    return None if grad is None else grad[piece.expert][piece.start : piece.end]


def ours(model: Transformer, batch: Batch) -> Outcome:
    """Return what Surefoot says; the loss is its cross-entropy (no auxiliary term, as `transformers` by default)."""
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, batch.documents)
    count = int((batch.labels != -100).sum())
    loss = model(batch.tokens, batch.positions, batch.documents, labels=batch.labels, normaliser=count)
    loss.total.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return Outcome(logits[batch.mask.bool()], loss.total.detach(), grads)


def relative(found: Tensor, truth: Tensor, largest: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute value of the truth.

    A truth below 1e-12 of `largest` is zero to rounding (a router that chooses one expert and normalises its weight to 1 has no
    gradient) and is measured against `largest`.
    """
    scale = float(truth.abs().max())
    gap = float((found.double() - truth.double()).abs().max())
    return gap / (scale if scale > 1e-12 * largest else largest or 1.0)


def errors(found: Outcome, truth: Outcome) -> dict[str, float]:
    """Return the relative error of `logits`, `loss` and each gradient."""
    assert found.grads.keys() == truth.grads.keys()
    pairs = {"logits": (found.logits, truth.logits), "loss": (found.loss, truth.loss)}
    largest = max(float(grad.abs().max()) for grad in truth.grads.values())
    grads = {f"grad {name}": relative(found.grads[name], grad, largest) for name, grad in truth.grads.items()}
    return {name: relative(*pair) for name, pair in pairs.items()} | grads


def save(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    transformers.logging.set_verbosity_error()
    return path


@dataclass(frozen=True)
class Evidence:
    """Errors against the float64 truth: ours in float64, ours in float32, and `transformers`' own in float32."""

    float64: dict[str, float]
    float32: dict[str, float]
    floor: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Our float32 distance from the truth over `transformers`' own, which is taken as at least one unit of rounding."""
        return {name: error / max(self.floor[name], 2.0**-23) for name, error in self.float32.items()}


def evaluate(case: Case, folder: Path, seed: int = 1) -> Evidence:
    """Judge one case: the models travel through `save_pretrained` and `import_model`."""
    batch = make_batch(case, seed)
    judge64, judge32 = make_judge(case, torch.float64, seed), make_judge(case, torch.float32, seed)
    spec, model64 = import_model(save(judge64, folder / "float64"))
    spec32, model32 = import_model(save(judge32, folder / "float32"))
    assert spec == spec32 and model64.embed.weight.dtype == torch.float64 and model32.embed.weight.dtype == torch.float32
    truth = judge(judge64, case, batch, spec)
    return Evidence(
        errors(ours(model64, batch), truth), errors(ours(model32, batch), truth), errors(judge(judge32, case, batch, spec), truth)
    )


def generations(case: Case, folder: Path, count: int = 64, seed: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    """Return `count` greedy tokens after each of two prompts of unequal length, by `transformers` and by Surefoot (float64)."""
    model = make_judge(case, torch.float64, seed)
    _, mine = import_model(save(model, folder))
    batch = make_batch(Case(case.family, case.name, case.config, "left_padded"), seed)
    width = batch.tokens.shape[1]
    rows = [0, 1]
    with Float64(), torch.no_grad():
        out = model.generate(
            input_ids=batch.tokens[rows], attention_mask=batch.mask[rows], max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    prompts = [batch.tokens[row][batch.mask[row].bool()].tolist() for row in rows]
    return out[:, width:].tolist(), generate(mine, prompts, count)
