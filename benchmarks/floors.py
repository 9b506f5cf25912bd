"""The scores of a linear model, which an encoder must beat: `python -m benchmarks.floors DATA`.

The model is TF-IDF of two to four characters with logarithmic counts, and a linear support vector machine, both with
scikit-learn's defaults. In `umsab` and `nusax_senti` each language has its own model, as the authors of the sets report
it. In `xsid` the model trained on English answers all languages. The scores of `ielts_essays` come from a ridge
regression on words and pairs of words, in five folds by distinct essay.
"""

import argparse
import csv
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import sets

SETS = {"umsab": (sets.umsab, "label", True), "nusax_senti": (sets.nusax, "label", True)}
SETS |= {"xsid": (sets.xsid, "intent", False)}


def floors(rows: list[dict[str, Any]], label: str, is_per_language: bool) -> dict[str, tuple[float, float]]:
    """(accuracy, macro F1) on the test rows, by language."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import LinearSVC

    parts: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        parts[row["lang"] if is_per_language or row["split"] == "test" else "all", row["split"]].append(row)
    models: dict[str, Any] = {}
    for (language, split), texts in parts.items():
        if split == "train":
            features = TfidfVectorizer(analyzer="char", ngram_range=(2, 4), sublinear_tf=True)
            model = make_pipeline(features, LinearSVC(random_state=0))
            models[language] = model.fit([row["text"] for row in texts], [row[label] for row in texts])
    scores = {}
    for (language, split), texts in sorted(parts.items()):
        if split == "test":
            predicted = models[language if is_per_language else "all"].predict([row["text"] for row in texts])
            true = [row[label] for row in texts]
            scores[language] = (accuracy_score(true, predicted), f1_score(true, predicted, average="macro"))
    return scores


def essays(rows: list[dict[str, str]]) -> dict[str, float]:
    """Predicted scores of the essays that have a score; each is predicted from the four folds without it or its
    equals."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    scored = [row for row in rows if row["Overall"].strip()]
    texts = [f"{row['Question']} {row['Essay']}" for row in scored]
    true = np.array([float(row["Overall"]) for row in scored])
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2), Ridge())
    groups = np.unique([row["Essay"] for row in scored], return_inverse=True)[1]
    predicted = cross_val_predict(model, texts, true, groups=groups, cv=GroupKFold(5))
    measures = {"rmse": root_mean_squared_error, "mae": mean_absolute_error, "r2": r2_score}
    return {name: float(measure(true, predicted)) for name, measure in measures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    options = parser.parse_args()
    for name, (prepare, label, is_per_language) in SETS.items():
        with tempfile.TemporaryDirectory() as work:
            prepare(options.data / name, Path(work))
            lines = (Path(work) / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        scores = floors([json.loads(line) for line in lines], label, is_per_language)
        mean = [statistics.fmean(values) for values in zip(*scores.values(), strict=True)]
        print(f"\n{name:>16}  accuracy  macro F1")
        for language, values in {**scores, "mean": mean}.items():
            print(f"{language:>16}  {values[0]:8.4f}  {values[1]:8.4f}")
    with (options.data / "ielts_essays" / "ielts_writing_dataset.csv").open(encoding="utf-8", newline="") as file:
        essay_scores = essays(list(csv.DictReader(file)))
    print("\n    ielts_essays  " + "  ".join(f"{name} {value:.4f}" for name, value in essay_scores.items()))


if __name__ == "__main__":
    main()
