"""What a user sees: plain lines off a terminal, one for each thing worth keeping, and nothing that a text can forge."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rtrain.core.run_folder import Run
from rtrain.report import PhaseTimer, progress
from tests.support.tiny import make_artifact, refused


def shown(capsys: pytest.CaptureFixture[str], *events: dict[str, Any]) -> list[str]:
    """The lines that events leave on stderr, without their times."""
    with progress.ProgressLine() as line:
        for event in events:
            line(event)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(re.match(r"^ +\d+\.\d s  ", line) for line in lines)
    return [line.split(" s  ", 1)[1] for line in lines]


def update(number: int, time: float, loss: float = 0.5) -> dict[str, Any]:
    return {"kind": "progress", "time": time, "step": number, "total_steps": 100, "loss": loss}


def test_a_run_that_logs_every_update_prints_a_line_a_second_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *(update(number, 10.0 + number / 8) for number in range(1, 101)))
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == [*range(1, 101, 8), 100]


def test_slices_that_are_too_small_are_named_and_not_those_of_other_splits(capsys: pytest.CaptureFixture[str]) -> None:
    every = {
        "language": {"es": {"accuracy": 0.625, "rows": 8}, "en": {"accuracy": 0.9, "rows": 52}},
        "shop": {"": {"accuracy": 0.5, "rows": 19}, "b": {"accuracy": 0.5, "rows": 41}},
        "one": {"x": {"accuracy": 0.5, "rows": 12}},  # all rows have it
        "length": {"1 to 5": {"accuracy": 0.5, "rows": 15}, "6 to 9": {"accuracy": 0.5, "rows": 15}},
    }
    sliced = {"kind": "sliced", "split": "test", "slices": every}
    many = {str(number): {"f1": 0.5, "rows": 3} for number in range(8)}
    lines = shown(
        capsys,
        sliced,
        {**sliced, "split": "valid"},
        {**sliced, "slices": {"language": {"en": {"f1": 0.5, "rows": 20}, "de": {"f1": 0.4, "rows": 40}}}},
        {**sliced, "slices": {"shop": many}},
    )
    assert len(lines) == 2
    assert "language es (8 rows, 0.625), shop (empty) (19 rows, 0.500)" in lines[0]
    assert "3 more" in lines[1]


def test_time_left_is_by_the_updates_of_this_start(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "step": 0}
    lines = shown(capsys, start, update(10, 100.0), update(30, 110.0), start, update(90, 500.0), update(95, 520.0))
    # 20 updates in 10 s: 70 more take 35 s. After the restart 5 in 20 s: 5 more take 20 s.
    assert [line.split("loss 0.5000")[1] for line in lines if "loss" in line] == [
        "",
        "  35 s left",
        "  1 restart",
        "  20 s left  1 restart",
    ]


def test_speed_is_what_passed_since_the_first_progress_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "step": 0}
    first = {**update(10, 100.0), "rows": 640, "real_tokens": 9_000}
    then = {**update(30, 104.0), "rows": 1_920, "real_tokens": 29_000}
    lines = shown(capsys, start, start, start, first, then)
    # 1,280 rows and 20,000 tokens in 4 s; the time before the first progress is set-up, not speed.
    assert lines[-2:] == [
        "step 10/100  loss 0.5000  2 restarts",
        "step 30/100  loss 0.5000  320 rows/s, 5,000 tokens/s  14 s left  2 restarts",
    ]


def test_the_next_run_of_a_command_is_no_restart(capsys: pytest.CaptureFixture[str]) -> None:
    start = {"kind": "started", "workers": 1, "precision": "fp32", "step": 0}
    rows = {"kind": "tokens_reused", "rows": {"train": 8, "valid": 1, "test": 1}, "quarantined": 0, "store": "/runs"}
    lines = shown(capsys, rows, start, update(10, 100.0), rows, start, update(20, 200.0), start, update(30, 300.0))
    assert [line.split("loss 0.5000")[1] for line in lines if "loss" in line] == ["", "", "  1 restart"]


def test_the_live_line_of_a_terminal_is_one_line_on_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    first, then = ({**update(n, float(n)), "rows": 64 * n, "real_tokens": 999 * n} for n in (1, 3))
    with progress.ProgressLine() as line:
        line({"kind": "started", "workers": 2, "precision": "fp32", "step": 0})
        line(first)
        line(then)
    shown_text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [text.rstrip() for text in re.split(r"[\r\n]", shown_text) if "step 3/100" in text]
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


# ----------------------------------------------------------------------------------------------------------- at the end


@pytest.mark.parametrize("name", ["run", "my run", "it's"])
def test_what_to_do_next_can_be_pasted(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / name)
    run.folder.mkdir()

    def words() -> list[str]:
        start, _, command = progress.next_run_command(run, "distill", "a teacher").partition(" ")
        assert start == "next:"
        return shlex.split(command)

    run.append_event("created", task="classification")
    assert words() == ["rtrain", "distill", "a teacher", "--resume", "--out", str(run)]
    make_artifact(run.artifact)
    assert words() == ["rtrain", "serve", f"{run}/artifact"]
    refused(run.artifact)
    assert words() == ["rtrain", "inspect", f"{run}/artifact"]


def test_an_artefact_is_used_by_the_name_that_was_given_and_looked_at_where_it_cannot_be_read(tmp_path: Path) -> None:
    created = make_artifact(tmp_path / "run" / "artifact")
    assert progress.next_artifact_command(created, "s3://models/run") == "next: rtrain serve s3://models/run"
    (created / "artifact.json").write_text("{")
    assert progress.next_artifact_command(created) == f"next: rtrain inspect {created}"


# --------------------------------------------------------------------------------------------------------- the waiting


class Counting:
    """A search that says which of its events it was told, and how many so far."""

    def __init__(self) -> None:
        self.events = 0

    def format_event(self, event: dict[str, Any]) -> str:
        self.events += 1
        return str(event.get("line", ""))

    @property
    def progress_line(self) -> str:
        return f"{self.events} so far"


def test_a_search_says_its_own_events_and_of_its_trials_what_goes_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"kind": "evaluated", "split": "valid", "step": 50, "scores": {"accuracy": 0.5, "rows": 7}}
    fault = {
        "kind": "crashed",
        "trial": 1,
        "cause": "worker died",
        "error": "SIGKILL",
        "hang_tracebacks": [],
        "resumes_from": 5,
    }
    events: list[dict[str, Any]] = [
        {"kind": "search", "what": "created", "trial": 1, "line": "trial 1: lr 0.1"},
        {"kind": "started", "workers": 1, "precision": "fp32", "step": 0, "trial": 1},
        {**update(10, 1.0), "trial": 1},
        {**scores, "trial": 1},
        {"kind": "device", "reason": "no GPU", "trial": 1},
        {"kind": "device", "reason": "no GPU", "trial": 0},
        fault,
        {"kind": "search", "what": "usage", "seconds": 3.0},  # it has no line
        {"kind": "search", "what": "stopped", "line": "no further trial"},
    ]
    with progress.ProgressLine() as line, line.follow_search(Counting()):
        for event in events:
            line(event)
    lines = [text.split(" s  ", 1)[1] for text in capsys.readouterr().err.splitlines()]
    assert lines == [
        "trial 1: lr 0.1",
        "trial 0: no GPU",
        "trial 1: worker died: SIGKILL; going on from step 5",
        "no further trial",
    ]


def test_a_search_that_is_silent_for_a_minute_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with progress.ProgressLine(PhaseTimer(lambda: now)) as line, line.follow_search(Counting()):
        line({"kind": "search", "what": "created", "trial": 2, "line": "trial 2: lr 0.1"})
        for number in (1, 2, 3):
            now += progress.STATUS_INTERVAL_S / 2
            line({**update(10 * number, now), "trial": 2})
    lines = [text.split(" s  ", 1)[1] for text in capsys.readouterr().err.splitlines()]
    assert lines == ["trial 2: lr 0.1", "1 so far  trial 2: step 20/100  loss 0.5000  240 s left"]


def test_the_live_line_of_a_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with progress.ProgressLine() as line, line.follow_search(Counting()):
        line({"kind": "search", "what": "created", "trial": 2, "line": "trial 2: lr 0.1"})
        line({**update(10, 1.0), "trial": 2})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "trial 2: lr 0.1" in text
    assert "1 so far  trial 2: step 10/100  loss 0.5000" in text


def test_trials_that_wait_for_nodes_are_one_line_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"kind": "waiting", "workers": 2, "needs": "CPU", "total_workers": 4, "free_workers": 1}
    inputs = {"autoscaler_request": "the autoscaler is asked for 2 CPUs on worker nodes, for 30 s now"}
    with progress.ProgressLine() as line, line.follow_search(Counting()):
        for time, trial in ((0.0, 1), (0.1, 2), (30.0, 1), (30.1, 2)):
            line({**counts, **inputs, "time": time, "trial": trial})
    loaded = [text.split("  ")[-1] for text in capsys.readouterr().err.splitlines()]
    assert [text.partition(": waiting for CPU")[0] for text in loaded] == ["trial 1", "trial 1"]
    assert all(text.endswith(inputs["autoscaler_request"]) for text in loaded)


def test_every_kind_of_event_that_is_told_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"accuracy": 0.5, "rows": 7}
    started = {"kind": "started", "workers": 2, "precision": "bf16", "step": 40, "lr": 2e-4, "global_batch_size": 64}
    rows = {"rows": {"train": 8000, "valid": 1000, "test": 900}, "quarantined": 1, "store": "/runs/.tokens/abc"}
    evaluated = {"kind": "evaluated", "split": "valid", "step": 50, "scores": scores}
    best = {
        "kind": "best",
        "step": 8,
        "num_evaluations": 6,
        "headline": "neg_rmse",
        "score": -0.5,
        "loss": 0.25,
        "reason": "score",
    }
    events: list[tuple[dict[str, Any], str | None]] = [
        ({"kind": "created", "time": 1.0}, None),
        (started, "from step 40"),
        ({**rows, "kind": "tokens_reused"}, "/runs/.tokens/abc/quarantine.parquet"),
        (evaluated, "accuracy 0.5000"),
        ({**evaluated, "calibration": {"threshold": 0.3}}, "threshold 0.3000"),
        (best, "0.5000"),
        ({"kind": "gradient_compression", "error": 0.00171}, "1.7e-03"),
        ({"kind": "stage", "text": "done"}, "done"),
    ]
    lines = shown(capsys, *(event for event, _ in events))
    words = [word for _, word in events if word is not None]
    assert len(lines) == len(words)
    assert all(word in line for line, word in zip(lines, words, strict=True))
