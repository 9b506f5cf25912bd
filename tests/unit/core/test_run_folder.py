"""A run's folder: its names, its log read once, its decisions."""

import json
import shutil
from pathlib import Path

import pytest

from rtrain.core import events
from rtrain.core.run_folder import Run, resolve_artifact, resolve_run
from tests.support import stock
from tests.support.refusing import refused


def test_the_names_are_those_that_users_and_earlier_versions_know(tmp_path: Path) -> None:
    run = Run(tmp_path / "intent")
    assert (run.name, str(run)) == ("intent", str(tmp_path / "intent"))
    files = (run.config, run.log, run.summary, run.report, run.baselines, run.lock, run.stop_request)
    assert [path.name for path in (*files, run.placement_group)] == [
        *("config.yaml", "events.jsonl", "summary.json", "report.html", "baselines.json"),
        *("lock", "stop_request", "placement_group"),
    ]
    by_split = (run.predictions("test"), run.scores("test"), run.hang_traceback(1))
    assert [path.name for path in by_split] == [*("predictions-test.parquet", "scores-test.json", "hang-1.txt")]
    assert [path.name for path in (run.checkpoints, run.artifact, run.int8_artifact, run.ray_storage)] == [
        *("checkpoints", "artifact", "artifact-int8", "ray")
    ]
    assert not run.folder.exists()  # nothing is made before it is asked for


def test_each_byte_of_the_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, parsed = Run(tmp_path), list[int]()
    whole = events.parse_events

    def counted(data: bytes) -> object:
        parsed.append(len(data))
        return whole(data)

    monkeypatch.setattr(events, "parse_events", counted)
    assert run.events() == []
    run.append_event("created", store="here")
    run.append_event("progress", step=1)
    assert [event["kind"] for event in run.events()] == ["created", "progress"]
    run.append_event("progress", step=2)
    assert [event["step"] for event in run.events("progress")] == [1, 2]
    assert run.first_event("progress") == run.events("progress")[0]
    assert run.last_event("progress") == run.events("progress")[-1]
    assert (run.first_event("failed"), run.last_event("failed")) == (None, None)
    assert sum(parsed) == run.log.stat().st_size


def test_a_decision_is_made_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.decisions == {}
    decided = [run.decide_once(*pair) for pair in (("device", "cpu"), ("precision", "bf16"), ("device", "gpu"))]
    assert decided == ["cpu", "bf16", "cpu"]
    assert json.loads((tmp_path / "decisions.json").read_text()) == {"device": "cpu", "precision": "bf16"}


def test_a_run_exists_by_its_configuration_and_is_finished_by_its_artefact(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.exists, run.is_finished) == (False, False)
    run.config.write_text("name: intent")
    run.artifact.mkdir()
    assert (run.exists, run.is_finished) == (True, False)
    (run.artifact / "artifact.json").write_text("{}")
    assert run.is_finished


# --------------------------------------------------------------------------------------------- what a folder stands for


def test_a_run_stands_for_its_float_artefact_and_for_the_int8_one_where_it_is_the_only_one(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "a")
    stock.artifact(run.int8_artifact, "int8")
    assert resolve_artifact(run.folder) == run.artifact
    assert resolve_artifact(run.int8_artifact) == run.int8_artifact
    shutil.rmtree(run.artifact)
    assert resolve_artifact(run.folder) == run.int8_artifact
    assert resolve_run(run.folder).folder == run.folder


def test_a_search_stands_for_its_winner_wherever_it_lies(tmp_path: Path) -> None:
    stock.search(tmp_path / "s", best=2)
    shutil.copytree(tmp_path / "s", tmp_path / "copied")
    (tmp_path / "s").rename(tmp_path / "moved")
    for name in ("moved", "copied"):
        assert resolve_run(tmp_path / name).folder == tmp_path / name / "trial-002"
        assert resolve_artifact(tmp_path / name) == tmp_path / name / "trial-002" / "artifact"


def test_what_stands_for_nothing_yet_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    searched = stock.search(tmp_path / "a search", best=None)
    for resolve in (resolve_run, resolve_artifact):
        with refused("not_finished"):
            resolve(searched.folder)
    open_run = stock.make(tmp_path / "open", ended="interrupted")
    with refused("not_finished"):
        resolve_artifact(open_run.folder)
    late = stock.search(tmp_path / "late", best=None)  # it has chosen, and was killed before the winner's last update
    events.append_event(late.folder, "searched", winner=0)
    with refused("not_finished"):
        resolve_artifact(late.folder)
    shutil.rmtree(late.trial(0).folder)
    with refused("not_found"):
        resolve_run(late.folder)


def test_a_folder_that_holds_no_run_is_told_with_the_run_around_it(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "a")
    with refused("not_a_run"):
        resolve_run(run.artifact)
    with refused("not_a_run"):
        resolve_run(tmp_path)
    assert resolve_artifact(tmp_path / "none") == tmp_path / "none"  # refused by whoever reads it as an artefact
