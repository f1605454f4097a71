"""What is said once about each parameter, beside the parameter: `ParamDecl`.

Initialisation, optimizer groups, gradient reduction, clipping, hashing, checkpoints, memory and FLOPs read it; none of them
knows a layer by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from surefoot.models.products import linear

Role = Literal["embedding", "hidden", "head", "norm", "bias", "router", "kernel"]

Split = Literal["column", "row"] | None
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class ParamDecl:
    """The facts about one parameter.

    `sections`: sizes, along the output dimension, of the products fused in one matrix (q, k, v; gate, up).
    `tp_dim`: the dimension tensor parallelism cuts, None where every tensor rank keeps a whole copy.
    `expert`: the first dimension counts experts, which expert parallelism cuts.
    How a gradient is summed follows from these two alone: see `parallel/placement.py`.
    """

    shape: tuple[int, ...]
    role: Role
    fan_in: int
    sections: tuple[int, ...] = ()
    tp_dim: int | None = None
    residual: bool = False
    expert: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: matrices that multiply activations, never norms, biases or the embedding."""
        return self.role in ("hidden", "head", "router")


def declare(
    module: nn.Module,
    name: str,
    *shape: int,
    role: Role,
    fan_in: int = 1,
    sections: tuple[int, ...] = (),
    tp_dim: int | None = None,
    residual: bool = False,
    expert: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Register an uninitialised parameter `name` on `module` together with its declaration."""
    module.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
    decls: dict[str, ParamDecl] = module.__dict__.setdefault("decls", {})
    decls[name] = ParamDecl(shape, role, fan_in, sections, tp_dim, residual, expert)


def declarations(model: nn.Module) -> dict[str, ParamDecl]:
    """Return the declaration of every parameter of `model` by canonical name, in the order of `named_parameters`."""
    found = {
        f"{prefix}.{name}" if prefix else name: decl
        for prefix, module in model.named_modules()
        for name, decl in module.__dict__.get("decls", {}).items()
    }
    return {name: found[name] for name, _ in model.named_parameters()}


class Linear(nn.Module):
    """y = x W^T + b, with W: [out, in] declared once for everything that must know how it may be split.

    `split` says how tensor parallelism cuts it: "column" (outputs), "row" (inputs; the bias is added once, after the sum) or
    None (replicated).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        role: Role = "hidden",
        split: Split = None,
        sections: tuple[int, ...] = (),
        residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.product: Product = linear
        cut = {"column": 0, "row": 1, None: None}[split]
        declare(
            self,
            "weight",
            outputs,
            inputs,
            role=role,
            fan_in=inputs,
            sections=sections,
            tp_dim=cut,
            residual=residual,
            device=device,
            dtype=dtype,
        )
        if bias:
            declare(
                self,
                "bias",
                outputs,
                role="bias",
                fan_in=inputs,
                sections=sections,
                tp_dim=0 if split == "column" else None,
                device=device,
                dtype=dtype,
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of `dtype` values are taken: float32, or float64 for float64.

    Nothing in a model may fall below the precision it runs in: in float64 any difference in logic must stand out.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
