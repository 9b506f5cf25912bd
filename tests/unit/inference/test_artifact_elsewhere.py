"""An artifact of every task in other programs: their answers are rtrain's, or they refuse to load it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain import config
from rtrain.compress import student
from rtrain.config import DistillConfig, Recipe
from rtrain.core.ragged import Head
from rtrain.inference import artifact, predictor as inference_predictor
from rtrain.inference.predictor import Predictor
from rtrain.models import builder, model_files, pooling
from rtrain.runs.export import write_model
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.span_qa import SpanQA
from tests.support.tiny import CORPUS, make_encoder, make_masked

TEXTS = (
    "Where is my parcel",
    "please cancel my subscription at the end of the month",
    "thank you, der brief kam gestern, le colis est arrivé ouvert",
    "the card was declined twice in the shop although there is money on the account " * 3,
)
MAX_TOKENS = 24
HEADS: dict[str, Head] = {
    "classification": Head(("a", "b", "c")),
    "multi_label": Head(("fee", "card", "greeting"), {"threshold": 0.4}),
    "regression": Head(("score",), {"mean": 144.86, "std": 23.63, "lowest": 80.0, "highest": 200.0, "step": None}),
    "token_tags": Head(("O", "B-X", "I-X")),
    "multi_head": Head(("i=x", "i=y", "m=u", "m=v"), {"heads": [["i", 2], ["m", 2]]}),
    "extractive_summary": Head(("sentence",), {"max_words": 10}),
    "span_qa": SpanQA().build_head({}),
}
REFUSED = ("multi_head", "extractive_summary")


def recipe_of(task: str, **overrides: Any) -> Recipe:
    settings = {"task": task, "model.pooling": "own", "data.max_tokens": MAX_TOKENS, "data.window": None}
    return config.load_config("intent", {**settings, **overrides}).recipe


def made(folder: Path, task: str, encoder: Path, **overrides: Any) -> tuple[Any, Path]:
    """A network of the task with random weights, and its artifact as a run writes it."""
    recipe, found, head = recipe_of(task, **overrides), base.get_task(task), HEADS[task]
    network: Any = builder.build_network(encoder, found, head.labels, 0, recipe.model).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if not name.startswith(network.base_model_prefix):
                weight.normal_(0.0, 0.5)
    write_model(network, encoder, folder, recipe, head)
    facts = {**head.facts, **({pooling.FACT: "mean"} if recipe.model.pooling == "mean" else {})}
    described = artifact.Artifact("x", task, head.labels, MAX_TOKENS, "torch", facts=facts)
    inputs = inference_predictor.make_golden_inputs(found, dataclasses.replace(head, facts=facts))
    artifact.write_artifact(folder, described, inference_predictor.compute_golden_logits, inputs)
    return network, folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that says of itself what its runs must not say: its own task, length and case."""
    folder = make_encoder(tmp_path_factory.mktemp("encoder"))
    settings = transformers.AutoConfig.from_pretrained(folder)
    settings.problem_type = "multi_label_classification"
    settings.save_pretrained(folder)
    tokenizer = transformers.BertTokenizer.from_pretrained(folder, model_max_length=128, truncation_side="left")
    tokenizer.backend_tokenizer.enable_padding(length=100)
    saved = (folder / "tokenizer.json").read_bytes()
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(saved)
    return folder


@pytest.mark.parametrize("task", ["classification", "multi_label", "regression"])
def test_a_pipeline_answers_texts_as_rtrain_does(task: str, encoder: Path, tmp_path: Path) -> None:
    _, folder = made(tmp_path / "artifact", task, encoder)
    pipeline: Any = transformers.pipeline("text-classification", str(folder), top_k=None, device="cpu")
    ours = Predictor.load(folder)(list(TEXTS), {"top_k": len(HEADS[task].labels), "threshold": 0})
    theirs = pipeline(list(TEXTS), truncation=True)
    for text, mine, other in zip(TEXTS, ours, theirs, strict=True):
        scores = {entry["label"]: entry["score"] for entry in other}
        if task == "regression":
            assert scores == {"score": pytest.approx(mine, rel=1e-5)}, text
        else:
            expected = {entry["label"]: entry["score"] for entry in mine}
            assert set(expected) <= set(scores)
            assert {label: scores[label] for label in expected} == pytest.approx(expected, abs=1e-5), text


def test_a_pipeline_tags_tokens_as_rtrain_does(encoder: Path, tmp_path: Path) -> None:
    _, folder = made(tmp_path / "artifact", "token_tags", encoder)
    pipeline: Any = transformers.pipeline("token-classification", str(folder), ignore_labels=[], device="cpu")
    predictor = Predictor.load(folder)
    for text in TEXTS:
        logits = predictor.logits([text])[0][1:-1]
        assert [entry["entity"] for entry in pipeline(text)] == [
            HEADS["token_tags"].labels[place] for place in logits.argmax(-1)
        ]


def test_a_pipeline_fills_masks_as_rtrain_does(tmp_path: Path) -> None:
    make_masked(tmp_path / "encoder", "bert")
    recipe, task = recipe_of("masked_lm"), base.get_task("masked_lm")
    network: Any = builder.build_network(tmp_path / "encoder", task, (), 0, recipe.model).eval()
    head = task.build_head({}, load_tokenizer(tmp_path / "encoder", MAX_TOKENS))
    write_model(network, tmp_path / "encoder", tmp_path / "artifact", recipe, head)
    described = artifact.Artifact("x", "masked_lm", (), MAX_TOKENS, "torch", facts=head.facts)
    artifact.write_artifact(
        tmp_path / "artifact",
        described,
        inference_predictor.compute_golden_logits,
        inference_predictor.make_golden_inputs(task, head),
    )
    [[ours]] = Predictor.load(tmp_path / "artifact")(["where is my [MASK]"])
    pipeline: Any = transformers.pipeline("fill-mask", str(tmp_path / "artifact"), device="cpu")
    theirs = {entry["token"]: entry["score"] for entry in pipeline("where is my [MASK]")}
    assert theirs == pytest.approx({entry["token"]: entry["score"] for entry in ours}, abs=1e-5)


def test_a_model_of_questions_finds_spans_as_rtrain_does(encoder: Path, tmp_path: Path) -> None:
    _, folder = made(tmp_path / "artifact", "span_qa", encoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    predictor = Predictor.load(folder)
    asked = {"question": TEXTS[0], "context": TEXTS[1]}
    with torch.inference_mode():
        theirs = network(**tokenizer(asked["question"], asked["context"], return_tensors="pt"))
    [ours] = predictor.logits([asked])
    np.testing.assert_allclose(ours, torch.stack([theirs.start_logits[0], theirs.end_logits[0]], -1), atol=1e-5)


@pytest.mark.parametrize("task", REFUSED)
def test_answers_that_others_cannot_read_are_refused_there(task: str, encoder: Path, tmp_path: Path) -> None:
    network, folder = made(tmp_path / "artifact", task, encoder)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        getattr(transformers, base.get_task(task).auto_model).from_pretrained(folder)
    read, _ = model_files.load_network(type(network), folder)
    assert all(torch.equal(read.state_dict()[name], weight) for name, weight in network.state_dict().items())


@pytest.mark.parametrize("pool", ["own", "mean"])
def test_a_regression_s_weights_are_read_as_trained(pool: str, encoder: Path, tmp_path: Path) -> None:
    network, folder = made(tmp_path / "artifact", "regression", encoder, **{"model.pooling": pool})
    again: Any = builder.build_network(
        folder, base.get_task("regression"), ("score",), 9, recipe_of("regression").model
    )
    kept = again.state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in network.state_dict().items() if name in kept)


@pytest.mark.parametrize("width", [None, 16])
def test_a_student_starts_with_its_teacher_s_head_as_trained(width: int | None, encoder: Path, tmp_path: Path) -> None:
    network, folder = made(tmp_path / "artifact", "regression", encoder)
    start = student.create_student(folder, DistillConfig(layers=1, width=width), tmp_path)
    read: Any = builder.build_network(start, base.get_task("regression"), ("score",), 9, recipe_of("regression").model)
    weight = network.classifier.weight
    kept = read.classifier.weight
    assert torch.equal(kept, weight) if width is None else kept.shape == (1, width)
    assert torch.equal(read.classifier.bias, network.classifier.bias)


def test_the_tokenizer_reads_as_many_tokens_as_the_run(encoder: Path, tmp_path: Path) -> None:
    import tokenizers

    _, folder = made(tmp_path / "artifact", "classification", encoder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    predictor = Predictor.load(folder)
    for text in TEXTS:
        [encoded] = predictor.encode([text])
        assert loaded(text, truncation=True).input_ids == encoded.ids
        assert alone.encode(text).ids == encoded.ids
    assert loaded.model_max_length == MAX_TOKENS


def test_a_tokenizer_s_class_changes_no_token_of_an_artifact(encoder: Path, tmp_path: Path) -> None:
    assert model_files.find_differing_texts(encoder)  # BertTokenizer strips accents, which its tokenizer.json does not
    _, folder = made(tmp_path / "artifact", "classification", encoder)
    assert model_files.find_differing_texts(folder) == []


ARCHITECTURES = {
    "wordpiece": ("bert", "distilbert", "electra", "mpnet", "mobilebert"),
    "bpe": ("roberta", "longformer", "modernbert", "deberta"),
    "unigram": ("xlm-roberta", "camembert", "albert"),
}


@pytest.mark.parametrize(
    ("kind", "architecture"), [(kind, one) for kind, all_ in ARCHITECTURES.items() for one in all_]
)
def test_no_architecture_s_own_tokenizer_class_changes_tokens(kind: str, architecture: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "artifact"
    for place in (source, folder):
        transformers.AutoConfig.for_model(architecture).save_pretrained(place)
    made_tokenizer(kind).save(str(source / "tokenizer.json"))
    model_files.write_tokenizer_files(source, folder, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(source, 512)
    texts = [*model_files.PROBE_TEXTS, *(f"{one}{other}" for one in SIGNS for other in SIGNS)]
    assert len(texts) >= 200
    assert [theirs(text).input_ids for text in texts] == [ours.encode(text).ids for text in texts]


SIGNS = (
    "A",
    "b ",
    " c",
    "1",
    "23",
    "é",
    "e\u0301",
    "ß",
    "中",
    "\u1112\u1161",
    "\u00a0",
    "👍🏽",
    "<mask>",
    "[MASK]",
    "'s",
)


def made_tokenizer(kind: str) -> Any:
    """A tokenizer that keeps case and accents and joins no numbers, whatever the class of its folder expects."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    mask = AddedToken("<mask>", lstrip=True, special=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", mask]
    digits = pre_tokenizers.Digits(individual_digits=True)
    model: Any
    trainer: Any
    rest: Any
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        model, rest = models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    elif kind == "bpe":
        model, rest = models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        model, rest = models.Unigram(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.train_from_iterator([*CORPUS, *(text for text in model_files.PROBE_TEXTS)] * 3, trainer)
    first, last = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (first, last)]
    )
    return tokenizer
