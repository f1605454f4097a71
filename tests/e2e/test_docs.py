"""What the documents point to exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import surefoot
from surefoot.core.errors import EngineError, InputError, NumericsError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
assert surefoot.__file__ is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_source_file_named_exists(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / link).exists(), link
    for name in re.findall(
        r"\b((?:surefoot|tests|bench|core|models|cluster|data|parallel|plan|train|cli|web)/[\w/]+\.(?:py|toml))\b", text
    ):
        if name.startswith("data/mine"):
            continue
        assert (ROOT / name).is_file() or (ROOT / "surefoot" / name).is_file(), name


def test_the_floors_of_the_architecture_are_those_of_the_contract() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    held = {name: 6 - place for place, layer in enumerate(contract["layers"]) for name in re.findall(r"surefoot\.(\w+)", layer)}
    rows = re.findall(r"^\| (\d) \| (`[^|]*`) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    told = {name: int(floor) for floor, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.items() <= held.items()
    assert set(told) == {folder.name for folder in (ROOT / "surefoot").iterdir() if (folder / "__init__.py").is_file()}


def test_the_exit_codes_told_are_those_of_the_errors() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for kind in (InputError, EngineError, NumericsError):
        (row,) = re.findall(rf"^\| [^|]*`{kind.__name__}`[^|]*\| (\d) \|", text, flags=re.MULTILINE)
        assert kind("x").exit_code == int(row)
