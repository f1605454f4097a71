"""Rectangles from ranks make whole tensors, and what does not fit is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot.models import Transformer
from surefoot.models.parameters import declarations
from surefoot.parallel import Layout
from surefoot.parallel.placement import coordinates, place
from surefoot.trust import Entry, Trace, TraceError, assemble
from surefoot.trust.trace import same_bits
from tests.trust.recording import SPEC

Part = tuple[int, Tensor, list[tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]]]


def columns(whole: Tensor, rank: int, start: int, stop: int) -> Part:
    part = whole[:, start:stop].clone()
    return rank, part, [((slice(None), slice(None)), (0, start), tuple(part.shape))]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_columns_of_two_ranks_make_the_whole(rows: int, width: int, cut: int) -> None:
    cut = min(cut, width)
    whole = torch.randn(rows, width)
    found, owners, faults = assemble(whole.shape, whole.dtype, [columns(whole, 0, 0, cut), columns(whole, 1, cut, width)])
    assert same_bits(found, whole)
    assert not faults
    assert [owner.slices for owner in owners] == [((0, rows), (0, cut)), ((0, rows), (cut, width))]


@pytest.mark.parametrize("name", ["layers.0.mixer.qkv.weight", "layers.1.ffn.down.weight", "norm.weight"])
def test_placements_of_a_layout_make_the_whole(name: str) -> None:
    layout = Layout(tensor=2, replicate=2)
    decl = declarations(Transformer(SPEC))[name]
    whole = torch.randn(decl.shape)
    placed = [place(decl, layout, coordinates(layout, rank)) for rank in range(4)]
    parts = [(rank, one.take(whole), list(one.boxes())) for rank, one in enumerate(placed)]
    found, owners, faults = assemble(decl.shape, whole.dtype, parts)
    assert same_bits(found, whole)
    assert not faults
    assert {owner.rank for owner in owners} == {0, 1, 2, 3}


def test_replicas_that_differ_are_named() -> None:
    whole = torch.randn(3, 8)
    other = whole.clone()
    other[1, 5] += 1
    _, _, faults = assemble((3, 8), whole.dtype, [columns(whole, 0, 0, 6), columns(whole, 2, 6, 8), columns(other, 3, 4, 8)])
    assert faults == ["ranks 0 and 3 hold different values of 1 elements, the first at [1, 5]"]


def test_a_missing_element_is_named() -> None:
    whole = torch.randn(3, 8)
    _, _, faults = assemble((3, 8), whole.dtype, [columns(whole, 0, 0, 3), columns(whole, 1, 4, 8)])
    assert faults == ["no rank holds 3 of 24 elements, the first at [0, 3]"]


def test_replicas_are_held_to_the_bit() -> None:
    zero, minus, nan = torch.zeros(1, 1), -torch.zeros(1, 1), torch.full((1, 1), torch.nan)
    assert assemble((1, 1), torch.float32, [columns(zero, 0, 0, 1), columns(minus, 1, 0, 1)])[2]
    assert not assemble((1, 1), torch.float32, [columns(nan, 0, 0, 1), columns(nan, 1, 0, 1)])[2]


def test_scalars_and_wrong_dtypes() -> None:
    whole, _, faults = assemble((), torch.float32, [(0, torch.tensor(2.0), [((), (), ())])])
    assert (float(whole), faults) == (2.0, [])
    assert assemble((), torch.float32, [(4, torch.tensor(2), [((), (), ())])])[2][0] == "rank 4 holds int64, not float32"


def test_order_is_the_data_flow_and_names_are_unique() -> None:
    one = torch.zeros(1)
    entries = [Entry("p", "update", 0, one), Entry("b", "forward", 1, one), Entry("p", "reduction", 0, one), Entry("a", "forward", 0, one)]
    assert [(e.phase, e.name) for e in Trace(tuple(entries)).ordered()] == [
        ("forward", "a"),
        ("forward", "b"),
        ("reduction", "p"),
        ("update", "p"),
    ]
    with pytest.raises(TraceError, match="twice"):
        Trace((entries[0], entries[0]))
