from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.models.moe import MoE, balance_loss, balanced, route
from surefoot.models.spec import MoESpec


def layer_of(spec: MoESpec, dim: int = 6) -> MoE:
    layer = MoE(spec, dim, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    layer.counts.zero_()
    return layer


def dense(layer: MoE, x: Tensor) -> Tensor:
    """The same layer as a loop over tokens and their experts."""
    spec, flat = layer.spec, x.flatten(0, 1)
    routing = route(flat @ layer.router.weight.t(), spec, layer.router_bias)
    rows = []
    for token in range(flat.shape[0]):
        total = torch.zeros_like(flat[0])
        for choice in range(spec.top_k):
            expert = int(routing.chosen[token, choice])
            gate, up = (layer.experts_gate_up[expert] @ flat[token]).chunk(2)
            total = total + routing.weights[token, choice] * (layer.experts_down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "spec",
    [
        MoESpec(experts=4, top_k=2, hidden=5),
        MoESpec(experts=5, top_k=3, hidden=5, normalise=False, balance="none"),
        MoESpec(experts=8, top_k=2, hidden=4, router="sigmoid", groups=4, top_groups=2, scale=2.5, balance="bias"),
        MoESpec(experts=6, top_k=1, hidden=4, normalise=False, balance="none"),
    ],
)
def test_grouped_experts_equal_a_loop_over_tokens(spec: MoESpec) -> None:
    layer = layer_of(spec)
    if layer.router_bias is not None:
        layer.router_bias.copy_(torch.linspace(-0.3, 0.3, spec.experts))
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    grad = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    results = []
    for compute in (lambda y: layer(y)[0], lambda y: dense(layer, y)):
        leaf = x.clone().requires_grad_()
        out = compute(leaf)
        out.backward(grad)
        results.append([out.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
        layer.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert int(layer.counts.sum()) == 14 * spec.top_k


def test_the_bias_chooses_and_never_weighs() -> None:
    spec = MoESpec(experts=4, top_k=1, hidden=4, router="sigmoid", normalise=False, balance="bias")
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    routing = route(logits, spec, torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64))
    assert routing.chosen.tolist() == [[3]]
    torch.testing.assert_close(routing.weights, torch.sigmoid(logits[:, 3:]))


def test_loss_free_balancing_evens_out_a_skewed_router() -> None:
    spec = MoESpec(experts=4, top_k=1, hidden=4, router="sigmoid", balance="bias")
    logits = torch.randn(2000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0, 0.0, -2.0])
    bias = torch.zeros(4, dtype=torch.float64)
    for _ in range(400):
        bias = balanced(bias, torch.bincount(route(logits, spec, bias).chosen.flatten(), minlength=4), 5e-3)
    counts = torch.bincount(route(logits, spec, bias).chosen.flatten(), minlength=4)
    assert int(counts.max()) < 1.15 * 500


def test_the_auxiliary_loss_is_its_coefficient_a_token_when_balanced() -> None:
    spec = MoESpec(experts=4, top_k=1, hidden=4, aux_coefficient=0.01)
    logits = torch.eye(4, dtype=torch.float64).repeat(5, 1) * 40.0  # every expert chosen equally often, with certainty
    routing = route(logits, spec, None)
    assert float(balance_loss(routing, spec, 1, None)) == pytest.approx(0.01 * 20)


def test_the_auxiliary_loss_does_not_depend_on_how_a_batch_is_cut() -> None:
    spec = MoESpec(experts=4, top_k=2, hidden=4, z_coefficient=0.1)
    logits = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    counted = torch.arange(12) % 5 != 0
    whole = balance_loss(route(logits, spec, None), spec, 3, counted)
    rows = [balance_loss(route(logits[i : i + 4], spec, None), spec, 1, counted[i : i + 4]) for i in (0, 4, 8)]
    torch.testing.assert_close(whole, sum(rows, torch.zeros((), dtype=torch.float64)))
