"""Files that are whole or absent: write aside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import xxhash

from surefoot.core.errors import EngineError

HASH_CHUNK_BYTES = 4 << 20


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader, or a crash at any moment, sees the old file or the new one, never a part.

    Raises `EngineError` when the disk is full or the folder cannot be written.
    """
    path = Path(path)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    aside = ""
    try:
        descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)


def fsync_dir(path: Path | str) -> None:
    """Make the names in folder `path` durable: a rename survives a power cut only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path | str) -> str:
    """Return the xxh3_128 of the file's bytes as 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def free_bytes(path: Path | str) -> int:
    """Return the bytes an ordinary user can still write on the disk of `path`, which need not exist yet."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def disk_error(error: OSError, path: Path | str) -> EngineError:
    """Return `error`, met while writing `path`, as a one-line error with its remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space or choose another disk" if full else "check that the folder exists and can be written"
    return EngineError("the disk is full" if full else f"cannot be written: {error.strerror or error}", where=str(path), remedy=remedy)


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
