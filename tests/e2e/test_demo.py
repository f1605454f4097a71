from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import done, start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_does_the_whole_job_on_text_of_ones_own(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = json.loads(done(tmp_path, "demo", "--data", prepared / "texts", "--minutes", "0.2", "--out", "demo", "--json"))
    assert told["same_in_transformers"] is True
    assert 0 < told["bits_per_byte"] < told["byte_unigram"]
    assert (tmp_path / "demo" / "run" / "report.html").is_file()
    assert (tmp_path / "demo" / "exported" / "config.json").is_file()


def test_the_demo_never_takes_a_folder_that_is_not_its_own(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").write_bytes(b"x")
    process = start(tmp_path, "demo", "--data", prepared / "texts", "--out", "mine", "--overwrite")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "holds something that no demo made" in err
    assert (tmp_path / "mine" / "photo.jpg").exists()
