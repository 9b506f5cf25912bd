"""The training benchmark's parts that train nothing: figures, commands, sweeps, rows, and what is read from a run."""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import budgets, figures, ours, rows, sides, time_to, train
from benchmarks.budgets import Budget
from benchmarks.peers import common, mean_pooling
from rtrain import config
from rtrain.config import Model
from rtrain.network import model
from rtrain.tasks import base
from tests.tiny import make_encoder

FOLDER = Path("/somewhere")
WORK = sides.Work(
    FOLDER,
    FOLDER / "model",
    rows.Files(FOLDER / "rows.csv", FOLDER / "test.csv"),
    rows.Files(FOLDER / "equal.csv", FOLDER / "equal-test.csv"),
    (0, 1),
    FOLDER / "store",
)
KEYS = (
    *("vs_hf_default", "vs_hf_grouped", "vs_hf_grouped_k4", "vs_ray_documented"),
    *("harness_vs_ddp", "vs_ddp", "scaling_2_over_1_k1", "scaling_2_over_1_k4", "input_wait_share", "first_batch_s"),
    *("pad_ratio", "exchange_ms", "exchange_ms_gloo", "peak_share"),
    "equal_length_vs_hf",
)
ACCELERATE = "vs_accelerate"
GAINS = (*("gain_gradient_compression", "gain_sharded_optimizer"),)


def side(speed: float, **more: float) -> dict[str, float]:
    """A side that had 1,000 rows at `speed` rows per second."""
    return {"rows": 1000.0, "seconds": 1000.0 / speed, "loss": 1.0, **more}


# ------------------------------------------------------------------------------------------------------------- figures


def test_the_keys_are_those_that_were_promised() -> None:
    known = {figure.key for figure in figures.figures(ours.TECHNIQUES, ours.OPTIONS)}
    assert known == {*KEYS, *GAINS, ACCELERATE}
    assert [figure.key for figure in train.figures_for(None)[0]] == list(KEYS)
    assert [figure.key for figure in train.figures_for(["gains", "pad_ratio"])[0]] == ["pad_ratio", *GAINS]


def test_a_ratio_is_of_one_round_and_its_median_of_all() -> None:
    # Round by round the ratios are 2, 3 and 2.5; the ratio of the sides' medians would be 2.4.
    rounds = [{"ours": side(ours), "hf_default": side(theirs)} for ours, theirs in ((100, 50), (150, 50), (120, 48))]
    (figure,) = (one for one in figures.figures(()) if one.key == "vs_hf_default")
    found = figures.evaluate([figure], rounds)["vs_hf_default"]
    assert found["values"] == pytest.approx([2, 3, 2.5])
    assert (found["median"], found["min"], found["max"], found["rounds"]) == pytest.approx((2.5, 2, 3, 3))
    assert (found["floor"], found["goal"], found["floor_met"], found["goal_met"]) == (2.0, 2.8, True, False)


@pytest.mark.parametrize(
    ("values", "floor_met", "goal_met"), [((0.001, 0.002), True, True), ((0.001, 0.02), False, False)]
)
def test_of_a_wait_less_is_better(values: tuple[float, ...], floor_met: bool, goal_met: bool) -> None:
    (figure,) = (one for one in figures.figures(()) if one.key == "input_wait_share")
    rounds = [{"ours": {"input_wait_share": value}} for value in values]
    found = figures.evaluate([figure], rounds)["input_wait_share"]
    assert (found["floor_met"], found["goal_met"]) == (floor_met, goal_met)


def test_the_share_of_the_peak_counts_each_weight_three_times() -> None:
    # 6 x (10 x 400 + 100 x 20) = 36,000 operations in 2 s by 2 processes: 9,000 a second, a tenth of the peak.
    one = {
        "ours": {"real_tokens": 400.0, "rows": 20.0, "seconds": 2.0},
        "probe": {"weights_per_token": 10.0, "weights_per_row": 100.0, "processes": 2.0, "gemm_flops": 90_000.0},
    }
    assert figures.peak_share(one) == pytest.approx(0.1)


def test_a_technique_alone_is_compared_with_the_loop_without_it() -> None:
    single = {one.key: one.sides for one in figures.figures(["packing"])}
    assert single["gain_packing"] == ("ours", "harness")  # the same run: it is not made twice
    several = {one.key: one.sides for one in figures.figures(["packing", "exchange"])}
    assert several["gain_exchange"] == ("ours", "without_exchange")


def test_sides_run_once_a_round_and_take_turns() -> None:
    names = figures.sides(figures.figures(ours.TECHNIQUES, ours.OPTIONS))
    assert len(names) == len(set(names))
    assert set(names) <= {*sides.OWN, *sides.PEERS, sides.PROBE}
    assert figures.turn(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert figures.turn(["a", "b", "c"], 1) == ["c", "b", "a"]


def test_the_tables() -> None:
    found = {"vs_x": {**figures.summary([1.0, 2.0, 4.0]), "floor": 1.15, "goal": None}}
    assert figures.table(found).split("\n")[2] == "| vs_x | 2 | 1 .. 4 | 3 | 1.15 |  |"
    shown = figures.side_table({"ours": [side(100), side(200), side(150)], "probe": [{"exchange_ms": 1.0}]})
    assert shown.split("\n")[2:] == ["| ours | 150.0 | 1.000 | 1000 |"]


# ------------------------------------------------------------------------------------------------------- what ours says


def events(begin: float, updates: list[tuple[float, int]], first_batch: float = 1.0) -> list[dict[str, Any]]:
    """Events of a run that starts at `begin`; `updates`: (seconds after the first one began, rows so far)."""
    progress = [
        {
            "kind": "progress",
            "time": begin + first_batch + seconds,
            "update": number + 1,
            "rows": seen,
            "loss": 4.0 - number,
        }
        for number, (seconds, seen) in enumerate(updates)
    ]
    seconds = {"first_batch": first_batch, "train": 3.0, "input_wait": 1.0}
    trained = {"kind": "trained", "time": begin + 100, "updates": len(updates), "rows_seen": updates[-1][1]}
    tokens = {"real_tokens": 1000, "padded_tokens": 1100, "seconds": seconds}
    return [{"kind": "started", "time": begin}, *progress, {**trained, **tokens}]


def test_a_run_is_clocked_from_its_first_update_to_its_last() -> None:
    found = ours.measured(events(100.0, [(2.0, 64), (3.0, 128), (5.0, 192), (6.0, 256)]))
    assert figures.rate(found) == pytest.approx(256 / 6)
    assert (found["loss"], found["pad_ratio"], found["input_wait_share"]) == pytest.approx((1.0, 1.1, 0.25))


def test_a_run_that_was_started_again_is_no_measurement() -> None:
    log = events(100.0, [(2.0, 64)])
    with pytest.raises(ValueError, match="unpack"):
        ours.measured([{"kind": "started", "time": 90.0}, *log])


def test_runs_apart_count_while_both_train() -> None:
    # From 103 to 109 both train: 6 s at 10 rows/s, and 6 s at 20 rows/s.
    first = events(100.0, [(8.0, 80)])
    second = events(102.0, [(5.0, 100), (10.0, 200)])
    found = ours.together([first, second])
    assert (found["rows"], found["seconds"]) == pytest.approx((6 * 10 + 6 * 20, 6))
    with pytest.raises(ValueError, match="did not train at the same time"):
        ours.together([first, events(200.0, [(1.0, 10)])])


def test_evaluations_are_left_out_of_the_time_to_a_score() -> None:
    # An update takes 1 s; after the second and the fourth an evaluation takes 10 s.
    log = events(0.0, [(1.0, 1), (2.0, 2), (13.0, 3), (14.0, 4), (25.0, 5), (26.0, 6)])
    for update, score in ((2, 0.5), (4, 0.91), (6, 0.8)):
        log.append({"kind": "evaluated", "split": "valid", "update": update, "scores": {"accuracy": score}})
    assert ours.seconds_until(log, "accuracy", 0.9) == pytest.approx(4.0)
    assert ours.seconds_until(log, "accuracy", 0.95) is None


def test_seeds_without_an_answer_are_told_and_not_counted() -> None:
    found: list[dict[str, float | None]] = [
        {"seed": 0, "ours": 10.0, "hf_grouped": 15.0, "hf_grouped_mean": 13.0},
        {"seed": 1, "ours": 10.0, "hf_grouped": None, "hf_grouped_mean": 12.0},
    ]
    as_it_comes, by_hand = (figure.key for figure in figures.TIMES)
    assert (as_it_comes, by_hand) == ("time_to_090_vs_hf_grouped", "time_to_090_vs_hf_grouped_mean")
    both = time_to.result(found, figures.TIMES)
    assert {key: one["values"] for key, one in both.items()} == {as_it_comes: [1.5], by_hand: [1.3, 1.2]}
    assert [one["seconds"] for one in both.values()] == [found, found]
    assert (both[by_hand]["floor_met"], both[by_hand]["goal_met"]) == (True, False)
    assert list(time_to.result(found[1:], figures.TIMES)) == [by_hand]
    assert figures.table(both)
    with pytest.raises(SystemExit, match="in no seed"):
        time_to.result(found[1:], figures.TIMES[:1])
    assert time_to.hf_seconds({"seen": [[1.0, 0.5], [2.0, 0.9], [3.0, 0.8]]}) == 2.0


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", sides.OWN)
def test_commands_of_ours_are_of_settings_that_there_are(name: str) -> None:
    commands = sides.own_commands(name, WORK, seed=3)
    chosen = []
    for run, command in commands.items():
        assert command[command.index("--out") + 1] == str(run)
        texts = [command[place + 1] for place, word in enumerate(command) if word == "--set"]
        chosen.append(config.load("intent", dict(config.parse_assignment(text) for text in texts)).recipe)
    workers = 1 if sides.OWN[name].apart else 2
    k = 4 if name.endswith("k4") else 1
    assert len(commands) * workers == common.PROCESSES
    assert {(one.train.workers, one.rows_per_update) for one in chosen} == {(workers, workers * 32 * k)}
    assert [one.train.seed for one in chosen] == [3, 4][: len(commands)]


def test_the_harness_is_ours_without_any_technique() -> None:
    assert dict(sides.OWN["harness"].settings) == ours.PLAIN
    known = set(config.dotted_names())
    assert ours.TECHNIQUES
    for settings in ours.TECHNIQUES.values():
        assert set(settings) <= known


def test_commands_of_the_peers() -> None:
    budget = Budget(loader_workers=1)
    command = sides.peer_command("hf_grouped_k4", WORK, 2, budget, FOLDER / "out.json")
    assert command[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = dict(zip(command[8::2], command[9::2], strict=True))
    assert options == {
        "--model": "/somewhere/model",
        "--rows": "/somewhere/rows.csv",
        "--out": "/somewhere/out.json",
        "--sampling": "group_by_length",
        "--passes": "4",
        "--loader-workers": "1",
        "--attention": "sdpa",
        "--seed": "2",
    }
    assert "/somewhere/equal.csv" in sides.peer_command("hf_equal", WORK, 0, budget, FOLDER)
    assert "/somewhere/store" in sides.peer_command("ddp", WORK, 0, budget, FOLDER)
    assert "torch.distributed.run" not in sides.peer_command("ray_documented", WORK, 0, budget, FOLDER)


def test_of_the_time_to_a_score_both_peers_train_as_rtrain_does() -> None:
    for name in ("hf_grouped", "hf_grouped_mean"):
        command = time_to.hf_command(name, WORK, 1, Budget(), FOLDER / "out.json")
        options = dict(zip(command[8::2], command[9::2], strict=True))
        assert (options["--sampling"], options["--until"], options["--seed"]) == ("group_by_length", "0.9", "1")
        assert options.get("--pooling", "own") == ("mean" if name == "hf_grouped_mean" else "own")
    texts = time_to.own_command(WORK, 1, FOLDER / "run")
    chosen = dict(config.parse_assignment(text) for before, text in itertools.pairwise(texts) if before == "--set")
    recipe = config.load("intent", chosen).recipe
    assert (recipe.model.pooling, recipe.train.epochs, recipe.optim.lr) == (
        "auto",
        time_to.EPOCHS,
        common.LEARNING_RATE,
    )
    # Where speed alone is compared, the head is the one that Transformers' classifiers have.
    assert ours.settings(2, 1, 0)["model.pooling"] == "own"


def test_the_classifier_by_hand_reads_the_mean_as_rtrain_s_does(tmp_path: Path) -> None:
    peer = mean_pooling.MeanPooled(make_encoder(tmp_path), 3, "eager").eval()
    network: Any = model.build(tmp_path, base.get("classification"), ("a", "b", "c"), 0, Model(pooling="mean")).eval()
    network.classifier.load_state_dict(peer.classifier.state_dict())
    ids = torch.tensor([[1, 5, 6, 7, 2, 0], [1, 5, 2, 0, 0, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    labels = torch.tensor([2, 0])
    found, expected = peer(**inputs, labels=labels), network(**inputs, labels=labels)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    found.loss.backward()
    assert [name for name, weight in peer.named_parameters() if weight.grad is None] == []


def test_a_program_of_a_peer_takes_its_command() -> None:
    command = sides.peer_command("accelerate", WORK, 2, Budget(), FOLDER / "out.json")
    parsed = common.parser("accelerate_loop", "").parse_args(
        command[command.index("benchmarks.peers.accelerate_loop") + 1 :]
    )
    assert (parsed.rows, parsed.seed, parsed.passes, parsed.attention) == (FOLDER / "rows.csv", 2, 1, "sdpa")


@pytest.mark.parametrize(
    ("arguments", "only"),
    [
        (["--json", "--only", "vs_ddp", "pad_ratio", "DATA"], ["vs_ddp", "pad_ratio"]),
        (["DATA", "--only", "time_to_090"], ["time_to_090"]),
        (["--rounds", "6", "DATA"], None),
    ],
)
def test_the_command_line(arguments: list[str], only: list[str] | None) -> None:
    chosen = train.parse(arguments)
    assert (chosen.data.name, chosen.only) == ("DATA", only)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "vs_nobody", "DATA"], "no such key: vs_nobody"),
        (["--only", "vs_ddp"], "name the folder"),
        (["DATA", "--rows", "63"], "even number"),
        (["DATA", "--rounds", "0"], "1 or more"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.parse(arguments)
    assert message in capsys.readouterr().err


def test_only_what_is_asked_for_runs() -> None:
    wants, timed = train.figures_for(["pad_ratio", "harness_vs_ddp"])
    assert (figures.sides(wants), timed) == (["harness", "ddp", "ours"], [])
    assert train.figures_for(["time_to_090"]) == ([], list(figures.TIMES))
    assert train.figures_for(["time_to_090_vs_hf_grouped_mean"])[1] == [figures.TIMES[1]]
    assert not train.figures_for(None)[1]


# -------------------------------------------------------------------------------------------------------------- budgets


def test_a_sweep_keeps_what_is_faster_along_each_axis() -> None:
    def measure(budget: Budget) -> float:
        return 50.0 + 5 * (budget.allocator == "kept") - 20 * (budget.threads == 2) + 3 * budget.loader_workers

    axes = {"allocator": ("kept", "other"), "threads": (2,), "loader_workers": (1,)}
    best, tried = budgets.sweep(axes, measure)
    assert best == Budget(allocator="kept", loader_workers=1)
    assert list(tried.values()) == [50, 55, 50, 35, 58]
    assert tried[budgets.label(best)] == 58


def test_a_sweep_is_kept_beside_the_results_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    assert budgets.load(path) == {}
    budgets.save(path, {"ddp": (Budget(attention="eager"), {"x": 1.0})}, {"cores": 2})
    budgets.save(path, {"hf_default": (Budget(threads=2), {})}, {"cores": 2})
    found = budgets.load(path)
    assert found == {"ddp": Budget(attention="eager"), "hf_default": Budget(threads=2)}
    chosen = train.budgets_of(["ours", "ddp", "hf_equal", "accelerate"], found)
    assert chosen == {"ddp": found["ddp"], "hf_equal": found["hf_default"], "accelerate": Budget(allocator="kept")}


@pytest.mark.parametrize("peer", [name for name in sides.PEERS if name not in sides.SAME_BUDGET])
def test_what_is_swept_is_what_a_budget_has(peer: str) -> None:
    for axis, values in budgets.axes(peer).items():
        for value in values:
            assert getattr(Budget(**{axis: value}), axis) == value != getattr(Budget(), axis)


def test_a_side_inherits_no_setting_of_speed() -> None:
    shell = {"PATH": os.defpath, "OMP_NUM_THREADS": "8", "MALLOC_ARENA_MAX": "1", "LD_PRELOAD": "x.so"}
    plain = budgets.environment(Budget(), shell, FOLDER)
    assert (plain["OMP_NUM_THREADS"], plain["PATH"], plain["PYTHONPATH"]) == ("1", os.defpath, "/somewhere")
    assert not {"MALLOC_ARENA_MAX", "LD_PRELOAD"} & set(plain)
    kept = budgets.environment(Budget(threads=2, allocator="kept"), shell, FOLDER)
    assert (kept["OMP_NUM_THREADS"], kept["MALLOC_MMAP_THRESHOLD_"]) == ("2", "67108864")


# ----------------------------------------------------------------------------------------------------------------- rows


def test_a_sample_is_the_same_in_every_call_and_its_test_has_its_labels(tmp_path: Path) -> None:
    source = tmp_path / "train.csv"
    lines = [f"text {number},label {number % 7}" for number in range(300)]
    source.write_text("\n".join(["text,category", *lines, lines[0]]) + "\n", encoding="utf-8")
    found = [rows.sample(source, tmp_path, 100) for _ in range(2)]
    texts, labels = common.read(found[0].train)
    assert (len(set(texts)), found[0]) == (100, found[1])
    others, names = common.read(found[0].test)
    assert len(others) == rows.TEST_ROWS
    assert not set(others) & set(texts)
    assert set(names) <= set(labels)
    with pytest.raises(SystemExit, match="--rows 300"):
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


def test_a_watch_runs_from_the_first_update_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 11.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    watch = common.Watch()
    for _ in range(2):
        watch.begin()
        watch.end()
    assert math.isclose(watch.seconds, 5.0)


def test_the_document_has_every_figure_and_what_it_was_made_from() -> None:
    rounds = [{"ours": side(100, pad_ratio=1.0), "ddp": side(80), "probe": {"exchange_ms": 3.0}}] * 2
    wants = [one for one in figures.figures(()) if one.key in ("vs_ddp", "pad_ratio", "exchange_ms")]
    found = figures.evaluate(wants, rounds)
    made = json.loads(json.dumps(train.document(found, rounds, {"ddp": Budget(threads=2)}, WORK, {"rows": 1000})))
    assert made["vs_ddp"]["median"] == pytest.approx(1.25)
    assert made["about"] == {"rows": 1000}
    assert set(made["sides"]) == {"ours", "ddp", "probe"}
    ddp = made["sides"]["ddp"]
    assert (ddp["budget"]["threads"], ddp["rows_per_second"]["median"]) == (2, pytest.approx(80))
    assert "benchmarks.peers.ddp_loop" in ddp["programs"][0]
    assert made["sides"]["probe"]["rows_per_second"] is None
