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
    """Its row of `benchmarks.tasks`, with rows, recipe and settings."""
    score: str
    """Name of the score."""


BANKING = Set("banking77", "accuracy")
SETS = (BANKING, Set("squadshifts", "f1"), Set("ncbi_disease", "f1"), Set("asap_aes fold 0", "qwk"))
TRIM = "compress.vocabulary=trim"
SMALLEST = {"quantize.embedding_dtype": "int4", "quantize.compressed": True}
UNLIKE = ("train.epochs", "train.evaluate_every", "data.valid_share")
"""Settings of a line of `benchmarks.tasks` that are left out: epochs are given, and the best update is chosen."""


def job_of(dataset: Set) -> tasks.Job:
    return next(job for job in tasks.JOBS if job.name == dataset.job)


def place(work: Work, dataset: Set) -> Path:
    """The folder of a set's models; other epochs or seeds have another."""
    return work.folder / f"{job_of(dataset).folder}-epochs-{work.epochs}-seed-{work.seed}"


def students(work: Work, dataset: Set) -> Path:
    """The folder of a set's students; those of other settings have another, under the same teacher's."""
    if not work.student:
        return place(work, dataset) / "students"
    digest = hashlib.sha256(json.dumps(sorted(work.student)).encode()).hexdigest()[:8]
    return place(work, dataset) / f"students-{digest}"


def teacher(work: Work, dataset: Set) -> Run:
    job, folder = job_of(dataset), place(work, dataset)
    files = folder / "data"
    files.mkdir(parents=True, exist_ok=True)
    arguments = job.prepare(work.data / job.folder, files)
    settings = {name: value for name, value in job.settings.items() if name not in UNLIKE}
    # null: the recipes of some sets say how often gradients are exchanged, and their lines how many rows an update has.
    cadence = {"train.aggregation_frequency": None, "train.epochs": work.epochs}
    values = {**settings, **cadence, "train.keep_checkpoints": 1, "train.seed": work.seed}
    return commands.train(folder / "teacher", job.recipe, arguments, values)


def student(work: Work, dataset: Set, *, trimmed: bool = False) -> Run:
    """The student of the set's teacher; `trimmed`: with the pieces alone that its rows need."""
    folder = students(work, dataset) / ("trimmed" if trimmed else "whole")
    run, taught = Run(folder), teacher(work, dataset)
    if not _has(folder, "summary.json", "artifact/artifact.json"):
        values = dict(value.split("=", 1) for value in [*work.student, *([TRIM] if trimmed else [])])
        resume_options = ["--resume"] if run.exists else []
        arguments = ["distill", str(taught.folder), *commands.settings(values), "--out", str(folder), *resume_options]
        commands.run(arguments, folder.with_suffix(".log"))
    return run


def int8(work: Work, dataset: Set, *, trimmed: bool = False, smallest: bool = False) -> Path:
    """The int8 artifact of a student; `smallest`: by `SMALLEST`."""
    parent = student(work, dataset, trimmed=trimmed)
    out = parent.folder / "artifact-smallest" if smallest else parent.int8_artifact
    if not _has(out, "artifact.json"):
        arguments = [
            "quantize",
            str(parent.folder),
            "--out",
            str(out),
            *commands.settings(SMALLEST if smallest else {}),
        ]
        commands.run(arguments, parent.folder.with_name(f"{parent.name}-{out.name}.log"))
    return out


def _has(folder: Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


# -------------------------------------------------------------------------------------------------------------- scores


def score(run: Run, dataset: Set) -> float:
    """The score of a run's float model on the test rows."""
    return commands.scores(run, "test")[dataset.score]


def score_of(artifact: Path, dataset: Set) -> float:
    """The score that an int8 artifact has kept."""
    document: Mapping[str, Any] = json.loads((artifact / "artifact.json").read_text(encoding="utf-8"))
    return float(document["metrics"]["test"][dataset.score])


def megabytes(artifact: Path) -> float:
    """All files that are served."""
    return sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file()) / 1e6
