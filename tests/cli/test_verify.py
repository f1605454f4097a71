from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from surefoot.trust import Evidence, Verdict
from tests.cli.conftest import ROOT, Command

MOE = ROOT / "examples" / "moe.toml"


def test_a_layout_that_computes_the_same_leaves_evidence(surefoot: Command, tmp_path: Path) -> None:
    done = surefoot("verify", MOE, "--layout", "tensor=2", "--out", "e.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "equivalent"
    evidence = Evidence.from_json((tmp_path / "e.json").read_text())
    assert evidence.verdict == Verdict.EQUIVALENT
    assert len(evidence.rows) > 50


def test_other_code_that_computes_something_else_is_wrong(surefoot: Command, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "surefoot", tmp_path / "other" / "surefoot")
    file = tmp_path / "other" / "surefoot" / "models" / "ffn.py"
    file.write_text(file.read_text().replace("nn.functional.silu(first) * second", "nn.functional.silu(1.0001 * first) * second"))
    done = surefoot("verify", ROOT / "examples" / "tiny.toml", "--code", "other")
    assert done.returncode == 1, done.stderr
    assert "wrong" in done.stderr + done.stdout
    assert "layers.0.ffn" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--layout", "tensor=64"), "layout.tensor"),
        (("--layout", "tensors=2"), "tensor"),
        (("--code", "nowhere"), "holds no surefoot package"),
        (("--precision", "float8"), "float8"),
    ],
)
def test_bad_input_is_one_line(surefoot: Command, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = surefoot("verify", MOE, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not (tmp_path / "evidence.json").exists()
