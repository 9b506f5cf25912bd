"""What no strategy can do is refused before a process starts, all at once, with what to write instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.errors import Problem
from rtrain.strategies import allowed

BERT = {"model_type": "bert", "num_attention_heads": 12, "intermediate_size": 3072}
DISTIL = {"model_type": "distilbert", "n_heads": 12, "hidden_dim": 3072}


def problems(folder: Path, model: dict[str, Any], **settings: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(model))
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return allowed.problems(config.load("intent", named).recipe, folder)


def test_what_can_be_is_not_refused(tmp_path: Path) -> None:
    for model in (BERT, DISTIL):
        assert problems(tmp_path, model) == []
        assert problems(tmp_path, model, train__tensor=2, train__workers=4, train__shard=3) == []
    assert problems(tmp_path, {"model_type": "modernbert"}, train__shard=3, train__min_workers=1) == []


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
        ({"model_type": "modernbert"}, {"train__tensor": 2}, "train.tensor", "of the type modernbert are not cut"),
        (BERT, {"train__tensor": 2, "train__shard": 1}, "train.shard", "write 0, 2 or 3"),
        (BERT, {"train__tensor": 2, "train__min_workers": 2}, "train.min_workers", "in groups; leave it out"),
        (BERT, {"train__tensor": 2, "distill__relations": 1.0}, "distill.relations", "write 0"),
        (BERT, {"train__shard": 2, "train__gradient_compression": "bf16"}, "train.gradient_compression", "write none"),
        (BERT, {"train__shard": 3, "train__transport": "shared_memory"}, "train.transport", "write auto"),
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
