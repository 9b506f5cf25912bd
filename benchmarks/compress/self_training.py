"""Ten labelled rows of each of banking77's intents, and its other texts without their labels: models that are trained
on the labelled rows, with several seeds, teach another one as large, which learns from all of them."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import sets, tasks
from benchmarks.compress import making
from benchmarks.compress.making import BANKING, Set, Work
from benchmarks.results import Keep
from benchmarks.search import commands
from rtrain.run import Run

LINE = Set("banking77, 10 rows a class", BANKING.score)
STUDENT = {
    "distill.student": "minilm",
    "distill.temperature": 0.5,
    "distill.epochs": 4,
    "optim.warmup": 0.1,
}
"""It starts as its teacher did. The teacher was trained with smoothed labels, so it is never quite sure: at a
temperature below 1 its answers are sharper. No text is left out, however unsure the teacher is of it."""


TEACHERS = 3
"""Models that the student learns the mean of."""


def part(work: Work, sets_: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """Test accuracy of the models that have seen the labelled rows alone, and of the student of one and of all."""
    folder = work.folder / f"banking77-few-rows-seed-{work.seed}"
    files = folder / "data"
    files.mkdir(parents=True, exist_ok=True)
    job = making.job_of(LINE)
    source = work.data / job.folder
    arguments = job.prepare(source, files)
    values = {**tasks.FEW_ROWS, "train.keep": 1}
    taught = [
        commands.train(
            folder / f"teacher-{number}", job.recipe, arguments, {**values, "train.seed": work.seed + number}
        )
        for number in range(TEACHERS)
    ]
    texts = unlabelled(source / "train.csv", files / "unlabelled.jsonl")
    given = {**STUDENT, "distill.unlabelled": str(texts)}
    alone = making.distilled(folder / "student-of-one", taught[0], given)
    keep({"teachers": [making.score(one, LINE) for one in taught], "student_of_one": making.score(alone, LINE)})
    others = {"distill.teachers": [str(one.folder) for one in taught[1:]]}
    student = making.distilled(folder / "student", taught[0], {**given, **others})
    known = student.first("unlabelled") or {}
    whole = making.place(work, BANKING) / "teacher"
    limits = {"few_rows_accuracy": making.score(Run(whole), LINE)} if Run(whole).finished else {}
    return {
        "limits": limits,
        "teachers": [making.score(one, LINE) for one in taught],
        "student_of_one": making.score(alone, LINE),
        "few_rows_accuracy": making.score(student, LINE),
        "rows": {name: value for name, value in known.items() if isinstance(value, int | float)},
        "settings": STUDENT,
    }


def unlabelled(source: Path, out: Path) -> Path:
    """The texts of a CSV file without their labels. The labelled ones are among them: `rtrain distill` tells them."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = [{"text": row["text"]} for row in csv.DictReader(file)]
    return sets.write(out, rows)
