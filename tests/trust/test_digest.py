from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.trust.digest import COLUMNS, Digest, differing, digest, digests, layer_of, locate, tree, vote

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
MASK = 2**64 - 1


def noise(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits read as `dtype`: numbers, infinities and NaNs of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (size * width,), dtype=torch.uint8, generator=generator).view(dtype)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    data = tensor.view(-1).view(torch.uint8)
    data[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def weight(word: int) -> int:
    """The weight of a 64-bit word, in Python's integers: an independent statement of the formula."""

    def mixed(number: int) -> int:
        number = (number + 1) * 0x9E3779B97F4A7C15 & MASK
        number = (number ^ signed(number) >> 30) * 0xBF58476D1CE4E5B9 & MASK
        return (number ^ signed(number) >> 27) & MASK

    row, column = divmod(word, COLUMNS)
    rows = mixed(row) << 33 | (row % 2**18) << 15 | 1
    columns = mixed(column) << 15 | 4 * column + 1
    return rows * columns & MASK


def signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >> 63 else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 8, 1001])
def test_a_digest_is_the_two_sums_in_integers_of_any_size(dtype: torch.dtype, size: int) -> None:
    tensor = noise(dtype, size)
    data = bytes(tensor.view(torch.uint8).tolist())
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    full = sum(weight(index) * word for index, word in enumerate(words))
    high = sum(weight(index) * (signed(word) >> 32) for index, word in enumerate(words))
    assert digest(tensor) == Digest(signed(full), signed(high), size, str(dtype).removeprefix("torch."), (size,))


def test_weights_are_what_the_proof_needs() -> None:
    """All 1 modulo 4, and no two equal modulo 2^33: over whole rows at once, at the start and the end of the proven range."""
    words = [row * COLUMNS + column for row in (0, 1, 2, 3, 4095, 2**18 - 2, 2**18 - 1) for column in range(0, COLUMNS, 3)]
    weights = [weight(word) for word in words]
    assert all(one % 4 == 1 for one in weights)
    assert len({one % 2**33 for one in weights}) == len(words)


def test_a_tensor_over_many_rows_is_summed_by_the_same_weights() -> None:
    tensor = torch.zeros(COLUMNS * 40 + 5, dtype=torch.int64)
    for word in (0, 1, COLUMNS - 1, COLUMNS, COLUMNS * 16, COLUMNS * 33 + 7, COLUMNS * 40 + 4):
        tensor.zero_()
        tensor[word] = 1
        assert digest(tensor).full == signed(weight(word))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_flips_the_digest(dtype: torch.dtype) -> None:
    """Each bit position, at the ends, across rows and in the tail; 1,400 flips over all dtypes."""
    tensor = noise(dtype, 70_001)
    before = digest(tensor)
    bits = 1 if dtype == torch.bool else 8 * tensor.element_size()
    chance = random.Random(1)
    for index in range(max(2 * bits, 100)):
        element = chance.choice([0, 70_000, chance.randrange(70_001)])
        flip(tensor, element, index % bits)
        assert digest(tensor) != before, (element, index % bits)
        flip(tensor, element, index % bits)
    assert digest(tensor) == before


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 20_000), st.data())
def test_two_flips_are_always_seen(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Also the same bit twice, which cancels in an XOR of the words."""
    tensor = noise(dtype, size)
    before = digest(tensor)
    bits = 1 if dtype == torch.bool else 8 * tensor.element_size()
    place = st.tuples(st.integers(0, size - 1), st.integers(0, bits - 1))
    first = data.draw(place)
    second = data.draw(st.one_of(place, st.tuples(st.integers(0, size - 1), st.just(first[1]))))
    flip(tensor, *first)
    flip(tensor, *second)
    assert (digest(tensor) == before) == (first == second)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(2, 40_000), st.data())
def test_an_exchange_is_seen_wherever_it_is(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = noise(dtype, size)
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    if data.draw(st.booleans()):  # all but equal: only the highest bit differs
        tensor[j] = tensor[i]
        flip(tensor, j, 0 if dtype == torch.bool else 8 * tensor.element_size() - 1)
    before = digest(tensor)
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (digest(swapped) == before) == same


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("periods", [1, 2, 5, 16])
def test_an_exchange_one_period_of_the_weight_table_apart_is_seen(dtype: torch.dtype, periods: int) -> None:
    period = periods * COLUMNS * 8 // torch.empty(0, dtype=dtype).element_size()
    tensor = noise(dtype, 2 * period + 3)
    for index in (0, 1, period // 2, period + 2):
        other = tensor.clone()
        other[index], other[index + period] = tensor[index + period].clone(), tensor[index].clone()
        assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8)) or digest(other) != digest(tensor)


def test_numbers_that_differ_in_their_sign_only_may_not_change_places() -> None:
    """Their words differ by 2^63, which any even difference of weights would wipe out."""
    assert digest(torch.tensor([1.0, -1.0], dtype=torch.float64)) != digest(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    zeros = torch.zeros(9, dtype=torch.float64)
    assert len({digest(torch.where(torch.arange(9) == place, -0.0, zeros)) for place in range(9)}) == 9


def test_whole_rows_and_blocks_may_not_change_places() -> None:
    """Rows that are permutations of one another: their sums are the same."""
    identity = torch.eye(64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert digest(identity) != digest(identity[order])
    blocks = noise(torch.float32, 4 * 16384).view(4, 16384)
    blocks[2] = blocks[1].flip(0)
    assert digest(blocks) != digest(blocks[[0, 2, 1, 3]])


def test_regular_errors_do_not_cancel() -> None:
    """+1 -2 +1 over neighbours, or over neighbouring rows of the table, is zero under weights that grow evenly."""
    before = torch.full((3 * COLUMNS,), 100, dtype=torch.int64)
    for step in (1, 2, 7, COLUMNS):
        after = before.clone()
        after[:1] += 1
        after[step] -= 2
        after[2 * step] += 1
        assert digest(after) != digest(before)


def test_the_value_does_not_depend_on_threads_strides_or_where_it_lies() -> None:
    tensor = torch.randn(900, 701, generator=torch.Generator().manual_seed(0))
    expected = digest(tensor)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert digest(tensor) == expected
    finally:
        torch.set_num_threads(before)
    assert digest(tensor.T.contiguous().T) == expected
    assert digest(tensor.repeat(2, 1)[900:]) == expected
    for offset in (1, 3):  # begins in the middle of a word
        storage = torch.zeros(tensor.numel() + offset)
        storage[offset:] = tensor.flatten()
        assert digest(storage[offset:].view(900, 701)) == expected
    assert digest(tensor.requires_grad_()) == expected


def test_what_a_tensor_is_belongs_to_its_digest() -> None:
    zeros = torch.zeros(6)
    kinds = [
        zeros,
        zeros.view(2, 3),
        zeros.view(3, 2),
        zeros.int(),
        torch.zeros(7),
        torch.zeros(0),
        torch.zeros(()),
        zeros.bool(),
        zeros[:3].double(),
    ]
    assert len({digest(one) for one in kinds}) == len(kinds)
    assert len({digest(one).hex() for one in kinds}) == len(kinds)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.tensor(math.nan)) == digest(torch.tensor(math.nan))


NAMES = [
    "embed.weight",
    "norm.weight",
    *(f"{kind}.layers.{n}.ffn.{leaf}" for kind in ("model", "optimizer.m") for n in (0, 1, 10) for leaf in "ab"),
]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)), st.randoms())
def test_the_tree_names_exactly_what_differs(changed: set[str], missing: set[str], chance: random.Random) -> None:
    found = digests({name: torch.full((3,), float(index)) for index, name in enumerate(NAMES)})
    other = {name: digest(torch.ones(3) * -7) if name in changed else one for name, one in found.items() if name not in missing}
    names = list(other)
    chance.shuffle(names)
    a, b = tree(found), tree({name: other[name] for name in names})
    assert set(differing(a, b)) == set(differing(b, a)) == changed | missing
    assert (a.root == b.root) == (a == b) == (not changed | missing)
    assert len(bytes.fromhex(a.root)) == 16


def test_a_layer_is_one_node_and_its_number_is_whole() -> None:
    assert layer_of("optimizer.m.layers.10.ffn.up.weight") == "layers.10"
    assert layer_of("norm.weight") == "norm.weight"
    assert set(tree(digests({name: torch.zeros(1) for name in NAMES})).layers) == {
        "embed.weight",
        "norm.weight",
        "layers.0",
        "layers.1",
        "layers.10",
    }


def test_tensors_that_changed_names_differ() -> None:
    a, b = digest(torch.zeros(2)), digest(torch.ones(2))
    assert differing(tree({"layers.0.x": a, "layers.0.y": b}), tree({"layers.0.x": b, "layers.0.y": a})) == ["layers.0.x", "layers.0.y"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_that_differ_are_located_by_their_bits(dtype: torch.dtype) -> None:
    a = noise(dtype, 50).view(5, 10)
    b = a.clone()
    bits = 1 if dtype == torch.bool else 8 * a.element_size()
    flip(b, 7, bits - 1)
    flip(b, 33, 0)
    assert locate(a, b) == [(7, 1 << bits - 1), (33, 1)]
    assert locate(a, b, most=1) == [(7, 1 << bits - 1)]
    assert locate(a, a.clone()) == locate(a[:0], b[:0]) == []
    with pytest.raises(ValueError, match="no elements in common"):
        locate(a, b[:2])


@pytest.mark.parametrize(
    ("values", "suspects"),
    [
        ({0: "a", 1: "a", 2: "b"}, (2,)),
        ({0: "b", 4: "a", 7: "a", 9: "a", 12: "c"}, (0, 12)),
        ({0: "a", 1: "b"}, ()),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, ()),
        ({0: "a", 1: "b", 2: "c"}, ()),
        ({0: "a", 1: "a", 2: "a"}, ()),
        ({}, ()),
    ],
    ids=str,
)
def test_a_vote_needs_three_copies_and_a_strict_majority(values: dict[int, str], suspects: tuple[int, ...]) -> None:
    assert vote(values) == suspects
