"""The log of a run and the summary that is computed from it alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain.core import events
from rtrain.core.events import EventTail
from rtrain.core.run_folder import Run
from rtrain.report import summary


def write(run: Path, log: list[dict[str, Any]]) -> Path:
    (run / events.FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in log))
    return run


# ------------------------------------------------------------------------------------------------------------- the log


def test_events_are_appended_one_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.12345)
    events.append_event(tmp_path, "created", run="né", rows={"train": 3})
    events.append_event(tmp_path, "started", step=0)
    assert (tmp_path / "events.jsonl").read_bytes().decode() == (
        '{"time": 1700000000.123, "kind": "created", "run": "né", "rows": {"train": 3}}\n'
        '{"time": 1700000000.123, "kind": "started", "step": 0}\n'
    )
    assert [event["kind"] for event in events.read_events(tmp_path)] == ["created", "started"]


@pytest.mark.parametrize("cut", range(1, 34))
def test_a_torn_last_line_is_no_event(tmp_path: Path, cut: int) -> None:
    first, last = b'{"kind": "a"}\n', '{"kind": "b", "text": "größer"}\n'.encode()
    assert len(last) == 34
    (tmp_path / events.FILE_NAME).write_bytes(first + last[:cut])
    kinds = [event["kind"] for event in events.read_events(tmp_path)]
    assert kinds == (["a"] if cut < 33 else ["a", "b"])  # whole but for its newline it is an event


@pytest.mark.parametrize("cut", [1, 20, 28])
def test_a_torn_line_does_not_take_the_next_event_with_it(tmp_path: Path, cut: int) -> None:
    (tmp_path / events.FILE_NAME).write_bytes(b'{"kind": "a"}\n' + '{"kind": "b", "text": "größer"}\n'.encode()[:cut])
    events.append_event(tmp_path, "c")
    events.append_event(tmp_path, "d")
    assert [event["kind"] for event in events.read_events(tmp_path)] == ["a", "c", "d"]


@pytest.mark.parametrize("text", ["one\u2028two", "\x85", "\x0b\x0c\x1c", "two\nlines", "\udce9", "🙂", '"\\'])
def test_any_text_is_read_back(tmp_path: Path, text: str) -> None:
    tail = EventTail(tmp_path)
    events.append_event(tmp_path, "failed", error=text)
    assert [event["error"] for event in events.read_events(tmp_path)] == [text]
    assert [event["error"] for event in tail.read_new()] == [text]


def test_a_tail_gives_each_event_once_and_whole(tmp_path: Path) -> None:
    events.append_event(tmp_path, "before")
    tail = EventTail(tmp_path)
    assert tail.read_new() == []
    events.append_event(tmp_path, "a")
    events.append_event(tmp_path, "b")
    assert [event["kind"] for event in tail.read_new()] == ["a", "b"]
    assert tail.read_new() == []
    with (tmp_path / events.FILE_NAME).open("a") as file:
        file.write('{"kind": ')
    assert tail.read_new() == []
    with (tmp_path / events.FILE_NAME).open("a") as file:
        file.write('"c"}\n{"ki')
    assert [event["kind"] for event in tail.read_new()] == ["c"]


def test_a_tail_may_be_made_before_the_log(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "run")
    assert tail.read_new() == []
    (tmp_path / "run").mkdir()
    events.append_event(tmp_path / "run", "a")
    assert [event["kind"] for event in tail.read_new()] == ["a"]


# --------------------------------------------------------------------------------------------------------- the summary

CREATED = {"time": 100.0, "kind": "created", "run": "r1", "recipe": "intent", "task": "classification"}
CREATED |= {"data_digest": "d1"}


def scores(accuracy: float, rows: int = 10) -> dict[str, float]:
    return {"accuracy": accuracy, "macro_f1": accuracy / 2, "rows": rows}


def started(time: float, update: int, workers: int = 2) -> dict[str, Any]:
    return {"time": time, "kind": "started", "step": update, "workers": workers, "precision": "fp32"}


def evaluated(time: float, split: str, update: int, accuracy: float) -> dict[str, Any]:
    return {"time": time, "kind": "evaluated", "split": split, "step": update, "scores": scores(accuracy)}


def trained(time: float, steps: int, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": "trained", "steps": steps, **fields}


FIRST = trained(
    160.0,
    steps=4,
    best_step=2,
    order_digest="o1",
    rows_seen=64,
    real_tokens=600,
    padded_tokens=660,
    micro_batches_per_step=4.0,
    seconds={"setup": 2.0, "first_batch": 1.5, "train": 30.0, "evaluate": 3.0, "checkpoint": 1.0},
    finished=False,
)
SECOND = trained(
    290.5,
    steps=8,
    best_step=6,
    order_digest="o2",
    rows_seen=60,
    real_tokens=500,
    padded_tokens=540,
    micro_batches_per_step=3.75,
    seconds={"setup": 1.0, "first_batch": 0.5, "train": 20.0, "evaluate": 4.0, "checkpoint": 2.0, "input_wait": 0.25},
    finished=True,
)
LOG = [
    CREATED,
    {"time": 101.0, "kind": "tokenized", "rows": {"train": 80}},
    started(110.0, 0),
    {"time": 120.0, "kind": "progress", "step": 2, "total_steps": 8, "loss": 1.0},
    evaluated(121.0, "valid", 2, 0.5),
    evaluated(150.0, "valid", 4, 0.4),
    FIRST,
    {"time": 161.0, "kind": "paused", "step": 4},
    started(200.0, 4, workers=3),
    {"time": 250.0, "kind": "progress", "step": 6, "total_steps": 8, "loss": 0.5},
    evaluated(251.0, "valid", 6, 0.75),
    evaluated(280.0, "valid", 8, 0.7),
    evaluated(290.0, "test", 6, 0.8),
    SECOND,
    {"time": 291.25, "kind": "finished", "step": 8},
]


def test_the_summary_of_a_run_of_two_starts(tmp_path: Path) -> None:
    assert summary.summarize(Run(write(tmp_path, LOG))) == {
        "run": "r1",
        "task": "classification",
        "recipe": "intent",
        "status": "finished",
        "workers": 3,
        "device": None,
        "precision": "fp32",
        "gradient_sync": {"gradient_error": None, "state_bytes": None},
        "global_batch_size": None,
        "noise_scale": None,
        "steps": 8,
        "skipped_steps": 0,
        "loss_scale": None,
        "micro_batches_per_step": 3.75,
        "rows_seen": 64 + 60,
        "real_tokens": 600 + 500,
        "padded_tokens": 660 + 540,
        "seconds": {
            "total": 191.25,  # from `created` to the last event
            "setup": 3.0,
            "first_batch": 2.0,
            "train": 50.0,
            "evaluate": 7.0,
            "checkpoint": 3.0,
            "input_wait": 0.25,
        },
        "rows_per_second": 2.48,  # 124 / 50
        "real_tokens_per_second": 22.0,  # 1100 / 50
        "metrics": {"valid": scores(0.75), "test": scores(0.8)},
        "best_step": 6,
        "restarts": 1,
        "interruptions": {},
        "data_digest": "d1",
        "order_digest": "o2",
        "overlap": {},
        "slices": {},
        "certificate": None,
        "classes": {},
        "running_text": None,
        "cost": None,
        "stages": None,
    }


def test_the_summary_has_the_exchange_of_the_newest_start() -> None:
    first: list[dict[str, Any]] = [
        {"kind": "optimizer_sharding", "state_bytes": [10, 9]},
        {"kind": "started"},
        {"kind": "gradient_compression", "error": 0.002},
    ]
    assert summary.summarize_gradient_sync(first) == {"gradient_error": 0.002, "state_bytes": [10, 9]}
    second: list[dict[str, Any]] = [{"kind": "crashed"}, {"kind": "started"}]
    assert summary.summarize_gradient_sync(first + second) == {"gradient_error": 0.002, "state_bytes": None}
    assert summary.summarize_gradient_sync(first + second + [{"kind": "started"}])["gradient_error"] is None


def test_the_summary_of_a_killed_start(tmp_path: Path) -> None:
    """It has no `trained` event: what is known of it is its progress."""
    found = summary.summarize(Run(write(tmp_path, LOG[:5])))
    assert (found["status"], found["steps"], found["best_step"]) == ("running", 2, None)
    assert (found["rows_seen"], found["rows_per_second"]) == (0, 0.0)
    assert found["seconds"]["total"] == 21.0


def test_a_start_that_is_killed_after_an_end_stands_where_it_came_to(tmp_path: Path) -> None:
    """An earlier start has its `trained` event: it was paused, or made way for a node that was taken back."""
    later = [
        started(200.0, 4),
        {"time": 250.0, "kind": "progress", "step": 7, "total_steps": 8, "loss": 1.0},
        {"time": 251.0, "kind": "interrupted"},
    ]
    found = summary.summarize(Run(write(tmp_path, [*LOG[:8], *later])))
    assert (found["status"], found["steps"]) == ("interrupted", 7)


def test_what_a_killed_start_trained_on_counts_and_its_unknown_seconds_make_no_rate(tmp_path: Path) -> None:
    seen = {"rows": 48, "real_tokens": 400, "padded_tokens": 440}
    killed = [*LOG[:5], {"time": 122.0, "kind": "progress", "step": 3, "total_steps": 8, "loss": 1.0, **seen}]
    found = summary.summarize(Run(write(tmp_path, [*killed, *LOG[8:]])))
    assert found["rows_seen"] == 48 + 60
    assert (found["real_tokens"], found["padded_tokens"]) == (400 + 500, 440 + 540)
    assert (found["rows_per_second"], found["real_tokens_per_second"]) == (60 / 20.0, 500 / 20.0)


def test_tokens_for_money_are_those_of_the_starts_that_were_cut_short_too(tmp_path: Path) -> None:
    """Their hours are paid for."""
    machines = [{"host": "a", "workers": 2, "cores": 4, "gpus": 0, "gpu": None, "instance": None}]
    begun = {"time": 109.0, "kind": "machines", "machines": machines, "price": 36.0}
    killed = {
        "time": 122.0,
        "kind": "progress",
        "step": 3,
        "total_steps": 8,
        "loss": 1.0,
        "rows": 48,
        "real_tokens": 400,
    }
    log = [*LOG[:2], begun, LOG[2], killed, {**begun, "time": 123.0}, *LOG[8:]]
    found = summary.summarize(Run(write(tmp_path, log)))
    assert found["cost"]["cost"] == pytest.approx(2 * 36 * 191.25 / 3600)
    assert found["cost"]["tokens_per_cost"] == round((400 + 500) / found["cost"]["cost"])


def test_the_time_between_an_end_and_a_resume_is_no_part_of_the_training(tmp_path: Path) -> None:
    day = 86_400.0
    kinds = [
        *((0.0, "created"), (1.0, "tokenized"), (9.0, "interrupted")),
        *(
            (day, "tokens_reused"),
            (day + 1, "started"),
            (day + 5, "crashed"),
            (day + 8, "started"),
            (day + 20, "finished"),
        ),
        *((2 * day, "cleaned"), (3 * day, "tokens_reused"), (3 * day, "labels")),
    ]
    log = [{"time": time, "kind": kind} for time, kind in kinds]
    assert summary.total_command_seconds(log) == 9.0 + 20.0


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ([], "running"),
        (["created", "started"], "running"),
        (["created", "started", "failed"], "failed"),
        (["started", "failed", "started"], "running"),  # the newest start counts
        (["started", "paused", "started", "trained", "finished"], "finished"),
        (["started", "interrupted"], "interrupted"),
        (["started", "stopped", "tokens_reused"], "stopped"),
    ],
)
def test_status_is_how_the_newest_start_ended(kinds: list[str], status: str) -> None:
    assert summary.run_status([{"kind": kind} for kind in kinds]) == status
