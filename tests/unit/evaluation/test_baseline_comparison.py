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
from tests.ray import test_tasks
from tests.support import reports
from tests.support.gating import QUICK
from tests.support.tiny import make_task_artifact

LIMITS = config.load_config("intent", QUICK).recipe.gate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of random weights with its report's baselines, and a copy of its artefact beside it."""
    result = Run(reports.make_run(tmp_path_factory.mktemp("rivals")))
    make_task_artifact(result.artifact, "classification", store_of(result).manifest.head)
    baselines.ensure_baselines(result)
    shutil.copytree(result.artifact, result.folder / "copy")
    return result


def store_of(run: Run) -> Store:
    assert run.token_store is not None
    return open_store(run.token_store)


def gated(run: Run, **more: Any) -> dict[str, Any]:
    store = store_of(run)
    sides = gate.GateRequest(run.folder / "copy", run.artifact, store, store, measures_latency=False, **more)
    return gate.run_gate(sides, LIMITS)


def test_what_the_report_has_measured_is_not_measured_again(run: Run, tmp_path: Path) -> None:
    result = gated(run)
    values, tfidf = result["rivals"]
    document = baselines.read_baselines(run)
    assert document is not None
    (context,) = (item for item in document["baselines"] if item["name"] == baselines.TFIDF)
    split = "test" if store_of(run).num_rows("test") else "valid"
    assert (tfidf["name"], tfidf["score"], tfidf["ms"]) == (context["name"], context["scores"][split], context["ms"])
    gain, further = values["score"] - tfidf["score"], values["ms"] - tfidf["ms"]
    assert tfidf["points_per_ms"] == baseline_comparison.points_per_ms(gain, further)
    assert len(gate_table.format_brief(result)) == 2
    remaining = shutil.copytree(run.folder / "copy", tmp_path / "kept")
    gate.record_verdict(remaining, result)
    assert inspect_artifact.inspect_artifact(remaining)["gate"]["rivals"] == result["rivals"]


def test_other_rows_than_the_report_s_are_not_taken_for_them(run: Run) -> None:
    store = store_of(run)
    split = "test" if store.num_rows("test") else "valid"
    _, tfidf = gated(run, subset=(split, np.arange(store.num_rows(split) // 2, dtype=np.int64)))["rivals"]
    assert tfidf["absence_reason"]
    assert baseline_comparison.read_reported_rivals(store, split, (Path("/nowhere/artifact"),)) == {}


@pytest.mark.parametrize(
    ("task", "measured"), [("token_tags", True), ("multi_label", True), ("multi_head", True), ("span_qa", False)]
)
def test_answers_of_other_kinds(task: str, measured: bool, tmp_path: Path) -> None:
    config = test_tasks.settings(task, tmp_path)
    folder = Run(reports.begin(tmp_path, config))
    store = store_of(folder)
    data = config.recipe.data
    facts = {**store.manifest.head.facts, "stride": data.stride, "max_windows": data.max_windows}
    head = Head(store.manifest.labels, facts)
    make_task_artifact(folder.artifact, task, head, max_tokens=data.window_tokens)
    baselines.ensure_baselines(folder)
    shutil.copytree(folder.artifact, folder.folder / "copy")
    _, plain = gated(folder)["rivals"]
    assert (plain["score"] is not None, bool(plain["absence_reason"])) == (measured, not measured)


def test_an_error_is_told_as_it_is_and_not_by_its_negative(run: Run) -> None:
    result = gated(run)
    ends = {"first": -0.5, "other": -0.4, "difference": 0.1, "low": 0.05, "high": 0.2}
    text = gate_table.format_verdict(
        {**result, "scores": [{**result["scores"][0], "name": "neg_rmse", **ends}], "slices": []}
    )
    [line] = [line for line in text.splitlines() if "rmse" in line]
    assert [float(number) for number in re.findall(r"[-+]?\d+\.\d+", line)] == [0.5, 0.4, -0.1, -0.2, -0.05]
    assert line.startswith("rmse ")
