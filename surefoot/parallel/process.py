"""Processes: joining the group that the environment describes, and starting local ones."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from surefoot.core.errors import EngineError

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Processes:
    """This process's place among all of them."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def join(environment: Mapping[str, str] | None = None) -> Processes:
        """Join the group described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's variables); alone without them."""
        env = os.environ if environment is None else environment
        size, rank = int(env.get("WORLD_SIZE", "1")), int(env.get("RANK", "0"))
        if size == 1:
            return Processes()
        if not dist.is_initialized():
            # The store outlives a torchrun restart; without a prefix an attempt may read the address of a dead process.
            serves = env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
            timeout = datetime.timedelta(seconds=TIMEOUT_S)
            try:
                store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), size, is_master=serves, timeout=timeout)
                attempt = PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
                dist.init_process_group(backend(), store=attempt, rank=rank, world_size=size, timeout=timeout)
            except (RuntimeError, KeyError) as error:
                where, remedy = f"rank {rank} of {size}", "check MASTER_ADDR and MASTER_PORT"
                raise EngineError(f"the processes did not find each other: {error}", where=where, remedy=remedy) from error
        return Processes(rank, size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all processes, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def backend() -> str:
    """NCCL for GPUs, gloo for CPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def launch(count: int, arguments: Sequence[str], *, threads: int | None = None) -> int:
    """Run ``python arguments`` as `count` local processes that form a group; return the exit code of the first to fail, or 0.

    SIGINT and SIGTERM are passed on. When one process dies the others, which would wait for it for ever, are ended after a grace.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    share = threads or max(1, (os.cpu_count() or 1) // count)
    children = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(share),
            },
            start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which passes it on once
        )
        for rank in range(count)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen[bytes]], grace_s: float = 10.0) -> int:
    failed_at: float | None = None
    code = 0
    while None in [child.poll() for child in children]:  # every one is asked: a dead one behind a live one counts
        if failed_at is None:
            bad = next((child.returncode for child in children if child.returncode not in (None, 0)), None)
            if bad is not None:
                failed_at, code = time.monotonic(), bad
        elif time.monotonic() - failed_at > grace_s:
            break
        time.sleep(0.05)
    codes = [child.returncode for child in children if child.returncode not in (None, 0)]
    code = code or next(iter(codes), 0)
    return code if code >= 0 else 128 - code
