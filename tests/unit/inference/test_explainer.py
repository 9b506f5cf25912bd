"""Explanations of real (tiny) models: complete, of the answer that was given, and by words that rebuild the text."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rtrain.core.ragged import EncodedRow, Head, TokenWindow, collate
from rtrain.inference import explainer, integrated_gradients
from rtrain.inference.explainer import Explainer, TargetExplanation
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from tests.serve.test_deployment import openvino_artifact
from tests.support.refusing import refused
from tests.support.tiny import CORPUS, make_artifact, make_task_artifact

LABELS = ("card lost", "card stolen", "parcel")
SCORES = {"mean": 6.0, "std": 1.5, "lowest": 1.0, "highest": 9.0, "step": 0.5}
ESSAY = "First, the card was declined. Then nobody opened the door! Who can explain the fee? Thank you."
PAIR: Input = {"text": "where is my parcel", "text_pair": "Der Brief kam gestern. Vielen Dank!"}


class ExplainerWithPredictor(Explainer):
    """An explainer with its predictor."""

    def __init__(self, predictor: Predictor):
        super().__init__(predictor)
        self.predictor = predictor


def load_explainer(folder: Path) -> ExplainerWithPredictor:
    return ExplainerWithPredictor(Predictor.load(folder, threads=1))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> ExplainerWithPredictor:
    return load_explainer(make_artifact(tmp_path_factory.mktemp("classes"), LABELS))


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ExplainerWithPredictor]:
    """`made(task, head)`: an artefact of any task, each made once."""
    result: dict[str, ExplainerWithPredictor] = {}

    def make(task: str, head: Head, max_tokens: int = 64) -> ExplainerWithPredictor:
        name = f"{task}-{max_tokens}-{head}"
        if name not in result:
            result[name] = load_explainer(make_task_artifact(tmp_path_factory.mktemp(task), task, head, 3, max_tokens))
        return result[name]

    return make


def complete(explained: TargetExplanation) -> None:
    """The words of all texts, their sentences and the tokens each sum to the change of the value."""
    assert explained.completeness_error is not None
    assert explained.completeness_error <= integrated_gradients.ERROR_TOLERANCE
    new_path = explained.value - explained.baseline
    assert abs(new_path) > 1e-3, "nothing to explain"
    for parts in (
        explained.tokens,
        [part.attribution for text in explained.texts for part in text.words],
        [part.attribution for text in explained.texts for part in text.sentences],
    ):
        assert float(np.sum(parts)) == pytest.approx(new_path, rel=integrated_gradients.ERROR_TOLERANCE)


def explain_one(loaded: Explainer, row_input: Input, label: str | None = None) -> TargetExplanation:
    """Explain a row with a single target."""
    [[explained]] = [result.answers for result in loaded([row_input], label)]
    return explained


def rebuilt(explained: TargetExplanation, number: int = 0) -> str:
    return "".join(explained.texts[number].text[part.start : part.end] for part in explained.texts[number].words)


# ------------------------------------------------------------------------------------------------------ completeness


def test_explanations_are_complete_and_of_the_predicted_label(classes: ExplainerWithPredictor) -> None:
    predictor = classes.predictor
    inputs = [*CORPUS, PAIR]
    for result, output in zip(classes(inputs), predictor.logits(inputs), strict=True):
        [explained] = result.answers
        complete(explained)
        assert explained.label == LABELS[int(output.argmax())]
        assert explained.value == pytest.approx(float(output.max()), abs=1e-4)


def test_the_baseline_is_padding_between_the_special_tokens(classes: ExplainerWithPredictor) -> None:
    predictor = classes.predictor
    [row] = predictor.encode([CORPUS[0]])
    explained = explain_one(classes, CORPUS[0])
    padding = row._replace(ids=[row.ids[0], *[predictor.pad_id] * (len(row.ids) - 2), row.ids[-1]])
    place = LABELS.index(explained.label)
    assert explained.baseline == pytest.approx(float(predictor.run([padding])[0][place]), abs=1e-4)
    assert explained.tokens[[0, -1]].tolist() == [0, 0]


def test_each_label_can_be_explained_and_its_value_is_its_logit(classes: ExplainerWithPredictor) -> None:
    [output] = classes.predictor.logits([CORPUS[1]])
    for label, logit in zip(LABELS, output.tolist(), strict=True):
        explained = explain_one(classes, CORPUS[1], label)
        complete(explained)
        assert explained.label == label
        assert explained.value == pytest.approx(logit, abs=1e-4)


def test_a_number_is_explained_in_its_unit_and_by_sentences(instance: Callable[..., ExplainerWithPredictor]) -> None:
    of_scores = instance("regression", Head(("score",), SCORES))
    [answer] = of_scores.predictor([ESSAY])
    explained = explain_one(of_scores, ESSAY)
    complete(explained)
    assert explained.value == pytest.approx(answer, abs=1e-4)
    [text] = explained.texts
    sentences = [text.text[part.start : part.end] for part in text.sentences]
    assert " ".join(sentences) == ESSAY
    assert len({round(part.attribution, 6) for part in text.sentences}) == 4


def test_every_given_label_is_explained_or_the_likeliest(instance: Callable[..., ExplainerWithPredictor]) -> None:
    several = instance("multi_label", Head(("x", "y", "z"), {"thresholds": dict.fromkeys(("x", "y", "z"), 0.0)}))
    [result] = several([CORPUS[2]])
    ranked = [entry["label"] for entry in several.predictor([CORPUS[2]])[0]]
    assert [explained.label for explained in result.answers] == ranked
    for explained in result.answers:
        complete(explained)
    none = instance("multi_label", Head(("x", "y", "z"), {"thresholds": dict.fromkeys(("x", "y", "z"), 1.0)}))
    [result] = none([CORPUS[2]])
    assert [explained.label for explained in result.answers] == ranked[:1]


def test_each_head_is_explained(instance: Callable[..., ExplainerWithPredictor]) -> None:
    head = Head(("intent=a", "intent=b", "mood=a", "mood=b", "mood=c"), {"heads": [["intent", 2], ["mood", 3]]})
    two = instance("multi_head", head)
    [answer] = two.predictor([CORPUS[3]])
    [result] = two([CORPUS[3]])
    assert [explained.label for explained in result.answers] == [
        f"{name}={answer[name][0]['label']}" for name in ("intent", "mood")
    ]
    for explained in result.answers:
        complete(explained)
    [named_settings] = two([CORPUS[3]], "mood=b")
    assert [explained.label for explained in named_settings.answers] == ["mood=b"]


def test_each_entity_is_explained_in_windows_too(instance: Callable[..., ExplainerWithPredictor]) -> None:
    """A random model tags nearly every word: more entities than are explained, over two windows; the surest are."""
    head = Head(("O", "B-place", "B-time", "I-place"), {"max_windows": 9, "stride": 4})
    tagger = instance("token_tags", head, max_tokens=16)
    text = CORPUS[0]
    [encoded] = tagger.predictor.encode([text])
    assert len(encoded.windows) >= 2
    [answer] = tagger.predictor([text])
    [result] = tagger([text])
    assert answer, "the model tags nothing"
    surest = sorted(answer, key=lambda group: -group["score"])[: explainer.MAX_TARGETS]
    assert surest != answer[: explainer.MAX_TARGETS]
    assert [(entry.label, entry.span) for entry in result.answers] == [
        (group["entity_group"], (group["start"], group["end"])) for group in answer if group in surest
    ]
    for explained in result.answers:
        complete(explained)
    kind = answer[0]["entity_group"]
    [named_settings] = tagger([text], kind)
    assert {explained.label for explained in named_settings.answers} == {kind}
    with refused("unknown_label"):
        tagger([text], "plac")


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
def test_windows_of_a_long_text_are_pooled_as_in_the_answer(
    instance: Callable[..., ExplainerWithPredictor], pooling: str
) -> None:
    facts = {"pooling": pooling, "max_windows": 9, "stride": 4}
    windowed = instance("classification", Head(LABELS, facts), max_tokens=16)
    text = CORPUS[0] + ". " + CORPUS[1]
    [encoded] = windowed.predictor.encode([text])
    assert len(encoded.windows) >= 3
    [output] = windowed.predictor.logits([text])
    [result] = windowed([text])
    [explained] = result.answers
    complete(explained)
    assert explained.value == pytest.approx(float(output.max()), abs=1e-4)
    assert (result.truncated, rebuilt(explained)) == (False, "".join(text.split()))
    if pooling == "first":
        assert not explained.tokens[encoded.windows[0].num_tokens :].any()


def test_memory_is_bounded_by_passes_that_change_nothing(
    classes: ExplainerWithPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = classes([CORPUS[0]])[0].answers[0].tokens
    [row] = classes.predictor.encode([CORPUS[0]])
    monkeypatch.setattr(integrated_gradients, "MAX_BATCH_TOKENS", 3 * len(row.ids))
    one_by_one = classes([CORPUS[0]])[0].answers[0].tokens
    assert one_by_one == pytest.approx(at_once, abs=1e-5)


def test_nothing_of_the_network_is_changed(classes: ExplainerWithPredictor) -> None:
    network = classes.predictor.network[0]
    before = {name: value.clone() for name, value in network.state_dict().items()}
    classes([CORPUS[4]])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_an_explanation_that_nobody_awaits_stops(classes: ExplainerWithPredictor) -> None:
    predictor = classes.predictor
    [row], [output] = predictor.encode([CORPUS[0]]), predictor.logits([CORPUS[0]])
    overrides = iter([False, True])
    with pytest.raises(integrated_gradients.ExplanationCancelled):
        classes.explain(CORPUS[0], row, output, steps=256, should_stop=lambda: next(overrides))


# -------------------------------------------------------------------------------------------------- against arithmetic


class Linear(torch.nn.Module):
    """logits = sum over places of weight[place] . embedding: its attributions are weight x (input - baseline)."""

    def __init__(self, vocabulary: int, places: int, layers: int = 1):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = torch.nn.Embedding.from_pretrained(torch.randn(vocabulary, 4, generator=generator))
        self.weight = torch.randn(places, 4, 2, generator=generator)
        self.layers = layers

    def get_input_embeddings(self) -> torch.nn.Module:
        table: torch.nn.Module = self.table
        return table

    def forward(self, inputs_embeds: torch.Tensor) -> SimpleNamespace:
        weight = self.weight
        for _ in range(self.layers - 1):  # the same function by other steps
            weight = (2 * weight).exp().log() / 2
        return SimpleNamespace(logits=torch.einsum("bth,tho->bo", inputs_embeds, weight))


def attributions(network: torch.nn.Module, ids: list[int], remaining: list[bool]) -> integrated_gradients.Integral:
    row = collate([EncodedRow(ids, [TokenWindow(len(ids), len(ids))], False, [(0, 0)] * len(ids))])
    path = integrated_gradients.IntegrationPath(
        (network, frozenset({"inputs_embeds"})),  # type: ignore[arg-type]
        row,
        np.array(remaining),
        0,
        lambda logits, rows: logits,
    )
    return integrated_gradients.integrate(path, steps=2)


def test_of_a_linear_model_they_are_weight_times_way() -> None:
    network = Linear(10, 4)
    ids, remaining = [1, 7, 3, 2], [True, False, False, True]
    result = attributions(network, ids, remaining)
    table = network.table.weight
    for place, (token, keep) in enumerate(zip(ids, remaining, strict=True)):
        layout_ = torch.zeros(4) if keep else table[token] - table[0]
        by_hand = layout_ @ network.weight[place]
        assert result.attributions[:, place] == pytest.approx(by_hand.numpy(), abs=1e-5)
    assert all(error is not None and error < 1e-5 for error in result.errors)


# ------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    "text",
    [
        *CORPUS[:2],
        "日本 parcel 我的",
        "हिन्दी money 👩‍👩‍👧 cafe\u0301",
        "\x07bell \u200b zero",
        "x" * 40,
        "[SEP] parcel [CLS]",
    ],
)
def test_words_rebuild_the_text(classes: ExplainerWithPredictor, text: str) -> None:
    explained = explain_one(classes, text)
    assert rebuilt(explained) == "".join(text.split())
    shares = [part.attribution for part in explained.texts[0].words]
    assert float(np.sum(shares)) == pytest.approx(float(explained.tokens.sum()), abs=1e-9)


def test_a_pair_has_the_words_of_both_texts(classes: ExplainerWithPredictor) -> None:
    [result] = classes([PAIR])
    [explained] = result.answers
    complete(explained)
    assert [text.field for text in explained.texts] == ["text", "text_pair"]
    assert rebuilt(explained) == "whereismyparcel"
    assert rebuilt(explained, 1) == "DerBriefkamgestern.VielenDank!"
    assert len(explained.texts[1].sentences) == 2
    document = result.to_document()["answers"][0]
    assert [entry["field"] for entry in document["words"]] == ["text"] * 4 + ["text_pair"] * 8


def test_of_a_cut_text_only_what_was_read_is_named(classes: ExplainerWithPredictor) -> None:
    text = "where is my parcel " * 40
    [result] = classes([text])
    [explained] = result.answers
    complete(explained)
    assert result.truncated
    assert 1 < len(explained.texts[0].words) <= 62
    assert "".join(text.split()).startswith(rebuilt(explained))


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_label_that_the_model_has_not_is_refused_with_its_neighbours(classes: ExplainerWithPredictor) -> None:
    with refused("unknown_label"):
        classes([CORPUS[0]], "card lots")


@pytest.mark.parametrize("steps", [0, -2, 3, 10_000])
def test_impossible_steps_are_refused(classes: ExplainerWithPredictor, steps: int) -> None:
    with refused("out_of_range"):
        classes([CORPUS[0]], steps=steps)


def test_an_int8_artefact_is_refused(tmp_path: Path) -> None:
    with refused("no_gradients"):
        load_explainer(openvino_artifact(tmp_path / "int8"))


def test_a_model_that_answers_otherwise_from_embeddings_is_refused(classes: ExplainerWithPredictor) -> None:
    predictor = classes.predictor
    [row], [output] = predictor.encode([CORPUS[0]]), predictor.logits([CORPUS[0]])
    with refused("not_explainable"):
        classes.explain(CORPUS[0], row, output + 0.1)
