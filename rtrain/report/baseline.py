"""The baseline that a fine-tuned encoder must beat: word and character TF-IDF with a linear SVM, by scikit-learn."""

from collections.abc import Sequence

CHOICES_OF_C = (0.1, 1.0, 10.0)

Rows = tuple[Sequence[str], Sequence[str]]
"""(texts, labels)."""


def accuracy(train: Rows, valid: Rows, test: Rows) -> float:
    """Accuracy on `test`; C is the one of `CHOICES_OF_C` that is best on `valid` (of equals the smallest)."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union
    from sklearn.svm import LinearSVC

    features = make_union(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
    )
    matrix = features.fit_transform(train[0])
    held_out = features.transform(valid[0])
    models = [LinearSVC(C=c, random_state=0).fit(matrix, train[1]) for c in CHOICES_OF_C]
    best = max(models, key=lambda model: model.score(held_out, valid[1]))
    return float(best.score(features.transform(test[0]), test[1]))
