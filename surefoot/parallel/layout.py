"""`Layout`: degrees of parallelism as data; makes the device mesh."""

from __future__ import annotations

from pydantic import PositiveInt

from surefoot.core.config import Config
from surefoot.core.errors import LayoutError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: what talks most, and cannot hide it, stands innermost (Megatron, torchtitan)."""


class Layout(Config):
    """Degrees of each kind of parallelism; their product is the number of processes.

    `replicate` x `shard` is the data-parallel degree: copies of the model, and shards of one copy (FSDP2); both at once is HSDP.
    """

    replicate: PositiveInt = 1
    shard: PositiveInt = 1
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """How many ranks read different samples."""
        return self.replicate * self.shard

    def check(self, world_size: int) -> None:
        """Raise `LayoutError` when this layout is not available or does not use `world_size` processes."""
        for axis in ("tensor", "pipeline", "context", "expert"):
            if getattr(self, axis) > 1:
                raise LayoutError(
                    f"{getattr(self, axis)}-way {axis} parallelism is not available",
                    where=f"layout.{axis}",
                    remedy=f"set it to 1; data parallelism is: layout.replicate or layout.shard = {world_size}",
                )
        if self.world_size != world_size:
            raise LayoutError(
                f"replicate {self.replicate} x shard {self.shard} is {self.world_size} processes, but {world_size} run",
                where="layout",
                remedy=f"start {self.world_size} (--nproc {self.world_size}), or set replicate x shard to {world_size}",
            )

    def for_world(self, world_size: int) -> Layout:
        """Return this layout, or, where it asks for nothing and several processes run, replicas on all of them."""
        return self.model_copy(update={"replicate": world_size}) if self == Layout() and world_size > 1 else self
