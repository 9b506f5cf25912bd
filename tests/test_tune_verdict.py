"""What a search has come to: its verdict in a sentence, in its report, and of one that has not ended."""

from dataclasses import replace
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from rtrain.errors import UserError
from tests.reports import Page
from tests.searches import make_search
from tune.ending.finals import SECONDS, Verdict
from tune.known.history import History, replay
from tune.results import page, verdict

OWN = "the recipe's own settings"
CLOSE = Verdict(
    "unclear", 3, 3, "accuracy", 0.8, 0.83, 0.03, -0.01, 0.07, rows=500, seeds=2, needed_rows=2400, needed_seeds=7
)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            CLOSE,
            f"trial 3 is taken; that its settings are better than {OWN}, whatever the seed, is not shown, on 500 "
            "held-back validation rows, with 2 seeds: accuracy 0.830 against 0.800, +3.0 points (-1.0 to 7.0); that "
            "would take about 2,400 such rows or 7 seeds",
        ),
        (
            replace(CLOSE, kind="better", low=0.01, seeds=1, steered=True),
            f"trial 3 is better than {OWN}: accuracy 0.830 against 0.800, +3.0 points (1.0 to 7.0), on 500 validation "
            "rows, which have steered the search too, with 1 seed",
        ),
        (
            replace(CLOSE, kind="default", best=0, first=0.85, difference=-0.02, parts=9),
            f"the default is at the top (trial 0, {OWN}): accuracy 0.850 against 0.830 of trial 3, the next best, on "
            "500 held-back validation rows, with 2 seeds, each judged on rows of its own",
        ),
        (
            replace(CLOSE, kind="default", best=0, against=1, first=0.82, other=0.828, faster=True, cost="bytes"),
            f"the default stands (trial 0, {OWN}), the smallest of those that are as good: accuracy 0.820 against "
            "0.828 of trial 1, the best, on 500 held-back validation rows, with 2 seeds",
        ),
        (Verdict("default", 0), f"no other trial came to a score: the default stands (trial 0, {OWN})"),
        (Verdict("alone", 1), f"trial 1 has won; {OWN} (trial 0) came to no score to compare with"),
        (
            replace(CLOSE, kind="better", name="neg_rmse", first=-1.5, other=-1.25, difference=0.25, low=0.1, high=0.4),
            f"trial 3 is better than {OWN}: RMSE 1.25 against 1.50, -0.250 (-0.400 to -0.100), on 500 held-back "
            "validation rows, with 2 seeds",
        ),
        (
            replace(CLOSE, kind="better", faster=True, cost="bytes"),
            f"trial 3, the smallest of those that are as good, is better than {OWN}: accuracy 0.830 against 0.800, "
            "+3.0 points (-1.0 to 7.0), on 500 held-back validation rows, with 2 seeds",
        ),
        (
            replace(CLOSE, kind="better", faster=True),
            f"trial 3, the fastest of those that are as good, is better than {OWN}: accuracy 0.830 against 0.800, +3.0 "
            "points (-1.0 to 7.0), on 500 held-back validation rows, with 2 seeds",
        ),
    ],
)
def test_the_sentence_of_a_search_that_has_ended(found: Verdict, sentence: str) -> None:
    assert verdict.ended(found) == sentence


def test_seconds_to_a_target_are_told_as_such() -> None:
    found = replace(CLOSE, kind="better", name=SECONDS, first=-80.0, other=-60.0, difference=20.0, low=15.0, high=25.0)
    told = verdict.ended(found, 0.9)
    assert told.startswith(f"trial 3 is better than {OWN}: seconds to 0.9 60.0 against 80.0")
    assert told.endswith(", with 2 seeds")
    assert "rows" not in told
    alone = verdict.ended(replace(found, first=None), 0.9)
    assert alone.startswith(f"trial 3 is better than {OWN}: the target 0.9 was reached by trial 3 alone")
    never = verdict.ended(replace(found, kind="default", best=0, first=None, other=None), 0.9)
    assert never == f"the default is at the top (trial 0, {OWN}): the target 0.9 was reached by neither, with 2 seeds"


def test_who_reaches_the_target_with_some_seeds_alone_is_told_so() -> None:
    found = replace(CLOSE, name=SECONDS, first=None, other=-60.0, low=None, needed_rows=None, needed_seeds=None)
    found = replace(found, first_reached=0, other_reached=1)
    assert verdict.ended(found, 0.9) == (
        f"trial 3 is taken; that its settings are better than {OWN}, whatever the seed, is not shown, with 2 seeds: "
        "the target 0.9 was reached by trial 3 with 1 of 2 seeds and by trial 0 with 0 of 2 seeds"
    )


def test_the_verdict_rests_on_the_rows_that_were_held_back(tmp_path: Path) -> None:
    """On the rows that steered, trial 1 was ahead; where both were trained to their ends, it is not."""
    found = make_search(tmp_path, [0.8, 0.95, 0.5], rows=600, ends={0: 0.9, 1: 0.7, 2: 0.5})
    told = verdict.of(found)
    assert told.startswith(f"the default is at the top (trial 0, {OWN}): accuracy 0.8")
    assert "of trial 1, the next best" in told
    winner = found.winner
    assert winner is not None
    assert winner.folder == found.trial(0).folder


def test_a_large_lead_with_two_seeds_is_better_and_a_lead_with_one_seed_cannot_be_told(tmp_path: Path) -> None:
    seeds = [(0, 1, 0.6), (1, 1, 0.9), (2, 1, 0.6)]
    large = make_search(tmp_path / "large", [0.6, 0.9, 0.6], rows=1000, repeats=seeds)
    assert verdict.of(large).startswith(f"trial 1 is better than {OWN}: accuracy 0.8")
    alone = make_search(tmp_path / "alone", [0.6, 0.9, 0.6], rows=1000)
    assert verdict.of(alone).startswith(f"trial 1 is taken; that its settings are better than {OWN}, ")


def test_a_search_that_has_not_ended_and_one_whose_trials_all_failed(tmp_path: Path) -> None:
    begun = make_search(tmp_path / "begun", [0.5, 0.6, 0.4], ended=False)
    assert verdict.of(begun) == "the search has not ended: 3 trials begun, trial 1 leads so far"
    failed = make_search(tmp_path / "failed", [None, None], errors={0: "CUDA is gone"})
    assert verdict.of(failed) == (
        "no trial of the search came to a score; 2 of 2 trials failed: trial 0: CUDA is gone; trial 1: ValueError: no"
    )
    assert verdict.told(History()) == "the search has not ended: 0 trials begun"
    assert verdict.told(replay([{"kind": "asked", "trial": 0}])) == "the search has not ended: 1 trial begun"


def test_the_page_has_the_verdict_and_report_prints_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = make_search(tmp_path, [0.8, 0.82, 0.9, None, 0.85], rows=500, errors={3: "<b>CUDA</b> is gone"})
    cli.main(["report", str(found)])
    assert capsys.readouterr().out == f"{found.search_page}\n"
    text = found.search_page.read_text(encoding="utf-8")
    told = verdict.of(found)
    assert f"{told[:1].upper()}{told[1:]}." in Page(text).text
    assert "&lt;b&gt;CUDA&lt;/b&gt; is gone" in text.replace("<wbr>", "")


def test_a_search_without_a_trial_has_no_page(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.5], ended=False)
    found.trials.write_text("")
    with pytest.raises(UserError, match="is a search of which no trial has begun"):
        page.write(found)
