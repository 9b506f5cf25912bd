"""Question answering: where answers are learned, which span is answered, no answer, and the HTTP form."""

import gzip
import json
import math
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from tokenizers.normalizers import BertNormalizer

from rtrain import config
from rtrain.core.ragged import EncodedRow, Head, RaggedArray, TokenBatch, TokenWindow, collate
from rtrain.core.run_folder import Run
from rtrain.inference import score
from rtrain.metrics import registry, spans
from rtrain.metrics.spans import SpanResults
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.runs import predictions
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.span_qa import SpanQA
from rtrain.trainer import evaluate
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact

TASK = SpanQA()
HEAD = Head(("start", "end"), {"no_answer": True})
CONTEXT = "the parcel was due on monday, and the invoice shows a fee of four euros."


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def encode(encoder: Path, question: str, context: str, window: int = 64, stride: int = 0) -> EncodedRow:
    [row] = TASK.encode(load_tokenizer(encoder, window, stride), [question], [context], 64)
    return row


def label(*answers: str, context: str = CONTEXT) -> str:
    return json.dumps([{"text": answer, "start": context.index(answer)} for answer in answers])


@pytest.mark.parametrize(
    ("context", "label", "usable"),
    [
        (CONTEXT, label("monday"), True),
        (CONTEXT, "[]", True),
        (CONTEXT, '{"text": ["monday", "a fee"], "answer_start": [22, 52]}', True),
        (CONTEXT, '{"text": [], "answer_start": []}', True),
        (CONTEXT, '[{"text": "monday", "answer_start": 22}]', True),
        (CONTEXT, '{"text": ["monday"], "answer_start": []}', False),
        (CONTEXT, '{"text": "monday", "answer_start": 22}', False),
        (None, "[]", False),
        ("  ", "[]", False),
        (CONTEXT, "monday", False),
        (CONTEXT, '[{"text": "monday"}]', False),
        (CONTEXT, '[{"text": "monday", "start": 3}]', False),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(context: str | None, label: str, usable: bool) -> None:
    assert (TASK.validate_row("when?", context, label) is None) == usable


def test_an_answer_is_learned_at_its_own_tokens(encoder: Path) -> None:
    row = encode(encoder, "when was it due?", CONTEXT)
    assert len(row.windows) == 1
    first, last = TASK.target_positions("", CONTEXT, label("four euros"), row)
    assert CONTEXT[row.spans[first][0] : row.spans[last][1]] == "four euros"
    assert first >= row.windows[0].pair_start
    assert TASK.target_positions("", CONTEXT, "[]", row) == [0, 0]


def test_a_window_without_the_whole_answer_has_none(encoder: Path) -> None:
    row = encode(encoder, "when?", CONTEXT, window=20, stride=6)
    target_positions = np.array(TASK.target_positions("", CONTEXT, label("fee of four"), row)).reshape(-1, 2)
    assert len(target_positions) == len(row.windows) > 2
    begin, contained = 0, 0
    for window, (first, last) in zip(row.windows, target_positions.tolist(), strict=True):
        inside = row.spans[begin + window.pair_start : begin + window.num_tokens - 1]
        start = CONTEXT.index("fee of four")
        full = inside[0][0] <= start and inside[-1][1] >= start + len("fee of four")
        assert (last > 0) == full
        if full:
            contained += 1
            assert CONTEXT[row.spans[begin + first][0] : row.spans[begin + last][1]] == "fee of four"
        begin += window.num_tokens
    assert 0 < contained < len(row.windows)


ACCENT = "\u0301"
"""A sign on the letter before it, which the tokenizer drops from a word's last piece, as vowel signs of Hindi and
Thai."""


@pytest.mark.parametrize(("window", "stride"), [(64, 0), (24, 10)])
def test_an_answer_whose_last_sign_the_tokenizer_drops_is_learned(encoder: Path, window: int, stride: int) -> None:
    word = f"mondayx{ACCENT}"
    context = CONTEXT.replace("monday", word)
    tokenizer = load_tokenizer(encoder, window, stride)
    tokenizer.normalizer = BertNormalizer(strip_accents=True, lowercase=True)
    [row] = TASK.encode(tokenizer, ["when?"], [context], 64)
    every = [span for span in row.spans if context.index(word) <= span[0] < context.index(word) + len(word)]
    assert max(end for _, end in every) == context.index(word) + len(word) - 1  # else this shows nothing
    target_positions = np.reshape(TASK.target_positions("", context, label(word, context=context), row), (-1, 2))
    starts = np.cumsum([0, *(window.num_tokens for window in row.windows)])
    contained = [
        (int(begin), *place) for begin, place in zip(starts, target_positions.tolist(), strict=False) if place[1]
    ]
    assert contained
    output = np.full((len(row.ids), 2), -9.0, dtype=np.float32)
    for begin, first, last in contained:
        assert context[row.spans[begin + first][0] : row.spans[begin + last][1]] == word[:-1]
        output[begin + first, 0] = output[begin + last, 1] = 9
    (answer,) = TASK.decode([output], [{"question": "when?", "context": context}], [row], HEAD, {})
    assert answer["answer"] == word == context[answer["start"] : answer["end"]]


def test_an_answer_behind_the_last_window_is_learned_in_none(encoder: Path) -> None:
    """Its first tokens alone are there."""
    [row] = TASK.encode(load_tokenizer(encoder, 20, 6), ["when?"], [CONTEXT], 1)
    assert row.is_truncated
    end = row.spans[row.windows[0].num_tokens - 2][1]
    prefix = CONTEXT[end - 3 : end + 4]
    assert TASK.target_positions("", CONTEXT, label(prefix), row) == [0, 0]
    assert TASK.target_positions("", CONTEXT, label(CONTEXT[end - 3 : end]), row) != [0, 0]


def test_a_long_question_leaves_room_for_the_context(encoder: Path) -> None:
    row = encode(encoder, " ".join(CORPUS), CONTEXT, window=64, stride=8)
    assert all(window.pair_start <= 64 // 4 + 2 for window in row.windows)
    assert row.spans[sum(window.num_tokens for window in row.windows) - 2][1] == len(CONTEXT)


def test_the_best_span_of_all_windows_wins() -> None:
    windows = [TokenWindow(6, 3), TokenWindow(7, 3)]
    output = np.zeros((13, 2), dtype=np.float32)
    output[4] = (3, 0)  # starts in the first window
    output[9] = (2, 0)  # starts in the second, at its place 3
    output[11] = (0, 4)  # and ends there
    output[8] = (0, 9)  # an end in the question
    output[12] = (9, 9)  # the separator
    output[0], output[6] = (1, 1), (0.5, 1)  # no answer: 2 in the first window, 1.5 in the second
    assert find_best_span(output, windows) == (9, 11, 6 - 1.5)
    output[10:12, 1] = 0
    output[3] = (0, 9)  # an end before the start does not make a span with it
    first, last, _ = find_best_span(output, windows)
    assert first <= last


def find_best_span(output: Any, windows: list[TokenWindow]) -> tuple[float, float, float]:
    """First and last token and margin of a row's best span."""
    tokens = collate([EncodedRow(list(range(len(output))), windows, False, [])])
    targets = np.zeros(2 * len(windows), dtype=np.float32)
    tokens = replace(tokens, targets=targets, targets_per_row=np.array([len(targets)], dtype=np.int32))
    [row] = zip(*SpanResults.from_rows(TASK.row_results([output], tokens, HEAD)), strict=True)
    best = SpanResults(*map(float, row))
    return best.first, best.last, best.margin


def rows_of(encoder: Path, window: int = 24) -> tuple[TokenBatch, torch.Tensor]:
    inputs = [("when?", label("monday")), ("who?", "[]"), ("what does it show?", label("a fee", "fee"))]
    encoded = [encode(encoder, question, CONTEXT, window, 8) for question, _ in inputs]
    target_positions = [
        TASK.target_positions("", CONTEXT, is_given, row) for (_, is_given), row in zip(inputs, encoded, strict=True)
    ]
    targets = TASK.build_targets(
        [is_given for _, is_given in inputs], RaggedArray.from_rows(target_positions, np.int32), HEAD
    ).values
    tokens = TokenBatch(**{**vars(collate(encoded)), "targets": targets.values, "targets_per_row": targets.counts})
    return tokens, torch.from_numpy(np.random.default_rng(0).normal(size=(len(tokens.ids), 2)))


def test_the_loss_is_that_of_starts_and_ends_of_all_windows(encoder: Path) -> None:
    tokens, logits = rows_of(encoder)
    assert TASK.count_targets(tokens, HEAD) == {"loss": 2 * len(tokens.window_lengths)}
    expected, begin = 0.0, 0
    for length, places in zip(tokens.window_lengths, tokens.targets.reshape(-1, 2).astype(int), strict=True):
        subset = logits[begin : begin + length]
        expected += sum(
            float(torch.logsumexp(subset[:, side], 0) - subset[place, side]) for side, place in enumerate(places)
        )
        begin += length
    assert TASK.loss(logits, tokens, HEAD)["loss"].item() == pytest.approx(expected)
    with_teacher = TokenBatch(**{**vars(tokens), "teacher_logits": logits.numpy().astype(np.float32)})
    assert TASK.distillation_loss(logits, with_teacher, HEAD, 2.0)["loss"].item() == pytest.approx(0, abs=1e-6)
    assert TASK.distillation_loss(logits * 2, with_teacher, HEAD, 2.0)["loss"].item() > 0.1
    row_results = TASK.row_results(TASK.row_outputs(logits.numpy(), tokens, HEAD), tokens, HEAD).to_matrix(7)
    assert (row_results[:, 4] * tokens.targets_per_row).sum() == pytest.approx(expected)


def row_result(f1: float, margin: float, has_answer: bool) -> list[float]:
    return [f1, float(f1 == 1), margin, float(has_answer), 0.0, 3, 4]


def test_no_answer_is_right_where_there_is_none() -> None:
    rows = RaggedArray.from_rows(
        [row_result(1, 2, True), row_result(0.5, 1, True), row_result(0, -1, False), row_result(0, 3, False)],
        np.float64,
    )
    nothing = RaggedArray.from_rows([[]] * 4, np.float32)
    scores = registry.METRICS["spans"].main_scores(rows, nothing, HEAD)
    assert scores == {"f1": pytest.approx(2.5 / 4), "exact_match": 0.5, "answered": 0.75, "rows": 4}
    always = registry.METRICS["spans"].main_scores(rows, nothing, Head(HEAD.labels, {"no_answer": False}))
    assert always["f1"] == pytest.approx(1.5 / 4)


def test_an_answer_that_is_no_number_is_wrong(encoder: Path) -> None:
    """A question without an answer is one of them, to which none would be right; no threshold is made of it."""
    tokens, logits = rows_of(encoder)
    nothing = np.full_like(logits.numpy(), np.nan)
    result = TASK.row_results(TASK.row_outputs(nothing, tokens, HEAD), tokens, HEAD)
    for facts in ({"no_answer": True}, {"no_answer": False}, {"no_answer": True, "threshold": 3.0}):
        head = Head(HEAD.labels, facts)
        assert registry.METRICS["spans"].main_scores(result, tokens.row_targets, head)["f1"] == 0
        assert TASK.calibrate(result, tokens.row_targets, head) == {}
        assert all(entry == slice(0, 1) for entry in TASK.explain_rows(result, tokens.row_targets, head).prediction)
    assert "no_answer" not in spans.build_span_tables(result, tokens.row_targets, HEAD)
    rows = RaggedArray.from_rows(
        [row_result(1, 2, True), row_result(0, math.nan, False), row_result(0, -1, False)], np.float64
    )
    targets = RaggedArray.from_rows([[]] * 3, np.float32)
    assert registry.METRICS["spans"].main_scores(rows, targets, HEAD)["f1"] == pytest.approx(2 / 3)
    assert TASK.calibrate(rows, targets, HEAD) == {"threshold": 0.5}
    curve = spans.build_span_tables(rows, targets, HEAD)["no_answer"]["curve"]
    assert [point["answered"] for point in curve] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [point["f1"] for point in curve] == pytest.approx([1 / 3, 2 / 3, 1 / 3])


def test_the_threshold_is_the_best_of_the_validation_rows() -> None:
    rows = RaggedArray.from_rows(
        [row_result(1, 5, True), row_result(1, 4, True), row_result(0, 3, False), row_result(0, 2, False)], np.float64
    )
    facts = TASK.calibrate(rows, rows, HEAD)
    assert facts == {"threshold": 3.5}
    silent = RaggedArray.from_rows([row_result(0, 5, False), row_result(0, 4, False)], np.float64)
    assert TASK.calibrate(silent, silent, HEAD)["threshold"] > 5
    assert TASK.calibrate(rows, rows, Head(HEAD.labels, {"no_answer": False})) == {}


# ------------------------------------------------------------------------------------------------------- the whole way


def write(path: Path, count: int = 60) -> Path:
    paragraphs = []
    for number in range(count):
        context = f"number {number}. {CONTEXT} " + " ".join(CORPUS[: 1 + number % 4])
        answers = [] if number % 3 == 2 else [{"text": "monday", "answer_start": context.index("monday")}]
        question = {"id": str(number), "question": f"when {number}?", "answers": answers, "is_impossible": not answers}
        paragraphs.append({"context": context, "qas": [question]})
    bad = {"context": CONTEXT, "qas": [{"id": "bad", "question": "?", "answers": [{"text": "x", "answer_start": 1}]}]}
    articles = [{"title": f"t{n}", "paragraphs": [paragraph]} for n, paragraph in enumerate([*paragraphs, bad])]
    with gzip.open(path, "wt") as file:
        json.dump({"version": "v2.0", "data": articles}, file)
    return path


def test_from_a_squad_file_to_answers(encoder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    overrides = {"data.path": str(write(tmp_path / "squad.json.gz")), "data.window": 48, "data.stride": 12}
    recipe = config.load_config("squad", overrides).recipe
    store = make_store(recipe, encoder, tmp_path)
    assert (store.manifest.quarantined, store.manifest.truncated, sum(store.manifest.rows.values())) == (1, 0, 60)
    assert store.manifest.facts["no_answer"] is True
    tokens = store.read_tokens("train", np.arange(store.num_rows("train")))
    assert tokens.targets_per_row.tolist() == (2 * tokens.windows_per_row).tolist()
    network: Any = builder.build_network(encoder, TASK, store.manifest.labels, seed=0)
    strategy = DDPStrategy(network)
    row_results = evaluate.gather_row_results(strategy, TASK, store, "valid", pad_id=0, precision="fp32")
    scores = evaluate.score_rows(strategy, TASK, store, "valid", row_results)
    assert scores["rows"] == store.num_rows("valid")
    tokenizer = load_tokenizer(encoder, 48, 12)
    path = Run(tmp_path).predictions("valid")
    predictions.write_predictions(path, "valid", store, TASK, store.manifest.head, row_results, tokenizer)
    for row in pyarrow.parquet.read_table(path).to_pylist():
        assert isinstance(row["prediction"], str)
        assert math.isfinite(row["loss"])
    folder = make_task_artifact(
        tmp_path / "artifact", "span_qa", Head(HEAD.labels, {"stride": 12, "max_windows": 64}), max_tokens=48
    )
    scored = score.score_file(folder, recipe.data)
    assert (scored["rows"], scored["bad_rows"]) == (60, 1)
    assert 0 <= scored["scores"]["squad_exact_match"] <= scored["scores"]["squad_f1"] <= 100


@pytest.mark.parametrize(
    ("context", "span"),
    [("행 은 서울 에", (1, 8)), ("हिंदी में नि", (1, 8)), ("cafe\u0301 \U0001f469\u200d\U0001f4bb!", (3, 7))],
)
def test_an_answer_is_made_of_whole_characters(context: str, span: tuple[int, int]) -> None:
    context = unicodedata.normalize("NFD", context)
    spans = [(0, 0), (0, 0), (span[0], span[0] + 1), (span[1] - 1, span[1]), (0, 0)]
    row = EncodedRow([0] * 5, [TokenWindow(5, 2)], False, spans)
    output = np.zeros((5, 2), np.float32)
    output[2, 0] = output[3, 1] = 9
    [answers] = TASK.decode([output], [{"question": "where", "context": context}], [row], HEAD, {})
    characters = [match.span() for match in regex.finditer(r"\X", context)]
    assert answers["answer"] == context[answers["start"] : answers["end"]]
    inside = [entry for entry in characters if entry[1] > span[0] and entry[0] < span[1]]
    assert (answers["start"], answers["end"]) == (inside[0][0], inside[-1][1])


def test_a_tokenizer_without_token_types_marks_the_context_too(encoder: Path, tmp_path: Path) -> None:
    """As RoBERTa's and XLM-RoBERTa's: two signs stand between the texts, and both have one type."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    files = tokenizer.get_vocab()
    sep, cls = ("[SEP]", files["[SEP]"]), ("[CLS]", files["[CLS]"])
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(sep, cls)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    long = " ".join(CORPUS[:6])
    row = encode(tmp_path, "when was it due?", long, window=32, stride=8)
    assert len(row.windows) > 1
    begin = 0
    for window in row.windows:
        first = row.spans[begin + window.pair_start]
        assert row.ids[begin + window.pair_start - 1] == tokenizer.token_to_id("[SEP]")
        assert first[1] > first[0]
        begin += window.num_tokens
    assert row.spans[row.windows[0].pair_start][0] == 0


def test_an_answer_does_not_begin_with_the_blank_before_its_first_word() -> None:
    """As the tokens of some tokenizers do, DeBERTa's among them."""
    context = "Maria Lund built it in Rotterdam."
    spans = [(0, 0), (0, 0), (0, 5), (5, 10), (22, 32), (32, 33)]
    row = EncodedRow([0] * 6, [TokenWindow(6, 2)], False, spans)
    output = np.zeros((6, 2), np.float32)
    output[4, :], output[0, :] = 9, -5
    [answers] = TASK.decode([output], [{"question": "where", "context": context}], [row], HEAD, {})
    assert (answers["answer"], answers["start"], answers["end"]) == ("Rotterdam", 23, 32)
