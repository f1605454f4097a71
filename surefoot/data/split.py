"""Train or validation, decided by a document's content alone.

Neither order, file name nor the rest of the corpus moves a document to the other side, and exact duplicates share a side, so a
validation document is never trained on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.errors import DataError

Hashes = npt.NDArray[np.uint64]


def content_hash(content: bytes) -> int:
    """Return the 64-bit XXH3 of a document's bytes."""
    return xxhash.xxh3_64_intdigest(content)


def validation_mask(hashes: Hashes, fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents are for validation: those whose hash lies in the lowest `fraction` of the 64-bit range.

    Where that leaves a side empty (a small corpus), the document with the lowest hash validates, or the one with the highest trains.
    Raises `DataError` when all documents are equal, so that nothing would be left to validate on.
    """
    if fraction == 0.0:
        return np.zeros(hashes.shape, dtype=np.bool_)
    chosen = hashes < np.uint64(fraction * 2.0**64)
    if not chosen.any():
        chosen = hashes == hashes.min()
    elif chosen.all():
        chosen = hashes != hashes.max()
    if chosen.all() or not chosen.any():
        raise DataError(
            "there is only one distinct document, so nothing is left to validate on",
            where="inputs",
            remedy="give more text, lower max_document_bytes, or set validation_fraction = 0",
        )
    return chosen


def sample_mask(hashes: Hashes, sizes: npt.NDArray[np.int64], budget: int) -> npt.NDArray[np.bool_]:
    """Return documents worth about `budget` bytes, chosen by hash: those with the highest, at least one."""
    order = np.argsort(hashes, kind="stable")[::-1]
    taken = np.cumsum(sizes[order]) - sizes[order] < budget
    # A threshold on the hash, not a prefix of the order: duplicates are then taken together, whatever their position.
    threshold = hashes[order[np.count_nonzero(taken) - 1]]
    return np.asarray(hashes >= threshold)
