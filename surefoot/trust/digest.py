"""Digests of tensors: equal bits, equal digest, on any device and with any number of threads; and a tree of them by name.

The bits are read as 64-bit words w_i, each the halves lo_i and hi_i, with a weight k_i: two sums of integers modulo 2^64,

    full = sum k_i w_i,    high = sum k_i hi_i        (and so sum k_i lo_i = full - 2^32 high)

A sum of integers has no rounding, hence no order. The weights are k = R[row] W[column] over a table of 2^13 columns, made so that
all are 1 modulo 4 and no two are equal modulo 2^33. A flip changes a half's sum by 2^b k, b < 32; two flips of the same bit by
2^b (k + k'), where k + k' is 2 modulo 4, or by 2^b (k - k'), which 2^32 at most divides; an exchange of two elements by their
difference times as much. None of these is 0 modulo 2^64. So in a tensor of up to 16 GiB every flip of one bit, every flip of two
bits and every exchange of two unequal elements is seen for certain, and anything else but for chance. Against accidents, not
against an adversary.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

COLUMN_BITS = 13
COLUMNS = 1 << COLUMN_BITS
_ROW_BITS = 18  # rows of which no two weights are equal modulo 2^33: 2^18 rows of 2^13 words are 16 GiB
_CHUNK_ROWS = {"cpu": 16}  # 1 MiB, which stays in a core's cache
_DEVICE_CHUNK_ROWS = 1024  # 64 MiB: kernels long enough to hide their launch

_LAYER = re.compile(r"(?:^|\.)(layers\.\d+)\.")


@dataclass(frozen=True)
class Digest:
    """What stands for the bits of a tensor: the sums `full` and `high` modulo 2^64 (signed), and what kind of tensor it is."""

    full: int
    high: int
    numel: int
    dtype: str
    shape: tuple[int, ...]

    def hex(self) -> str:
        """Return 16 bytes that stand for all of it."""
        return _hash(repr((self.full, self.high, self.dtype, self.shape)))


def digest(tensor: Tensor) -> Digest:
    """Return the digest of `tensor`: any shape, strides, device and dtype."""
    return digests({"": tensor})[""]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """Return the digest of each tensor, with one transfer from each device rather than one for each tensor."""
    found: dict[str, Digest] = {}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    for names in by_device.values():
        for name, (full, high) in zip(names, torch.stack([_sums(tensors[name]) for name in names]).tolist(), strict=True):
            tensor = tensors[name]
            found[name] = Digest(full, high, tensor.numel(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return {name: found[name] for name in tensors}


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """Return [full, high], int64."""
    device, data = tensor.device, _bytes(tensor)
    count = -(-data.numel() // (8 * COLUMNS))
    sums = torch.zeros(2, count, dtype=torch.int64, device=device)  # of each row
    table, most = _columns(device), min(max(count, 1), _CHUNK_ROWS.get(device.type, _DEVICE_CHUNK_ROWS))
    scratch = torch.empty(most, COLUMNS, dtype=torch.int64, device=device)
    for start, words in _pieces(data, most):
        rows, columns = words.shape
        full, high = sums[:, start : start + rows]
        product, weights = scratch[:rows, :columns], table[:columns]
        torch.sum(torch.mul(words, weights, out=product), 1, out=full)
        torch.bitwise_right_shift(words, 32, out=product)
        torch.sum(product.mul_(weights), 1, out=high)
    # Lengths are rounded up so that few tables are kept.
    return sums.mul_(_rows(1 << count.bit_length(), device)[:count]).sum(1)


def _pieces(data: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield `data` as (first row, 64-bit words [up to `most` rows, COLUMNS]), then what is left, filled up with zeros, as a row."""
    width = 8 * COLUMNS
    whole, rest = divmod(data.numel(), width)
    for start in range(0, whole, most):
        piece = data[start * width : min(start + most, whole) * width]
        # A slice may begin in the middle of a word of its storage, where it cannot be viewed as words.
        yield start, (piece if piece.storage_offset() % 8 == 0 else piece.clone()).view(torch.int64).view(-1, COLUMNS)
    if rest:
        last = data.new_zeros(-(-rest // 8) * 8)
        last[:rest] = data[whole * width :]
        yield whole, last.view(torch.int64).view(1, -1)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` in the order of its elements, flat uint8."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@lru_cache
def _columns(device: torch.device) -> Tensor:
    """Return the weight of each column, [COLUMNS]: 1 modulo 4, and all different modulo 2^15."""
    column = torch.arange(COLUMNS, dtype=torch.int64, device=device)
    return (_mixed(column) << (COLUMN_BITS + 2)) | (4 * column + 1)


@lru_cache
def _rows(count: int, device: torch.device) -> Tensor:
    """Return the weights of the first `count` rows: 1 modulo 2^15, and all different modulo 2^33."""
    row = torch.arange(count, dtype=torch.int64, device=device)
    low, bits = COLUMN_BITS + 2, (1 << _ROW_BITS) - 1
    return (_mixed(row) << (low + _ROW_BITS)) | ((row & bits) << low) | 1


def _mixed(number: Tensor) -> Tensor:
    """Return well-spread bits of each number (after splitmix64, Steele et al. 2014); with plain ones regular errors would cancel."""
    number = (number + 1) * (0x9E3779B97F4A7C15 - 2**64)
    number = (number ^ (number >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    return number ^ (number >> 27)


@dataclass(frozen=True)
class Layer:
    """The hash of a layer and of its tensors, by canonical name."""

    hash: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class Tree:
    """A Merkle tree over named tensors: root, layers (or single tensors outside one), tensors; 16 bytes each, as hex."""

    root: str
    layers: dict[str, Layer]


def tree(found: Mapping[str, Digest]) -> Tree:
    """Return the tree over digests by canonical name, whatever their order."""
    grouped: dict[str, dict[str, str]] = {}
    for name in sorted(found):
        grouped.setdefault(layer_of(name), {})[name] = found[name].hex()
    layers = {layer: Layer(_hash(repr(sorted(leaves.items()))), leaves) for layer, leaves in grouped.items()}
    return Tree(_hash(repr(sorted((layer, one.hash) for layer, one in layers.items()))), layers)


def layer_of(name: str) -> str:
    """Return the layer of a tensor, "layers.N", or the tensor's own name outside of one."""
    found = _LAYER.search(name)
    return found.group(1) if found else name


def differing(a: Tree, b: Tree) -> list[str]:
    """Return the names whose tensors differ or stand in one tree only; looks only into layers whose hashes differ."""
    if a.root == b.root:
        return []
    names: list[str] = []
    nothing = Layer("", {})
    for layer in a.layers | b.layers:
        ours, theirs = a.layers.get(layer, nothing), b.layers.get(layer, nothing)
        if ours.hash != theirs.hash:
            names += [name for name in ours.tensors | theirs.tensors if ours.tensors.get(name) != theirs.tensors.get(name)]
    return names


def locate(a: Tensor, b: Tensor, most: int = 8) -> list[tuple[int, int]]:
    """Return the first elements whose bits differ between tensors of one shape and dtype: (flat index, bits that differ)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} have no elements in common")
    width = a.element_size()
    differ = _bytes(a).cpu() ^ _bytes(b).cpu()
    places = differ.view(-1, width).any(1).nonzero().flatten()[:most].tolist() if differ.numel() else []
    return [(place, int.from_bytes(bytes(differ[place * width : (place + 1) * width].tolist()), "little")) for place in places]


def vote(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks at odds with a strict majority of at least three copies; () when all agree or it cannot be told."""
    counts = Counter(values.values()).most_common(1)
    if len(values) < 3 or 2 * counts[0][1] <= len(values):
        return ()
    return tuple(sorted(rank for rank, value in values.items() if value != counts[0][0]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
