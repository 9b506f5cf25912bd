"""What a GPU must show, at a tiny size on a processor: the whole command where Ray and all else that is not needed
cannot be imported, one that is killed in its midst, and its parts that measure nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command, memory, profile, report, right, runner, score, speed
from benchmarks.gpu.bench import largest
from benchmarks.gpu.resume import differing
from rtrain.doctor.forecast import memory as forecast
from rtrain.proof import planted
from rtrain.training import step
from tests.conftest import STARTUP, labelled_rows, write_rows
from tests.test_imports import ROOT
from tests.test_training_step import make_network, make_rows, pick
from tests.tiny import make_encoder

FORBIDDEN = ("ray", "datasets", "openvino", "nncf", "sklearn", "fastapi", "typer", "rich", "jinja2", "sacrebleu")
WITHOUT = f"""
import importlib.machinery, runpy, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {FORBIDDEN!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if one is importlib.machinery.PathFinder else one for one in sys.meta_path]
sys.argv[0] = "benchmarks.gpu"
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""
"""The command, where these cannot be found: as on a machine that does not have them."""
CONTEXT = "please help with the parcel that was due on monday and nobody came to the door "


def start(*arguments: object) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{STARTUP}", "OMP_NUM_THREADS": "1"}
    given = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    return subprocess.Popen(given, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]", code: int = 0) -> str:
    out, error = process.communicate()
    assert process.returncode == code, error
    return out


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        asked = [{"id": f"{number}-{of}", "question": f"what is {of}", "answers": [answer]} for of in range(3)]
        context = CONTEXT * (1 + number % 4) + f"number {number}"
        articles.append({"title": f"title {number}", "paragraphs": [{"context": context, "qas": asked}]})
    questions = json.dumps({"version": "1.1", "data": articles})
    (root / "squadshifts" / "a.json").write_text(questions, encoding="utf-8")
    encoder = make_encoder(root / "encoder")
    ended(start("--prepare", root, "--model", encoder, root / "carried"))
    return root / "carried"


@pytest.fixture(scope="module")
def document(carried: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all sections found, with an error planted in one: minutes, as each section is a process that loads torch."""
    out = tmp_path_factory.mktemp("out") / "gpu.json"
    printed = json.loads(ended(start("--json", "--minutes", 40, "--plant", "profile", "--out", out, carried)))
    assert printed == json.loads(out.read_text(encoding="utf-8"))
    found: dict[str, Any] = printed
    return found


def lines(document: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {one["key"].removeprefix(f"{section}."): one for one in document["sections"][section]["lines"]}


# -------------------------------------------------------------------------------------------------- the whole command


def test_what_is_carried_is_half_as_large_and_needs_no_ray(carried: Path) -> None:
    names = {path.name for path in carried.iterdir()}
    assert names == {"banking77", "model", "squadshifts", "texts.json"}
    before = (carried.parent / "encoder" / "model.safetensors").stat().st_size
    assert (carried / "model" / "model.safetensors").stat().st_size < 0.6 * before
    assert len(json.loads((carried / "texts.json").read_text(encoding="utf-8"))) == 30


@pytest.mark.slow
def test_a_section_that_fails_is_told_and_the_next_ones_run(document: dict[str, Any]) -> None:
    assert list(document["sections"]) == list(runner.SHARES)
    status = {name: one["status"] for name, one in document["sections"].items()}
    assert status == {name: "failed" if name == "profile" else "done" for name in runner.SHARES}
    assert runner.PLANTED in document["sections"]["profile"]["error"]
    assert "Traceback" in document["sections"]["profile"]["traceback"]


@pytest.mark.slow
def test_no_line_failed_and_every_check_is_met(document: dict[str, Any]) -> None:
    found = [one for section in document["sections"].values() for one in section["lines"]]
    assert len(found) > 60
    assert [one for one in found if "error" in one] == []
    assert [one for one in found if one.get("met") is False] == []
    assert len([one for one in found if one.get("met")]) >= 25


@pytest.mark.slow
def test_neither_ray_nor_what_else_is_forbidden_was_there(document: dict[str, Any]) -> None:
    about = lines(document, "needs")["packages"]["about"]
    assert (about["ray"], about["openvino"], about["missing"]) == (None, None, [])
    assert about["torch"] == torch.__version__
    assert "rtrain.training.loop" in lines(document, "needs")["rtrain"]["about"]["imported"]


@pytest.mark.slow
def test_packed_is_padded_and_all_passes_are_one_training(document: dict[str, Any]) -> None:
    found = lines(document, "right")
    assert found["packed.fp64.logits"]["value"] <= 1e-10
    assert found["packed.fp64.gradient"]["value"] <= 1e-10
    assert 0 < found["verify.passes_of_3.gradient"]["value"] <= 1e-8
    assert found["verify.planted"]["value"] >= 1e-2
    assert found["scaling.overflow"]["about"]["skipped"] > 0
    assert found["recomputed.gradient"]["value"] == 0
    assert 0 < found["attention.fp32"]["value"] <= 1e-5


@pytest.mark.slow
def test_a_killed_process_s_training_is_resumed_bit_for_bit(document: dict[str, Any]) -> None:
    found = lines(document, "resume")
    for way in ("dropout", "dropout.deterministic"):
        one = found[f"bit_for_bit.{way}"]
        assert one["value"] is True
        assert (one["about"]["resumed_from"], one["about"]["first"]) == (20, [])
        assert one["about"]["of"] > 100


@pytest.mark.slow
def test_sides_are_compared_round_by_round(document: dict[str, Any]) -> None:
    found = lines(document, "speed")
    sides = ("packed", "packed_attention_dropout", "padded", "hf", "hf_grouped")
    for side in sides:
        assert found[f"bert-large.squadshifts.{side}.tokens_per_s"]["rounds"] == 2
        assert found[f"bert-large.squadshifts.{side}.mfu"]["min"] > 0
    rates = {side: found[f"bert-large.squadshifts.{side}.tokens_per_s"]["values"] for side in sides}
    best = found["bert-large.squadshifts.packed_over_hf"]["about"]["best"]
    ratios = [ours / theirs for ours, theirs in zip(rates["packed"], rates[best], strict=True)]
    assert found["bert-large.squadshifts.packed_over_hf"]["values"] == pytest.approx(ratios)
    padding = {side: found[f"bert-large.squadshifts.{side}.tokens_per_s"]["about"]["padding"] for side in sides}
    assert padding["packed"] == 1.0 < padding["padded"]
    assert padding["hf"] > 1.0


@pytest.mark.slow
def test_other_sections_have_their_lines(document: dict[str, Any]) -> None:
    assert {"bert-base.pass_of_512", "bert-base.fused_optimizer"} <= lines(document, "pays").keys()
    scored = lines(document, "score")
    assert {f"{side}.seed_0.best" for side in ("ours", "hf_grouped", "hf_grouped_mean")} <= scored.keys()
    assert len(scored["ours.seed_0.best"]["about"]["seen"]) >= 4
    asked = lines(document, "memory")
    assert asked["bert-base.fp32.recomputation"]["about"]["memory"] < 1
    assert lines(document, "serving")["same_answers"]["value"] <= 1e-3


@pytest.mark.slow
def test_the_table_has_every_line(document: dict[str, Any]) -> None:
    shown = report.table(document)
    for section in document["sections"].values():
        assert all(f"| {one['key']} |" in shown for one in section["lines"])
    assert f"| **profile** | failed: RuntimeError: {runner.PLANTED} |" in shown


def test_a_command_that_is_killed_leaves_all_that_was_found_and_no_process(carried: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    process = start("--only", "needs", "right", "--minutes", 5, "--out", out, carried)
    found: dict[str, Any] = {}
    while len(found.get("right", {}).get("lines", [])) < 2:
        assert process.poll() is None
        time.sleep(0.02)
        if out.is_file():
            found = json.loads(out.read_text(encoding="utf-8"))["sections"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert (left["needs"]["status"], left["right"]["status"]) == ("done", "running")
    assert len(left["right"]["lines"]) >= 2
    end = time.monotonic() + 20
    while any(running(int(child)) for child in children):
        assert time.monotonic() < end, "a section outlived the command"
        time.sleep(0.05)


def running(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    return path.is_file() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_section_is_cut_off_at_its_share(carried: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    ended(start("--only", "right", "needs", "--minutes", 0.01, "--out", out, carried))
    found = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert list(found) == ["needs", "right"]  # in order of worth, whatever was written
    assert found["right"]["status"] == "cut off"


# ------------------------------------------------------------------------------------------------------- pure parts


def test_passes_of_any_size_are_one_training_and_a_planted_bug_shows(tmp_path: Path) -> None:
    start, rows = make_network(make_encoder(tmp_path / "encoder")).eval(), make_rows(8)

    def trained(most: int, run_update: step.RunUpdate = step.run_update) -> right._Run:
        found = right._Run(start)
        found.update(run_update, [pick(rows, range(first, min(first + most, 8))) for first in range(0, 8, most)])
        return found

    weights, gradient, worst = trained(3).differences(trained(8))
    assert 0 < max(weights, gradient) < right.TOLERANCE
    assert worst in dict(start.named_parameters())
    assert max(trained(3, planted.BUGS["k ignored"]).differences(trained(8))[:2]) > right.SEEN


def test_time_that_is_left_over_goes_to_those_that_come_after() -> None:
    names = list(runner.SHARES)
    assert sum(runner.SHARES.values()) == 40
    assert runner.share(2400, names) == pytest.approx(30)
    assert runner.share(2390, names[1:]) == pytest.approx(2390 * 4 / 39.5)
    assert runner.share(77, names[-1:]) == 77


def test_help_says_how_to_prepare_carry_run_and_read() -> None:
    text = command.__doc__ or ""
    for word in ("Prepare", "Carry", "Run", "Read", *runner.SHARES):
        assert re.search(rf"\b{word}\b", text), word


def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse([str(tmp_path)])
    assert f"--prepare DATA {tmp_path}" in capsys.readouterr().err


def test_a_line_is_met_by_its_worst_round_and_nan_is_never(tmp_path: Path) -> None:
    made = report.Report(tmp_path / "a.jsonl", "a")
    made.line("ratio", values=[1.1, 1.3, 1.6], floor=1.2, goal=1.25)
    made.line("nan", float("nan"), most=1.0)
    made.line("check", False)
    made.line("plain", 3)
    with made.attempt("wrong"):
        int("no")
    found = report.lines(tmp_path / "a.jsonl")
    assert [one.get("met") for one in found] == [False, False, False, None, None]
    assert found[0]["value"] == 1.3
    assert found[4]["error"] == "ValueError: invalid literal for int() with base 10: 'no'"


def test_gaps_are_what_no_kernel_covers() -> None:
    assert profile.gaps([(0, 2), (1, 3), (5, 6), (6, 7), (10, 12)]) == (5, 12, [3, 2])


def test_the_first_time_that_a_goal_is_reached_counts() -> None:
    assert score.until([(1.0, 0.5), (2.0, 0.91), (3.0, 0.94)], 0.9) == 2.0
    assert score.until([(1.0, 0.5)], 0.9) is None


def test_the_largest_pass_is_the_last_that_fits() -> None:
    def attempt(size: int) -> None:
        if size > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert largest(attempt, 4, 1024, lambda: None) == 32
    assert largest(attempt, 4, 16, lambda: None) == 16
    with pytest.raises(MemoryError, match="not even 64"):
        largest(attempt, 64, 1024, lambda: None)


def test_tensors_that_differ_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, shift in (("a", 0.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        save_file({"one": torch.zeros(2), "two": torch.zeros(2) + shift}, tmp_path / name / "model.safetensors")
        save_file({"one:step": torch.ones(1)}, tmp_path / name / "optim.safetensors")
    assert differing(tmp_path / "a", tmp_path / "b") == (["two"], 3, 0.5)
    assert differing(tmp_path / "a", tmp_path / "a") == ([], 3, 0.0)


def test_memory_is_compared_with_what_plan_foretells(tmp_path: Path) -> None:
    made: Any = make_network(make_encoder(tmp_path / "encoder")).float()
    found = {again: memory.traced(made, [40, 9], "fp32", again, "cpu") for again in (False, True)}
    assert found[False].weights == sum(one.nbytes for one in (*made.parameters(), *made.buffers()))
    assert 0 < found[True].activations < found[False].activations
    assert (
        memory.foretold(found[False])
        == forecast.needed(found[False], 1, process=0.0, kept=1.0).total
        > 4 * found[False].weights
    )


def test_each_kind_of_texts_has_bounds() -> None:
    assert [speed.over_peer(kind) for kind in ("long", "squadshifts")] == [
        {"floor": 1.3, "goal": 2.0},
        {"floor": 1.2, "goal": 1.5},
    ]
