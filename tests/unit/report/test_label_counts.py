"""What a run says of its labels: the counts of the rows themselves, for every kind of output, in few words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.data.store.store import Store
from rtrain.report import data_stats, event_messages
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.ray.test_tasks import settings
from tests.support.tiny import make_encoder, make_store


@pytest.fixture(autouse=True, params=[7, 1 << 18], ids=["blocks", "one_block"])
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows that end within the rows, and one block."""
    monkeypatch.setattr(data_stats, "BLOCK_ROWS", request.param)


def stored(folder: Path, task: str) -> tuple[Store, str]:
    """A store of that task's rows, and the kind of its output."""
    recipe = settings(task, folder).recipe
    return make_store(recipe, Path(recipe.model.name), folder), base.get_task(task).output


def by_hand(folder: Path, labels: list[str], **data: Any) -> Store:
    """A store whose rows are all trained on."""
    path = write_rows(folder / "rows.csv", [(f"text {place}", label) for place, label in enumerate(labels)])
    values = {"data.path": str(path), "data.test": str(path), "data.valid_share": 0.0}
    recipe = config.load_config("intent", {**values, **data}).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder)


def test_few_labels_are_all_named(tmp_path: Path) -> None:
    store = by_hand(tmp_path, ["b"] * 3 + ["a"] * 5 + ["Größe, neu"] * 5)
    [event] = data_stats.describe_labels(store, "classes")
    assert (event["label_count"], sorted(event["most_frequent"]), event["rarest"]) == (
        3,
        [["Größe, neu", 5], ["a", 5], ["b", 3]],
        [],
    )


def test_of_many_labels_the_most_frequent_and_the_rarest_are_named(tmp_path: Path) -> None:
    store = by_hand(tmp_path, [f"label {number:02d}" for number in range(20) for _ in range(number + 1)])
    [event] = data_stats.describe_labels(store, "classes")
    assert event["label_count"] == 20
    assert event["most_frequent"] == [[f"label {number}", number + 1] for number in range(19, 13, -1)]
    assert event["rarest"] == [[f"label {number:02d}", number + 1] for number in range(3, -1, -1)]


def test_several_labels_per_row(tmp_path: Path) -> None:
    data = {"task": "multi_label"}
    store = by_hand(tmp_path, [json.dumps(row) for row in (["a"], ["a", "b"], [], ["b", "c", "a"])], **data)
    [event] = data_stats.describe_labels(store, "labels")
    assert (event["label_count"], event["labels_per_row"], event["rows_without_labels"]) == (3, 1.5, 1)
    assert event["most_frequent"] == [["a", 3], ["b", 2], ["c", 1]]


@pytest.mark.parametrize("task", ["multi_head", "regression", "token_tags", "span_qa", "extractive_summary"])
def test_other_kinds_are_counted_as_a_plain_loop_counts_them(task: str, tmp_path: Path) -> None:
    store, output = stored(tmp_path, task)
    rows, targets = store.num_rows("train"), list(store.targets("train"))
    result = data_stats.describe_labels(store, output)
    if task == "multi_head":
        heads = store.manifest.facts["heads"]
        assert [(item["head"], item["label_count"]) for item in result] == [(name, size) for name, size in heads]
        for place, item in enumerate(result):
            assert sum(count for _, count in item["most_frequent"]) == sum(row[place] >= 0 for row in targets)
    elif task == "regression":
        values = np.concatenate(targets)
        expected = {"target_kind": "numbers", "rows": rows, "low": values.min(), "high": values.max()}
        assert result == [{**expected, "mean": pytest.approx(values.mean())}]
    elif task == "token_tags":
        counts, marked = entities_by_hand(store)
        assert {name: count for name, count in result[0]["most_frequent"]} == counts
        assert counts
        assert result[0]["rows_with_entities"] == marked
    elif task == "span_qa":
        answered = sum(any(last > 0 for last in row[1::2]) for row in targets)
        assert result == [{"target_kind": "questions", "rows": rows, "answered": answered}]
        assert answered
    else:
        assert result == []
    assert all("\n" not in event_messages.format_labels(event) for event in result)


def entities_by_hand(store: Store) -> tuple[dict[str, int], int]:
    counts: dict[str, int] = {}
    marked = 0
    for row in store.targets("train"):
        tags = [store.manifest.labels[int(place)] for place in row if place >= 0]
        values = [
            tag[2:]
            for before, tag in zip(["O", *tags], tags, strict=False)
            if tag != "O" and (tag.startswith("B-") or before[2:] != tag[2:])
        ]
        marked += bool(values)
        for name in values:
            counts[name] = counts.get(name, 0) + 1
    return counts, marked


def test_labels_that_look_the_same_are_told() -> None:
    names = ["Caf\u00e9", "Cafe\u0301", "Tee", "tee", "Tee\u200b", "Bar x", "Bar  x", "C++", "C#", "C"]
    result = data_stats.group_similar_labels(names)
    assert result == [["Caf\u00e9", "Cafe\u0301"], ["Tee", "tee", "Tee\u200b"], ["Bar x", "Bar  x"]]


def test_labels_that_may_be_missing_values_are_told(tmp_path: Path) -> None:
    store = by_hand(tmp_path, ["NA"] * 3 + ["none"] * 5 + ["refund"] * 5)
    [event] = data_stats.describe_labels(store, "classes")
    assert event["missing_value_names"] == ["none", "NA"]
