from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.cli.conftest import Command

MODEL = """
run = "run"
[model]
vocab_size = 300
dim = 16
layers = 1
max_positions = 64
[model.attention]
heads = 2
kv_heads = 1
head_dim = 8
[model.ffn]
hidden = 24
[train]
steps = 6
batch_size = 8
threads = 1
[data]
sequence_length = 32
"""


@pytest.fixture
def prepared(surefoot: Command, tmp_path: Path) -> Path:
    """A configuration with two sources, 3 to 1."""
    for name in ("web", "code"):
        (tmp_path / f"{name}.d").mkdir()
        chance = random.Random(name)
        for index in range(40):
            (tmp_path / f"{name}.d" / f"{index}.txt").write_text(" ".join(chance.choices(["a", "bb", name], k=chance.choice([5, 80]))))
        more = ("--tokenizer", "web") if name == "code" else ("--vocab-size", "280")
        done = surefoot("data", "prepare", f"{name}.d", "--out", name, *more)
        assert done.returncode == 0, done.stderr
    table = '[[data.sources]]\nname = "{0}"\npath = "{0}"\nweight = {1}\n'
    sources = "".join(table.format(name, weight) for name, weight in (("web", 3.0), ("code", 1.0)))
    (tmp_path / "c.toml").write_text(MODEL + sources)
    return tmp_path


def test_a_mixture_is_planned_trained_and_audited(surefoot: Command, prepared: Path) -> None:
    done = surefoot("data", "plan", "c.toml", "layout.replicate=2", "--json", "--steps", "100")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["sources"]["web"]["given"] == pytest.approx(0.75, abs=0.02)
    assert told["padding"] < 0.05
    assert 1.0 <= told["imbalance_after"] <= told["imbalance_before"] + 1e-9
    assert surefoot("train", "c.toml").returncode == 0
    done = surefoot("data", "audit", "run")
    assert done.returncode == 0, done.stderr
    assert "nothing lost, nothing twice" in done.stderr
    done = surefoot("data", "reweight", "run", "code=2", "web=1")
    assert done.returncode == 0, done.stderr
    assert json.loads((prepared / "run" / "reweight.json").read_text()) == {"code": 2.0, "web": 1.0}
    assert surefoot("resume", "run", "train.steps=14").returncode == 0
    told = json.loads(surefoot("data", "audit", "run", "--json").stdout)
    assert (told["steps"], told["problems"]) == (14, [])
    ledger = prepared / "run" / "ledger.bin"
    content = bytearray(ledger.read_bytes())
    content[80] ^= 4
    ledger.write_bytes(bytes(content))
    done = surefoot("data", "audit", "run")
    assert done.returncode == 2
    assert "the record of step 1 is damaged" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("data", "plan", "c.toml", 'data.sources=[{name="web",path="web",weight=0.0}]'), "greater than 0"),
        (("data", "plan", "c.toml", 'data.sources=[{name="web",path="nowhere"}]'), "there is no prepared dataset here"),
        (("data", "reweight", "nowhere", "web=1"), "nowhere"),
        (("data", "audit", "nowhere"), "nowhere"),
        (("train", "c.toml", "model.vocab_size=10"), "is smaller than the vocabulary of web, code"),
    ],
)
def test_bad_input_is_one_line(surefoot: Command, prepared: Path, arguments: tuple[str, ...], says: str) -> None:
    done = surefoot(*arguments)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
