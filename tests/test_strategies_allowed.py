"""What no strategy can do is refused before a process starts, all at once, with what to write instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.core.errors import ConfigError, Problem
from rtrain.parallel import constraints, mesh, pipeline_schedules, pipeline_stages

BERT = {"model_type": "bert", "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 6}
MODERN = {
    **{"model_type": "modernbert", "num_attention_heads": 12, "intermediate_size": 1152},
    **{"num_hidden_layers": 22, "hidden_size": 768},
}
DISTIL = {"model_type": "distilbert", "n_heads": 12, "hidden_dim": 3072, "n_layers": 6}


def problems(folder: Path, model: dict[str, Any], **settings: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(model))
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return constraints.problems(config.load("intent", named).recipe, folder)


def test_what_can_be_is_not_refused(tmp_path: Path) -> None:
    for model in (BERT, DISTIL, MODERN, MODERN | {"mlp_bias": True}):
        assert problems(tmp_path, model) == []
        assert problems(tmp_path, model, train__tensor=2, train__workers=4, train__shard=0) == []
        for schedule in pipeline_schedules.SCHEDULES:
            assert problems(tmp_path, model, train__pipeline=2, train__workers=4, train__schedule=schedule) == []
            assert problems(tmp_path, model, train__context=2, train__workers=4) == []
            for shard in (0, 2, 3):
                three = {"train__pipeline": 2, "train__tensor": 2, "train__shard": shard, "train__workers": 8}
                found = problems(tmp_path, model, train__schedule=schedule, **three)
                assert [one.field for one in found] == ["train.shard"] * bool(shard and model.get("mlp_bias"))
    for model in (BERT, DISTIL, MODERN):
        assert problems(tmp_path, model, train__tensor=2, train__workers=4, train__shard=3) == []
    assert problems(tmp_path, {"model_type": "mpnet"}, train__shard=3, train__min_workers=1) == []


MPNET = {"model_type": "mpnet"}
ODD = BERT | {"num_attention_heads": 16, "intermediate_size": 100}


@pytest.mark.parametrize(
    ("model", "settings", "field", "code"),
    [
        (BERT, {"tensor": 2, "workers": 3}, "train.tensor", "not_divisible"),
        (BERT, {"tensor": 8, "workers": 8}, "train.tensor", "not_divisible"),
        (DISTIL, {"tensor": 8, "workers": 8}, "train.tensor", "not_divisible"),
        (ODD, {"tensor": 8, "workers": 8}, "train.tensor", "not_divisible"),
        (MPNET, {"tensor": 2}, "train.tensor", "unsupported_model"),
        (MODERN | {"mlp_bias": True}, {"tensor": 2, "shard": 3, "workers": 4}, "train.shard", "unsupported_model"),
        (MODERN, {"tensor": 2, "shard": 3, "workers": 10}, "train.shard", "not_divisible"),
        (BERT, {"tensor": 2, "shard": 1}, "train.shard", "conflicting_settings"),
        (BERT, {"tensor": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (BERT, {"tensor": 2, "distill__relations": 1.0}, "distill.relations", "conflicting_settings"),
        (BERT, {"shard": 2, "gradient_compression": "bf16"}, "train.gradient_compression", "conflicting_settings"),
        (BERT, {"shard": 2, "balance": "auto"}, "train.balance", "conflicting_settings"),
        (BERT, {"pipeline": 2, "balance": "auto"}, "train.balance", "conflicting_settings"),
        (BERT, {"pipeline": 2, "workers": 3}, "train.pipeline", "not_divisible"),
        (BERT, {"pipeline": 8, "workers": 8}, "train.pipeline", "too_few_layers"),
        (DISTIL, {"pipeline": 4, "workers": 4, "schedule": "interleaved"}, "train.pipeline", "too_few_layers"),
        (MPNET, {"pipeline": 2}, "train.pipeline", "unsupported_model"),
        (BERT, {"pipeline": 2, "tensor": 2, "workers": 6}, "train.workers", "not_divisible"),
        (BERT, {"pipeline": 2, "shard": 1}, "train.shard", "conflicting_settings"),
        (
            BERT,
            {"pipeline": 2, "tensor": 2, "sequence": True, "workers": 4},
            "train.sequence",
            "conflicting_settings",
        ),
        (BERT, {"context": 2, "workers": 3}, "train.context", "not_divisible"),
        (BERT, {"context": 8, "workers": 8}, "train.context", "not_divisible"),
        (BERT, {"context": 2, "shard": 3, "workers": 4}, "train.context", "conflicting_settings"),
        (BERT, {"context": 2, "tensor": 2, "workers": 4}, "train.context", "conflicting_settings"),
        (MPNET, {"context": 2}, "train.context", "unsupported_model"),
        (BERT, {"context": 2, "distill__hidden": 1.0}, "distill.hidden", "conflicting_settings"),
        (BERT, {"context": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (BERT, {"sequence": True, "shard": 3}, "train.sequence", "conflicting_settings"),
        (BERT, {"pipeline": 2, "min_workers": 2}, "train.min_workers", "conflicting_settings"),
        (BERT, {"pipeline": 2, "distill__hidden": 1.0}, "distill.hidden", "conflicting_settings"),
        (BERT, {"pipeline": 2, "model__freeze": "encoder"}, "model.freeze", "conflicting_settings"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], field: str, code: str
) -> None:
    named = {name if "__" in name else f"train__{name}": value for name, value in settings.items()}
    assert [(problem.field, problem.code) for problem in problems(tmp_path, model, **named)] == [(field, code)]


def test_all_of_it_is_said_at_once(tmp_path: Path) -> None:
    chosen = {"train__tensor": 5, "train__min_workers": 1, "train__shard": 1}
    found = problems(tmp_path, BERT, **chosen)
    assert {one.field for one in found} == {"train.shard", "train.min_workers", "train.tensor"}
    others = {"train__pipeline": 7, "train__workers": 4}
    more = problems(tmp_path, BERT, **chosen, **others)
    assert {one.field for one in more} == {one.field for one in found} | {"train.pipeline", "train.workers"}
    alone = {"train__pipeline": 7, "train__workers": 4}
    assert [one.field for one in problems(tmp_path, BERT, **alone)] == ["train.pipeline"] * 2


@pytest.mark.parametrize(
    ("schedule", "made"),
    [("gpipe", [1, 1, 2, 3, 7]), ("1f1b", [3, 3, 3, 3, 7]), ("interleaved", [3, 3, 3, 3, 9])],
)
def test_a_schedule_of_three_stages_has_the_passes_that_torch_asks_for(schedule: str, made: list[int]) -> None:
    assert [pipeline_schedules.SCHEDULES[schedule].passes(own, 3) for own in (0, 1, 2, 3, 7)] == made


@pytest.mark.parametrize(
    ("layers", "parts", "sizes"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (6, 4, [1, 2, 1, 2]), (3, 1, [3])]
)
def test_layers_are_dealt_in_order_and_as_even_as_can_be(layers: int, parts: int, sizes: list[int]) -> None:
    found = pipeline_stages.ranges(layers, parts)
    assert [number for part in found for number in part] == list(range(layers))
    assert [len(part) for part in found] == sizes


def test_a_process_alone_shares_no_replica() -> None:
    with pytest.raises(ConfigError) as error:
        mesh.grid({"tensor": 2}, "cpu")
    assert [problem.code for problem in error.value.problems] == ["not_divisible"]
