"""Plain models beside a candidate: taken from a run's report where they are there, and why there is none."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rtrain import artifact, config
from rtrain.batch import Head
from rtrain.data.stores.store import Store, open_store
from rtrain.gate import gate, inspection, rivals, static, told
from rtrain.report import baseline
from rtrain.run import Run
from tests import reports, test_runs_tasks
from tests.gating import QUICK
from tests.tiny import make_task_artifact

LIMITS = config.load("intent", QUICK).recipe.gate


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of random weights with its report's baselines, and a copy of its artefact beside it."""
    found = Run(reports.make_run(tmp_path_factory.mktemp("rivals")))
    make_task_artifact(found.artifact, "classification", store_of(found).manifest.head)
    baseline.ensure(found)
    shutil.copytree(found.artifact, found.folder / "copy")
    return found


def store_of(run: Run) -> Store:
    assert run.store is not None
    return open_store(run.store)


def gated(run: Run, **more: Any) -> dict[str, Any]:
    store = store_of(run)
    sides = gate.Sides(run.folder / "copy", run.artifact, store, store, timed=False, **more)
    return gate.run(sides, LIMITS)


def test_what_the_report_has_measured_is_not_measured_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "fitted_labels", None)
    found = gated(run)
    own, tfidf, fixed = found["rivals"]
    document = baseline.read(run)
    assert document is not None
    (known,) = (one for one in document["baselines"] if one["name"] == baseline.TFIDF)
    split = "test" if store_of(run).rows("test") else "valid"
    assert (tfidf["name"], tfidf["score"], tfidf["ms"]) == (known["name"], known["scores"][split], known["ms"])
    assert known["ms"] > 0
    gain, further = own["score"] - tfidf["score"], own["ms"] - tfidf["ms"]
    assert tfidf["points_per_ms"] == rivals.points_per_ms(gain, further)
    if not static.is_installed():
        assert fixed["absent"] == "model2vec is not installed (the extra bench has it)"
    assert "\nms/text is measured apart from p50: of texts of all lengths, " in told.text(found)
    lines = told.brief(found)
    assert lines[0] == told.sentence(found)
    assert lines[1].startswith(f"beside it, TF-IDF and a linear model: {tfidf['score']:.3f} at {tfidf['ms']:.2f} ms; ")
    assert lines[2].startswith("beside it, static embeddings and a linear model: ")


def test_an_artefact_keeps_them_and_inspect_says_them(run: Run, tmp_path: Path) -> None:
    kept = shutil.copytree(run.folder / "copy", tmp_path / "kept")
    found = gated(run)
    gate.record(kept, found)
    assert (artifact.read(kept).gate or {})["rivals"] == found["rivals"]
    text = inspection.text(inspection.inspect(kept))
    assert "  beside it, TF-IDF and a linear model: " in text


def test_other_rows_than_the_report_s_are_not_taken_for_them(run: Run) -> None:
    store = store_of(run)
    split = "test" if store.rows("test") else "valid"
    import numpy as np

    among = (split, np.arange(store.rows(split) // 2, dtype=np.int64))
    _, tfidf, _ = gated(run, among=among)["rivals"]
    assert tfidf["absent"] == "the run's report has not measured it on these rows"
    assert rivals.of_report(store, split, (Path("/nowhere/artifact"),)) == {}


@pytest.mark.parametrize(
    ("task", "name", "said"),
    [
        ("token_tags", "each word's most frequent tag", None),
        ("multi_label", "TF-IDF and a linear model", None),
        ("multi_head", "TF-IDF and a linear model", None),
        ("span_qa", "plain models", "none answers with a place in a text, of which counts of words know nothing"),
    ],
)
def test_answers_of_other_kinds(task: str, name: str, said: str | None, tmp_path: Path) -> None:
    chosen = test_runs_tasks.settings(task, tmp_path)
    folder = Run(reports.begin(tmp_path, chosen))
    store = store_of(folder)
    data = chosen.recipe.data
    facts = {**store.manifest.head.facts, "stride": data.stride, "max_windows": data.max_windows}
    head = Head(store.manifest.labels, facts)
    make_task_artifact(folder.artifact, task, head, max_tokens=data.window_tokens)
    baseline.ensure(folder)
    shutil.copytree(folder.artifact, folder.folder / "copy")
    found = gated(folder)
    own, plain = found["rivals"]
    assert (own["name"], plain["name"]) == ("this candidate", name)
    if said is not None:
        assert plain["absent"] == said
        assert told.brief(found)[1] == f"beside it, {name}: not measured: {said}"
    else:
        assert plain["score"] is not None
        assert plain["ms"] > 0


def test_an_error_is_told_as_it_is_and_not_by_its_negative(run: Run) -> None:
    found = gated(run)
    ends = {"first": -0.5, "other": -0.4, "difference": 0.1, "low": 0.05, "high": 0.2}
    text = told.text({**found, "scores": [{**found["scores"][0], "name": "neg_rmse", **ends}], "slices": []})
    [line] = [line for line in text.splitlines() if "rmse" in line]
    assert [float(number) for number in re.findall(r"[-+]?\d+\.\d+", line)] == [0.5, 0.4, -0.1, -0.2, -0.05]
    assert line.startswith("rmse ")
