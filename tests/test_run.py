"""A run's folder: its names, its log read once, its decisions."""

import json
from pathlib import Path

import pytest

from rtrain import events
from rtrain.run import Run


def test_the_names_are_those_that_users_and_earlier_versions_know(tmp_path: Path) -> None:
    run = Run(tmp_path / "intent")
    assert (run.name, str(run)) == ("intent", str(tmp_path / "intent"))
    files = (run.config, run.log, run.summary, run.report, run.baselines, run.lock, run.notice, run.placement_group)
    assert [path.name for path in files] == [
        *("config.yaml", "events.jsonl", "summary.json", "report.html", "baselines.json"),
        *("lock", "notice", "placement_group"),
    ]
    by_split = (run.predictions("test"), run.scores("test"), run.attributions("test"), run.stalled(1))
    assert [path.name for path in by_split] == [
        *("predictions-test.parquet", "scores-test.json", "attributions-test.json", "stalled-1.txt")
    ]
    assert [path.name for path in (run.checkpoints, run.artifact, run.int8, run.ray)] == [
        *("checkpoints", "artifact", "artifact-int8", "ray")
    ]
    assert not run.folder.exists()  # nothing is made before it is asked for


def test_each_byte_of_the_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, parsed = Run(tmp_path), list[int]()
    whole = events._parse

    def counted(data: bytes) -> object:
        parsed.append(len(data))
        return whole(data)

    monkeypatch.setattr(events, "_parse", counted)
    assert run.events() == []
    run.append("created", store="here")
    run.append("progress", update=1)
    assert [event["kind"] for event in run.events()] == ["created", "progress"]
    run.append("progress", update=2)
    last = run.last("progress")
    assert last is not None
    assert last["update"] == 2
    first = run.first("progress")
    assert first is not None
    assert first["update"] == 1
    assert (run.first("failed"), run.last("failed")) == (None, None)
    assert [event["update"] for event in run.events("progress")] == [1, 2]
    assert sum(parsed) == run.log.stat().st_size


def test_what_callers_do_to_a_list_of_events_stays_theirs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.append("created")
    run.events().clear()
    assert len(run.events()) == 1


def test_a_store_counts_while_it_is_there(tmp_path: Path) -> None:
    run, store = Run(tmp_path), tmp_path / "store"
    run.append("created", store=str(store))
    assert run.store is None
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    assert run.store == store


def test_a_decision_is_made_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.decisions == {}
    assert (run.decide("device", "cpu"), run.decide("precision", "bf16"), run.decide("device", "gpu")) == (
        *("cpu", "bf16", "cpu"),
    )
    assert json.loads((tmp_path / "decisions.json").read_text()) == {"device": "cpu", "precision": "bf16"}


def test_a_run_exists_by_its_configuration_and_is_finished_by_its_artefact(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.exists, run.finished) == (False, False)
    run.config.write_text("name: intent")
    run.artifact.mkdir()
    assert (run.exists, run.finished) == (True, False)
    (run.artifact / "artifact.json").write_text("{}")
    assert run.finished


def test_tracebacks_are_those_that_hold_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stalled(0).write_text("")
    run.stalled(1).write_text("Thread 1 ...")
    assert run.tracebacks() == [run.stalled(1)]
