"""A search's page, and the figures that it shows."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.config import Tune
from rtrain.errors import UserError
from rtrain.metrics.by_output import metric_for
from rtrain.report.drawing.blocks import Figure, Note, Section
from rtrain.run import Run
from rtrain.tasks import base
from tests.histories import (
    BEST_K,
    BEST_LR,
    FULL,
    Event,
    asked,
    configured,
    events,
    finished,
    history,
    make_search,
    reached,
    score_of,
)
from tests.reports import Page
from tune.known.history import History, replay
from tune.results import drawn, figures, page

TOLD = "trial 8 is better than the recipe's own settings"


def shown(search: Run, known: History, told: str = TOLD) -> Page:
    return Page(page.page(search, known, told))


def known_of(folder: Path, known: History, recipe: str = "intent", /, **overrides: Any) -> drawn.Known:
    config = configured(folder, recipe, **overrides)
    output = base.get(config.recipe.task).output
    search = Run(folder / "no folder is needed")
    dimensions = figures.dimensions(known, config)
    return drawn.Known(search, config, known, dimensions, output, metric_for(output).headline)


def figures_of(section: Section) -> dict[str, Figure]:
    return {block.title: block for block in section.blocks if isinstance(block, Figure)}


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    """The page of a search of 20 trials."""
    journal = list(events(20))
    search = make_search(tmp_path_factory.mktemp("whole"), journal, **{"tune.price": 0.04})
    text = page.page(search, replay(journal), TOLD)
    return text, Page(text)


def test_the_verdict_comes_first_and_the_tiles_have_both_scores(whole: tuple[str, Page]) -> None:
    known, drawn_page = history(20), whole[1]
    assert f"{TOLD[:1].upper()}{TOLD[1:]}." in drawn_page.text
    for number in (known.chosen, 0):
        held = figures.held(known, number or 0)
        assert held is not None
        assert held.seeds == 2
        assert f"{held.score:.4f}" in drawn_page.words
    assert known.chosen == 8
    assert "8, the winner" in drawn_page.text
    # Scrolled on a phone, the table of trials keeps their names in view.
    assert ("class", "many") in drawn_page.attributes


def test_every_part_of_the_page_is_there(whole: tuple[str, Page]) -> None:
    text, drawn_page = whole
    for heading in (
        *("Trials", "The same settings with other seeds", "Why trials failed", "Every setting of every trial"),
        *("Estimated accuracy over lr and k: best near lr 0.0003 and k 4", "lr matters most at the first rung"),
        *("The score at the rungs", "Validation accuracy of each trial", "Training loss of each trial"),
        *("The accuracy for the time: 3 of 3 trials are on the front", "What it has cost", "What to do next"),
        "69,120 rows were trained on, 58,880 fewer than by full runs of all trials",
    ):
        assert heading in drawn_page.words, heading
    assert "&lt;b&gt;CUDA&lt;/b&gt; is full" in text.replace("<wbr>", "")
    assert "script" not in drawn_page.tags
    assert not re.search("https?://", text)
    assert not re.findall(r'(?:cx|cy|x|y|points|d)="[^"]*(?:nan|inf)', text)


def test_money_is_the_time_of_the_slots_times_workers_and_price(whole: tuple[str, Page]) -> None:
    assert f"{history(20).slot_seconds * 2 / 3600 * 0.04:.2f}" in whole[1].words


@pytest.mark.parametrize("journal", [list(events(20))[:1], list(events(20))[:2], list(events(3, failed=(0, 1, 2)))])
def test_the_page_of_a_search_that_has_hardly_begun_or_only_failed(journal: list[Event], tmp_path: Path) -> None:
    search = make_search(tmp_path, journal)
    drawn_page = shown(search, replay(journal), "the search has not ended")
    assert f"rtrain tune --resume --out {search.folder}" in drawn_page.text
    assert "rows saved" not in drawn_page.words
    assert "0.0000" not in drawn_page.text


def test_the_page_of_200_trials_is_small_and_names_few_curves(tmp_path: Path) -> None:
    journal = list(events(200, failed=(7, 50)))
    search = make_search(tmp_path, journal)
    text = page.page(search, replay(journal), TOLD)
    assert len(text) < 1_500_000
    curves = figures_of(drawn.curves(known_of(tmp_path, replay(journal))))
    assert curves["The score at the rungs"].chart.count('class="line s') == drawn.MOST_CURVES
    assert curves["The score at the rungs"].chart.count('class="faint"') == 198 - drawn.MOST_CURVES


def test_a_winner_that_is_trained_can_be_served_and_compared(tmp_path: Path) -> None:
    journal = list(events(20))
    search = make_search(tmp_path, journal)
    bare = shown(search, replay(journal)).text
    assert "rtrain compare" not in bare
    assert f"rtrain train {search.folder}/best.yaml --out NEW_FOLDER" in bare
    for number in (0, 8):
        search.trial(number).artifact.mkdir()
        (search.trial(number).artifact / "artifact.json").write_text("{}")
    text = shown(search, replay(journal)).text
    assert f"rtrain compare {search.trial(0)} {search.trial(8)}" in text
    assert f"rtrain serve {search.trial(8).artifact}" in text


def test_a_search_without_a_trial_has_no_page(tmp_path: Path) -> None:
    search = make_search(tmp_path, [])
    with pytest.raises(UserError, match="of which no trial has begun"):
        page.write(search)
    assert not search.search_page.exists()


def test_an_error_is_shown_as_it_is_and_smaller_is_better(tmp_path: Path) -> None:
    journal = [
        {**event, "score": event["score"] - 2.0} if event["kind"] == "reached" else event
        for event in events(20, end=False)
    ]
    search = make_search(tmp_path, journal, "essay", **{"train.aggregation_frequency": 4})
    drawn_page = shown(search, replay(journal))
    assert "Estimated RMSE over lr and k: best near lr 0.0003 and k 4" in drawn_page.words
    best = max(event["score"] for event in journal if event["kind"] == "reached")
    assert f"{-best:.4f}" in drawn_page.words
    assert f"{best:.4f}" not in drawn_page.words
    assert "estimated RMSE below" in drawn_page.text


def test_what_cannot_be_told_is_not_drawn(tmp_path: Path) -> None:
    few = drawn.space(known_of(tmp_path, history(4, failed=(), end=False)))
    (figure,) = [block for title, block in figures_of(few).items() if title.startswith("Trials over lr and k")]
    assert "No surface" in figure.note
    assert 'class="band"' not in figure.chart
    notes = [block.text for block in few.blocks if isinstance(block, Note)]
    assert notes == [
        f"Which setting matters most cannot be told from 4 trials with a score; it takes {figures.LEAST_IMPORTANCE}."
    ]


# ---------------------------------------------------------------------------------------------------------- dimensions


def test_names_are_short_where_that_is_unambiguous() -> None:
    assert figures.short_names(["optim.lr", "train.aggregation_frequency"]) == {
        "optim.lr": "lr",
        "train.aggregation_frequency": "k",
    }
    assert figures.short_names(["optim.lr", "distill.lr"]) == {"optim.lr": "optim.lr", "distill.lr": "distill.lr"}


def test_what_a_searched_setting_brings_with_it_is_no_dimension(tmp_path: Path) -> None:
    space = {"optim.lr": {"low": 1e-5, "high": 1e-3}, "optim.schedule": ["linear", "cosine"]}
    more = {"optim.weight_decay": 0.1, "optim.lr_scaling": "sqrt", "train.rows_per_update": None}
    known = replay([asked(0, by="recipe"), asked(1, {"optim.lr": 3e-4, "optim.schedule": "cosine", **more})])
    found = figures.dimensions(known, configured(tmp_path, **{"tune.space": space}))
    assert [(one.short, one.scale) for one in found] == [("lr", "linear"), ("schedule", "choice")]
    assert found[1].choices == ("linear", "cosine")
    assert [one.place(known.trials[0]) for one in found] == [2e-4, 0.0]
    pointed = {"tune.points": [{"optim.weight_decay": 0.1}], "tune.space": space}
    assert len(figures.dimensions(known, configured(tmp_path, **pointed))) == 3


def test_a_range_whose_default_is_null_has_an_axis_of_its_numbers(tmp_path: Path) -> None:
    """The model's own dropout, which is trial 0's, is no number of the range."""
    values = [None, 0.17, 0.02, 0.11, 0.05]
    told = [asked(number, {} if not number else {"model.dropout": value}) for number, value in enumerate(values)]
    told += [reached(number, 0, 0.5 + number / 10) for number in range(len(values))]
    searched = {"tune.space": {"model.dropout": {"low": 0.0, "high": 0.2}, "optim.lr": {"low": 1e-5, "high": 1e-3}}}
    known = known_of(tmp_path, replay(told), **searched)
    dropout = next(one for one in known.dimensions if one.name == "model.dropout")
    assert (dropout.scale, dropout.choices) == ("linear", ())
    places = [dropout.place(trial) for trial in known.history.own]
    assert math.isnan(places[0])
    assert places[1:] == values[1:]
    [alone] = [one for title, one in figures_of(drawn.space(known)).items() if title == "Every setting of every trial"]
    assert "Not drawn: trials with a setting that is null." in alone.note
    nothing = replay(told[:1])
    assert figures.dimensions(nothing, configured(tmp_path, **searched)) == ()
    assert drawn.space(known_of(tmp_path, replay([told[0], asked(1, {"model.dropout": None})]), **searched)).blocks


def test_the_seconds_of_trials_that_failed_count(tmp_path: Path) -> None:
    told = [
        asked(0),
        reached(0, 0, 0.5),
        asked(1),
        {"kind": "failed", "trial": 1, "error": "ValueError: no", "seconds": 500.0},
    ]
    known = replay(told)
    assert [trial.seconds for trial in known.trials] == [12.8, 500.0]
    assert "513" in Page(page.page(make_search(tmp_path, told), known, TOLD)).text


def test_steps_of_a_factor_are_equally_long(tmp_path: Path) -> None:
    known = known_of(tmp_path, history(20))
    lr, k = known.dimensions
    assert (lr.scale, k.scale) == ("log", "log")
    rows = {"train.rows_per_update": 96, "train.workers": 2, "train.micro_batch": 8}
    (again, default) = figures.dimensions(known.history, configured(tmp_path, **rows))
    assert again.default == 2e-4
    assert default.default == 6.0  # passes of 8 rows on 2 workers


def test_rows_of_an_update_that_are_searched_have_the_recipes_own(tmp_path: Path) -> None:
    known = replay([asked(0, by="recipe"), asked(1, {"train.rows_per_update": 512})])
    (rows,) = figures.dimensions(known, configured(tmp_path, **{"tune.space": {"train.rows_per_update": [64, 512]}}))
    assert [rows.value(trial) for trial in known.trials] == [64, 512]
    assert rows.scale == "log"


def test_a_setting_of_words_has_an_axis_of_its_own(tmp_path: Path) -> None:
    space = {"optim.lr": {"low": 1e-5, "high": 1e-3, "log": True}, "optim.schedule": ["linear", "cosine"]}
    journal = [asked(0, by="recipe"), reached(0, 0, 0.8)]
    for number, schedule in enumerate(["cosine", "linear", "cosine"], 1):
        journal += [asked(number, {"optim.lr": number * 1e-4, "optim.schedule": schedule}), reached(number, 0, 0.8)]
    found = figures_of(drawn.space(known_of(tmp_path, replay(journal), **{"tune.space": space})))
    assert ">cosine</text>" in found["Every setting of every trial"].chart
    assert "Accuracy over lr" in found


# ------------------------------------------------------------------------------------------------------------- figures


def test_rows_by_phase() -> None:
    known = [asked(0, by="recipe"), asked(1), asked(2), reached(0, 0, 0.8), reached(1, 0, 0.9), reached(1, 1, 0.9)]
    first = figures.spent(replay(known), Tune())
    assert (first.first, first.later, first.end) == (2560, 1280, 0)
    assert (first.full, first.budget, first.every, first.saved) == (6400, 51200, None, None)
    more = [
        *known,
        {"kind": "stopped", "why": "enough"},
        finished(1, 0.9),
        asked(3, {}, "seed", of=1),
        finished(3, 0.9),
    ]
    ended = figures.spent(replay(more), Tune(rows=1000))
    assert (ended.first, ended.later, ended.end) == (2560, 1280, FULL - 2560 + FULL)
    assert ended.budget == 1000
    assert ended.every == 3 * FULL  # a repetition is no trial of its own
    assert ended.saved == 3 * FULL - 3840 - (FULL - 2560 + FULL)
    assert figures.spent(History(), Tune()).full is None


def test_a_seed_that_was_begun_while_trials_were_asked_for_counts_to_the_search_until_its_rung() -> None:
    known = [asked(0, by="recipe"), reached(0, 0, 0.8), asked(1, {}, "seed", of=0, seed=1), reached(1, 0, 0.7)]
    assert figures.spent(replay(known), Tune()).first == 2 * 1280
    ended = figures.spent(replay([*known, finished(1, 0.9)]), Tune())
    assert (ended.first, ended.end) == (2 * 1280, FULL - 1280)


def test_the_front_is_what_nothing_beats_in_both() -> None:
    ends = {0: (10.0, 0.90), 1: (12.0, 0.92), 2: (13.0, 0.91), 3: (10.0, 0.89), 4: (20.0, 0.95)}
    known = [asked(5)]
    for number, (seconds, held) in ends.items():
        known += [asked(number), finished(number, held, seconds=seconds)]
    assert [trial.number for trial in figures.front(replay(known))] == [0, 1, 4]


def test_the_winner_leads_and_before_that_whoever_came_furthest() -> None:
    known = [asked(0, by="recipe"), asked(1), asked(2), reached(0, 0, 0.9), reached(1, 0, 0.8), reached(1, 1, 0.85)]
    number = getattr(figures.leader(replay(known)), "number", None)
    assert number == 1
    lost = figures.leader(replay([*known, {"kind": "diverged", "trial": 1, "why": "loss is nan"}]))
    assert lost is not None
    assert lost.number == 0
    assert figures.leader(replay(known[:3])) is None
    chosen = figures.leader(replay([*known, {"kind": "chosen", "best": 2, "verdict": {}}]))
    assert chosen is not None
    assert chosen.number == 2


def test_the_surface_is_highest_where_the_scores_are() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.uniform(-4.3, -3.0, 20), draw.integers(0, 4, 20).astype(float)
    scores = np.array([score_of(10**a, 2**b, FULL) for a, b in zip(x, y, strict=True)])
    grid_x, grid_y = np.linspace(-4.3, -3.0, 40), np.linspace(0, 3, 30)
    heights = figures.surface(x, y, scores, grid_x, grid_y)
    assert heights is not None
    assert heights.shape == (30, 40)
    row, column = np.unravel_index(heights.argmax(), heights.shape)
    assert grid_x[column] == pytest.approx(np.log10(BEST_LR), abs=0.15)
    assert grid_y[row] == pytest.approx(np.log2(BEST_K), abs=0.5)
    assert figures.surface(x[:4], y[:4], scores[:4], grid_x, grid_y) is None
    assert figures.surface(x, y, np.ones(20), grid_x, grid_y) is None
    assert figures.surface(x, np.ones(20), scores, grid_x, grid_y) is None


def test_importance_finds_the_setting_that_matters_and_says_where_none_can_be_told() -> None:
    draw = np.random.default_rng(0)
    places = draw.uniform(size=(40, 3))
    found = figures.importance(places, places[:, 1] + 0.1 * places[:, 0])
    assert found is not None
    assert found.explained > 0.8
    assert found.falls[1] > 1.0 > 5 * abs(found.falls[2])
    noise = figures.importance(places, draw.normal(size=40))
    assert noise is not None
    assert noise.explained < 0.1
    assert figures.importance(places[:9], places[:9, 1]) is None
    assert figures.importance(places, np.ones(40)) is None
