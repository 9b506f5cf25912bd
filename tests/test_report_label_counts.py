"""What a run says of its labels: the counts of the rows themselves, for every kind of output, in few words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.data.stores.store import Store
from rtrain.report import label_counts
from rtrain.report.live import said
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.test_runs_tasks import settings
from tests.tiny import make_encoder, make_store


@pytest.fixture(autouse=True, params=[7, 1 << 18], ids=["blocks", "one_block"])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows that end within the rows, and one block."""
    monkeypatch.setattr(label_counts, "BLOCK_ROWS", request.param)


def stored(folder: Path, task: str) -> tuple[Store, str]:
    """A store of that task's rows, and the kind of its output."""
    recipe = settings(task, folder).recipe
    return make_store(recipe, Path(recipe.model.name), folder), base.get(task).output


def lines(store: Store, output: str) -> list[str]:
    return [said.labels(event) for event in label_counts.told(store, output)]


def by_hand(folder: Path, labels: list[str], **data: Any) -> Store:
    """A store whose rows are all trained on."""
    path = write_rows(folder / "rows.csv", [(f"text {place}", label) for place, label in enumerate(labels)])
    own = {"data.path": str(path), "data.test": str(path), "data.valid_share": 0.0}
    recipe = config.load("intent", {**own, **data}).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder)


def test_few_labels_are_all_named(tmp_path: Path) -> None:
    store = by_hand(tmp_path, ["b"] * 3 + ["a"] * 5 + ["Größe, neu"] * 5)
    assert lines(store, "classes") == ["3 labels: Größe, neu 5, a 5, b 3"] or lines(store, "classes") == [
        "3 labels: a 5, Größe, neu 5, b 3"
    ]


def test_of_many_labels_the_most_frequent_and_the_rarest_are_named(tmp_path: Path) -> None:
    store = by_hand(tmp_path, [f"label {number:02d}" for number in range(20) for _ in range(number + 1)])
    assert lines(store, "classes") == [
        "20 labels: label 19 20, label 18 19, label 17 18, label 16 17, label 15 16, label 14 15, "
        "... the rarest label 03 4, label 02 3, label 01 2, label 00 1"
    ]


def test_several_labels_per_row(tmp_path: Path) -> None:
    data = {"task": "multi_label"}
    store = by_hand(tmp_path, [json.dumps(row) for row in (["a"], ["a", "b"], [], ["b", "c", "a"])], **data)
    assert lines(store, "labels") == ["3 labels, 1.50 per row (1 rows have none): a 3, b 2, c 1"]


@pytest.mark.parametrize("task", ["multi_head", "regression", "token_tags", "span_qa", "extractive_summary"])
def test_other_kinds_are_counted_as_a_plain_loop_counts_them(task: str, tmp_path: Path) -> None:
    store, output = stored(tmp_path, task)
    rows, targets = store.rows("train"), list(store.targets("train"))
    found = label_counts.told(store, output)
    if task == "multi_head":
        heads = store.manifest.facts["heads"]
        assert [(one["head"], one["number"]) for one in found] == [(name, size) for name, size in heads]
        for place, one in enumerate(found):
            assert sum(count for _, count in one["most"]) == sum(row[place] >= 0 for row in targets)
        assert all(line.startswith(f"{name}: ") for line, (name, _) in zip(lines(store, output), heads, strict=True))
    elif task == "regression":
        values = np.concatenate(targets)
        wanted = {"of": "numbers", "rows": rows, "low": values.min(), "high": values.max()}
        assert found == [{**wanted, "mean": pytest.approx(values.mean())}]
    elif task == "token_tags":
        counts, marked = entities_by_hand(store)
        assert {name: count for name, count in found[0]["most"]} == counts
        assert counts
        assert found[0]["marked"] == marked
    elif task == "span_qa":
        answered = sum(any(last > 0 for last in row[1::2]) for row in targets)
        assert found == [{"of": "questions", "rows": rows, "answered": answered}]
        assert answered
    else:
        assert found == []
    assert all("\n" not in line for line in lines(store, output))


def entities_by_hand(store: Store) -> tuple[dict[str, int], int]:
    counts: dict[str, int] = {}
    marked = 0
    for row in store.targets("train"):
        tags = [store.manifest.labels[int(place)] for place in row if place >= 0]
        own = [
            tag[2:]
            for before, tag in zip(["O", *tags], tags, strict=False)
            if tag != "O" and (tag.startswith("B-") or before[2:] != tag[2:])
        ]
        marked += bool(own)
        for name in own:
            counts[name] = counts.get(name, 0) + 1
    return counts, marked


def test_a_search_says_it_once() -> None:
    event = {"kind": "labels", "of": "questions", "rows": 1200, "answered": 1000}
    assert said.of({**event, "trial": 0}) == "1,200 questions, 200 of them without an answer in what is read"
    assert said.of({**event, "trial": 1}) is None


def test_labels_that_look_the_same_are_told() -> None:
    names = ["Caf\u00e9", "Cafe\u0301", "Tee", "tee", "Tee\u200b", "Bar x", "Bar  x", "C++", "C#", "C"]
    found = label_counts.alike(names)
    assert found == [["Caf\u00e9", "Cafe\u0301"], ["Tee", "tee", "Tee\u200b"], ["Bar x", "Bar  x"]]
    event = {"of": "labels", "number": 2, "most": [["Tee", 2], ["tee", 1]], "rarest": [], "alike": [["Tee", "tee"]]}
    assert said.labels(event).endswith("; labels that look alike, and are learned as different ones: 'Tee' and 'tee'")


def test_labels_that_may_be_missing_values_are_told(tmp_path: Path) -> None:
    store = by_hand(tmp_path, ["NA"] * 3 + ["none"] * 5 + ["refund"] * 5)
    [event] = label_counts.told(store, "classes")
    assert event["missing"] == ["none", "NA"]
    assert "'NA'" in said.labels(event)
