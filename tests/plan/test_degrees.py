"""Every layout and no other: held against brute force over the rules that training itself applies."""

from __future__ import annotations

from itertools import product

import pytest

from surefoot.core.errors import LayoutError
from surefoot.parallel import Layout
from surefoot.plan import Degrees, enumerate_layouts
from tests.parallel.cells import SPECS

AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("world", "rows", "sequence"), [(1, 1, 32), (4, 4, 32), (8, 6, 32), (8, 8, 24), (6, 12, 36)])
def test_the_layouts_are_those_that_training_takes(name: str, world: int, rows: int, sequence: int) -> None:
    spec = SPECS[name]
    expected = set()
    for degrees in product(*[range(1, world + 1)] * 6):
        layout = Layout(**dict(zip(AXES, degrees, strict=True)))
        if layout.world_size != world or rows % layout.data or (spec.moe is None and layout.expert > 1):
            continue
        try:
            layout.check_model(spec, sequence)
        except LayoutError:
            continue
        expected.add(Degrees(*degrees))
    if expected:
        assert set(enumerate_layouts(spec, world, rows, sequence)) == expected
    else:
        with pytest.raises(LayoutError, match="no layout of"):
            enumerate_layouts(spec, world, rows, sequence)
