from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.models import products
from surefoot.models.parameters import Linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the oneDNN path whatever the processor."""
    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor | None, exact: Tensor | None, terms: int) -> None:
    """Within a few float32 roundings of a sum of `terms` products of standard normal numbers."""
    assert found is not None
    assert exact is not None
    assert found.shape == exact.shape
    assert float((found.detach().double() - exact).abs().max()) < 4.0 * 2.0**-24 * terms


def counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shape of every product that goes to the custom operator."""
    seen: list[tuple[int, ...]] = []
    original = products.product

    def product(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return original(x, weight)

    monkeypatch.setattr(products, "product", product)
    return seen


@pytest.mark.parametrize("shape", [(64, 24), (2, 40, 24), (3, 5, 7, 24)])
@pytest.mark.parametrize("outputs", [1, 17, 48])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_definition_with_gradients(shape: tuple[int, ...], outputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    x, weight = normal(*shape).requires_grad_(), normal(outputs, 24, seed=1).requires_grad_()
    offset = normal(outputs, seed=2).requires_grad_() if bias else None
    found = products.linear(x, weight, offset)
    grad = normal(*found.shape, seed=3)
    found.backward(grad)
    rows = x.numel() // 24
    assert seen[0] == (rows, 24)  # the operator ran, not torch's own linear
    wide = grad.double()
    close(found, x.detach().double() @ weight.detach().double().t() + (0 if offset is None else offset.detach().double()), 24 + 1)
    close(x.grad, wide @ weight.detach().double(), max(outputs, 8))
    close(weight.grad, wide.reshape(rows, -1).t() @ x.detach().double().reshape(rows, -1), rows)
    if offset is not None:
        close(offset.grad, wide.reshape(rows, -1).sum(0), rows)


def test_strided_inputs_and_gradients() -> None:
    """A transposed view of x, a transposed weight, and an expanded gradient (what `.sum()` sends back)."""
    x, weight = normal(24, 80).t().requires_grad_(), normal(24, 12, seed=1).t().requires_grad_()
    found = products.linear(x, weight, None)
    found.sum().backward()
    close(found, x.detach().double() @ weight.detach().double().t(), 24)
    close(x.grad, weight.detach().double().sum(0).expand(80, -1), 12)
    close(weight.grad, x.detach().double().sum(0).expand(12, -1), 80)


@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, False), (False, True), (False, False)])
def test_frozen_inputs_get_no_gradient(needs_x: bool, needs_weight: bool) -> None:
    x, weight = normal(70, 24).requires_grad_(needs_x), normal(9, 24, seed=1).requires_grad_(needs_weight)
    found = products.linear(x, weight, None)
    assert found.requires_grad == (needs_x or needs_weight)
    if not found.requires_grad:
        return
    grad = normal(70, 9, seed=2)
    found.backward(grad)
    assert (x.grad is not None) == needs_x
    assert (weight.grad is not None) == needs_weight
    if needs_x:
        close(x.grad, grad.double() @ weight.detach().double(), 9)
    if needs_weight:
        close(weight.grad, grad.double().t() @ x.detach().double(), 70)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch)
    weight = normal(9, 24, seed=1)
    x, narrow = normal(80, 24).to(dtype), weight.to(dtype)
    assert torch.equal(products.linear(x, narrow, None), torch.nn.functional.linear(x, narrow))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.linear(normal(80, 24), weight, None).dtype == torch.bfloat16
    assert seen == []


def test_the_same_product_twice_has_the_same_bits() -> None:
    x, weight = normal(128, 64), normal(96, 64, seed=1)
    assert torch.equal(products.product(x, weight), products.product(x.clone(), weight.clone()))


def test_a_layer_compiles_to_a_known_shape() -> None:
    """The operator's stand-in for tracing agrees with the operator: without it `torch.compile` would fail or break the graph."""
    arguments = (normal(80, 24).requires_grad_(), normal(9, 24, seed=1).requires_grad_())
    torch.library.opcheck(torch.ops.surefoot.linear.default, arguments)
    layer = Linear(24, 9, device="meta")
    assert layer(torch.empty(2, 40, 24, device="meta")).shape == (2, 40, 9)
