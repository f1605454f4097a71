"""The measured peaks are rates of the work they say, and they leave the process as it was."""

from __future__ import annotations

import time

import torch

from surefoot.cluster import matmul_peak, memory_bandwidth


def test_peak_agrees_with_a_product_timed_by_hand() -> None:
    peak = matmul_peak(torch.float32, 1, repeats=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    assert 0.3 < peak.rate / (2 * 1024**3 / best) < 3.0  # other work may run beside the test
    assert len(peak.samples) == 3 and min(peak.samples) <= peak.rate <= max(peak.samples)


def test_peak_is_measured_once_and_anew_on_request() -> None:
    first = matmul_peak(torch.float32, 1, repeats=3)
    assert matmul_peak(torch.float32, 1, repeats=3) is first
    assert matmul_peak(torch.float32, 1, repeats=3, fresh=True) is not first


def test_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    assert matmul_peak(torch.bfloat16, before + 1, repeats=1).threads == before + 1
    assert torch.get_num_threads() == before


def test_bandwidth_is_plausible() -> None:
    """Any machine copies between 100 MB/s and 10 TB/s."""
    assert 1e8 < memory_bandwidth(1, megabytes=32, repeats=3).rate < 1e13
