"""The compression benchmark: its figures, its engines, and its whole command on a small set of tags."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compress import figures, latency, making, parts, rivals
from benchmarks.compress.figures import Aim
from rtrain.core.ragged import collate, pad_batch
from rtrain.inference.predictor import Predictor
from tests.support import tiny
from tests.support.root import ROOT


@pytest.mark.parametrize(
    ("aim", "value", "word"),
    [
        (Aim(0.99, 0.998), 0.998, "goal"),
        (Aim(0.99, 0.998), 0.99, "floor"),
        (Aim(8.2, 6.0, more=False), 6.0, "goal"),
        (Aim(8.2, 6.0, more=False), 8.3, "below"),
    ],
)
def test_a_figure_reaches_its_goal_its_floor_or_neither(aim: Aim, value: float, word: str) -> None:
    assert aim.word(value) == word


def test_sides_take_turns_and_each_begins_a_round() -> None:
    now, called = [0.0], list[str]()

    def ask(name: str, ms: float) -> None:
        called.append(name)
        now[0] += ms / 1e3

    sides = {"a": lambda: ask("a", 2.0), "b": lambda: ask("b", 6.0)}
    times = latency.rounds(sides, number=2, calls=4, clock=lambda: now[0])
    calls = latency.WARM + 4
    assert called == ["a"] * calls + ["b"] * calls + ["b"] * calls + ["a"] * calls
    result = latency.figures(times, "a", "b")
    assert (result["ratio"], result["ratio_of_least"]) == (pytest.approx(3.0), pytest.approx(3.0))


def test_other_engines_answer_as_the_float_model(tmp_path: Path) -> None:
    predictor = Predictor.load(tiny.make_artifact(tmp_path / "artifact"), threads=1)
    tokens = predictor.encode(list(tiny.CORPUS[:1]))
    inputs = pad_batch(collate(tokens), predictor.pad_id)
    expected = predictor.run(tokens)[0]
    network = predictor.network[0]
    assert np.abs(rivals.torch_float(network)(inputs)[0] - expected).max() < 1e-4
    # By default OpenVINO computes in bf16 if the processor supports it.
    assert np.abs(rivals.openvino_float(network, inputs)(inputs)[0] - expected).max() < 0.05


def test_other_epochs_seeds_or_settings_of_students_have_folders_of_their_own(tmp_path: Path) -> None:
    """Models that are finished are not made again: those of other settings would be taken for them."""
    work = making.Work(tmp_path, tmp_path, 2)
    variants = (work, replace(work, epochs=3), replace(work, seed=1))
    assert len({making.place(variant, making.BANKING) for variant in variants}) == 3
    students = [
        replace(work, student=student_settings)
        for student_settings in ((), ("distill.layers=4",), ("distill.layers=2",))
    ]
    assert len({making.students(work_variant, making.BANKING) for work_variant in students}) == 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_teacher_student_and_int8_of_a_set_are_made_and_scored(tmp_path: Path) -> None:
    data = tmp_path / "data" / "ncbi_disease"
    data.mkdir(parents=True)
    for name in ("train", "devel", "test"):
        sentences = [f"the\tO\ndisease{number % 5}\tB-Disease\nof {name}{number}\tO\n" for number in range(40)]
        (data / f"{name}.tsv").write_text("\n".join(sentences), encoding="utf-8")
    out = tmp_path / "out" / "compress.json"
    arguments = [str(data.parent), "--json", "--sets", "ncbi_disease", "--only", "scores", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compress", *arguments, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout.splitlines()[-1])["scores"]["sets"]["ncbi_disease"]
    assert measured["mb"] > 0
    assert {"teacher", "student", "int8"} <= measured.keys()


def test_every_figure_of_the_parts_has_an_aim() -> None:
    """A figure without one would be measured and never shown."""
    results = {"beside": {f"latency_vs_hf_b{rows}": 0.1 for rows in parts.BATCHES}}
    assert figures.table(results).count("latency_vs_hf") == len(parts.BATCHES)
