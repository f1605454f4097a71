from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
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


def test_timing_noise_changes_no_bit_of_this_and_every_bit_of_a_race(surefoot: Command, tmp_path: Path) -> None:
    tiny = ROOT / "examples" / "tiny.toml"
    done = surefoot("verify", tiny, "--layout", "replicate=2", "--repeat", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["repeat"] == {"times": 3, "first": None}
    shutil.copytree(ROOT / "surefoot", tmp_path / "racy" / "surefoot")
    file = tmp_path / "racy" / "surefoot" / "models" / "ffn.py"
    # An error of rounding that the clock decides: each run is equivalent to the reference, no two are the same bits.
    late = "nn.functional.silu(first) * second * (1.0 + __import__('time').time_ns() // 1024 % 64 * 2.0**-52)"
    file.write_text(file.read_text().replace("nn.functional.silu(first) * second", late))
    done = surefoot("verify", tiny, "--code", "racy", "--precision", "float64", "--repeat", "3", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "wrong"
    assert told["repeat"]["first"]["tensor"].startswith("layers.0")
    found = Evidence.from_json((tmp_path / "evidence.json").read_text())
    assert found.rungs["float64"] == Verdict.EQUIVALENT
    assert found.first is not None
    assert "race" in found.first.sentence


def working_directories() -> Iterator[str]:
    """Yield those of all processes that are ours to see."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield str((process / "cwd").readlink())


@pytest.mark.parametrize("death", ["os._exit(7)", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_dies_during_verification_ends_it_in_one_line(surefoot: Command, tmp_path: Path, death: str) -> None:
    shutil.copytree(ROOT / "surefoot", tmp_path / "dying" / "surefoot")
    file = tmp_path / "dying" / "surefoot" / "models" / "ffn.py"
    dies = f"import os\n        if os.environ.get('RANK') == '1':\n            {death}\n        return nn.functional.silu(first) * second"
    file.write_text(file.read_text().replace("return nn.functional.silu(first) * second", dies))
    done = surefoot("verify", ROOT / "examples" / "tiny.toml", "--code", "dying", "--layout", "replicate=2")
    assert done.returncode == 3, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "the trial run did not end well" in last
    assert "Traceback" not in last
    assert not (tmp_path / "evidence.json").exists()
    assert str(tmp_path) not in list(working_directories())


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
