"""Which way to hold a model is taken: the first whose memory fits where a worker has least of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from rtrain.parallel import layout
from rtrain.parallel.layout import Way
from rtrain.planning import memory_fit
from rtrain.planning.memory_fit import Pass, Room
from rtrain.planning.memory_needs import Need
from tests.tiny import make_encoder

MB, GB = 1e6, 1e9


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


# ----------------------------------------------------------------------------------------------------------- the choice

NEEDS = [
    (Way(), Need(900 * MB, 0, 0, 0)),
    (Way(1), Need(700 * MB, 0, 0, 0)),
    (Way(2), Need(500 * MB, 0, 0, 0)),
]


def asked() -> Iterator[tuple[Way, Need]]:
    """Those of `NEEDS`, of which the last may not be asked for."""
    yield from NEEDS[:2]
    raise AssertionError


def test_the_first_that_fits_is_taken_and_says_why() -> None:
    assert memory_fit.first(asked(), Room(2000 * MB, 2)).way == Way()
    found = memory_fit.first(asked(), Room(1500 * MB, 2))
    assert found.way == Way(1)
    assert found.need is NEEDS[1][1]


def test_where_none_fits_the_smallest_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        memory_fit.first(NEEDS, Room(400 * MB, 1))
    assert [problem.code for problem in error.value.problems] == ["out_of_memory"]


def test_one_worker_of_a_node_writes_checkpoints_and_none_of_it_is_on_a_gpu() -> None:
    need = Need(100 * MB, 0, 0, 0, checkpoint=50 * MB, process=30 * MB)
    assert Room(1, 3).taken(need) == 3 * 130 * MB + 50 * MB
    assert Room(1, 1, "gpu").taken(Need(100 * MB, 0, 0, 0, process=30 * MB)) == 100 * MB


# ------------------------------------------------------------------------------------------------------------- the room


def test_room_is_that_of_the_node_where_a_worker_has_least() -> None:
    nodes = [{"CPU": 2.0, "memory": 8 * GB}, {"CPU": 8.0, "memory": 16 * GB}, {"CPU": 0.0, "memory": 1 * GB}]
    assert memory_fit.room(nodes, "cpu", 8) == Room(memory_fit.USABLE * 16 * GB, 8)
    assert memory_fit.room(nodes, "cpu", 2) == Room(memory_fit.USABLE * 8 * GB, 2)
    assert memory_fit.room([{"CPU": 8.0}], "cpu", 2) is None


def test_room_on_gpus_is_that_of_the_smallest_known_kind() -> None:
    nodes = [{"GPU": 4.0, "accelerator_type:H100": 1.0}, {"GPU": 1.0, "accelerator_type:T4": 1.0}, {"CPU": 4.0}]
    assert memory_fit.room(nodes, "gpu", 4) == Room(memory_fit.USABLE_GPU * 16 * GB, 1, "gpu")
    assert memory_fit.room([{"GPU": 1.0, "accelerator_type:X1": 1.0}], "gpu", 1) is None
    # An A100 of 80 GB has both names, where somebody writes the second one.
    large = {"GPU": 1.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    assert memory_fit.room([large], "gpu", 1) == Room(memory_fit.USABLE_GPU * 80 * GB, 1, "gpu")
    for kind, size in (("H200", 141), ("V100", 16), ("L40S", 48)):
        found = memory_fit.room([{"GPU": 1.0, f"accelerator_type:{kind}": 1.0}], "gpu", 1)
        assert found == Room(memory_fit.USABLE_GPU * size * GB, 1, "gpu")


# ------------------------------------------------------------------------------------------------------------ the needs


def test_every_way_is_foretold_by_the_model_s_own_pass(encoder: Path) -> None:
    recipe = config.load("intent").recipe
    passes = Pass(memory_fit.lengths(recipe, "cpu", 64), tokens_of_update=8192.0)
    found = dict(memory_fit.needs(recipe, encoder, layout.possible(recipe, encoder, 4), passes, 4, "cpu"))
    assert len(found) == 12  # it has two attention heads
    plain, cut, both = (found[way] for way in (Way(), Way(tensor=2), Way(3, 2)))
    assert cut.weights < plain.weights
    assert cut.activations < plain.activations
    assert both.weights == pytest.approx(cut.weights / 2)
    assert {need.checkpoint for need in found.values()} == {plain.checkpoint}
    again = found[Way(gradient_checkpointing=True)]
    assert again.activations < plain.activations


def test_passes_are_as_long_as_the_recipe_allows() -> None:
    recipe = config.load("intent", {"train.tokens_per_pass": 1000}).recipe
    assert memory_fit.lengths(recipe, "cpu", 300) == (300,) * 3
    assert memory_fit.lengths(recipe, "cpu", 3000) == (3000,)
    assert Pass((100,), tokens_of_update=400.0).several(2)
    assert not Pass((100,), tokens_of_update=400.0).several(4)
