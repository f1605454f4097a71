"""AdamW and Muon over named tensors, with float32 masters where the weights are bfloat16.

Which parameter decays, and by how much its learning rate is multiplied, is read from its declaration. State is kept by canonical
name, so that checkpoints and comparisons need no parameter order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.models import ModelSpec, ParamDecl, learning_rate_multiplier
from surefoot.models.parameters import accumulation_dtype
from surefoot.parallel import ParallelModel, local
from surefoot.train.config import OptimizerConfig


@dataclass(frozen=True)
class Group:
    """Parameters updated alike: `names` in model order."""

    kind: str
    lr_multiplier: float
    weight_decay: float
    names: tuple[str, ...]


def groups(decls: Mapping[str, ParamDecl], spec: ModelSpec, config: OptimizerConfig) -> list[Group]:
    """Return the parameter groups: Muon takes hidden matrices if asked to; norms, biases and embeddings never decay."""
    found: dict[tuple[str, float, float], list[str]] = {}
    for name, decl in decls.items():
        kind = "muon" if config.kind == "muon" and decl.role == "hidden" else "adamw"
        multiplier = learning_rate_multiplier(decl, spec)
        decay = config.weight_decay if decl.decays else 0.0
        found.setdefault((kind, multiplier, decay), []).append(name)
    return [Group(kind, multiplier, decay, tuple(names)) for (kind, multiplier, decay), names in found.items()]


class Optimizer:
    """Updates this process's parts of the parameters, by name, in place from their gradients.

    `state`: slot -> name -> tensor; slots are "m" and "v" (AdamW), "momentum" (Muon) and "master" (float32 copies of bfloat16
    weights, which are what is updated; the weights are their rounding).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        decls: Mapping[str, ParamDecl],
        spec: ModelSpec,
        config: OptimizerConfig,
        parallel: ParallelModel | None = None,
    ) -> None:
        self.decls, self.config, self.parallel = decls, config, parallel
        self.parameters = {name: local(parameter.detach()) for name, parameter in parameters.items()}
        self.groups = groups(decls, spec, config)
        self.steps = 0
        self.state: dict[str, dict[str, Tensor]] = {}
        for group in self.groups:
            for name in group.names:
                self._make_state(name, group)

    def _make_state(self, name: str, group: Group) -> None:
        parameter = self.parameters[name]
        wide = accumulation_dtype(parameter.dtype)
        for slot in ("momentum",) if group.kind == "muon" else ("m", "v"):
            self.state.setdefault(slot, {})[name] = torch.zeros_like(parameter, dtype=wide)
        if parameter.dtype != wide:
            self.state.setdefault("master", {})[name] = parameter.to(wide, copy=True)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor | None], *, lr: float, clip: float = 1.0) -> None:
        """Apply one update with gradients times `clip`; a parameter without a gradient stays as it is."""
        self.steps += 1
        for group in self.groups:
            present = [name for name in group.names if gradients[name] is not None]
            if group.kind == "muon":
                for name in present:
                    gradient = gradients[name]
                    assert gradient is not None
                    self._muon(name, group, gradient, (self.config.muon_lr or self.config.lr) / self.config.lr * lr, clip)
            elif present:
                self._adamw(present, group, gradients, lr, clip)

    def masters(self, names: list[str]) -> list[Tensor]:
        """Return what is updated: the float32 masters where there are any, the parameters themselves otherwise."""
        master = self.state.get("master", {})
        return [master[name] if name in master else self.parameters[name] for name in names]

    def refresh(self) -> None:
        """Round the masters into the weights, after masters were loaded."""
        for name, master in self.state.get("master", {}).items():
            self.parameters[name].copy_(master)

    def _adamw(self, names: list[str], group: Group, gradients: Mapping[str, Tensor | None], lr: float, clip: float) -> None:
        config = self.config
        masters = self.masters(names)
        moments = [self.state["m"][name] for name in names], [self.state["v"][name] for name in names]
        steps = torch.full((), float(self.steps - 1), device=masters[0].device)
        # The kernel divides gradients by this, which saves clipping a pass of its own; it is a float32, so float64 goes without.
        fused = masters[0].dtype == torch.float32 and clip != 1.0
        scale = torch.full((), 1.0 / clip, device=masters[0].device) if fused else None
        for chunk in self._chunks(names, masters):
            wanted = slice(chunk.start, chunk.stop)
            found = [self._gradient(gradients[name], master) for name, master in zip(names[wanted], masters[wanted], strict=True)]
            if clip != 1.0 and not fused:
                found = [gradient * clip for gradient in found]
            count = [steps.clone() for _ in found]
            torch._foreach_add_(count, 1.0)
            torch._fused_adamw_(
                masters[wanted],
                found,
                moments[0][wanted],
                moments[1][wanted],
                [],
                count,
                lr=lr * group.lr_multiplier,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=group.weight_decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=None,
            )
            for name, master in zip(names[wanted], masters[wanted], strict=True):
                if name in self.state.get("master", {}):
                    self.parameters[name].copy_(master)

    def _chunks(self, names: list[str], masters: list[Tensor]) -> list[range]:
        """All at once, or one by one where each gradient is widened: then only one wide copy exists at a time."""
        whole = masters[0] is not self.state.get("master", {}).get(names[0])
        return [range(len(names))] if whole else [range(index, index + 1) for index in range(len(names))]

    @staticmethod
    def _gradient(gradient: Tensor | None, master: Tensor) -> Tensor:
        assert gradient is not None
        return gradient.to(master.dtype).contiguous()

    def _muon(self, name: str, group: Group, gradient: Tensor, lr: float, clip: float) -> None:
        master = self.masters([name])[0]
        momentum = self.state["momentum"][name]
        gradient = gradient.to(master.dtype) * clip
        momentum.mul_(self.config.muon_momentum).add_(gradient)
        direction = gradient.add(momentum, alpha=self.config.muon_momentum)  # Nesterov
        # A matrix can only be made orthogonal whole: where it is cut, every process gathers it and keeps its part of the answer.
        parallel, sections = self.parallel, self.decls[name].sections
        if parallel is None:
            update = muon_direction(direction, sections)
        else:
            update = parallel.take(name, muon_direction(parallel.whole(name, direction), sections))
        lr = lr * group.lr_multiplier
        master.mul_(1.0 - lr * group.weight_decay)
        master.add_(update, alpha=-lr)
        if master is not self.parameters[name]:
            self.parameters[name].copy_(master)


def muon_direction(matrix: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Orthogonalise each product fused in `matrix`: [..., out, in] on its own, scaled to the RMS of an AdamW update.

    The scale 0.2 sqrt(max(out, in)) lets both optimisers share a learning rate (Liu et al. 2025, arXiv 2502.16982, eq. 4).
    """
    pieces = matrix.split(sections, dim=-2) if sections else (matrix,)
    return torch.cat([orthogonalise(piece) * (0.2 * max(piece.shape[-2:]) ** 0.5) for piece in pieces], dim=-2)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return an approximation of U V^T for matrix = U S V^T: [..., out, in], by Newton-Schulz (Jordan 2024).

    The quintic's coefficients trade exactness for speed: singular values end between about 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result
