"""The ways to hold a model, in their order, and which of them a recipe and its model allow."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain import config
from rtrain.config import Recipe
from rtrain.parallel import dtensor_utils, layout
from rtrain.parallel.layout import ParallelLayout
from tests.unit.parallel.test_constraints import BERT


def recipe(**settings: Any) -> Recipe:
    return config.load_config("intent", {name.replace("__", "."): value for name, value in settings.items()}).recipe


def possible(folder: Path, workers: int, model: dict[str, Any] = BERT, **settings: Any) -> list[ParallelLayout]:
    (folder / "config.json").write_text(json.dumps(model))
    return list(layout.iter_valid_layouts(recipe(**settings), folder, workers))


def recomputed(*found: ParallelLayout) -> list[ParallelLayout]:
    return [ParallelLayout(item.zero_stage, item.tensor_parallel_size, True) for item in found]


def test_shares_come_before_layers_computed_again_and_layers_that_are_cut(tmp_path: Path) -> None:
    shards = [ParallelLayout(shard) for shard in range(4)]
    cut = [ParallelLayout(tensor_parallel_size=2), ParallelLayout(3, 2)], [ParallelLayout(tensor_parallel_size=4)]
    expected = [*shards, *recomputed(*shards), *cut[0], *recomputed(*cut[0]), *cut[1], *recomputed(*cut[1])]
    assert possible(tmp_path, 4) == expected


def test_one_worker_has_nobody_to_share_with(tmp_path: Path) -> None:
    assert possible(tmp_path, 1) == [ParallelLayout(), ParallelLayout(gradient_checkpointing=True)]


def test_what_the_recipe_or_the_model_forbids_is_left_out(tmp_path: Path) -> None:
    compressed = possible(tmp_path, 2, train__gradient_compression="bf16")
    assert compressed == [ParallelLayout(), ParallelLayout(1), *recomputed(ParallelLayout(), ParallelLayout(1))]
    heads = BERT | {"num_attention_heads": 3}
    assert not any(candidate.tensor_parallel_size > 1 for candidate in possible(tmp_path, 2, heads))
    # Workers that come and go: also the fewest of them.
    assert not any(
        candidate.workers_per_replica > 1 for candidate in possible(tmp_path, 2, train__workers=4, train__min_workers=2)
    )
    assert ParallelLayout(3) in possible(tmp_path, 2, train__workers=4, train__min_workers=2)


def test_layers_are_computed_again_in_every_way_where_the_recipe_says_so(tmp_path: Path) -> None:
    actual = possible(tmp_path, 2, train__gradient_checkpointing=True)
    assert actual
    assert all(candidate.gradient_checkpointing for candidate in actual)


def test_a_way_is_what_its_settings_say() -> None:
    candidate = ParallelLayout(3, 2, True)
    overrides = {"train.zero_stage": 3, "train.tensor_parallel_size": 2, "train.gradient_checkpointing": True}
    assert candidate.settings == overrides
    assert candidate.apply_to(recipe().train, 4) == recipe(**overrides, **{"train.workers": 4}).train
    assert layout.layout_from_config(recipe(**overrides).train, 4) == candidate
    staged = ParallelLayout(2, 2, pipeline_parallel_size=2)
    assert layout.layout_from_config(recipe(**staged.settings, **{"train.workers": 8}).train, 8) == staged
    assert str(staged) == "zero_stage=2 and tensor_parallel_size=2 and pipeline_parallel_size=2"
    assert (str(candidate), str(ParallelLayout())) == (
        "zero_stage=3 and tensor_parallel_size=2 with recomputed layers",
        "zero_stage=0",
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"workers": 4}, False),
        ({"workers": 4, "zero_stage": 1}, False),
        ({"workers": 4, "zero_stage": 2}, True),
        ({"workers": 1, "zero_stage": 3}, False),  # nobody to share with
        ({"workers": 2, "tensor_parallel_size": 2}, True),
        ({"workers": 2, "pipeline_parallel_size": 2}, True),
        ({"workers": 1, "gradient_checkpointing": True}, True),
    ],
)
def test_freed_memory_goes_back_where_blocks_of_many_sizes_come_and_go(
    settings: dict[str, Any], expected: bool
) -> None:
    train = recipe(**{f"train__{name}": value for name, value in settings.items()}).train
    assert layout.should_trim_malloc(train) is expected


def test_the_rest_are_those_that_come_after() -> None:
    actual = [ParallelLayout(), ParallelLayout(1), ParallelLayout(2)]
    assert list(layout.start_from(ParallelLayout(1), iter(actual))) == [ParallelLayout(1), ParallelLayout(2)]
    assert list(layout.start_from(ParallelLayout(3), iter(actual))) == [ParallelLayout(3), *actual]


def test_a_network_is_put_on_its_device_in_parts_where_no_worker_has_all_of_it() -> None:
    def parts(workers: int, **train: Any) -> bool:
        settings = {f"train__{name}": value for name, value in train.items()}
        return layout.is_model_parallel(recipe(**settings, train__workers=workers).train, workers)

    assert not any((parts(2), parts(2, zero_stage=1), parts(1, zero_stage=3), parts(4, context_parallel_size=2)))
    assert all(
        (
            parts(2, zero_stage=2),
            parts(2, tensor_parallel_size=2),
            parts(2, pipeline_parallel_size=2),
            parts(4, tensor_parallel_size=2, zero_stage=3),
        )
    )


def test_what_a_worker_has_is_moved_and_what_others_have_stays_away() -> None:
    layer = torch.nn.BatchNorm1d(3)
    layer.bias = torch.nn.Parameter(torch.zeros(3, device="meta"))
    weight, buffers = layer.weight, dict(layer.named_buffers())
    dtensor_utils.move_module(layer, torch.device("cpu"))
    assert (layer.weight is weight, layer.bias.is_meta) == (True, True)
    assert dict(layer.named_buffers()).keys() == buffers.keys()
    assert dtensor_utils.module_device(layer).type == "cpu"
