from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli import diagnosis
from surefoot.cli.app import main
from surefoot.core import environment


def test_a_machine_that_runs_the_tests_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code, told["works"]) == (0, True)
    assert told["checks"]["matmul float32"]["flops_per_s"] > 1e9
    assert told["checks"]["gloo"]["works"] is True


def test_a_missing_library_is_named_and_the_answer_is_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    present = environment.versions(diagnosis.NEEDED)
    without = {name: version for name, version in present.items() if name not in ("torch", "tokenizers")}
    monkeypatch.setattr(environment, "versions", lambda names: without)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "missing: torch, tokenizers" in capsys.readouterr().out


def test_a_full_disk_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis.files, "free_bytes", lambda path: 1000)
    assert diagnosis._disk(tmp_path).works is False
