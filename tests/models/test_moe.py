from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.models.context import Context
from surefoot.models.moe import MoE, balance_loss, balanced, route
from surefoot.models.spec import MoESpec


def layer_of(spec: MoESpec, dim: int = 6) -> MoE:
    layer = MoE(spec, dim, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    layer.counts.zero_()
    return layer


def context(documents: Tensor | None = None) -> Context:
    return Context(None, None, None, None, documents, None)


def dense(layer: MoE, x: Tensor) -> Tensor:
    """The same layer as a loop over tokens and their experts."""
    spec, flat = layer.spec, x.flatten(0, 1)
    routing = route(flat @ layer.router.weight.t(), spec, layer.router_bias)
    rows = []
    for token in range(flat.shape[0]):
        total = torch.zeros_like(flat[0])
        for choice in range(spec.top_k):
            expert = int(routing.chosen[token, choice])
            gate, up = (layer.experts.gate_up[expert] @ flat[token]).chunk(2)
            total = total + routing.weights[token, choice] * (layer.experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
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
    for compute in (lambda y: layer(y, context())[0], lambda y: dense(layer, y)):
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


def test_only_the_best_groups_are_eligible() -> None:
    """A group is as good as the sum of its two best: group 1 has the best expert, and loses to groups 0 and 2."""
    spec = MoESpec(experts=9, top_k=3, hidden=4, router="sigmoid", groups=3, top_groups=2, balance="bias")
    probabilities = torch.tensor([[0.6, 0.5, 0.1, 0.8, 0.1, 0.1, 0.5, 0.45, 0.4]], dtype=torch.float64)
    routing = route(probabilities.logit(), spec, None)
    assert sorted(routing.chosen[0].tolist()) == [0, 1, 6]
    expected = probabilities[0, routing.chosen[0]] / probabilities[0, routing.chosen[0]].sum()
    torch.testing.assert_close(routing.weights[0], expected)
    # A bias moves the groups too: it can bring group 1 back.
    lifted = torch.tensor([0, 0, 0, 0, 0.9, 0, 0, 0, 0], dtype=torch.float64)
    assert sorted(route(probabilities.logit(), spec, lifted).chosen[0].tolist()) == [0, 3, 4]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_no_token_leaves_its_groups(router: str) -> None:
    spec = MoESpec(experts=12, top_k=4, hidden=4, router=router, groups=4, top_groups=2)
    logits = torch.randn(500, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    chosen = route(logits, spec, None).chosen
    assert max(len(set(row)) for row in (chosen // 3).tolist()) == 2
    assert all(len(set(row)) == 4 for row in chosen.tolist())


def test_experts_without_tokens_get_a_zero_gradient() -> None:
    layer = layer_of(MoESpec(experts=6, top_k=1, hidden=4, balance="none"))
    layer(torch.randn(1, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(12)), context())[0].sum().backward()
    idle = layer.counts == 0
    assert int(idle.sum()) >= 4
    for parameter in (layer.experts.gate_up, layer.experts.down):
        assert parameter.grad is not None
        assert not bool(parameter.grad[idle].any())
        assert bool(parameter.grad[~idle].any())


def test_counts_leave_padding_out_and_survive_recomputation() -> None:
    layer = layer_of(MoESpec(experts=5, top_k=2, hidden=4, shared_hidden=3))
    x = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(13)).requires_grad_()
    documents = torch.tensor([[0] * 8, [0] * 5 + [-1] * 3], dtype=torch.int32)
    chosen = route(x.detach().flatten(0, 1)[:13] @ layer.router.weight.t(), layer.spec, None).chosen
    expected = torch.bincount(chosen.flatten(), minlength=5)
    results = []
    for recompute in (False, True):
        out, aux = checkpoint(layer, x, context(documents), use_reentrant=False) if recompute else layer(x, context(documents))
        assert torch.equal(layer.counts, expected)
        results.append(torch.autograd.grad(out.square().sum() + aux, [x, *layer.parameters()]))
        assert torch.equal(layer.counts, expected)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_auxiliary_gradient_moves_tokens_off_a_crowded_expert() -> None:
    spec = MoESpec(experts=4, top_k=1, hidden=4)
    logits = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(14))
    logits = (logits + torch.tensor([2.0, 0.0, 0.0, 0.0])).requires_grad_()
    loss = balance_loss(route(logits, spec, None), spec, 1, None)
    assert float(loss.detach()) > 1.2 * 64 * spec.aux_coefficient  # more than a balanced router pays
    (grad,) = torch.autograd.grad(loss, logits)
    assert float(grad.sum(0)[0]) > 0.0 > float(grad.sum(0)[1:].max())


def test_the_z_loss_is_the_squared_log_normaliser() -> None:
    spec = MoESpec(experts=4, top_k=1, hidden=4, balance="none", z_coefficient=0.5)
    logits = torch.full((6, 4), 1.0, dtype=torch.float64)
    counted = torch.tensor([True] * 4 + [False] * 2)
    found = balance_loss(route(logits, spec, None), spec, 2, counted)
    assert float(found) == pytest.approx(0.5 * 4 * (1.0 + torch.tensor(4.0).log().item()) ** 2)
