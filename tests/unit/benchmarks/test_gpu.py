"""What a GPU must show, at a tiny size on a processor: the whole command where Ray and all else that is not needed
cannot be imported, and its parts that measure nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command, report
from benchmarks.gpu.bench import largest
from benchmarks.gpu.resume import differing
from tests.conftest import labelled_rows, write_rows
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

FORBIDDEN = ("ray", "datasets", "openvino", "nncf", "sklearn", "fastapi", "typer", "rich", "jinja2", "sacrebleu")
WITHOUT = f"""
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {FORBIDDEN!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if one is importlib.machinery.PathFinder else one for one in sys.meta_path]
"""
"""Begins every process of the command, where these cannot be found: as on a machine that does not have them."""
CONTEXT = "please help with the parcel that was due on monday and nobody came to the door "


def start(root: Path, *arguments: object) -> "subprocess.Popen[str]":
    (root / "without").mkdir(exist_ok=True)
    (root / "without" / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{root / 'without'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_end(process: "subprocess.Popen[str]", code: int = 0) -> str:
    out, error = process.communicate()
    assert process.returncode == code, error
    return out


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is prepared from data."""
    root = tmp_path_factory.mktemp("gpu")
    for name in ("banking77", "squadshifts"):
        (root / name).mkdir()
    rows = labelled_rows(150)
    write_rows(root / "banking77" / "train.csv", rows[:120], ("text", "category"))
    write_rows(root / "banking77" / "test.csv", rows[120:], ("text", "category"))
    articles = []
    for number in range(20):
        answer = {"text": "parcel", "answer_start": CONTEXT.index("parcel")}
        questions = [
            {"id": f"{number}-{index}", "question": f"what is {index}", "answers": [answer]} for index in range(3)
        ]
        context = CONTEXT * (1 + number % 4) + f"number {number}"
        articles.append({"title": f"title {number}", "paragraphs": [{"context": context, "qas": questions}]})
    squad = json.dumps({"version": "1.1", "data": articles})
    (root / "squadshifts" / "a.json").write_text(squad, encoding="utf-8")
    encoder = make_encoder(root / "encoder")
    await_end(start(root, "--prepare", root, "--model", encoder, root / "carried"))
    return root / "carried"


def test_what_is_carried_is_half_as_large_and_needs_no_ray(data_folder: Path) -> None:
    names = {path.name for path in data_folder.iterdir()}
    assert names == {"banking77", "model", "squadshifts", "texts.json"}
    before = (data_folder.parent / "encoder" / "model.safetensors").stat().st_size
    assert (data_folder / "model" / "model.safetensors").stat().st_size < 0.6 * before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_line_failed_and_every_check_is_met_without_ray(data_folder: Path, tmp_path: Path) -> None:
    """Minutes, as each section is a process that loads torch."""
    out = tmp_path / "gpu.json"
    document: dict[str, Any] = json.loads(await_end(start(tmp_path, "--json", "--out", out, data_folder)))
    assert document == json.loads(out.read_text(encoding="utf-8"))
    assert {name: entry["status"] for name, entry in document["sections"].items()} == dict.fromkeys(
        command.SECTIONS, "done"
    )
    lines_by_key = {entry["key"]: entry for section in document["sections"].values() for entry in section["lines"]}
    assert [entry for entry in lines_by_key.values() if "error" in entry or entry.get("met") is False] == []
    assert len([entry for entry in lines_by_key.values() if entry.get("met")]) >= 20
    assert (
        0
        < lines_by_key["right.verify.passes_of_3.gradient"]["value"]
        <= 1e-8
        < lines_by_key["right.verify.planted"]["value"]
    )
    assert lines_by_key["right.scaling.overflow"]["about"]["skipped"] > 0
    for suffix in ("dropout", "dropout.deterministic"):
        assert lines_by_key[f"resume.bit_for_bit.{suffix}"]["about"]["resumed_from"] == 20
    speed = {
        side: lines_by_key[f"speed.bert-large.squadshifts.{side}.tokens_per_s"]["about"]
        for side in ("packed", "padded")
    }
    assert speed["packed"]["padding"] == 1.0 < speed["padded"]["padding"]
    assert lines_by_key["memory.bert-base.fp32.recomputation"]["about"]["memory"] < 1


def test_a_section_is_cut_off_when_the_minutes_are_over(data_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    await_end(start(tmp_path, "--only", "right", "--minutes", 0.01, "--out", out, data_folder))
    assert json.loads(out.read_text(encoding="utf-8"))["sections"]["right"]["status"] == "cut off"


# ------------------------------------------------------------------------------------------------------- pure parts


def test_a_line_is_met_by_its_worst_round_and_nan_is_never(tmp_path: Path) -> None:
    gpu_report = report.Report(tmp_path / "a.jsonl", "a")
    gpu_report.line("ratio", values=[1.1, 1.3, 1.6], floor=1.2, goal=1.25)
    gpu_report.line("nan", float("nan"), maximum=1.0)
    gpu_report.line("check", False)
    gpu_report.line("plain", 3)
    with gpu_report.attempt("wrong"):
        int("no")
    lines = report.lines(tmp_path / "a.jsonl")
    assert [entry.get("met") for entry in lines] == [False, False, False, None, None]
    assert lines[0]["value"] == 1.3
    assert "ValueError" in lines[4]["error"]


def test_the_largest_pass_is_the_last_that_fits() -> None:
    def attempt(size: int) -> None:
        if size > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert largest(attempt, 4, 1024, lambda: None) == 32
    assert largest(attempt, 4, 16, lambda: None) == 16
    with pytest.raises(MemoryError):
        largest(attempt, 64, 1024, lambda: None)


def test_tensors_that_differ_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, shift in (("a", 0.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        save_file({"one": torch.zeros(2), "two": torch.zeros(2) + shift}, tmp_path / name / "model.safetensors")
        save_file({"one:step": torch.ones(1)}, tmp_path / name / "optim.safetensors")
    assert differing(tmp_path / "a", tmp_path / "b") == (["two"], 3, 0.5)
    assert differing(tmp_path / "a", tmp_path / "a") == ([], 3, 0.0)
