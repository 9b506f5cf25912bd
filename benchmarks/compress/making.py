"""The models of a set: teacher, student, int8, and the trimmed ones. Each is made by rtrain's commands, once."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tasks
from benchmarks.search import commands
from rtrain.core.run_folder import Run


@dataclass(frozen=True)
class Work:
    data: Path
    """Folder of the data sets."""
    folder: Path
    epochs: int
    """Times that a teacher is trained on each row."""
    student: tuple[str, ...] = ()
    """Settings of students, `name=value`, that are others than the recipe's."""
    seed: int = 0
    """That of teachers and of students."""


@dataclass(frozen=True)
class Set:
    job: str
    """Its line of `benchmarks.tasks`, of which it has rows, recipe and settings."""
    score: str
    """Name of the score."""


BANKING = Set("banking77", "accuracy")
SETS = (BANKING, Set("squadshifts", "f1"), Set("ncbi_disease", "f1"), Set("asap_aes fold 0", "qwk"))
TRIM = "compress.vocabulary=trim"
SMALLEST = {"quantize.table": "int4", "quantize.compressed": True}
UNLIKE = ("train.epochs", "train.evaluate_every", "data.valid_share")
"""Settings of a line of `benchmarks.tasks` that are left out: epochs are given, and the best update is chosen."""


def job_of(one: Set) -> tasks.Job:
    return next(job for job in tasks.JOBS if job.name == one.job)


def place(work: Work, one: Set) -> Path:
    """The folder of a set's models; other epochs or seeds have another."""
    return work.folder / f"{job_of(one).folder}-epochs-{work.epochs}-seed-{work.seed}"


def students(work: Work, one: Set) -> Path:
    """The folder of a set's students; those of other settings have another, under the same teacher's."""
    if not work.student:
        return place(work, one) / "students"
    digest = hashlib.sha256(json.dumps(sorted(work.student)).encode()).hexdigest()[:8]
    return place(work, one) / f"students-{digest}"


def teacher(work: Work, one: Set) -> Run:
    job, folder = job_of(one), place(work, one)
    files = folder / "data"
    files.mkdir(parents=True, exist_ok=True)
    arguments = job.prepare(work.data / job.folder, files)
    settings = {name: value for name, value in job.settings.items() if name not in UNLIKE}
    # null: the recipes of some sets say how often gradients are exchanged, and their lines how many rows an update has.
    cadence = {"train.aggregation_frequency": None, "train.epochs": work.epochs}
    values = {**settings, **cadence, "train.keep": 1, "train.seed": work.seed}
    return commands.train(folder / "teacher", job.recipe, arguments, values)


def student(work: Work, one: Set, *, trimmed: bool = False) -> Run:
    """The student of the set's teacher; `trimmed`: with the pieces alone that its rows need."""
    folder = students(work, one) / ("trimmed" if trimmed else "whole")
    made, taught = Run(folder), teacher(work, one)
    if not _has(folder, "summary.json", "artifact/artifact.json"):
        values = dict(value.split("=", 1) for value in [*work.student, *([TRIM] if trimmed else [])])
        begun = ["--resume"] if made.exists else []
        given = ["distill", str(taught.folder), *commands.settings(values), "--out", str(folder), *begun]
        commands.run(given, folder.with_suffix(".log"))
    return made


def int8(work: Work, one: Set, *, trimmed: bool = False, smallest: bool = False) -> Path:
    """The int8 artefact of a student; `smallest`: by `SMALLEST`."""
    parent = student(work, one, trimmed=trimmed)
    out = parent.folder / "artifact-smallest" if smallest else parent.int8
    if not _has(out, "artifact.json"):
        given = ["quantize", str(parent.folder), "--out", str(out), *commands.settings(SMALLEST if smallest else {})]
        commands.run(given, parent.folder.with_name(f"{parent.name}-{out.name}.log"))
    return out


def _has(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


# -------------------------------------------------------------------------------------------------------------- scores


def score(made: Run, one: Set) -> float:
    """The score of a run's float model on the test rows."""
    return commands.scores(made, "test")[one.score]


def score_of(artifact: Path, one: Set) -> float:
    """The score that an int8 artefact has kept."""
    document: Mapping[str, Any] = json.loads((artifact / "artifact.json").read_text(encoding="utf-8"))
    return float(document["metrics"]["test"][one.score])


def megabytes(artifact: Path) -> float:
    """All files that are served."""
    return sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file()) / 1e6
