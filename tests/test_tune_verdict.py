"""What a search has come to: its verdict in a sentence, in its report, and of one that has not ended."""

from dataclasses import replace
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from tests.reports import Page
from tests.searches import make_search
from tune.finals import SECONDS, Verdict
from tune.report import verdict

OWN = "the recipe's own settings"
CLOSE = Verdict("unclear", 3, 3, "accuracy", 0.8, 0.83, 0.03, -0.01, 0.07, rows=500, seeds=2)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (CLOSE, ["trial 3 is taken", "not shown", "accuracy 0.830 against 0.800", "500", "2 seeds"]),
        (replace(CLOSE, kind="better", seeds=1, steered=True), ["trial 3 is better", "steered", "1 seed"]),
        (replace(CLOSE, kind="default", best=0, first=0.85, parts=9), ["trial 0", "accuracy 0.850 against 0.830"]),
        (replace(CLOSE, kind="default", best=0, against=1, faster=True, cost="bytes"), ["trial 0", "smallest"]),
        (Verdict("default", 0), ["trial 0"]),
        (Verdict("alone", 1), ["trial 1 has won"]),
        (replace(CLOSE, kind="better", name="neg_rmse", first=-1.5, other=-1.25), ["RMSE 1.25 against 1.50"]),
        (replace(CLOSE, kind="better", faster=True), ["trial 3", "fastest"]),
    ],
)
def test_the_sentence_of_a_search_that_has_ended(found: Verdict, words: list[str]) -> None:
    sentence = verdict.ended(found)
    assert all(word in sentence for word in words)


def test_seconds_to_a_target_are_told_as_such() -> None:
    found = replace(CLOSE, kind="better", name=SECONDS, first=-80.0, other=-60.0, difference=20.0, low=15.0, high=25.0)
    told = verdict.ended(found, 0.9)
    assert "seconds to 0.9 60.0 against 80.0" in told
    assert "rows" not in told
    assert "by trial 3 alone" in verdict.ended(replace(found, first=None), 0.9)
    assert "by neither" in verdict.ended(replace(found, kind="default", best=0, first=None, other=None), 0.9)


def test_who_reaches_the_target_with_some_seeds_alone_is_told_so() -> None:
    found = replace(CLOSE, name=SECONDS, first=None, other=-60.0, low=None)
    found = replace(found, first_reached=0, other_reached=1)
    told = verdict.ended(found, 0.9)
    assert "trial 3 with 1 of 2 seeds" in told
    assert "trial 0 with 0 of 2 seeds" in told


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
