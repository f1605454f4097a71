from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.models.cache import ConvState
from surefoot.models.context import Context
from surefoot.models.conv import ShortConv
from surefoot.models.spec import ConvSpec

DIM = 6


def context_of(documents: Tensor | None = None) -> Context:
    return Context(None, None, None, None, documents, None)


def layer_of(width: int, bias: bool) -> ShortConv:
    layer = ShortConv(ConvSpec(width=width, bias=bias), DIM, dtype=torch.float64)
    generator = torch.Generator().manual_seed(width)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.7, generator=generator)
    return layer


def reference(layer: ShortConv, x: Tensor) -> Tensor:
    """One document a row, by torch's own depthwise convolution."""
    linear = torch.nn.functional.linear
    b, c, u = linear(x, layer.in_proj.weight, layer.in_proj.bias).chunk(3, dim=-1)
    padded = torch.nn.functional.pad((b * u).transpose(1, 2), (layer.width - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, layer.kernel[:, None], layer.kernel_bias, groups=DIM)
    return linear(c * mixed.transpose(1, 2), layer.out.weight, layer.out.bias)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torchs_convolution_with_gradients(tokens: int, width: int, bias: bool) -> None:
    layer, grad = layer_of(width, bias), normal(2, tokens, DIM).flip(1)
    results = []
    for compute in (lambda x: layer(x, context_of()), lambda x: reference(layer, x)):
        x = normal(2, tokens, DIM).requires_grad_()
        out = compute(x)
        out.backward(grad)
        results.append([out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
        layer.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("lengths", [[4, 7], [1, 1, 9], [11], [5, 1, 5]])
def test_packed_documents_equal_each_alone(width: int, lengths: list[int]) -> None:
    layer, x = layer_of(width, True), normal(1, 11, DIM)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)[None]
    x.requires_grad_()
    found = layer(x, context_of(documents))
    expected = torch.cat([reference(layer, part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    # No gradient leaks over a boundary either.
    (leak,) = torch.autograd.grad(found[:, lengths[0] :].sum(), x)
    assert not bool(leak[:, : lengths[0]].any())


def test_nothing_looks_ahead() -> None:
    layer, x = layer_of(3, False), normal(1, 9, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, context_of())[:, 4].sum(), x)
    assert [bool(row.any()) for row in grad[0]] == [False, False, True, True, True, False, False, False, False]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("pieces", [[1] * 10, [7, 1, 1, 1], [1, 9], [2, 3, 5]])
def test_decoding_in_pieces_equals_the_whole(width: int, pieces: list[int]) -> None:
    """Pieces shorter than the halo too; the first two tokens of row 0 are padding, which must not reach the third."""
    layer, x = layer_of(width, True), normal(2, 10, DIM)
    documents = torch.zeros(2, 10, dtype=torch.int32)
    documents[0, :2] = -1
    state = ConvState(torch.zeros(2, width - 1, DIM, dtype=torch.float64), torch.full((2, width - 1), -2, dtype=torch.int32))
    found, start = [], 0
    for size in pieces:
        piece = slice(start, start + size)
        found.append(layer(x[:, piece], context_of(documents[:, piece]), state))
        start += size
    torch.testing.assert_close(torch.cat(found, dim=1), layer(x, context_of(documents)), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat(found, dim=1)[0, 2:], reference(layer, x[:1, 2:])[0], rtol=1e-12, atol=1e-13)
