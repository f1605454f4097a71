from __future__ import annotations

import pytest
import torch

from surefoot.models import loss as loss_module
from surefoot.models.loss import IGNORED, head_cross_entropy, token_losses


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 31 * 5, 1 << 25])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 1.5)])
def test_equals_the_definition_whatever_the_chunks(
    chunk_bytes: int, multiplier: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(2):
        generator.manual_seed(0)
        pairs.append([torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((17, 8), (31, 8))])
    labels = torch.randint(0, 31, (17,), generator=generator)
    labels[[0, 5, 16]] = IGNORED
    scale = torch.tensor(1 / 14, dtype=torch.float64)
    (hidden, weight), (hidden2, weight2) = pairs
    found = head_cross_entropy(hidden, weight, labels, scale, multiplier=multiplier, softcap=softcap)
    logits = hidden2 @ weight2.t() * multiplier
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / 14
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    (3.0 * found).backward()
    (3.0 * expected).backward()
    for one, other in ((hidden, hidden2), (weight, weight2)):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_bfloat16_chunks_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient over many chunks must be as exact as over one."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((512, 16), (40, 16)))
    labels = torch.randint(0, 40, (512,), generator=generator)
    gradients = []
    for size in (4 * 40 * 2, 1 << 25):
        monkeypatch.setattr(loss_module, "CHUNK_BYTES", size)
        leaf = weight.clone().requires_grad_()
        head_cross_entropy(hidden, leaf, labels, torch.tensor(1.0)).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.double())
    wide = weight.double().requires_grad_()
    torch.nn.functional.cross_entropy(hidden.double() @ wide.t(), labels, reduction="sum").backward()
    assert wide.grad is not None
    many, one = ((gradient - wide.grad).norm() for gradient in gradients)
    assert many < 1.5 * one


def test_ignored_rows_give_nothing_and_take_nothing() -> None:
    hidden, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((6, 8), (31, 8)))
    labels = torch.tensor([3, IGNORED, 30, 0, IGNORED, IGNORED])
    head_cross_entropy(hidden, weight, labels, torch.tensor(1.0)).backward()
    assert hidden.grad is not None
    assert [bool(row.any()) for row in hidden.grad] == [True, False, True, True, False, False]
    none = head_cross_entropy(hidden, weight, torch.full((6,), IGNORED), torch.tensor(1.0))
    assert float(none.detach()) == 0.0
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(none, (hidden, weight)))


def test_without_gradients_the_value_is_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((9, 8), (31, 8)))
    labels = torch.randint(0, 31, (9,), generator=generator)
    frozen = head_cross_entropy(hidden, weight, labels, torch.tensor(1.0))
    with torch.no_grad():
        quiet = head_cross_entropy(hidden, weight.requires_grad_(), labels, torch.tensor(1.0))
    expected = token_losses(hidden @ weight.detach().t(), labels).sum()
    assert not frozen.requires_grad
    torch.testing.assert_close(frozen, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(quiet, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_frozen_side_leaves_the_others_gradient_as_it_was(frozen: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in (("hidden", (9, 8)), ("weight", (31, 8)))
    }
    labels, live = torch.randint(0, 31, (9,), generator=generator), "weight" if frozen == "hidden" else "hidden"
    values[live].requires_grad_()
    (found,) = torch.autograd.grad(head_cross_entropy(values["hidden"], values["weight"], labels, torch.tensor(0.5)), values[live])
    loss = torch.nn.functional.cross_entropy(values["hidden"] @ values["weight"].t(), labels, reduction="sum") * 0.5
    torch.testing.assert_close(found, torch.autograd.grad(loss, values[live])[0], rtol=1e-12, atol=1e-14)


def test_huge_logits_stay_finite() -> None:
    hidden, weight = torch.full((2, 4), 100.0, requires_grad=True), torch.eye(4, requires_grad=True) * 100.0
    loss = head_cross_entropy(hidden * torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]), weight, torch.tensor([0, 0]), torch.tensor(1.0))
    assert float(loss.detach()) == pytest.approx(1e4)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert bool(grad.isfinite().all())
