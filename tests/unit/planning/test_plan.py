"""Plans of runs: prices, hours, the layout that fits, and the verb."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rtrain import config as configuration
from rtrain.cli import app as cli
from rtrain.cluster import capacity, pricing
from rtrain.config import Config
from rtrain.core.errors import ConfigError
from rtrain.parallel.layout import ParallelLayout
from rtrain.planning import memory_estimate, placement, plan, run_facts, throughput
from rtrain.planning.memory_estimate import WorkerMemory
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

GB = 1e9
SHAPE = run_facts.EncoderShape(hidden_size=384, num_layers=6, intermediate_size=1536, vocab_size=30522)
ROWS = run_facts.uniform_row_stats(10_000, 32)
PRICES = pricing.load_price_table()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def cluster() -> placement.PlannedCluster:
    return placement.parse_cluster(yaml.safe_load((ROOT / "cluster.yaml").read_text()))


def configured(**settings: Any) -> Config:
    return configuration.load_config("intent", {name.replace("__", "."): value for name, value in settings.items()})


# ---------------------------------------------------------------------------------------------------------------- money


def test_prices_are_those_of_the_table_of_the_cluster_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("c7i.2xlarge: {on_demand: 0.5, spot: 0.1, interruptions: 0.2}\nown: {on_demand: 3}\n")
    prices = pricing.load_price_table(file, {"prices": {"own": 2.0, "other": 1.0}})
    assert prices["c7i.2xlarge"] == pricing.Price(0.5, 0.1, 0.2)
    assert prices["own"] == pricing.make_price(3.0)
    assert prices["other"].on_demand == 1.0
    assert prices["m7i.large"].on_demand == 0.101
    assert PRICES["c7i.2xlarge"].on_demand == 0.357


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(pricing.format_price_file(PRICES))
    prices = pricing.read_price_file(tmp_path / "prices.yaml")
    assert prices.keys() == PRICES.keys()
    assert prices["p5.48xlarge"].on_demand == 55.04


@pytest.mark.parametrize(
    "text", ["a: 1", "a: {spot: 1}", "a: {on_demand: -1}", "a: {on_demand: 1, sport: 2}", "- 1", "a: 2024-13-45", None]
)
def test_an_entry_that_is_no_price_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError):
        pricing.read_price_file(file)


def test_interruptions_repeat_and_are_paid_for() -> None:
    """4 nodes, 10 hours, one interruption per 100 node hours: 0.4 of them, half an hour each."""
    nodes = {"worker": (4, pricing.Price(1.0, 0.4, 0.01))}
    cost = placement.estimate_cost(10.0, nodes, pricing.make_price(0.1), repeated_s=1500, restart_s=300)
    assert cost.dollars == pytest.approx(10 * 4.1)
    repeated = 10 * 0.04 * 0.5 / (1 - 0.02)
    assert cost.repeated_hours == pytest.approx(repeated)
    assert cost.interruptions == pytest.approx(0.04 * (10 + repeated))
    assert cost.spot_dollars == pytest.approx((10 + repeated) * (4 * 0.4 + 0.1))


def test_nodes_that_are_taken_away_faster_than_they_train_never_end() -> None:
    nodes = {"worker": (100, pricing.Price(1.0, 0.4, 1.0))}
    assert placement.estimate_cost(1.0, nodes, None, repeated_s=60, restart_s=300) == placement.RunCost(
        1.0, 100.0, None, None, None
    )


# ----------------------------------------------------------------------------------------------------------- the way in


def chosen(config: Config, cluster: placement.PlannedCluster, encoder: Path, *totals: float) -> plan.PlacedLayout:
    """The choice among as many layouts as there are `totals`, each in GB of a worker."""
    layout, workers = placement.plan_placement(config, cluster), config.recipe.train.workers
    layouts = islice(plan.candidate_layouts(config, encoder, workers), len(totals))
    needs = [(way, WorkerMemory(total * GB, 0, 0, 0)) for way, total in zip(layouts, totals, strict=True)]
    return plan.choose_layout(config, cluster, layout, needs, PRICES)


@pytest.mark.parametrize(
    ("totals", "layout", "nodes"),
    [
        ((2, 1.5, 1.2, 1, 1), ParallelLayout(), 1),
        ((5, 4, 3, 2, 1), ParallelLayout(), 2),  # a node of 16 GB holds two workers of 5 GB in two thirds of its memory
        ((12, 9, 8, 7, 6), ParallelLayout(zero_stage=1), 4),
        ((14, 13, 12, 9), ParallelLayout(zero_stage=3), 4),
        ((14, 13, 12, 11, 13, 9), ParallelLayout(zero_stage=1, gradient_checkpointing=True), 4),
    ],
)
def test_the_first_way_that_fits_is_taken_on_as_many_nodes_as_it_takes(
    cluster: placement.PlannedCluster, encoder: Path, totals: tuple[float, ...], layout: ParallelLayout, nodes: int
) -> None:
    choice = chosen(configured(train__workers=4), cluster, encoder, *totals)
    assert (choice.layout, choice.nodes) == (layout, {"worker": nodes})
    assert layout.zero_stage != 1 or f"{totals[0]:,.0f},000 MB" in choice.reason or layout.gradient_checkpointing


def test_what_fits_in_no_way_is_refused(cluster: placement.PlannedCluster, encoder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(configured(train__workers=4), cluster, encoder, 14, 13, 12, 12, 12, 11)
    assert [problem.code for problem in error.value.problems] == ["out_of_memory"]


def test_a_gpu_that_is_too_small_is_told_by_its_own_memory(encoder: Path) -> None:
    """The host has enough memory."""
    t4 = {"resources": {"CPU": 32, "GPU": 1, "accelerator_type:T4": 1}, "max_workers": 4}
    types = {
        "head": {"resources": {"CPU": 8}, "node_config": {"InstanceType": "m7i.2xlarge"}},
        "t4": {**t4, "node_config": {"InstanceType": "g4dn.8xlarge"}},
    }
    config = configured(train__workers=4, train__device="gpu")
    cluster = placement.parse_cluster({"head_node_type": "head", "max_workers": 4, "available_node_types": types})
    layout = placement.plan_placement(config, cluster)
    needs = [(ParallelLayout(), WorkerMemory(24 * GB, 0, 0, 0, process=GB))]
    with pytest.raises(ConfigError) as error:
        plan.choose_layout(config, cluster, layout, needs, PRICES)
    [problem] = error.value.problems
    assert (problem.code, "16 GB" in problem.fix) == ("out_of_memory", True)


def test_only_one_worker_writes_checkpoints(cluster: placement.PlannedCluster) -> None:
    """Two thirds of a node of 16 GB are 10.4: with a copy of 6, two workers of 2 GB fit."""
    [kind] = [node_type for node_type in cluster.node_types if node_type.name == "worker"]
    for copy, slots in ((6, 2), (11, 0)):
        memory = WorkerMemory(2 * GB, 0, 0, 0, checkpoint=copy * GB)
        assert plan.slots_in_memory(memory, capacity.ResourceRequest("cpu"))(kind) == slots


def test_a_run_that_starts_with_fewer_is_planned_with_those_that_have_room(
    cluster: placement.PlannedCluster, encoder: Path
) -> None:
    config = configured(train__workers=64, train__min_workers=8)
    layout = placement.plan_placement(config, cluster)
    # 4 nodes of 8, less 5 for the data of 27
    assert (layout.workers, layout.available_workers, layout.min_workers) == (64, 27, 8)
    assert chosen(config, cluster, encoder, 1).nodes == {"worker": 4}


def two_types(first: dict[str, Any], second: dict[str, Any]) -> placement.PlannedCluster:
    """A head without room, and two types of worker by their `node_config`."""
    kinds = {
        "head": {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}},
        "first": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": first},
        "second": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": second},
    }
    file = {"provider": {"type": "aws"}, "head_node_type": "head", "max_workers": 4, "available_node_types": kinds}
    return placement.parse_cluster(file)


SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@pytest.mark.parametrize("unpriced", [{"InstanceType": "x9.large"}, {"InstanceType": "x9.large", **SPOT}, {}])
def test_a_type_without_a_price_is_never_the_cheapest(encoder: Path, unpriced: dict[str, Any]) -> None:
    """`c7i.8xlarge` costs more than 1 $ an hour. The type without a price is taken where the other has no room."""
    cluster = two_types(unpriced, {"InstanceType": "c7i.8xlarge"})
    for workers, nodes in ((4, {"second": 1}), (20, {"second": 3})):
        choice = chosen(configured(train__workers=workers), cluster, encoder, 1)
        assert choice.nodes == nodes
    few = replace(cluster, node_types=tuple(replace(kind, max_nodes=2) for kind in cluster.node_types))
    choice = chosen(configured(train__workers=20), few, encoder, 1)
    assert choice.nodes.keys() == {"first", "second"}
    assert plan.plan_cost(few, choice.nodes, PRICES, 1.0, 0.0) is None


def test_a_recipe_s_own_way_comes_first_and_then_those_that_take_less(encoder: Path) -> None:
    config = configured(train__zero_stage=3)
    assert next(plan.candidate_layouts(config, encoder, 2)) == ParallelLayout(zero_stage=3)
    assert list(plan.candidate_layouts(config, encoder, 2))[1] == ParallelLayout(gradient_checkpointing=True)


# ---------------------------------------------------------------------------------------------------------------- hours


def planned(
    config: Config, cluster: placement.PlannedCluster, assumed: throughput.Throughput = throughput.CPU_THROUGHPUT
) -> plan.Duration:
    layout = placement.plan_placement(config, cluster)
    choice = plan.choose_layout(config, cluster, layout, [(ParallelLayout(), WorkerMemory(1e9, 0, 0, 0))], PRICES)
    return plan.estimate_duration(config, layout, choice, SHAPE, ROWS, assumed)


def lasting(result: plan.Duration, train_s: float, evaluate_s: float) -> plan.Duration:
    return replace(result, compute_s=train_s / result.steps, all_reduce_s=0.0, evaluate_s=evaluate_s, start_s=0.0)


def test_hours_are_rows_by_the_pace(cluster: placement.PlannedCluster) -> None:
    """One worker with 1e9 FLOP/s, and a free optimizer step."""
    config = configured(train__workers=1, train__epochs=2)
    duration = planned(config, cluster, throughput.Throughput(1e9, 1e30, ""))
    assert duration.steps == 2 * -(-10_000 // 32)
    flops = SHAPE.flops(np.full(32, 32))
    assert duration.train_s == pytest.approx(duration.steps * flops / 1e9)
    assert duration.evaluate_s == pytest.approx(flops / 32 / 1e9 / 3 * (2 * 1250 + 1250))


def test_the_last_update_is_followed_by_an_evaluation(cluster: placement.PlannedCluster) -> None:
    """313 steps are no multiple of `evaluate_every`."""
    assumed = throughput.Throughput(1e9, 1e30, "")
    once, thrice = (
        planned(configured(train__workers=1, train__epochs=1, train__evaluate_every=interval), cluster, assumed)
        for interval in (1000, 150)
    )
    assert once.steps == 313
    assert thrice.evaluate_s / once.evaluate_s == pytest.approx((3 + 1) / (1 + 1))


def test_through_a_frozen_encoder_nothing_goes_back(cluster: placement.PlannedCluster) -> None:
    """A third of the operations, and the head's weights alone to exchange and step; an evaluation takes as long as
    ever."""
    assumed = throughput.Throughput(1e9, 1e30, "")
    plain, frozen = (
        planned(configured(train__workers=1, train__epochs=2, model__freeze=freeze), cluster, assumed)
        for freeze in ("none", "encoder")
    )
    assert frozen.train_s == pytest.approx(plain.train_s / 3)
    assert frozen.evaluate_s == pytest.approx(plain.evaluate_s)
    work = throughput.estimate_work(configured(model__freeze="encoder").recipe, SHAPE, ROWS)
    assert work.gradient_bytes == work.weight_bytes == 4 * 384 * 384


def test_an_evaluation_computes_no_layer_again(cluster: placement.PlannedCluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    assumed, layout = throughput.Throughput(1e9, 1e30, ""), placement.plan_placement(config, cluster)
    layouts = [
        (ParallelLayout(gradient_checkpointing=repeated), WorkerMemory(1e9, 0, 0, 0)) for repeated in (False, True)
    ]
    plain, repeated = (
        plan.estimate_duration(
            config, layout, plan.choose_layout(config, cluster, layout, [way], {}), SHAPE, ROWS, assumed
        )
        for way in layouts
    )
    assert repeated.train_s == pytest.approx(4 / 3 * plain.train_s)
    assert repeated.evaluate_s == plain.evaluate_s


def test_a_search_takes_its_budget_and_its_end(cluster: placement.PlannedCluster) -> None:
    """With 100 hours a full run, 8 of them and 4 for the end by default."""
    full = 2 * -(-10_000 // 32) * 32

    def hours(trials: int = 1, **tune: float) -> float:
        config = configured(
            train__workers=1, train__epochs=2, **{f"tune__{name}": value for name, value in tune.items()}
        )
        duration = lasting(planned(config, cluster), 300_000.0, 60_000.0)
        return plan.search_hours(config, duration, trials, tune.get("worker_cost_per_hour"))

    assert hours() == pytest.approx(1200)
    assert hours(trials=4) == pytest.approx(800 / 4 + 400 / 3)  # of the end, three trainings go side by side
    assert hours(budget_rows=full) == pytest.approx(500)
    # The best two and trial 0 have four fifths of a run before them, whatever else the end may cost.
    assert hours(final_budget_rows=0) == pytest.approx(800 + 3 * 80)
    assert hours(trials=2, final_budget_rows=full) == pytest.approx(400 + 3 * 80 / 2)
    assert hours(max_minutes=60) == pytest.approx(1 + 20 + 400)  # a started trial reaches its first rung
    # What 2 of money pay for: 40 hours of a worker, of each of four trials ten.
    assert hours(max_cost=2, worker_cost_per_hour=0.05) == pytest.approx(40 + 20 + 400)
    assert hours(trials=4, max_cost=2, worker_cost_per_hour=0.05) == pytest.approx(10 + 20 + 400 / 3)
    assert hours(max_minutes=60, max_cost=2, worker_cost_per_hour=0.05) == hours(max_minutes=60)
    assert hours(trials=32, budget_rows=1, final_budget_rows=0) == pytest.approx(100)  # no search is shorter than a run
    limited = configured(train__workers=1, train__epochs=2, tune__trials=3)
    duration = lasting(planned(limited, cluster), 3600.0, 0.0)
    assert plan.search_hours(limited, duration, 1) == pytest.approx(7)


@pytest.mark.parametrize("name", ["head", "worker"])
def test_the_price_of_a_type_that_no_table_has_is_asked_for_and_taken(name: str) -> None:
    """The price file and the cluster file; not used for a node that costs nothing."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["available_node_types"][name]["node_config"]["InstanceType"] = "m7i.metal-48xl"
    cluster, nodes = placement.parse_cluster(document), {"worker": 2}
    assert plan.plan_cost(cluster, nodes, PRICES, 100.0, 0.0) is None
    cost = plan.plan_cost(
        cluster, nodes, pricing.load_price_table(None, {"prices": {"m7i.metal-48xl": 5.0}}), 100.0, 0.0
    )
    assert cost is not None
    assert cost.dollars == pytest.approx(100 * (0.101 + 2 * 5.0 if name == "worker" else 5.0 + 2 * 0.357))


def test_nodes_that_are_up_whatever_runs_are_paid_for() -> None:
    """Two of the least number of four are taken away from the run, and of the others nothing is repeated."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    plain, nodes = placement.parse_cluster(document), {"worker": 2}
    document["available_node_types"]["worker"]["min_workers"] = 4
    cluster_plan = placement.parse_cluster(document)
    few, many = (plan.plan_cost(each_cluster, nodes, PRICES, 100.0, 3600.0) for each_cluster in (plain, cluster_plan))
    assert few is not None
    assert many is not None
    assert few.dollars == pytest.approx(100 * 0.815)
    assert many.dollars == pytest.approx(100 * 1.529)
    assert many.interruptions == pytest.approx(few.interruptions)
    assert placement.idle_node_notes(plain, nodes) == []
    assert len(placement.idle_node_notes(cluster_plan, nodes)) == 1


def test_a_worker_s_hour_has_a_price_whatever_it_runs_on() -> None:
    """Like a run's report: the setting, else the file."""
    table = PRICES | {"worker": pricing.make_price(0.04)}
    assert placement.worker_price(configured(), PRICES) is None
    assert placement.worker_price(configured(), table) == 0.04
    assert placement.worker_price(configured(tune__worker_cost_per_hour=0.1), table) == 0.1
    assert placement.cost_per_worker_hour(10.0, 8, 0.5) == placement.RunCost(10.0, 40.0, is_per_worker=True)


def test_an_interruption_repeats_what_is_not_saved(cluster: placement.PlannedCluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    duration = planned(config, cluster)
    assert plan.lost_work_seconds(config, duration, has_spot_watcher=True) == duration.step_s
    assert plan.lost_work_seconds(config, duration, has_spot_watcher=False) == pytest.approx(
        duration.steps / 4 * duration.step_s
    )
    often = configured(train__workers=1, train__epochs=2, train__save_every=10)
    assert plan.lost_work_seconds(often, duration, has_spot_watcher=False) == pytest.approx(5 * duration.step_s)


# ------------------------------------------------------------------------------------------------------------- the verb


Cli = Callable[..., tuple[int, str, str]]


def refused(*words: object) -> list[tuple[str, str]]:
    """Field and code of each problem of a refused command."""
    with pytest.raises(ConfigError) as error:
        cli.app([str(word) for word in words], standalone_mode=False)
    return [(problem.field, problem.code) for problem in error.value.problems]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text((ROOT / "cluster.yaml").read_text())

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return call


def write_local_cluster() -> str:
    """The head alone, of no cloud's type."""
    kind = {"resources": {"CPU": 8}, "node_config": {}}
    local = {"cluster_name": "here", "max_workers": 0, "head_node_type": "here", "available_node_types": {"here": kind}}
    Path("here.yaml").write_text(yaml.safe_dump(local))
    return "here.yaml"


def write_gpu_cluster(**resources: int) -> dict[str, Any]:
    """Three nodes with a GPU of a type that is not in the table of instances, although g5.2xlarge is."""
    worker = {"node_config": {"InstanceType": "g5.xlarge"}, "resources": {"CPU": 4, "GPU": 1, **resources}}
    head = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}}
    types = {"head": head, "worker": {**worker, "max_workers": 3}}
    some = {"provider": {"type": "aws", "region": "us-west-2"}, "max_workers": 3, "head_node_type": "head"}
    document = {"cluster_name": "some", **some, "available_node_types": types}
    Path("some.yaml").write_text(yaml.safe_dump(document))
    return document


def test_a_plan_says_nodes_memory_hours_and_money(run: Cli, encoder: Path) -> None:
    arguments = ("plan", "intent", "--model", encoder, "--rows", 10_000, "--tokens", 20, "--workers", 4)
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["fits"], document["device"]) == (True, "cpu")
    assert (document["nodes"], document["strategy"]) == ({"worker": 1}, "ddp")
    parts = {name: size for name, size in document["memory_mb"].items() if name != "total"}
    assert document["memory_mb"]["total"] == pytest.approx(sum(parts.values()), abs=0.5)
    assert parts["process"] == memory_estimate.PROCESS_BYTES / 1e6
    assert document["steps"] == 5 * -(-10_000 // 128)
    assert sum(document["seconds"].values()) == pytest.approx(3600 * document["hours"])
    assert 0 < document["cost"]["spot_dollars"] < document["cost"]["dollars"] < 1
    lines = run(*arguments)[1].splitlines()
    assert [line.split()[0] for line in lines] == ["fits", "strategy", "memory", "step", "hours", "cost", "note"]


def test_a_pipeline_is_told_and_a_machine_that_is_there_needs_no_start(run: Cli, encoder: Path) -> None:
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 2, "--cluster", write_local_cluster())
    code, out, err = run(*words, "--set", "train.pipeline_parallel_size=2", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["pipeline_parallel_size"], document["nodes"]) == (2, {})
    assert document["seconds"]["start"] == plan.RUN_START_S


def test_what_is_not_foretold_is_noted() -> None:
    assert plan.unmodelled_costs(configured(train__workers=2).recipe.train) == []
    for selected in ({"context_parallel_size": 2}, {"zero_stage": 3, "pipeline_parallel_size": 2}):
        settings = {f"train__{name}": value for name, value in selected.items()}
        notes = " ".join(plan.unmodelled_costs(configured(train__workers=4, **settings).recipe.train))
        assert all(f"train.{name}" in notes for name in selected), selected


def test_a_layout_that_would_wait_for_ever_is_refused(run: Cli) -> None:
    assert [field for field, _ in refused("plan", "intent", "--workers", 64)] == ["train.workers"]
    assert run("plan", "intent", "--workers", 64)[:2] == (2, "")


@pytest.mark.parametrize(
    "settings",
    [
        ("--workers", 2, "--set", "train.pipeline_parallel_size=4"),
        ("--workers", 3, "--set", "train.pipeline_parallel_size=2"),
    ],
)
def test_a_way_that_a_run_could_not_go_is_refused(run: Cli, encoder: Path, settings: tuple[Any, ...]) -> None:
    refusals = refused("plan", "intent", "--model", encoder, "--rows", 1000, *settings)
    assert [field for field, code in refusals if code == "not_divisible"] == ["train.pipeline_parallel_size"]


def test_a_length_that_the_model_cannot_read_is_refused(run: Cli, encoder: Path) -> None:
    refusals = refused("plan", "intent", "--model", encoder, "--rows", 1000, "--set", "data.max_tokens=4096")
    assert [field for field, _ in refusals] == ["data.max_tokens"]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"])
def test_what_the_devices_of_the_cluster_cannot_do_is_refused(run: Cli, encoder: Path, name: str) -> None:
    """As a start on it refuses them: there are three GPUs for four workers."""
    write_gpu_cluster()
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 4, "--cluster", "some.yaml")
    assert run(*words)[0] == 0
    assert refused(*words, "--set", f"train.{name}=2") == [(f"train.{name}", "not_divisible")]


def test_a_gpu_that_no_table_has_is_told_and_may_be_named(run: Cli, encoder: Path) -> None:
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 1, "--cluster", "some.yaml", "--json")
    document = list[dict[str, Any]]()
    for resources in ({}, {"accelerator_type:H100": 1}):
        cluster = placement.parse_cluster(write_gpu_cluster(**resources))
        document.append(json.loads(run(*words)[1]))
    assert [sum("accelerator_type:" in note for note in result["notes"]) for result in document] == [1, 0]
    assert ["A10G" in document[0]["throughput"], "H100" in document[1]["throughput"]] == [True, True]
    for total, slots in ((67, 1), (69, 0)):  # of 80 GB
        count_slots = plan.slots_in_memory(WorkerMemory(total * GB, 0, 0, 0), capacity.ResourceRequest("gpu", 1))
        assert count_slots(cluster.node_types[0]) == slots


def test_a_price_file_is_written_once_and_read(run: Cli, encoder: Path, tmp_path: Path) -> None:
    assert run("plan", "--write-prices", "prices.yaml")[0] == 0
    assert run("plan", "--write-prices", "prices.yaml")[0] == 2
    file = tmp_path / "prices.yaml"
    file.write_text(file.read_text().replace("c7i.2xlarge: {on_demand: 0.357", "c7i.2xlarge: {on_demand: 357"))
    _, out, _ = run("plan", "intent", "--model", encoder, "--rows", 9000, "--prices", "prices.yaml", "--json")
    assert json.loads(out)["cost"]["dollars"] > 10


def test_machines_of_one_s_own_cost_what_a_worker_s_hour_does(run: Cli, encoder: Path, tmp_path: Path) -> None:
    words = ("plan", "intent", "--model", encoder, "--rows", 9000, "--workers", 2, "--cluster", write_local_cluster())
    assert json.loads(run(*words, "--json")[1])["cost"] is None
    (tmp_path / "prices.yaml").write_text("worker: {on_demand: 400}\n")
    document = json.loads(run(*words, "--prices", "prices.yaml", "--json")[1])
    assert document["cost"]["dollars"] == pytest.approx(document["hours"] * 2 * 400)
    assert document["cost"]["spot_dollars"] is None


def test_spot_nodes_that_are_taken_away_too_often_have_no_price(run: Cli, encoder: Path, tmp_path: Path) -> None:
    """20 interruptions per node hour, more than five minutes each."""
    (tmp_path / "prices.yaml").write_text(
        "m7i.large: {on_demand: 1}\nc7i.2xlarge: {on_demand: 1, spot: 0.4, interruptions: 20}\n"
    )
    words = ("plan", "intent", "--model", encoder, "--rows", 9000, "--workers", 4, "--prices", "prices.yaml")
    code, out, err = run(*words, "--json")
    assert code == 0, err
    cost = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["cost"]
    assert cost["dollars"] > 0
    assert [cost[name] for name in ("spot_dollars", "interruptions", "repeated_hours")] == [None] * 3


def test_a_run_that_is_not_there_is_named(run: Cli, encoder: Path) -> None:
    assert run("plan", "intent", "--rows", 1000, "--model", encoder, "--reference-run", "nowhere")[0] == 1


def test_nobody_misses_notices_of_nodes_that_are_no_spot_nodes(run: Cli, encoder: Path) -> None:
    document = yaml.safe_load(Path("cluster.yaml").read_text()) | {"worker_start_ray_commands": ["ray start"]}
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--cluster", "some.yaml")
    missed = list[bool]()
    for market in ({"MarketType": "spot"}, None):
        document["available_node_types"]["worker"]["node_config"]["InstanceMarketOptions"] = market
        Path("some.yaml").write_text(yaml.safe_dump(document))
        missed.append("no spot watcher runs" in run(*words)[1])
    assert missed == [True, False]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plan",), ("recipe", "missing")),
        (("plan", "intent", "--cluster", "none.yaml"), ("--cluster", "not_found")),
        (("plan", "intent", "--rows", 1000, "--cluster", "date.yaml"), ("--cluster", "invalid_cluster_file")),
        (("plan", "intent", "--rows", 1000, "--cluster", "latin.yaml"), ("--cluster", "invalid_cluster_file")),
        (("plan", "intent", "--tokens", 64), ("--tokens", "missing_rows")),
    ],
)
def test_what_is_lacking_is_named(run: Cli, words: tuple[str, ...], expected: tuple[str, str]) -> None:
    Path("date.yaml").write_text("cluster_name: 2024-13-45\n")
    Path("latin.yaml").write_bytes("# Größe\ncluster_name: x\n".encode("latin-1"))
    assert refused(*words) == [expected]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("max_workers: 4\n#", "max_workers:\n#", "max_workers of the cluster's file"),
        ("resources: {CPU: 8}", "resources: {CPU: eight}", "worker.resources.CPU of the cluster's file"),
    ],
)
def test_a_file_that_nobody_has_looked_at_is_refused(run: Cli, old: str, new: str, field: str) -> None:
    text = Path("cluster.yaml").read_text()
    assert old in text
    Path("cluster.yaml").write_text(text.replace(old, new, 1))
    assert [name for name, _ in refused("plan", "intent", "--rows", 1000)] == [field]
