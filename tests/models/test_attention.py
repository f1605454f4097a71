from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.models.attention import attend
from surefoot.models.blocked_attention import causal_attention, spans
from surefoot.models.context import Context


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float) -> Tensor:
    """Softmax attention by its definition, every head with its own copy of keys and values."""
    groups, tokens = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthq,bshq->bhts", q, k) * scale
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.einsum("bhts,bshq->bthq", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def inputs(tokens: int, heads: int, kv_heads: int, value_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, heads, 6), (2, tokens, kv_heads, 6), (2, tokens, kv_heads, value_dim)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(2, 2, 6), (6, 2, 6), (4, 1, 5), (2, 2, 9)])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_equal_the_definition_with_gradients(tokens: int, heads: int, kv_heads: int, value_dim: int, packed: bool) -> None:
    documents = None
    if packed:
        cuts = torch.randint(0, 5, (2, tokens), generator=torch.Generator().manual_seed(1)) == 0
        documents = cuts.cumsum(1).to(torch.int32)
    ours, theirs = inputs(tokens, heads, kv_heads, value_dim), inputs(tokens, heads, kv_heads, value_dim)
    found = causal_attention(ours[0], ours[1], ours[2], documents, 0.3)
    expected = plain(theirs[0], theirs[1], theirs[2], documents, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    grad = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_bfloat16_is_about_as_exact_as_torchs_flash_kernel(size: float) -> None:
    """Scores in bfloat16 would be several times worse where they are large."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 256, 4, 64, generator=generator) * scale for scale in (size, size, 1.0))
    narrow = [x.bfloat16() for x in (q, k, v)]
    wide = [x.double() for x in narrow]
    truth = plain(wide[0], wide[1], wide[2], None, 0.125)
    theirs = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2) for x in narrow], is_causal=True, scale=0.125)
    ours = causal_attention(narrow[0], narrow[1], narrow[2], None, 0.125)
    own, reference = ((x.double() - truth).norm() for x in (ours, theirs.transpose(1, 2)))
    assert own < 2.0 * reference


def by_the_pair(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, start: int, window: int | None, softcap: float | None) -> Tensor:
    """A query at a time over the list of keys it may see."""
    groups, out = q.shape[2] // k.shape[2], torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for row in range(q.shape[0]):
        for token in range(q.shape[1]):
            here = start + token
            keys = [s for s in range(here + 1) if window is None or here - s < window]
            keys = [s for s in keys if seen is None or seen[row, s] == seen[row, here]]
            for head in range(q.shape[2]):
                scores = k[row, keys, head // groups] @ q[row, token, head] * 0.3
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out[row, token, head] = scores.softmax(0) @ v[row, keys, head // groups]
    return out


@pytest.mark.parametrize("tokens", [1, 4, 13])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_caps_and_cached_keys(tokens: int, window: int | None, softcap: float | None, packed: bool) -> None:
    """The last `tokens` of 13 as queries: 13 is a whole pass, fewer is decoding against a cache."""
    q, k, v = (x.detach() for x in inputs(13, 4, 2, 5))
    seen = torch.tensor([[0] * 4 + [1] * 9, [-1] * 2 + [3] * 11], dtype=torch.int32) if packed else None
    start = 13 - tokens
    context = Context(None, None, None, None, None if seen is None else seen[:, start:], seen, start)
    found = attend(q[:, start:], k, v, context, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(found, by_the_pair(q[:, start:], k, v, seen, start, window, softcap), rtol=1e-12, atol=1e-13)


def test_spans_are_the_runs_of_equal_ids() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [5, 5, 7, 7], [2, 2, 2, 2], [0, 1, 2, -1]], dtype=torch.int32)
    expected = [(0, 2, 0, 2), (0, 2, 2, 4), (2, 3, 0, 4), (3, 4, 0, 1), (3, 4, 1, 2), (3, 4, 2, 3), (3, 4, 3, 4)]
    assert list(spans(documents)) == expected


def test_bfloat16_gradients_are_about_as_exact_as_torchs() -> None:
    found = []
    for kind in ("ours", "torch", "truth"):
        q, k, v, grad = (torch.randn(2, 256, 4, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(4))
        leaves = [(x.double() if kind == "truth" else x).requires_grad_() for x in (q, k, v)]
        if kind == "ours":
            out = causal_attention(*leaves, None, 0.125)
        elif kind == "truth":
            out = plain(*leaves, None, 0.125)
        else:
            swapped = [x.transpose(1, 2) for x in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True, scale=0.125).transpose(1, 2)
        out.backward(grad.to(out.dtype))
        found.append([leaf.grad.double() for leaf in leaves if leaf.grad is not None])
    for ours, theirs, truth in zip(*found, strict=True):
        assert (ours - truth).norm() < 2.0 * (theirs - truth).norm()
