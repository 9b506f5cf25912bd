"""The head that a model's folder brings along is taken over label by label, or begun anew."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtrain.core import json_files
from rtrain.models import builder, network_parts
from rtrain.report import event_messages
from rtrain.tasks import base
from tests.support.tiny import VOCABULARY, make_tokenizer

IDS = torch.tensor([[2, 15, 16, 17, 3]])
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 8, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def make_model(folder: Path, kind: str, auto: str, names: tuple[str, ...]) -> Path:
    """A model that somebody else has trained, whose outputs have these names."""
    settings = transformers.AutoConfig.for_model(kind, **SIZES, id2label=dict(enumerate(names)))
    torch.manual_seed(7)
    network: Any = getattr(transformers, auto).from_config(settings)
    torch.nn.init.normal_(network.get_parameter(last(network) + ".weight"))
    torch.nn.init.normal_(network.get_parameter(last(network) + ".bias"))
    network.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def head_event(folder: Path, task: base.Task, labels: tuple[str, ...]) -> dict[str, Any] | None:
    document = json_files.load_json_object(folder / "config.json")
    return network_parts.head_event_fields(document, task.auto_model, labels)


def last(network: Any) -> str:
    return str([name for name, part in network.named_modules() if isinstance(part, torch.nn.Linear)][-1])


def logits(network: Any) -> torch.Tensor:
    with torch.inference_mode():
        actual: torch.Tensor = network.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return actual


@pytest.mark.parametrize("kind", ["bert", "electra"])
@pytest.mark.parametrize(
    ("task", "names"), [("classification", ("spam", "ham", "other")), ("token_tags", ("B-LOC", "I-LOC", "O"))]
)
def test_the_same_labels_in_another_order_keep_their_weights(
    tmp_path: Path, kind: str, task: str, names: tuple[str, ...]
) -> None:
    folder = make_model(tmp_path / kind, kind, base.get_task(task).auto_model, names)
    local_part = getattr(transformers, base.get_task(task).auto_model).from_pretrained(folder)
    labels = (names[2], names[0], names[1])
    network = builder.build_network(folder, base.get_task(task), labels, 0, pack=False)
    for part in ("weight", "bias"):
        head_weight = network.get_parameter(f"{last(network)}.{part}")
        assert torch.equal(head_weight, local_part.get_parameter(f"{last(local_part)}.{part}")[[2, 0, 1]])
    # To rounding: a matrix product may sum its columns in orders of their own.
    torch.testing.assert_close(logits(network), logits(local_part)[..., [2, 0, 1]], rtol=1e-6, atol=1e-6)
    assert network.config.id2label == dict(enumerate(labels))
    assert head_event(folder, base.get_task(task), labels) is None


def test_names_that_only_have_numbers_are_matched_where_they_are_the_labels() -> None:
    """Labels are sorted as text, outputs by their numbers."""
    names = [f"LABEL_{number}" for number in range(11)]
    document = {"id2label": {str(number): name for number, name in enumerate(names)}}
    auto = base.get_task("classification").auto_model
    assert network_parts.label_order(document, auto, sorted(names)) == [0, 1, 10, *range(2, 10)]


def test_a_head_with_other_labels_is_begun_anew_and_the_run_says_so(tmp_path: Path) -> None:
    task = base.get_task("classification")
    folder = make_model(tmp_path / "spam", "roberta", task.auto_model, ("spam", "ham"))
    local_part: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    first, repeated, other = (
        builder.build_network(folder, task, ("bad", "good"), seed, pack=False) for seed in (1, 1, 2)
    )
    weight, bias = (last(local_part) + name for name in (".weight", ".bias"))
    assert torch.equal(first.get_parameter(weight), repeated.get_parameter(weight))
    assert not torch.equal(first.get_parameter(weight), other.get_parameter(weight))
    assert first.get_parameter(weight).abs().max() < 0.2 < local_part.get_parameter(weight).abs().max()
    assert not first.get_parameter(bias).any()
    assert torch.equal(
        first.get_parameter("classifier.dense.weight"), local_part.get_parameter("classifier.dense.weight")
    )
    output = head_event(folder, task, ("bad", "good"))
    assert output is not None
    line = "the model's head is begun anew: it answered ham, spam, which are not the labels of the rows"
    assert event_messages.format_event({"kind": "head", **output}) == line


@pytest.mark.parametrize(
    ("task", "names", "labels"),
    [
        ("classification", ("LABEL_0", "LABEL_1"), ("bad", "good")),  # nobody has named them
        ("classification", ("LABEL_0", "LABEL_1"), ("LABEL_0", "LABEL_1")),
        ("classification", ("bad", "good"), ("bad", "good")),
        ("regression", ("similarity",), ("score",)),  # a number, whatever it is called
        ("span_qa", ("yes", "no"), ("start", "end")),  # no names of its outputs
    ],
)
def test_a_head_that_says_nothing_else_is_taken_over(
    tmp_path: Path, task: str, names: tuple[str, ...], labels: tuple[str, ...]
) -> None:
    folder = make_model(tmp_path / "model", "bert", base.get_task(task).auto_model, names)
    local_part: Any = getattr(transformers, base.get_task(task).auto_model).from_pretrained(folder)
    network = builder.build_network(folder, base.get_task(task), labels, 0, pack=False)
    assert torch.equal(
        network.get_parameter(f"{last(local_part)}.weight"), local_part.get_parameter(f"{last(local_part)}.weight")
    )
    assert head_event(folder, base.get_task(task), labels) is None


def test_a_drawn_head_is_the_seed_s_whatever_the_folder_calls_its_outputs(tmp_path: Path) -> None:
    """A bare encoder, saved with the configuration of the classifier that it was part of."""
    task = base.get_task("classification")
    folder = make_model(tmp_path / "whole", "bert", task.auto_model, ("spam", "ham"))
    bare: Any = transformers.AutoModel.from_pretrained(folder)
    bare.save_pretrained(tmp_path / "bare")
    make_tokenizer(tmp_path / "bare")
    actual = [
        builder.build_network(tmp_path / "bare", task, labels, 0) for labels in (("ham", "spam"), ("bad", "good"))
    ]
    assert torch.equal(*(network.get_parameter("classifier.weight") for network in actual))
    assert head_event(tmp_path / "bare", task, ("bad", "good")) is None
