"""Rotary position embedding and its stretched forms: linear, dynamic NTK, Llama 3 and YaRN.

theta_i = base^(-2i/d) for i < d/2. Frequencies and angles are computed in float32 (float64 for a float64 model): in bfloat16
positions above 256 would lose integers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.models.parameters import accumulation_dtype
from surefoot.models.spec import RopeSpec


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's attention temperature 0.1 c ln(s) + 1 (Peng et al. 2023, arXiv 2309.00071, eq. 22), 1 for s <= 1."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by, so that logits are multiplied by its square (YaRN only)."""
    if spec.scaling != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return yarn_mscale(spec.factor)


def frequencies(spec: RopeSpec, dim: int, *, length: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return theta: [dim / 2]; `length` (largest position + 1) matters to dynamic scaling only."""
    base = spec.theta
    if spec.scaling == "dynamic" and length > spec.original_positions:
        # NTK-aware base, grown with the sequence (bloc97 / emozilla 2023).
        stretch = spec.factor * length / spec.original_positions - (spec.factor - 1.0)
        base = base * stretch ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
    theta = 1.0 / (base**exponent)
    if spec.scaling == "linear":
        return theta / spec.factor
    if spec.scaling == "llama3":
        return _llama3(spec, theta)
    if spec.scaling == "yarn":
        return _yarn(spec, theta, base, dim)
    return theta


def _llama3(spec: RopeSpec, theta: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    wavelength = 2.0 * math.pi / theta
    longest = spec.original_positions / spec.low_freq_factor
    shortest = spec.original_positions / spec.high_freq_factor
    blend = (spec.original_positions / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    mixed = (1.0 - blend) * theta / spec.factor + blend * theta
    return torch.where(wavelength > longest, theta / spec.factor, torch.where(wavelength < shortest, theta, mixed))


def _yarn(spec: RopeSpec, theta: Tensor, base: float, dim: int) -> Tensor:
    """NTK-by-parts (arXiv 2309.00071 §3.2): fast channels kept, slow ones interpolated, a ramp between."""

    def channel(rotations: float) -> float:
        return dim * math.log(spec.original_positions / (rotations * 2.0 * math.pi)) / (2.0 * math.log(base))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001  # the ramp must have a slope
    index = torch.arange(dim // 2, dtype=theta.dtype, device=theta.device)
    kept = 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0)
    return theta / spec.factor * (1.0 - kept) + theta * kept


def rotation(spec: RopeSpec, dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [B, T, dim / 2] in `dtype`, for `positions`: [B, T] int64."""
    wide = accumulation_dtype(dtype)
    length = int(positions.max()) + 1 if spec.scaling == "dynamic" else 0
    theta = frequencies(spec, dim, length=length, dtype=wide, device=positions.device)
    angle = positions[..., None].to(wide) * theta
    factor = attention_factor(spec)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading 2 * cos.shape[-1] channels of x: [B, T, heads, Q]; the others pass through.

    Pairs are (i, i + d/2), or (2i, 2i + 1) when `interleaved`; then the result is laid out in halves, which no score can tell
    because queries and keys are laid out alike.
    """
    dim = 2 * cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)
