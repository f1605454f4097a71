from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.models.cache import LatentState
from surefoot.models.context import Context
from surefoot.models.mla import MLA
from surefoot.models.rope import rotation
from surefoot.models.spec import MLASpec, RopeSpec

DIM = 10
SPECS = {
    "compressed": MLASpec(heads=3, q_rank=7, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
    "direct": MLASpec(heads=2, kv_rank=5, nope_dim=4, rope_dim=2, value_dim=9, bias=True),
}
ROPES = {
    "halves": RopeSpec(),
    "pairs": RopeSpec(interleaved=True),
    "yarn": RopeSpec(scaling="yarn", factor=40.0, original_positions=16, mscale=1.0, mscale_all_dim=1.0, interleaved=True),
}
SINGLE = pytest.mark.parametrize("kind", SPECS)
ROPE = pytest.mark.parametrize("rope", ROPES)


def layer_of(kind: str, rope: RopeSpec) -> MLA:
    layer = MLA(SPECS[kind], DIM, rope, dtype=torch.float64)
    generator = torch.Generator().manual_seed(9)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.6, generator=generator)
    return layer


def context_of(layer: MLA, rope: RopeSpec, start: int, end: int, documents: Tensor | None = None) -> Context:
    cos, sin = rotation(rope, layer.spec.rope_dim, torch.arange(start, end)[None].expand(2, -1), torch.float64)
    own = None if documents is None else documents[:, start:end]
    return Context(cos, sin, None, None, own, None if documents is None else documents[:, :end], start)


def normal(tokens: int) -> Tensor:
    return torch.randn(2, tokens, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(10))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def definition(layer: MLA, rope: RopeSpec, x: Tensor, scale: float) -> Tensor:
    """DeepSeek-V2 eq. 37 - 47, a head and a query at a time; rotations as complex phases."""
    spec, tokens = layer.spec, x.shape[1]
    linear = torch.nn.functional.linear
    if layer.q_down is not None and layer.q_norm is not None:
        queries = normed(linear(x, layer.q_down.weight, layer.q_down.bias), layer.q_norm.weight) @ layer.q_up.weight.t()
    else:
        queries = x @ layer.q_up.weight.t()
    down = linear(x, layer.kv_down.weight, layer.kv_down.bias)
    latent, shared = normed(down[..., : spec.kv_rank], layer.kv_norm.weight), down[..., spec.kv_rank :]
    cos, sin = rotation(rope, spec.rope_dim, torch.arange(tokens)[None], torch.float64)

    def phase(y: Tensor) -> Tensor:
        half = spec.rope_dim // 2
        first, second = (y[..., 0::2], y[..., 1::2]) if rope.interleaved else (y[..., :half], y[..., half:])
        return torch.complex(first, second) * torch.complex(cos, sin)

    heads = []
    q_size, kv_size = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.value_dim
    for head in range(spec.heads):
        q = queries[..., head * q_size : (head + 1) * q_size]
        kv = latent @ layer.kv_up.weight[head * kv_size : (head + 1) * kv_size].t()
        turned_q, turned_k = phase(q[..., spec.nope_dim :]), phase(shared)
        scores = q[..., : spec.nope_dim] @ kv[..., : spec.nope_dim].transpose(1, 2)
        scores = (scores + (turned_q @ turned_k.conj().transpose(1, 2)).real) * scale
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(scores.softmax(-1) @ kv[..., spec.nope_dim :])
    return linear(torch.cat(heads, -1), layer.out.weight, layer.out.bias)


@SINGLE
@ROPE
def test_the_expanded_form_is_the_definition(kind: str, rope: str) -> None:
    layer, x = layer_of(kind, ROPES[rope]), normal(9)
    scale = (layer.spec.nope_dim + layer.spec.rope_dim) ** -0.5
    if rope == "yarn":  # DeepSeek: the softmax, not cos and sin, carries mscale^2
        scale *= (0.1 * math.log(40.0) + 1.0) ** 2
    found = layer(x, context_of(layer, ROPES[rope], 0, 9))
    torch.testing.assert_close(found, definition(layer, ROPES[rope], x, scale), rtol=1e-11, atol=1e-11)


@SINGLE
@ROPE
@pytest.mark.parametrize("pieces", [[1] * 9, [9], [4, 1, 1, 3]])
def test_absorbed_decoding_equals_the_expanded_form(kind: str, rope: str, pieces: list[int]) -> None:
    layer, x = layer_of(kind, ROPES[rope]), normal(9)
    documents = torch.zeros(2, 9, dtype=torch.int32)
    documents[0, :2] = -1  # left padding
    for ids in (None, documents):
        state = LatentState(torch.zeros(2, 12, layer.spec.kv_rank + layer.spec.rope_dim, dtype=torch.float64))
        found, start = [], 0
        for size in pieces:
            context = context_of(layer, ROPES[rope], start, start + size, ids)
            found.append(layer(x[:, start : start + size], context, state))
            start += size
        expected = layer(x, context_of(layer, ROPES[rope], 0, 9, ids))
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-11, atol=1e-12)


def test_a_given_scale_replaces_the_default() -> None:
    spec = SPECS["compressed"].model_copy(update={"scale": 0.25})
    assert MLA(spec, DIM, RopeSpec()).scale == 0.25
    assert MLA(SPECS["compressed"], DIM, RopeSpec()).scale == pytest.approx(10**-0.5)
