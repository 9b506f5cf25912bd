"""A search's page, and the figures that it shows."""

from pathlib import Path
from typing import Any

import pytest

from rtrain.config import Tune
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from tests.histories import FULL, Event, asked, events, finished, history, make_search, reached
from tests.reports import Page
from tune.history import History, replay
from tune.report import page, stats

COST = {"tune.cost": "bytes", "tune.objective": "front"}
TOLD = "trial 8 is better than the recipe's own settings"


def shown(search: Run, journal: list[Event], told: str = TOLD) -> Page:
    return Page(page.page(search, [{"time": 1.0 + place, **one} for place, one in enumerate(journal)], told))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a search of 20 trials."""
    journal = list(events(20))
    return shown(make_search(tmp_path_factory.mktemp("whole"), journal, **{"tune.price": 0.04}), journal)


def test_the_page_has_the_verdict_the_scores_the_best_over_time_and_the_settings_of_the_core(whole: Page) -> None:
    known = history(20)
    assert f"{TOLD[:1].upper()}{TOLD[1:]}." in whole.text
    for number in (known.chosen, 0):
        held = stats.held(known, number or 0)
        assert held is not None
        assert held.seeds == 2
        assert f"{held.score:.4f}" in whole.words
    assert "best" in whole.text
    assert "The best accuracy over time" in whole.words
    assert "Trials over learning rate and aggregation frequency" in whole.words
    assert "script" not in whole.tags
    assert not [value for _, value in whole.attributes if "nan" in value or "inf" in value.split()]
    # Scrolled on a phone, the table of trials keeps their names in view.
    assert ("class", "many") in whole.attributes


def test_money_is_the_time_of_the_slots_times_workers_and_price(whole: Page) -> None:
    assert f"{history(20).slot_seconds * 2 / 3600 * 0.04:.2f}" in whole.words


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
        page.write(search)
    assert refused.value.code == "not_begun"
    assert not search.search_page.exists()


def test_an_error_is_shown_as_it_is(tmp_path: Path) -> None:
    journal = [
        {**event, "score": event["score"] - 2.0} if event["kind"] == "reached" else event
        for event in events(20, end=False)
    ]
    search = make_search(tmp_path, journal, "essay", **{"train.aggregation_frequency": 4})
    drawn_page = shown(search, journal)
    best = max(event["score"] for event in journal if event["kind"] == "reached")
    assert f"{-best:.4f}" in drawn_page.words
    assert f"{best:.4f}" not in drawn_page.words


def test_a_model_s_cost_has_a_column_where_it_counts(tmp_path: Path) -> None:
    journal = [asked(0, by="recipe", cost=1.25), reached(0, 0, 0.5)]
    assert "MB of weights" in shown(make_search(tmp_path, journal, **COST), journal).words


def test_names_are_short_where_that_is_unambiguous() -> None:
    assert stats.short_names(["optim.lr", "train.aggregation_frequency"]) == {
        "optim.lr": "lr",
        "train.aggregation_frequency": "k",
    }
    assert stats.short_names(["optim.lr", "distill.lr"]) == {"optim.lr": "optim.lr", "distill.lr": "distill.lr"}


def test_what_a_searched_setting_brings_with_it_was_not_searched() -> None:
    space: Any = {"optim.lr": (1e-5, 1e-3), "optim.schedule": ("linear", "cosine")}
    more = {"optim.weight_decay": 0.1, "optim.lr_scaling": "sqrt", "train.rows_per_update": None}
    known = replay([asked(0, by="recipe"), asked(1, {"optim.lr": 3e-4, "optim.schedule": "cosine", **more})])
    assert stats.searched(known, Tune(space=space)) == ["optim.lr", "optim.schedule"]
    assert len(stats.searched(known, Tune(space=space, points=({"optim.weight_decay": 0.1},)))) == 3


def test_the_seconds_of_trials_that_failed_count() -> None:
    failed = {"kind": "failed", "trial": 1, "error": "ValueError: no", "seconds": 500.0}
    assert stats.spent(replay([asked(0), reached(0, 0, 0.5), asked(1), failed]), Tune()).seconds == 512.8


def test_rows_by_phase() -> None:
    known = [asked(0, by="recipe"), asked(1), asked(2), reached(0, 0, 0.8), reached(1, 0, 0.9), reached(1, 1, 0.9)]
    first = stats.spent(replay(known), Tune())
    assert (first.first, first.later, first.end) == (2560, 1280, 0)
    assert (first.full, first.budget, first.every, first.saved) == (6400, 51200, None, None)
    more = [
        *known,
        {"kind": "stopped", "why": "enough"},
        finished(1, 0.9),
        asked(3, {}, "seed", of=1),
        finished(3, 0.9),
    ]
    ended = stats.spent(replay(more), Tune(rows=1000))
    assert (ended.first, ended.later, ended.end) == (2560, 1280, FULL - 2560 + FULL)
    assert ended.budget == 1000
    assert ended.every == 3 * FULL  # a repetition is no trial of its own
    assert ended.saved == 3 * FULL - 3840 - (FULL - 2560 + FULL)
    assert stats.spent(History(), Tune()).full is None


def test_a_seed_that_was_begun_while_trials_were_asked_for_counts_to_the_search_until_its_rung() -> None:
    known = [asked(0, by="recipe"), reached(0, 0, 0.8), asked(1, {}, "seed", of=0, seed=1), reached(1, 0, 0.7)]
    assert stats.spent(replay(known), Tune()).first == 2 * 1280
    ended = stats.spent(replay([*known, finished(1, 0.9)]), Tune())
    assert (ended.first, ended.end) == (2 * 1280, FULL - 1280)


def test_the_winner_leads_and_before_that_whoever_came_furthest() -> None:
    known = [asked(0, by="recipe"), asked(1), asked(2), reached(0, 0, 0.9), reached(1, 0, 0.8), reached(1, 1, 0.85)]
    number = getattr(stats.leader(replay(known)), "number", None)
    assert number == 1
    lost = stats.leader(replay([*known, {"kind": "diverged", "trial": 1, "why": "loss is nan", "seconds": 1.0}]))
    assert lost is not None
    assert lost.number == 0
    assert stats.leader(replay(known[:3])) is None
    chosen = stats.leader(replay([*known, {"kind": "chosen", "best": 2, "verdict": {}}]))
    assert chosen is not None
    assert chosen.number == 2
