"""Plans beside runs: which rows each has, and what is made of their seconds. Runs themselves are the benchmark's."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import foretold
from benchmarks.foretold import Work
from rtrain import config as configuration
from rtrain.doctor import frequency
from rtrain.doctor.forecast import layouts, plan as planning

# ------------------------------------------------------------------------------------------------------------- the rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sets of the published form: 40 messages, and 6 passages of 4 questions."""
    folder = tmp_path / "data"
    for name in ("banking77", "squadshifts"):
        (folder / name).mkdir(parents=True)
    for split in ("train", "test"):
        with (folder / "banking77" / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(("text", "category"))
            lines.writerows((f"{split} {number}", str(number % 3)) for number in range(40))
    asked = [{"id": str(number), "question": "why", "answers": []} for number in range(4)]
    articles = [{"title": str(one), "paragraphs": [{"context": "", "qas": asked}]} for one in range(6)]
    questions = folder / "squadshifts" / "a.json.gz"
    questions.write_bytes(gzip.compress(json.dumps({"data": articles}).encode()))
    return folder


def texts(path: str) -> list[str]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return [row["text"] for row in csv.DictReader(file)]


def test_a_pilot_has_some_of_the_run_s_messages(data: Path, tmp_path: Path) -> None:
    (_, many), (_, few) = (foretold.messages(data, _made(tmp_path / str(count)), count) for count in (30, 5))
    assert len(texts(many)) == 30
    assert texts(few) == texts(many)[:5]


def test_questions_are_those_of_whole_passages(data: Path, tmp_path: Path) -> None:
    _, path = foretold.questions(data, _made(tmp_path / "rows"), 10)
    assert [len(one["paragraphs"][0]["qas"]) for one in json.loads(Path(path).read_text())["data"]] == [4, 4, 4]


def test_a_run_is_scored_on_other_messages_than_it_learns(data: Path, tmp_path: Path) -> None:
    job = replace(foretold.STUDIES["messages"], rows=20, scored=10)
    given = foretold.files(Work(data, tmp_path, 1, 1.0), "messages", job)
    found = dict(zip(given[::2], given[1::2], strict=True))
    assert found["--valid"] == found["--test"]
    learned, scored = texts(found["--data"]), texts(found["--valid"])
    assert (len(learned), len(scored)) == (20, 10)
    assert not set(learned) & set(scored)


def test_a_run_is_scored_on_other_passages_than_it_learns(data: Path, tmp_path: Path) -> None:
    job = replace(foretold.STUDIES["questions"], rows=8, scored=8)
    given = foretold.files(Work(data, tmp_path, 1, 1.0), "questions", job)
    found = dict(zip(given[::2], given[1::2], strict=True))
    titles = [
        [one["title"] for one in json.loads(Path(found[name]).read_text())["data"]] for name in ("--data", "--test")
    ]
    assert titles == [["0", "1"], ["2", "3"]]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# ---------------------------------------------------------------------------------------------------------- the figures


def test_every_frequency_is_scored_after_as_many_rows() -> None:
    """And its learning rate is carried as a search carries it."""
    job, recipe = foretold.STUDIES["messages"], configuration.load("intent", {"data.path": "rows.csv"})
    for k in (1, 2, 4, 8):
        found = foretold.settings(job, {"rows_per_update": 16 * k, "settings": frequency.settings(recipe, k)}, 1)
        assert 16 * k * found["train.evaluate_every"] == job.every_rows
        made = configuration.load("intent", {"data.path": "rows.csv", "data.valid": "valid.csv", **found}).recipe
        assert made.rows_per_update == 16 * k
        assert made.peak_lr == pytest.approx(recipe.recipe.peak_lr * (k / 4) ** 0.5)
        assert made.train.seed == 1


def test_seconds_are_counted_until_the_goal_where_all_runs_have_reached_it() -> None:
    assert [foretold.target(least) for least in (0.95, 0.9, 0.87)] == [0.9, 0.9, 0.87]


def test_this_machine_is_a_cluster_of_its_own(tmp_path: Path) -> None:
    """Its head takes the workers of every recipe that is measured."""
    document = planning.read_cluster(foretold.machine(tmp_path))
    for job in foretold.JOBS.values():
        config = configuration.load(job.recipe, {"data.path": "rows"})
        assert layouts.laid_out(config, layouts.of_document(document), searches=False).room == 2


def test_seconds_of_a_plan_are_beside_those_of_the_run() -> None:
    measured = {"train": 50.0, "evaluate": 10.0, "total": 90.0}
    found: Any = foretold.compared(measured, {"train": 55.0, "evaluate": 11.0}, {"train": 40.0, "evaluate": 8.0})
    assert (found["ratio"], found["ratio_of_training"]) == pytest.approx((1.1, 1.1))
    assert found["ratio_by_messages"] == pytest.approx(0.8)


def log(updates_s: float, reached: int) -> list[dict[str, Any]]:
    """Ten updates of so many seconds each, after every one of which the run is scored; 0.8 from one on."""
    found: list[dict[str, Any]] = [{"kind": "started", "time": 100.0}]
    for number in range(1, 11):
        found.append({"kind": "progress", "time": 100.0 + number * updates_s, "rows": 64 * number, "loss": 1.0})
        score = 0.8 if number >= reached else 0.5
        if number % 2 == 0:
            found.append({"kind": "evaluated", "split": "valid", "update": number, "scores": {"accuracy": score}})
    return [*found, {"kind": "trained", "seconds": {"first_batch": 0.0}}]


def test_the_choice_is_compared_with_the_best_of_the_runs() -> None:
    options = [{"k": k, "relative": relative} for k, relative in ((1, 1.3), (2, 1.0), (4, 1.1))]
    told = {"options": options, "aggregation_frequency": 2}
    logs = {1: [log(1.0, 10)], 2: [log(2.0, 4)], 4: [log(3.0, 2)]}
    found = foretold.reached(told, logs, "accuracy", 0.8)
    assert (found["accuracy"], found["goal"]) == (0.8, {"accuracy": 0.9, "reached": False})
    assert [one["seconds"] for one in found["by_k"]] == [[10.0], [8.0], [6.0]]
    assert [one["measured"] for one in found["by_k"]] == pytest.approx([10 / 6, 8 / 6, 1.0])
    assert (found["chosen"], found["over_the_best"]) == (2, pytest.approx(1 / 3))


def test_what_is_asked_of_it_is_checked() -> None:
    assert foretold.parse(["DATA", "--only", "hours"]).seeds == 3
    for wrong in (["--seeds", "0"], ["--share", "0"], ["--share", "2"], ["--only", "money"]):
        with pytest.raises(SystemExit):
            foretold.parse(["DATA", *wrong])
