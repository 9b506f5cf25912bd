"""The demo data set: the same bytes everywhere, splits that share no template, and a difficulty that stays put."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from rtrain.data import synthetic
from rtrain.data.synthetic import Message
from tests.conftest import STARTUP
from tests.support.root import ROOT

# The bytes for seed 0. They change only when the grammar does: then measure the difficulty again before pinning anew.
SHA256 = {
    "train.csv": "1a85a8c089069702bc9fccc48ce1e93a59d9f2dac5134050d5af4cb9afd12d23",
    "test.csv": "21ccc85cb35dcab9e00b1d8e888ea6c3cb9f1f4a804552acf732e1d514db58a9",
}


@lru_cache(maxsize=1)
def splits() -> tuple[list[Message], list[Message]]:
    return synthetic.generate(0)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def column(messages: Sequence[Message], name: str) -> list[str]:
    return [getattr(message, name) for message in messages]


def test_bytes_are_pinned(tmp_path: Path) -> None:
    paths = synthetic.write_csv_files(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["train.csv", "test.csv"]
    assert {path.name: digest(path) for path in paths} == SHA256


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_bytes_do_not_depend_on_the_hash_seed(tmp_path: Path, hash_seed: str) -> None:
    code = (
        "import sys, pathlib; from rtrain.data import synthetic; synthetic.write_csv_files(pathlib.Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{STARTUP}"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, timeout=60)
    assert {name: digest(tmp_path / name) for name in SHA256} == SHA256


def test_difficulty_for_a_linear_model() -> None:
    """Words alone must neither solve the intents, nor fail at them; the sentiment is meant to be easy."""
    text = pytest.importorskip("sklearn.feature_extraction.text")
    union = pytest.importorskip("sklearn.pipeline").FeatureUnion
    svc = pytest.importorskip("sklearn.svm").LinearSVC
    train, test = splits()
    features = union(
        [
            ("words", text.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)),
            ("letters", text.TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)),
        ]
    )
    train_features, test_features = (
        features.fit_transform(column(train, "text")),
        features.transform(column(test, "text")),
    )
    for target, low, high in (("intent", 0.70, 0.90), ("sentiment", 0.85, 1.0)):
        model = svc(C=1.0).fit(train_features, column(train, target))
        assert low <= model.score(test_features, column(test, target)) <= high
