"""What a checkpoint holds: every tensor of a run by one flat, canonical name, whatever the layout.

model.<parameter>            weights (and the routers' selection biases)
optimizer.<slot>.<parameter> moments and float32 masters
ema.<parameter>              the moving average, if there is one
rng.torch                    torch's generator (nothing here draws from it; user code may)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from surefoot.models import Transformer
from surefoot.parallel import ParallelModel, Part, local
from surefoot.train.optimizer import Optimizer


@dataclass
class TrainState:
    """The live tensors of a run on this process; `step` steps are done and `position` samples consumed, over all processes."""

    parallel: ParallelModel
    optimizer: Optimizer
    ema: dict[str, Tensor]
    step: int = 0
    position: int = 0

    @property
    def model(self) -> Transformer:
        return self.parallel.model

    def tensors(self) -> dict[str, Tensor | Part]:
        """Return every tensor by canonical name: the live ones, cut ones as `Part`."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward pass leaves whole copies, freed at the next one
        part = self.parallel.part
        found = {f"model.{name}": part(name, local(one.detach())) for name, one in self.parallel.parameters.items()}
        found |= {f"model.{name}": buffer for name, buffer in persistent_buffers(self.model).items()}
        for slot, tensors in self.optimizer.state.items():
            found |= {f"optimizer.{slot}.{name}": part(name, tensor) for name, tensor in tensors.items()}
        found |= {f"ema.{name}": part(name, tensor) for name, tensor in self.ema.items()}
        found["rng.torch"] = torch.get_rng_state()
        return found

    def loaded(self, tensors: Mapping[str, Tensor | Part], step: int, position: int) -> None:
        """Take note that the live tensors were overwritten with those of `step` and `position`."""
        self.step = self.optimizer.steps = step
        self.position = position
        self.optimizer.refresh()
        state = tensors["rng.torch"]
        assert isinstance(state, Tensor)
        torch.set_rng_state(state)

    @torch.no_grad()
    def update_ema(self, decay: float | None) -> None:
        """Move the average: ema = decay ema + (1 - decay) weights, in float32 or wider."""
        if decay is None:
            return
        names = list(self.ema)
        for name, master in zip(names, self.optimizer.masters(names), strict=True):
            self.ema[name].lerp_(master.to(self.ema[name].dtype), 1.0 - decay)


def persistent_buffers(model: Transformer) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state, by name."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def held(tensor: Tensor | Part) -> Tensor:
    """Return what this process holds of `tensor`."""
    return tensor.tensor if isinstance(tensor, Part) else tensor


def snapshot(tensors: Mapping[str, Tensor | Part], buffers: dict[str, Tensor]) -> dict[str, Tensor | Part]:
    """Copy `tensors` into `buffers` (made on the first call) and return the copies, cut ones as `Part` again."""
    copies: dict[str, Tensor | Part] = {}
    for name, tensor in tensors.items():
        part = held(tensor)
        if name not in buffers:
            buffers[name] = torch.empty_like(part, device="cpu")
        buffers[name].copy_(part)
        copies[name] = Part(buffers[name], tensor.placement) if isinstance(tensor, Part) else buffers[name]
    return copies
