"""The figures of the compression benchmark, its rows and its engines. The models are the benchmark's own."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import few, tasks
from benchmarks.compress import (
    __main__ as command,
    figures,
    latency,
    limit,
    making,
    parts,
    planted,
    rivals,
    self_training,
    starts,
)
from benchmarks.compress.figures import Aim
from rtrain.batch import pack, padded
from rtrain.compress import quantize
from rtrain.gate import inspection
from rtrain.predict import Predictor
from rtrain.run import Run
from tests import quantizing, tiny

# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("aim", "value", "word"),
    [
        (Aim(0.99, 0.998), 0.998, "goal"),
        (Aim(0.99, 0.998), 0.99, "floor"),
        (Aim(0.99, 0.998), 0.98, "below"),
        (Aim(8.2, 6.0, more=False), 6.0, "goal"),
        (Aim(8.2, 6.0, more=False), 8.2, "floor"),
        (Aim(8.2, 6.0, more=False), 8.3, "below"),
    ],
)
def test_a_figure_reaches_its_goal_its_floor_or_neither(aim: Aim, value: float, word: str) -> None:
    assert aim.word(value) == word


def test_figures_of_parts_and_of_sets_stand_in_the_table_beside_their_aims() -> None:
    results = {
        "scores": {"sets": {"banking77": {"student_score_ratio": 0.99, "teacher": 0.9}}},
        "starts": {"limits": {"cold_start_s": 0.25}, "cold_start_s": 0.5, "cold": [0.5], "about": {"rows": 3000}},
    }
    assert figures.table(results).splitlines()[2:] == [
        "| `student_score_ratio` | banking77 | 0.99 | 0.98 | 0.995 |  | floor |",
        "| `cold_start_s` |  | 0.5 s | 0.7 s | 0.45 s | 0.25 s | floor |",
    ]


def test_every_figure_of_the_parts_has_an_aim() -> None:
    """A figure without one would be measured and never shown."""
    named = {"int8_score_ratio", "student_score_ratio", "served_mb", "trimmed_score_ratio", "cold_start_s"}
    named |= {"few_rows_accuracy", "fallback_points", "fallback_s"}
    named |= {"serve_start_s", *(f"latency_vs_hf_b{rows}" for rows in parts.BATCHES)}
    assert named <= set(figures.AIMS)


# ------------------------------------------------------------------------------------------------------------- latency


class Clock:
    """Time that passes by what sides cost, in milliseconds."""

    def __init__(self) -> None:
        self.now, self.called = 0.0, list[str]()

    def side(self, name: str, ms: float) -> Any:
        def ask() -> None:
            self.called.append(name)
            self.now += ms / 1e3

        return ask

    def __call__(self) -> float:
        return self.now


def test_sides_take_turns_and_each_begins_a_round() -> None:
    clock = Clock()
    times = latency.rounds({"a": clock.side("a", 2.0), "b": clock.side("b", 6.0)}, number=2, calls=4, clock=clock)
    for name, ms in (("a", 2.0), ("b", 6.0)):
        assert times[name].medians == pytest.approx([ms, ms])
        assert times[name].least == pytest.approx(ms)
    each = latency.WARM + 4
    assert clock.called == ["a"] * each + ["b"] * each + ["b"] * each + ["a"] * each
    found = latency.figures(times, "a", "b")
    assert (found["ratio"], found["ratio_of_least"]) == (pytest.approx(3.0), pytest.approx(3.0))


def test_the_limit_is_the_slower_of_computing_and_reading_and_the_dispatch() -> None:
    shape = limit.Shape(layers=2, width=4, inner=8)
    assert shape.weights == 2 * (4 * 16 + 2 * 32)
    assert shape.operations(tokens=3, rows=5) == 15 * (2 * 256 + 4 * 2 * 4 * 3)
    computing = limit.Machine(int8_flops=1e3, float_flops=1, bandwidth=1e9, dispatch_s=1e-3)
    reading = limit.Machine(int8_flops=1e12, float_flops=1, bandwidth=256.0, dispatch_s=1e-3)
    operations = shape.operations(3, 5)
    assert limit.least_ms(computing, shape, 3, 5, operators=7) == pytest.approx(operations + 7)
    assert limit.least_ms(reading, shape, 3, 5, operators=7) == pytest.approx(1000 + 7)


# ------------------------------------------------------------------------------------------------------------- engines


def test_other_engines_answer_as_the_float_model(tmp_path: Path) -> None:
    predictor = Predictor.load(tiny.make_artifact(tmp_path / "artifact"), threads=1)
    tokens = predictor.encode(list(tiny.CORPUS[:1]))
    inputs = padded(pack(tokens), predictor.pad_id)
    expected = predictor.run(tokens)[0]
    network = predictor.network[0]
    assert np.abs(rivals.torch_float(network)(inputs)[0] - expected).max() < 1e-4
    # As it comes, OpenVINO computes in bf16 where the processor has it.
    assert np.abs(rivals.openvino_float(network, inputs)(inputs)[0] - expected).max() < 0.05
    dynamic = rivals.torch_dynamic(network)(inputs)[0]
    assert 0 < np.abs(dynamic - expected).max() < 0.1 * np.abs(expected).max() + 0.1


# ---------------------------------------------------------------------------------------------------------------- rows


def test_few_rows_are_the_same_in_each_call_and_leave_other_splits_whole(tmp_path: Path) -> None:
    rows = [{"essay": f"e{number}", "split": "train" if number % 2 else "test"} for number in range(40)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = ["--data", str(source), "--set", "data.split=split"]
    (tmp_path / "out").mkdir()
    first = few.arguments(given, 5, tmp_path / "out")
    read = [json.loads(line) for line in Path(first[1]).read_text(encoding="utf-8").splitlines()]
    assert [row["split"] for row in read].count("train") == 5
    assert [row for row in read if row["split"] == "test"] == rows[::2]
    again = few.arguments(given, 5, tmp_path / "out")
    assert Path(again[1]).read_text(encoding="utf-8") == "".join(json.dumps(row) + "\n" for row in read)
    assert first[2:] == given[2:]
    tested = few.arguments(["--data", "other.csv", "--test", str(source)], 5, tmp_path / "out", "--test")
    assert (tested[:3], Path(tested[3]).read_text(encoding="utf-8")) == (
        ["--data", "other.csv", "--test"],
        Path(first[1]).read_text(encoding="utf-8"),
    )


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("rows.csv", "text,label\n" + "".join(f'"a\nb {n}",x\n' for n in range(9)), lambda text: text.count("a\nb")),
        ("rows.tsv", "\n\n".join(f"w{n}\tO\nv\tO" for n in range(9)) + "\n", lambda text: text.count("v\tO")),
    ],
)
def test_few_rows_of_a_file_are_whole(tmp_path: Path, name: str, text: str, kept: Callable[[str], int]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "out").mkdir()
    for rows, expected in ((4, 4), (99, 9)):
        found = few.arguments(["--data", str(tmp_path / name)], rows, tmp_path / "out")
        read = Path(found[1]).read_text(encoding="utf-8")
        assert kept(read) == expected
        assert read.splitlines()[0] in text.splitlines()


def test_few_questions_are_those_of_whole_passages(tmp_path: Path) -> None:
    article = {
        "title": "t",
        "paragraphs": [{"context": f"c{n}", "qas": [{"id": f"{n}{k}"} for k in "ab"]} for n in range(9)],
    }
    with gzip.open(tmp_path / "one.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"data": [article]}, file)
    found = few.arguments(["--data", f"{tmp_path}/*.json.gz"], 5, tmp_path)
    articles = json.loads(Path(found[1]).read_text(encoding="utf-8"))["data"]
    assert [[len(one["qas"]) for one in article["paragraphs"]] for article in articles] == [[2], [2], [2]]
    assert len({article["title"] for article in articles}) == 3  # rows of one title are in one split


def test_every_set_is_a_line_of_the_task_benchmark_and_can_be_thinned() -> None:
    assert len(making.SETS) == 4
    for one in making.SETS:
        job = making.job_of(one)
        assert job in tasks.JOBS
        assert job.folder in command.NAMES


def test_other_rows_seeds_or_settings_of_students_have_folders_of_their_own(tmp_path: Path) -> None:
    """Models that are finished are not made again: those of other settings would be taken for them."""
    work = making.Work(tmp_path, tmp_path, 3000, 2)
    others = [replace(work, rows=None), replace(work, epochs=3), replace(work, seed=1), replace(work, test_rows=200)]
    assert len({making.place(one, making.BANKING) for one in (work, *others)}) == 5
    wider = [replace(work, student=student) for student in ((), ("distill.layers=4",), ("distill.layers=2",))]
    assert len({making.students(one, making.BANKING) for one in wider}) == 3
    assert {making.place(one, making.BANKING) for one in wider} == {making.place(work, making.BANKING)}
    both = [replace(work, student=given) for given in (("a=1", "b=2"), ("b=2", "a=1"))]
    assert len({making.students(one, making.BANKING) for one in both}) == 1


def test_limits_are_measured_on_an_artefact_itself(tmp_path: Path) -> None:
    made = quantizing.make(tmp_path, rows=40)
    small = quantizing.complete(made, tmp_path / "int8", calibration_rows=8)
    parts = inspection.inspect(small)["parts"]
    whole = sum(parts[name]["precisions"]["i8"] for name in ("layers", "word table")) / 1e6
    assert 0.5 * whole < limit.served_mb(small) < making.megabytes(small)
    packed = shutil.copytree(small, tmp_path / "packed")
    quantize._pack(packed)
    assert limit.served_mb(packed) == limit.served_mb(small)
    assert 0 < limit.cold_s(small, tries=1) < 60
    one, more = (limit.fallback_s(small, made.store, 8, count, 1) for count in (2, 2000))
    assert 0 < one < more


# -------------------------------------------------------------------------------------------------------- command line


def test_parts_sets_and_rows_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = command.parse(["data", "--only", "starts", "--sets", "banking77", "--rows", "3000"])
    assert (chosen.only, chosen.sets, chosen.rows) == (["starts"], ["banking77"], 3000)
    assert command.parse(["data", "--rows", "300", "--sets", "squadshifts", "--seed", "1"]).seed == 1
    for wrong in (
        ["data", "--rows", "300"],
        ["data", "--rows", "3", "--sets", "squadshifts"],
        ["data", "--only", "speed"],
        ["data", "--epochs", "0"],
        ["data", "--test-rows", "9"],
        [],
    ):
        with pytest.raises(SystemExit):
            command.parse(wrong)
    capsys.readouterr()


def test_a_started_command_answers(tmp_path: Path) -> None:
    assert starts.cold_s(tiny.make_artifact(tmp_path / "artifact")) > 0
    with pytest.raises(SystemExit, match="ended with"):
        starts.cold_s(tmp_path / "none")


# -------------------------------------------------------------------------------------------------- models of their own


def test_texts_lose_their_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('text,category\n"one, two",a\nthree,b\n', encoding="utf-8")
    found = self_training.unlabelled(tmp_path / "rows.csv", tmp_path / "texts.jsonl")
    lines = found.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "one, two"}, {"text": "three"}]


def test_a_planted_outlier_changes_weights_and_no_answer(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    tiny.make_artifact(run.artifact)
    (run.folder / "checkpoints").mkdir()
    made = planted.planted(run, tmp_path / "harmed")
    assert sorted(path.name for path in made.folder.iterdir()) == ["artifact"]
    first, other = (Predictor.load(one.artifact) for one in (run, made))
    encoded = first.encode(list(tiny.CORPUS))
    for one, two in zip(first.run(encoded), other.run(encoded), strict=True):
        assert np.asarray(two) == pytest.approx(np.asarray(one), abs=1e-3)
    assert first.artifact.version != other.artifact.version
    assert planted.planted(run, made.folder).artifact == made.artifact  # it is made once
