from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli.app import main
from surefoot.cli.flops import model_costs, read_spec
from surefoot.models import ModelSpec, Transformer
from surefoot.models.flops import count_flops

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny.toml"


def test_costs_are_those_of_the_model_built(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["flops", str(EXAMPLE), "--json"])
    told = json.loads(capsys.readouterr().out)
    spec, length = read_spec(EXAMPLE)
    parameters = sum(p.numel() for p in Transformer(spec, device="meta").parameters())
    assert told["parameters"]["total"] == parameters == sum(told["parts"].values())
    assert told["sequence_length"] == length == 512
    assert told["flops_per_token"]["six_n"] == 6 * parameters
    attention = spec.attention
    assert attention is not None
    assert told["bytes"]["cache_bfloat16"] == 2 * spec.layers * attention.kv_heads * attention.head_dim * 512 * 2  # K and V, 2 bytes


def test_longer_rows_cost_more_attention_and_nothing_else() -> None:
    spec, _ = read_spec(EXAMPLE)
    short, long = model_costs(spec, 128), model_costs(spec, 256)
    assert long["flops_per_token"]["six_n"] == short["flops_per_token"]["six_n"]
    assert long["flops_per_token"]["exact_causal"] > short["flops_per_token"]["exact_causal"]


def test_a_budget_is_spent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["flops", "--budget", "1e18", "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)["budget"]
    spec = ModelSpec.model_validate(told["shape"]["model"])
    spent = count_flops(spec, spec.max_positions).training * told["shape"]["tokens"]
    assert 0.99e18 < spent <= 1e18
    assert told["shape"]["loss"] >= told["loss"]
    assert 6 * told["parameters"] * told["tokens"] == pytest.approx(1e18)
