"""What a search has come to: its verdict in a sentence, its page, and what a terminal shows of it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rtrain.cli import app as cli
from rtrain.errors import UserError
from rtrain.report.live.progress import search_text
from rtrain.run import Run
from tests.reports import Page
from tests.searches import answered, make_search
from tests.test_progress import SUMMARY
from tune import page, search, verdict

OWN = "the recipe's own settings"


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (
            [0.9167, 0.9167, 0.5833],
            f"a tie on 60 validation rows: trials 0 and 1 have accuracy 0.9167; the default stands (trial 0, {OWN})",
        ),
        (
            [0.9, 0.85, 0.7],
            f"the default stands (trial 0, {OWN}): accuracy 0.9000 on 60 validation rows, 0.8500 of trial 1, the next "
            "best",
        ),
        ([0.9, None], f"no other trial came to a score: the default stands (trial 0, {OWN})"),
        ([None, 0.9], f"trial 1 has won; {OWN} (trial 0) came to no score to compare with"),
    ],
)
def test_where_the_default_stands_or_has_none_beside_it(
    scores: list[float | None], sentence: str, tmp_path: Path
) -> None:
    assert verdict.of(make_search(tmp_path, scores)) == sentence


def test_scores_alone_tell_a_large_lead_from_a_small_one(tmp_path: Path) -> None:
    small = verdict.of(make_search(tmp_path / "small", [0.9, 0.9167, 0.5]))
    assert small.startswith(f"a tie on 60 validation rows: the default stands; trial 1 beside {OWN}: accuracy 0.917")
    assert small.endswith("(at the search's budget)")
    large = verdict.of(make_search(tmp_path / "large", [0.6, 0.9, 0.5], rows=200))
    assert large.startswith(f"trial 1 is better than {OWN}: accuracy 0.900 against 0.600, +30.0 points (21.8 to 37.7)")


def test_answers_to_the_same_rows_decide_where_both_have_left_them(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.8, 0.9], rows=500)
    answered(found.trial(0), 0.80, 500)
    answered(found.trial(1), 0.84, 500)
    told = verdict.of(found)
    assert told.startswith(f"trial 1 is better than {OWN}: accuracy 0.8")
    assert told.endswith("on 500 validation rows (both trained to their end)")
    answered(found.trial(1), 0.7, 500)
    assert verdict.of(found).startswith(
        f"trial 1 won the search, and is worse than {OWN}: accuracy 0.694 against 0.810"
    )


def test_an_error_without_answers_has_no_interval(tmp_path: Path) -> None:
    """Of scores that are no shares nothing is known but their values."""
    found = make_search(tmp_path, [0.5, 0.6])
    default, best = (
        search.Trial(0, 1e-4, 4, 10, -1.5, "finished", ""),
        search.Trial(1, 1e-4, 4, 10, -1.25, "paused", ""),
    )
    told = verdict._beside(found, default, best, "neg_rmse")
    assert told == (
        f"trial 1 leads {OWN}: RMSE 1.2500 against 1.5000 on 60 validation rows; scores alone do not tell how sure "
        "that is"
    )


def test_a_search_that_has_not_ended(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.5, 0.6, 0.4], ended=False)
    assert verdict.of(found) == "the search has not ended: 3 trials begun, of which trial 1 leads so far"
    before = {path: path.stat().st_mtime_ns for path in found.folder.rglob("*") if path.is_file()}
    drawn = Page(page.write(found).read_text(encoding="utf-8"))
    assert f"rtrain tune --resume --out {found}" in drawn.text
    after = {path: path.stat().st_mtime_ns for path in found.folder.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {found.report}  # nothing is written into a trial that may be running
    assert all(after[path] == time for path, time in before.items())


def test_trials_name_what_they_differ_in(tmp_path: Path) -> None:
    trials = verdict.trials(make_search(tmp_path, [0.5, 0.6]))
    assert trials[0].named == "the recipe as it stands"
    older = replace(trials[1], settings={}, lr=1e-4, aggregation_frequency=2)
    assert older.named == "optim.lr=0.0001, train.aggregation_frequency=2"
    assert trials[1].named == "optim.lr=0.001, train.aggregation_frequency=4"
    assert (trials[1].lr, trials[1].aggregation_frequency) == (1e-3, 4)


def test_trials_of_an_older_search_are_read(tmp_path: Path) -> None:
    """Their lines lack `settings`."""
    found = make_search(tmp_path, [0.5, 0.6])
    import json

    lines = [json.loads(line) for line in found.trials.read_text().splitlines()]
    found.trials.write_text("".join(json.dumps({k: v for k, v in x.items() if k != "settings"}) + "\n" for x in lines))
    assert [trial.number for trial in verdict.trials(found)] == [0, 1]
    assert "Trials" in Page(page.write(found).read_text(encoding="utf-8")).text


def test_the_page_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = [0.8, 0.82, 0.9, None, 0.85, 0.7, 0.75, 0.81, 0.79]
    found = make_search(tmp_path, scores, rows=500, errors={3: "<b>CUDA</b> is gone"})
    cli.main(["report", str(found)])
    assert capsys.readouterr().out == f"{found.report}\n"
    text = found.report.read_text(encoding="utf-8")
    drawn = Page(text)
    told = verdict.of(found)
    assert f"{told[:1].upper()}{told[1:]}." in drawn.text
    assert told.startswith("trial 2 is better")
    assert "trial 2, the winner" in drawn.text
    assert "&lt;b&gt;CUDA&lt;/b&gt; is gone" in text.replace("<wbr>", "")
    assert "passes of a worker between two exchanges of gradients" in drawn.text
    assert "Trial 0 and the best 7 others are drawn." in drawn.text
    assert f"rtrain report {found.trial(2)}" in drawn.text
    assert "script" not in drawn.tags
    assert "running" not in drawn.text


def test_a_search_without_a_trial_has_no_page(tmp_path: Path) -> None:
    found = make_search(tmp_path, [0.5], ended=False)
    import shutil

    shutil.rmtree(found.trial(0).folder)
    with pytest.raises(UserError, match="is a search of which no trial has begun"):
        page.write(found)


def test_the_end_of_a_search_on_a_terminal(tmp_path: Path) -> None:
    folder = make_search(tmp_path, [0.9, 0.9, 0.6])
    trials = verdict.trials(folder)
    found = SimpleNamespace(trials=trials, best=search.best(trials), failures="")
    lines = search_text(found, SUMMARY, verdict.of(folder)).splitlines()
    assert lines[0] == verdict.of(folder)
    assert lines[2] == "trial        lr   k  updates    valid  status"
    assert lines[3] == "    0   2.0e-04   4       40   0.9000  finished  the recipe as it stands  <- best"
    assert lines[4] == "    1   1.0e-03   4       20   0.9000  paused    optim.lr=0.001, train.aggregation_frequency=4"
    assert lines[6].startswith("k: passes of a worker between two exchanges of gradients")
    assert "; paused: came to the search's budget, and can be trained on; stopped: " in lines[6]
    assert lines[7] == f"all trials: rtrain report {Run(Path(trials[0].run)).folder.parent}"
