"""Which way to hold a model is taken: the first whose memory fits where a worker has least of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from rtrain.parallel import layout
from rtrain.parallel.layout import ParallelLayout
from rtrain.planning import memory_fit
from rtrain.planning.memory_fit import MemoryLimit, MicroBatchShape
from rtrain.planning.memory_needs import WorkerMemory
from tests.support.tiny import make_encoder

MB, GB = 1e6, 1e9


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


# ----------------------------------------------------------------------------------------------------------- the choice

NEEDS = [
    (ParallelLayout(), WorkerMemory(900 * MB, 0, 0, 0)),
    (ParallelLayout(1), WorkerMemory(700 * MB, 0, 0, 0)),
    (ParallelLayout(2), WorkerMemory(500 * MB, 0, 0, 0)),
]


def lazy_needs() -> Iterator[tuple[ParallelLayout, WorkerMemory]]:
    """The first two of `NEEDS`; the last one must not be evaluated."""
    yield from NEEDS[:2]
    raise AssertionError


def test_the_first_that_fits_is_taken_and_says_why() -> None:
    assert memory_fit.first_fitting_layout(lazy_needs(), MemoryLimit(2000 * MB, 2)).layout == ParallelLayout()
    choice = memory_fit.first_fitting_layout(lazy_needs(), MemoryLimit(1500 * MB, 2))
    assert choice.layout == ParallelLayout(1)
    assert choice.worker_memory is NEEDS[1][1]


def test_where_none_fits_the_smallest_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        memory_fit.first_fitting_layout(NEEDS, MemoryLimit(400 * MB, 1))
    assert [problem.code for problem in error.value.problems] == ["out_of_memory"]


def test_one_worker_of_a_node_writes_checkpoints_and_none_of_it_is_on_a_gpu() -> None:
    need = WorkerMemory(100 * MB, 0, 0, 0, checkpoint=50 * MB, process=30 * MB)
    assert MemoryLimit(1, 3).used_bytes(need) == 3 * 130 * MB + 50 * MB
    assert MemoryLimit(1, 1, "gpu").used_bytes(WorkerMemory(100 * MB, 0, 0, 0, process=30 * MB)) == 100 * MB


# ------------------------------------------------------------------------------------------------------------- the room


def test_room_is_that_of_the_node_where_a_worker_has_least() -> None:
    nodes = [{"CPU": 2.0, "memory": 8 * GB}, {"CPU": 8.0, "memory": 16 * GB}, {"CPU": 0.0, "memory": 1 * GB}]
    assert memory_fit.tightest_memory_limit(nodes, "cpu", 8) == MemoryLimit(memory_fit.USABLE_MEMORY_SHARE * 16 * GB, 8)
    assert memory_fit.tightest_memory_limit(nodes, "cpu", 2) == MemoryLimit(memory_fit.USABLE_MEMORY_SHARE * 8 * GB, 2)
    assert memory_fit.tightest_memory_limit([{"CPU": 8.0}], "cpu", 2) is None


def test_room_on_gpus_is_that_of_the_smallest_known_kind() -> None:
    nodes = [{"GPU": 4.0, "accelerator_type:H100": 1.0}, {"GPU": 1.0, "accelerator_type:T4": 1.0}, {"CPU": 4.0}]
    assert memory_fit.tightest_memory_limit(nodes, "gpu", 4) == MemoryLimit(
        memory_fit.USABLE_GPU_SHARE * 16 * GB, 1, "gpu"
    )
    assert memory_fit.tightest_memory_limit([{"GPU": 1.0, "accelerator_type:X1": 1.0}], "gpu", 1) is None
    # An A100 of 80 GB has both names, where somebody writes the second one.
    large = {"GPU": 1.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    assert memory_fit.tightest_memory_limit([large], "gpu", 1) == MemoryLimit(
        memory_fit.USABLE_GPU_SHARE * 80 * GB, 1, "gpu"
    )
    for kind, size in (("H200", 141), ("V100", 16), ("L40S", 48)):
        limit = memory_fit.tightest_memory_limit([{"GPU": 1.0, f"accelerator_type:{kind}": 1.0}], "gpu", 1)
        assert limit == MemoryLimit(memory_fit.USABLE_GPU_SHARE * size * GB, 1, "gpu")


# ------------------------------------------------------------------------------------------------------------ the needs


def test_every_way_is_foretold_by_the_model_s_own_pass(encoder: Path) -> None:
    recipe = config.load_config("intent").recipe
    passes = MicroBatchShape(memory_fit.largest_micro_batch(recipe, "cpu", 64), tokens_per_step=8192.0)
    result = dict(
        memory_fit.memory_of_layouts(recipe, encoder, layout.iter_valid_layouts(recipe, encoder, 4), passes, 4, "cpu")
    )
    assert len(result) == 12  # it has two attention heads
    plain, cut, combined = (
        result[way] for way in (ParallelLayout(), ParallelLayout(tensor_parallel_size=2), ParallelLayout(3, 2))
    )
    assert cut.weights < plain.weights
    assert cut.activations < plain.activations
    assert combined.weights == pytest.approx(cut.weights / 2)
    assert {need.checkpoint for need in result.values()} == {plain.checkpoint}
    repeated = result[ParallelLayout(gradient_checkpointing=True)]
    assert repeated.activations < plain.activations


def test_passes_are_as_long_as_the_recipe_allows() -> None:
    recipe = config.load_config("intent", {"train.max_tokens_per_micro_batch": 1000}).recipe
    assert memory_fit.largest_micro_batch(recipe, "cpu", 300) == (300,) * 3
    assert memory_fit.largest_micro_batch(recipe, "cpu", 3000) == (3000,)
    assert MicroBatchShape((100,), tokens_per_step=400.0).has_several(2)
    assert not MicroBatchShape((100,), tokens_per_step=400.0).has_several(4)
