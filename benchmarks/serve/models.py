"""An int8 student and the float model that it comes from, where none are named: made once of rtrain's embedded
messages, by its own commands."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.serve.sides import environment
from rtrain.data import synthetic

EPOCHS = "train.epochs=1"
"""Only their time counts."""


def commands(folder: Path, rows: Path) -> list[list[str]]:
    """What makes them in the folder, one after another."""
    parent, student = str(folder / "intent"), str(folder / "intent-student")
    return [
        ["train", "intent", "--data", str(rows), "--out", parent, "--set", EPOCHS],
        ["distill", parent, "--out", student, "--set", EPOCHS],
        ["quantize", student, "--out", str(artifacts(folder)[0])],
    ]


def artifacts(folder: Path) -> tuple[Path, Path]:
    """The folders of the student and of its parent."""
    return folder / "intent-student" / "artifact-int8", folder / "intent" / "artifact"


def make_models(folder: Path) -> tuple[Path, Path]:
    """Both, which are made where they are not there yet: it takes minutes."""
    student, parent = artifacts(folder)
    if not student.is_dir():
        shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted start
        rows, _ = synthetic.write_csv_files(folder / "data")
        for words in commands(folder, rows):
            sys.stderr.write(f"rtrain {' '.join(words)}\n")
            line = [sys.executable, "-m", "rtrain", *words]
            subprocess.run(line, env=environment(), stdout=sys.stderr, check=True)
    return student, parent
