"""What a terminal shows of a search: its table, a line for each event, and how far it is."""

from typing import Any

import pytest

from rtrain.config import Tune
from rtrain.report.live.progress import Line
from tests.histories import Event, asked, finished, history, reached
from tune.history import History, replay
from tune.report import table

TUNE = Tune(trials=20)
SMALL = [
    asked(0, by="recipe"),
    asked(1, {"optim.lr": 3e-4, "train.aggregation_frequency": 2, "train.rows_per_update": None}, "spread"),
    asked(2, {"optim.lr": 1e-3, "optim.lr_scaling": "sqrt"}),
    reached(0, 0, 0.8),
    reached(1, 0, 0.85),
    {"kind": "failed", "trial": 2, "error": "ValueError: no\nmore", "seconds": 1.0},
    reached(0, 1, 0.84),
    reached(1, 1, 0.88),
    finished(0, 0.9),
    finished(1, 0.92),
    asked(3, {}, "seed", of=1, seed=7),
    finished(3, 0.9),
    {"kind": "chosen", "best": 1, "verdict": {"kind": "alone", "best": 1}},
]


def test_the_table() -> None:
    known = replay(SMALL)
    assert table.cells(known, known.own, "accuracy", TUNE)[1:] == [
        ("0", "the recipe as it stands", "recipe", "0.8000", "0.8400", "0.9000", "1", "finished", ""),
        ("1", "lr 0.0003, k 2", "spread", "0.8500", "0.8800", "0.9100", "2", "finished", "<- best"),
        ("2", "lr 0.001", "gp", "-", "-", "-", "-", "failed", ""),
    ]
    assert "ValueError: no more" in table.text(known, "accuracy", TUNE)
    assert table.text(History(), "accuracy", TUNE)
    error = replay([asked(0, by="recipe"), reached(0, 0, -1.5)])
    assert table.cells(error, error.own, "neg_rmse", TUNE)[1][3] == "1.5000"  # of the negative of an error, the error


def test_of_many_trials_the_best_and_trial_0_are_in_the_table() -> None:
    whole = history(200)
    lines = table.text(whole, "accuracy", TUNE, most=8).splitlines()
    numbers = [int(line.split()[0]) for line in lines[1:9]]
    assert numbers == sorted(numbers)
    assert {0, whole.chosen} <= set(numbers)
    assert "192 more" in lines[9]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (asked(1, {"optim.lr": 3e-4}), ["trial 1", "lr 0.0003"]),
        (asked(9, {}, "seed", of=4, seed=8), ["trial 9", "trial 4", "seed 8"]),
        (reached(0, 0, 0.91234), ["trial 0", "accuracy 0.9123", "rung 1", "1,280 rows"]),
        ({"kind": "failed", "trial": 1, "error": "ValueError: no\nmore", "seconds": 1.0}, ["trial 1", "no more"]),
        ({"kind": "diverged", "trial": 1, "why": "its loss is nan", "seconds": 1.0}, ["trial 1", "its loss is nan"]),
        (finished(0, 0.93), ["trial 0", "6,400 rows", "accuracy 0.9300", "250"]),
        ({"kind": "stopped", "why": "20 trials"}, ["20 trials"]),
        ({"kind": "chosen", "best": 3, "verdict": {"kind": "alone", "best": 3}}, ["chosen", "trial 3"]),
    ],
)
def test_the_line_of_an_event(event: Event, words: list[str]) -> None:
    before = [] if event["kind"] == "asked" else [asked(0, by="recipe")]
    told = {**event, "kind": "search", "what": event["kind"]}
    line = table.said(told, replay([*before, event]), "accuracy", TUNE)
    assert all(word in line for word in words)
    assert "\n" not in line


def test_a_trial_has_its_place_among_those_that_came_as_far() -> None:
    known = [asked(0, by="recipe"), asked(1), asked(2), reached(0, 0, -2.0), reached(1, 0, -1.0), reached(2, 0, -1.5)]
    told = table.said({**known[-1], "what": "reached"}, replay(known), "neg_rmse", TUNE)
    assert "RMSE 1.5000" in told
    assert "place 2 of 3" in told


def test_the_best_so_far_is_that_of_the_deepest_rung_and_rows_are_a_share_of_the_budget() -> None:
    first = [asked(0, by="recipe"), asked(1), reached(0, 0, 0.8), reached(1, 0, 0.9)]
    # A full run is 1,280 / 0.2 = 6,400 rows, the budget 8 of them: two first rungs are 2,560 of 51,200 rows.
    standing = table.standing(replay(first), "accuracy", Tune())
    assert all(words in standing for words in ("first rung: 2", "best accuracy 0.9000", "trial 1", "5 % of the rows"))
    further = replay([*first, reached(0, 1, 0.85)])
    assert "best accuracy 0.8500 (rung 2, trial 0)" in table.standing(further, "accuracy", Tune())
    ended = replay([*first, finished(0, 0.7)])
    assert "best accuracy 0.7000 (held back, trial 0)" in table.standing(ended, "accuracy", Tune(rows=1280))
    assert table.standing(replay(first), "accuracy", Tune(rows=5120)).endswith("50 % of the rows")


def test_a_resumed_search_goes_on_from_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    known = replay([asked(0, by="recipe"), asked(1), reached(0, 0, 0.8)])
    event: dict[str, Any] = {**reached(1, 0, 0.7), "kind": "search", "what": "reached"}
    with Line() as line, line.following(table.Follower("accuracy", TUNE, known)):
        line(event)
    err = capsys.readouterr().err
    assert "place 2 of 2" in err
