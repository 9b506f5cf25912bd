"""The short form of a profile, and what a run cost, in its summary and its report."""

import json
from pathlib import Path

import pytest

from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.report import collect, summary
from rtrain.report.drawing.blocks import Figure, Table
from rtrain.report.sections import timing
from tests.reports import STAGES, make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("finished")))


def test_the_summary_has_the_mean_update_of_each_worker_and_the_cost(finished: Run) -> None:
    found = summary.write(finished)
    assert found == json.loads(finished.summary.read_text())
    assert found["stages"] == STAGES
    assert found["cost"]["utilisation"] == 0.75  # two workers, three quarters of a core each, of two cores
    assert found["cost"]["price"] == "list prices on demand"


def test_the_report_draws_them(finished: Run) -> None:
    blocks = timing.section(collect.read(finished)).blocks
    (figure,) = (one for one in blocks if isinstance(one, Figure) and one.title.startswith("What a worker does"))
    assert "worker 1, backward: 50, 50.0 %" in figure.chart
    assert "evaluate" not in figure.chart
    assert "4.0 ms more went while it computed" in figure.note
    (table,) = (one for one in blocks if isinstance(one, Table) and one.title == "What it cost")
    assert [row[0] for row in table.rows][-1] == "cores busy while training"


def test_a_run_of_an_earlier_version_has_neither(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path))
    kept = [
        {name: value for name, value in event.items() if name != "stages"}
        for event in run.events()
        if event["kind"] != "machines"
    ]
    run.log.unlink()
    for event in kept:
        events.append(run.folder, event.pop("kind"), **{name: event[name] for name in event if name != "time"})
    known = collect.read(Run(run.folder))
    assert (known.summary["stages"], known.summary["cost"]) == (None, None)
    titles = [getattr(one, "title", "") for one in timing.section(known).blocks]
    assert not {"What it cost", "What a worker does in an update"} & set(titles)
