"""The journal of a search, torn anywhere, and the history that it is replayed into."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tune.history import Finished, History, Journal, Reached, numbered, read_journal, replay

RUNG = {"trial": 0, "rung": 0, "update": 12, "rows": 768, "score": 0.5, "loss": 1.25, "seconds": 2.5}
END = {"trial": 1, "update": 60, "rows": 3840, "score": 0.75, "held": 0.5, "held_rows": 90}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("asked", {"trial": 0, "settings": {}, "by": "recipe", "of": None, "seed": None}),
    ("asked", {"trial": 1, "settings": {"optim.lr": 1e-4, "data.text": 'größe \u2028 "x"'}, "by": "gp"}),
    ("reached", RUNG),
    ("failed", {"trial": 0, "error": "CUDA\nis gone", "seconds": 1.0}),
    ("reached", {**RUNG, "trial": 1, "loss": None}),
    ("finished", END),
    ("asked", {"trial": 2, "settings": {"optim.lr": 1e-4}, "by": "seed", "of": 1, "seed": 7}),
    ("diverged", {"trial": 2, "why": "the loss is infinite", "seconds": 1.0}),
    ("stopped", {"why": "the budget is spent"}),
    ("spent", {"seconds": 2.5, "slot_seconds": 5.0}),
    ("spent", {"seconds": 4.0, "slot_seconds": 8.0}),
    ("chosen", {"best": 1, "verdict": {"text": "better"}}),
]


def written(path: Path, events: list[tuple[str, dict[str, Any]]] = EVENTS) -> bytes:
    journal = Journal(path)
    for kind, fields in events:
        journal.append(kind, **fields)
    return path.read_bytes()


def after(count: int) -> History:
    """The history of the first events."""
    return replay([{"kind": kind, **fields} for kind, fields in EVENTS[:count]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("journal") / "trials.jsonl")


def test_a_journal_tells_what_was_written() -> None:
    found = after(len(EVENTS))
    first, second, third = found.trials
    assert first.reached == (Reached(0, 12, 768, 0.5, 1.25, 2.5),)
    assert (first.error, first.status, first.sound) == ("CUDA\nis gone", "failed", False)
    assert second.finished == Finished(60, 3840, 0.75, 0.5, 90)
    assert (second.status, second.by, second.settings["optim.lr"]) == ("finished", "gp", 1e-4)
    assert (third.status, third.of, third.seed, third.named) == ("diverged", 1, 7, "trial 1 with seed 7")
    assert found.own == (first, second)
    assert (found.stopped, found.chosen, found.verdict) == ("the budget is spent", 1, {"text": "better"})
    assert found.seconds == 6.5
    assert numbered(found.trials, 2) is third


def test_a_journal_that_is_opened_again_has_the_history_of_its_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "trials.jsonl")
    for count, (kind, fields) in enumerate(EVENTS, 1):
        assert journal.append(kind, **fields) == journal.history == after(count)
        assert Journal(journal.path).history == after(count)
    assert all(event["time"] > 0 for event in read_journal(journal.path))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_journal_torn_anywhere_has_the_events_before_the_tear_and_takes_the_next_one(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("torn") / "trials.jsonl"
    path.write_bytes(whole[:size])
    ends = [place for place in range(len(whole)) if whole[place : place + 1] == b"\n"]
    count = sum(end <= size for end in ends)  # an event that lacks just its line's end is whole
    journal = Journal(path)
    assert journal.history == after(count)
    journal.append("spent", seconds=8.0, slot_seconds=8.0)
    again = Journal(path).history
    assert again == journal.history
    assert again.trials == after(count).trials
    assert again.seconds == after(count).seconds + 8.0


def test_a_rung_that_was_run_again_counts_once() -> None:
    asked, again = {"kind": "asked", "trial": 0}, {"kind": "reached", **RUNG}
    found = replay([asked, again, {**again, "score": 0.75}])
    assert [rung.score for rung in found.trials[0].reached] == [0.5]
    both = replay([asked, again, {**again, "rung": 1, "rows": 1536, "score": 0.75}])
    assert [(rung.rung, rung.score) for rung in both.trials[0].reached] == [(0, 0.5), (1, 0.75)]


def test_a_trial_that_failed_and_then_finished_has_finished() -> None:
    found = replay([{"kind": "asked", "trial": 1}, {"kind": "failed", "trial": 1, "error": "x", "seconds": 1.0}])
    assert found.trials[0].status == "failed"
    ended = found.after({"kind": "finished", **END})
    assert (ended.trials[0].status, ended.trials[0].sound) == ("finished", True)


def test_a_trial_has_cost_what_it_took_until_it_failed_or_diverged() -> None:
    events: list[dict[str, Any]] = [
        *({"kind": "asked", "trial": number} for number in range(3)),
        {"kind": "failed", "trial": 0, "error": "CUDA is gone", "seconds": 40.0},
        {"kind": "diverged", "trial": 1, "why": "loss", "seconds": 30.0},
        {"kind": "reached", **RUNG, "trial": 2},
        {"kind": "diverged", "trial": 2, "why": "loss", "seconds": 20.0},
    ]
    assert [trial.seconds for trial in replay(events).trials] == [40.0, 30.0, 20.0]


def test_the_noise_scale_is_known_once_it_was_written_down() -> None:
    asked = {"kind": "asked", "trial": 0}
    assert replay([asked]).noise is None
    told = replay([asked, {"kind": "noise", "rows": 180, "chosen": 64}])
    assert (told.noise, told.rows) == (180, 64)


def test_a_search_that_was_stopped_may_be_reopened() -> None:
    stopped = {"kind": "stopped", "why": "30 minutes are over", "budget": {"minutes": 30.0}}
    found = replay([{"kind": "asked", "trial": 0}, stopped])
    assert (found.stopped, found.budget) == ("30 minutes are over", {"minutes": 30.0})
    again = found.after({"kind": "reopened", "budget": {"minutes": 600.0}})
    assert (again.stopped, again.budget) == (None, None)
    assert replay([{"kind": "stopped", "why": "tune.trials=4"}]).budget is None


TRIALS = 4


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_in_which_order_slots_answer_changes_no_trial_and_a_prefix_is_the_state_of_its_moment(
    data: st.DataObject,
) -> None:
    """Each trial's own events keep their order; those of several trials are interleaved as slots happen to answer."""
    asked = [{"kind": "asked", "trial": number, "settings": {"optim.lr": 0.1 * number}} for number in range(TRIALS)]
    streams: dict[int, list[dict[str, Any]]] = {}
    for number in range(TRIALS):
        rungs = data.draw(st.integers(0, 3))
        own = [{"kind": "reached", **RUNG, "trial": number, "rung": rung} for rung in range(rungs)]
        last: list[dict[str, Any]] = data.draw(
            st.sampled_from(
                [
                    [],
                    [{"kind": "finished", **END, "trial": number}],
                    [{"kind": "failed", "trial": number, "error": "no", "seconds": 3.0}],
                    [{"kind": "diverged", "trial": number, "why": "loss", "seconds": 3.0}],
                ]
            )
        )
        streams[number] = own + last
    turns = [number for number, own in streams.items() for _ in own]
    replayed = []
    for _ in range(2):
        left = {number: iter(own) for number, own in streams.items()}
        answers = [next(left[number]) for number in data.draw(st.permutations(turns))]
        history, known = replay(asked), [*asked]
        for event in answers:
            history, known = history.after(event), [*known, event]
            assert replay(known) == history
        replayed.append(history)
    assert replayed[0] == replayed[1]
