"""The journal of a search, torn anywhere, and the history that it is replayed into."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tune.history import FinalResult, History, Journal, RungResult, find_trial, replay_journal, trials_table

RUNG = {"trial": 0, "rung": 0, "step": 12, "rows": 768, "score": 0.5, "loss": 1.25, "seconds": 2.5}
END = {"trial": 1, "step": 60, "rows": 3840, "score": 0.75, "holdout_score": 0.5, "holdout_rows": 90}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("created", {"trial": 0, "settings": {}, "proposed_by": "recipe", "repeat_of": None, "seed": None}),
    ("created", {"trial": 1, "settings": {"optim.lr": 1e-4, "data.text": 'größe \u2028 "x"'}, "proposed_by": "gp"}),
    ("rung_result", RUNG),
    ("failed", {"trial": 0, "error": "CUDA\nis gone", "seconds": 1.0}),
    ("rung_result", {**RUNG, "trial": 1, "loss": None}),
    ("finished", END),
    ("created", {"trial": 2, "settings": {"optim.lr": 1e-4}, "proposed_by": "seed", "repeat_of": 1, "seed": 7}),
    ("diverged", {"trial": 2, "reason": "the loss is infinite", "seconds": 1.0}),
    ("stopped", {"reason": "the budget is spent"}),
    ("usage", {"seconds": 2.5, "slot_seconds": 5.0}),
    ("usage", {"seconds": 4.0, "slot_seconds": 8.0}),
    ("winner", {"winner": 1, "verdict": {"text": "better"}}),
]


def written(path: Path, events: list[tuple[str, dict[str, Any]]] = EVENTS) -> bytes:
    journal = Journal(path)
    for kind, fields in events:
        journal.append(kind, **fields)
    return path.read_bytes()


def after(count: int) -> History:
    """The history of the first events."""
    return replay_journal([{"kind": kind, **fields} for kind, fields in EVENTS[:count]])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("journal") / "trials.jsonl")


def test_a_journal_tells_what_was_written() -> None:
    result = after(len(EVENTS))
    first, second, third = result.trials
    assert first.rung_results == (RungResult(0, 12, 768, 0.5, 1.25, 2.5),)
    assert (first.error, first.status, first.is_valid) == ("CUDA\nis gone", "failed", False)
    assert second.final_result == FinalResult(60, 3840, 0.75, 0.5, 90)
    assert (second.status, second.proposed_by, second.settings["optim.lr"]) == ("finished", "gp", 1e-4)
    assert (third.status, third.repeat_of, third.seed, third.label) == ("diverged", 1, 7, "trial 1 with seed 7")
    assert result.original_trials == (first, second)
    assert (result.stop_reason, result.winner, result.verdict) == ("the budget is spent", 1, {"text": "better"})
    assert result.seconds == 6.5
    assert find_trial(result.trials, 2) is third


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_journal_torn_anywhere_has_the_events_before_the_tear_and_takes_the_next_one(
    full: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, len(full)))
    path = tmp_path_factory.mktemp("torn") / "trials.jsonl"
    path.write_bytes(full[:size])
    ends = [place for place in range(len(full)) if full[place : place + 1] == b"\n"]
    count = sum(end <= size for end in ends)  # an event that lacks just its line's end is whole
    journal = Journal(path)
    assert journal.history == after(count)
    journal.append("usage", seconds=8.0, slot_seconds=8.0)
    repeat = Journal(path).history
    assert repeat == journal.history
    assert repeat.trials == after(count).trials
    assert repeat.seconds == after(count).seconds + 8.0


def test_a_rung_that_was_run_again_counts_once() -> None:
    overrides, repeat = {"kind": "created", "trial": 0}, {"kind": "rung_result", **RUNG}
    result = replay_journal([overrides, repeat, {**repeat, "score": 0.75}])
    assert [rung.score for rung in result.trials[0].rung_results] == [0.5]
    pair = replay_journal([overrides, repeat, {**repeat, "rung": 1, "rows": 1536, "score": 0.75}])
    assert [(rung.rung, rung.score) for rung in pair.trials[0].rung_results] == [(0, 0.5), (1, 0.75)]


def test_a_trial_that_failed_and_then_finished_has_finished() -> None:
    failed = {"kind": "failed", "trial": 1, "error": "x", "seconds": 1.0}
    result = replay_journal([{"kind": "created", "trial": 1}, failed, {"kind": "finished", **END}])
    assert (result.trials[0].status, result.trials[0].is_valid) == ("finished", True)


def test_a_trial_has_cost_what_it_took_until_it_failed_or_diverged() -> None:
    events: list[dict[str, Any]] = [
        *({"kind": "created", "trial": number} for number in range(3)),
        {"kind": "failed", "trial": 0, "error": "CUDA is gone", "seconds": 40.0},
        {"kind": "diverged", "trial": 1, "reason": "loss", "seconds": 30.0},
        {"kind": "rung_result", **RUNG, "trial": 2},
        {"kind": "diverged", "trial": 2, "reason": "loss", "seconds": 20.0},
    ]
    assert [trial.seconds for trial in replay_journal(events).trials] == [40.0, 30.0, 20.0]


def test_a_search_that_was_stopped_may_be_reopened() -> None:
    stopped = {"kind": "stopped", "reason": "30 minutes are over", "budget": {"max_minutes": 30.0}}
    result = replay_journal([{"kind": "created", "trial": 0}, stopped])
    assert (result.stop_reason, result.stop_budget) == ("30 minutes are over", {"max_minutes": 30.0})
    repeat = result.with_event({"kind": "reopened", "budget": {"max_minutes": 600.0}})
    assert (repeat.stop_reason, repeat.stop_budget) == (None, None)
    assert replay_journal([{"kind": "stopped", "reason": "tune.trials=4"}]).stop_budget is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_in_which_order_slots_answer_changes_no_trial_and_a_prefix_is_the_state_of_its_moment(
    data: st.DataObject,
) -> None:
    """Each trial's own events keep their order; those of several trials are interleaved as slots happen to answer."""
    overrides = [{"kind": "created", "trial": number, "settings": {"optim.lr": 0.1 * number}} for number in range(4)]
    ends: list[dict[str, Any]] = [
        {"kind": "finished", **END},
        {"kind": "failed", "error": "no", "seconds": 3.0},
        {"kind": "diverged", "reason": "loss", "seconds": 3.0},
    ]
    streams: dict[int, list[dict[str, Any]]] = {}
    for number in range(4):
        rungs = [{"kind": "rung_result", **RUNG, "rung": rung} for rung in range(data.draw(st.integers(0, 3)))]
        last = data.draw(st.lists(st.sampled_from(ends), max_size=1))
        streams[number] = [{**event, "trial": number} for event in [*rungs, *last]]
    turns = [number for number, stream in streams.items() for _ in stream]
    replayed = []
    for _ in range(2):
        left = {number: iter(stream) for number, stream in streams.items()}
        history, state = replay_journal(overrides), [*overrides]
        for number in data.draw(st.permutations(turns)):
            state.append(next(left[number]))
            history = history.with_event(state[-1])
            assert replay_journal(state) == history
        replayed.append(history)
    assert replayed[0] == replayed[1]


def test_the_table_of_trials_has_the_columns_of_ray_tune_and_fills_in_the_recipe_s_values() -> None:
    table = trials_table(after(len(EVENTS)), {"optim.lr": 2e-4})
    assert {len(column) for column in table.values()} == {3}
    assert table["trial_id"] == ["trial-000", "trial-001", "trial-002"]
    assert table["config/optim.lr"] == [2e-4, 1e-4, 1e-4]
    assert table["config/data.text"] == [None, EVENTS[1][1]["settings"]["data.text"], None]
    assert (table["score"], table["rows"]) == ([0.5, 0.75, None], [768, 3840, 0])
    assert table["holdout_score"] == [None, 0.5, None]
    assert table["training_iteration"] == [1, 2, 0]
    assert table["status"] == ["failed", "finished", "diverged"]
    assert table["winner"] == [False, True, False]


def test_the_table_of_a_search_without_trials_has_its_columns() -> None:
    table = trials_table(History())
    assert "score" in table
    assert not any(table.values())
