"""Terminal output of a search: its table, event lines, and progress."""

from typing import Any

import pytest

from rtrain.config import TuneConfig
from rtrain.report.progress import ProgressLine
from tests.support.histories import Event, created, finished, history, rung_result
from tune.history import History, replay_journal
from tune.report import table

TUNE = TuneConfig(trials=20)
SMALL = [
    created(0, by="recipe"),
    created(1, {"optim.lr": 3e-4, "train.aggregation_frequency": 2, "train.global_batch_size": None}, "spread"),
    created(2, {"optim.lr": 1e-3, "optim.lr_scaling": "sqrt"}),
    rung_result(0, 0, 0.8),
    rung_result(1, 0, 0.85),
    {"kind": "failed", "trial": 2, "error": "ValueError: no\nmore", "seconds": 1.0},
    rung_result(0, 1, 0.84),
    rung_result(1, 1, 0.88),
    finished(0, 0.9),
    finished(1, 0.92),
    created(3, {}, "seed", repeat_of=1, seed=7),
    finished(3, 0.9),
    {"kind": "winner", "winner": 1, "verdict": {"kind": "unopposed", "winner": 1}},
]


def test_the_table() -> None:
    state = replay_journal(SMALL)
    assert table.table_cells(state, state.original_trials, "accuracy", TUNE)[1:] == [
        ("0", "the recipe's own settings", "recipe", "0.8000", "0.8400", "0.9000", "1", "finished", ""),
        ("1", "lr 0.0003, k 2", "spread", "0.8500", "0.8800", "0.9100", "2", "finished", "<- best"),
        ("2", "lr 0.001", "gp", "-", "-", "-", "-", "failed", ""),
    ]
    assert "ValueError: no more" in table.format_table(state, "accuracy", TUNE)
    assert table.format_table(History(), "accuracy", TUNE)
    error = replay_journal([created(0, by="recipe"), rung_result(0, 0, -1.5)])
    # Of the negative of an error, the error is shown.
    assert table.table_cells(error, error.original_trials, "neg_rmse", TUNE)[1][3] == "1.5000"


def test_of_many_trials_the_best_and_trial_0_are_in_the_table() -> None:
    full = history(200)
    lines = table.format_table(full, "accuracy", TUNE, max_trials=8).splitlines()
    numbers = [int(line.split()[0]) for line in lines[1:9]]
    assert numbers == sorted(numbers)
    assert {0, full.winner} <= set(numbers)
    assert "192 more" in lines[9]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (created(1, {"optim.lr": 3e-4}), ["trial 1", "lr 0.0003"]),
        (created(9, {}, "seed", repeat_of=4, seed=8), ["trial 9", "trial 4", "seed 8"]),
        (rung_result(0, 0, 0.91234), ["trial 0", "accuracy 0.9123", "rung 1", "1,280 rows"]),
        ({"kind": "failed", "trial": 1, "error": "ValueError: no\nmore", "seconds": 1.0}, ["trial 1", "no more"]),
        ({"kind": "diverged", "trial": 1, "reason": "its loss is nan", "seconds": 1.0}, ["trial 1", "its loss is nan"]),
        (finished(0, 0.93), ["trial 0", "6,400 rows", "accuracy 0.9300", "250"]),
        ({"kind": "stopped", "reason": "20 trials"}, ["20 trials"]),
        ({"kind": "winner", "winner": 3, "verdict": {"kind": "unopposed", "winner": 3}}, ["winner", "trial 3"]),
    ],
)
def test_the_line_of_an_event(event: Event, words: list[str]) -> None:
    before = [] if event["kind"] == "created" else [created(0, by="recipe")]
    messages = {**event, "kind": "search", "what": event["kind"]}
    line = table.format_event(messages, replay_journal([*before, event]), "accuracy", TUNE)
    assert all(word in line for word in words)
    assert "\n" not in line


def test_a_trial_has_its_place_among_those_that_came_as_far() -> None:
    state = [*map(created, range(3)), *(rung_result(number, 0, -score) for number, score in enumerate((2, 1, 1.5)))]
    messages = table.format_event({**state[-1], "what": "rung_result"}, replay_journal(state), "neg_rmse", TUNE)
    assert "RMSE 1.5000" in messages
    assert "place 2 of 3" in messages


@pytest.mark.parametrize(
    ("further", "settings", "words"),
    [
        # A full run is 1,280 / 0.2 = 6,400 rows, the budget 8 of them: two first rungs are 2,560 of 51,200 rows.
        ([], {}, ["first rung: 2", "best accuracy 0.9000", "trial 1", "5 % of the rows"]),
        ([], {"budget_rows": 5120}, ["50 % of the rows"]),
        ([rung_result(0, 1, 0.85)], {}, ["best accuracy 0.8500 (rung 2, trial 0)"]),
        ([finished(0, 0.7)], {"budget_rows": 1280}, ["best accuracy 0.7000 (holdout, trial 0)"]),
    ],
)
def test_the_best_so_far_is_that_of_the_deepest_rung_and_rows_are_a_share_of_the_budget(
    further: list[Event], settings: dict[str, Any], words: list[str]
) -> None:
    state = [created(0, by="recipe"), created(1), rung_result(0, 0, 0.8), rung_result(1, 0, 0.9), *further]
    line = table.progress_line(replay_journal(state), "accuracy", TuneConfig(**settings))
    assert all(word in line for word in words)


def test_a_resumed_search_goes_on_from_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    state = replay_journal([created(0, by="recipe"), created(1), rung_result(0, 0, 0.8)])
    event: dict[str, Any] = {**rung_result(1, 0, 0.7), "kind": "search", "what": "rung_result"}
    with ProgressLine() as line, line.follow_search(table.SearchFollower("accuracy", TUNE, state)):
        line(event)
    err = capsys.readouterr().err
    assert "place 2 of 2" in err
