"""What a terminal shows of a search: its table, a line for each event, and how far it is."""

from typing import Any

import pytest

from rtrain.config import Tune
from rtrain.report.live.progress import Line
from tests.histories import Event, asked, events, finished, history, reached
from tune.known.history import History, replay
from tune.results import table

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
    assert table.text(replay(SMALL), "accuracy", TUNE).splitlines() == [
        "trial  sets                     by      rung 1  rung 2    held  seeds  status",
        "    0  the recipe as it stands  recipe  0.8000  0.8400  0.9000      1  finished",
        "    1  lr 0.0003, k 2           spread  0.8500  0.8800  0.9100      2  finished  <- best",
        "    2  lr 0.001                 gp           -       -       -      -  failed",
        "rung: accuracy on the steering rows; held: on the held-back rows, the mean over seeds; lr: optim.lr; k: "
        "train.aggregation_frequency",
        "1 of 4 trials failed or diverged:",
        "trial 2: ValueError: no more",
    ]


def test_the_table_of_a_search_that_was_interrupted() -> None:
    lines = table.text(replay(SMALL[:4]), "accuracy", TUNE).splitlines()
    assert lines[:4] == [
        "trial  sets                     by      rung 1  held  seeds  status",
        "    0  the recipe as it stands  recipe  0.8000     -      -  frozen",
        "    1  lr 0.0003, k 2           spread       -     -      -  asked",
        "    2  lr 0.001                 gp           -     -      -  asked",
    ]
    assert "frozen: stopped at a rung, and can go on from there" in lines[4]
    assert table.text(History(), "accuracy", TUNE) == "no trial has begun"


def test_an_error_is_shown_as_it_is() -> None:
    text = table.text(replay([asked(0, by="recipe"), reached(0, 0, -1.5)]), "neg_rmse", TUNE)
    assert "1.5000" in text
    assert "-1.5" not in text
    assert "rung: RMSE on the steering rows" in text


def test_of_many_trials_the_best_and_trial_0_are_in_the_table() -> None:
    whole = history(200)
    lines = table.text(whole, "accuracy", TUNE, most=8).splitlines()
    numbers = [int(line.split()[0]) for line in lines[1:9]]
    assert numbers == sorted(numbers)
    assert {0, whole.chosen} <= set(numbers)
    assert lines[9] == "and 192 more trials; the page of the search has them all"
    assert all(line.index("frozen") == lines[2].index("frozen") for line in lines[1:9] if "frozen" in line)


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
    assert told == "trial 2: RMSE 1.5000 at rung 1 (1,280 rows, 13 s), place 2 of 3 so far"


def test_a_trial_with_another_seed_has_no_place_among_the_others() -> None:
    known = [asked(0, by="recipe"), asked(1), reached(0, 0, 0.5), reached(1, 0, 0.6)]
    again = [*known, asked(2, {}, "seed", of=1, seed=1), reached(2, 0, 0.7)]
    told = table.said({**again[-1], "what": "reached"}, replay(again), "accuracy", TUNE)
    assert told == "trial 2: accuracy 0.7000 at rung 1 (1,280 rows, 13 s), with another seed than trial 1"
    further = [*again, asked(3), reached(3, 0, 0.65)]
    told = table.said({**further[-1], "what": "reached"}, replay(further), "accuracy", TUNE)
    assert told.endswith("place 1 of 3 so far")
    assert table.standing(replay(again), "accuracy", TUNE).startswith("first rung: 2")


def test_how_far_a_search_is() -> None:
    follower, found = table.Follower("accuracy", TUNE), dict[str, None]()
    for event in events(20):
        follower.said({**event, "kind": "search", "what": event["kind"]})
        found[follower.standing.split("  ")[0]] = None
    phases = list(found)
    assert phases[:3] == ["first rung: 0 of 20", "first rung: 1 of 20", "first rung: 2 of 20"]
    assert phases[19:] == [
        *(f"first rung: {number} of 20" for number in (19, 20)),
        "first rung: all 20 there",
        *(f"rung 2: {number} there" for number in range(1, 10)),
        *(f"rung 3: {number} there" for number in range(1, 5)),
        *(f"the end: {number} trained to their ends" for number in (1, 2, 3)),
        *(f"the end: seed 1 of trial {number}" for number in (0, 8, 6)),
        "ended",
    ]


def test_the_best_so_far_is_that_of_the_deepest_rung_and_rows_are_a_share_of_the_budget() -> None:
    first = [asked(0, by="recipe"), asked(1), reached(0, 0, 0.8), reached(1, 0, 0.9)]
    # A full run is 1,280 / 0.2 = 6,400 rows, the budget 8 of them: two first rungs are 2,560 of 51,200 rows.
    assert table.standing(replay(first), "accuracy", Tune()) == (
        "first rung: 2  best accuracy 0.9000 (rung 1, trial 1)  5 % of the rows"
    )
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
    assert err.endswith("trial 1: accuracy 0.7000 at rung 1 (1,280 rows, 13 s), place 2 of 2 so far\n")
