"""Processes: joining the group that the environment describes, and starting local ones."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from surefoot.core.environment import usable_cores
from surefoot.core.errors import ConfigError, EngineError

CPU = torch.device("cpu")
TIMEOUT_S = 600.0
INPUT_AT_FAULT = 2  # the exit code of what every process finds alike
_PR_SET_PDEATHSIG = 1  # prctl.h

T = TypeVar("T")


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
            timeout = datetime.timedelta(seconds=float(env.get("SUREFOOT_TIMEOUT_S", TIMEOUT_S)))
            try:
                store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), size, is_master=serves, timeout=timeout)
                attempt = PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
                dist.init_process_group(backend(), store=attempt, rank=rank, world_size=size, timeout=timeout)
            except (RuntimeError, KeyError) as error:
                where, remedy = f"rank {rank} of {size}", "check MASTER_ADDR and MASTER_PORT"
                raise EngineError(f"the processes did not find each other: {error}", where=where, remedy=remedy) from error
        return Processes(rank, size)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all processes, in place, and return it. Raises `EngineError` when one of them is gone."""
        if self.size > 1:
            with among_peers():
                dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any process: what all of them must then do at the same point."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag))) > 0)

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Return the `value` of every process, by rank; it must be picklable."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with among_peers():
            dist.all_gather_object(values, value, group=group)
        return values

    def collect(self, value: T) -> list[T] | None:
        """Return the `value` of every process, by rank, on the first; None on the others. It must be picklable, and may be large."""
        if self.size == 1:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        with among_peers():
            dist.gather_object(value, values)
        return values


def leave(code: int = 0) -> None:
    """Leave the group, if this process is in one; with a `code` other than 0, a failure, end the process with it.

    A group that outlives the interpreter takes the process down, now and then, in the destructors of its threads. One that failed may
    wait in its own for a peer that is gone: such a process ends without them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    dist.destroy_process_group()


@contextlib.contextmanager
def among_peers() -> Iterator[None]:
    """Turn the failure of a collective, which is how the death of another process shows, into an `EngineError`."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition(". ")[0][:200]
        raise EngineError(f"another process of the group is gone ({said})", remedy="see what it said; then: surefoot resume") from error


def check_device(kind: str) -> None:
    """Raise `ConfigError` when `kind` is "cuda" and there is no GPU."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this torch sees no GPU", where="train.device", remedy='use "cpu" or "auto", or install a torch built for CUDA')


def device_of(kind: str, environment: Mapping[str, str] | None = None) -> torch.device:
    """Return this process's device for `kind` ("auto", "cpu", "cuda"): on a machine with GPUs the one of its LOCAL_RANK, made current.

    Raises `ConfigError` when "cuda" is asked for and there is none.
    """
    check_device(kind)
    if kind == "cpu" or not torch.cuda.is_available():
        return CPU
    env = os.environ if environment is None else environment
    device = torch.device("cuda", int(env.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend() -> str:
    """NCCL for GPUs, gloo for CPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def launch(count: int, arguments: Sequence[str], *, threads: int | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Run ``python arguments`` as `count` local processes that form a group; return the exit code of the first to fail, or 0.

    SIGINT and SIGTERM are passed on. When one process dies the others, which would wait for it for ever, are ended after a grace;
    should this process be killed, they are sent SIGTERM. The first process has the terminal; of another one that fails first the
    last line it wrote to standard error is shown.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        **(environment or {}),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads or max(1, usable_cores() // count)),
    }
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        try:
            for rank in range(count):
                children.append(_start(arguments, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, said[rank] if rank else None))
            first = _wait(children)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0 if first is None else _failure(first, children, said)


def _start(arguments: Sequence[str], environment: dict[str, str], errors: IO[bytes] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stderr=errors,
        start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which passes it on once
        preexec_fn=_die_with(os.getpid()),
    )


def _die_with(parent: int) -> Callable[[], None] | None:
    """Return what a child of `parent` does first on Linux: ask the kernel for SIGTERM when its parent is gone, however it went."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec nothing may be loaded

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _wait(children: list[subprocess.Popen[bytes]], grace_s: float = 10.0) -> int | None:
    """Wait for all, or until `grace_s` after the first failure; return the rank of the first to fail."""
    first: int | None = None
    failed_at = 0.0
    while None in [child.poll() for child in children]:  # every one is asked: a dead one behind a live one counts
        if first is None:
            first, failed_at = _failed(children), time.monotonic()
        elif time.monotonic() - failed_at > grace_s:
            break
        time.sleep(0.05)
    return _failed(children) if first is None else first


def _failed(children: list[subprocess.Popen[bytes]]) -> int | None:
    return next((rank for rank, child in enumerate(children) if child.returncode not in (None, 0)), None)


def _failure(rank: int, children: Sequence[subprocess.Popen[bytes]], said: Sequence[IO[bytes]]) -> int:
    """Return the exit code of `rank`, after telling its last words where the terminal has not shown them."""
    code = children[rank].returncode
    code = code if code >= 0 else 128 - code
    told_alike = code in (INPUT_AT_FAULT, 128 + signal.SIGINT) and children[0].returncode == code
    if rank > 0 and not told_alike:
        said[rank].seek(0)
        lines = said[rank].read().decode(errors="replace").strip().splitlines()
        words = lines[-1] if lines else "died without a word"
        sys.stderr.write(f"process {rank} (exit code {code}): {words}\n")
    return code
