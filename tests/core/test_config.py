from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from surefoot.core.config import Config, dumps, load, parse
from surefoot.core.errors import ConfigError


class Inner(Config):
    rate: float = Field(0.1, gt=0)
    kind: Literal["cosine", "linear", "wsd"] = "cosine"


class Outer(Config):
    steps: int = 10
    name: str = "run"
    tags: tuple[str, ...] = ()
    schedule: Inner = Inner()
    other: Inner | None = None


@given(
    steps=st.integers(-(2**53), 2**53),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    tags=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e300),
)
def test_round_trip_through_toml(tmp_path_factory: pytest.TempPathFactory, steps: int, name: str, tags: list[str], rate: float) -> None:
    config = Outer(steps=steps, name=name, tags=tuple(tags), schedule=Inner(rate=rate, kind="wsd"))
    path = tmp_path_factory.mktemp("config") / "c.toml"
    path.write_text(dumps(config), encoding="utf-8")
    assert load(Outer, path) == config


def _refused(table: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, table, where="c.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"step": 3}, ["c.toml: step", "unknown key", "did you mean 'steps'?"]),
        ({"schedule": {"rat": 3}}, ["schedule.rat", "unknown key", "did you mean 'rate'?"]),
        ({"other": {"knd": "wsd"}}, ["other.knd", "did you mean 'kind'?"]),
        ({"schedule": {"kind": "cosin"}}, ["schedule.kind", "'cosin'", "did you mean 'cosine'?"]),
        ({"schedule": {"rate": -1}}, ["schedule.rate", "greater than 0", "got -1"]),
        ({"schedule": {"rate": float("nan")}}, ["schedule.rate", "finite"]),
        ({"steps": "many"}, ["steps", "integer", "'many'"]),
        ({"zzz": 1}, ["zzz", "choose one of: name, other, schedule, steps, tags"]),
    ],
)
def test_a_refusal_names_key_reason_and_remedy(table: dict[str, object], parts: list[str]) -> None:
    message = _refused(table)
    for part in parts:
        assert part in message


def test_overrides_reach_nested_keys_and_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("steps = 1\n")
    config = load(Outer, path, ["schedule.rate=0.5", "name=free text", "steps=4", 'tags=["a", "b"]', "other.kind=linear"])
    assert (config.steps, config.name, config.tags, config.schedule.rate) == (4, "free text", ("a", "b"), 0.5)
    assert config.other == Inner(kind="linear")


@pytest.mark.parametrize(
    ("override", "part"),
    [("steps", "is not an override"), ("=3", "is not an override"), ("steps.x=1", "goes through"), ("stepz=1", "'steps'")],
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str, part: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text("steps = 1\n")
    with pytest.raises(ConfigError, match=part):
        load(Outer, path, [override])


@pytest.mark.parametrize(("content", "part"), [(None, "no such file"), (b"a = = 1", "not valid TOML"), (b"\xff\x00", "not valid TOML")])
def test_bad_files_are_refused(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        load(Outer, path)
    with pytest.raises(ConfigError, match="is a directory"):
        load(Outer, tmp_path)
