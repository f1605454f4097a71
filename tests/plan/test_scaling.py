"""The scaling law: its closed form against a search, its fit against known constants, its suggestions against its own optimum."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from surefoot.core.config import dumps
from surefoot.core.errors import InputError
from surefoot.models.flops import count_flops, count_parameters
from surefoot.plan import Observation, ScalingLaw, fit, observe
from surefoot.plan.scaling import PUBLISHED
from surefoot.plan.suggestion import ladder, suggest
from surefoot.train.config import TrainConfig

TRUE = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022")


def grid(noise: float = 0.0) -> list[Observation]:
    """Models of 1M to 300M parameters on 20M to 6B tokens, with losses by `TRUE` and relative `noise`."""
    draw = random.Random(0)
    pairs = [(n * 1e6, d * 1e7) for n in (1, 5, 20, 80, 300) for d in (2, 10, 60, 600)]
    return [Observation(n, d, TRUE.loss(n, d) * (1 + draw.gauss(0, noise))) for n, d in pairs]


@pytest.mark.parametrize("flops", [1e18, 1e21, 5.76e23])
def test_allocation_is_the_best_split(flops: float) -> None:
    best = TRUE.allocate(flops)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        n = best.parameters * factor
        assert TRUE.loss(n, flops / 6 / n) > best.loss


def test_gopher_budget_gives_chinchilla() -> None:
    """Hoffmann et al., table A3 (approach 3): 5.76e23 FLOPs want about 40B parameters."""
    assert TRUE.allocate(5.76e23).parameters / 1e9 == pytest.approx(40, rel=0.25)


def test_fit_recovers_known_constants() -> None:
    law = fit(grid())
    for name in ("e", "alpha", "beta"):
        assert getattr(law, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
    for flops in (1e18, 1e20):
        assert law.allocate(flops).parameters == pytest.approx(TRUE.allocate(flops).parameters, rel=0.05)


def test_fit_survives_noise_and_a_failed_run() -> None:
    """Half a percent of noise and one run that diverged: the Huber loss keeps the optimum within a factor."""
    runs = grid(noise=0.005)
    runs[7] = Observation(runs[7].parameters, runs[7].tokens, runs[7].loss * 1.5)
    law = fit(runs)
    assert 0.4 < law.allocate(1e19).parameters / TRUE.allocate(1e19).parameters < 2.5
    assert law.loss(1e8, 2e9) == pytest.approx(TRUE.loss(1e8, 2e9), rel=0.02)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(InputError, match="cannot tell five constants"):
        fit(grid()[:4])
    with pytest.raises(InputError, match="cannot tell five constants"):
        fit([Observation(1e6, d * 1e7, 4.0) for d in range(1, 9)])


def make_run(folder: Path, layers: int, tokens: int, loss: float) -> None:
    spec = {"vocab_size": 64, "dim": 32, "layers": layers, "attention": {"heads": 2, "kv_heads": 2, "head_dim": 16}, "ffn": {"hidden": 64}}
    config = TrainConfig.model_validate({"run": str(folder), "model": spec, "data": {"path": "d"}, "train": {"steps": 4, "batch_size": 2}})
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dumps(config))
    events = [{"kind": "step", "step": step, "tokens": tokens, "loss": 9.0} for step in (1, 2, 3, 4)]
    events.append({"kind": "eval", "step": 4, "loss": loss, "bits_per_byte": 1.0, "tokens": 10})
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 0.0, **event}) + "\n" for event in events))


def test_observations_are_size_tokens_and_last_evaluation(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 2, 1024, 3.5)
    make_run(tmp_path / "deeper" / "b", 3, 1024, 3.25)
    first, second = observe(tmp_path)
    block = 4 * 32 * 32 + 3 * 64 * 32 + 2 * 32
    assert first.parameters == 2 * 64 * 32 + 2 * block + 32
    assert second.parameters - first.parameters == block
    assert (first.loss, second.loss) == (3.5, 3.25)
    assert first.tokens == 4 * 1024  # every step's, not the last one's


def test_no_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        observe(tmp_path)


@pytest.mark.parametrize("flops", [1e16, 1e18, 1e21])
def test_suggestion_spends_the_budget_and_beats_its_neighbours(flops: float) -> None:
    found = suggest(flops, PUBLISHED, vocab_size=8192, sequence_length=512)
    assert 0.999 * flops < found.flops <= flops
    assert found.parameters == count_parameters(found.spec).active
    for other in ladder(8192, 512):
        price = count_flops(other, 512).training
        assert PUBLISHED.loss(count_parameters(other).active, flops / price) >= found.loss - 1e-9
    assert found.parameters == pytest.approx(PUBLISHED.allocate(flops).parameters, rel=1.0)


def test_more_compute_buys_a_larger_model_and_more_text() -> None:
    found = [suggest(flops, vocab_size=8192, sequence_length=512) for flops in (1e15, 1e17, 1e19, 1e21)]
    for less, more in zip(found, found[1:], strict=False):
        assert more.parameters > less.parameters and more.tokens > less.tokens and more.loss < less.loss


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="do not pay one sequence"):
        suggest(1e6)
