"""Invalid layouts are refused before a process starts, all at once, with valid values."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel import layout, mesh, pipeline

BERT = {"model_type": "bert", "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 6}
MODERN = {
    **{"model_type": "modernbert", "num_attention_heads": 12, "intermediate_size": 1152},
    **{"num_hidden_layers": 22, "hidden_size": 768},
}
DISTIL = {"model_type": "distilbert", "n_heads": 12, "hidden_dim": 3072, "n_layers": 6}


def problems(folder: Path, model: dict[str, Any], **settings: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(model))
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return layout.check_parallelism(config.load_config("intent", overrides).recipe, folder)


def test_what_can_be_is_not_refused(tmp_path: Path) -> None:
    for model in (BERT, DISTIL, MODERN, MODERN | {"mlp_bias": True}):
        assert problems(tmp_path, model) == []
        assert problems(tmp_path, model, train__tensor_parallel_size=2, train__workers=4, train__zero_stage=0) == []
        for schedule in pipeline.SCHEDULES:
            assert (
                problems(
                    tmp_path,
                    model,
                    train__pipeline_parallel_size=2,
                    train__workers=4,
                    train__pipeline_schedule=schedule,
                )
                == []
            )
            assert problems(tmp_path, model, train__context_parallel_size=2, train__workers=4) == []
            for shard in (0, 2, 3):
                three = {
                    "train__pipeline_parallel_size": 2,
                    "train__tensor_parallel_size": 2,
                    "train__zero_stage": shard,
                    "train__workers": 8,
                }
                actual = problems(tmp_path, model, train__pipeline_schedule=schedule, **three)
                assert [item.field for item in actual] == ["train.zero_stage"] * bool(shard and model.get("mlp_bias"))
    for model in (BERT, DISTIL, MODERN):
        assert problems(tmp_path, model, train__tensor_parallel_size=2, train__workers=4, train__zero_stage=3) == []
    assert problems(tmp_path, {"model_type": "mpnet"}, train__zero_stage=3, train__min_workers=1) == []


MPNET = {"model_type": "mpnet"}
ODD = BERT | {"num_attention_heads": 16, "intermediate_size": 100}


@pytest.mark.parametrize(
    ("model", "settings", "field", "code"),
    [
        (BERT, {"tensor_parallel_size": 2, "workers": 3}, "train.tensor_parallel_size", "not_divisible"),
        (BERT, {"tensor_parallel_size": 8, "workers": 8}, "train.tensor_parallel_size", "not_divisible"),
        (DISTIL, {"tensor_parallel_size": 8, "workers": 8}, "train.tensor_parallel_size", "not_divisible"),
        (ODD, {"tensor_parallel_size": 8, "workers": 8}, "train.tensor_parallel_size", "not_divisible"),
        (MPNET, {"tensor_parallel_size": 2}, "train.tensor_parallel_size", "unsupported_model"),
        (
            MODERN | {"mlp_bias": True},
            {"tensor_parallel_size": 2, "zero_stage": 3, "workers": 4},
            "train.zero_stage",
            "unsupported_model",
        ),
        (MODERN, {"tensor_parallel_size": 2, "zero_stage": 3, "workers": 10}, "train.zero_stage", "not_divisible"),
        (BERT, {"tensor_parallel_size": 2, "zero_stage": 1}, "train.zero_stage", "conflicting_settings"),
        (BERT, {"tensor_parallel_size": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (
            BERT,
            {"tensor_parallel_size": 2, "distill__relation_loss_weight": 1.0},
            "distill.relation_loss_weight",
            "conflicting_settings",
        ),
        (BERT, {"zero_stage": 2, "gradient_compression": "bf16"}, "train.gradient_compression", "conflicting_settings"),
        (BERT, {"zero_stage": 2, "load_balancing": "auto"}, "train.load_balancing", "conflicting_settings"),
        (BERT, {"pipeline_parallel_size": 2, "load_balancing": "auto"}, "train.load_balancing", "conflicting_settings"),
        (BERT, {"pipeline_parallel_size": 2, "workers": 3}, "train.pipeline_parallel_size", "not_divisible"),
        (BERT, {"pipeline_parallel_size": 8, "workers": 8}, "train.pipeline_parallel_size", "too_few_layers"),
        (
            DISTIL,
            {"pipeline_parallel_size": 4, "workers": 4, "pipeline_schedule": "interleaved"},
            "train.pipeline_parallel_size",
            "too_few_layers",
        ),
        (MPNET, {"pipeline_parallel_size": 2}, "train.pipeline_parallel_size", "unsupported_model"),
        (
            BERT,
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "workers": 6},
            "train.workers",
            "not_divisible",
        ),
        (BERT, {"pipeline_parallel_size": 2, "zero_stage": 1}, "train.zero_stage", "conflicting_settings"),
        (
            BERT,
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "workers": 4},
            "train.sequence_parallel",
            "conflicting_settings",
        ),
        (BERT, {"context_parallel_size": 2, "workers": 3}, "train.context_parallel_size", "not_divisible"),
        (BERT, {"context_parallel_size": 8, "workers": 8}, "train.context_parallel_size", "not_divisible"),
        (
            BERT,
            {"context_parallel_size": 2, "zero_stage": 3, "workers": 4},
            "train.context_parallel_size",
            "conflicting_settings",
        ),
        (
            BERT,
            {"context_parallel_size": 2, "tensor_parallel_size": 2, "workers": 4},
            "train.context_parallel_size",
            "conflicting_settings",
        ),
        (MPNET, {"context_parallel_size": 2}, "train.context_parallel_size", "unsupported_model"),
        (
            BERT,
            {"context_parallel_size": 2, "distill__hidden_loss_weight": 1.0},
            "distill.hidden_loss_weight",
            "conflicting_settings",
        ),
        (BERT, {"context_parallel_size": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (BERT, {"sequence_parallel": True, "zero_stage": 3}, "train.sequence_parallel", "conflicting_settings"),
        (BERT, {"pipeline_parallel_size": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (
            BERT,
            {"pipeline_parallel_size": 2, "distill__hidden_loss_weight": 1.0},
            "distill.hidden_loss_weight",
            "conflicting_settings",
        ),
        (BERT, {"pipeline_parallel_size": 2, "model__freeze": "encoder"}, "model.freeze", "conflicting_settings"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], field: str, code: str
) -> None:
    overrides = {name if "__" in name else f"train__{name}": value for name, value in settings.items()}
    assert [(problem.field, problem.code) for problem in problems(tmp_path, model, **overrides)] == [(field, code)]


def test_all_of_it_is_said_at_once(tmp_path: Path) -> None:
    options = {"train__tensor_parallel_size": 5, "train__min_workers": 1, "train__zero_stage": 1}
    actual = problems(tmp_path, BERT, **options)
    assert {item.field for item in actual} == {"train.zero_stage", "train.min_workers", "train.tensor_parallel_size"}
    rest = {"train__pipeline_parallel_size": 7, "train__workers": 4}
    more = problems(tmp_path, BERT, **options, **rest)
    assert {item.field for item in more} == {item.field for item in actual} | {
        "train.pipeline_parallel_size",
        "train.workers",
    }
    reference = {"train__pipeline_parallel_size": 7, "train__workers": 4}
    assert [item.field for item in problems(tmp_path, BERT, **reference)] == ["train.pipeline_parallel_size"] * 2


@pytest.mark.parametrize(
    ("schedule", "counts"), [("gpipe", [1, 1, 2, 3, 7]), ("1f1b", [3, 3, 3, 3, 7]), ("interleaved", [3, 3, 3, 3, 9])]
)
def test_a_schedule_of_three_stages_has_the_passes_that_torch_asks_for(schedule: str, counts: list[int]) -> None:
    assert [pipeline.SCHEDULES[schedule].count_micro_batches(local_part, 3) for local_part in (0, 1, 2, 3, 7)] == counts


@pytest.mark.parametrize(
    ("layers", "parts", "sizes"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (6, 4, [1, 2, 1, 2]), (3, 1, [3])]
)
def test_layers_are_dealt_in_order_and_as_even_as_can_be(layers: int, parts: int, sizes: list[int]) -> None:
    actual = pipeline.layer_ranges(layers, parts)
    assert [number for part in actual for number in part] == list(range(layers))
    assert [len(part) for part in actual] == sizes


def test_a_process_alone_shares_no_replica() -> None:
    with pytest.raises(ConfigError) as error:
        mesh.make_mesh({"tensor_parallel_size": 2}, "cpu")
    assert [problem.code for problem in error.value.problems] == ["not_divisible"]
