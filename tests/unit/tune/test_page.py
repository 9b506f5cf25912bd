"""A search's page, and the figures that it shows."""

from pathlib import Path
from typing import Any

import pytest

from rtrain.config import TuneConfig
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from tests.support.histories import FULL, Event, created, events, finished, history, make_search, rung_result
from tests.support.reports import Page
from tune.history import History, replay_journal
from tune.report import page, table

COST = {"tune.cost": "bytes", "tune.objective": "pareto"}
VERDICT = "trial 8 is better than the recipe's own settings"


def shown(search: Run, journal: list[Event], messages: str = VERDICT) -> Page:
    events = [{"time": 1.0 + place, **event} for place, event in enumerate(journal)]
    return Page(page.render_search_page(search, events, messages))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a search of 20 trials."""
    journal = list(events(20))
    return shown(make_search(tmp_path_factory.mktemp("whole"), journal, **{"tune.worker_cost_per_hour": 0.04}), journal)


def test_the_page_has_the_verdict_the_scores_the_best_over_time_and_the_settings_of_the_core(full: Page) -> None:
    state = history(20)
    assert f"{VERDICT[:1].upper()}{VERDICT[1:]}." in full.text
    for number in (state.winner, 0):
        holdout = table.holdout_score(state, number or 0)
        assert holdout is not None
        assert holdout.seeds == 2
        assert f"{holdout.score:.4f}" in full.words
    assert "best" in full.text
    assert "The best accuracy over time" in full.words
    assert "Trials over learning rate and aggregation frequency" in full.words
    assert "script" not in full.tags
    assert not [value for _, value in full.attributes if "nan" in value or "inf" in value.split()]
    # Scrolled on a phone, the table of trials keeps their names in view.
    assert ("class", "many") in full.attributes


def test_money_is_the_time_of_the_slots_times_workers_and_price(full: Page) -> None:
    assert f"{history(20).slot_seconds * 2 / 3600 * 0.04:.2f}" in full.words


@pytest.mark.parametrize("journal", [list(events(20))[:1], list(events(20))[:2], list(events(3, failed=(0, 1, 2)))])
def test_the_page_of_a_search_that_has_hardly_begun_or_only_failed(journal: list[Event], tmp_path: Path) -> None:
    search = make_search(tmp_path, journal)
    drawn_page = shown(search, journal, "the search has not ended")
    assert f"rtrain tune --resume --out {search.folder}" in drawn_page.text
    assert "0.0000" not in drawn_page.text


def test_a_winner_that_is_trained_can_be_served_and_compared(tmp_path: Path) -> None:
    journal = list(events(20))
    search = make_search(tmp_path, journal)
    bare = shown(search, journal).text
    assert "rtrain compare" not in bare
    assert f"rtrain train {search.folder}/best.yaml --out NEW_FOLDER" in bare
    for number in (0, 8):
        search.trial(number).artifact.mkdir()
        (search.trial(number).artifact / "artifact.json").write_text("{}")
    text = shown(search, journal).text
    assert f"rtrain compare {search.trial(0)} {search.trial(8)}" in text
    assert f"rtrain serve {search.trial(8).artifact}" in text


def test_a_search_without_a_trial_has_no_page(tmp_path: Path) -> None:
    search = make_search(tmp_path, [])
    with pytest.raises(UserError) as refused:
        page.write_search_page(search)
    assert refused.value.code == "not_begun"
    assert not search.search_page.exists()


def test_an_error_is_shown_as_it_is(tmp_path: Path) -> None:
    journal = [
        {**event, "score": event["score"] - 2.0} if event["kind"] == "rung_result" else event
        for event in events(20, end=False)
    ]
    search = make_search(tmp_path, journal, "essay", **{"train.aggregation_frequency": 4})
    drawn_page = shown(search, journal)
    best = max(event["score"] for event in journal if event["kind"] == "rung_result")
    assert f"{-best:.4f}" in drawn_page.words
    assert f"{best:.4f}" not in drawn_page.words


def test_a_model_s_cost_has_a_column_where_it_counts(tmp_path: Path) -> None:
    journal = [created(0, by="recipe", cost=1.25), rung_result(0, 0, 0.5)]
    assert "MB of weights" in shown(make_search(tmp_path, journal, **COST), journal).words


def test_names_are_short_where_that_is_unambiguous() -> None:
    assert table.shorten_names(["optim.lr", "train.aggregation_frequency"]) == {
        "optim.lr": "lr",
        "train.aggregation_frequency": "k",
    }
    assert table.shorten_names(["optim.lr", "distill.lr"]) == {"optim.lr": "optim.lr", "distill.lr": "distill.lr"}


def test_what_a_searched_setting_brings_with_it_was_not_searched() -> None:
    space: Any = {"optim.lr": (1e-5, 1e-3), "optim.schedule": ("linear", "cosine")}
    more = {"optim.weight_decay": 0.1, "optim.lr_scaling": "sqrt", "train.global_batch_size": None}
    state = replay_journal([created(0), created(1, {"optim.lr": 3e-4, "optim.schedule": "cosine", **more})])
    assert table.searched_settings(state, TuneConfig(space=space)) == ["optim.lr", "optim.schedule"]
    by_points = TuneConfig(space=space, points_to_evaluate=({"optim.weight_decay": 0.1},))
    assert len(table.searched_settings(state, by_points)) == 3


def test_the_seconds_of_trials_that_failed_count() -> None:
    failed = {"kind": "failed", "trial": 1, "error": "ValueError: no", "seconds": 500.0}
    state = replay_journal([created(0), rung_result(0, 0, 0.5), created(1), failed])
    assert table.measure_usage(state, TuneConfig()).seconds == 512.8


def test_rows_by_phase() -> None:
    state = [*map(created, range(3)), rung_result(0, 0, 0.8), rung_result(1, 0, 0.9), rung_result(1, 1, 0.9)]
    first = table.measure_usage(replay_journal(state), TuneConfig())
    assert (first.first_rung_rows, first.later_rung_rows, first.final_rows) == (2560, 1280, 0)
    assert (first.full_run_rows, first.budget_rows) == (6400, 51200)
    assert first.all_full_runs_rows is first.saved_rows is None
    stopped = {"kind": "stopped", "reason": "enough"}
    more = [*state, stopped, finished(1, 0.9), created(3, {}, "seed", repeat_of=1), finished(3, 0.9)]
    ended = table.measure_usage(replay_journal(more), TuneConfig(budget_rows=1000))
    assert (ended.first_rung_rows, ended.later_rung_rows, ended.final_rows) == (2560, 1280, FULL - 2560 + FULL)
    assert ended.budget_rows == 1000
    assert ended.all_full_runs_rows == 3 * FULL  # a repetition is no trial of its own
    assert ended.saved_rows == 3 * FULL - 3840 - (FULL - 2560 + FULL)
    assert table.measure_usage(History(), TuneConfig()).full_run_rows is None


def test_a_seed_that_was_begun_while_trials_were_asked_for_counts_to_the_search_until_its_rung() -> None:
    state = [
        created(0, by="recipe"),
        rung_result(0, 0, 0.8),
        created(1, {}, "seed", repeat_of=0, seed=1),
        rung_result(1, 0, 0.7),
    ]
    assert table.measure_usage(replay_journal(state), TuneConfig()).first_rung_rows == 2 * 1280
    ended = table.measure_usage(replay_journal([*state, finished(1, 0.9)]), TuneConfig())
    assert (ended.first_rung_rows, ended.final_rows) == (2 * 1280, FULL - 1280)


LOST = {"kind": "diverged", "trial": 1, "reason": "loss is nan", "seconds": 1.0}


@pytest.mark.parametrize(
    ("further", "leader"), [([], 1), ([LOST], 0), ([{"kind": "winner", "winner": 2, "verdict": {}}], 2)]
)
def test_the_winner_leads_and_before_that_whoever_came_furthest(further: list[Event], leader: int) -> None:
    trials = [*map(created, range(3))]
    assert table.leading_trial(replay_journal(trials)) is None
    state = [*trials, rung_result(0, 0, 0.9), rung_result(1, 0, 0.8), rung_result(1, 1, 0.85), *further]
    leading = table.leading_trial(replay_journal(state))
    assert leading is not None
    assert leading.number == leader
