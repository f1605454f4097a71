"""Initialisation by stated theory; every tensor is drawn from (seed, canonical name), so that no layout changes it.

- `fan_in`: std = 1 / sqrt(fan_in) keeps the variance of a product's output (LeCun 1998); outputs of residual branches are
  divided by sqrt(2 layers), so that the stream's variance stays O(1) after 2 layers additions (GPT-2). The head starts at
  1 / fan_in: first logits are ~ 1 / sqrt(D), so the first loss is ln V.
- `fixed`: std for every matrix, with the same depth scaling (GPT-2, Hugging Face's initializer_range).
- `mup`: as `fan_in` for hidden matrices; what changes with width is the learning rate (`learning_rate_multiplier`), the
  head's multiplier base_dim / dim, and the head's own std, fixed by base_dim (Yang et al. 2022, arXiv 2203.03466, table 8):
  hyper-parameters tuned at base_dim stay optimal at other widths under Adam.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.core.random import generator
from surefoot.models.parameters import ParamDecl, declarations
from surefoot.models.spec import ModelSpec
from surefoot.models.transformer import Transformer


def standard_deviation(decl: ParamDecl, spec: ModelSpec) -> float:
    """Return the std a matrix is drawn with."""
    init = spec.init
    if decl.role == "embedding":
        return init.std
    if init.scheme == "fixed":
        std = init.std
    elif decl.role == "head":
        std = 1.0 / decl.fan_in if init.scheme == "fan_in" else 1.0 / init.base_dim
    else:
        std = 1.0 / math.sqrt(decl.fan_in)
    return std / math.sqrt(2.0 * spec.layers) if decl.residual and init.depth_scaling else std


def learning_rate_multiplier(decl: ParamDecl, spec: ModelSpec) -> float:
    """Return what Adam's learning rate is multiplied by: base_dim / dim for hidden matrices under muP, 1 otherwise."""
    if spec.init.scheme == "mup" and decl.role in ("hidden", "router"):
        return spec.init.base_dim / spec.dim
    return 1.0


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of `model`; the values depend on (seed, canonical name, shape) and the spec alone."""
    for name, decl in declarations(model).items():
        parameter = model.get_parameter(name)
        parameter.copy_(drawn(name, decl, model.spec, seed, parameter.dtype))
    for layer in model.moe_layers():
        layer.counts.zero_()
        if layer.router_bias is not None:
            layer.router_bias.zero_()


def drawn(name: str, decl: ParamDecl, spec: ModelSpec, seed: int, dtype: torch.dtype) -> Tensor:
    """Return the initial values of one whole parameter."""
    if decl.role == "norm":
        return torch.full(decl.shape, 0.0 if spec.norm.offset else 1.0, dtype=dtype)
    if decl.role == "bias":
        return torch.zeros(decl.shape, dtype=dtype)
    values = torch.empty(decl.shape, dtype=torch.float32)
    return values.normal_(0.0, standard_deviation(decl, spec), generator=generator(seed, "init", name)).to(dtype)
