"""What is told of a run's texts before they are trained on: cut, unknown to the vocabulary, labelled twice."""

from pathlib import Path

import pytest
import tokenizers

from rtrain.report import data_stats, event_messages
from tests.conftest import labelled_rows
from tests.support.tiny import make_encoder, make_store
from tests.unit.data.test_builder import recipe_of


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows), encoding="utf-8")
    return path


def test_rows_with_one_text_and_two_labels_are_counted(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(90)
    path = write(tmp_path / "rows.csv", rows)
    assert data_stats.find_conflicts(make_store(recipe_of(path), encoder, tmp_path), "classes") is None
    repeated = [(f"{text.upper()} !", "login" if label != "login" else "parcel") for text, label in rows]
    store = make_store(recipe_of(write(tmp_path / "twice.csv", [*rows, *rows, *repeated])), encoder, tmp_path)
    result = data_stats.find_conflicts(store, "classes")
    assert result is not None
    trained_on = {key: set[float]() for key in store.text_keys("train").tolist()}
    for key, values in zip(store.text_keys("train").tolist(), store.targets("train"), strict=True):
        trained_on[key].add(float(values[0]))
    conflicting = [key for key, labels in trained_on.items() if len(labels) > 1]
    assert (result["texts"], len(conflicting)) == (len(conflicting), result["texts"])
    assert result["rows"] == sum(store.text_keys("train").tolist().count(key) for key in conflicting)
    assert "twice.csv:" in (event_messages.format_event({"kind": "conflicts", **result}) or "")


def test_cut_rows_unknown_tokens_and_words_in_pieces_are_shares(tmp_path: Path, encoder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json"))
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3)
    texts = [" ".join(words[(first + step) % len(words)] for step in range(0, 60, 10)) for first in range(90)]
    rows = [
        (f"{text} {number % 10}", label)
        for number, (text, (_, label)) in enumerate(zip(texts, labelled_rows(90), strict=True))
    ]
    plain = make_store(recipe_of(write(tmp_path / "a.csv", rows)), encoder, tmp_path)
    result = data_stats.describe_texts(plain, tokenizer)
    assert result == {"rows": 90, "truncated_rows": 0, "unknown_token_share": 0.0, "split_word_share": 0.0}
    assert event_messages.format_event({"kind": "texts", **result, "limit": "data.max_tokens=64"}) is None
    strange = [(f"zurueckgeschickt abgeschickt {text} \U0001f600", label) for text, label in rows]
    long = [(f"{text} " * 30, label) for text, label in strange[:20]]
    store = make_store(recipe_of(write(tmp_path / "b.csv", strange[20:] + long)), encoder, tmp_path)
    result = data_stats.describe_texts(store, tokenizer)
    assert (result["rows"], result["truncated_rows"], result["split_word_share"]) == (90, store.manifest.truncated, 1.0)
    assert result["truncated_rows"] >= 20
    assert 0 < result["unknown_token_share"] < 0.5
    assert (event_messages.format_event({"kind": "texts", **result, "limit": "data.max_tokens=64"}) or "").count(
        ";"
    ) == 2
