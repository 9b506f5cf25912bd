"""The short profile, and the cost of a run, in its summary and its report."""

import json
from pathlib import Path

import pytest

from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.report import collect, summary
from rtrain.report.page import Figure, Table
from rtrain.report.sections import run_details
from tests.support.reports import STAGES, make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(make_run(tmp_path_factory.mktemp("finished")))


def test_the_summary_has_the_mean_update_of_each_worker_and_the_cost(finished: Run) -> None:
    run_summary = summary.write_summary(finished)
    assert run_summary == json.loads(finished.summary.read_text())
    assert run_summary["stages"] == STAGES
    assert run_summary["cost"]["utilization"] == 0.75  # two workers, three quarters of a core each, of two cores
    assert run_summary["cost"]["price"] == "list prices on demand"


def test_the_report_draws_them(finished: Run) -> None:
    blocks = run_details.build_timing_section(collect.read_run_data(finished)).blocks
    (figure,) = (block for block in blocks if isinstance(block, Figure) and block.title.startswith("Parts of a step"))
    assert "worker 1, backward: 50, 50.0 %" in figure.chart
    assert "evaluate" not in figure.chart
    assert "4.0 ms more overlap with computation" in figure.note
    (table,) = (block for block in blocks if isinstance(block, Table) and block.title == "Cost")
    assert [row[0] for row in table.rows][-1] == "cores busy while training"


def test_a_run_of_an_earlier_version_has_neither(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path))
    saved = [
        {name: value for name, value in event.items() if name != "stages"}
        for event in run.events()
        if event["kind"] != "machines"
    ]
    run.log.unlink()
    for event in saved:
        events.append_event(run.folder, event.pop("kind"), **{name: event[name] for name in event if name != "time"})
    known_values = collect.read_run_data(Run(run.folder))
    assert (known_values.summary["stages"], known_values.summary["cost"]) == (None, None)
    titles = [getattr(block, "title", "") for block in run_details.build_timing_section(known_values).blocks]
    assert not {"Cost", "Parts of a step by worker"} & set(titles)
