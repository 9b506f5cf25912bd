"""Which way to hold a model is taken: the first whose memory fits where a worker has least of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError
from rtrain.parallel import layout
from rtrain.parallel.layout import ParallelLayout
from rtrain.planning.memory_estimate import (
    USABLE_GPU_SHARE,
    USABLE_MEMORY_SHARE,
    MemoryLimit,
    MicroBatchShape,
    WorkerMemory,
    first_fitting_layout,
    largest_micro_batch,
    memory_of_layouts,
    tightest_memory_limit,
)
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
    assert first_fitting_layout(lazy_needs(), MemoryLimit(2000 * MB, 2)).layout == ParallelLayout()
    choice = first_fitting_layout(lazy_needs(), MemoryLimit(1500 * MB, 2))
    assert choice.layout == ParallelLayout(1)
    assert choice.worker_memory is NEEDS[1][1]


def test_where_none_fits_the_smallest_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as error:
        first_fitting_layout(NEEDS, MemoryLimit(400 * MB, 1))
    assert [problem.code for problem in error.value.problems] == ["out_of_memory"]


def test_one_worker_of_a_node_writes_checkpoints_and_none_of_it_is_on_a_gpu() -> None:
    need = WorkerMemory(100 * MB, 0, 0, 0, checkpoint=50 * MB, process=30 * MB)
    assert MemoryLimit(1, 3).used_bytes(need) == 3 * 130 * MB + 50 * MB
    assert MemoryLimit(1, 1, "gpu").used_bytes(WorkerMemory(100 * MB, 0, 0, 0, process=30 * MB)) == 100 * MB


# ------------------------------------------------------------------------------------------------------------- the room


NODES = [{"CPU": 2.0, "memory": 8 * GB}, {"CPU": 8.0, "memory": 16 * GB}, {"CPU": 0.0, "memory": 1 * GB}]


@pytest.mark.parametrize(
    ("nodes", "workers", "usable", "sharing"), [(NODES, 8, 16, 8), (NODES, 2, 8, 2), ([{"CPU": 8.0}], 2, None, 0)]
)
def test_room_is_that_of_the_node_where_a_worker_has_least(
    nodes: list[dict[str, float]], workers: int, usable: float | None, sharing: int
) -> None:
    expected = None if usable is None else MemoryLimit(USABLE_MEMORY_SHARE * usable * GB, sharing)
    assert tightest_memory_limit(nodes, "cpu", workers) == expected


@pytest.mark.parametrize(
    ("kinds", "usable"),
    [
        ([("H100",), ("T4",)], 16),  # the smallest
        ([("X1",)], None),
        ([("A100", "A100-80G")], 80),  # an A100 of 80 GB has both names, where somebody writes the second one
        *(([(kind,)], size) for kind, size in (("H200", 141), ("V100", 16), ("L40S", 48))),
    ],
)
def test_room_on_gpus_is_that_of_the_smallest_known_kind(kinds: list[tuple[str, ...]], usable: float | None) -> None:
    nodes = [{"GPU": 1.0, **{f"accelerator_type:{name}": 1.0 for name in names}} for names in kinds]
    expected = None if usable is None else MemoryLimit(USABLE_GPU_SHARE * usable * GB, 1, "gpu")
    assert tightest_memory_limit([*nodes, {"CPU": 4.0}], "gpu", 1) == expected


# ------------------------------------------------------------------------------------------------------------ the needs


def test_every_way_is_foretold_by_the_model_s_own_pass(encoder: Path) -> None:
    recipe = config.load_config("intent").recipe
    passes = MicroBatchShape(largest_micro_batch(recipe, "cpu", 64), tokens_per_step=8192.0)
    result = dict(memory_of_layouts(recipe, encoder, layout.iter_valid_layouts(recipe, encoder, 4), passes, 4, "cpu"))
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
    assert largest_micro_batch(recipe, "cpu", 300) == (300,) * 3
    assert largest_micro_batch(recipe, "cpu", 3000) == (3000,)
    assert MicroBatchShape((100,), tokens_per_step=400.0).has_several(2)
    assert not MicroBatchShape((100,), tokens_per_step=400.0).has_several(4)
