"""Pipelines on real processes: the gradient and the weights of one worker by every schedule, and one checkpoint for all
layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rtrain.models import network_parts
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import build_strategy
from rtrain.parallel.profiler import BACKWARD, FORWARD
from rtrain.trainer import step
from tests.support.strategies import (
    UPDATES,
    check_the_same,
    die_within_step,
    kept,
    masked_lm_gradient,
    recipe,
    share_of,
    told,
    told_alone,
    trained,
)
from tests.support.tiny import make_masked
from tests.support.workers import joined, once, run
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import LOSS, distance, make_network, make_still_encoder

pytestmark = pytest.mark.timeout(900)
"""Four processes and their trainings before the first test: on a machine that is busy otherwise they take minutes."""
LAYERS = 4
TWO: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
}
"""Layouts of two workers."""
FOUR: dict[str, dict[str, Any]] = {
    "4 stages": {"pipeline_parallel_size": 4, "workers": 4},
    "2 replicas": {"pipeline_parallel_size": 2, "workers": 4},
    "2 replicas, interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved", "workers": 4},
}
LAYOUTS = {**TWO, **FOUR}
PASSES = {"gpipe": [5, 1, 1, 4], "1f1b": [5, 2, 2, 4], "interleaved": [6, 2, 2, 4]}
"""Micro-batches of the steps `UPDATES` on a worker, with those of the schedule."""
FAMILIES = {
    "bert": ("gpipe", "4 stages"),
    "distilbert": ("1f1b",),
    "electra": ("1f1b",),
    "modernbert": ("gpipe", "interleaved"),
    "roberta": ("1f1b", "interleaved"),
}
"""Masked language models, whose word embedding is tied to their head, and layouts of them. The second computes padding;
the layers of the last are computed again in the backward pass."""
KILLED_AT = 2


class _Noticing(step.Observer):
    def __init__(self, notices: bool):
        self._notices = notices

    def stop_requested(self) -> bool:
        return self._notices


def _worker(rank: int, folder: Path) -> None:
    actual: dict[str, Any] = {"updates": {}, "said": {}, "spans": {}}
    for world, layouts in ((4, FOUR), (2, TWO)):
        if rank >= world:
            continue
        joined(rank, world, folder)
        for name, train in layouts.items():
            events: dict[str, Any] = {}
            exchange = build_strategy(
                make_network(folder / "encoder"),
                recipe(**train).train,
                log_event=lambda kind, events=events, **fields: events.update(fields),
            )
            actual["updates"][name] = trained(exchange, folder / name, **train)
            kinds = [span.kind for span in exchange.timeline.pop_spans()]
            actual["said"][name], actual["spans"][name] = events, [kinds.count(kind) for kind in (FORWARD, BACKWARD)]
        for family, options in FAMILIES.items():
            for name in (item for item in options if item in layouts):
                torch.save(_gradient(folder, family, layouts[name]), folder / f"{family}-{name}-{rank}.pt")
        if world == 2:
            actual["seeds"] = _seeds(folder)
            actual["notices"] = _notices(folder, rank)
            _start(folder, "1f1b, killed", rank, KILLED_AT)
            actual["runs"] = {name: told(_start(folder, name, rank)) for name in ("1f1b", "1f1b, killed", "gpipe")}
        else:
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(actual))


def _gradient(folder: Path, family: str, train: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The gradient, on rank 0, and the word embedding after the step, on the first and the last stage."""
    pads, recomputes = (family == list(FAMILIES)[place] for place in (1, -1))
    gradient, network = masked_lm_gradient(folder / family, train, pads=pads, recomputes=recomputes)
    table = network.get_input_embeddings().weight.detach()  # type: ignore[operator]
    return gradient | ({} if table.is_meta else {"table": table})


def _seeds(folder: Path) -> dict[str, list[int]]:
    """Seeds of each layer of this worker in the first step, by schedule."""
    actual = {}
    for name in TWO:
        network, seeds = make_network(folder / "encoder"), list[int]()
        layers: Any = network_parts.find_layers(network.base_model)  # type: ignore[arg-type]
        exchange = build_strategy(network, recipe(**TWO[name]).train)
        for layer in layers:
            if not next(layer.parameters()).is_meta:
                layer.attention.register_forward_hook(lambda *_, seeds=seeds: seeds.append(torch.initial_seed()))
        torch.manual_seed(7)
        step.StepRunner(exchange, torch.optim.SGD(network.parameters(), lr=0.0), LOSS, pad_id=0).run_step(
            share_of(0, 1, 0)
        )
        actual[name] = seeds
    return actual


def _notices(folder: Path, rank: int) -> list[bool]:
    """What this worker knows, after an update, of a notice that rank 0 alone was given."""
    actual = []
    for train in (TWO["1f1b"], {"tensor_parallel_size": 2}):
        network = make_network(folder / "encoder")
        exchange, optimizer = (
            build_strategy(network, recipe(**train).train),
            torch.optim.SGD(network.parameters(), lr=0.0),
        )
        done = step.StepRunner(exchange, optimizer, LOSS, pad_id=0, observer=_Noticing(rank == 0)).run_step(
            share_of(1, 1, 0)
        )
        actual.append(done.stop_requested)
    return actual


def _left_alone(rank: int, folder: Path) -> None:
    die_within_step(rank, folder, {"pipeline_parallel_size": 2}, share_of(0, 1, 0))


def _start(folder: Path, name: str, rank: int, kill: int | None = None) -> test_trainer.Ran:
    layout = TWO[name.partition(",")[0]]
    options: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9, "workers": 2, "world": 2, "rank": rank, **layout}
    return test_trainer.start(folder / "ground", folder / f"run {name}", kill=kill, **options)


Results = tuple[list[dict[str, Any]], Path]


@once("rtrain-pipelines-")
def on_workers(folder: Path) -> Results:
    make_still_encoder(folder / "encoder", layers=LAYERS)
    test_trainer.make_ground(folder / "ground")
    for family in FAMILIES:
        make_masked(folder / family, family, layers=LAYERS)
    trained(Strategy(make_network(folder / "encoder")), folder / "alone")
    run(_worker, (folder,), 4, within=800.0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)], folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_weights_and_moments_are_those_of_one_worker(name: str) -> None:
    """Also of updates in which a replica has no rows, or fewer passes than there are stages."""
    _, folder = on_workers()
    check_the_same(folder, name, "alone")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_worker_knows_loss_and_norm_and_the_rows_of_its_replica(name: str) -> None:
    results, _ = on_workers()
    every = [actual["updates"][name] for actual in results if name in actual["updates"]]
    assert len(every) == (4 if name in FOUR else 2)
    several = name.startswith("2 replicas")
    for number, rows in enumerate(UPDATES):
        item, *rest = (updates[number] for updates in every)
        assert all((other["loss"], other["norm"]) == (item["loss"], item["norm"]) for other in rest)
        firsts = [item, rest[1]] if several else [item]
        assert sum(entry["rows"] for entry in firsts) == rows


@pytest.mark.parametrize("name", TWO)
def test_a_worker_tells_the_time_of_each_pass(name: str) -> None:
    """Idle micro-batches of the schedule count, and so does each part."""
    results, _ = on_workers()
    parts = 2 if name == "interleaved" else 1
    assert [actual["spans"][name] for actual in results[:2]] == [[parts * sum(PASSES[name])] * 2] * 2


@pytest.mark.parametrize("name", TWO)
def test_a_stage_has_the_optimizer_s_state_of_its_own_weights_alone(name: str) -> None:
    results, folder = on_workers()
    sizes = results[0]["said"][name]["state_bytes"]
    moments = kept(folder, "alone", "moments")
    complete = sum(value.nbytes for key, value in moments.items() if not key.endswith(":step"))
    assert 0 < sum(sizes) - complete < 0.01 * complete
    # Twenty thousand words and positions of the first stage, beside half of the layers each.
    assert max(sizes) < 0.75 * sum(sizes)


@pytest.mark.parametrize(("family", "layout"), [(item, other) for item, actual in FAMILIES.items() for other in actual])
def test_architectures_and_tied_heads_have_the_gradient_of_one_worker(family: str, layout: str) -> None:
    _, folder = on_workers()
    reference = _gradient(folder, family, None)
    del reference["table"]
    files = sorted(folder.glob(f"{family}-{layout}-*.pt"))
    first, *rest = (torch.load(path, weights_only=True) for path in files)
    assert len(rest) == (3 if layout in FOUR else 1)
    table = first.pop("table")
    assert first.keys() == reference.keys()
    assert distance(first, reference) < 1e-10
    # The words are the first and the last stage's: both move them alike.
    assert torch.equal(table, rest[-1]["table"])
    assert not any("table" in actual for actual in rest[:-1])


def test_each_pass_and_part_has_masks_of_its_own_whatever_the_schedule() -> None:
    results, _ = on_workers()
    first, second = ({name: actual["seeds"][name] for name in TWO} for actual in results[:2])
    for seeds in (first, second):
        assert set(seeds["gpipe"]) == set(seeds["1f1b"])
    for name in TWO:
        assert not set(first[name]) & set(second[name])
    # Two layers of a part share its seed; parts of one layer have one each.
    assert len(set(first["1f1b"])) == PASSES["1f1b"][0]
    assert len(set(first["interleaved"])) == 2 * PASSES["interleaved"][0]


def test_a_notice_that_one_worker_was_given_is_known_to_its_whole_replica() -> None:
    results, _ = on_workers()
    assert [actual["notices"] for actual in results[:2]] == [[True, True]] * 2


def test_a_stage_whose_neighbour_dies_within_a_pass_ends_with_an_error() -> None:
    _, folder = on_workers()
    assert told_alone(_left_alone, folder)


def files_of(folder: Path, name: str) -> list[dict[str, str]]:
    updates = range(1, test_trainer.UPDATES + 1)
    return [test_trainer.fingerprint(folder / f"run {name}", update) for update in updates]


def test_a_run_resumes_bit_for_bit_with_dropout() -> None:
    results, folder = on_workers()
    assert files_of(folder, "1f1b") == files_of(folder, "1f1b, killed")
    assert [actual["runs"]["1f1b, killed"]["from"] for actual in results[:2]] == [KILLED_AT] * 2
    assert results[0]["runs"]["1f1b, killed"]["scores"] == results[1]["runs"]["1f1b"]["scores"]


def test_another_schedule_of_the_same_stages_is_the_same_run_bit_for_bit() -> None:
    _, folder = on_workers()
    assert files_of(folder, "1f1b") == files_of(folder, "gpipe")
