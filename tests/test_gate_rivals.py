"""Plain models beside a candidate: taken from a run's report where they are there, and why there is none."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation import baseline_comparison, gate, gate_table, inspect_artifact
from rtrain.report import baselines
from tests import reports, test_runs_tasks
from tests.gating import QUICK
from tests.tiny import make_task_artifact

LIMITS = config.load("intent", QUICK).recipe.gate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of random weights with its report's baselines, and a copy of its artefact beside it."""
    found = Run(reports.make_run(tmp_path_factory.mktemp("rivals")))
    make_task_artifact(found.artifact, "classification", store_of(found).manifest.head)
    baselines.ensure(found)
    shutil.copytree(found.artifact, found.folder / "copy")
    return found


def store_of(run: Run) -> Store:
    assert run.store is not None
    return open_store(run.store)


def gated(run: Run, **more: Any) -> dict[str, Any]:
    store = store_of(run)
    sides = gate.Sides(run.folder / "copy", run.artifact, store, store, timed=False, **more)
    return gate.run(sides, LIMITS)


def test_what_the_report_has_measured_is_not_measured_again(run: Run, tmp_path: Path) -> None:
    found = gated(run)
    own, tfidf = found["rivals"]
    document = baselines.read(run)
    assert document is not None
    (known,) = (one for one in document["baselines"] if one["name"] == baselines.TFIDF)
    split = "test" if store_of(run).rows("test") else "valid"
    assert (tfidf["name"], tfidf["score"], tfidf["ms"]) == (known["name"], known["scores"][split], known["ms"])
    gain, further = own["score"] - tfidf["score"], own["ms"] - tfidf["ms"]
    assert tfidf["points_per_ms"] == baseline_comparison.points_per_ms(gain, further)
    assert len(gate_table.brief(found)) == 2
    kept = shutil.copytree(run.folder / "copy", tmp_path / "kept")
    gate.record(kept, found)
    assert inspect_artifact.inspect(kept)["gate"]["rivals"] == found["rivals"]


def test_other_rows_than_the_report_s_are_not_taken_for_them(run: Run) -> None:
    store = store_of(run)
    split = "test" if store.rows("test") else "valid"
    _, tfidf = gated(run, among=(split, np.arange(store.rows(split) // 2, dtype=np.int64)))["rivals"]
    assert tfidf["absent"]
    assert baseline_comparison.of_report(store, split, (Path("/nowhere/artifact"),)) == {}


@pytest.mark.parametrize(
    ("task", "measured"), [("token_tags", True), ("multi_label", True), ("multi_head", True), ("span_qa", False)]
)
def test_answers_of_other_kinds(task: str, measured: bool, tmp_path: Path) -> None:
    chosen = test_runs_tasks.settings(task, tmp_path)
    folder = Run(reports.begin(tmp_path, chosen))
    store = store_of(folder)
    data = chosen.recipe.data
    facts = {**store.manifest.head.facts, "stride": data.stride, "max_windows": data.max_windows}
    head = Head(store.manifest.labels, facts)
    make_task_artifact(folder.artifact, task, head, max_tokens=data.window_tokens)
    baselines.ensure(folder)
    shutil.copytree(folder.artifact, folder.folder / "copy")
    _, plain = gated(folder)["rivals"]
    assert (plain["score"] is not None, bool(plain["absent"])) == (measured, not measured)


def test_an_error_is_told_as_it_is_and_not_by_its_negative(run: Run) -> None:
    found = gated(run)
    ends = {"first": -0.5, "other": -0.4, "difference": 0.1, "low": 0.05, "high": 0.2}
    text = gate_table.text({**found, "scores": [{**found["scores"][0], "name": "neg_rmse", **ends}], "slices": []})
    [line] = [line for line in text.splitlines() if "rmse" in line]
    assert [float(number) for number in re.findall(r"[-+]?\d+\.\d+", line)] == [0.5, 0.4, -0.1, -0.2, -0.05]
    assert line.startswith("rmse ")
