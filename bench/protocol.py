"""The worker's side: answers `{"steps": n}` with the seconds and losses of n training steps, over stdin and stdout.

Whatever a library prints goes to stderr, so the pipe carries answers only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch


@dataclass
class Channel:
    """The pipe to the bench; `rss_import` is the peak memory in MB before a model was built."""

    out: TextIO
    rss_import: float = field(default_factory=lambda: peak_mb())

    def say(self, **answer: Any) -> None:
        self.out.write(json.dumps(answer) + "\n")
        self.out.flush()

    def hear(self) -> dict[str, Any] | None:
        """Return the next command, or None when the bench is done."""
        line = sys.stdin.readline()
        command: dict[str, Any] = json.loads(line) if line else {"stop": True}
        if "stop" in command:
            return None
        return command

    def end(self) -> None:
        self.say(stopped=True)


def peak_mb() -> float:
    """Peak resident memory of this process so far, in MB (10^6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def open_channel(threads: int) -> Channel:
    """Keep stdout for answers, send everything else that is printed to stderr, and pin the number of threads."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    return Channel(out)


def parse(extra: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Parse a training worker's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="10m")
    parser.add_argument("--precision", choices=["float32", "autocast", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    if extra:
        extra(parser)
    return parser.parse_args()


def serve(channel: Channel, step: Callable[[int], torch.Tensor], **facts: Any) -> None:
    """Answer commands until told to stop; `step(i)` does training step i and returns its loss, a 0-d tensor."""
    channel.say(rss_import=channel.rss_import, torch=torch.__version__, **facts)
    done = 0
    while (command := channel.hear()) is not None:
        seconds, losses = [], []
        for _ in range(command["steps"]):
            begin = time.perf_counter()
            losses.append(step(done).detach())
            seconds.append(time.perf_counter() - begin)
            done += 1
        channel.say(seconds=seconds, losses=[float(loss) for loss in losses], rss=peak_mb())
    channel.end()
