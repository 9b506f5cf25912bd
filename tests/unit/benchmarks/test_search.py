"""The figures of the search's benchmark, and its command line. The searches themselves are the benchmark's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search import commands, figures, parts
from benchmarks.search.figures import FinishedSearch, Trained
from rtrain import config
from rtrain.core.run_folder import Run
from tune.history import FinalResult, History, RungResult, Trial

# ------------------------------------------------------------------------------------------------------------- the rows


def rung_result(rung: int, rows: int) -> RungResult:
    return RungResult(rung, rows // 10, rows, 0.5)


def test_rows_up_to_the_last_rung_are_the_search_s_and_the_others_its_end() -> None:
    finished = FinalResult(100, 1000, 0.9, 0.9, 50)
    trials = (
        Trial(0, rung_results=(rung_result(0, 200), rung_result(1, 400)), final_result=finished),
        Trial(1, rung_results=(rung_result(0, 200),)),
        Trial(2, divergence="the loss rose"),
        Trial(3, rung_results=(rung_result(0, 200),), error="no disk"),
        Trial(4, repeat_of=0, seed=1, final_result=finished),
        Trial(5, repeat_of=1, seed=1, rung_results=(rung_result(0, 200),)),
    )
    # Trial 5 was begun to see how much a seed makes.
    # Trial 2 diverged after 70 rows; trial 3 failed at 250, on its way to the next rung.
    result = figures.rows_of_search(History(trials), {0: 1000, 1: 200, 2: 70, 3: 250, 4: 990, 5: 200})
    assert result == (400 + 200 + 70 + 250 + 200, 600 + 990)


def test_rows_of_a_log_are_those_of_all_starts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rows in (64, 128):
        run.append_event("progress", rows=rows)
    run.append_event("started")
    run.append_event("progress", rows=32)
    assert parts.rows_seen(run) == 128 + 32


# ------------------------------------------------------------------------------------------------------------- the gain


def finished_search(test: float, rows: int = 4000, verdict: Mapping[str, Any] | None = None) -> FinishedSearch:
    return FinishedSearch(0, {}, test, 0.80, 8, rows, 2000, 60.0, verdict or {})


def test_the_gain_is_told_in_points_and_in_deviations_of_the_seeds() -> None:
    result = figures.gain([finished_search(0.86), finished_search(0.82)], [0.79, 0.80, 0.81], full_rows=1000)
    assert result["gain_points"] == pytest.approx(4.0)
    assert result["worst_search_points"] == pytest.approx(2.0)
    assert result["default_deviation_points"] == pytest.approx(1.0)
    assert result["worst_search_deviations"] == pytest.approx(2.0)
    assert (result["search_full_runs"], result["end_full_runs"]) == ([4.0, 4.0], [2.0, 2.0])


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
    assert figures.gain([finished_search(0.8, verdict=verdict)], [0.8], 1000)[name] == behind


# -------------------------------------------------------------------------------------------------------- random search

POOL = [Trained(0.1, 0.4), Trained(0.3, 0.6), Trained(0.2, 0.9)]


def test_the_best_of_random_runs_is_chosen_by_validation_and_told_by_test() -> None:
    # The pairs of the pool have the best validation scores 0.3, 0.3 and 0.2: test scores 0.6, 0.6 and 0.9.
    assert figures.best_of(POOL) == pytest.approx([(0.4 + 0.6 + 0.9) / 3, (0.6 + 0.6 + 0.9) / 3, 0.6])


def test_the_rows_of_random_search_are_those_of_the_runs_that_it_takes() -> None:
    # 0.71 less a deviation of 0.01 is expected of two runs, which are 2,000 rows.
    result = figures.against_random(POOL, [finished_search(0.71, rows=500)], [0.69, 0.70, 0.71], full_rows=1000)
    assert (result["random_runs_needed"], result["rows_vs_random"]) == (2, 0.25)
    assert result["rows_vs_random_less_than"] is None
    # Student's t of 2 degrees of freedom is 4.303: 0.70 +- 4.303 x 0.01 x sqrt(4 / 3).
    assert result["default_interval"] == pytest.approx((0.6503, 0.7497), abs=1e-4)
    assert result["runs_above_the_default"] == 1


def test_a_pool_that_never_comes_there_tells_how_many_rows_are_too_few() -> None:
    result = figures.against_random(POOL, [finished_search(0.99, rows=500)], [0.70], full_rows=1000)
    assert (result["random_runs_needed"], result["rows_vs_random"]) == (None, None)
    assert result["rows_vs_random_less_than"] == pytest.approx(1 / 6)
    assert result["runs_above_the_default"] is None


# ------------------------------------------------------------------------------------------------------------ commands


def test_settings_are_written_as_the_command_reads_them() -> None:
    values = {"data.path": "rows.csv", "train.global_batch_size": None, "optim.lr": 1e-5, "tune.target": 0.9}
    arguments = commands.settings(
        {**values, "tune.space": {"optim.lr": [1e-4, 2e-4]}, "tune.objective": "time_to_target"}
    )
    parsed_config = config.load_config("intent", dict(config.parse_assignment(text) for text in arguments[1::2]))
    assert (parsed_config.recipe.optim.lr, parsed_config.recipe.train.global_batch_size) == (1e-5, None)
    assert (parsed_config.deploy.tune.objective, parsed_config.deploy.tune.space) == (
        "time_to_target",
        {"optim.lr": (1e-4, 2e-4)},
    )


def test_a_folder_that_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    assert "--resume" not in commands.words("tune", "intent", [], {}, tmp_path)
    (tmp_path / "config.yaml").touch()
    assert commands.words("tune", "intent", [], {}, tmp_path)[-1] == "--resume"


def test_a_command_that_fails_leaves_its_output(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        commands.run(["recipes", "show", "no-such-recipe"], tmp_path / "log")
    assert "no-such-recipe" in (tmp_path / "log").read_text()


def test_rows_are_the_same_in_each_call(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    lines = "".join(f"text {number},label\n" for number in range(30))
    for name in ("train", "test"):
        (tmp_path / "banking77" / f"{name}.csv").write_text("text,category\n" + lines)
    work = parts.Work(tmp_path, tmp_path / "out", 20, 2, 3, 24)
    train = Path(work.files()[1])
    first = train.read_text()
    assert (len(first.splitlines()), work.files()[1], train.read_text()) == (21, str(train), first)
    with pytest.raises(SystemExit):
        parts.Work(tmp_path, tmp_path / "out", 31, 2, 3, 24).files()
