"""What a model in parts sends, and for how long its stages stand still."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration, events
from rtrain.config import Train
from rtrain.doctor.forecast import facts, pace, parted, scaling
from rtrain.doctor.forecast.facts import Shape
from rtrain.doctor.forecast.links import Fabric, Link, uniform
from rtrain.doctor.forecast.scaling import Compute, Parted, Work
from rtrain.run import Run
from tests.tiny import make_encoder

SHAPE = Shape(hidden=500, layers=4, inner=1000, vocabulary=1000)
"""A table of 2 MB, and layers of 8 MB each."""
MB = 1e6
ONE = uniform(Link("one", 0.0, 0.0, 0.0, 1 * MB))
"""Bytes alone: a megabyte a second. Two workers sum one in a second, and four in one and a half."""


def of(workers: int, tokens: float = 1000.0, gpu: bool = False, tied: bool = False, **train: Any) -> Parted:
    settings = Train(workers=workers, precision="fp32", tokens_per_pass=1000, **train)
    return parted.of(settings, SHAPE, tokens, ONE, workers, gpu=gpu, tied=tied)


def test_a_whole_model_sends_nothing_else() -> None:
    assert of(4) == scaling.WHOLE
    assert of(1, shard=3) == scaling.WHOLE


def test_a_share_of_the_step_sends_the_weights() -> None:
    assert of(2, shard=1) == Parted(step_shares=2, still_s=34 / 2)


@pytest.mark.parametrize(("gpu", "scattered"), [(False, 34.0), (True, 17.0)])
def test_shares_are_gathered_and_summed(gpu: bool, scattered: float) -> None:
    """34 MB of weights, of which layers have 32; half of a sum's seconds to gather them. Gloo shares no sum out."""
    second, third = of(2, 3000, gpu, shard=2), of(2, 3000, gpu, shard=3)
    assert second.beside_s == pytest.approx(17 + 3 * scattered)
    assert third.beside_s == pytest.approx(3 * (17 + 16 + scattered))
    assert (third.summed, third.step_shares, third.still_s) == (0.0, 2, 0.0)


def test_cut_layers_sum_vectors() -> None:
    """Four of each layer and those of the words, of 2 MB for 1,000 tokens."""
    found = of(2, 2000, tensor=2)
    assert found.still_s == pytest.approx(2 * 17 * 2.0)
    assert (found.parts, found.step_shares, found.summed) == (2, 2, 17 * MB)
    half = parted.of(Train(workers=2, tensor=2, precision="bf16"), SHAPE, 1000, ONE, 2, gpu=False, tied=False)
    assert half.still_s == pytest.approx(17.0)
    both = of(4, 2000, tensor=2, shard=3)
    assert (both.parts, both.step_shares) == (2, 4)
    assert both.still_s == pytest.approx(found.still_s)
    assert both.beside_s == pytest.approx(of(2, 2000, shard=3).beside_s / 2)


@pytest.mark.parametrize(
    ("schedule", "bubble", "sent"), [("gpipe", 3 / 8, 2 * 8), ("1f1b", 3 / 8, 2 * 8), ("interleaved", 3 / 16, 4 * 8)]
)
def test_stages_wait_for_the_first_and_the_last_pass(schedule: str, bubble: float, sent: int) -> None:
    found = of(4, 8000, pipeline=4, schedule=schedule)
    assert found.bubble == pytest.approx(bubble)
    assert found.still_s == pytest.approx(sent * 2.0)
    assert (found.parts, found.step_shares, found.summed) == (4, 4, 10 * MB)
    assert of(4, 8000, tied=True, pipeline=4, schedule=schedule).still_s == pytest.approx(sent * 2.0 + 2.0)


def test_stages_whose_layers_are_cut_are_of_as_many_workers_as_both_say() -> None:
    """Two stages of two workers each, which have half of two layers and of the table: 9 MB. Eight passes of 1,000
    tokens take nine sums of 2 MB, and a vector for each token forth and back."""
    found = of(8, 8000, pipeline=2, tensor=2)
    assert (found.parts, found.step_shares, found.summed) == (4, 4, 9 * MB)
    assert found.bubble == of(4, 8000, pipeline=2).bubble == pytest.approx(1 / 8)
    assert found.still_s == pytest.approx(8 * 9 * 2.0 + 2 * 8 * 2.0)


def test_stages_that_replicas_share_gather_their_own_layers() -> None:
    """18 MB of the first stage, 16 of them in layers, over two replicas: as of a model that is half as deep."""
    found, plain = of(4, 8000, pipeline=2, shard=3), of(4, 8000, pipeline=2)
    assert (found.parts, found.step_shares, found.summed) == (2, 4, 0.0)
    assert (found.still_s, found.bubble) == (plain.still_s, plain.bubble)
    assert found.beside_s == pytest.approx(8 * (2 * 8 + 1 + 18))
    assert of(4, 8000, pipeline=2, shard=2).beside_s == pytest.approx(9 + 8 * 18)


def test_an_update_in_parts_computes_as_much_and_waits_for_what_is_sent() -> None:
    compute, work = Compute(8.0, 6.0), Work(1e9, 20 * MB, 34 * MB)
    whole = scaling.update(compute, work, ONE, 4, 1.0, hides=False)
    assert (whole.compute_s, whole.exposed_s) == (14.0, 30.0)
    layout = Parted(2, 4, 10 * MB, beside_s=5.0, still_s=3.0, bubble=0.5)
    cut = scaling.update(compute, work, ONE, 4, 2.0, hides=False, parted=layout)
    # A replica of two makes both passes, each on half of the layers; two replicas sum 10 MB.
    assert cut.compute_s == pytest.approx(2.0 + 6.0)
    assert cut.exposed_s == cut.exchange_s == pytest.approx(10.0 + 3.0 + 5.0)
    assert cut.waiting_s == pytest.approx(3.0)
    beside = scaling.update(compute, work, ONE, 4, 2.0, hides=True, parted=Parted(beside_s=5.0, summed=0.0))
    assert beside.exposed_s == 0.0  # behind 12 s of passes
    assert beside.exchange_s == 5.0


@pytest.mark.parametrize("settings", [{"shard": 3}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}])
def test_a_finished_run_in_parts_tells_the_pace_by_which_it_takes_as_long(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """50 updates of 64 rows of 20 tokens in 20 s; a quarter of a megabyte a second between its workers."""
    encoder, run = make_encoder(tmp_path / "encoder"), Run(tmp_path / "run")
    run.folder.mkdir()
    workers = max(2, settings.get("tensor", 1) * settings.get("pipeline", 1))
    given = {f"train.{name}": value for name, value in settings.items()}
    config = configuration.load("intent", {"model.name": str(encoder), "train.rows_per_update": 64, **given})
    run.config.write_text(configuration.to_yaml(config))
    events.append(
        run.folder, "started", update=0, of=50, workers=workers, device="cpu", precision="fp32", rows_per_update=64
    )
    told = {"rows_seen": 3200, "real_tokens": 64_000, "seconds": {"train": 20.0}, "exchange": None}
    events.append(run.folder, "trained", updates=50, **told)
    found, recipe, shape = pace.of_run(run).pace, config.recipe, facts.of_model(encoder)
    work, fabric = pace.work(recipe, shape, facts.given(1, 20)), uniform(pace.HOST)
    parts = recipe.train.tensor * recipe.train.pipeline
    layout = parted.of(recipe.train, shape, 64 * 20 * parts / workers, fabric, workers, gpu=False, tied=False)
    passes = pace.passes(recipe, workers // parts)
    compute = replace(found.compute(work), spread=0.0)
    again = scaling.update(compute, work, fabric, workers, passes, hides=False, parted=layout)
    assert again.seconds == pytest.approx(0.4, rel=0.01)
    assert again.seconds > 1.01 * again.compute_s


def test_groups_share_a_node_s_way_out() -> None:
    """Four workers on two nodes. Two replicas of two: each part's sum goes between the nodes, beside the other's."""
    fabric = Fabric(Link("in", 0, 0, 0, 10 * MB), Link("out", 0, 0, 0, 1 * MB), per_node=2)
    assert fabric.seconds(1 * MB, 2, 2) == pytest.approx(2.0)
    assert fabric.seconds(1 * MB, 2) == pytest.approx(0.1)  # within a node
    assert fabric.sent(1 * MB, 2) == pytest.approx(0.1)
    assert fabric.sent(1 * MB, 4) == pytest.approx(1.0)
