from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import EngineError
from surefoot.core.events import Event, EventLog, read

fields = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name not in ("self", "time", "kind")),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    max_size=4,
)


@given(records=st.lists(fields, min_size=1, max_size=6), share=st.floats(0, 1))
def test_a_truncation_loses_at_most_the_torn_event_and_the_next_writer_goes_on(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]], share: float
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    log = EventLog(path)
    ends = []
    for record in records:
        log.append("step", **record)  # type: ignore[arg-type]
        ends.append(path.stat().st_size)
    log.close()
    cut = round(share * ends[-1])
    with path.open("r+b") as file:
        file.truncate(cut)

    whole = sum(end <= cut + 1 for end in ends)  # a line that lacks only its newline is complete
    survivors = list(read(path))
    assert [dict(event.fields) for event in survivors] == records[:whole]

    log = EventLog(path)
    log.append("finish")
    log.close()
    after = list(read(path))
    assert after[:-1] == survivors
    assert after[-1].kind == "finish"


def test_events_carry_their_time_and_kind(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.append("step", step=3, loss=0.25, path=tmp_path)
    (event,) = read(tmp_path / "log")
    assert isinstance(event, Event)
    assert (event.kind, event.fields["step"], event.fields["loss"], event.fields["path"]) == ("step", 3, 0.25, str(tmp_path))
    assert 1.6e9 < event.time < 1e11


def test_numbers_that_are_not_finite_stay_readable_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.append("step", loss=math.nan, nested={"worst": [math.inf, -math.inf, 1.0]})
    line = json.loads((tmp_path / "log").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] == "nan"
    assert line["nested"] == {"worst": ["inf", "-inf", 1.0]}


def test_garbage_and_missing_files_are_no_events(tmp_path: Path) -> None:
    assert list(read(tmp_path / "absent")) == []
    (tmp_path / "log").write_bytes(b'\xff\xfe\n[1]\n{"kind": "x"}\n{"time": 1, "kind": "step"}\n')
    assert [event.kind for event in read(tmp_path / "log")] == ["step"]


def test_a_folder_that_is_not_there_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be written"):
        EventLog(tmp_path / "absent" / "log")


def _write_many(path: Path, writer: int, count: int) -> None:
    log = EventLog(path)
    for number in range(count):
        log.append("step", writer=writer, number=number, filler="x" * 200)
    log.close()


def test_processes_appending_together_lose_and_mix_nothing(tmp_path: Path) -> None:
    path, writers, count = tmp_path / "log", 4, 200
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(path, writer, count)) for writer in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(path.read_bytes().splitlines()) == writers * count
    seen: dict[int, list[int]] = {}
    for event in read(path):
        seen.setdefault(event.fields["writer"], []).append(event.fields["number"])
    assert seen == {writer: list(range(count)) for writer in range(writers)}
