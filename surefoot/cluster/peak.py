"""What this machine can do at best: its matrix-product rate for a dtype and its memory bandwidth, by measurement.

Share of peak (MFU) is held against the measured rate of the same cores and precision: a datasheet knows nothing of the clock,
of a hypervisor or of a missing bfloat16 unit.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SIZES = {"cpu": (1024, 2048)}
DEVICE_SIZES = (4096, 8192)  # smaller ones do not fill a GPU


@dataclass(frozen=True)
class Peak:
    """The best median rate over the sizes tried. `rate`: FLOP/s (a multiply-add is 2) or bytes/s; `samples` all rates of that size."""

    rate: float
    dtype: str
    threads: int
    size: int
    samples: tuple[float, ...]


def matmul_peak(
    dtype: torch.dtype, threads: int | None = None, *, device: torch.device | str = "cpu", repeats: int = 5, fresh: bool = False
) -> Peak:
    """Return the matrix-product rate of `device` in FLOP/s: square products, median of `repeats`, the best size.

    Measured once a process for each (dtype, threads, device); `fresh` measures again, for a figure that needs the machine's
    present state. `threads`: None is torch's present number, which is restored.
    """
    count = threads or torch.get_num_threads()
    measure = _matmul_peak.__wrapped__ if fresh else _matmul_peak
    return measure(dtype, count, str(device), repeats)


@functools.cache
def _matmul_peak(dtype: torch.dtype, threads: int, device: str, repeats: int) -> Peak:
    found: list[Peak] = []
    with _threads(threads), torch.no_grad():
        for size in SIZES.get(torch.device(device).type, DEVICE_SIZES):
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            for product in _products(a, b):
                samples = _rates(product, 2.0 * size**3, repeats, device)
                found.append(Peak(statistics.median(samples), str(dtype).removeprefix("torch."), threads, size, samples))
    return max(found, key=lambda peak: peak.rate)


def _products(a: torch.Tensor, b: torch.Tensor) -> Iterator[Callable[[], object]]:
    """Yield the product by each library at hand: the peak is the machine's, not that of torch's choice (see `models/products.py`)."""
    yield functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    if a.device.type == "cpu" and a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        yield functools.partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")


@functools.cache
def memory_bandwidth(threads: int | None = None, *, megabytes: int = 256, repeats: int = 5) -> Peak:
    """Return the rate of a copy between buffers of `megabytes` in bytes/s, read and written bytes both counted."""
    count = threads or torch.get_num_threads()
    elements = megabytes * 2**20 // 4
    with _threads(count), torch.no_grad():
        source, target = torch.ones(elements), torch.zeros(elements)
        samples = _rates(functools.partial(target.copy_, source), 8.0 * elements, repeats, "cpu")
    return Peak(statistics.median(samples), "bytes", count, elements, samples)


def _rates(work: Callable[[], object], amount: float, repeats: int, device: str) -> tuple[float, ...]:
    """Return `amount` / seconds of each of `repeats` runs after one that warms up."""
    rates = []
    for turn in range(repeats + 1):
        _synchronise(device)
        start = time.perf_counter()
        work()
        _synchronise(device)
        if turn:
            rates.append(amount / (time.perf_counter() - start))
    return tuple(rates)


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
