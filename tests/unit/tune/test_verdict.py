"""The verdict of a search in a sentence, in its report, and before its end."""

from dataclasses import replace
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from tests.support.reports import Page
from tests.support.searches import make_search
from tune.finals import SECONDS_SCORE, SearchVerdict
from tune.history import Journal
from tune.report import table

DEFAULT_SETTINGS = "the recipe's own settings"
CLOSE = SearchVerdict("unclear", 3, 3, "accuracy", 0.8, 0.83, 0.03, -0.01, 0.07, rows=500, seeds=2)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (CLOSE, ["trial 3 has the higher mean", "not shown", "accuracy 0.830 against 0.800", "500", "2 seeds"]),
        (replace(CLOSE, kind="better", seeds=1, used_steering_rows=True), ["trial 3 is better", "steered", "1 seed"]),
        (
            replace(CLOSE, kind="default", winner=0, baseline_score=0.85, folds=9),
            ["trial 0", "accuracy 0.850 against 0.830"],
        ),
        (
            replace(CLOSE, kind="default", winner=0, compared_trial=1, won_by_cost=True, cost_kind="bytes"),
            ["trial 0", "smallest"],
        ),
        (SearchVerdict("default", 0), ["trial 0"]),
        (SearchVerdict("unopposed", 1), ["trial 1 has won"]),
        (
            replace(CLOSE, kind="better", score_name="neg_rmse", baseline_score=-1.5, candidate_score=-1.25),
            ["RMSE 1.25 against 1.50"],
        ),
        (replace(CLOSE, kind="better", won_by_cost=True), ["trial 3", "fastest"]),
    ],
)
def test_the_sentence_of_a_search_that_has_ended(result: SearchVerdict, words: list[str]) -> None:
    sentence = table.describe_verdict(result)
    assert all(word in sentence for word in words)


def test_seconds_to_a_target_are_told_as_such() -> None:
    result = replace(CLOSE, kind="better", score_name=SECONDS_SCORE, baseline_score=-80.0, candidate_score=-60.0)
    messages = table.describe_verdict(replace(result, difference=20.0, ci_low=15.0, ci_high=25.0), 0.9)
    assert "seconds to 0.9 60.0 against 80.0" in messages
    assert "rows" not in messages
    assert "by trial 3 alone" in table.describe_verdict(replace(result, baseline_score=None), 0.9)
    neither = replace(result, kind="default", winner=0, baseline_score=None, candidate_score=None)
    assert "by neither" in table.describe_verdict(neither, 0.9)


def test_who_reaches_the_target_with_some_seeds_alone_is_told_so() -> None:
    result = replace(CLOSE, score_name=SECONDS_SCORE, baseline_score=None, candidate_score=-60.0, ci_low=None)
    result = replace(result, baseline_reached_seeds=0, candidate_reached_seeds=1)
    messages = table.describe_verdict(result, 0.9)
    assert "trial 3 with 1 of 2 seeds" in messages
    assert "trial 0 with 0 of 2 seeds" in messages


def test_the_verdict_rests_on_the_rows_that_were_held_back(tmp_path: Path) -> None:
    """On the rows that steered, trial 1 was ahead; where both were trained to their ends, it is not."""
    result = make_search(tmp_path, [0.8, 0.95, 0.5], rows=600, ends={0: 0.9, 1: 0.7, 2: 0.5})
    messages, history = table.describe_search(result), Journal(result.trials).history
    assert messages.startswith(f"the default is at the top (trial 0, {DEFAULT_SETTINGS}): accuracy 0.8")
    assert "of trial 1, the next best" in messages
    assert result.winner is not None
    assert result.winner.folder == result.trial(0).folder
    final_result = history.trials[0].final_result
    assert final_result is not None
    assert history.verdict["rows"] == final_result.holdout_rows < 600
    assert history.verdict["baseline_score"] == pytest.approx(final_result.holdout_score)


@pytest.mark.parametrize(("repeats", "kind"), [([(0, 1, 0.6), (1, 1, 0.9), (2, 1, 0.6)], "better"), ([], "unclear")])
def test_a_large_lead_with_two_seeds_is_better_and_a_lead_with_one_seed_cannot_be_told(
    repeats: list[tuple[int, int, float]], kind: str, tmp_path: Path
) -> None:
    result = make_search(tmp_path, [0.6, 0.9, 0.6], rows=1000, repeats=repeats)
    history = Journal(result.trials).history
    assert (history.winner, history.verdict["kind"]) == (1, kind)


def test_the_page_has_the_verdict_and_report_prints_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = make_search(tmp_path, [0.8, 0.82, 0.9, None, 0.85], rows=500, errors={3: "<b>CUDA</b> is gone"})
    cli.main(["report", str(result)])
    assert capsys.readouterr().out == f"{result.search_page}\n"
    text = result.search_page.read_text(encoding="utf-8")
    messages = table.describe_search(result)
    assert f"{messages[:1].upper()}{messages[1:]}." in Page(text).text
    assert "&lt;b&gt;CUDA&lt;/b&gt; is gone" in text.replace("<wbr>", "")
