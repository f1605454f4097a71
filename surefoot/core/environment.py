"""Where a run runs: versions, processor, memory, code and command line, as plain data."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "pydantic", "pyarrow")


def environment() -> dict[str, Any]:
    """Return the record that stands in a run's ``environment.json``; imports no heavy library."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "packages": versions(PACKAGES),
        "surefoot": versions(("surefoot",)).get("surefoot", "source tree"),
        "git": git_commit(),
        "argv": sys.argv,
    }


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each distribution in `names` that is installed, without importing it."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Return the processor's model name, or the architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.machine()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def git_commit() -> str:
    """Return the commit of the source tree Surefoot runs from, marked ``+changes`` when dirty; empty outside a git tree."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if commit and _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
