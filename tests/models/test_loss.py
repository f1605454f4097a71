from __future__ import annotations

import pytest
import torch

from surefoot.models import loss as loss_module
from surefoot.models.loss import IGNORED, head_cross_entropy


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
