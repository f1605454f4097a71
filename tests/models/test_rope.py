from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from surefoot.models.rope import attention_factor, frequencies, rotate, rotation, yarn_mscale
from surefoot.models.spec import RopeSpec

WIDE = torch.float64
STRETCHED = [
    RopeSpec(),
    RopeSpec(scaling="linear", factor=4.0),
    RopeSpec(scaling="dynamic", factor=2.0, original_positions=16),
    RopeSpec(scaling="llama3", factor=8.0, original_positions=64),
    RopeSpec(scaling="yarn", factor=4.0, original_positions=64),
]


def theta_of(spec: RopeSpec, dim: int, length: int = 0) -> Tensor:
    return frequencies(spec, dim, length=length, dtype=WIDE)


def plain(dim: int, base: float) -> Tensor:
    return torch.tensor([base ** (-2.0 * i / dim) for i in range(dim // 2)], dtype=WIDE)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=WIDE, generator=torch.Generator().manual_seed(seed))


def turned(x: Tensor, spec: RopeSpec, positions: Tensor, dim: int) -> Tensor:
    cos, sin = rotation(spec, dim, positions, WIDE)
    return rotate(x, cos, sin, interleaved=spec.interleaved)


@pytest.mark.parametrize("spec", STRETCHED, ids=lambda spec: spec.scaling)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_score_depends_on_the_distance_alone(spec: RopeSpec, interleaved: bool) -> None:
    spec = spec.model_copy(update={"interleaved": interleaved})
    q, k = normal(1, 1, 1, 12, seed=1).expand(1, 40, 1, 12), normal(1, 1, 1, 12, seed=2).expand(1, 40, 1, 12)
    positions = torch.arange(40)[None]
    scores = torch.einsum("btq,bsq->bts", turned(q, spec, positions, 8)[:, :, 0], turned(k, spec, positions, 8)[:, :, 0])[0]
    for offset in range(-39, 40):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-11, atol=1e-11)
    means = torch.stack([scores.diagonal(offset).mean() for offset in range(-39, 40)])
    assert float(means.std()) > 0.1  # and it does depend on it


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_the_norm_and_the_channels_beyond(interleaved: bool) -> None:
    x, positions = normal(2, 9, 3, 12), torch.randint(0, 5000, (2, 9), generator=torch.Generator().manual_seed(3))
    found = turned(x, RopeSpec(interleaved=interleaved), positions, 8)
    torch.testing.assert_close(found[..., :8].norm(dim=-1), x[..., :8].norm(dim=-1), rtol=1e-12, atol=0)
    assert torch.equal(found[..., 8:], x[..., 8:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_is_a_complex_number_times_a_phase(interleaved: bool) -> None:
    x, positions = normal(1, 7, 2, 8), torch.arange(7)[None] * 3
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])
    phase = torch.polar(torch.ones(1, 7, 1, 4, dtype=WIDE), (positions[..., None].to(WIDE) * plain(8, 1e4))[:, :, None])
    expected = torch.complex(first, second) * phase
    found = turned(x, RopeSpec(interleaved=interleaved), positions, 8)
    torch.testing.assert_close(found, torch.cat((expected.real, expected.imag), -1), rtol=1e-12, atol=1e-13)


def test_linear_scaling_divides_the_positions() -> None:
    spec = RopeSpec(scaling="linear", factor=4.0)
    stretched = rotation(spec, 16, torch.arange(0, 400, 4)[None], WIDE)
    for found, expected in zip(stretched, rotation(RopeSpec(), 16, torch.arange(100)[None], WIDE), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_dynamic_scaling_starts_at_the_original_length() -> None:
    spec, dim = RopeSpec(scaling="dynamic", factor=2.0, original_positions=64), 16
    for length in (1, 33, 63, 64):
        assert torch.equal(theta_of(spec, dim, length), theta_of(RopeSpec(), dim))
    # At twice the length: base (2 * 2 - 1)^(d / (d - 2)).
    torch.testing.assert_close(theta_of(spec, dim, 128), plain(dim, 1e4 * 3.0 ** (16 / 14)), rtol=1e-13, atol=0)
    below, above = (rotation(spec, dim, torch.arange(n)[None], WIDE)[1] for n in (64, 65))
    assert torch.equal(below, rotation(RopeSpec(), dim, torch.arange(64)[None], WIDE)[1])
    assert not torch.equal(above[:, :64], below)


def test_llama3_scaling_is_its_definition() -> None:
    """Llama 3.1's numbers: wavelengths above 8192 are divided by 8, those below 2048 kept, a blend between."""
    spec = RopeSpec(theta=5e5, scaling="llama3", factor=8.0, original_positions=8192)
    kinds = set()
    for found, base in zip(theta_of(spec, 128).tolist(), plain(128, 5e5).tolist(), strict=True):
        length = 2.0 * math.pi / base
        if length > 8192.0:
            expected, kind = base / 8.0, "long"
        elif length < 2048.0:
            expected, kind = base, "short"
        else:
            smooth = (8192.0 / length - 1.0) / 3.0
            expected, kind = (1.0 - smooth) * base / 8.0 + smooth * base, "between"
        assert found == pytest.approx(expected, rel=1e-12)
        kinds.add(kind)
    assert kinds == {"long", "short", "between"}


@pytest.mark.parametrize(
    ("dim", "base", "original", "low", "high"),
    [(64, 1e4, 4096, 10, 23), (128, 1e4, 4096, 20, 46), (128, 5e5, 8192, 18, 35), (128, 1e6, 4096, 13, 31)],
)
def test_yarn_ramps_between_known_channels(dim: int, base: float, original: int, low: int, high: int) -> None:
    """Channels up to `low` are kept, from `high` on divided by the factor, and the share falls in equal steps between."""
    theta = theta_of(RopeSpec(theta=base, scaling="yarn", factor=4.0, original_positions=original), dim)
    kept = (theta / plain(dim, base) - 0.25) / 0.75
    expected = torch.tensor([min(max((high - i) / (high - low), 0.0), 1.0) for i in range(dim // 2)], dtype=WIDE)
    torch.testing.assert_close(kept, expected, rtol=0, atol=1e-12)
    if (dim, base) == (64, 1e4):
        untruncated = theta_of(RopeSpec(theta=base, scaling="yarn", factor=4.0, original_positions=original, truncate=False), dim)
        assert bool((untruncated != theta).any())


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1.0), (2.0, 1.0693), (4.0, 1.13863), (8.0, 1.2079), (16.0, 1.2773), (40.0, 1.3689)])
def test_yarns_attention_factor(factor: float, expected: float) -> None:
    spec = RopeSpec(scaling="yarn", factor=factor)
    assert attention_factor(spec) == pytest.approx(expected, abs=5e-5)
    cos, sin = rotation(spec, 8, torch.arange(20)[None], WIDE)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, attention_factor(spec) ** 2), rtol=1e-12, atol=0)


def test_deepseeks_temperatures_cancel_and_a_given_one_wins() -> None:
    both = RopeSpec(scaling="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert attention_factor(both) == 1.0
    unequal = both.model_copy(update={"mscale": 0.707})
    assert attention_factor(unequal) == pytest.approx((0.0707 * math.log(40.0) + 1.0) / (0.1 * math.log(40.0) + 1.0))
    assert attention_factor(both.model_copy(update={"attention_factor": 1.5})) == 1.5
    assert attention_factor(RopeSpec(scaling="linear", factor=4.0)) == 1.0
    assert yarn_mscale(4.0) == pytest.approx(1.13863, abs=5e-6)


def test_every_stretch_with_factor_one_is_plain() -> None:
    for scaling in ("linear", "dynamic", "llama3", "yarn"):
        spec = RopeSpec(scaling=scaling, factor=1.0, original_positions=64)
        torch.testing.assert_close(theta_of(spec, 32, 64), plain(32, 1e4), rtol=1e-13, atol=0)


def test_bfloat16_models_keep_large_positions_apart() -> None:
    """Angles in bfloat16 would merge 4096 and 4097; taken in float32 the fastest channel tells them apart."""
    cos, sin = rotation(RopeSpec(), 8, torch.tensor([[4096, 4097, 4098]]), torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    expected = torch.tensor([math.cos(n) for n in (4096, 4097, 4098)])
    assert float((cos[0, :, 0].float() - expected).abs().max()) < 5e-3
    assert all(not torch.equal(one, other) for one, other in pairwise(cos[0]))
