"""What a run will take: prices, hours, the way in which it fits, and the verb."""

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
from rtrain.parallel.layout import Way
from rtrain.planning import cost_estimate, memory_needs, placement, plan, run_facts, throughput
from rtrain.planning.memory_needs import Need
from tests.root import ROOT
from tests.tiny import make_encoder

GB = 1e9
SHAPE = run_facts.Shape(hidden=384, layers=6, inner=1536, vocabulary=30522)
ROWS = run_facts.given(10_000, 32)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def cluster() -> placement.Cluster:
    return placement.of_document(yaml.safe_load((ROOT / "cluster.yaml").read_text()))


def configured(**settings: Any) -> Config:
    return configuration.load("intent", {name.replace("__", "."): value for name, value in settings.items()})


# ---------------------------------------------------------------------------------------------------------------- money


def test_prices_are_those_of_the_table_of_the_cluster_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("c7i.2xlarge: {on_demand: 0.5, spot: 0.1, interruptions: 0.2}\nown: {on_demand: 3}\n")
    found = pricing.table(file, {"prices": {"own": 2.0, "other": 1.0}})
    assert found["c7i.2xlarge"] == pricing.Price(0.5, 0.1, 0.2)
    assert found["own"] == pricing.of(3.0)
    assert found["other"].on_demand == 1.0
    assert found["m7i.large"].on_demand == 0.101
    assert pricing.table()["c7i.2xlarge"].on_demand == 0.357


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(pricing.text(pricing.table()))
    again = pricing.read(tmp_path / "prices.yaml")
    assert again.keys() == pricing.table().keys()
    assert again["p5.48xlarge"].on_demand == 55.04


@pytest.mark.parametrize(
    "text",
    ["a: 1", "a: {spot: 1}", "a: {on_demand: -1}", "a: {on_demand: 1, sport: 2}", "- 1", "a: 2024-13-45", None],
)
def test_an_entry_that_is_no_price_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError):
        pricing.read(file)


def test_interruptions_repeat_and_are_paid_for() -> None:
    """4 nodes, 10 hours, one interruption in 100 hours of a node: 0.4 of them, each of which costs half an hour."""
    nodes = {"worker": (4, pricing.Price(1.0, 0.4, 0.01))}
    found = cost_estimate.cost(10.0, nodes, pricing.of(0.1), repeats_s=1500, restart_s=300)
    assert found.dollars == pytest.approx(10 * 4.1)
    repeated = 10 * 0.04 * 0.5 / (1 - 0.02)
    assert found.repeated_hours == pytest.approx(repeated)
    assert found.interruptions == pytest.approx(0.04 * (10 + repeated))
    assert found.spot_dollars == pytest.approx((10 + repeated) * (4 * 0.4 + 0.1))


def test_nodes_that_are_taken_away_faster_than_they_train_never_end() -> None:
    nodes = {"worker": (100, pricing.Price(1.0, 0.4, 1.0))}
    assert cost_estimate.cost(1.0, nodes, None, repeats_s=60, restart_s=300) == cost_estimate.Cost(
        1.0, 100.0, None, None, None
    )


# ----------------------------------------------------------------------------------------------------------- the way in


def needs(folder: Path, config: Config, workers: int, *totals: float) -> list[tuple[Way, Need]]:
    """Needs of as many ways as there are `totals`, in GB."""
    ways = islice(plan.ways(config, folder, workers), len(totals))
    return [(way, Need(total * GB, 0, 0, 0)) for way, total in zip(ways, totals, strict=True)]


def test_the_recipe_s_own_way_is_taken_where_it_fits(cluster: placement.Cluster, encoder: Path) -> None:
    config = configured(train__workers=4)
    layout = placement.laid_out(config, cluster)
    found = plan.choose(config, cluster, layout, needs(encoder, config, 4, 2, 1.5, 1.2, 1, 1), pricing.table())
    assert found.way == Way()
    assert found.nodes == {"worker": 1}


def test_more_nodes_hold_what_one_does_not(cluster: placement.Cluster, encoder: Path) -> None:
    """A node of 16 GB holds two workers of 5 GB, of which it takes two thirds."""
    config = configured(train__workers=4)
    layout = placement.laid_out(config, cluster)
    found = plan.choose(config, cluster, layout, needs(encoder, config, 4, 5, 4, 3, 2, 1), pricing.table())
    assert found.nodes == {"worker": 2}
    assert found.way == Way()


def test_what_fits_no_node_is_shared_out_then_computed_again(cluster: placement.Cluster, encoder: Path) -> None:
    config = configured(train__workers=4)
    layout = placement.laid_out(config, cluster)
    shared = plan.choose(config, cluster, layout, needs(encoder, config, 4, 12, 9, 8, 7, 6), pricing.table())
    assert shared.way == Way(shard=1)
    assert "12,000 MB" in shared.why
    gathered = plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 9), pricing.table())
    assert gathered.way == Way(shard=3)
    again = plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 11, 13, 9), pricing.table())
    assert again.way.settings == {"train.shard": 1, "train.gradient_checkpointing": True}
    with pytest.raises(ConfigError) as error:
        plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 12, 12, 11), pricing.table())
    assert [problem.code for problem in error.value.problems] == ["out_of_memory"]


def test_a_gpu_that_is_too_small_is_told_by_its_own_memory(encoder: Path) -> None:
    """Not by that of its host, of which there is enough."""
    kinds = {
        "head_node_type": "head",
        "max_workers": 4,
        "available_node_types": {
            "head": {"resources": {"CPU": 8}, "node_config": {"InstanceType": "m7i.2xlarge"}},
            "t4": {
                "resources": {"CPU": 32, "GPU": 1, "accelerator_type:T4": 1},
                "max_workers": 4,
                "node_config": {"InstanceType": "g4dn.8xlarge"},
            },
        },
    }
    config = configured(train__workers=4, train__device="gpu")
    cluster = placement.of_document(kinds)
    layout = placement.laid_out(config, cluster)
    with pytest.raises(ConfigError) as error:
        plan.choose(config, cluster, layout, [(Way(), Need(24 * GB, 0, 0, 0, process=GB))], pricing.table())
    [problem] = error.value.problems
    assert (problem.code, "16 GB" in problem.fix) == ("out_of_memory", True)


def test_only_one_worker_writes_checkpoints(cluster: placement.Cluster) -> None:
    """A node of 16 GB, of which two thirds are 10.4: with a copy of 6, there is room for two of 2 GB."""
    [kind] = [one for one in cluster.kinds if one.name == "worker"]
    assert plan.holds(Need(2 * GB, 0, 0, 0, checkpoint=6 * GB), capacity.Needs("cpu"))(kind) == 2
    assert plan.holds(Need(2 * GB, 0, 0, 0, checkpoint=11 * GB), capacity.Needs("cpu"))(kind) == 0


def test_a_run_that_starts_with_fewer_is_planned_with_those_that_have_room(
    cluster: placement.Cluster, encoder: Path
) -> None:
    config = configured(train__workers=64, train__min_workers=8)
    layout = placement.laid_out(config, cluster)
    assert (layout.workers, layout.room, layout.least) == (64, 27, 8)  # 4 nodes of 8, less 5 for the data of 27
    found = plan.choose(config, cluster, layout, needs(encoder, config, 64, 1), pricing.table())
    assert found.nodes == {"worker": 4}


def two_types(first: dict[str, Any], second: dict[str, Any]) -> placement.Cluster:
    """A head without room, and two types of worker by their `node_config`."""
    kinds = {
        "head": {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}},
        "first": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": first},
        "second": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": second},
    }
    file = {"provider": {"type": "aws"}, "head_node_type": "head", "max_workers": 4, "available_node_types": kinds}
    return placement.of_document(file)


SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@pytest.mark.parametrize("unpriced", [{"InstanceType": "x9.large"}, {"InstanceType": "x9.large", **SPOT}, {}])
def test_a_type_without_a_price_is_never_the_cheapest(encoder: Path, unpriced: dict[str, Any]) -> None:
    """`c7i.8xlarge` costs more than 1 $ an hour. The type without a price is taken where the other has no room."""
    cluster = two_types(unpriced, {"InstanceType": "c7i.8xlarge"})
    for workers, nodes in ((4, {"second": 1}), (20, {"second": 3})):
        config = configured(train__workers=workers)
        layout = placement.laid_out(config, cluster)
        found = plan.choose(config, cluster, layout, needs(encoder, config, workers, 1), pricing.table())
        assert found.nodes == nodes
    few = replace(cluster, kinds=tuple(replace(kind, most=2) for kind in cluster.kinds))
    found = plan.choose(config, few, layout, needs(encoder, config, 20, 1), pricing.table())
    assert found.nodes.keys() == {"first", "second"}
    assert plan.money(few, found.nodes, pricing.table(), 1.0, 0.0) is None


def test_a_recipe_s_own_way_comes_first_and_then_those_that_take_less(encoder: Path) -> None:
    own = configured(train__shard=3)
    assert next(plan.ways(own, encoder, 2)) == Way(shard=3)
    assert list(plan.ways(own, encoder, 2))[1] == Way(gradient_checkpointing=True)


# ---------------------------------------------------------------------------------------------------------------- hours


def planned(config: Config, cluster: placement.Cluster, given: throughput.Pace = throughput.CPU) -> plan.Hours:
    layout = placement.laid_out(config, cluster)
    chosen = plan.choose(config, cluster, layout, [(Way(), Need(1e9, 0, 0, 0))], pricing.table())
    return plan.hours(config, layout, chosen, SHAPE, ROWS, given)


def lasting(found: plan.Hours, train_s: float, evaluate_s: float) -> plan.Hours:
    return replace(found, compute_s=train_s / found.updates, exchange_s=0.0, evaluate_s=evaluate_s, start_s=0.0)


def test_hours_are_rows_by_the_pace(cluster: placement.Cluster) -> None:
    """One worker, whose products come to 1e9 operations a second and whose step takes nothing."""
    config = configured(train__workers=1, train__epochs=2)
    found = planned(config, cluster, throughput.Pace(1e9, 1e30, ""))
    assert found.updates == 2 * -(-10_000 // 32)
    flops = SHAPE.flops(np.full(32, 32))
    assert found.train_s == pytest.approx(found.updates * flops / 1e9)
    assert found.evaluate_s == pytest.approx(flops / 32 / 1e9 / 3 * (2 * 1250 + 1250))


def test_the_last_update_is_followed_by_an_evaluation(cluster: placement.Cluster) -> None:
    """Of 313 updates: one that no whole number of `evaluate_every` has led to."""
    given = throughput.Pace(1e9, 1e30, "")
    once, thrice = (
        planned(configured(train__workers=1, train__epochs=1, train__evaluate_every=every), cluster, given)
        for every in (1000, 150)
    )
    assert once.updates == 313
    assert thrice.evaluate_s / once.evaluate_s == pytest.approx((3 + 1) / (1 + 1))


def test_through_a_frozen_encoder_nothing_goes_back(cluster: placement.Cluster) -> None:
    """A third of the operations, and the head's weights alone to exchange and step; an evaluation takes as long as
    ever."""
    given = throughput.Pace(1e9, 1e30, "")
    plain, frozen = (
        planned(configured(train__workers=1, train__epochs=2, model__freeze=freeze), cluster, given)
        for freeze in ("none", "encoder")
    )
    assert frozen.train_s == pytest.approx(plain.train_s / 3)
    assert frozen.evaluate_s == pytest.approx(plain.evaluate_s)
    work = throughput.work(configured(model__freeze="encoder").recipe, SHAPE, ROWS)
    assert work.gradient == work.weights == 4 * 384 * 384


def test_an_evaluation_computes_no_layer_again(cluster: placement.Cluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    given, layout = throughput.Pace(1e9, 1e30, ""), placement.laid_out(config, cluster)
    ways = [(Way(gradient_checkpointing=again), Need(1e9, 0, 0, 0)) for again in (False, True)]
    plain, again = (
        plan.hours(config, layout, plan.choose(config, cluster, layout, [way], {}), SHAPE, ROWS, given) for way in ways
    )
    assert again.train_s == pytest.approx(4 / 3 * plain.train_s)
    assert again.evaluate_s == plain.evaluate_s


def test_a_search_takes_its_budget_and_its_end(cluster: placement.Cluster) -> None:
    """With 100 hours a full run, 8 of them and 4 for the end by default."""
    full = 2 * -(-10_000 // 32) * 32

    def hours(trials: int = 1, **tune: float) -> float:
        config = configured(train__workers=1, train__epochs=2, **{f"tune__{name}": one for name, one in tune.items()})
        found = lasting(planned(config, cluster), 300_000.0, 60_000.0)
        return plan.searched(config, found, trials, tune.get("price"))

    assert hours() == pytest.approx(1200)
    assert hours(trials=4) == pytest.approx(800 / 4 + 400 / 3)  # of the end, three trainings go side by side
    assert hours(rows=full) == pytest.approx(500)
    # The best two and trial 0 have four fifths of a run before them, whatever else the end may cost.
    assert hours(final_rows=0) == pytest.approx(800 + 3 * 80)
    assert hours(trials=2, final_rows=full) == pytest.approx(400 + 3 * 80 / 2)
    assert hours(minutes=60) == pytest.approx(1 + 20 + 400)  # a trial that was begun goes on to its first rung
    # What 2 of money pay for: 40 hours of a worker, of each of four trials ten.
    assert hours(money=2, price=0.05) == pytest.approx(40 + 20 + 400)
    assert hours(trials=4, money=2, price=0.05) == pytest.approx(10 + 20 + 400 / 3)
    assert hours(minutes=60, money=2, price=0.05) == hours(minutes=60)
    assert hours(trials=32, rows=1, final_rows=0) == pytest.approx(100)  # no search is shorter than a run
    limited = configured(train__workers=1, train__epochs=2, tune__trials=3)
    found = lasting(planned(limited, cluster), 3600.0, 0.0)
    assert plan.searched(limited, found, 1) == pytest.approx(7)


@pytest.mark.parametrize("name", ["head", "worker"])
def test_the_price_of_a_type_that_no_table_has_is_asked_for_and_taken(name: str) -> None:
    """By the file of prices and by the cluster's own; not taken for a node that costs nothing."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["available_node_types"][name]["node_config"]["InstanceType"] = "m7i.metal-48xl"
    cluster, nodes = placement.of_document(document), {"worker": 2}
    assert plan.money(cluster, nodes, pricing.table(), 100.0, 0.0) is None
    found = plan.money(cluster, nodes, pricing.table(None, {"prices": {"m7i.metal-48xl": 5.0}}), 100.0, 0.0)
    assert found is not None
    assert found.dollars == pytest.approx(100 * (0.101 + 2 * 5.0 if name == "worker" else 5.0 + 2 * 0.357))


def test_nodes_that_are_up_whatever_runs_are_paid_for() -> None:
    """Two of the least number of four are taken away from the run, and of the others nothing is repeated."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    plain, nodes = placement.of_document(document), {"worker": 2}
    document["available_node_types"]["worker"]["min_workers"] = 4
    kept = placement.of_document(document)
    few, many = (plan.money(one, nodes, pricing.table(), 100.0, 3600.0) for one in (plain, kept))
    assert few is not None
    assert many is not None
    assert few.dollars == pytest.approx(100 * 0.815)
    assert many.dollars == pytest.approx(100 * 1.529)
    assert many.interruptions == pytest.approx(few.interruptions)
    assert cost_estimate.idle(plain, nodes) == []
    assert len(cost_estimate.idle(kept, nodes)) == 1


def test_a_worker_s_hour_has_a_price_whatever_it_runs_on() -> None:
    """As a run's report has it: by the setting, else by the file."""
    table = pricing.table() | {"worker": pricing.of(0.04)}
    assert cost_estimate.worker_price(configured(), pricing.table()) is None
    assert cost_estimate.worker_price(configured(), table) == 0.04
    assert cost_estimate.worker_price(configured(tune__price=0.1), table) == 0.1
    assert cost_estimate.of_workers(10.0, 8, 0.5) == cost_estimate.Cost(10.0, 40.0, of_workers=True)


def test_an_interruption_repeats_what_is_not_saved(cluster: placement.Cluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    found = planned(config, cluster)
    assert plan.repeated_s(config, found, watched=True) == found.update_s
    assert plan.repeated_s(config, found, watched=False) == pytest.approx(found.updates / 4 * found.update_s)
    often = configured(train__workers=1, train__epochs=2, train__save_every=10)
    assert plan.repeated_s(often, found, watched=False) == pytest.approx(5 * found.update_s)


# ------------------------------------------------------------------------------------------------------------- the verb


Cli = Callable[..., tuple[int, str, str]]


def refused(*words: object) -> list[tuple[str, str]]:
    """Field and code of each problem by which the command refuses."""
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


def test_a_plan_says_nodes_memory_hours_and_money(run: Cli, encoder: Path) -> None:
    given = ("plan", "intent", "--model", encoder, "--rows", 10_000, "--tokens", 20, "--workers", 4)
    code, out, err = run(*given, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["fits"], made["device"], made["nodes"], made["strategy"]) == (True, "cpu", {"worker": 1}, "ddp")
    parts = {name: size for name, size in made["memory_mb"].items() if name != "total"}
    assert made["memory_mb"]["total"] == pytest.approx(sum(parts.values()), abs=0.5)
    assert parts["process"] == memory_needs.PROCESS / 1e6
    assert made["updates"] == 5 * -(-10_000 // 128)
    assert sum(made["seconds"].values()) == pytest.approx(3600 * made["hours"])
    assert 0 < made["cost"]["spot_dollars"] < made["cost"]["dollars"] < 1
    lines = run(*given)[1].splitlines()
    assert [line.split()[0] for line in lines] == ["fits", "strategy", "memory", "an", "hours", "money", "note"]


def test_a_pipeline_is_told_and_a_machine_that_is_there_needs_no_start(run: Cli, encoder: Path) -> None:
    """On the head alone."""
    kind = {"resources": {"CPU": 8}, "node_config": {}}
    here = {"cluster_name": "here", "max_workers": 0, "head_node_type": "here", "available_node_types": {"here": kind}}
    Path("here.yaml").write_text(yaml.safe_dump(here))
    given = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 2, "--set", "train.pipeline=2")
    code, out, err = run(*given, "--cluster", "here.yaml", "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["pipeline"], made["nodes"], made["seconds"]["start"]) == (2, {}, plan.START_S)


def test_what_is_not_foretold_is_noted() -> None:
    assert plan.untold(configured(train__workers=2).recipe.train) == []
    settings = {"context": 2}, {"shard": 3, "pipeline": 2}
    for chosen in settings:
        train = configured(train__workers=4, **{f"train__{name}": value for name, value in chosen.items()}).recipe.train
        notes = " ".join(plan.untold(train))
        assert all(f"train.{name}" in notes for name in chosen), chosen


def test_a_layout_that_would_wait_for_ever_is_refused(run: Cli) -> None:
    assert [field for field, _ in refused("plan", "intent", "--workers", 64)] == ["train.workers"]
    assert run("plan", "intent", "--workers", 64)[:2] == (2, "")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("--workers", 2, "--set", "train.pipeline=4"), [("train.pipeline", "not_divisible")]),
        (("--workers", 3, "--set", "train.pipeline=2"), [("train.pipeline", "not_divisible")]),
    ],
)
def test_a_way_that_a_run_could_not_go_is_refused(
    run: Cli, encoder: Path, settings: tuple[Any, ...], expected: list[tuple[str, str]]
) -> None:
    found = refused("plan", "intent", "--model", encoder, "--rows", 1000, *settings)
    assert [one for one in found if one[1] == "not_divisible"] == expected


def test_a_length_that_the_model_cannot_read_is_refused(run: Cli, encoder: Path) -> None:
    found = refused("plan", "intent", "--model", encoder, "--rows", 1000, "--set", "data.max_tokens=4096")
    assert [field for field, _ in found] == ["data.max_tokens"]


GPUS: dict[str, Any] = {
    "node_config": {"InstanceType": "g5.xlarge"},
    "resources": {"CPU": 4, "GPU": 1},
    "max_workers": 3,
}


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context"])
def test_what_the_devices_of_the_cluster_cannot_do_is_refused(run: Cli, encoder: Path, name: str) -> None:
    """As a start on it refuses them: there are three GPUs for four workers."""
    head = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}}
    some = {"provider": {"type": "aws", "region": "us-west-2"}, "max_workers": 3, "head_node_type": "head"}
    made = {"cluster_name": "some", **some, "available_node_types": {"head": head, "worker": GPUS}}
    Path("some.yaml").write_text(yaml.safe_dump(made))
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 4, "--cluster", "some.yaml")
    assert run(*words)[0] == 0
    assert refused(*words, "--set", f"train.{name}=2") == [(f"train.{name}", "not_divisible")]


def test_a_gpu_that_no_table_has_is_told_and_may_be_named(run: Cli, encoder: Path) -> None:
    """g5.xlarge is not in the table of instances, although g5.2xlarge is."""
    head = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}}
    some = {"provider": {"type": "aws", "region": "us-west-2"}, "max_workers": 3, "head_node_type": "head"}
    named = {**GPUS, "resources": {**GPUS["resources"], "accelerator_type:H100": 1}}
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 1, "--cluster", "some.yaml", "--json")
    made = list[dict[str, Any]]()
    for worker in (GPUS, named):
        nodes = {"head": head, "worker": worker}
        Path("some.yaml").write_text(yaml.safe_dump({"cluster_name": "some", **some, "available_node_types": nodes}))
        made.append(json.loads(run(*words)[1]))
    assert [sum("accelerator_type:" in note for note in one["notes"]) for one in made] == [1, 0]
    assert "A10G" in made[0]["pace"]
    assert "H100" in made[1]["pace"]
    cluster = placement.of_document({**some, "available_node_types": {"head": head, "worker": named}})
    held = [plan.holds(Need(total * GB, 0, 0, 0), capacity.Needs("gpu", 1))(cluster.kinds[0]) for total in (67, 69)]
    assert held == [1, 0]  # of 80 GB


def test_a_price_file_is_written_once_and_read(run: Cli, encoder: Path, tmp_path: Path) -> None:
    assert run("plan", "--write-prices", "prices.yaml")[0] == 0
    assert run("plan", "--write-prices", "prices.yaml")[0] == 2
    file = tmp_path / "prices.yaml"
    file.write_text(file.read_text().replace("c7i.2xlarge: {on_demand: 0.357", "c7i.2xlarge: {on_demand: 357"))
    _, out, _ = run("plan", "intent", "--model", encoder, "--rows", 9000, "--prices", "prices.yaml", "--json")
    assert json.loads(out)["cost"]["dollars"] > 10


def test_machines_of_one_s_own_cost_what_a_worker_s_hour_does(run: Cli, encoder: Path, tmp_path: Path) -> None:
    """The head alone, of no cloud's type."""
    kind = {"resources": {"CPU": 8}, "node_config": {}}
    here = {"cluster_name": "here", "max_workers": 0, "head_node_type": "here", "available_node_types": {"here": kind}}
    Path("here.yaml").write_text(yaml.safe_dump(here))
    words = ("plan", "intent", "--model", encoder, "--rows", 9000, "--workers", 2, "--cluster", "here.yaml")
    assert json.loads(run(*words, "--json")[1])["cost"] is None
    (tmp_path / "prices.yaml").write_text("worker: {on_demand: 400}\n")
    made = json.loads(run(*words, "--prices", "prices.yaml", "--json")[1])
    assert made["cost"]["dollars"] == pytest.approx(made["hours"] * 2 * 400)
    assert made["cost"]["spot_dollars"] is None


def test_spot_nodes_that_are_taken_away_too_often_have_no_price(run: Cli, encoder: Path, tmp_path: Path) -> None:
    """An hour of a node has 20 interruptions, each of which costs more than five minutes."""
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
    assert run("plan", "intent", "--rows", 1000, "--model", encoder, "--like", "nowhere")[0] == 1


def test_nobody_misses_notices_of_nodes_that_are_no_spot_nodes(run: Cli, encoder: Path) -> None:
    made = yaml.safe_load(Path("cluster.yaml").read_text()) | {"worker_start_ray_commands": ["ray start"]}
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--cluster", "some.yaml")
    missed = list[bool]()
    for market in ({"MarketType": "spot"}, None):
        made["available_node_types"]["worker"]["node_config"]["InstanceMarketOptions"] = market
        Path("some.yaml").write_text(yaml.safe_dump(made))
        missed.append("nobody listens for spot notices" in run(*words)[1])
    assert missed == [True, False]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plan",), ("recipe", "missing")),
        (("plan", "intent", "--cluster", "none.yaml"), ("--cluster", "not_found")),
        (("plan", "intent", "--rows", 1000, "--cluster", "date.yaml"), ("--cluster", "malformed")),
        (("plan", "intent", "--rows", 1000, "--cluster", "latin.yaml"), ("--cluster", "malformed")),
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
