"""Extractive summaries: targets, the window of each sentence, exact ROUGE and BLEU, and the HTTP answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Head, RaggedArray, TokenBatch, TokenWindow, collate
from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import find_sentence_spans
from rtrain.data.store.store import Store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import bootstrap, registry, summaries
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.runs import predictions
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.extractive_summary import ExtractiveSummary, locate_sentences
from rtrain.trainer import evaluate, step
from serve.app import build_app
from tests.support.causes import caused_by
from tests.support.micro_batches import assert_same_step
from tests.support.serving import call
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact
from tests.unit.trainer.test_step import make_still_encoder

TASK = ExtractiveSummary()
HEAD = Head(("left out", "taken"), {"max_words": 12})
DOCUMENT = "The parcel was due on Monday. Nobody came! The invoice shows a fee of 4.50 euros, please. We want it back."
SUMMARY = "the invoices show a fee; nobody came"
ROWS = [(DOCUMENT, SUMMARY), ("One sentence only.", "only one"), ("First this. Then that. Third that.", "nothing else")]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


def encode(encoder: Path, document: str, window: int = 64, stride: int = 0, max_windows: int = 64) -> EncodedRow:
    [encoded] = TASK.encode(load_tokenizer(encoder, window, stride), [document], max_windows=max_windows)
    return encoded


def sentences(document: str) -> list[str]:
    return [document[start:end] for start, end in find_sentence_spans(document)]


@pytest.mark.parametrize(
    ("document", "reference", "usable"),
    [(DOCUMENT, SUMMARY, True), ("*** -- ...", SUMMARY, False), (DOCUMENT, "\u2026", False)],
)
def test_rows_that_cannot_be_used_have_a_reason(document: str, reference: str, usable: bool) -> None:
    assert (TASK.validate_row(document, None, reference) is None) == usable


def test_the_budget_is_the_mean_length_of_the_references() -> None:
    assert TASK.build_head({"one two three": 3, "one": 2}).facts == {"max_words": 2}  # 11 words in 5 rows
    assert TASK.build_head({"one": 1, "a b": 3}).facts == {"max_words": 2}
    with pytest.raises(UserError, check=caused_by("no_rows")):
        TASK.build_head({})


def test_the_oracle_s_sentences_are_learned_at_their_own_tokens(encoder: Path) -> None:
    row = encode(encoder, DOCUMENT)
    target_positions = TASK.target_positions(DOCUMENT, None, SUMMARY, row)
    result = summaries.decode_sentences(np.array(target_positions))
    assert result.in_oracle.tolist() == [False, True, True, False]
    assert result.words.tolist() == [6, 2, 9, 4]
    for sentence, first, end in zip(sentences(DOCUMENT), result.first, result.end, strict=True):
        assert DOCUMENT[row.spans[first][0] : row.spans[end - 1][1]] == sentence
    assert (result.first[0], result.end[-1]) == (1, len(row.ids) - 1)  # between [CLS] and [SEP]


WORDS = st.lists(st.sampled_from(["a", "Running", "runs", "it's", "3.5", "b-c", "."]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4), WORDS, st.data())
def test_scores_by_numbers_are_those_of_the_texts(document: list[list[str]], reference: list[str], data: Any) -> None:
    """Any choice of sentences: the libraries' own scores of the joined text."""
    texts, expected_values = [" ".join(words) for words in document], " ".join(reference)
    selected = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1))))
    values = np.array(summaries.encode_summary_row(texts, [(0, 1)] * len(texts), [], expected_values), dtype=np.float32)
    rouge, bleu = summaries.decode_words(values)
    expected = scores_of([" ".join(texts[place] for place in selected)], [expected_values])
    assert summaries.compute_rouge(rouge.select_words(selected), rouge.reference) == pytest.approx(
        [expected[name] for name in summaries.ROUGE_NAMES]
    )
    counts = np.array(summaries.count_bleu(bleu.select_words(selected), bleu.reference))
    assert float(summaries.compute_bleu(counts)) == pytest.approx(expected["bleu"], abs=1e-9)


# ------------------------------------------------------------------------------------------------------------- windows


def by_hand(windows: list[list[tuple[int, int]]]) -> EncodedRow:
    """Each window is the characters of its tokens, between special ones."""
    spans = [span for window in windows for span in [(0, 0), *window, (0, 0)]]
    lengths = [TokenWindow(len(window) + 2, len(window) + 2) for window in windows]
    return EncodedRow([7] * len(spans), lengths, False, spans)


def test_a_sentence_is_scored_where_most_of_it_is_and_it_has_most_context() -> None:
    # Tokens of one character each; sentences at 0-1, 3-4, 6-7, 9-9 and an unread one.
    token = {place: (place, place + 1) for place in range(12)}
    first = by_hand([[token[place] for place in (0, 1, 3, 4, 6)], [token[place] for place in (3, 4, 6, 7, 9)]])
    spans = [(0, 2), (3, 5), (6, 8), (9, 10), (11, 12)]
    # 3-4: whole in both; 4 tokens before it is a beginning or an end in the first, 1 in the second.
    # 6-7: whole in the second only.
    assert locate_sentences(first, spans) == [(1, 3), (3, 5), (10, 12), (12, 13), (0, 0)]
    # A sentence longer than any window: the larger part of it.
    cut = by_hand([[token[place] for place in (0, 1, 2)], [token[place] for place in (2, 3, 4, 5)]])
    assert locate_sentences(cut, [(0, 6)]) == [(6, 10)]


@pytest.mark.parametrize(("window", "stride"), [(8, 0), (16, 4), (24, 10)])
def test_every_sentence_of_a_long_document_is_scored_once(encoder: Path, window: int, stride: int) -> None:
    document = " ".join(f"{line.capitalize()}." for line in CORPUS * 2)
    row = encode(encoder, document, window, stride)
    spans = find_sentence_spans(document)
    result = locate_sentences(row, spans)
    assert len(result) == len(CORPUS) * 2
    windows = np.repeat(np.arange(len(row.windows)), [entry.num_tokens for entry in row.windows])
    for (start, end), (first, behind) in zip(spans, result, strict=True):
        assert first < behind
        assert len(set(windows[first:behind])) == 1
        assert all(start <= row.spans[token][0] < row.spans[token][1] <= end for token in range(first, behind))


def test_what_was_not_read_is_neither_learned_nor_taken(encoder: Path) -> None:
    row = encode(encoder, DOCUMENT, window=16, max_windows=1)
    assert row.is_truncated
    tokens = batch([row], [DOCUMENT], [SUMMARY])
    read = summaries.decode_sentences(tokens.targets).is_read
    assert 0 < read.sum() < 4
    assert TASK.count_targets(tokens, HEAD) == {"loss": int(read.sum())}
    output = np.zeros((len(row.ids), 2), dtype=np.float32)
    [row_result] = TASK.row_results([output], tokens, Head(HEAD.labels, {"max_words": 100}))
    chances, overrides = summaries.decode_result(row_result)
    assert overrides.tolist() == read.tolist()
    assert chances.tolist() == [0.5 if has_answer else -1 for has_answer in read]
    [answer] = TASK.decode([output], [DOCUMENT], [row], HEAD, {"max_words": 100})
    assert [entry["text"] for entry in answer["sentences"]] == [
        entry for entry, has_answer in zip(sentences(DOCUMENT), read, strict=True) if has_answer
    ]


# ---------------------------------------------------------------------------------------------------------------- loss


def batch(encoded: list[EncodedRow], documents: list[str], references: list[str]) -> TokenBatch:
    rows = zip(documents, references, encoded, strict=True)
    target_positions = RaggedArray.from_rows(
        [TASK.target_positions(document, None, reference, row) for document, reference, row in rows], np.int32
    )
    targets = TASK.build_targets(references, target_positions, HEAD).values
    return TokenBatch(**{**vars(collate(encoded)), "targets": targets.values, "targets_per_row": targets.counts})


def random_batch(encoder: Path) -> tuple[TokenBatch, torch.Tensor]:
    """The rows, read in windows, and logits of each token."""
    encoded = [encode(encoder, document, 16, 4) for document, _ in ROWS]
    tokens = batch(encoded, [document for document, _ in ROWS], [reference for _, reference in ROWS])
    assert tokens.windows_per_row.max() > 1
    return tokens, torch.from_numpy(np.random.default_rng(0).normal(size=(len(tokens.ids), 2)))


def expected_loss(tokens: TokenBatch, logits: torch.Tensor) -> float:
    total, begin = 0.0, 0
    for values, length in zip(tokens.row_targets, tokens.row_lengths.tolist(), strict=True):
        row = summaries.decode_sentences(values)
        for first, end, is_selected in zip(row.first, row.end, row.in_oracle, strict=True):
            mean = logits[begin + first : begin + end].mean(dim=0)
            total += float(torch.logsumexp(mean, 0) - mean[int(is_selected)])
        begin += length
    return total


def test_the_loss_is_that_of_sentences_and_adds_up_row_by_row(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    assert TASK.count_targets(tokens, HEAD) == {"loss": 4 + 1 + 3}
    assert TASK.loss(logits, tokens, HEAD)["loss"].item() == pytest.approx(expected_loss(tokens, logits))
    parts = torch.split(logits, tokens.row_lengths.tolist())
    single = [TASK.loss(part, tokens.take([row]), HEAD)["loss"].item() for row, part in enumerate(parts)]
    assert sum(single) == pytest.approx(expected_loss(tokens, logits))
    row_results = TASK.row_results(TASK.row_outputs(logits.numpy(), tokens, HEAD), tokens, HEAD)
    of_rows = TASK.explain_rows(row_results, tokens.row_targets, HEAD).loss
    assert (of_rows * [4, 1, 3]).sum() == pytest.approx(expected_loss(tokens, logits))


def test_a_student_learns_its_teacher_s_sentences(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    with_teacher = TokenBatch(**{**vars(tokens), "teacher_logits": logits.numpy().astype(np.float32)})
    assert TASK.distillation_loss(logits, with_teacher, HEAD, 2.0)["loss"].item() == pytest.approx(0, abs=1e-6)
    shuffled = torch.from_numpy(np.random.default_rng(1).normal(size=logits.shape))
    loss = TASK.distillation_loss(shuffled, with_teacher, HEAD, 2.0)["loss"].item()
    expected = 0.0
    begins = (np.cumsum(tokens.row_lengths) - tokens.row_lengths).tolist()
    rows = [summaries.decode_sentences(values) for values in tokens.row_targets]
    first = np.concatenate([begin + row.first for begin, row in zip(begins, rows, strict=True)])
    end = np.concatenate([begin + row.end for begin, row in zip(begins, rows, strict=True)])
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        log_p, log_q = (torch.log_softmax(side[a:b].mean(dim=0) / 2, -1) for side in (logits, shuffled))
        expected += float(4 * (log_p.exp() * (log_p - log_q)).sum())
    assert loss == pytest.approx(expected, rel=1e-5)


def test_an_update_is_divided_by_its_sentences_whatever_the_passes(encoder: Path) -> None:
    tokens, _ = random_batch(encoder)
    network: Any = builder.build_network(encoder, TASK, HEAD.labels, seed=0)
    network = network.double().train()
    loss = assert_same_step(TASK, HEAD, network, tokens, ([[0, 1, 2]], [[2], [0], [1]], [[1, 2], [0]]))
    logits = step.forward(network, tokens, 0, "fp64").detach()
    assert loss == pytest.approx(expected_loss(tokens, logits) / 8, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- scores


def preferring(encoded: list[EncodedRow], documents: list[str], expected: list[list[int]]) -> list[Any]:
    """Outputs that rank the sentences `expected` best, in that order."""
    results = []
    for row, document, order in zip(encoded, documents, expected, strict=True):
        output = np.zeros((len(row.ids), 2), dtype=np.float32)
        spans = locate_sentences(row, find_sentence_spans(document))
        for rank, place in enumerate(order):
            output[slice(*spans[place]), 1] = 9 - rank
        results.append(output)
    return results


def scores_of(predicted: list[str], references: list[str]) -> dict[str, float]:
    pairs = list(zip(predicted, references, strict=True))
    rouge = np.mean([summaries.compute_rouge(*map(summaries.tokenize_for_rouge, pair)) for pair in pairs], axis=0)
    bleu = summaries.compute_bleu(
        np.sum([summaries.count_bleu(*map(summaries.tokenize_for_bleu, pair)) for pair in pairs], axis=0)
    )
    return {**dict(zip(summaries.ROUGE_NAMES, rouge.tolist(), strict=True)), "bleu": float(bleu)}


def test_scores_are_those_of_the_summaries_texts_beside_the_first_sentences(encoder: Path) -> None:
    documents, references = [document for document, _ in ROWS], [reference for _, reference in ROWS]
    encoded = [encode(encoder, document, 16, 4) for document in documents]
    tokens = batch(encoded, documents, references)
    outputs = preferring(encoded, documents, [[2, 1, 3, 0], [0], [1, 0, 2]])
    row_results = TASK.row_results(outputs, tokens, HEAD)
    scores = registry.get_metric("summary").all_scores(row_results, tokens.row_targets, HEAD)
    answers = TASK.decode(outputs, documents, encoded, HEAD, {})
    # 9 + 2 of 12 words, then one with 4 does not fit; the last row has 6 in all.
    assert [answer["summary_text"] for answer in answers] == [
        "Nobody came! The invoice shows a fee of 4.50 euros, please.",
        *documents[1:],
    ]
    expected = scores_of([answer["summary_text"] for answer in answers], references)
    lead = scores_of(["The parcel was due on Monday. Nobody came!", *documents[1:]], references)
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value)
        assert scores[f"lead_{name}"] == pytest.approx(lead[name])
        assert value > lead[name] or name == "bleu"
    assert scores["rouge"] == pytest.approx(np.mean([expected[name] for name in summaries.ROUGE_NAMES]))
    oracle = scores_of([answers[0]["summary_text"], documents[1], ""], references)
    assert scores["oracle_rouge1"] == pytest.approx(oracle["rouge1"])
    # Logits of the sentences, and which are the oracle's: one of 9 and one of 8 of the first document, 9 of the second.
    sure, other_values = [8, 9, 9], [6, 7, 8, 9, 7]
    pairs = [(entry > other) + (entry == other) / 2 for entry in sure for other in other_values]
    assert scores["auc"] == pytest.approx(np.mean(pairs))
    tables = registry.METRICS["summary"].build_tables
    assert tables is not None
    # Tenths of 4 sentences: 0, 2, 5, 7; of one: 0; of three: 0, 3, 6.
    positions = tables(row_results, tokens.row_targets, HEAD)["positions"]
    assert positions["picked"] == [2, 0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert positions["oracle"] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    # 6 + 2 + 9 + 4, 3 and 2 + 2 + 2 words; 2 + 9 of the first are picked, and all of the others.
    found_tables = tables(row_results, tokens.row_targets, HEAD)
    assert found_tables["lengths"] == {
        "budget": 12,
        "over_budget": 0,
        "document": {"sentences": pytest.approx(8 / 3), "words": 10.0},
        "picked": {"sentences": 2.0, "words": pytest.approx(20 / 3)},
        "oracle": {"sentences": 1.0, "words": pytest.approx(14 / 3)},
    }
    assert found_tables["compared_with_lead"] == {"better": 1, "same": 2, "worse": 0}
    for name in (*expected, "rouge"):
        assert scores[f"over_lead_{name}"] == pytest.approx(scores[name] - scores[f"lead_{name}"])
    intervals = bootstrap.compute_intervals(
        summaries.make_summary_metric(row_results, tokens.row_targets, HEAD), replicates=200
    )
    assert {"oracle_rouge1", "oracle_rouge2", "oracle_rougeL", "over_lead_rouge", "over_lead_bleu"} <= set(intervals)
    # Two of three documents are the same for both: their difference is known better than either score.
    assert intervals["over_lead_rouge"].low >= -1e-12
    assert intervals["rouge"].high - intervals["rouge"].low > intervals["over_lead_rouge"].high
    report = TASK.explain_rows(row_results, tokens.row_targets, HEAD)
    assert (report.target[0], report.prediction[0]) == (["2", "3"], ["2", "3"])


# ------------------------------------------------------------------------------------------------------- the whole way


def write(path: Path, count: int = 60) -> Path:
    lines = []
    for number in range(count):
        body = [f"{CORPUS[(number + place) % len(CORPUS)].capitalize()}." for place in range(2 + number % 4)]
        expected = CORPUS[(number + 1) % len(CORPUS)]
        lines.append({"text": f"Number {number} is here. {' '.join(body)}", "summary": expected})
    lines += [{"text": "***", "summary": "stars"}, {"text": "No summary.", "summary": ""}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def store_and_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("summary")
    overrides = {"data.path": str(write(folder / "rows.jsonl")), "data.window": 32, "data.stride": 8}
    recipe = config.load_config("summary", {**overrides, "data.max_bad_rows": 0.1}).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder), folder


def test_documents_become_rows_and_rows_scores(store_and_encoder: tuple[Store, Path], tmp_path: Path) -> None:
    import pyarrow.parquet

    store, folder = store_and_encoder
    assert (store.manifest.quarantined, store.manifest.truncated, sum(store.manifest.rows.values())) == (2, 0, 60)
    assert 8 <= store.manifest.facts["max_words"] <= 16
    network: Any = builder.build_network(folder / "encoder", TASK, store.manifest.labels, seed=0)
    strategy = DDPStrategy(network)
    row_results = evaluate.gather_row_results(strategy, TASK, store, "test", pad_id=0, precision="fp32")
    scores = evaluate.score_rows(strategy, TASK, store, "test", row_results)
    assert scores["rows"] == store.num_rows("test")
    assert 0 < scores["lead_rouge1"] < 1
    path = Run(tmp_path).predictions("test")
    predictions.write_predictions(
        path, "test", store, TASK, store.manifest.head, row_results, load_tokenizer(folder / "encoder", 32)
    )
    for row in pyarrow.parquet.read_table(path).to_pylist():
        assert "3" in row["target"]
        assert row["prediction"]
        assert 0 < row["score"] < 1
        assert row["loss"] > 0


def test_summaries_over_http(tmp_path: Path) -> None:
    facts = {"max_words": 12, "stride": 4, "max_windows": 64}
    folder = make_task_artifact(tmp_path / "artifact", "extractive_summary", Head(HEAD.labels, facts), seed=1)
    app = build_app(Predictor.load(folder, threads=1), config.ServeConfig())

    def ask(inputs: object, **parameters: Any) -> Any:
        return call(app, "POST", "/predict", json={"inputs": inputs, "parameters": parameters})

    long = " ".join(f"{line.capitalize()}." for line in CORPUS)
    reply = ask([DOCUMENT, long, "..."])
    assert reply.status_code == 200
    for document, answer in zip([DOCUMENT, long, "..."], reply.json(), strict=True):
        assert set(answer) == {"summary_text", "sentences"}
        ends = [0, *(entry["end"] for entry in answer["sentences"])]
        for entry, before in zip(answer["sentences"], ends, strict=False):
            assert set(entry) == {"text", "score", "start", "end"}
            assert before <= entry["start"] < entry["end"]
            assert document[entry["start"] : entry["end"]] == entry["text"]
            assert 0 < entry["score"] < 1
        assert answer["summary_text"] == " ".join(entry["text"] for entry in answer["sentences"])
        assert len(answer["sentences"]) == 1 or len(answer["summary_text"].split()) <= 12
    [full] = ask(DOCUMENT, max_words=1000).json()
    assert full["summary_text"] == DOCUMENT
    [short] = ask(DOCUMENT, max_words=1).json()
    best = max(full["sentences"], key=lambda entry: float(entry["score"]))
    assert [entry["text"] for entry in short["sentences"]] == [best["text"]]
    for inputs, maximum, field in ((DOCUMENT, 0, "parameters.max_words"), (" \n", 5, "inputs")):
        refused = ask(inputs, max_words=maximum)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
    scored = score.score_file(
        folder, config.load_config("summary", {"data.path": str(write(tmp_path / "a.jsonl"))}).recipe.data
    )
    assert (scored["rows"], scored["bad_rows"]) == (60, 2)
    assert scored["headline"] in scored["intervals"]["scores"]
    with pytest.raises(UserError, check=caused_by("out_of_range")):
        Predictor.load(folder)([DOCUMENT], {"max_words": 0})
