"""Real processes for tests: a function on n ranks over gloo, with a time-out, and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """Return ``function(processes, *arguments)`` of every rank; raise with the traceback of the first rank that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Children are forked from a server that has imported torch and started no thread: a second less of imports for each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["surefoot.train"])
    folder.mkdir(parents=True, exist_ok=True)
    children = [context.Process(target=_child, args=(rank, size, port, folder, function, arguments)) for rank in range(size)]
    for child in children:
        child.start()
    try:
        end = time.monotonic() + timeout_s  # of all together
        for child in children:
            child.join(max(0.0, end - time.monotonic()))
    finally:
        late = [child.pid for child in children if child.is_alive()]
        for child in children:
            if child.is_alive():
                child.kill()
            child.join(10.0)
    found = [pickle.loads((folder / f"rank{rank}").read_bytes()) if (folder / f"rank{rank}").exists() else None for rank in range(size)]
    for rank, entry in enumerate(found):
        if entry is not None and not entry[0]:
            raise AssertionError(f"rank {rank}: {entry[1]}")
    if late or any(entry is None for entry in found):
        raise AssertionError(f"ranks did not finish within {timeout_s} s: {late}, exit codes {[child.exitcode for child in children]}")
    return [entry[1] for entry in found if entry is not None]


def _child(rank: int, size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    import torch

    from surefoot.parallel import Processes
    from surefoot.parallel.process import leave

    torch.set_num_threads(1)
    try:
        processes = Processes.join()
        result = (True, function(processes, *arguments))
        leave()
    except BaseException:  # noqa: BLE001 - the parent raises it
        result = (False, traceback.format_exc())
    (folder / f"rank{rank}").write_bytes(pickle.dumps(result))
