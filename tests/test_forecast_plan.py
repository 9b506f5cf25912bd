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

from rtrain import config as configuration, events
from rtrain.cli import app as cli
from rtrain.cluster import prices, supply
from rtrain.config import Config
from rtrain.doctor.forecast import calibrate, facts, layouts, memory, money, pace, plan
from rtrain.doctor.forecast.memory import Need
from rtrain.errors import ConfigError
from rtrain.run import Run
from rtrain.strategies.ways import Way
from tests.test_forecast_choose_k import LOG
from tests.tiny import make_encoder

ROOT = Path(__file__).resolve().parents[1]
GB = 1e9
SHAPE = facts.Shape(hidden=384, layers=6, inner=1536, vocabulary=30522)
ROWS = facts.given(10_000, 32)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def cluster() -> layouts.Cluster:
    return layouts.of_document(yaml.safe_load((ROOT / "cluster.yaml").read_text()))


def configured(**settings: Any) -> Config:
    return configuration.load("intent", {name.replace("__", "."): value for name, value in settings.items()})


# ---------------------------------------------------------------------------------------------------------------- money


def test_prices_are_those_of_the_table_of_the_cluster_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("c7i.2xlarge: {on_demand: 0.5, spot: 0.1, interruptions: 0.2}\nown: {on_demand: 3}\n")
    found = prices.table(file, {"prices": {"own": 2.0, "other": 1.0}})
    assert found["c7i.2xlarge"] == prices.Price(0.5, 0.1, 0.2)
    assert found["own"] == prices.of(3.0)
    assert found["other"].on_demand == 1.0
    assert found["m7i.large"].on_demand == 0.101
    assert prices.table()["c7i.2xlarge"].on_demand == 0.357


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(prices.text(prices.table()))
    again = prices.read(tmp_path / "prices.yaml")
    assert again.keys() == prices.table().keys()
    assert again["p5.48xlarge"].on_demand == 55.04


@pytest.mark.parametrize("text", ["a: 1", "a: {spot: 1}", "a: {on_demand: -1}", "a: {on_demand: 1, sport: 2}", "- 1"])
def test_an_entry_that_is_no_price_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="on_demand"):
        prices.read(file)
    with pytest.raises(ConfigError, match="no such file"):
        prices.read(tmp_path / "none.yaml")
    file.write_text("a: 2024-13-45")
    with pytest.raises(ConfigError, match="no YAML"):
        prices.read(file)


def test_interruptions_repeat_and_are_paid_for() -> None:
    """4 nodes, 10 hours, one interruption in 100 hours of a node: 0.4 of them, each of which costs half an hour."""
    nodes = {"worker": (4, prices.Price(1.0, 0.4, 0.01))}
    found = money.cost(10.0, nodes, prices.of(0.1), repeats_s=1500, restart_s=300)
    assert found.dollars == pytest.approx(10 * 4.1)
    repeated = 10 * 0.04 * 0.5 / (1 - 0.02)
    assert found.repeated_hours == pytest.approx(repeated)
    assert found.interruptions == pytest.approx(0.04 * (10 + repeated))
    assert found.spot_dollars == pytest.approx((10 + repeated) * (4 * 0.4 + 0.1))


def test_nodes_that_are_taken_away_faster_than_they_train_never_end() -> None:
    nodes = {"worker": (100, prices.Price(1.0, 0.4, 1.0))}
    assert money.cost(1.0, nodes, None, repeats_s=60, restart_s=300) == money.Cost(1.0, 100.0, None, None, None)


# ----------------------------------------------------------------------------------------------------------- the way in


def needs(folder: Path, config: Config, workers: int, *totals: float) -> list[tuple[Way, Need]]:
    """Needs of as many ways as there are `totals`, in GB."""
    ways = islice(plan.ways(config, folder, workers), len(totals))
    return [(way, Need(total * GB, 0, 0, 0)) for way, total in zip(ways, totals, strict=True)]


def test_the_recipe_s_own_way_is_taken_where_it_fits(cluster: layouts.Cluster, encoder: Path) -> None:
    config = configured(train__workers=4)
    layout = layouts.laid_out(config, cluster)
    found = plan.choose(config, cluster, layout, needs(encoder, config, 4, 2, 1.5, 1.2, 1, 1), prices.table())
    assert (found.way, found.why) == (Way(), "as the recipe says")
    assert found.nodes == {"worker": 1}
    assert found.per_node == 4


def test_more_nodes_hold_what_one_does_not(cluster: layouts.Cluster, encoder: Path) -> None:
    """A node of 16 GB holds two workers of 5 GB, of which it takes two thirds."""
    config = configured(train__workers=4)
    layout = layouts.laid_out(config, cluster)
    found = plan.choose(config, cluster, layout, needs(encoder, config, 4, 5, 4, 3, 2, 1), prices.table())
    assert found.nodes == {"worker": 2}
    assert (found.way, found.per_node) == (Way(), 2)


def test_what_fits_no_node_is_shared_out_then_computed_again(cluster: layouts.Cluster, encoder: Path) -> None:
    config = configured(train__workers=4)
    layout = layouts.laid_out(config, cluster)
    shared = plan.choose(config, cluster, layout, needs(encoder, config, 4, 12, 9, 8, 7, 6), prices.table())
    assert shared.way == Way(shard=1)
    assert shared.why == "shard=0 would take 12,000 MB a worker, which does not fit; no weight changes by it"
    gathered = plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 9), prices.table())
    assert gathered.way == Way(shard=3)
    again = plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 11, 13, 9), prices.table())
    assert again.way.settings == {"train.shard": 1, "train.gradient_checkpointing": True}
    with pytest.raises(ConfigError, match=r"needs 11\.0 GB even with shard=1"):
        plan.choose(config, cluster, layout, needs(encoder, config, 4, 14, 13, 12, 12, 12, 11), prices.table())


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
    cluster = layouts.of_document(kinds)
    layout = layouts.laid_out(config, cluster)
    with pytest.raises(ConfigError, match=r"needs 24\.0 GB even .* name GPUs of more than 16 GB, or --set train\.tok"):
        plan.choose(config, cluster, layout, [(Way(), Need(24 * GB, 0, 0, 0, process=GB))], prices.table())


def test_only_one_worker_writes_checkpoints(cluster: layouts.Cluster) -> None:
    """A node of 16 GB, of which two thirds are 10.4: with a copy of 6, there is room for two of 2 GB."""
    [kind] = [one for one in cluster.kinds if one.name == "worker"]
    assert plan.holds(Need(2 * GB, 0, 0, 0, checkpoint=6 * GB), supply.Needs("cpu"))(kind) == 2
    assert plan.holds(Need(2 * GB, 0, 0, 0, checkpoint=11 * GB), supply.Needs("cpu"))(kind) == 0


def test_a_run_that_starts_with_fewer_is_planned_with_those_that_have_room(
    cluster: layouts.Cluster, encoder: Path
) -> None:
    config = configured(train__workers=64, train__min_workers=8)
    layout = layouts.laid_out(config, cluster)
    assert (layout.workers, layout.room, layout.least) == (64, 27, 8)  # 4 nodes of 8, less 5 for the data of 27
    found = plan.choose(config, cluster, layout, needs(encoder, config, 64, 1), prices.table())
    assert found.nodes == {"worker": 4}


def two_types(first: dict[str, Any], second: dict[str, Any]) -> layouts.Cluster:
    """A head without room, and two types of worker by their `node_config`."""
    kinds = {
        "head": {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}},
        "first": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": first},
        "second": {"resources": {"CPU": 8}, "max_workers": 4, "node_config": second},
    }
    file = {"provider": {"type": "aws"}, "head_node_type": "head", "max_workers": 4, "available_node_types": kinds}
    return layouts.of_document(file)


SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@pytest.mark.parametrize("unpriced", [{"InstanceType": "x9.large"}, {"InstanceType": "x9.large", **SPOT}, {}])
def test_a_type_without_a_price_is_never_the_cheapest(encoder: Path, unpriced: dict[str, Any]) -> None:
    """`c7i.8xlarge` costs more than 1 $ an hour. The type without a price is taken where the other has no room."""
    cluster = two_types(unpriced, {"InstanceType": "c7i.8xlarge"})
    for workers, nodes in ((4, {"second": 1}), (20, {"second": 3})):
        config = configured(train__workers=workers)
        layout = layouts.laid_out(config, cluster)
        found = plan.choose(config, cluster, layout, needs(encoder, config, workers, 1), prices.table())
        assert found.nodes == nodes
    few = replace(cluster, kinds=tuple(replace(kind, most=2) for kind in cluster.kinds))
    found = plan.choose(config, few, layout, needs(encoder, config, 20, 1), prices.table())
    assert found.nodes.keys() == {"first", "second"}
    assert plan.money(few, found.nodes, prices.table(), 1.0, 0.0) is None


def test_a_recipe_s_own_way_comes_first_and_then_those_that_take_less(encoder: Path) -> None:
    own = configured(train__shard=3)
    assert next(plan.ways(own, encoder, 2)) == Way(shard=3)
    assert list(plan.ways(own, encoder, 2))[1] == Way(gradient_checkpointing=True)


# ---------------------------------------------------------------------------------------------------------------- hours


def planned(config: Config, cluster: layouts.Cluster, given: pace.Pace = pace.CPU) -> plan.Hours:
    layout = layouts.laid_out(config, cluster)
    chosen = plan.choose(config, cluster, layout, [(Way(), Need(1e9, 0, 0, 0))], prices.table())
    return plan.hours(config, layout, chosen, SHAPE, ROWS, given, cluster.kinds[0])


def test_hours_are_rows_by_the_pace(cluster: layouts.Cluster) -> None:
    """One worker, whose products come to 1e9 operations a second and whose step takes nothing."""
    config = configured(train__workers=1, train__epochs=2)
    found = planned(config, cluster, pace.Pace(1e9, 1e30, pace.HOST, "", 0.0))
    assert found.updates == 2 * -(-10_000 // 32)
    flops = SHAPE.flops(np.full(32, 32))
    assert found.train_s == pytest.approx(found.updates * flops / 1e9)
    assert found.evaluate_s == pytest.approx(flops / 32 / 1e9 / 3 * (2 * 1250 + 1250))


def test_the_last_update_is_followed_by_an_evaluation(cluster: layouts.Cluster) -> None:
    """Of 313 updates: one that no whole number of `evaluate_every` has led to."""
    given = pace.Pace(1e9, 1e30, pace.HOST, "", 0.0)
    once, thrice = (
        planned(configured(train__workers=1, train__epochs=1, train__evaluate_every=every), cluster, given)
        for every in (1000, 150)
    )
    assert once.updates == 313
    assert thrice.evaluate_s / once.evaluate_s == pytest.approx((3 + 1) / (1 + 1))


def test_through_a_frozen_encoder_nothing_goes_back(cluster: layouts.Cluster) -> None:
    """A third of the operations, and the head's weights alone to exchange and step; an evaluation takes as long as
    ever."""
    given = pace.Pace(1e9, 1e30, pace.HOST, "", 0.0)
    plain, frozen = (
        planned(configured(train__workers=1, train__epochs=2, model__freeze=freeze), cluster, given)
        for freeze in ("none", "encoder")
    )
    assert frozen.train_s == pytest.approx(plain.train_s / 3)
    assert frozen.evaluate_s == pytest.approx(plain.evaluate_s)
    work = pace.work(configured(model__freeze="encoder").recipe, SHAPE, ROWS)
    assert work.gradient == work.weights == 4 * 384 * 384


def test_an_evaluation_computes_no_layer_again(cluster: layouts.Cluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    given, layout = pace.Pace(1e9, 1e30, pace.HOST, "", 0.0), layouts.laid_out(config, cluster)
    ways = [(Way(gradient_checkpointing=again), Need(1e9, 0, 0, 0)) for again in (False, True)]
    plain, again = (
        plan.hours(
            config, layout, plan.choose(config, cluster, layout, [way], {}), SHAPE, ROWS, given, cluster.kinds[0]
        )
        for way in ways
    )
    assert again.train_s == pytest.approx(4 / 3 * plain.train_s)
    assert again.evaluate_s == plain.evaluate_s


def test_a_search_takes_its_budget_and_its_end(cluster: layouts.Cluster) -> None:
    """With 100 hours a full run, 8 of them and 4 for the end by default."""
    full = 2 * -(-10_000 // 32) * 32

    def hours(trials: int = 1, **tune: float) -> float:
        config = configured(train__workers=1, train__epochs=2, **{f"tune__{name}": one for name, one in tune.items()})
        found = replace(planned(config, cluster), train_s=300_000.0, evaluate_s=60_000.0, start_s=0.0)
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
    found = replace(planned(limited, cluster), train_s=3600.0, evaluate_s=0.0, start_s=0.0)
    assert plan.searched(limited, found, 1) == pytest.approx(7)


@pytest.mark.parametrize("name", ["head", "worker"])
def test_the_price_of_a_type_that_no_table_has_is_asked_for_and_taken(name: str) -> None:
    """By the file of prices and by the cluster's own; not taken for a node that costs nothing."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    document["available_node_types"][name]["node_config"]["InstanceType"] = "m7i.metal-48xl"
    cluster, nodes = layouts.of_document(document), {"worker": 2}
    assert plan.money(cluster, nodes, prices.table(), 100.0, 0.0) is None
    found = plan.money(cluster, nodes, prices.table(None, {"prices": {"m7i.metal-48xl": 5.0}}), 100.0, 0.0)
    assert found is not None
    assert found.dollars == pytest.approx(100 * (0.101 + 2 * 5.0 if name == "worker" else 5.0 + 2 * 0.357))


def test_nodes_that_are_up_whatever_runs_are_paid_for() -> None:
    """Two of the least number of four are taken away from the run, and of the others nothing is repeated."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    plain, nodes = layouts.of_document(document), {"worker": 2}
    document["available_node_types"]["worker"]["min_workers"] = 4
    kept = layouts.of_document(document)
    few, many = (plan.money(one, nodes, prices.table(), 100.0, 3600.0) for one in (plain, kept))
    assert few is not None
    assert many is not None
    assert few.dollars == pytest.approx(100 * 0.815)
    assert many.dollars == pytest.approx(100 * 1.529)
    assert many.interruptions == pytest.approx(few.interruptions)
    assert money.idle(plain, nodes) == []
    assert money.idle(kept, nodes) == ["2 more of worker are up whatever runs (min_workers), and paid for"]


def test_a_worker_s_hour_has_a_price_whatever_it_runs_on() -> None:
    """As a run's report has it: by the setting, else by the file."""
    table = prices.table() | {"worker": prices.of(0.04)}
    assert money.worker_price(configured(), prices.table()) is None
    assert money.worker_price(configured(), table) == 0.04
    assert money.worker_price(configured(tune__price=0.1), table) == 0.1
    assert money.of_workers(10.0, 8, 0.5) == money.Cost(10.0, 40.0, of_workers=True)


def test_an_interruption_repeats_what_is_not_saved(cluster: layouts.Cluster) -> None:
    config = configured(train__workers=1, train__epochs=2)
    found = planned(config, cluster)
    assert plan.repeated_s(config, found, watched=True) == found.update.seconds
    assert plan.repeated_s(config, found, watched=False) == pytest.approx(found.updates / 4 * found.update.seconds)
    often = configured(train__workers=1, train__epochs=2, train__save_every=10)
    assert plan.repeated_s(often, found, watched=False) == pytest.approx(5 * found.update.seconds)


# ------------------------------------------------------------------------------------------------------------- the verb


def test_the_head_s_outputs_are_in_what_a_pass_takes(encoder: Path, cluster: layouts.Cluster) -> None:
    """Tags, which are numbers for each token."""
    from rtrain.cli import plan as verb

    config = configuration.load("entities", {"model.name": str(encoder), "train.workers": 1})
    layout = layouts.laid_out(config, cluster)
    needs = [next(verb._needs(config, layout, encoder, replace(ROWS, outputs=number)))[1] for number in (2, 300)]
    assert needs[1].activations > 1.2 * needs[0].activations


Cli = Callable[..., tuple[int, str, str]]


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
    assert parts["process"] == memory.PROCESS / 1e6
    assert made["updates"] == 5 * -(-10_000 // 128)
    assert sum(made["seconds"].values()) == pytest.approx(3600 * made["hours"])
    assert [one["workers"] for one in made["scaling"]] == [1, 8, 64, 512, 4096]
    assert 0 < made["cost"]["spot_dollars"] < made["cost"]["dollars"] < 1
    _, text, _ = run(*given)
    assert [line.split()[0] for line in text.splitlines()] == [
        "fits",
        "strategy",
        "memory",
        "an",
        "hours",
        "scaling",
        "money",
    ]


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
    assert made["update_s"]["waiting"] > 0.1 * made["update_s"]["compute"]  # the stages for each other
    assert [one["workers"] for one in made["scaling"]] == [2, 8, 64, 512, 4096]
    assert "strategy   ddp, pipeline 2: " in run(*given, "--cluster", "here.yaml")[1]


def test_what_is_not_foretold_is_noted(run: Cli, encoder: Path) -> None:
    given = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 2, "--json", "--set")
    plain = json.loads(run(*given, "train.context=1")[1])
    made = json.loads(run(*given, "train.context=2")[1])
    assert [note for note in made["notes"] if note not in plain["notes"]] == [
        "train.context: what 2 workers of a replica exchange in each pass is not foretold, and memory is that of "
        "workers which have all tokens"
    ]
    assert plain["memory_mb"]["segment"] > 0  # two whole models of one node
    assert "segment" not in made["memory_mb"]
    staged = configured(train__workers=4, train__shard=3, train__pipeline=2).recipe.train
    assert plan.untold(staged) == ["train.pipeline: memory is that of stages whose layers are neither cut nor shared"]
    assert plan.untold(configured(train__shard=3, train__offload=True).recipe.train) == [
        "train.offload: how long weights and gradients are on their way to GPUs and back is not foretold"
    ]


def test_it_says_how_a_run_would_scale_over_other_wires(run: Cli, encoder: Path) -> None:
    given = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 2, "--wires", "efa", "--wires", "1gbit")
    made = json.loads(run(*given, "--json")[1])
    own, fast, slow = (
        [one["efficiency"] for one in curve] for curve in (made["scaling"], *made["scaling_over"].values())
    )
    assert list(made["scaling_over"]) == ["efa", "1gbit"]
    assert all(one > two > three for one, two, three in zip(fast[2:], own[2:], slow[2:], strict=True))  # 10gbit's own
    assert "scaling    efficiency by workers, over efa: 1 100%" in run(*given)[1]
    code, _, err = run("plan", "intent", "--rows", 1000, "--wires", "wifi")
    assert (code, "--wires=wifi: not known" in err) == (2, True)


def test_a_layout_that_would_wait_for_ever_is_refused(run: Cli) -> None:
    code, out, err = run("plan", "intent", "--workers", 64)
    assert (code, out) == (2, "")
    assert "train.workers=64" in err
    assert "write --workers" in err


@pytest.mark.parametrize(("workers", "pipeline", "said"), [(2, 4, "train.workers=2"), (3, 2, "train.workers=3")])
def test_a_way_that_a_run_could_not_go_is_refused(
    run: Cli, encoder: Path, workers: int, pipeline: int, said: str
) -> None:
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", workers)
    code, out, err = run(*words, "--set", f"train.pipeline={pipeline}")
    assert (code, out) == (2, "")
    assert f"train.pipeline={pipeline}: it does not divide {said}" in err


def test_a_length_that_the_model_cannot_read_is_refused(run: Cli, encoder: Path) -> None:
    code, out, err = run("plan", "intent", "--model", encoder, "--rows", 1000, "--set", "data.max_tokens=4096")
    assert (code, out) == (2, "")
    assert "data.max_tokens=4096: the model reads" in err


GPUS: dict[str, Any] = {
    "node_config": {"InstanceType": "g5.xlarge"},
    "resources": {"CPU": 4, "GPU": 1},
    "max_workers": 3,
}
CPUS = {"node_config": {"InstanceType": "m7i.xlarge"}, "resources": {"CPU": 4}, "max_workers": 3}


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (GPUS, ("train.tensor=2",), "train.tensor=2: it does not divide train.workers=3 (3 workers instead of 4"),
        (GPUS, ("train.pipeline=2",), "train.pipeline=2: it does not divide train.workers=3 (3 workers instead of 4"),
        (GPUS, ("train.context=2",), "train.context=2: it does not divide train.workers=3 (3 workers instead of 4"),
        (CPUS, ("train.shard=3", "train.offload=true"), "train.offload=True: the processor's memory is where"),
    ],
)
def test_what_the_devices_of_the_cluster_cannot_do_is_refused(
    run: Cli, encoder: Path, kind: dict[str, Any], settings: tuple[str, ...], said: str
) -> None:
    """As a start on it refuses them: there are three GPUs for four workers, or none."""
    head = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}}
    some = {"provider": {"type": "aws", "region": "us-west-2"}, "max_workers": 3, "head_node_type": "head"}
    made = {"cluster_name": "some", **some, "available_node_types": {"head": head, "worker": kind}}
    Path("some.yaml").write_text(yaml.safe_dump(made))
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 4, "--cluster", "some.yaml")
    assert run(*words)[0] == 0
    code, out, err = run(*words, *(word for one in settings for word in ("--set", one)))
    assert (code, out) == (2, "")
    assert said in err


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
    unknown, known = ([note for note in one["notes"] if "was not checked" in note] for one in made)
    assert unknown[0].startswith(
        "the memory of g5.xlarge's GPU is not known and was not checked: write accelerator_type:"
    )
    assert known == []
    assert "A10G, for which the GPU of g5.xlarge" in made[0]["pace"]
    assert made[1]["pace"].endswith("of the peak of an H100")
    cluster = layouts.of_document({**some, "available_node_types": {"head": head, "worker": named}})
    held = [plan.holds(Need(total * GB, 0, 0, 0), supply.Needs("gpu", 1))(cluster.kinds[0]) for total in (67, 69)]
    assert held == [1, 0]  # of 80 GB


def test_exchanges_of_processes_are_not_those_of_gpus(run: Cli, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "exchanges", lambda *given, **more: pytest.fail("measured"))
    head = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m7i.large"}}
    some = {"provider": {"type": "aws", "region": "us-west-2"}, "max_workers": 3, "head_node_type": "head"}
    nodes = {"head": head, "worker": {"node_config": {"InstanceType": "p4d.24xlarge"}, "max_workers": 1}}
    Path("some.yaml").write_text(yaml.safe_dump({"cluster_name": "some", **some, "available_node_types": nodes}))
    words = ("plan", "intent", "--model", encoder, "--rows", 1000, "--workers", 8, "--cluster", "some.yaml", "--json")
    plain, measured = (json.loads(run(*words, *more)[1]) for more in ((), ("--measure",)))
    assert measured["update_s"] == plain["update_s"]
    assert [note for note in measured["notes"] if note not in plain["notes"]] == [
        "--measure: nothing was measured, since GPUs do not exchange by what processes of a machine do"
    ]


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
    assert "money      unknown: a node's price is not known; write it, or that of a worker" in run(*words)[1]
    (tmp_path / "prices.yaml").write_text("worker: {on_demand: 400}\n")
    made = json.loads(run(*words, "--prices", "prices.yaml", "--json")[1])
    assert made["cost"]["dollars"] == pytest.approx(made["hours"] * 2 * 400)
    assert made["cost"]["spot_dollars"] is None
    assert " $ by the price of a worker's hour\n" in run(*words, "--prices", "prices.yaml")[1]


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
    assert (
        " $ on demand; spot nodes would be taken away faster than it gets on: write a smaller train" in run(*words)[1]
    )


def test_a_pilot_chooses_the_aggregation_frequency(run: Cli, encoder: Path, tmp_path: Path) -> None:
    pilot = Run(tmp_path / "pilot")
    pilot.folder.mkdir()
    settings = {"model__name": str(encoder), "train__workers": 2, "train__aggregation_frequency": 4}
    pilot.config.write_text(configuration.to_yaml(configured(**settings)))
    for event in LOG:
        events.append(pilot.folder, event["kind"], **{key: value for key, value in event.items() if key != "kind"})
    code, out, err = run("plan", "--choose-k", "--like", pilot.folder, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert [one["k"] for one in made["options"]] == [1, 2, 4, 8]
    best = min(made["options"], key=lambda one: one["relative"])
    assert (best["relative"], made["aggregation_frequency"]) == (1.0, best["k"])
    assert made["settings"] == best["settings"]
    # As a search carries it: by the root of the rows.
    assert [one["lr"] for one in made["options"]] == pytest.approx([3e-4 * (k / 4) ** 0.5 for k in (1, 2, 4, 8)])
    words = ("plan", "--choose-k", "--like", pilot.folder)
    assert run(*words)[1].splitlines()[-1].startswith(f"write --set train.aggregation_frequency={best['k']} --set ")
    linear = json.loads(run(*words, "--set", "tune.lr_scaling=linear", "--json")[1])
    assert [one["lr"] for one in linear["options"]] == pytest.approx([3e-4 * k / 4 for k in (1, 2, 4, 8)])
    assert run(*words, "--set", "tune.no_such=1")[0] == 2
    code, _, err = run("plan", "intent", *words[1:], "--workers", 4, "--cluster", "c.yaml", "--set", "train.epochs=2")
    assert code == 2
    for said in ("recipe=intent: ", "--workers=4: ", "--cluster=c.yaml: ", "train.epochs=2: "):
        assert f"{said}--choose-k decides by the run --like" in err


@pytest.mark.parametrize("words", [("plan", "--choose-k"), ("plan", "intent", "--rows", 1000)])
def test_a_run_that_is_not_there_is_named(run: Cli, encoder: Path, words: tuple[Any, ...]) -> None:
    code, _, err = run(*words, *(("--model", encoder) if "intent" in words else ()), "--like", "nowhere")
    assert (code, "nowhere holds no run" in err) == (1, True)


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
    ("words", "said"),
    [
        (("plan",), "recipe: missing"),
        (("plan", "intent", "--cluster", "none.yaml"), "no such file"),
        (("plan", "--choose-k"), "needs a pilot"),
    ],
)
def test_what_is_lacking_is_named(run: Cli, words: tuple[str, ...], said: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_workers: 4\n#", "max_workers:\n#", "max_workers of the cluster's file: is no number"),
        ("resources: {CPU: 8}", "resources: {CPU: eight}", "worker.resources.CPU of the cluster's file=eight"),
    ],
)
def test_a_file_that_nobody_has_looked_at_is_refused_in_a_sentence(run: Cli, old: str, new: str, said: str) -> None:
    text = Path("cluster.yaml").read_text()
    assert old in text
    Path("cluster.yaml").write_text(text.replace(old, new, 1))
    code, _, err = run("plan", "intent", "--rows", 1000)
    assert code == 2
    assert said in err


def test_other_ways_to_ask_wrongly(run: Cli) -> None:
    assert run("plan", "intent", "--tokens", 64)[0] == 2
    code, _, err = run("plan", "--write-prices", "no/such/folder/p.yaml")
    assert (code, "no/such/folder/p.yaml: No such file or directory" in err) == (1, True)
    Path("date.yaml").write_text("cluster_name: 2024-13-45\n")
    code, _, err = run("plan", "intent", "--rows", 1000, "--cluster", "date.yaml")
    assert (code, "no YAML (month must be in" in err) == (2, True)
    Path("latin.yaml").write_bytes("# Größe\ncluster_name: x\n".encode("latin-1"))
    code, _, err = run("plan", "intent", "--rows", 1000, "--cluster", "latin.yaml")
    assert (code, "no YAML" in err) == (2, True)
