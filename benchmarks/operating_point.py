"""The recall that an operating point promises, on new rows: `python -m benchmarks.operating_point DATA`.

3,000 rows of banking77 (DATA/banking77), 60 of them (2 %) with the label P1: messages about fraud, from five intents.
An operating point asks for a recall of 0.8 on 30 % of these rows; the recall is measured on the 3,080 test rows, 200 of
them P1. A seed draws other rows. The classifier is a logistic regression on TF-IDF of two to four characters, since the
threshold depends on scores alone; with `--train` it is a run of the recipe `intent`, and a finished run is only read.
"""

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

FRAUD = (
    *("compromised_card", "lost_or_stolen_card", "cash_withdrawal_not_recognised", "card_payment_not_recognised"),
    "direct_debit_payment_not_recognised",
)
ROWS, RARE_ROWS, RECALL, VALID_SHARE = 3000, 60, 0.8, 0.3
Rows = list[tuple[str, str]]


def read_rows(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["text"], "P1" if row["category"] in FRAUD else "other") for row in csv.DictReader(file)]


def draw_rows(rows: Rows, seed: int) -> list[int]:
    """Positions of 60 rare rows and 2,940 others, shuffled."""
    generator = random.Random(seed)
    by_label = [[place for place, row in enumerate(rows) if (row[1] == "P1") is is_rare] for is_rare in (True, False)]
    places = generator.sample(by_label[0], RARE_ROWS) + generator.sample(by_label[1], ROWS - RARE_ROWS)
    generator.shuffle(places)
    return places


def fit(data: Path, seed: int) -> dict[str, Any]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    from rtrain.core.ragged import Head, RaggedArray
    from rtrain.metrics import operating_points

    rows, test_rows = (read_rows(data / "banking77" / f"{name}.csv") for name in ("train", "test"))
    drawn_rows, num_valid = [rows[place] for place in draw_rows(rows, seed)], round(VALID_SHARE * ROWS)
    valid_rows, train_rows = drawn_rows[:num_valid], drawn_rows[num_valid:]
    features = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True)
    model = make_pipeline(features, LogisticRegression(C=10, max_iter=1000))
    model.fit([text for text, _ in train_rows], [label == "P1" for _, label in train_rows])

    def answer(split_rows: Rows) -> tuple[RaggedArray, RaggedArray]:
        logits = model.decision_function([text for text, _ in split_rows])
        targets = np.array([label != "P1" for _, label in split_rows], dtype=np.float32)
        columns = np.stack([logits, np.zeros_like(logits)], axis=1)
        return RaggedArray.from_matrix(columns), RaggedArray.from_matrix(targets)

    valid, test = answer(valid_rows), answer(test_rows)
    plain, request = Head(("P1", "other")), [{"label": "P1", "recall": RECALL}]
    head = Head(plain.labels, operating_points.choose_operating_points("classes", *valid, plain, request))
    valid_point, test_point = (
        operating_points.measure_operating_points("classes", *split, head)[0] for split in (valid, test)
    )
    rows_of_label = operating_points.select_label("classes", *test, plain, "P1")
    return {**describe(valid_point, test_point), "recall_by_highest_score": round(rows_of_label.score("recall"), 4)}


def train(data: Path, work: Path, seed: int) -> dict[str, Any]:
    """Train a run, unless it is finished."""
    import pyarrow.parquet

    folder = work / f"seed-{seed}"
    if not (folder / "summary.json").is_file():
        work.mkdir(parents=True, exist_ok=True)
        rows = read_rows(data / "banking77" / "train.csv")
        for name, split_rows in (
            (f"train-{seed}.csv", [rows[place] for place in draw_rows(rows, seed)]),
            ("test.csv", read_rows(data / "banking77" / "test.csv")),
        ):
            with (work / name).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("text", "label"), *split_rows])
        settings = (
            *(f"data.test={work / 'test.csv'}", f"data.valid_share={VALID_SHARE}", f"train.seed={seed}"),
            *("train.epochs=2", f"metrics.operating_point={{label: P1, recall: {RECALL}}}"),
        )
        command = [sys.executable, "-m", "rtrain", "train", "intent", "--data", str(work / f"train-{seed}.csv")]
        command += ["--out", str(folder), *(part for text in settings for part in ("--set", text))]
        subprocess.run(command, check=True)
    points = json.loads((folder / "summary.json").read_text())["operating_points"]
    answers = pyarrow.parquet.read_table(folder / "predictions-test.parquet").to_pylist()
    rare = [row for row in answers if row["target"] == "P1"]
    # Of two labels, the one with the highest score has 0.5 or more.
    by_highest_score = sum((row["prediction"] == "P1") == (row["score"] >= 0.5) for row in rare) / len(rare)
    return {**describe(points["valid"][0], points["test"][0]), "recall_by_highest_score": round(by_highest_score, 4)}


def describe(valid: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    figures = {name: round(test[name], 4) for name in ("threshold", "recall", "precision")}
    return {**figures, "valid_rows": valid["rows"], "valid_recall": round(valid["recall"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, help="folder of the runs of --train")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    if options.train and options.work is None:
        parser.error("--train needs --work FOLDER")
    results = {
        seed: train(options.data, options.work, seed) if options.train else fit(options.data, seed)
        for seed in options.seeds
    }
    names = ("recall", "precision", "recall_by_highest_score", "valid_recall")
    means = {name: round(statistics.mean(result[name] for result in results.values()), 4) for name in names}
    print(json.dumps({"requested_recall": RECALL, "seeds": results, "mean": means}, indent=1))


if __name__ == "__main__":
    main()
