"""A run whose layout computes something else does not begin; one that computes the same is not changed by having been tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.events import read
from surefoot.core.rundir import Run
from surefoot.parallel import Processes, tensor
from surefoot.train import TrainConfig, fit
from surefoot.train.admission import VerdictError, _known, run_seconds, wanted
from surefoot.train.checkpoint import list_steps, load_model
from surefoot.trust import Evidence, Verdict
from tests.spawning import run_ranks
from tests.train.conftest import MODEL, Configure

TWO = {"layout": {"tensor": 2}, "model": MODEL | {"attention": {"heads": 2, "kv_heads": 2, "head_dim": 8}}}


def trained(processes: Processes, config: TrainConfig) -> str:
    try:
        if processes.rank == 0:
            with Run.create(config.run, config) as run:
                fit(config, run)
        else:
            fit(config, None)
    except VerdictError as error:
        return str(error)
    return ""


def tried_and_not(processes: Processes, tried: TrainConfig, plain: TrainConfig) -> list[str]:
    return [trained(processes, config) for config in (tried, plain)]


def trained_wrongly(processes: Processes, config: TrainConfig) -> str:
    """With a sum over tensor-parallel ranks that is a little too large, as a plain scale would be."""
    right = tensor.all_reduce

    def wrong(*arguments: Any, **options: Any) -> Any:
        return right(*arguments, **options) * (1.0 + 1e-6)

    tensor.all_reduce = wrong  # type: ignore[assignment]
    return trained(processes, config)


def test_a_layout_that_computes_the_same_is_admitted_and_the_run_is_the_same_to_the_bit(configure: Configure, tmp_path: Path) -> None:
    tried, plain = configure("tried", **TWO, trust={"verify": "always"}), configure("plain", **TWO)
    assert run_ranks(tried_and_not, 2, tmp_path / "ranks", tried, plain) == [["", ""], ["", ""]]
    evidence = Evidence.from_json((Path(tried.run) / "evidence.json").read_text())
    assert evidence.verdict is Verdict.EQUIVALENT
    names = {row.name for row in evidence.rows}
    assert {"loss", "gradient_norm", "layers.1.ffn.down.weight", "m.embed.weight"} <= names
    told = [event.fields["verdict"] for event in read(Path(tried.run) / "events.jsonl") if event.kind == "verify"]
    assert told == ["equivalent"]
    assert not (Path(plain.run) / "evidence.json").exists()
    ours, theirs = (load_model(config.run)[1].state_dict() for config in (tried, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_layout_that_computes_something_else_is_not_trained_with(configure: Configure, tmp_path: Path) -> None:
    config = configure("wrong", **TWO, trust={"verify": "always"})
    first, second = run_ranks(trained_wrongly, 2, tmp_path / "ranks", config)
    for said in (first, second):
        assert "a trial of this layout is wrong: " in said
        assert 'trust.verify="never"' in said
    assert Evidence.from_json((Path(config.run) / "evidence.json").read_text()).verdict is Verdict.WRONG
    assert list_steps(Path(config.run) / "checkpoints") == []


@pytest.mark.parametrize(
    ("layout", "verify", "steps", "expected"),
    [
        ({"tensor": 2}, "auto", 10, False),  # seconds of training
        ({"tensor": 2}, "auto", 100_000_000, True),
        ({"tensor": 2}, "always", 10, True),
        ({"tensor": 2}, "never", 100_000_000, False),
        ({}, "auto", 100_000_000, False),  # the plain model itself
        ({}, "always", 10, False),
    ],
)
def test_a_trial_is_taken_when_it_costs_next_to_nothing(
    configure: Configure, layout: dict[str, int], verify: str, steps: int, expected: bool
) -> None:
    config = configure(layout=layout, trust={"verify": verify}, train={"steps": steps})
    assert wanted(config, 1e11) == expected


def test_the_time_of_a_run_is_its_flops_over_half_the_peak(configure: Configure) -> None:
    config = configure(train={"steps": 7})
    flops = 3 * 2 * 2304 + 3 * 2 * 2 * (32 + 1) / 2 * 16 * 2  # of a token: 2,304 weights in the layers; scores and values, causal
    head = 3 * 2 * 16 * 300
    assert run_seconds(config, 1e9) == pytest.approx(7 * 8 * 32 * (flops + head) / 0.5e9, rel=0.5)


def test_evidence_counts_for_the_same_trial_only_and_never_when_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.train.admission.code_version", lambda: "1")
    kept = tmp_path / "evidence.json"
    assert _known(kept, "a") is None
    for verdict, expected in ((Verdict.EQUIVALENT, Verdict.EQUIVALENT), (Verdict.WRONG, None), (Verdict.LOSSY, None)):
        kept.write_text(Evidence(verdict, {}, (), None, {"mark": "a"}).to_json())
        assert (_known(kept, "a"), _known(kept, "b")) == (expected, None)
    kept.write_text(kept.read_text()[:30])
    assert _known(kept, "a") is None
    kept.write_text(Evidence(Verdict.EQUIVALENT, {}, (), None, {"mark": "a"}).to_json())
    monkeypatch.setattr("surefoot.train.admission.code_version", lambda: "1-dirty")
    assert _known(kept, "a") is None
