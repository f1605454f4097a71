from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.parallel import Layout
from tests.cli.conftest import ROOT, Command

MOE, CLUSTER = ROOT / "examples" / "moe.toml", ROOT / "examples" / "cluster.toml"
BATCH = ("--batch", "1048576")


def test_the_best_layout_is_one_that_can_be_trained_with(surefoot: Command) -> None:
    done = surefoot("plan", "layout", MOE, "--cluster", CLUSTER, *BATCH, "--json", "--top", "3")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["layouts"]) == 3
    assert told["considered"] >= told["fitting"] > 3
    degrees = {key.removeprefix("layout."): int(value) for key, value in (one.split("=") for one in told["layouts"][0]["settings"])
               if key.startswith("layout.") and value.isdigit()}  # fmt: skip
    assert Layout(**degrees).world_size == 16
    steps = [one["step_s"] for one in told["layouts"]]
    assert steps == sorted(steps)


def test_a_model_that_fits_nowhere_says_by_how_much(surefoot: Command, tmp_path: Path) -> None:
    table = "[device]\nname='small'\nflops={bfloat16=1e12}\nmemory_bytes=100_000_000\nmemory_bandwidth=1e11\n[device.link]\nbandwidth=1e9\n"
    (tmp_path / "small.toml").write_text("devices_per_node = 2\n" + table)
    done = surefoot("plan", "layout", MOE, "--cluster", "small.toml", *BATCH)
    assert done.returncode == 1, done.stderr
    assert "does not fit: needs" in done.stdout
    assert "0 of" in done.stdout


@pytest.mark.parametrize(
    ("cluster", "arguments", "says"),
    [
        ('device = "H1000"', BATCH, "did you mean 'H100-SXM'"),
        ('device = "H100-SXM"\nnodes = 2', BATCH, "inter_node"),
        ('device = "H100-SXM"', ("--batch", "1000"), "no whole rows"),
        ('device = "H100-SXM"', (*BATCH, "--world", "9"), "use at most 8"),
        ('device = "H100-SXM"\nspeed = 3', BATCH, "speed"),
    ],
)
def test_bad_input_is_one_line(surefoot: Command, tmp_path: Path, cluster: str, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "c.toml").write_text(cluster)
    done = surefoot("plan", "layout", MOE, "--cluster", "c.toml", *arguments)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
