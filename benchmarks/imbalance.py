"""Rare labels, against a balanced linear SVM and without weights: `python -m benchmarks.imbalance DATA [--part NAME]`.

`clauses`: sentences of CUAD's contracts with the categories of the clauses that they overlap; three in five have none.
The training contracts and the test contracts are different ones. The floor is TF-IDF of words and pairs of words with
one balanced linear support vector machine for each category, both with scikit-learn's defaults.

`rare`: banking77's messages as a yes or no, where the intent that matters is 2 % of 3,000 training rows; trained with
`train.class_weights` none and balanced.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks import sets
from rtrain.core.text_segmentation import find_sentence_spans

SENTENCES = {"train": 6400, "test": 1600}
NO_CATEGORY_SHARE = 0.6
MIN_CHARACTERS = 30
MIN_LABEL_SENTENCES = 20
"""Categories with fewer training sentences are left out."""
RARE_INTENT, RARE_ROWS, RARE_SHARE = "compromised_card", 3000, 0.02
Row = dict[str, Any]


def clauses(source: Path, seed: int = 0) -> list[Row]:
    """Sentences of CUAD: `text`, `labels` and `split`."""
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for clause in sets.parquet(source / "clauses.parquet"):
        if clause["start"] >= 0 and clause["category"] not in sets.CLAUSES_LEFT_OUT:
            spans[clause["contract"]].append((clause["start"], clause["end"], clause["category"]))
    sentences: dict[tuple[str, bool], dict[str, Row]] = defaultdict(dict)
    for contract in sets.parquet(source / "contracts.parquet"):
        for start, end in find_sentence_spans(contract["text"]):
            text = " ".join(contract["text"][start:end].split())
            if len(text) < MIN_CHARACTERS:
                continue
            # A clause labels a sentence if they share half of the shorter one.
            labels = {
                name
                for first, last, name in spans[contract["contract"]]
                if 2 * (min(end, last) - max(start, first)) >= min(end - start, last - first)
            }
            row = {"text": text, "labels": sorted(labels), "split": contract["split"]}
            sentences[contract["split"], bool(labels)].setdefault(text, row)
    draw, rows = random.Random(seed), list[Row]()
    for split, size in SENTENCES.items():
        without = round(NO_CATEGORY_SHARE * size)
        for has_category, number in ((False, without), (True, size - without)):
            available = sorted(sentences[split, has_category].values(), key=lambda row: str(row["text"]))
            rows += draw.sample(available, min(len(available), number))
    counts = Counter(label for row in rows if row["split"] == "train" for label in row["labels"])
    for row in rows:
        row["labels"] = [label for label in row["labels"] if counts[label] >= MIN_LABEL_SENTENCES]
    return rows


def rare(source: Path, seed: int = 0) -> list[Row]:
    """banking77 as a yes or no: `text`, `label` (`urgent` for `RARE_INTENT`, else `usual`) and `split`."""
    draw, rows = random.Random(seed), list[Row]()
    for split in SENTENCES:
        with (source / f"{split}.csv").open(encoding="utf-8", newline="") as file:
            messages = list(csv.DictReader(file))
        labeled = [
            {"text": row["text"], "label": "urgent" if row["category"] == RARE_INTENT else "usual", "split": split}
            for row in messages
        ]
        if split == "train":
            parts = {name: [row for row in labeled if row["label"] == name] for name in ("urgent", "usual")}
            urgent = round(RARE_SHARE * RARE_ROWS)
            labeled = draw.sample(parts["urgent"], urgent) + draw.sample(parts["usual"], RARE_ROWS - urgent)
        rows += labeled
    return rows


def score_svm(rows: list[Row]) -> dict[str, float]:
    """Micro and macro F1 of the floor on the test rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics import f1_score
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MultiLabelBinarizer
    from sklearn.svm import LinearSVC

    texts = {split: [row["text"] for row in rows if row["split"] == split] for split in SENTENCES}
    binarizer = MultiLabelBinarizer().fit([row["labels"] for row in rows if row["split"] == "train"])
    targets = {
        split: binarizer.transform([row["labels"] for row in rows if row["split"] == split]) for split in SENTENCES
    }
    svm = OneVsRestClassifier(LinearSVC(class_weight="balanced", random_state=0))
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), svm)
    predicted = model.fit(texts["train"], targets["train"]).predict(texts["test"])
    return {name: float(f1_score(targets["test"], predicted, average=name)) for name in ("micro", "macro")}


def train(rows: list[Row], work: Path, *settings: str) -> dict[str, Any]:
    """scores-test.json of `rtrain train intent` with these settings."""
    arguments = ["--out", str(work / f"run-{len(list(work.glob('run-*')))}"), "--json"]
    for split in SENTENCES:
        path = sets.write(work / f"{split}.jsonl", [row for row in rows if row["split"] == split])
        arguments += ["--data" if split == "train" else "--test", str(path)]
    for setting in settings:
        arguments += ["--set", setting]
    command = [sys.executable, "-m", "rtrain", "train", "intent", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads((Path(arguments[1]) / "scores-test.json").read_text(encoding="utf-8"))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imbalance", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--part", choices=("clauses", "rare"), action="append", help="default: both")
    options = parser.parse_args()
    parts = options.part or ["clauses", "rare"]
    with tempfile.TemporaryDirectory() as folder:
        if "clauses" in parts:
            rows = clauses(options.data / "cuad")
            print("balanced SVM", score_svm(rows), flush=True)
            scores = train(rows, Path(folder), "task=multi_label", "data.label=labels")["scores"]
            print("rtrain", {name: scores[f"{name}_f1"] for name in ("micro", "macro")}, flush=True)
        if "rare" in parts:
            rows = rare(options.data / "banking77")
            for weights in ("none", "balanced"):
                per_class = train(rows, Path(folder), f"train.class_weights={weights}")["tables"]["per_class"]
                [urgent] = [entry for entry in per_class if entry["class"] == "urgent"]
                print(f"class_weights={weights}", {name: urgent[name] for name in ("recall", "precision")}, flush=True)


if __name__ == "__main__":
    main()
