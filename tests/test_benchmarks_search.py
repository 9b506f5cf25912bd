"""The figures of the search's benchmark, and its command line. The searches themselves are the benchmark's."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tasks
from benchmarks.search import __main__ as command, commands, figures, kills, others, parts
from benchmarks.search.figures import Ended, Trained
from rtrain import config
from rtrain.run import Run
from tests.histories import asked, finished, make_search, reached as came_to
from tests.test_imports import ROOT
from tune.asking import space
from tune.known.history import Finished, History, Reached, Trial

# ------------------------------------------------------------------------------------------------------------- the rows


def reached(rung: int, rows: int) -> Reached:
    return Reached(rung, rows // 10, rows, 0.5)


def test_rows_up_to_the_last_rung_are_the_search_s_and_the_others_its_end() -> None:
    finished = Finished(100, 1000, 0.9, 0.9, 50)
    trials = (
        Trial(0, reached=(reached(0, 200), reached(1, 400)), finished=finished),
        Trial(1, reached=(reached(0, 200),)),
        Trial(2, diverged="the loss rose"),
        Trial(3, reached=(reached(0, 200),), error="no disk"),
        Trial(4, of=0, seed=1, finished=finished),
        Trial(5, of=1, seed=1, reached=(reached(0, 200),)),
    )
    # Trial 5 was begun to see how much a seed makes.
    # Trial 2 diverged after 70 rows; trial 3 failed at 250, on its way to the next rung.
    found = figures.rows_of_search(History(trials), {0: 1000, 1: 200, 2: 70, 3: 250, 4: 990, 5: 200})
    assert found == (400 + 200 + 70 + 250 + 200, 600 + 990)


def test_rows_of_a_log_are_those_of_all_starts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rows in (64, 128):
        run.append("progress", rows=rows)
    run.append("started")
    run.append("progress", rows=32)
    assert parts.seen(run) == 128 + 32


# ------------------------------------------------------------------------------------------------------------- the gain


def ended(test: float, rows: int = 4000, verdict: Mapping[str, Any] | None = None) -> Ended:
    return Ended(0, {}, test, 0.80, 8, rows, 2000, 60.0, verdict or {})


def test_the_gain_is_told_in_points_and_in_deviations_of_the_seeds() -> None:
    found = figures.gain([ended(0.86), ended(0.82)], [0.79, 0.80, 0.81], full_rows=1000)
    assert found["gain_points"] == pytest.approx(4.0)
    assert found["worst_search_points"] == pytest.approx(2.0)
    assert found["default_deviation_points"] == pytest.approx(1.0)
    assert found["worst_search_deviations"] == pytest.approx(2.0)
    assert (found["search_full_runs"], found["end_full_runs"]) == ([4.0, 4.0], [2.0, 2.0])


@pytest.mark.parametrize(
    ("verdict", "behind"),
    [
        ({"kind": "unclear", "first": 0.5, "other": 0.4}, True),
        ({"kind": "better", "first": 0.4, "other": 0.5}, False),
        ({"kind": "default", "first": 0.5, "other": 0.4}, False),  # the recipe itself is the winner
        ({"kind": "alone", "first": None, "other": None}, False),
    ],
)
def test_a_winner_behind_the_recipe_on_held_back_rows_is_counted(verdict: dict[str, Any], behind: bool) -> None:
    name = "winner_behind_default_on_held_back_rows"
    assert figures.gain([ended(0.8, verdict=verdict)], [0.8], 1000)[name] == behind


# -------------------------------------------------------------------------------------------------------- random search

POOL = [Trained(0.1, 0.4), Trained(0.3, 0.6), Trained(0.2, 0.9)]


def test_the_best_of_random_runs_is_chosen_by_validation_and_told_by_test() -> None:
    # The pairs of the pool have the best validation scores 0.3, 0.3 and 0.2: test scores 0.6, 0.6 and 0.9.
    assert figures.best_of(POOL) == pytest.approx([(0.4 + 0.6 + 0.9) / 3, (0.6 + 0.6 + 0.9) / 3, 0.6])


def test_the_rows_of_random_search_are_those_of_the_runs_that_it_takes() -> None:
    # 0.71 less a deviation of 0.01 is expected of two runs, which are 2,000 rows.
    found = figures.against_random(POOL, [ended(0.71, rows=500)], [0.69, 0.70, 0.71], full_rows=1000)
    assert (found["random_runs_needed"], found["rows_vs_random"]) == (2, 0.25)
    assert found["rows_vs_random_less_than"] is None
    # Student's t of 2 degrees of freedom is 4.303: 0.70 +- 4.303 x 0.01 x sqrt(4 / 3).
    assert found["default_interval"] == pytest.approx((0.6503, 0.7497), abs=1e-4)
    assert found["runs_above_the_default"] == 1


def test_a_pool_that_never_comes_there_tells_how_many_rows_are_too_few() -> None:
    found = figures.against_random(POOL, [ended(0.99, rows=500)], [0.70], full_rows=1000)
    assert (found["random_runs_needed"], found["rows_vs_random"]) == (None, None)
    assert found["rows_vs_random_less_than"] == pytest.approx(1 / 6)
    assert found["runs_above_the_default"] is None


# ---------------------------------------------------------------------------------------------------------------- times


def test_the_time_is_told_as_a_share_of_that_with_an_exchange_after_every_pass() -> None:
    found = figures.time_vs_k1([(6.0, 10.0), (5.0, 10.0), (9.0, 10.0), (None, 10.0), (3.0, None)])
    assert (found["time_vs_k1"], found["seeds_that_reached_it"]) == (pytest.approx(0.6), 3)
    assert figures.time_vs_k1([(None, 10.0)])["time_vs_k1"] is None


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_trainings_of_all_frequencies_are_evaluated_after_equal_rows(k: int) -> None:
    searched = config.load("intent", {"data.path": "rows.csv", **parts.aim(0.9)})
    rows = space.evaluated_every(searched)
    chosen = config.load("intent", {"data.path": "rows.csv", "train.aggregation_frequency": k})
    every = parts.evaluated(chosen, rows)["train.evaluate_every"]
    assert every * chosen.recipe.rows_per_update == rows == 256


def progress(*times: float) -> list[dict[str, Any]]:
    return [{"kind": "progress", "time": time} for time in times]


def test_seconds_until_training_leave_the_update_itself_out() -> None:
    search = [
        {"kind": "slot_up", "time": 9.0},
        {"kind": "ordered", "time": 10.0, "trial": 0, "slot": 0},
        {"kind": "ordered", "time": 30.0, "trial": 1, "slot": 0},
        {"kind": "ordered", "time": 50.0, "trial": 0, "slot": 0},
        {"kind": "ordered", "time": 90.0, "trial": 2, "slot": 0},  # killed before its first update
    ]
    logs = {0: progress(18.0, 19.0, 20.0, 53.0, 54.0, 55.0), 1: progress(34.0, 35.0, 36.0)}
    assert figures.until_training(search, logs) == {"start": [7.0], "thaw": [2.0], "new": [3.0]}


def test_a_figure_without_values_is_none() -> None:
    assert figures.seconds_of([]) is None
    assert figures.seconds_of([1.0, 3.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "of": 3}


# ---------------------------------------------------------------------------------------------------------------- kills


def test_a_rung_that_was_told_or_trained_to_again_is_counted() -> None:
    journal = [{"kind": "reached", "trial": 0, "rung": rung} for rung in (0, 1, 1)]
    logs = {0: [{"kind": "paused", "update": 5}, {"kind": "paused", "update": 5}], 1: [{"kind": "paused", "update": 5}]}
    assert figures.twice(journal, {}) == 1
    assert figures.twice(journal, logs) == 2
    assert figures.twice(journal[:2], {1: logs[1]}) == 0


def test_events_that_a_resume_loses_or_changes_are_counted() -> None:
    before = [{"kind": "asked", "trial": 0}, {"kind": "asked", "trial": 1}]
    assert figures.lost(before, [*before, {"kind": "stopped"}]) == 0
    assert figures.lost(before, before[:1]) == 1
    assert figures.lost(before, [before[0], {"kind": "asked", "trial": 2}]) == 1


def test_journals_are_compared_without_what_clocks_say() -> None:
    event = {"kind": "reached", "trial": 0, "score": 0.5}
    assert figures.told([{**event, "time": 1.0, "seconds": 3.0}, {"kind": "spent", "seconds": 9.0}]) == [event]


def test_made_up_rows_are_the_same_each_time_and_distinct(tmp_path: Path) -> None:
    one, two = (kills.made_up(tmp_path / name) for name in ("one", "two"))
    assert [Path(path).read_text() for path in one[1::2]] == [Path(path).read_text() for path in two[1::2]]
    lines = [line for path in one[1::2] for line in Path(path).read_text().splitlines()[1:]]
    assert len(set(lines)) == len(lines) == kills.ROWS


# ------------------------------------------------------------------------------------------------------------- commands


def test_settings_are_written_as_the_command_reads_them() -> None:
    values = {"data.path": "rows.csv", "train.rows_per_update": None, "optim.lr": 1e-5, "tune.target": 0.9}
    given = commands.settings({**values, "tune.space": {"optim.lr": [1e-4, 2e-4]}, "tune.objective": "time"})
    made = config.load("intent", dict(config.parse_assignment(text) for text in given[1::2]))
    assert (made.recipe.optim.lr, made.recipe.train.rows_per_update) == (1e-5, None)
    assert (made.deploy.tune.objective, made.deploy.tune.space) == ("time", {"optim.lr": (1e-4, 2e-4)})


def test_a_folder_that_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    assert "--resume" not in commands.words("tune", "intent", [], {}, tmp_path)
    (tmp_path / "config.yaml").touch()
    assert commands.words("tune", "intent", [], {}, tmp_path)[-1] == "--resume"


def test_processes_are_known_by_the_mark_of_their_command() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'import time; time.sleep(60)'!r}])"
    environment = {**os.environ, commands.MARK: "of a test"}
    with subprocess.Popen([sys.executable, "-c", child], env=environment, start_new_session=True) as process:
        try:
            while len(found := commands.processes("of a test")) < 2:
                assert process.poll() is None
            assert process.pid in found
            assert commands.memory_mb("of a test") > 1
            assert commands.processes("of another") == []
        finally:
            os.killpg(process.pid, 9)
    assert commands.left("of a test") == 0


def test_a_command_that_fails_names_its_output(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"rtrain recipes ended with \d; its output is in .*log"):
        commands.run(["recipes", "show", "no-such-recipe"], tmp_path / "log")
    assert "no-such-recipe" in (tmp_path / "log").read_text()


# ------------------------------------------------------------------------------------------------------ other tasks


def test_a_search_of_other_rows_has_a_folder_of_its_own(tmp_path: Path) -> None:
    job = next(job for job in tasks.JOBS if job.name == others.SETS[0])
    one, two = (others.place(parts.Work(tmp_path, tmp_path, rows, 2, 3, 24, 5), job) for rows in (1000, 2000))
    assert one != two
    assert one.name == two.name == job.folder


def test_essays_are_told_by_the_error_that_was_searched_for_and_kappa_beside(tmp_path: Path) -> None:
    """The winner has the lower error, and the lower kappa."""
    journal = [asked(0, by="recipe"), asked(1, {"optim.lr": 1e-4})]
    journal += [came_to(number, 0, score) for number, score in enumerate((-0.5, -0.4))]
    journal += [finished(number, -0.4) for number in range(2)]
    journal += [{"kind": "chosen", "best": 1, "verdict": {"kind": "better"}}]
    made = make_search(tmp_path, journal, "essay")
    made.append("searched", best=1, trials=2)
    for number, scores in enumerate(({"neg_rmse": -0.5, "qwk": 0.7}, {"neg_rmse": -0.4, "qwk": 0.6})):
        made.trial(number).summary.write_text(json.dumps({"metrics": {"test": scores}}))
    found = others.told(made)
    assert (found["score"], found["gain"]) == ("neg_rmse", pytest.approx(0.1))
    assert found["beside"] == {"qwk": {"winner": 0.6, "default": 0.7}}


# --------------------------------------------------------------------------------------------------------- command line


def test_the_folder_may_stand_behind_the_parts() -> None:
    chosen = command.parse(["--only", "gain", "random", "data"])
    assert (chosen.data, chosen.only) == (Path("data").absolute(), ["gain", "random"])
    assert command.parse(["data", "--rows", "2000", "--searches", "2"]).rows == 2000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "name the folder"),
        (["data", "--only", "gains"], "no such part: gains"),
        (["data", "--rows", "10"], "--rows 10: write 1000 or more"),
        (["data", "--searches", "0"], "--searches 0: write 1 or more"),
        (["data", "--target", "90"], "--target 90: write a share, e.g. 0.9"),
    ],
)
def test_what_the_command_line_cannot_do_is_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(given)
    assert said in capsys.readouterr().err


def test_the_figures_of_a_part_are_shown_without_what_they_were_made_from() -> None:
    assert command.short({"gain_points": 1.0, "searches": [{}], "target": None}) == {"gain_points": 1.0, "target": None}


def test_the_program_tells_its_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.search", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert all(part in done.stdout for part in command.PARTS)


def test_what_a_search_cost_is_kept_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "cost-cost.json"
    place.write_text(json.dumps({"seconds": 5.0}))
    assert commands.cost_of(tmp_path / "cost") == {"seconds": 5.0}
    assert commands.cost_of(tmp_path / "other") is None
