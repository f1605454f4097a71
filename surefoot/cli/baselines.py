"""What a model's bits per byte are held against: compressors and models that anyone can compute."""

from __future__ import annotations

import lzma
import math
from collections import Counter


def xz_bits_per_byte(text: bytes) -> float:
    """Return the size of `text` under ``xz -9``, in bits per byte of `text`."""
    return 8 * len(lzma.compress(text, format=lzma.FORMAT_XZ, preset=9)) / len(text)


def byte_entropy(text: bytes) -> float:
    """Return the bits per byte of `text` under the best model that looks at single bytes only (its own order-0 entropy)."""
    return sum(count / len(text) * math.log2(len(text) / count) for count in Counter(text).values())
