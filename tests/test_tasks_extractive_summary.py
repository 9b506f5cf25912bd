"""Extractive summaries: what is learned, where sentences are scored, exact ROUGE and BLEU, and the HTTP form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import Distill
from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Head, Ragged, Tokens, Window, pack
from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import sentence_spans
from rtrain.data.store.store import Store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import bootstrap, registry, rouge as metrics_rouge, summary_rows
from rtrain.models import builder
from rtrain.parallel.ddp import Replicated
from rtrain.runs import predictions
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.extractive_summary import ExtractiveSummary, places
from rtrain.trainer import evaluate, losses, step
from serve.app import build_app
from tests.causes import caused_by
from tests.serving import call
from tests.test_training_step import make_still_encoder
from tests.tiny import CORPUS, make_encoder, make_store, make_task_artifact

TASK = ExtractiveSummary()
HEAD = Head(("left out", "taken"), {"max_words": 12})
DOCUMENT = "The parcel was due on Monday. Nobody came! The invoice shows a fee of 4.50 euros, please. We want it back."
SUMMARY = "the invoices show a fee; nobody came"
ROWS = [(DOCUMENT, SUMMARY), ("One sentence only.", "only one"), ("First this. Then that. Third that.", "nothing else")]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


def encode(encoder: Path, document: str, window: int = 64, stride: int = 0, most: int = 64) -> Encoded:
    [found] = TASK.encode(load_tokenizer(encoder, window, stride), [document], max_windows=most)
    return found


def sentences(document: str) -> list[str]:
    return [document[start:end] for start, end in sentence_spans(document)]


@pytest.mark.parametrize(
    ("document", "reference", "usable"),
    [(DOCUMENT, SUMMARY, True), ("*** -- ...", SUMMARY, False), (DOCUMENT, "\u2026", False)],
)
def test_rows_that_cannot_be_used_have_a_reason(document: str, reference: str, usable: bool) -> None:
    assert (TASK.flaw(document, None, reference) is None) == usable


def test_the_budget_is_the_mean_length_of_the_references() -> None:
    assert TASK.head({"one two three": 3, "one": 2}).facts == {"max_words": 2}  # 11 words in 5 rows
    assert TASK.head({"one": 1, "a b": 3}).facts == {"max_words": 2}
    with pytest.raises(UserError, check=caused_by("no_rows")):
        TASK.head({})


def test_the_oracle_s_sentences_are_learned_at_their_own_tokens(encoder: Path) -> None:
    row = encode(encoder, DOCUMENT)
    marks = TASK.marks(DOCUMENT, None, SUMMARY, row)
    found = summary_rows.sentences_of(np.array(marks))
    assert found.taken.tolist() == [False, True, True, False]
    assert found.words.tolist() == [6, 2, 9, 4]
    for sentence, first, end in zip(sentences(DOCUMENT), found.first, found.end, strict=True):
        assert DOCUMENT[row.spans[first][0] : row.spans[end - 1][1]] == sentence
    assert (found.first[0], found.end[-1]) == (1, len(row.ids) - 1)  # between [CLS] and [SEP]


WORDS = st.lists(st.sampled_from(["a", "Running", "runs", "it's", "3.5", "b-c", "."]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4), WORDS, st.data())
def test_scores_by_numbers_are_those_of_the_texts(document: list[list[str]], reference: list[str], data: Any) -> None:
    """Any choice of sentences: the libraries' own scores of the joined text."""
    texts, wanted = [" ".join(words) for words in document], " ".join(reference)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(texts) - 1))))
    values = np.array(summary_rows.write(texts, [(0, 1)] * len(texts), [], wanted), dtype=np.float32)
    rouge, bleu = summary_rows.words_of(values)
    expected = scores_of([" ".join(texts[place] for place in chosen)], [wanted])
    assert metrics_rouge.rouge(rouge.of(chosen), rouge.reference) == pytest.approx(
        [expected[name] for name in metrics_rouge.ROUGES]
    )
    counts = np.array(metrics_rouge.bleu_counts(bleu.of(chosen), bleu.reference))
    assert float(metrics_rouge.bleu(counts)) == pytest.approx(expected["bleu"], abs=1e-9)


# ------------------------------------------------------------------------------------------------------------- windows


def by_hand(windows: list[list[tuple[int, int]]]) -> Encoded:
    """Each window is the characters of its tokens, between special ones."""
    spans = [span for window in windows for span in [(0, 0), *window, (0, 0)]]
    lengths = [Window(len(window) + 2, len(window) + 2) for window in windows]
    return Encoded([7] * len(spans), lengths, False, spans)


def test_a_sentence_is_scored_where_most_of_it_is_and_it_has_most_context() -> None:
    # Tokens of one character each; sentences at 0-1, 3-4, 6-7, 9-9 and one that was not read.
    token = {place: (place, place + 1) for place in range(12)}
    first = by_hand([[token[place] for place in (0, 1, 3, 4, 6)], [token[place] for place in (3, 4, 6, 7, 9)]])
    spans = [(0, 2), (3, 5), (6, 8), (9, 10), (11, 12)]
    # 3-4: whole in both; 4 tokens before it is a beginning or an end in the first, 1 in the second.
    # 6-7: whole in the second only.
    assert places(first, spans) == [(1, 3), (3, 5), (10, 12), (12, 13), (0, 0)]
    # A sentence longer than any window: the larger part of it.
    cut = by_hand([[token[place] for place in (0, 1, 2)], [token[place] for place in (2, 3, 4, 5)]])
    assert places(cut, [(0, 6)]) == [(6, 10)]


@pytest.mark.parametrize(("window", "stride"), [(8, 0), (16, 4), (24, 10)])
def test_every_sentence_of_a_long_document_is_scored_once(encoder: Path, window: int, stride: int) -> None:
    document = " ".join(f"{line.capitalize()}." for line in CORPUS * 2)
    row = encode(encoder, document, window, stride)
    spans = sentence_spans(document)
    found = places(row, spans)
    assert len(found) == len(CORPUS) * 2
    windows = np.repeat(np.arange(len(row.windows)), [one.tokens for one in row.windows])
    for (start, end), (first, behind) in zip(spans, found, strict=True):
        assert first < behind
        assert len(set(windows[first:behind])) == 1
        assert all(start <= row.spans[token][0] < row.spans[token][1] <= end for token in range(first, behind))


def test_what_was_not_read_is_neither_learned_nor_taken(encoder: Path) -> None:
    row = encode(encoder, DOCUMENT, window=16, most=1)
    assert row.truncated
    tokens = batch([row], [DOCUMENT], [SUMMARY])
    read = summary_rows.sentences_of(tokens.targets).read
    assert 0 < read.sum() < 4
    assert TASK.counts(tokens, HEAD) == {"loss": int(read.sum())}
    output = np.zeros((len(row.ids), 2), dtype=np.float32)
    [outcome] = TASK.outcomes([output], tokens, Head(HEAD.labels, {"max_words": 100}))
    chances, given = summary_rows.answered(outcome)
    assert given.tolist() == read.tolist()
    assert chances.tolist() == [0.5 if there else -1 for there in read]
    [answer] = TASK.decode([output], [DOCUMENT], [row], HEAD, {"max_words": 100})
    assert [one["text"] for one in answer["sentences"]] == [
        one for one, there in zip(sentences(DOCUMENT), read, strict=True) if there
    ]


# ---------------------------------------------------------------------------------------------------------------- loss


def batch(encoded: list[Encoded], documents: list[str], references: list[str]) -> Tokens:
    rows = zip(documents, references, encoded, strict=True)
    marks = Ragged.of([TASK.marks(document, None, reference, row) for document, reference, row in rows], np.int32)
    targets = TASK.targets(references, marks, HEAD).values
    return Tokens(**{**vars(pack(encoded)), "targets": targets.values, "counts": targets.counts})


def random_batch(encoder: Path) -> tuple[Tokens, torch.Tensor]:
    """The rows, read in windows, and logits of each token."""
    encoded = [encode(encoder, document, 16, 4) for document, _ in ROWS]
    tokens = batch(encoded, [document for document, _ in ROWS], [reference for _, reference in ROWS])
    assert tokens.windows.max() > 1
    return tokens, torch.from_numpy(np.random.default_rng(0).normal(size=(len(tokens.ids), 2)))


def expected_loss(tokens: Tokens, logits: torch.Tensor) -> float:
    total, begin = 0.0, 0
    for values, length in zip(tokens.labelled, tokens.lengths_of_rows.tolist(), strict=True):
        row = summary_rows.sentences_of(values)
        for first, end, taken in zip(row.first, row.end, row.taken, strict=True):
            mean = logits[begin + first : begin + end].mean(dim=0)
            total += float(torch.logsumexp(mean, 0) - mean[int(taken)])
        begin += length
    return total


def test_the_loss_is_that_of_sentences_and_adds_up_row_by_row(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    assert TASK.counts(tokens, HEAD) == {"loss": 4 + 1 + 3}
    assert TASK.loss(logits, tokens, HEAD)["loss"].item() == pytest.approx(expected_loss(tokens, logits))
    parts = torch.split(logits, tokens.lengths_of_rows.tolist())
    alone = [TASK.loss(part, tokens.pick([row]), HEAD)["loss"].item() for row, part in enumerate(parts)]
    assert sum(alone) == pytest.approx(expected_loss(tokens, logits))
    outcomes = TASK.outcomes(TASK.outputs(logits.numpy(), tokens, HEAD), tokens, HEAD)
    of_rows = TASK.describe(outcomes, tokens.labelled, HEAD).loss
    assert (of_rows * [4, 1, 3]).sum() == pytest.approx(expected_loss(tokens, logits))


def test_a_student_learns_its_teacher_s_sentences(encoder: Path) -> None:
    tokens, logits = random_batch(encoder)
    taught = Tokens(**{**vars(tokens), "teacher": logits.numpy().astype(np.float32)})
    assert TASK.imitation(logits, taught, HEAD, 2.0)["loss"].item() == pytest.approx(0, abs=1e-6)
    shuffled = torch.from_numpy(np.random.default_rng(1).normal(size=logits.shape))
    found = TASK.imitation(shuffled, taught, HEAD, 2.0)["loss"].item()
    expected = 0.0
    begins = (np.cumsum(tokens.lengths_of_rows) - tokens.lengths_of_rows).tolist()
    rows = [summary_rows.sentences_of(values) for values in tokens.labelled]
    first = np.concatenate([begin + row.first for begin, row in zip(begins, rows, strict=True)])
    end = np.concatenate([begin + row.end for begin, row in zip(begins, rows, strict=True)])
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        log_p, log_q = (torch.log_softmax(side[a:b].mean(dim=0) / 2, -1) for side in (logits, shuffled))
        expected += float(4 * (log_p.exp() * (log_p - log_q)).sum())
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_update_is_divided_by_its_sentences_whatever_the_passes(encoder: Path) -> None:
    tokens, _ = random_batch(encoder)
    network: Any = builder.build(encoder, TASK, HEAD.labels, seed=0)
    network = network.double().train()
    loss = losses.for_run(TASK, Distill(), HEAD)
    results = []
    for parts in ([[0, 1, 2]], [[2], [0], [1]], [[1, 2], [0]]):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        done = step.run_update(Replicated(network), optimizer, loss, [tokens.pick(part) for part in parts], pad_id=0)
        results.append((done.loss, {name: p.grad.clone() for name, p in network.named_parameters()}))
    for value, gradients in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-12)
        for name, gradient in gradients.items():
            assert (gradient - results[0][1][name]).abs().max() < 1e-12, name
    logits = step.forward(network, tokens, 0, "fp64").detach()
    assert results[0][0] == pytest.approx(expected_loss(tokens, logits) / 8, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- scores


def preferring(encoded: list[Encoded], documents: list[str], wanted: list[list[int]]) -> list[Any]:
    """Outputs by which the sentences `wanted` are the best ones, in that order."""
    found = []
    for row, document, order in zip(encoded, documents, wanted, strict=True):
        output = np.zeros((len(row.ids), 2), dtype=np.float32)
        spans = places(row, sentence_spans(document))
        for rank, place in enumerate(order):
            output[slice(*spans[place]), 1] = 9 - rank
        found.append(output)
    return found


def scores_of(predicted: list[str], references: list[str]) -> dict[str, float]:
    pairs = list(zip(predicted, references, strict=True))
    rouge = np.mean([metrics_rouge.rouge(*map(metrics_rouge.rouge_words, pair)) for pair in pairs], axis=0)
    bleu = metrics_rouge.bleu(
        np.sum([metrics_rouge.bleu_counts(*map(metrics_rouge.bleu_words, pair)) for pair in pairs], axis=0)
    )
    return {**dict(zip(metrics_rouge.ROUGES, rouge.tolist(), strict=True)), "bleu": float(bleu)}


def test_scores_are_those_of_the_summaries_texts_beside_the_first_sentences(encoder: Path) -> None:
    documents, references = [document for document, _ in ROWS], [reference for _, reference in ROWS]
    encoded = [encode(encoder, document, 16, 4) for document in documents]
    tokens = batch(encoded, documents, references)
    outputs = preferring(encoded, documents, [[2, 1, 3, 0], [0], [1, 0, 2]])
    outcomes = TASK.outcomes(outputs, tokens, HEAD)
    found = registry.metric_for("summary").all(outcomes, tokens.labelled, HEAD)
    answers = TASK.decode(outputs, documents, encoded, HEAD, {})
    # 9 + 2 of 12 words, then one with 4 does not fit; the last row has 6 in all.
    assert [answer["summary_text"] for answer in answers] == [
        "Nobody came! The invoice shows a fee of 4.50 euros, please.",
        *documents[1:],
    ]
    expected = scores_of([answer["summary_text"] for answer in answers], references)
    lead = scores_of(["The parcel was due on Monday. Nobody came!", *documents[1:]], references)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value)
        assert found[f"lead_{name}"] == pytest.approx(lead[name])
        assert value > lead[name] or name == "bleu"
    assert found["rouge"] == pytest.approx(np.mean([expected[name] for name in metrics_rouge.ROUGES]))
    oracle = scores_of([answers[0]["summary_text"], documents[1], ""], references)
    assert found["oracle_rouge1"] == pytest.approx(oracle["rouge1"])
    # Logits of the sentences, and which are the oracle's: one of 9 and one of 8 of the first document, 9 of the second.
    sure, others = [8, 9, 9], [6, 7, 8, 9, 7]
    pairs = [(one > other) + (one == other) / 2 for one in sure for other in others]
    assert found["auc"] == pytest.approx(np.mean(pairs))
    tables = registry.METRICS["summary"].tables
    assert tables is not None
    # Tenths of 4 sentences: 0, 2, 5, 7; of one: 0; of three: 0, 3, 6.
    positions = tables(outcomes, tokens.labelled, HEAD)["positions"]
    assert positions["picked"] == [2, 0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert positions["oracle"] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    # 6 + 2 + 9 + 4, 3 and 2 + 2 + 2 words; 2 + 9 of the first are picked, and all of the others.
    found_tables = tables(outcomes, tokens.labelled, HEAD)
    assert found_tables["lengths"] == {
        "budget": 12,
        "over_budget": 0,
        "document": {"sentences": pytest.approx(8 / 3), "words": 10.0},
        "picked": {"sentences": 2.0, "words": pytest.approx(20 / 3)},
        "oracle": {"sentences": 1.0, "words": pytest.approx(14 / 3)},
    }
    assert found_tables["beside_lead"] == {"better": 1, "same": 2, "worse": 0}
    for name in (*expected, "rouge"):
        assert found[f"over_lead_{name}"] == pytest.approx(found[name] - found[f"lead_{name}"])
    intervals = bootstrap.intervals(registry.additive_summary(outcomes, tokens.labelled, HEAD), replicates=200)
    assert {"oracle_rouge1", "oracle_rouge2", "oracle_rougeL", "over_lead_rouge", "over_lead_bleu"} <= set(intervals)
    # Two of three documents are the same for both: their difference is known better than either score.
    assert intervals["over_lead_rouge"].low >= -1e-12
    assert intervals["rouge"].high - intervals["rouge"].low > intervals["over_lead_rouge"].high
    described = TASK.describe(outcomes, tokens.labelled, HEAD)
    assert (described.target[0], described.prediction[0]) == (["2", "3"], ["2", "3"])


# ------------------------------------------------------------------------------------------------------- the whole way


def write(path: Path, count: int = 60) -> Path:
    lines = []
    for number in range(count):
        body = [f"{CORPUS[(number + place) % len(CORPUS)].capitalize()}." for place in range(2 + number % 4)]
        wanted = CORPUS[(number + 1) % len(CORPUS)]
        lines.append({"text": f"Number {number} is here. {' '.join(body)}", "summary": wanted})
    lines += [{"text": "***", "summary": "stars"}, {"text": "No summary.", "summary": ""}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    folder = tmp_path_factory.mktemp("summary")
    overrides = {"data.path": str(write(folder / "rows.jsonl")), "data.window": 32, "data.stride": 8}
    recipe = config.load("summary", {**overrides, "data.max_bad_rows": 0.1}).recipe
    return make_store(recipe, make_encoder(folder / "encoder"), folder), folder


def test_documents_become_rows_and_rows_scores(made: tuple[Store, Path], tmp_path: Path) -> None:
    import pyarrow.parquet

    store, folder = made
    assert (store.manifest.quarantined, store.manifest.truncated, sum(store.manifest.rows.values())) == (2, 0, 60)
    assert 8 <= store.manifest.facts["max_words"] <= 16
    network: Any = builder.build(folder / "encoder", TASK, store.manifest.labels, seed=0)
    kept: dict[str, Ragged] = {}
    scores = evaluate.evaluate(Replicated(network), TASK, store, "test", pad_id=0, precision="fp32", keep=kept)
    assert scores["rows"] == store.rows("test")
    assert 0 < scores["lead_rouge1"] < 1
    path = Run(tmp_path).predictions("test")
    predictions.write(
        path, "test", store, TASK, store.manifest.head, kept["test"], load_tokenizer(folder / "encoder", 32)
    )
    for row in pyarrow.parquet.read_table(path).to_pylist():
        assert "3" in row["target"]
        assert row["prediction"]
        assert 0 < row["score"] < 1
        assert row["loss"] > 0


def test_summaries_over_http(tmp_path: Path) -> None:
    facts = {"max_words": 12, "stride": 4, "max_windows": 64}
    folder = make_task_artifact(tmp_path / "artifact", "extractive_summary", Head(HEAD.labels, facts), seed=1)
    app = build_app(Predictor.load(folder, threads=1), config.Serve())

    def ask(inputs: object, **parameters: Any) -> Any:
        return call(app, "POST", "/predict", json={"inputs": inputs, "parameters": parameters})

    long = " ".join(f"{line.capitalize()}." for line in CORPUS)
    reply = ask([DOCUMENT, long, "..."])
    assert reply.status_code == 200
    for document, answer in zip([DOCUMENT, long, "..."], reply.json(), strict=True):
        assert set(answer) == {"summary_text", "sentences"}
        ends = [0, *(one["end"] for one in answer["sentences"])]
        for one, before in zip(answer["sentences"], ends, strict=False):
            assert set(one) == {"text", "score", "start", "end"}
            assert before <= one["start"] < one["end"]
            assert document[one["start"] : one["end"]] == one["text"]
            assert 0 < one["score"] < 1
        assert answer["summary_text"] == " ".join(one["text"] for one in answer["sentences"])
        assert len(answer["sentences"]) == 1 or len(answer["summary_text"].split()) <= 12
    [whole] = ask(DOCUMENT, max_words=1000).json()
    assert whole["summary_text"] == DOCUMENT
    [short] = ask(DOCUMENT, max_words=1).json()
    best = max(whole["sentences"], key=lambda one: float(one["score"]))
    assert [one["text"] for one in short["sentences"]] == [best["text"]]
    for inputs, most, field in ((DOCUMENT, 0, "parameters.max_words"), (" \n", 5, "inputs")):
        refused = ask(inputs, max_words=most)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
    scored = score.run(folder, config.load("summary", {"data.path": str(write(tmp_path / "a.jsonl"))}).recipe.data)
    assert (scored["rows"], scored["bad_rows"]) == (60, 2)
    assert scored["headline"] in scored["intervals"]["scores"]
    with pytest.raises(UserError, check=caused_by("out_of_range")):
        Predictor.load(folder)([DOCUMENT], {"max_words": 0})
