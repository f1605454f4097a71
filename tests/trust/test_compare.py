"""Every planted fault is wrong or lossy, at its own tensor and with the right idea; every honest change is neither."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from surefoot.models import Transformer
from surefoot.models.attention import attend_here
from surefoot.models.ffn import gate
from surefoot.trust import Entry, Evidence, Owner, Trace, Verdict, compare
from tests.trust.recording import Adam, after, data, edit, gradient_of, product, record

DEGREES = {"tensor": 2, "context": 4}
Make = Callable[[], Trace]


@cache
def reference() -> Trace:
    return record()


@cache
def low_reference(dtype: torch.dtype = torch.bfloat16) -> Trace:
    return record(dtype=dtype)


def judge(candidate: Trace, **options: object) -> Evidence:
    return compare(reference(), candidate, degrees=DEGREES, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fault:
    make: Make
    phase: str
    tensor: str
    says: str
    ranks: tuple[int, ...] = ()


def attention(layer: str, change: Callable[..., Tensor]) -> Callable[[Transformer], None]:
    """Replace the attention of one layer by plain products: change(q, k, v, mask, scale) -> [B, T, H, Q]."""

    def prepare(net: Transformer) -> None:
        module = net.get_submodule(layer)

        def forward(x: Tensor, context: object, state: object = None) -> Tensor:
            from surefoot.models.context import visible
            from surefoot.models.rope import rotate

            qkv = module.qkv(x)
            q, k, v = (one.view(*x.shape[:2], -1, 8) for one in qkv.split((32, 16, 16), -1))
            cos, sin = context.rotation(False)  # type: ignore[attr-defined]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            y = change(q, k, v, visible(context, x.shape[1], None, x.device), module.scale, context)  # type: ignore[arg-type]
            return module.out(y.reshape(*x.shape[:2], -1))

        module.forward = forward

    return prepare


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, context: object) -> Tensor:
    k, v = (one.repeat_interleave(2, dim=2) for one in (k, v))
    scores = (torch.einsum("bthq,bshq->bhts", q, k) * scale).masked_fill(~mask, -math.inf)
    return torch.einsum("bhts,bshq->bthq", scores.softmax(-1), v)


def sees_next(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, context: object) -> Tensor:
    return plain(q, k, v, mask | torch.ones(mask.shape[-2:], dtype=torch.bool).tril(1), scale, context)


def dropped(rank: int, of: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A row-parallel product that forgets the partial sum of one rank."""

    def compute(x: Tensor, w: Tensor) -> Tensor:
        pieces = list(zip(x.chunk(of, -1), w.chunk(of, -1), strict=True))
        return torch.stack([a @ b.t() for i, (a, b) in enumerate(pieces) if i != rank]).sum(0)

    return compute


def partial_sums(parts: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Row-parallel partial products, rounded to `dtype` and added in it one after the other."""

    def compute(x: Tensor, w: Tensor) -> Tensor:
        pieces = [(a.to(dtype) @ b.to(dtype).t()) for a, b in zip(x.chunk(parts, -1), w.chunk(parts, -1), strict=True)]
        total = pieces[0]
        for piece in pieces[1:]:
            total = total + piece
        return total.to(x.dtype)

    return compute


def scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda gradients: {one: g * factor if one.startswith(name) else g for one, g in gradients.items()}


def shifted_labels() -> Trace:
    batch = data()
    return record(batch=replace(batch, labels=torch.where(batch.labels >= 0, batch.labels.roll(1, 1).clamp(min=0), -100)))


def later_positions() -> Trace:
    batch = data()
    positions = batch.positions.clone()
    positions[:, 12:] += 1
    return record(batch=replace(batch, positions=positions))


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[77] += value
        return x

    return change


def rows(start: int, stop: int, factor: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x[start:stop] *= factor
        return x

    return change


OWNERS = tuple(Owner(rank, ((16 * rank, 16 * rank + 16), (0, 32))) for rank in range(4))
QKV, DOWN, EMBED = "layers.1.mixer.qkv.weight", "layers.0.ffn.down.weight", "embed.weight"


def without(phase: str, name: str) -> Trace:
    kept = tuple(one for one in reference().entries if (one.phase, one.name) != (phase, name))
    return Trace(kept, reference().facts)


def swap_heads(x: Tensor) -> Tensor:
    return torch.cat((x[..., 8:16], x[..., :8], x[..., 16:]), -1)


FAULTS = {
    "activation x (1 + 1e-6)": Fault(
        lambda: record(prepare=after("layers.0.ffn", lambda x: x * (1 + 1e-6))), "forward", "layers.0.ffn", "1.000001 x the reference"
    ),
    "activation doubled": Fault(
        lambda: record(prepare=after("layers.1.mixer", lambda x: 2 * x)), "forward", "layers.1.mixer", "2 x the reference, which is the"
    ),
    "branch left out": Fault(lambda: record(prepare=after("layers.1.ffn", lambda x: 0 * x)), "forward", "layers.1.ffn", "zero"),
    "sign": Fault(lambda: record(prepare=after("layers.0.mixer", lambda x: -x)), "forward", "layers.0.mixer", "opposite sign"),
    "mask off by one": Fault(lambda: record(prepare=attention("layers.0.mixer", sees_next)), "forward", "layers.0.mixer.out", "mask"),
    "softmax scale + 1 %": Fault(
        lambda: record(prepare=attention("layers.1.mixer", lambda q, k, v, m, s, c: plain(q, k, v, m, 1.01 * s, c))),
        "forward",
        "layers.1.mixer.out",
        "scale",
    ),
    "heads swapped": Fault(
        lambda: record(prepare=after("layers.0.mixer.qkv", swap_heads)), "forward", "layers.0.mixer.qkv", "indices 0 to 15 of dimension 2"
    ),
    "batch and sequence exchanged": Fault(
        lambda: record(prepare=after("embed", lambda x: x.transpose(0, 1).reshape(x.shape))), "forward", "embed", "another order"
    ),
    "one element": Fault(
        lambda: record(prepare=after("layers.0.ffn.gate_up", one_element(1e-4))), "forward", "layers.0.ffn.gate_up", "one element"
    ),
    "NaN": Fault(lambda: record(prepare=after("layers.1.mixer_norm", one_element(math.nan))), "forward", "layers.1.mixer_norm", "NaN"),
    "forgotten partial sum": Fault(
        lambda: record(prepare=product("layers.0.ffn.down", dropped(1, 2))), "forward", "layers.0.ffn.down", "arithmetic differs"
    ),
    "bias added by both ranks": Fault(
        lambda: record(prepare=lambda n: product("layers.0.mixer.qkv", lambda x, w: x @ w.t() + n.layers["0"].mixer.qkv.bias)(n)),
        "forward",
        "layers.0.mixer.qkv",
        "arithmetic differs",
    ),
    "positions off by one in the second half": Fault(later_positions, "forward", "layers.0.mixer.out", "indices 12 to 23 of dimension 1"),
    "labels shifted": Fault(shifted_labels, "forward", "loss", "wrong"),
    "float32 inside float64": Fault(
        lambda: record(prepare=product("layers.1.ffn.down", lambda x, w: (x.float() @ w.float().t()).double())),
        "forward",
        "layers.1.ffn.down",
        "float32",
    ),
    "tokens of another sample": Fault(lambda: record(batch=data(9)), "forward", "tokens", "whole numbers"),
    "mean of means": Fault(lambda: record(micro_batches=2, mean_of_means=True), "forward", "loss", "wrong"),
    "output gradient scaled": Fault(
        lambda: record(prepare=gradient_of("layers.1.ffn", lambda g: g * 0.98)), "backward", "layers.1.ffn", "0.98 x the reference"
    ),
    "gradient of one sample dropped": Fault(
        lambda: record(prepare=gradient_of("layers.1.mixer", lambda g: torch.cat((g[:1] * 0, g[1:])))),
        "backward",
        "layers.1.mixer",
        "only index 0 of dimension 0",
    ),
    "one gradient x 2": Fault(lambda: record(reduce=scaled(DOWN, 2.0)), "reduction", DOWN, "2 x the reference, which is the tensor degree"),
    "one gradient / 4": Fault(lambda: record(reduce=scaled(QKV, 0.25)), "reduction", QKV, "1/4 of the reference, which is 1/the context"),
    "one gradient never reduced": Fault(
        lambda: edit(reference(), "reduction", QKV, rows(16, 32, 0.5), OWNERS), "reduction", QKV, "only what rank 1 is responsible", (1,)
    ),
    "gradient row": Fault(
        lambda: edit(reference(), "reduction", EMBED, rows(7, 8, 1.001)), "reduction", EMBED, "only index 7 of dimension 0"
    ),
    "gradient missing": Fault(lambda: without("reduction", QKV), "reduction", QKV, "no such tensor"),
    "gradient transposed": Fault(
        lambda: edit(reference(), "reduction", "layers.0.mixer.out.weight", lambda g: g.t().contiguous()),
        "reduction",
        "layers.0.mixer.out.weight",
        "another order",
    ),
    "clipping left out": Fault(lambda: record(optimizer=Adam(clip=1e9)), "clipping", "embed.weight", "clipping factor"),
    "norm without one parameter": Fault(
        lambda: edit(reference(), "clipping", "gradient_norm", lambda n: n * 0.97), "clipping", "gradient_norm", "norm"
    ),
    "learning rate, and the fact says so": Fault(lambda: record(optimizer=Adam(lr=1.1e-2)), "update", "embed.weight", "optimizer.lr"),
    "learning rate, and the fact denies it": Fault(
        lambda: record(optimizer=Adam(lr=1.1e-2), told=Adam()), "update", "embed.weight", "optimizer differs"
    ),
    "step count": Fault(lambda: record(optimizer=Adam(step=4), told=Adam()), "update", "embed.weight", "step count"),
    "moments not restored": Fault(
        lambda: record(moments=lambda name, m: 0 * m if name == QKV else m), "update", QKV, "moments"
    ),
    "update of stale gradients": Fault(
        lambda: edit(reference(), "update", DOWN, lambda p: p + 1e-3 * p.roll(1, 0)), "update", DOWN, "stale"
    ),
    "learning rate in the facts only": Fault(lambda: record(told=Adam(lr=2e-2)), "facts", "optimizer.lr", "not asked for the same thing"),
    "sample ledger": Fault(
        lambda: Trace(reference().entries, {**reference().facts, "samples": [0, 1, 2, 2]}), "facts", "samples.3", "3 in the reference, 2 in"
    ),
    "shape": Fault(lambda: edit(reference(), "forward", "norm", lambda x: x[:, :-1]), "forward", "norm", "shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_wrong_and_explained(name: str) -> None:
    fault = FAULTS[name]
    evidence = judge(fault.make())
    first = evidence.first
    assert evidence.verdict is Verdict.WRONG
    assert first is not None
    assert (first.phase, first.tensor) == (fault.phase, fault.tensor), first.sentence
    assert fault.says in first.sentence
    assert first.ranks == fault.ranks
    assert first.layer == (int(first.tensor.split(".")[1]) if first.tensor.startswith("layers.") else None)


def unfused(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x @ part.t() for part in w.split(16)], -1)


def halves(x: Tensor, w: Tensor) -> Tensor:
    return partial_sums(2, torch.float64)(x, w)


def reversed_sum(x: Tensor, w: Tensor) -> Tensor:
    return x.flip(-1) @ w.flip(-1).t()


def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, context: object) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, context: object) -> Tensor:
    """Keys eight at a time with a running maximum (Milakov & Gimelshein 2018, arXiv 1805.02867)."""
    k, v = (one.repeat_interleave(2, dim=2) for one in (k, v))
    top = torch.full((*q.shape[:3], 1), -1e30, dtype=q.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.shape[1], 8):
        s = torch.einsum("bthq,bshq->bths", q, k[:, start : start + 8]) * scale
        seen = mask[..., start : start + 8].transpose(1, 2)
        s = s.masked_fill(~seen, -1e30)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p = (s - new).exp() * seen
        fix = (top - new).exp()
        total, out, top = (
            total * fix + p.sum(-1, keepdim=True),
            out * fix + torch.einsum("bths,bshq->bthq", p, v[:, start : start + 8]),
            new,
        )
    return out / total


def permuted_hidden(net: Transformer) -> None:
    """Run both layers' hidden units in another order, weights untouched."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))

    def forward(ffn: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            a = gate(ffn.gate_up(x), ffn.activation)[..., order]
            return product_of(ffn.down, a, order)

        return run

    def product_of(down: torch.nn.Module, a: Tensor, order: Tensor) -> Tensor:
        down.product = lambda x, w, b: x @ w[:, order].t()
        return down(a)

    for block in net.layers.values():
        block.ffn.forward = forward(block.ffn)


def chunked_loss(net: Transformer) -> None:
    from functools import partial

    from surefoot.models.loss import head_cross_entropy

    net.loss = partial(head_cross_entropy, chunk_rows=5)


def blocked_here(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, context: object) -> Tensor:
    return attend_here(q, k, v, context, scale=scale, window=None, softcap=None)  # type: ignore[arg-type]


def far_positions() -> Trace:
    batch = data()
    return record(batch=replace(batch, positions=batch.positions + 8))


def norm_otherwise(net: Transformer) -> None:
    for name in ("layers.0.ffn_norm", "layers.1.mixer_norm", "norm"):
        norm = net.get_submodule(name)
        norm.forward = lambda x, norm=norm: x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + norm.eps).sqrt() * norm.weight


def resharded(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum three parts, as ranks would, in an order that is not the reference's."""
    return {name: (g * 0.3 + g * 0.6) + g * 0.1 for name, g in gradients.items()}


HONEST: dict[str, Make] = {
    "the same again": lambda: record(),
    "sum in reverse": lambda: record(prepare=product("layers.0.ffn.down", reversed_sum)),
    "two micro-batches": lambda: record(micro_batches=2),
    "four micro-batches": lambda: record(micro_batches=4),
    "loss in chunks": lambda: record(prepare=chunked_loss),
    "hidden units permuted": lambda: record(prepare=permuted_hidden),
    "separate q, k and v": lambda: record(prepare=product("layers.0.mixer.qkv", unfused)),
    "separate gate and up": lambda: record(prepare=product("layers.1.ffn.gate_up", unfused)),
    "two partial sums": lambda: record(prepare=product("layers.1.mixer.out", halves)),
    "eight partial sums": lambda: record(prepare=product("layers.0.ffn.down", partial_sums(8, torch.float64))),
    "attention by plain products": lambda: record(prepare=attention("layers.0.mixer", plain)),
    "attention by SDPA": lambda: record(prepare=attention("layers.1.mixer", kernel)),
    "attention in blocks with a running maximum": lambda: record(prepare=attention("layers.0.mixer", blocks)),
    "attention by the same blocks": lambda: record(prepare=attention("layers.0.mixer", blocked_here)),
    "positions moved, which no score can tell": far_positions,
    "norm by a division": lambda: record(prepare=norm_otherwise),
    "gradients summed in parts": lambda: record(reduce=resharded),
    "weights' products transposed": lambda: record(prepare=product("layers.1.ffn.down", lambda x, w: (w.flip(1) @ x.flip(2).mT).mT)),
}


SAME = ("the same again", "attention by the same blocks")


@pytest.mark.parametrize("name", HONEST)
def test_honest_change_is_no_fault(name: str) -> None:
    evidence = judge(HONEST[name]())
    assert evidence.verdict.severity <= Verdict.EQUIVALENT.severity, evidence.first
    assert evidence.first is None
    assert (evidence.verdict is Verdict.IDENTICAL) == (name in SAME)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_update_of_a_gradient_that_is_rounding_alone_is_no_fault(micro_batches: int) -> None:
    """Where a key is not rotated, its bias shifts all scores of a query alike; Adam makes a full update of the rounding that is left."""
    keen = Adam(eps=1e-15)
    truth = record(earlier_gradients=False, optimizer=keen)
    bias = truth.find("reduction", "layers.0.mixer.qkv.bias")
    assert bias is not None
    assert float(bias.tensor[36:40].abs().max()) < 1e-15 < 1e-6 < float(bias.tensor[:32].abs().max())
    assert compare(truth, record(earlier_gradients=False, micro_batches=micro_batches, optimizer=keen)).verdict is Verdict.EQUIVALENT


HONEST_LOW: dict[str, Callable[[], Trace]] = {
    "micro-batches": lambda: record(dtype=torch.bfloat16, micro_batches=2),
    "reversed": lambda: record(dtype=torch.bfloat16, prepare=product("layers.0.ffn.down", reversed_sum)),
    "separate products": lambda: record(dtype=torch.bfloat16, prepare=product("layers.0.mixer.qkv", unfused)),
    "eight partial sums in float32": lambda: record(
        dtype=torch.bfloat16, prepare=product("layers.0.ffn.down", partial_sums(8, torch.float32))
    ),
    "attention by SDPA": lambda: record(dtype=torch.bfloat16, prepare=attention("layers.0.mixer", kernel)),
    "hidden units permuted": lambda: record(dtype=torch.bfloat16, prepare=permuted_hidden),
    "loss in chunks": lambda: record(dtype=torch.bfloat16, prepare=chunked_loss),
    "float32 where the reference is bfloat16": lambda: record(dtype=torch.float32),
}


@pytest.mark.parametrize("name", HONEST_LOW)
def test_honest_change_in_bfloat16_is_not_lossy(name: str) -> None:
    evidence = judge(reference(), low=(low_reference(), HONEST_LOW[name]()))
    assert evidence.verdict.severity <= Verdict.EQUIVALENT.severity, evidence.first


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_honest_change_in_float32_is_not_lossy(micro_batches: int) -> None:
    prepare = product("layers.0.mixer.qkv", unfused)
    candidate = record(dtype=torch.float32, micro_batches=micro_batches, prepare=prepare)
    evidence = judge(record(micro_batches=micro_batches, prepare=prepare), low=(low_reference(torch.float32), candidate))
    assert evidence.verdict is Verdict.EQUIVALENT, evidence.first


@dataclass(frozen=True)
class Loss:
    make: Make
    phase: str
    tensor: str
    says: str


LOSSY = {
    "partial sums in bfloat16": Loss(
        lambda: record(dtype=torch.bfloat16, prepare=product("layers.0.ffn.down", partial_sums(8, torch.bfloat16))),
        "forward",
        "layers.0.ffn.down",
        "grows with that degree",
    ),
    "bfloat16 where the reference is float32": Loss(lambda: record(dtype=torch.bfloat16), "forward", "layers.0.mixer_norm", "precision"),
    "one product in bfloat16": Loss(
        lambda: record(dtype=torch.float32, prepare=product("layers.1.ffn.down", lambda x, w: (x.bfloat16() @ w.bfloat16().t()).float())),
        "forward",
        "layers.1.ffn.down",
        "too low a precision",
    ),
    "gradients reduced in bfloat16": Loss(
        lambda: record(dtype=torch.float32, reduce=lambda gradients: {name: g.bfloat16().float() for name, g in gradients.items()}),
        "reduction",
        "head.weight",
        "too low a precision",
    ),
    "one element": Loss(
        lambda: edit(low_reference(), "forward", "layers.1.ffn", one_element(0.5)), "forward", "layers.1.ffn", "one element"
    ),
}


@pytest.mark.parametrize("name", LOSSY)
def test_lost_precision_is_lossy_and_explained(name: str) -> None:
    loss = LOSSY[name]
    bfloat16 = name in ("partial sums in bfloat16", "one element")
    evidence = compare(reference(), reference(), low=(low_reference(torch.bfloat16 if bfloat16 else torch.float32), loss.make()),
                       degrees={"tensor": 8})  # fmt: skip
    assert evidence.rungs == {"float64": Verdict.IDENTICAL, "working precision": Verdict.LOSSY}
    first = evidence.first
    assert first is not None
    assert (first.phase, first.tensor) == (loss.phase, loss.tensor), first.sentence
    assert loss.says in first.sentence


@pytest.mark.parametrize(("phase", "after_update"), [("update", False), ("forward", True)])
def test_where_an_adaptive_update_has_been_one_element_may_be_off_by_a_whole_step_but_not_many(phase: str, after_update: bool) -> None:
    name = {"update": QKV, "forward": "layers.0.mixer_norm"}[phase]
    low = low_reference(torch.float32)
    one = edit(low, phase, name, one_element(1e-3))
    rounded = edit(low, phase, name, lambda x: x.bfloat16().float())
    judged = [compare(reference(), reference(), low=(low, other), after_update=after_update) for other in (one, rounded)]
    assert [evidence.verdict for evidence in judged] == [Verdict.EQUIVALENT, Verdict.LOSSY]
    assert judged[1].first is not None
    assert (judged[1].first.phase, judged[1].first.tensor) == (phase, name)


def test_overflow_in_the_working_precision_is_wrong() -> None:
    evidence = judge(reference(), low=(low_reference(), edit(low_reference(), "forward", "norm", one_element(math.inf))))
    assert (evidence.verdict, evidence.rungs["float64"]) == (Verdict.WRONG, Verdict.IDENTICAL)


def noise(seed: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (1 + 2.0**-53 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)))


def test_perturbed_references_set_sharper_floors_and_honest_changes_stay_below_them() -> None:
    perturbed = [record(prepare=after("embed", noise(seed))) for seed in range(3)] + [record(prepare=permuted_hidden)]
    for name in ("two micro-batches", "separate q, k and v", "attention by SDPA", "norm by a division", "gradients summed in parts"):
        assert judge(HONEST[name](), perturbed=perturbed).first is None, name
    # Coherent, and too small for the floor that is assumed where nothing is known.
    tiny = record(prepare=after("layers.0.ffn", lambda x: x * (1 + 4e-13)))
    assert judge(tiny).verdict is Verdict.EQUIVALENT
    assert judge(tiny, perturbed=perturbed).verdict is Verdict.WRONG


def test_layout_may_differ_and_no_other_fact() -> None:
    moved = {**reference().facts, "layout": {"tensor": 8}}
    assert judge(Trace(reference().entries, moved)).verdict is Verdict.IDENTICAL
    assert judge(Trace(reference().entries, {**moved, "dropout": 0.1})).verdict is Verdict.WRONG


def test_zero_tensors_are_compared_exactly_and_empty_ones_agree() -> None:
    def of(*values: float) -> Trace:
        zero = Entry("a", "forward", 0, torch.tensor(values, dtype=torch.float64))
        return Trace((zero, Entry("empty", "forward", 1, torch.zeros(0, 3, dtype=torch.float64))))

    assert compare(of(0.0, 0.0), of(0.0, 0.0)).verdict is Verdict.IDENTICAL
    assert compare(of(0.0, 0.0), of(0.0, -0.0)).verdict is Verdict.EQUIVALENT
    assert compare(of(0.0, 0.0), of(0.0, 1e-300)).verdict is Verdict.WRONG


def test_a_gradient_that_is_rounding_alone_is_measured_against_its_fellows() -> None:
    def of(noise: float) -> Trace:
        sizes = {"q.bias": 1e-3, "k.bias": noise, "v.bias": 2e-3}
        draw = torch.ones(8, dtype=torch.float64)
        return Trace(tuple(Entry(name, "reduction", i, size * draw) for i, (name, size) in enumerate(sizes.items())))

    assert compare(of(1e-18), of(-3e-18)).verdict is Verdict.EQUIVALENT
    assert compare(of(1e-18), of(1e-12)).verdict is Verdict.WRONG


def test_a_vector_wrong_in_its_last_elements_is_told_apart() -> None:
    weight = torch.linspace(1.0, 2.0, 8, dtype=torch.float64)
    other = weight.clone()
    other[5:] *= 1.1
    reference, candidate = (Trace((Entry("norm.weight", "update", 0, one),)) for one in (weight, other))
    evidence = compare(reference, candidate)
    assert evidence.verdict == Verdict.WRONG
    assert evidence.first is not None
    assert "indices 5 to 7 of dimension 0" in evidence.first.sentence
