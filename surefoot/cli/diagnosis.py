"""The checks behind `surefoot doctor`, each a small function that finds out one thing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.core import environment, files
from surefoot.core.terminal import quantity

NEEDED = ("torch", "numpy", "pydantic", "tokenizers", "safetensors", "pyarrow", "zstandard", "xxhash", "matplotlib")
OPTIONAL = {"transformers": "hf", "tensorboard": "trackers", "wandb": "trackers", "mlflow": "trackers"}
TORCH_RANGE = ((2, 11), (2, 15))
LEAST_MEMORY_BYTES, LEAST_DISK_BYTES = 2 << 30, 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding; `works` is None for what is merely told or not needed."""

    name: str
    works: bool | None
    finding: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def diagnose(directory: Path | None = None) -> list[Check]:
    """Check everything training needs on this machine, with `directory` (the current one) as the disk written to."""
    present = environment.versions(NEEDED)
    checks = [_python(), _libraries(present), *_optional(), _processor(), _memory(), _disk(directory or Path.cwd())]
    if "torch" not in present:
        return checks
    return [*checks, _torch(), *_peaks(), _gloo()]


def _python() -> Check:
    works = sys.version_info >= (3, 11)
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", works, version if works else f"{version}: 3.11 or newer is needed")


def _libraries(present: Mapping[str, str]) -> Check:
    missing = [name for name in NEEDED if name not in present]
    if missing:
        return Check("libraries", False, f"missing: {', '.join(missing)} (pip install -c constraints.txt -e .)")
    return Check("libraries", True, ", ".join(f"{name} {version}" for name, version in present.items() if name != "torch"))


def _optional() -> list[Check]:
    present = environment.versions(tuple(OPTIONAL))
    return [Check(name, None, present.get(name, f"not installed (pip install 'surefoot[{extra}]')")) for name, extra in OPTIONAL.items()]


def _processor() -> Check:
    cores = environment.usable_cores()
    return Check("processor", None, f"{cores} cores, {environment.cpu_name()}", {"cores": cores})


def _memory() -> Check:
    size = environment.memory_bytes()
    return Check("memory", size >= LEAST_MEMORY_BYTES, quantity(size, "B"), {"bytes": size})


def _disk(directory: Path) -> Check:
    free = files.free_bytes(directory)
    writable = os.access(directory, os.W_OK)
    finding = f"{quantity(free, 'B')} free in {directory}" + ("" if writable else ", which cannot be written")
    return Check("disk", writable and free >= LEAST_DISK_BYTES, finding, {"bytes": free})


def _torch() -> Check:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    works = TORCH_RANGE[0] <= version < TORCH_RANGE[1]
    devices = f"{torch.cuda.device_count()} GPU" if torch.cuda.is_available() else "no GPU"
    wanted = "" if works else "; 2.11 up to 2.14 is needed"
    return Check("torch", works, f"{torch.__version__}, {torch.get_num_threads()} threads, {devices}{wanted}")


def _peaks() -> list[Check]:
    import torch

    from surefoot.cluster import matmul_peak

    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        peak = matmul_peak(dtype)
        finding = f"{quantity(peak.rate, 'FLOP/s')} measured ({peak.size} x {peak.size}, {peak.threads} threads)"
        checks.append(Check(f"matmul {peak.dtype}", True, finding, {"flops_per_s": peak.rate}))
    return checks


def _gloo() -> Check:
    """Two processes are what `--nproc` needs; one group of one shows that the transport itself starts."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if not dist.is_available() or not dist.is_gloo_available():
        return Check("gloo", False, "this torch has no gloo: training with --nproc will not work")
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    except RuntimeError as error:
        return Check("gloo", False, f"does not start: {str(error).splitlines()[0]}")
    return Check("gloo", True, "processes on this machine can talk to each other")
