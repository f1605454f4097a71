from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.random import generator, key


def _run(code: str, hash_seed: str) -> int:
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
    return int(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


part = st.integers() | st.text(max_size=6)


def test_the_key_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from surefoot.core.random import key; print(key(3, 'init', 'embed.weight', 7))"
    printed = [_run(code, seed) for seed in ("1", "2")]
    assert set(printed) == {key(3, "init", "embed.weight", 7)}


@given(first=st.lists(part, max_size=4), second=st.lists(part, max_size=4))
def test_different_ids_have_different_keys(first: list[int | str], second: list[int | str]) -> None:
    same = [(type(x), x) for x in first] == [(type(x), x) for x in second]
    assert (key(0, *first) == key(0, *second)) == same


def test_parts_do_not_run_together() -> None:
    assert len({key(0, "a", "b"), key(0, "ab"), key(0, "a", "b", ""), key(0, 1), key(0, "1"), key(1, 0), key(0, 1, 0)}) == 7


def test_generators_draw_by_key_alone() -> None:
    def draw(seed: int, *ids: str | int) -> torch.Tensor:
        return torch.rand(4, generator=generator(seed, *ids))

    first = draw(1, "a")
    draw(1, "b")
    assert torch.equal(first, draw(1, "a"))
    assert not torch.equal(first, draw(1, "b"))
    assert not torch.equal(first, draw(2, "a"))
