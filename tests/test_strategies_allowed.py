"""What no strategy can do is refused before a process starts, all at once, with what to write instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.errors import ConfigError, Problem
from rtrain.strategies import allowed, mesh, schedules, staged

BERT = {"model_type": "bert", "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 6}
MODERN = {
    **{"model_type": "modernbert", "num_attention_heads": 12, "intermediate_size": 1152},
    **{"num_hidden_layers": 22, "hidden_size": 768},
}
DISTIL = {"model_type": "distilbert", "n_heads": 12, "hidden_dim": 3072, "n_layers": 6}


def problems(folder: Path, model: dict[str, Any], **settings: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(model))
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return allowed.problems(config.load("intent", named).recipe, folder)


def test_what_can_be_is_not_refused(tmp_path: Path) -> None:
    for model in (BERT, DISTIL, MODERN, MODERN | {"mlp_bias": True}):
        assert problems(tmp_path, model) == []
        assert problems(tmp_path, model, train__tensor=2, train__workers=4, train__shard=0) == []
        for schedule in schedules.SCHEDULES:
            assert problems(tmp_path, model, train__pipeline=2, train__workers=4, train__schedule=schedule) == []
            assert problems(tmp_path, model, train__context=2, train__workers=4) == []
            assert problems(tmp_path, model, train__offload=True, train__shard=3) == []
            for shard in (0, 2, 3):
                three = {"train__pipeline": 2, "train__tensor": 2, "train__shard": shard, "train__workers": 8}
                found = problems(tmp_path, model, train__schedule=schedule, **three)
                assert [one.field for one in found] == ["train.shard"] * bool(shard and model.get("mlp_bias"))
    for model in (BERT, DISTIL, MODERN):
        assert problems(tmp_path, model, train__tensor=2, train__workers=4, train__shard=3) == []
    assert problems(tmp_path, {"model_type": "mpnet"}, train__shard=3, train__min_workers=1) == []


@pytest.mark.parametrize(
    ("model", "settings", "field", "said"),
    [
        (BERT, {"train__tensor": 2, "train__workers": 3}, "train.tensor", "not divide train.workers=3; write 1 or 3"),
        (BERT, {"train__tensor": 8, "train__workers": 8}, "train.tensor", "12 attention heads; write 1 or 2 or 4"),
        (DISTIL, {"train__tensor": 8, "train__workers": 8}, "train.tensor", "12 attention heads; write 1 or 2 or 4"),
        (
            BERT | {"num_attention_heads": 16, "intermediate_size": 100},
            {"train__tensor": 8, "train__workers": 8},
            "train.tensor",
            "100 numbers of a feed-forward layer; write 1 or 2 or 4",
        ),
        ({"model_type": "mpnet"}, {"train__tensor": 2}, "train.tensor", "of the type mpnet are not cut"),
        (
            MODERN | {"mlp_bias": True},
            {"train__tensor": 2, "train__shard": 3, "train__workers": 4},
            "train.shard",
            "biases of modernbert are not shared; write 0, or train.tensor=1",
        ),
        (
            MODERN,
            {"train__tensor": 2, "train__shard": 3, "train__workers": 10},
            "train.shard",
            "5 replicas share the model's width of 768, which they do not divide",
        ),
        (BERT, {"train__tensor": 2, "train__shard": 1}, "train.shard", "write 0, 2 or 3"),
        (BERT, {"train__tensor": 2, "train__min_workers": 2}, "train.min_workers", "in groups; leave it out"),
        (BERT, {"train__tensor": 2, "distill__relations": 1.0}, "distill.relations", "write 0"),
        (BERT, {"train__shard": 2, "train__gradient_compression": "bf16"}, "train.gradient_compression", "write none"),
        (BERT, {"train__shard": 3, "train__transport": "shared_memory"}, "train.transport", "write auto"),
        (BERT, {"train__shard": 2, "train__balance": "auto"}, "train.balance", "write off"),
        (BERT, {"train__pipeline": 2, "train__balance": "auto"}, "train.balance", "write off"),
        (BERT, {"train__pipeline": 2, "train__workers": 3}, "train.pipeline", "write 1 or 3, or train.workers=2"),
        (BERT, {"train__pipeline": 8, "train__workers": 8}, "train.pipeline", "6 layers are not enough for 8 stages"),
        (
            DISTIL,
            {"train__pipeline": 4, "train__workers": 4, "train__schedule": "interleaved"},
            "train.pipeline",
            "4 stages of 2 parts each; write 3 or less, or train.schedule=1f1b",
        ),
        ({"model_type": "mpnet"}, {"train__pipeline": 2}, "train.pipeline", "are not cut into stages, only"),
        (
            BERT,
            {"train__pipeline": 2, "train__tensor": 2, "train__workers": 6},
            "train.workers",
            "4 workers share a replica (train.tensor=2 and train.pipeline=2); write a multiple of 4",
        ),
        (BERT, {"train__pipeline": 2, "train__shard": 1}, "train.shard", "write 0, 2 or 3"),
        (
            BERT,
            {"train__pipeline": 2, "train__tensor": 2, "train__sequence": True, "train__workers": 4},
            "train.sequence",
            "tokens are not cut between stages; write false, or train.pipeline=1",
        ),
        (BERT, {"train__context": 2, "train__workers": 3}, "train.context", "train.workers=3; write 1 or 3"),
        (BERT, {"train__context": 8, "train__workers": 8}, "train.context", "12 attention heads; write 1 or 2 or 4"),
        (
            BERT,
            {"train__context": 2, "train__shard": 3, "train__workers": 4},
            "train.context",
            "or leave out train.shard=3",
        ),
        (
            BERT,
            {"train__context": 2, "train__tensor": 2, "train__workers": 4},
            "train.context",
            "leave out train.tensor=2",
        ),
        (
            {"model_type": "mpnet"},
            {"train__context": 2},
            "train.context",
            "mpnet computes padding, and tokens are cut of",
        ),
        (BERT, {"train__context": 2, "distill__hidden": 1.0}, "distill.hidden", "all of the student's tokens; write 0"),
        (BERT, {"train__context": 2, "train__min_workers": 2}, "train.min_workers", "or write train.context=1"),
        (BERT, {"train__offload": True}, "train.offload", "train.shard=2 or 3 of several replicas makes shares"),
        (BERT, {"train__offload": True, "train__shard": 3, "train__tensor": 2}, "train.offload", "several replicas"),
        (
            BERT,
            {"train__offload": True, "train__shard": 3, "train__device": "cpu"},
            "train.offload",
            "the processor's memory is where everything lies already; write false",
        ),
        (BERT, {"train__sequence": True}, "train.sequence", "write false, or train.tensor=2"),
        (BERT, {"train__sequence": True, "train__shard": 3}, "train.sequence", "write false, or train.tensor=2"),
        (BERT, {"train__pipeline": 2, "train__min_workers": 2}, "train.min_workers", "leave it out, or"),
        (BERT, {"train__pipeline": 2, "distill__hidden": 1.0}, "distill.hidden", "write 0, or"),
        (BERT, {"train__pipeline": 2, "model__freeze": "encoder"}, "model.freeze", "write none, or"),
        (BERT, {"train__pipeline": 2, "train__gradient_compression": "bf16"}, "train.gradient_compression", "write"),
    ],
)
def test_what_cannot_be_is_named_with_what_to_write(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], field: str, said: str
) -> None:
    [problem] = problems(tmp_path, model, **settings)
    assert problem.field == field
    assert said in f"{problem.reason}; {problem.fix}"


def test_all_of_it_is_said_at_once(tmp_path: Path) -> None:
    chosen = {"train__tensor": 5, "train__min_workers": 1, "train__transport": "shared_memory", "train__shard": 1}
    found = problems(tmp_path, BERT, **chosen)
    assert {one.field for one in found} == {"train.transport", "train.shard", "train.min_workers", "train.tensor"}
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
    assert [schedules.SCHEDULES[schedule].passes(own, 3) for own in (0, 1, 2, 3, 7)] == made


@pytest.mark.parametrize(
    ("layers", "parts", "sizes"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (6, 4, [1, 2, 1, 2]), (3, 1, [3])]
)
def test_layers_are_dealt_in_order_and_as_even_as_can_be(layers: int, parts: int, sizes: list[int]) -> None:
    found = staged.ranges(layers, parts)
    assert [number for part in found for number in part] == list(range(layers))
    assert [len(part) for part in found] == sizes


def test_a_process_alone_shares_no_replica() -> None:
    with pytest.raises(ConfigError, match="2 workers share a replica, and there are 1"):
        mesh.grid({"tensor": 2}, "cpu")
