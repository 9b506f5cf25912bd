"""The training benchmark: figures, commands, rows, measurements of a run, and one round with a plain loop."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, ours, rows, sides
from benchmarks.peers import common
from rtrain import config
from tests.conftest import write_rows
from tests.support.root import ROOT

FOLDER = Path("/somewhere")
WORK = sides.Work(
    FOLDER,
    FOLDER / "model",
    rows.Files(FOLDER / "rows.csv", FOLDER / "test.csv"),
    rows.Files(FOLDER / "equal.csv", FOLDER / "equal-test.csv"),
    (0, 1),
    FOLDER / "store",
)


def side(speed: float, **more: float) -> dict[str, float]:
    """A side that had 1,000 rows at `speed` rows per second."""
    return {"rows": 1000.0, "seconds": 1000.0 / speed, "loss": 1.0, **more}


def figure(key: str) -> figures.Figure:
    return next(candidate_figure for candidate_figure in figures.FIGURES if candidate_figure.key == key)


def test_a_ratio_is_of_one_round_and_its_median_of_all() -> None:
    # Round by round the ratios are 2, 3 and 2.5; the ratio of the sides' medians would be 2.4.
    rounds = [{"ours": side(ours), "hf_default": side(theirs)} for ours, theirs in ((100, 50), (150, 50), (120, 48))]
    result = figures.evaluate([figure("vs_hf_default")], rounds)["vs_hf_default"]
    assert result["values"] == pytest.approx([2, 3, 2.5])
    assert (result["median"], result["min"], result["max"], result["rounds"]) == pytest.approx((2.5, 2, 3, 3))
    assert (result["floor_met"], result["goal_met"]) == (True, False)


@pytest.mark.parametrize(
    ("values", "floor_met", "goal_met"), [((0.001, 0.002), True, True), ((0.001, 0.02), False, False)]
)
def test_of_a_wait_less_is_better(values: tuple[float, ...], floor_met: bool, goal_met: bool) -> None:
    rounds = [{"ours": {"input_wait_share": value}} for value in values]
    result = figures.evaluate([figure("input_wait_share")], rounds)["input_wait_share"]
    assert (result["floor_met"], result["goal_met"]) == (floor_met, goal_met)


def test_sides_run_once_a_round_and_take_turns() -> None:
    names = figures.sides(figures.FIGURES)
    assert len(names) == len(set(names))
    assert set(names) == {*sides.OWN_SIDES, *sides.PEERS}
    assert [figures.turn(["a", "b", "c"], number) for number in (0, 1)] == [["a", "b", "c"], ["c", "b", "a"]]


def events(begin: float, updates: list[tuple[float, int]], first_batch: float = 1.0) -> list[dict[str, Any]]:
    """Events of a run that starts at `begin`; `updates`: (seconds after the first one began, rows so far)."""
    progress = [
        {
            "kind": "progress",
            "time": begin + first_batch + seconds,
            "step": number + 1,
            "rows": num_rows,
            "loss": 4.0 - number,
        }
        for number, (seconds, num_rows) in enumerate(updates)
    ]
    seconds = {"first_batch": first_batch, "train": 3.0, "input_wait": 1.0}
    trained = {"kind": "trained", "time": begin + 100, "steps": len(updates), "rows_seen": updates[-1][1]}
    tokens = {"real_tokens": 1000, "padded_tokens": 1100, "seconds": seconds}
    return [{"kind": "started", "time": begin}, *progress, {**trained, **tokens}]


def test_a_run_is_clocked_from_its_first_update_to_its_last() -> None:
    result = ours.measured(events(100.0, [(2.0, 64), (3.0, 128), (5.0, 192), (6.0, 256)]))
    assert figures.rate(result) == pytest.approx(256 / 6)
    assert (result["loss"], result["pad_ratio"], result["input_wait_share"]) == pytest.approx((1.0, 1.1, 0.25))


def test_runs_apart_count_while_both_train() -> None:
    # From 103 to 109 both train: 6 s at 10 rows/s, and 6 s at 20 rows/s.
    first = events(100.0, [(8.0, 80)])
    second = events(102.0, [(5.0, 100), (10.0, 200)])
    result = ours.together([first, second])
    assert (result["rows"], result["seconds"]) == pytest.approx((6 * 10 + 6 * 20, 6))
    with pytest.raises(SystemExit):
        ours.together([first, events(200.0, [(1.0, 10)])])


@pytest.mark.parametrize("name", sides.OWN_SIDES)
def test_commands_of_ours_are_of_settings_that_there_are(name: str) -> None:
    commands = sides.own_commands(name, WORK, seed=3)
    recipes = []
    for command in commands.values():
        texts = [command[place + 1] for place, word in enumerate(command) if word == "--set"]
        recipes.append(config.load_config("intent", dict(config.parse_assignment(text) for text in texts)).recipe)
    workers = 1 if sides.OWN_SIDES[name].is_isolated else 2
    k = 4 if name.endswith("k4") else 1
    assert len(commands) * workers == common.PROCESSES
    assert {(recipe.train.workers, recipe.global_batch_size) for recipe in recipes} == {(workers, workers * 32 * k)}
    assert [recipe.train.seed for recipe in recipes] == [3, 4][: len(commands)]


def test_a_side_inherits_no_setting_of_speed() -> None:
    shell = {"PATH": os.defpath, "OMP_NUM_THREADS": "8", "MALLOC_ARENA_MAX": "1", "LD_PRELOAD": "x.so"}
    result = sides.environment(shell)
    assert (result["OMP_NUM_THREADS"], result["PATH"]) == ("1", os.defpath)
    assert "LD_PRELOAD" not in result
    assert result["MALLOC_ARENA_MAX"] != "1"


def test_a_sample_is_the_same_in_every_call_and_its_test_has_its_labels(tmp_path: Path) -> None:
    source = tmp_path / "train.csv"
    lines = [f"text {number},label {number % 7}" for number in range(300)]
    source.write_text("\n".join(["text,category", *lines, lines[0]]) + "\n", encoding="utf-8")
    result = [rows.sample(source, tmp_path, 100) for _ in range(2)]
    texts, labels = common.read(result[0].train)
    assert (len(set(texts)), result[0]) == (100, result[1])
    other_rows, names = common.read(result[0].test)
    assert len(other_rows) == rows.TEST_ROWS
    assert not set(other_rows) & set(texts)
    assert set(names) <= set(labels)
    with pytest.raises(SystemExit):
        rows.sample(source, tmp_path, 300)


def test_rows_of_equal_length_differ_and_tell_their_class(tmp_path: Path) -> None:
    words = [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    files = rows.equal(words, tmp_path, 200)
    texts, labels = common.read(files.train)
    assert len(set(texts)) == 200
    assert {len(text.split()) for text in texts} == {rows.EQUAL_WORDS}
    assert all(text.split().count(label) == 3 for text, label in zip(texts, labels, strict=True))
    assert set(labels) == set(words[: rows.CLASSES])


def test_whole_words_are_single_tokens(tmp_path: Path) -> None:
    vocabulary = {"[PAD]": 0, "##ing": 2, "zebra": 3, "Card": 4, "bank": 1, "at": 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    assert rows.whole_words(tmp_path) == ["bank", "zebra"]


def test_the_loss_that_is_reported_is_of_the_last_quarter() -> None:
    assert common.last_quarter([8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 1.0, 3.0]) == 2.0
    assert common.last_quarter([5.0]) == 5.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_round_beside_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    write_rows(
        tmp_path / "banking77" / "train.csv", [(f"t {n}", "ab"[n % 2]) for n in range(200)], ("text", "category")
    )
    arguments = ["--json", "--rounds", "1", "--rows", "128", "--only", "vs_ddp", "--only", "pad_ratio", "--out"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", str(tmp_path), *arguments, str(tmp_path / "train.json")],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["vs_ddp"]["median"] > 0
    assert result["pad_ratio"]["median"] >= 1
    assert set(result["sides"]) == {"ours", "ddp"}
    assert result == json.loads((tmp_path / "train.json").read_text())
