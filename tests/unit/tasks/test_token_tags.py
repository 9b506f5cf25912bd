"""Tags of words: where they are learned, windows of long texts, entity scores, and the HTTP form."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from rtrain import config
from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, EncodedRow, Head, RaggedArray, TokenBatch, collate
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.metrics import registry, scores as scores_module
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.runs import predictions
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.token_tags import TokenTags
from rtrain.trainer import evaluate, step
from tests.support.causes import caused_by
from tests.support.micro_batches import assert_same_step
from tests.support.tiny import make_encoder, make_store
from tests.unit.trainer.test_step import make_still_encoder

TASK = TokenTags()
HEAD = Head(("O", "B-PER", "I-PER", "B-LOC"))
SENTENCES = [
    (["anna", "lives", "in", "paris", ",", "france"], ["B-PER", "O", "O", "B-LOC", "O", "B-LOC"]),
    (["where", "is", "anna", "maria", "?"], ["O", "O", "B-PER", "I-PER", "O"]),
    (["nobody", "came"], ["O", "O"]),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


def tokenizer_of(encoder: Path, window: int = 64, stride: int = 0) -> tokenizers.Tokenizer:
    return load_tokenizer(encoder, window, stride)


def encode(encoder: Path, text: str, window: int = 64, stride: int = 0) -> EncodedRow:
    [encoded] = TASK.encode(tokenizer_of(encoder, window, stride), [text], max_windows=64)
    return encoded


@pytest.mark.parametrize(
    ("label", "usable"),
    [
        ('["O", "B-PER"]', True),
        ("O I-PER", True),
        ('["O"]', False),
        ("O O O", False),
        ("O PER", False),
        ("O B-", False),
    ],
)
def test_labels_that_do_not_fit_have_a_reason(label: str, usable: bool) -> None:
    assert (TASK.validate_row("hello anna", None, label) is None) == usable


def test_the_head_has_all_tags_o_first() -> None:
    assert TASK.build_head({'["O", "I-PER"]': 1, "B-LOC O": 2}).labels == ("O", "B-LOC", "I-PER")
    with pytest.raises(UserError, check=caused_by("no_labels")):
        TASK.build_head({"O O": 3})


def test_a_word_is_learned_at_its_first_token(encoder: Path) -> None:
    words, tags = SENTENCES[0]
    text = " ".join(words)
    row = encode(encoder, text)
    target_positions = TASK.target_positions(text, None, "", row)
    assert [mark for mark in target_positions if mark >= 0] == list(range(len(words)))
    for token, word in enumerate(target_positions):
        if word >= 0:
            start, _ = row.spans[token]
            assert start == len(" ".join(words[:word])) + (word > 0)
    assert len(row.ids) > len(words) + 2  # some words have several tokens
    targets = TASK.build_targets([json.dumps(tags)], RaggedArray.from_rows([target_positions], np.int32), HEAD)
    assert targets.values.counts.tolist() == [len(row.ids)]
    assert [HEAD.labels[int(value)] for value in targets.values.values if value != IGNORE_INDEX] == tags
    assert not targets.has_unknown_label.any()
    assert TASK.build_targets(
        ["B-ORG O O O O O"], RaggedArray.from_rows([target_positions], np.int32), HEAD
    ).has_unknown_label.tolist() == [True]


@pytest.mark.parametrize(("window", "stride"), [(8, 0), (8, 2), (12, 5), (16, 7)])
def test_every_word_of_a_long_text_is_answered_once_where_it_has_most_text_around(
    encoder: Path, window: int, stride: int
) -> None:
    words = [word for sentence, _ in SENTENCES * 4 for word in sentence]
    text = " ".join(words)
    row = encode(encoder, text, window, stride)
    assert len(row.windows) > 3
    assert not row.is_truncated
    target_positions = TASK.target_positions(text, None, "", row)
    assert [mark for mark in target_positions if mark >= 0] == list(range(len(words)))
    # By hand: all places of each word's first character, and which of them is farthest from an inner edge.
    places: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    for number, (length, _) in enumerate(row.windows):
        for place in range(length):
            start, end = row.spans[begin + place]
            word = next((n for n in range(len(words)) if start == len(" ".join(words[:n])) + (n > 0)), None)
            if end > start and word is not None:
                before = place if number else 999
                after = length - place if number < len(row.windows) - 1 else 999
                places.setdefault(word, []).append((min(before, after), begin + place))
        begin += length
    for word, match in places.items():
        best = max(distance for distance, _ in match)
        assert next(distance for distance, token in match if target_positions[token] == word) == best


def random_batch(encoder: Path, window: int = 16) -> tuple[TokenBatch, torch.Tensor]:
    """The sentences, the first one long, as rows with targets; and logits of each token."""
    rows = [(words * 5, tags * 5) if number == 0 else (words, tags) for number, (words, tags) in enumerate(SENTENCES)]
    encoded = [encode(encoder, " ".join(words), window, 4) for words, _ in rows]
    target_positions = [
        TASK.target_positions(" ".join(words), None, "", row) for (words, _), row in zip(rows, encoded, strict=True)
    ]
    targets = TASK.build_targets(
        [json.dumps(tags) for _, tags in rows], RaggedArray.from_rows(target_positions, np.int32), HEAD
    ).values
    packed = collate(encoded)
    tokens = TokenBatch(**{**vars(packed), "targets": targets.values, "targets_per_row": targets.counts})
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(len(tokens.ids), 4)))
    return tokens, logits


@pytest.mark.parametrize(
    ("words", "tags", "expected"),
    [
        # An entity on a word without tokens is missed.
        (["anna", "met", "\u200b", "?"], ["B-PER", "O", "B-LOC", "O"], (1.0, 0.5, 2 / 3, 0.75)),
        # An entity that begins with such a word is predicted with another start: neither precision nor recall.
        (["\u200b", "paris", "?"], ["B-LOC", "B-LOC", "O"], (1.0, 0.5, 2 / 3, 2 / 3)),
        (["in", "\u200b", "anna", "maria"], ["O", "B-PER", "I-PER", "I-PER"], (0.0, 0.0, 0.0, 0.75)),
        (["\u200b", "\u200d"], ["O", "B-LOC"], (0.0, 0.0, 0.0, 0.5)),
    ],
)
def test_a_word_without_a_token_is_missed(
    words: list[str], tags: list[str], expected: tuple[float, ...], encoder: Path
) -> None:
    """The model answers all that it sees rightly. The scores are those of seqeval for the answers with O there."""
    text, label = " ".join(words), json.dumps(tags)
    encoded = encode(encoder, text)
    target_positions = RaggedArray.from_rows([TASK.target_positions(text, None, label, encoded)], np.int32)
    targets = TASK.build_targets([label], target_positions, HEAD).values
    tokens = replace(collate([encoded]), targets=targets.values, targets_per_row=targets.counts)
    seen = [word for word in words if word.isascii()]
    assert TASK.count_targets(tokens, HEAD) == {"loss": len(seen)}
    right = np.where(tokens.targets[: len(encoded.ids)] >= 0, tokens.targets[: len(encoded.ids)], 0).astype(int)
    logits = 9.0 * np.eye(len(HEAD.labels))[right]
    assert float(TASK.loss(torch.from_numpy(logits), tokens, HEAD)["loss"]) < 0.01
    row_results = TASK.row_results(TASK.row_outputs(logits, tokens, HEAD), tokens, HEAD)
    scores = registry.METRICS["tags"].main_scores(row_results, targets, HEAD)
    results = [scores[name] for name in ("precision", "recall", "f1", "word_accuracy")]
    assert results == pytest.approx(expected)
    report = TASK.explain_rows(row_results, targets, HEAD)
    assert report.target == [tags]
    assert [len(row) for row in report.prediction] == [len(words)]
    document = scores_module.measure_split(TASK, HEAD, "test", row_results, targets, tokens.row_lengths, {})
    assert document["tables"]["words_without_tokens"] == len(words) - len(seen)
    assert "have no token" in scores_module.format_scores(document)


def test_the_loss_is_that_of_words_and_adds_up_row_by_row(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    words = sum(len(words) * (5 if number == 0 else 1) for number, (words, _) in enumerate(SENTENCES))
    assert TASK.count_targets(tokens, HEAD) == {"loss": words}
    expected = sum(
        float(torch.logsumexp(row, 0) - row[int(target)])
        for row, target in zip(logits, tokens.targets, strict=True)
        if target != IGNORE_INDEX
    )
    assert TASK.loss(logits, tokens, HEAD)["loss"].item() == pytest.approx(expected)
    ends = np.cumsum(tokens.row_lengths)
    parts = [
        TASK.loss(logits[end - length : end], tokens.take([row]), HEAD)["loss"].item()
        for row, (end, length) in enumerate(zip(ends, tokens.row_lengths, strict=True))
    ]
    assert sum(parts) == pytest.approx(expected)
    assert sum(TASK.count_targets(tokens.take([row]), HEAD)["loss"] for row in range(3)) == words


def test_a_student_learns_its_teacher_s_words_only(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    teacher = np.random.default_rng(1).normal(size=(len(tokens.ids), 4)).astype(np.float32)
    with_teacher = TokenBatch(**{**vars(tokens), "teacher_logits": teacher})
    loss = TASK.distillation_loss(logits, with_teacher, HEAD, 2.0)["loss"].item()
    log_p, log_q = (torch.log_softmax(side / 2, -1) for side in (torch.from_numpy(teacher).double(), logits))
    answered = torch.from_numpy(tokens.targets != IGNORE_INDEX)
    assert loss == pytest.approx(float(4 * (log_p.exp() * (log_p - log_q)).sum(-1)[answered].sum()), rel=1e-6)
    assert with_teacher.take([1]).teacher_logits.shape == (int(tokens.row_lengths[1]), 4)


def test_an_update_is_divided_by_its_words_whatever_the_passes(encoder: Path) -> None:
    """I3 where rows have different numbers of targets: no pass's mean is taken anywhere."""
    tokens, _ = random_batch(encoder)
    network: Any = builder.build_network(encoder, TASK, HEAD.labels, seed=0)
    network = network.double().train()
    loss = assert_same_step(TASK, HEAD, network, tokens, ([[0, 1, 2]], [[2], [0], [1]], [[1, 2], [0]]))
    logits = step.forward(network, tokens, 0, "fp64")
    words = TASK.count_targets(tokens, HEAD)["loss"]
    assert loss == pytest.approx(TASK.loss(logits, tokens, HEAD)["loss"].item() / words, rel=1e-12)


# ------------------------------------------------------------------------------------------------------- the whole way


def write(path: Path, count: int = 120) -> Path:
    lines = []
    for number in range(count):
        words, tags = SENTENCES[number % 3]
        lines += [f"{word}\t{tag}" for word, tag in zip([f"n{number}", *words], ["O", *tags], strict=True)] + [""]
    path.write_text("\n".join([*lines[:40], "broken", "", *lines[40:]]))
    return path


@pytest.fixture(scope="module")
def store_and_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("tags")
    settings = {"data.path": str(write(folder / "tags.conll")), "data.max_tokens": 16, "data.stride": 4}
    recipe = config.load_config("entities", settings).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder), folder


def test_conll_files_become_rows_with_a_target_for_each_token(store_and_encoder: tuple[Store, Path]) -> None:
    store, _ = store_and_encoder
    assert store.manifest.labels == ("O", "B-LOC", "B-PER", "I-PER")
    assert (store.manifest.truncated, store.manifest.quarantined) == (0, 1)
    assert sum(store.manifest.rows.values()) == 120
    tokens = store.read_tokens("train", np.arange(store.num_rows("train")))
    assert tokens.targets_per_row.tolist() == tokens.row_lengths.tolist()
    assert tokens.windows_per_row.max() > 1


def test_evaluation_sees_every_word_and_writes_tags(store_and_encoder: tuple[Store, Path], tmp_path: Path) -> None:
    import pyarrow.parquet

    store, folder = store_and_encoder
    network: Any = builder.build_network(folder / "encoder", TASK, store.manifest.labels, seed=0)
    strategy = DDPStrategy(network)
    row_results = evaluate.gather_row_results(strategy, TASK, store, "test", pad_id=0, precision="fp32")
    scores = evaluate.score_rows(strategy, TASK, store, "test", row_results)
    assert scores["rows"] == store.num_rows("test")
    path = Run(tmp_path).predictions("test")
    predictions.write_predictions(
        path, "test", store, TASK, store.manifest.head, row_results, tokenizer_of(folder / "encoder")
    )
    for row in pyarrow.parquet.read_table(path).to_pylist():
        assert row["target"] in [["O", *tags] for _, tags in SENTENCES]
        assert len(row["prediction"]) == len(row["target"])
        assert 0 < row["score"] <= 1
        assert row["loss"] > 0


@pytest.mark.parametrize(("facts", "word"), [({}, "anna's"), ({"cut_before": "'", "cut_after": "'"}, "anna")])
def test_a_request_is_cut_at_the_signs_at_which_the_rows_are(encoder: Path, facts: dict[str, str], word: str) -> None:
    text, head = "anna's parcel", Head(("O", "B-PER", "I-PER"), facts)
    encoded = encode(encoder, text)
    logits = np.zeros((len(encoded.ids), 3), dtype=np.float32)
    logits[:, 0] = 1.0
    first = next(place for place, (start, end) in enumerate(encoded.spans) if (start, end) != (start, start))
    logits[first] = [0.0, 2.0, 0.0]
    [[entity]] = TASK.decode([logits], [text], [encoded], head, {})
    assert (entity["word"], entity["start"], entity["end"]) == (word, 0, len(word))


def test_words_that_are_a_list_written_as_text_are_refused() -> None:
    """As csv has them that was written from lists: the brackets would become words."""
    assert TASK.validate_row('["EU", "rejects"]', None, '["B-ORG", "O"]') is not None
    assert TASK.validate_row("[ EU", None, '["O", "B-ORG"]') is None
    assert TASK.validate_row('["EU"]', None, "O") is None  # a word of its own, with a tag of its own
