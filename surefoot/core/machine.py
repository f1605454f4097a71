"""How fast this machine multiplies: the measured peak that a share of peak (MFU) is a share of."""

from __future__ import annotations

import statistics
import time
from typing import Literal

Precision = Literal["float32", "bfloat16"]


def matmul_flops_per_s(precision: Precision = "float32", *, size: int = 2048, repeats: int = 5) -> float:
    """Return the FLOP/s of a square product of `size` (2 size^3 operations) with torch's current threads: median of `repeats`.

    Measure it in the same process as what it is compared with: on a shared machine it varies by a third within an hour.
    """
    import torch

    kind = torch.float32 if precision == "float32" else torch.bfloat16
    with torch.inference_mode():
        left, right = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
        product = left @ right
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(left, right, out=product)
            times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times)
