"""The baselines that a fine-tuned encoder must beat: TF-IDF with a linear model (scikit-learn), and a list of tags."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CHOICES_OF_C = (0.1, 1.0, 10.0)
CHOICES_OF_ALPHA = (0.1, 1.0, 10.0)

Rows = tuple[Sequence[str], Sequence[str]]
"""(texts, labels)."""
Scored = tuple[Sequence[str], Sequence[float]]
"""(texts, true values)."""
Tagged = tuple[Sequence[str], Sequence[str]]
"""(tokens, tags) of one sentence."""


def accuracy(train: Rows, valid: Rows, test: Rows) -> float:
    """Accuracy on `test`; C is the one of `CHOICES_OF_C` that is best on `valid` (of equals the smallest)."""
    from sklearn.svm import LinearSVC

    features = _features()
    matrix = features.fit_transform(train[0])
    held_out = features.transform(valid[0])
    models = [LinearSVC(C=c, random_state=0).fit(matrix, train[1]) for c in CHOICES_OF_C]
    best = max(models, key=lambda model: model.score(held_out, valid[1]))
    return float(best.score(features.transform(test[0]), test[1]))


def numbers(train: Scored, valid: Scored, texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """Ridge regression's value for each of `texts`; alpha is the one of `CHOICES_OF_ALPHA` that is best on `valid`.

    Best is the smallest squared error, of equals the largest alpha. It takes about 2 ms per 1,000 characters.
    """
    from sklearn.linear_model import Ridge

    features = _features()
    matrix = features.fit_transform(train[0])
    held_out, wanted = features.transform(valid[0]), np.asarray(valid[1], dtype=np.float64)
    # The conjugate-gradient solver draws nothing at random and needs no dense matrix.
    models = [
        Ridge(alpha=alpha, solver="sparse_cg", tol=1e-6).fit(matrix, train[1]) for alpha in reversed(CHOICES_OF_ALPHA)
    ]
    best = min(models, key=lambda model: float(((model.predict(held_out) - wanted) ** 2).sum()))
    return np.asarray(best.predict(features.transform(texts)), dtype=np.float64)


def tags(train: Iterable[Tagged], sentences: Iterable[Sequence[str]]) -> list[list[str]]:
    """The tag that each token has most often in `train` (of equals the first by name); O where it does not occur."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for tokens, own in train:
        for token, tag in zip(tokens, own, strict=True):
            counts[token][tag] += 1
    most = {token: min(found, key=lambda tag: (-found[tag], tag)) for token, found in counts.items()}
    return [[most.get(token, "O") for token in tokens] for tokens in sentences]


def _features() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    return make_union(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
    )
