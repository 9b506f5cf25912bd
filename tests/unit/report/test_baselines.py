"""The baselines: each learns what it can learn from a few rows, and chooses on the validation rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.core.run_folder import Run
from rtrain.report import baselines
from tests.conftest import labelled_rows, write_rows
from tests.support.reports import make_answered, make_run, read


def test_accuracy_on_rows_whose_label_is_in_their_words() -> None:
    rows = labelled_rows(60)
    texts, labels = [row[0] for row in rows], [row[1] for row in rows]
    train, valid = (texts[:40], labels[:40]), (texts[40:50], labels[40:50])
    assert baselines.measure_accuracy(train, valid, (texts[50:], labels[50:])) == 1.0
    shifted = (texts[50:], [labels[49], *labels[50:-1]])  # neighbours have different labels: each is wrong now
    assert baselines.measure_accuracy(train, valid, shifted) == 0.0


def essays(count: int, seed: int) -> tuple[list[str], list[float]]:
    """Texts of 30 words; the value is the share of good ones, times ten."""
    generator = np.random.default_rng(seed)
    config = generator.random((count, 30)) < generator.random((count, 1))
    return [" ".join(np.where(row, "lucid", "muddled")) for row in config], [10 * float(row.mean()) for row in config]


def test_numbers_follow_the_words() -> None:
    texts, values = essays(40, 2)
    result = baselines.fit_numbers(essays(200, 0), essays(40, 1))(texts)
    assert np.corrcoef(result, values)[0, 1] > 0.95
    assert result.tolist() == baselines.fit_numbers(essays(200, 0), essays(40, 1))(texts).tolist()


def test_numbers_take_the_alpha_that_is_best_on_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, _ = essays(20, 2)
    train = essays(100, 0)
    noise = np.random.default_rng(3).normal(0, 8, 100)
    noisy = (train[0], [value + float(error) for value, error in zip(train[1], noise, strict=True)])
    config = baselines.fit_numbers(noisy, essays(40, 1))(texts)
    entry = {}
    for alpha in baselines.ALPHA_VALUES:
        monkeypatch.setattr(baselines, "ALPHA_VALUES", (alpha,))
        valid = essays(40, 1)
        entry[alpha] = float(((baselines.fit_numbers(noisy, valid)(valid[0]) - valid[1]) ** 2).sum())
        if entry[alpha] == min(entry.values()):
            best = baselines.fit_numbers(noisy, valid)(texts)
    assert len(set(entry.values())) == 3
    assert config.tolist() == best.tolist()


def test_tags_are_the_most_frequent_of_each_token() -> None:
    train = [
        (["Paris", "is", "Paris"], ["B-LOC", "O", "B-LOC"]),
        (["Paris", "Hilton"], ["B-PER", "I-PER"]),
        (["May"], ["O"]),
        (["May"], ["B-PER"]),
    ]
    # May is O as often as B-PER: the first by name. Rome was never seen.
    assert baselines.predict_tags(train, [["Paris", "Hilton", "is"], ["May", "Rome"], []]) == [
        ["B-LOC", "I-PER", "O"],
        ["B-PER", "O"],
        [],
    ]


# ------------------------------------------------------------------------------------------------- of a run's own rows


def measured(run: Path) -> dict[str, dict[str, float]]:
    """Baseline -> split -> headline."""
    assert baselines.ensure_baselines(Run(run)) == run / baselines.NAME
    result = baselines.read_baselines(Run(run))
    assert result is not None
    return {item["name"]: item["scores"] for item in result["baselines"]}


def test_labels_of_a_run_have_two_baselines(tmp_path: Path) -> None:
    """A text's label is in its words: TF-IDF finds all, the most frequent label its own share."""
    run = make_answered(tmp_path, "classification")
    result = measured(run)
    assert result[baselines.TFIDF] == {"valid": 1.0, "test": 1.0}
    context = read(run)
    codes = context.class_codes()
    for split, share in result[baselines.CONSTANT_ANSWER].items():
        limit = int(np.bincount(codes).argmax())
        assert share == pytest.approx(float((context.store.targets(split).values == limit).mean()))


def test_numbers_of_a_run_are_compared_with_their_mean(tmp_path: Path) -> None:
    run = make_answered(tmp_path, "regression")
    result, context = measured(run), read(run)
    true = context.store.targets("test").values.astype(np.float64)
    spread = float(np.sqrt(((true - context.store.targets("train").values.mean()) ** 2).mean()))
    assert result[baselines.CONSTANT_ANSWER]["test"] == pytest.approx(-spread)
    assert result[baselines.TFIDF]["test"] > -spread


def test_tagged_words_of_a_run_are_known_by_their_tokens(tmp_path: Path) -> None:
    assert measured(make_answered(tmp_path, "token_tags")) == {baselines.TAGS: {"valid": 1.0, "test": 1.0}}


def test_several_labels_have_two_baselines(tmp_path: Path) -> None:
    """A text's labels are in its words. The one answer is the set of labels with the best micro F1 for all rows."""
    run = make_answered(tmp_path, "multi_label")
    result = measured(run)
    assert list(result) == [baselines.CONSTANT_ANSWER, baselines.TFIDF]
    store = read(run).store
    train, test = (store.targets(split).to_matrix(len(store.manifest.labels)) > 0 for split in ("train", "test"))
    order = np.argsort(-train.sum(axis=0), kind="stable")
    best = max(range(1, len(order) + 1), key=lambda n: 2 * train[:, order[:n]].sum() / (n * len(train) + train.sum()))
    arguments = np.isin(np.arange(len(order)), order[:best])
    expected = 2 * test[:, arguments].sum() / (best * len(test) + test.sum())
    assert result[baselines.CONSTANT_ANSWER]["test"] == pytest.approx(expected)
    assert result[baselines.TFIDF]["test"] > result[baselines.CONSTANT_ANSWER]["test"]


def test_each_head_has_a_linear_model(tmp_path: Path) -> None:
    result = measured(make_answered(tmp_path, "multi_head"))
    assert list(result) == [baselines.CONSTANT_ANSWER, baselines.TFIDF]
    assert result[baselines.TFIDF]["test"] > result[baselines.CONSTANT_ANSWER]["test"]


def test_questions_are_answered_by_the_words_around(tmp_path: Path) -> None:
    """Each answer stands between the two words of its question. Scores are the task's own: of no answer at all, the
    share of the questions that have none."""
    words, random = ("parcel", "invoice", "refund", "login", "card", "fee"), np.random.default_rng(0)
    rows = []
    for number in range(120):
        first, other, left = (words[place] for place in random.permutation(6)[:3])
        filler = " ".join(["and"] * int(random.integers(3, 9)))
        context = f"{filler} {first} monday {other} {filler} {left}"
        answers = [{"text": "monday", "start": context.index("monday")}] if number % 5 else []
        context = context if number % 5 else context.replace(f"{first} monday {other}", "and and and")
        rows.append({"question": f"{first} {other}", "context": context, "answers": answers})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns: dict[str, Any] = {"data.path": str(path), "data.format": None, "data.group_column": None}
    run = make_answered(tmp_path, "span_qa", **columns)
    result, store = measured(run), read(run).store
    places = store.targets("test")
    empty = float(np.mean([not row.reshape(-1, 2)[:, 1].any() for row in places]))
    assert list(result) == [baselines.NEARBY_WORDS, baselines.NO_ANSWER]
    assert result[baselines.NO_ANSWER]["test"] == pytest.approx(empty)
    assert result[baselines.NEARBY_WORDS]["test"] > 0.9


def test_they_are_measured_once_and_of_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_ROWS", 20)
    run = make_answered(tmp_path, "classification")
    measured(run)
    result = baselines.read_baselines(Run(run))
    assert result is not None
    assert result["training_rows"] == 20
    monkeypatch.setattr(baselines, "MAX_ROWS", 10)
    assert baselines.ensure_baselines(Run(run)) is not None
    assert baselines.read_baselines(Run(run)) == result


def test_runs_on_the_same_rows_share_them(tmp_path: Path) -> None:
    run = Run(make_answered(tmp_path, "classification"))
    measured(run.folder)
    [shared] = tmp_path.rglob(f".*.{baselines.NAME}")
    shared.write_text(json.dumps({**json.loads(shared.read_text()), "training_rows": -1}))  # not measured again
    run.baselines.unlink()
    measured(run.folder)
    assert json.loads(run.baselines.read_text())["training_rows"] == -1


def test_there_are_none_of_other_answers_or_before_the_end(tmp_path: Path) -> None:
    assert baselines.ensure_baselines(Run(make_answered(tmp_path / "tokens", "masked_lm"))) is None
    assert baselines.ensure_baselines(Run(make_run(tmp_path / "begun", trained=False))) is None


# --------------------------------------------------------------------------------------------- texts in other scripts


@pytest.mark.parametrize("words", [("我 的 卡", "在 哪 里"), ("😀 👍", "👎"), ("a b", "c d")])
def test_texts_without_a_word_of_two_letters_are_told_apart(words: tuple[str, str]) -> None:
    """BERT's kin spell Chinese with blanks between the characters, and scikit-learn's words have two letters."""
    texts = [f"{word} {'x y z'[:number]}" for number in range(4) for word in words]
    labels, values = [0, 1] * 4, [0.0, 1.0] * 4
    assert baselines.fit_labels((texts, labels), (texts, labels))(texts).tolist() == labels
    result = baselines.fit_numbers((texts, values), (texts, values))(texts)
    assert max(result[::2]) < 0.5 < min(result[1::2])


def test_texts_of_unknown_pieces_alone_leave_the_one_answer(tmp_path: Path) -> None:
    """The tiny encoder knows no Chinese character, so that TF-IDF has nothing to learn from."""
    rows = [(f"{'卡丢' if number % 2 else '退款'}{chr(0x4E00 + number)}", "ab"[number % 2]) for number in range(120)]
    path = write_rows(tmp_path / "chinese.csv", rows)
    columns: dict[str, Any] = {"data.path": str(path), "data.text": "text", "data.label": "label", "data.slices": []}
    result = measured(make_answered(tmp_path, "classification", **columns))
    assert list(result) == [baselines.CONSTANT_ANSWER]
