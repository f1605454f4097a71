from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.data.split import content_hash, sample_mask, validation_mask

CONTENTS = st.lists(st.binary(min_size=1, max_size=8), min_size=2, max_size=60).filter(lambda found: len(set(found)) > 1)


def hashes_of(contents: list[bytes]) -> np.ndarray:
    return np.array([content_hash(content) for content in contents], dtype=np.uint64)


@given(contents=CONTENTS, fraction=st.floats(0.001, 0.5), data=st.data())
def test_order_does_not_move_a_document_and_duplicates_share_a_side(contents: list[bytes], fraction: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(contents))))
    chosen = validation_mask(hashes_of(contents), fraction)
    again = validation_mask(hashes_of([contents[index] for index in order]), fraction)
    assert again.tolist() == [bool(chosen[index]) for index in order]
    sides = {content: {bool(side) for other, side in zip(contents, chosen, strict=True) if other == content} for content in contents}
    assert all(len(side) == 1 for side in sides.values())
    assert chosen.any()
    assert not chosen.all()


def test_adding_documents_moves_none_of_the_others() -> None:
    contents = [str(index).encode() for index in range(1000)]
    few, many = validation_mask(hashes_of(contents[:500]), 0.1), validation_mask(hashes_of(contents), 0.1)
    assert few.tolist() == many[:500].tolist()
    assert 60 <= many.sum() <= 140


def test_one_distinct_document_cannot_be_split() -> None:
    with pytest.raises(DataError, match="only one distinct document"):
        validation_mask(hashes_of([b"same", b"same"]), 0.1)
    assert not validation_mask(hashes_of([b"same"]), 0.0).any()


@given(contents=CONTENTS, budget=st.integers(1, 400))
def test_the_sample_is_about_the_budget_and_ignores_order(contents: list[bytes], budget: int) -> None:
    unique = sorted(set(contents))
    sizes = np.array([len(content) for content in unique], dtype=np.int64)
    taken = sample_mask(hashes_of(unique), sizes, budget)
    total = int(sizes[taken].sum())
    assert total >= min(budget, int(sizes.sum()))
    assert total < budget + 8
    reverse = sample_mask(hashes_of(unique[::-1]), sizes[::-1], budget)
    assert reverse[::-1].tolist() == taken.tolist()
