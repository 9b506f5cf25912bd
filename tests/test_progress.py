"""What a user sees: plain lines off a terminal, one for each thing worth keeping, and nothing that a text can forge."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rtrain import artifact
from rtrain.cli import compress
from rtrain.report.live import progress
from rtrain.report.live.waited import Waited
from rtrain.run import Run
from tests.tiny import make_artifact, refused

SUMMARY: dict[str, Any] = {
    "status": "finished",
    "updates": 250,
    "rows_seen": 16_000,
    "seconds": {"train": 79.6, "input_wait": 0.123},
    "rows_per_second": 201.4,
    "real_tokens": 1000,
    "padded_tokens": 1040,
    "noise_scale": None,
    "metrics": {"valid": None, "test": {"accuracy": 0.87654, "macro_f1": 0.8, "rows": 1000}},
    "classes": {},
}


def shown(capsys: pytest.CaptureFixture[str], *events: dict[str, Any]) -> list[str]:
    """The lines that events leave on stderr, without their times."""
    with progress.Line() as line:
        for event in events:
            line(event)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(re.match(r"^ +\d+\.\d s  ", line) for line in lines)
    return [line.split(" s  ", 1)[1] for line in lines]


def update(number: int, time: float, loss: float = 0.5) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "update": number, "of": 100, "loss": loss}


def test_a_start_an_update_and_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"accuracy": 0.5, "macro_f1": 0.25, "rows": 7}
    assert shown(
        capsys,
        {"kind": "created", "time": 1.0},
        {"kind": "started", "workers": 2, "precision": "bf16", "update": 40},
        update(50, 10.0, loss=1.23456),
        {"kind": "evaluated", "split": "valid", "update": 50, "scores": scores, "loss": 0.25},
        {"kind": "evaluated", "split": "test", "update": 50, "scores": scores},
        {"kind": "evaluated", "split": "valid", "update": 50, "scores": scores, "chosen": {"threshold": 0.3}},
        {"kind": "stage", "text": "done"},
        {"kind": "trained", "time": 2.0},
    ) == [
        "2 workers, bf16, from update 40",
        "update 50/100  loss 1.2346",
        "update 50  valid: accuracy 0.5000  macro_f1 0.2500  loss 0.2500  (7 rows)",
        "test, by the weights of update 50: accuracy 0.5000  macro_f1 0.2500  (7 rows)",
        "valid, by the weights of update 50 and threshold 0.3000: accuracy 0.5000  macro_f1 0.2500  (7 rows)",
        "done",
    ]


def test_a_run_that_logs_every_update_prints_a_line_a_second_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *(update(number, 10.0 + number / 8) for number in range(1, 101)))
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == [*range(1, 101, 8), 100]


def test_which_weights_are_the_run_s_is_said_and_what_parts_a_tie(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"kind": "best", "update": 8, "of": 6, "headline": "accuracy", "score": 11 / 12, "loss": 0.25}
    assert shown(
        capsys,
        {**found, "why": "score"},
        {**found, "why": "loss"},
        {**found, "why": "first"},
        {**found, "headline": "neg_rmse", "score": -0.5, "why": "score"},
    ) == [
        "best of 6: update 8, accuracy 0.9167",
        "best of 6: update 8, a tie by accuracy 0.9167, of the lower loss",
        "best of 6: update 8, a tie by accuracy 0.9167, the first of them",
        "best of 6: update 8, rmse 0.5000",
    ]


def test_slices_that_are_too_small_are_named_and_not_those_of_other_splits(capsys: pytest.CaptureFixture[str]) -> None:
    every = {
        "language": {"es": {"accuracy": 0.625, "rows": 8}, "en": {"accuracy": 0.9, "rows": 52}},
        "shop": {"": {"accuracy": 0.5, "rows": 19}, "b": {"accuracy": 0.5, "rows": 41}},
        "one": {"x": {"accuracy": 0.5, "rows": 12}},  # all rows have it
        "length": {"1 to 5": {"accuracy": 0.5, "rows": 15}, "6 to 9": {"accuracy": 0.5, "rows": 15}},
    }
    sliced = {"kind": "sliced", "split": "test", "slices": every}
    many = {str(number): {"f1": 0.5, "rows": 3} for number in range(8)}
    assert shown(
        capsys,
        sliced,
        {**sliced, "split": "valid"},
        {**sliced, "slices": {"language": {"en": {"f1": 0.5, "rows": 20}, "de": {"f1": 0.4, "rows": 40}}}},
        {**sliced, "slices": {"shop": many}},
    ) == [
        "2 slices have fewer than 20 rows: not judged: language es (8 rows, 0.625), shop (empty) (19 rows, 0.500)",
        "8 slices have fewer than 20 rows: not judged: shop 0 (3 rows, 0.500), shop 1 (3 rows, 0.500), "
        "shop 2 (3 rows, 0.500), shop 3 (3 rows, 0.500), shop 4 (3 rows, 0.500) and 3 more",
    ]


def test_a_start_says_to_what_the_learning_rate_rises(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 4, "precision": "bf16", "lr": 2e-4 * 2**0.5, "update": 0}
    assert shown(capsys, start) == ["4 workers, bf16, learning rate 0.000283 at its peak, from update 0"]
    rate = "learning rate 0.000283 at its peak"
    assert shown(capsys, {**start, "rows_per_update": 64}) == [
        f"4 workers, bf16, 64 rows per update, {rate}, from update 0"
    ]


def test_how_gradients_go_is_said_where_it_is_not_as_asked_or_loses_something(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"kind": "transport", "asked": "shared_memory", "used": "shared_memory", "reason": None}
    assert shown(
        capsys,
        asked,
        {**asked, "used": "stock", "reason": "there is a GPU"},
        {**asked, "asked": "auto", "used": "stock", "reason": "there is a GPU"},
        {"kind": "compressed", "error": 0.00171},
    ) == [
        "train.transport=shared_memory: stock is used, as there is a GPU",
        "gradients are sent in fewer bits, with an error of 1.7e-03 of their norm",
    ]


def test_time_left_is_by_the_updates_of_this_start(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "update": 0}
    lines = shown(capsys, start, update(10, 100.0), update(30, 110.0), start, update(90, 500.0), update(95, 520.0))
    # 20 updates in 10 s: 70 more take 35 s. After the restart 5 in 20 s: 5 more take 20 s.
    assert [line.split("loss 0.5000")[1] for line in lines if "loss" in line] == [
        "",
        "  35 s left",
        "  1 restart",
        "  20 s left  1 restart",
    ]


def test_speed_is_what_passed_since_the_first_progress_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "update": 0}
    first = {**update(10, 100.0), "rows": 640, "real_tokens": 9_000}
    then = {**update(30, 104.0), "rows": 1_920, "real_tokens": 29_000}
    lines = shown(capsys, start, start, start, first, then)
    # 1,280 rows and 20,000 tokens in 4 s; the time before the first progress is set-up, not speed.
    assert lines[-2:] == [
        "update 10/100  loss 0.5000  2 restarts",
        "update 30/100  loss 0.5000  320 rows/s, 5,000 tokens/s  14 s left  2 restarts",
    ]


def test_the_next_run_of_a_command_is_no_restart(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "update": 0}
    rows = {"kind": "tokens_reused", "rows": {"train": 8, "valid": 1, "test": 1}, "quarantined": 0, "store": "/runs"}
    lines = shown(capsys, rows, start, update(10, 100.0), rows, start, update(20, 200.0), start, update(30, 300.0))
    assert [line.split("loss 0.5000")[1] for line in lines if "loss" in line] == ["", "", "  1 restart"]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"kind": "tokenised", "quarantined": 0},
            "8,000 training, 1,000 validation, 900 test rows",
        ),
        (
            {"kind": "tokens_reused", "quarantined": 1},
            "8,000 training, 1,000 validation, 900 test rows, tokens reused; "
            "1 bad row set aside, with reasons in /runs/.tokens/abc/quarantine.parquet",
        ),
        (
            {"kind": "tokenised", "quarantined": 1200},
            "8,000 training, 1,000 validation, 900 test rows; "
            "1,200 bad rows set aside, with reasons in /runs/.tokens/abc/quarantine.parquet",
        ),
    ],
)
def test_rows_and_where_the_bad_ones_are(capsys: pytest.CaptureFixture[str], event: dict[str, Any], text: str) -> None:
    rows = {"train": 8000, "valid": 1000, "test": 900}
    assert shown(capsys, {**event, "rows": rows, "store": "/runs/.tokens/abc"}) == [text]


def test_the_live_line_of_a_terminal_is_one_line_on_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    first, then = ({**update(n, float(n)), "rows": 64 * n, "real_tokens": 999 * n} for n in (1, 3))
    with progress.Line() as line:
        line({"kind": "started", "workers": 2, "precision": "fp32", "update": 0})
        line(first)
        line(then)
    shown_text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [text.rstrip() for text in re.split(r"[\r\n]", shown_text) if "update 3/100" in text]
    assert lines
    assert all(len(text) <= 40 and text.endswith("…") for text in lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[red]no markup[/red] [/]", "[red]no markup[/red] [/]"),
        (":warning: stays", ":warning: stays"),
        ("\x1b[2Jcleared\x07", r"\x1b[2Jcleared\x07"),
        ("two\nlines\rover", r"two\nlines\rover"),
        ("bidi \u202e", r"bidi \u202e"),
        ("größer 🙂 日本", "größer 🙂 日本"),
        ("lone \udce9", r"lone \udce9"),
        ("x" * 500, "x" * 500),
    ],
)
def test_text_is_printed_as_it_is_on_one_line(capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    assert shown(capsys, {"kind": "stage", "text": text}) == [line]


def test_say_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    progress.say("a line")
    assert capsys.readouterr() == ("", "a line\n")


# ----------------------------------------------------------------------------------------------------------- at the end


def test_the_end_of_a_training(tmp_path: Path) -> None:
    lines = progress.summary_text(SUMMARY, Run(tmp_path)).splitlines()
    assert lines == [
        "finished: 250 updates, 16,000 rows in 80 s of training (201 rows/s), input wait 0.12 s, "
        "padded/real tokens 1.04",
        "test (1000 rows): accuracy 0.8765, macro_f1 0.8000",
        f"run: {tmp_path}",
    ]
    (tmp_path / "report.html").touch()
    assert progress.summary_text(SUMMARY, Run(tmp_path)).splitlines()[3] == f"report: {tmp_path}/report.html"


@pytest.mark.parametrize(("high", "told"), [(260.4, "260"), (None, "more")])
def test_the_end_of_a_training_has_the_noise_scale_where_it_is_known(
    tmp_path: Path, high: float | None, told: str
) -> None:
    scale = {"rows": 190.2, "low": 139.6, "high": high, "measurements": 12}
    lines = progress.summary_text({**SUMMARY, "noise_scale": scale, "rows_per_update": 64}, Run(tmp_path)).splitlines()
    assert lines[1] == f"noise scale of the gradient: 190 rows (140 to {told}); an update has 64"


@pytest.mark.parametrize("name", ["run", "my run", "it's"])
def test_what_to_do_next_can_be_pasted(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / name)
    run.folder.mkdir()

    def words() -> list[str]:
        start, _, command = progress.after(run, "distill", "a teacher").partition(" ")
        assert start == "next:"
        return shlex.split(command)

    run.append("created", task="classification")
    assert words() == ["rtrain", "distill", "a teacher", "--resume", "--out", str(run)]
    make_artifact(run.artifact)
    assert words() == ["rtrain", "serve", f"{run}/artifact"]
    refused(run.artifact)
    assert words() == ["rtrain", "inspect", f"{run}/artifact"]


def test_an_encoder_is_for_other_recipes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.append("created", task="masked_lm")
    make_artifact(run.artifact)
    assert progress.after(run, "train") == f"next: rtrain train intent --data FILE --model {tmp_path}/artifact"
    refused(run.artifact)
    assert progress.after(run, "train") == f"next: rtrain inspect {tmp_path}/artifact"


def test_an_artefact_is_used_by_the_name_that_was_given_and_looked_at_where_it_cannot_be_read(tmp_path: Path) -> None:
    made = make_artifact(tmp_path / "run" / "artifact")
    assert progress.used(made, "s3://models/run") == "next: rtrain serve s3://models/run"
    (made / "artifact.json").write_text("{")
    assert progress.used(made) == f"next: rtrain inspect {made}"


@pytest.mark.parametrize(("verdict", "verb"), [("promote", "quantize"), ("hold", "quantize"), ("refuse", "inspect")])
def test_a_student_is_quantized_where_the_gate_lets_it_through(tmp_path: Path, verdict: str, verb: str) -> None:
    student = Run(tmp_path)
    made = artifact.read(make_artifact(student.artifact))
    gate = {"verdict": verdict, "reasons": ["it is worse"], "version": made.version}
    artifact.judged(student.artifact, gate)
    place = student if verb == "quantize" else student.artifact
    assert compress._after(student, "distill", "teacher") == f"next: rtrain {verb} {place}"


# --------------------------------------------------------------------------------------------------------- the waiting


def test_where_the_seconds_went_adds_up_to_what_was_waited() -> None:
    clock = iter([100.0, 103.0, 107.0, 113.0, 122.2, 122.4, 125.0, 125.0])
    waited = Waited(lambda: next(clock))
    for phase in ("Ray", "start of workers", "training", "a moment", "Ray"):
        waited.enter(phase)
    assert waited.text() == "25 s in all: checks 3, Ray 7, start of workers 6, training 9"


def test_a_command_of_a_moment_says_its_seconds_alone() -> None:
    assert Waited(lambda: 5.0).text() == "0 s in all"


def test_what_takes_seconds_is_said_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(
        capsys,
        {"kind": "doing", "text": "starting Ray", "phase": "Ray"},
        {"kind": "doing", "text": "starting 2 workers", "phase": "start of workers"},
        {"kind": "started", "workers": 2, "precision": "bf16", "update": 0},
        {"kind": "first_rows"},
        {"kind": "writing"},
        {"kind": "doing", "text": "writing the report", "phase": "report"},
    ) == [
        "starting Ray",
        "starting 2 workers",
        "2 workers, bf16, from update 0",
        "the first rows are there",
        "writing predictions, scores and the artefact",
        "writing the report",
    ]


def test_the_end_of_a_pause_before_any_row(tmp_path: Path) -> None:
    paused = {**SUMMARY, "status": "paused", "real_tokens": 0, "metrics": {"valid": None, "test": None}}
    text = progress.summary_text(paused, Run(tmp_path))
    assert "no test score yet" in text
    assert "padded/real tokens 1.00" in text


def test_lines_of_a_search_name_their_trial_and_the_speed_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "update": 0}
    first, second = ({"trial": number} for number in (0, 3))
    lines = shown(
        capsys,
        {**start, **first},
        {**start, **second},
        {**update(10, 100.0), **first},
        {**update(10, 105.0), **second},
        {**update(30, 110.0), **first},
        {**update(20, 115.0), **second},
        {"kind": "stage", "text": "done"},
    )
    assert lines == [
        "trial 0: 1 worker, fp32, from update 0",
        "trial 3: 1 worker, fp32, from update 0",
        "trial 0: update 10/100  loss 0.5000",
        "trial 3: update 10/100  loss 0.5000",
        "trial 0: update 30/100  loss 0.5000  35 s left",
        "trial 3: update 20/100  loss 0.5000  80 s left",
        "done",
    ]


class Counting:
    """A search that says which of its events it was told, and how many so far."""

    def __init__(self) -> None:
        self.events = 0

    def said(self, event: dict[str, Any]) -> str:
        self.events += 1
        return str(event.get("line", ""))

    @property
    def standing(self) -> str:
        return f"{self.events} so far"


def test_a_search_says_its_own_events_and_of_its_trials_what_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"kind": "evaluated", "split": "valid", "update": 50, "scores": {"accuracy": 0.5, "rows": 7}}
    fault = {
        "kind": "crashed",
        "trial": 1,
        "cause": "worker died",
        "error": "SIGKILL",
        "stalled": [],
        "resumes_from": 5,
    }
    events: list[dict[str, Any]] = [
        {"kind": "search", "what": "asked", "trial": 1, "line": "trial 1: lr 0.1"},
        {"kind": "started", "workers": 1, "precision": "fp32", "update": 0, "trial": 1},
        {**update(10, 1.0), "trial": 1},
        {**scores, "trial": 1},
        {"kind": "device", "why": "no GPU", "trial": 1},
        {"kind": "device", "why": "no GPU", "trial": 0},
        fault,
        {"kind": "search", "what": "spent", "seconds": 3.0},  # it has no line
        {"kind": "search", "what": "stopped", "line": "no further trial"},
    ]
    with progress.Line() as line, line.following(Counting()):
        for event in events:
            line(event)
    lines = [text.split(" s  ", 1)[1] for text in capsys.readouterr().err.splitlines()]
    assert lines == [
        "trial 1: lr 0.1",
        "trial 0: no GPU",
        "trial 1: worker died: SIGKILL; going on from update 5",
        "no further trial",
    ]


def test_a_search_that_is_silent_for_a_minute_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress.Line(Waited(lambda: now)) as line, line.following(Counting()):
        line({"kind": "search", "what": "asked", "trial": 2, "line": "trial 2: lr 0.1"})
        for number in (1, 2, 3):
            now += progress.PULSE / 2
            line({**update(10 * number, now), "trial": 2})
    lines = [text.split(" s  ", 1)[1] for text in capsys.readouterr().err.splitlines()]
    assert lines == ["trial 2: lr 0.1", "1 so far  trial 2: update 20/100  loss 0.5000  240 s left"]


def test_the_live_line_of_a_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with progress.Line() as line, line.following(Counting()):
        line({"kind": "search", "what": "asked", "trial": 2, "line": "trial 2: lr 0.1"})
        line({**update(10, 1.0), "trial": 2})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "trial 2: lr 0.1" in text
    assert "1 so far  trial 2: update 10/100  loss 0.5000" in text


def test_events_of_a_search_that_nobody_follows_are_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, {"kind": "search", "what": "asked", "trial": 1}, {"kind": "stage", "text": "done"}) == ["done"]


def test_workers_that_have_room_are_said_to_start_and_others_to_lack_it(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"kind": "waiting", "workers": 16, "needs": "CPU", "has": 64, "free": 48}
    assert shown(capsys, {**counts, "starting": True}, {**counts, "free": 8, "starting": False}) == [
        "waiting for 16 workers to start; the cluster has 64 CPUs, 48 of them free",
        "waiting for CPU: too few for 16 workers; the cluster has 64 CPUs, 8 of them free",
    ]


def test_trials_that_wait_for_nodes_are_one_line_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"kind": "waiting", "workers": 2, "needs": "CPU", "has": 4, "free": 1}
    asked = {"asked": "the autoscaler is asked for 2 CPUs on worker nodes, for 30 s now"}
    with progress.Line() as line, line.following(Counting()):
        for time, trial in ((0.0, 1), (0.1, 2), (30.0, 1), (30.1, 2)):
            line({**counts, **asked, "time": time, "trial": trial})
    told = [text.split("  ")[-1] for text in capsys.readouterr().err.splitlines()]
    assert [text.partition(": waiting for CPU")[0] for text in told] == ["trial 1", "trial 1"]
    assert all(text.endswith(asked["asked"]) for text in told)
