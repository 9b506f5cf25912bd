"""Published data sets, as their authors publish them -> files that a recipe reads. Nothing here is trained or scored.

Each function takes the folder of a set and an empty folder to write into, and returns arguments of `rtrain train`.
"""

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

Arguments = list[str]
Row = Mapping[str, Any]

CLAUSES_LEFT_OUT = ("Document Name", "Parties", "Agreement Date", "Effective Date")
"""Categories of CUAD whose text is a title, a name or a date. The published floor leaves them out."""
ASAP_RANGES = {1: (2, 12), 2: (1, 6), 3: (0, 3), 4: (0, 3), 5: (0, 4), 6: (0, 4), 7: (0, 30), 8: (0, 60)}
"""Lowest and highest score by prompt."""


FEW = 10
"""Training rows of each intent."""
PASSAGE = 1500
"""Length of the passage of a contract that a question is about, in characters."""


def number(text: str) -> int:
    """A number to draw by, which is the same for the same text everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write(path: Path, rows: Iterable[Row]) -> Path:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def parquet(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def setting(**values: object) -> Arguments:
    """The arguments `--set data.<name>=<value>` for each setting; lists are written as YAML."""
    shown = {name: f"[{', '.join(value)}]" if isinstance(value, list) else value for name, value in values.items()}
    return [part for name, value in shown.items() for part in ("--set", f"data.{name}={value}")]


# ---------------------------------------------------------------------------------------------- intents and sentiment


def banking77(source: Path, work: Path) -> Arguments:
    return ["--data", f"{source}/train.csv", "--test", f"{source}/test.csv", *setting(label="category")]


def few_of_banking77(source: Path, work: Path) -> Arguments:
    """Ten rows of each intent, those with the lowest hashes, and all test rows."""
    rows_by_label: dict[str, list[dict[str, str]]] = {}
    with (source / "train.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows_by_label.setdefault(row["category"], []).append(row)
    rows = [
        row
        for label_rows in rows_by_label.values()
        for row in sorted(label_rows, key=lambda row: number(row["text"]))[:FEW]
    ]
    return ["--data", str(write(work / "rows.jsonl", rows)), "--test", f"{source}/test.csv", *setting(label="category")]


def labelled_sentences(source: Path, work: Path) -> Arguments:
    """Reviews of three shops. A line ends only at a newline; Unicode's other line separators are part of the text."""
    rows = []
    for path in sorted(source.glob("*_labelled.txt")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            text, tab, label = line.rpartition("\t")
            if tab:
                rows.append({"text": text, "label": label.strip(), "shop": path.name.split("_")[0]})
    return ["--data", str(write(work / "rows.jsonl", rows)), *setting(slices=["shop"])]


def umsab(source: Path, work: Path) -> Arguments:
    names = ("negative", "neutral", "positive")
    rows = ({**row, "label": names[row["label"]]} for row in parquet(source / "umsab.parquet"))
    columns = setting(split_column="split", slices=["lang"])
    return ["--data", str(write(work / "rows.jsonl", rows)), *columns]


def nusax(source: Path, work: Path) -> Arguments:
    rows = []
    for path in sorted(source.glob("*.csv")):
        language, split, _ = path.name.split(".")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows += [{"text": r["text"], "label": r["label"], "lang": language, "split": split} for r in reader]
    return ["--data", str(write(work / "rows.jsonl", rows)), *setting(split_column="split", slices=["lang"])]


def xsid(source: Path, work: Path) -> Arguments:
    """Training rows are English only; test rows are in every language."""
    rows = [
        {"text": row["text"], "intent": row["intent"], "lang": row["lang"], "split": split}
        for split in ("train", "valid", "test")
        for row in parquet(source / f"{split}.parquet")
        if split == "test" or row["lang"] == "en"
    ]
    columns = setting(label="intent", split_column="split", slices=["lang"])
    return ["--data", str(write(work / "rows.jsonl", rows)), *columns]


# ------------------------------------------------------------------------------------------------------------- essays


def asap(source: Path, work: Path, fold: int = 0) -> Arguments:
    """Scores are put on a scale from 0 to 1 for each prompt; the prompt's number stands before the essay."""
    rows = []
    for row in parquet(source / "asap_aes.parquet"):
        low, high = ASAP_RANGES[row["essay_set"]]
        rows.append(
            {
                "prompt": f"prompt {row['essay_set']}",
                "essay": row["essay"],
                "score": (row["domain1_score"] - low) / (high - low),
                "set": str(row["essay_set"]),
                "split": "test" if row["test_fold"] == fold else "valid" if row["dev_fold"] == fold else "train",
            }
        )
    return ["--data", str(write(work / "rows.jsonl", rows)), *setting(split_column="split", slices=["set"])]


def ielts(source: Path, work: Path) -> Arguments:
    """The set as it is: the recipe sets rows without a score aside, and keeps equal essays in one fold."""
    columns = setting(text="Question", text_pair="Essay", label="Overall", group_column="Essay", slices=["Task_Type"])
    return ["--data", f"{source}/ielts_writing_dataset.csv", *columns]


# ------------------------------------------------------------------------------------------------------------ contracts


def clauses(source: Path, work: Path) -> Arguments:
    """Clause -> category. A clause of several categories gets the first one. Each contract is in one split."""
    questions: dict[str, dict[str, str]] = {}
    for row in parquet(source / "clauses.parquet"):
        if row["category"] not in CLAUSES_LEFT_OUT:
            questions.setdefault(
                row["clause"], {name: row[name] for name in ("clause", "category", "contract", "split")}
            )
    columns = setting(split_column="split", valid_share=0.1)
    return ["--data", str(write(work / "rows.jsonl", questions.values())), *columns]


def spans(source: Path, work: Path) -> Arguments:
    """Questions on contracts as SQuAD 2.0 files.

    Each is about a passage that holds a clause of the category, or a passage of the same contract that holds none.
    Whole contracts have 12,000 tokens each and would take days on a CPU, so only a part of them is taken.
    """
    texts = {row["contract"]: row["text"] for row in parquet(source / "contracts.parquet")}
    with (source / "category_descriptions.csv").open(encoding="utf-8-sig", newline="") as file:
        described = [(category, description) for category, description, *_ in list(csv.reader(file))[1:]]
    questions = {category.partition(": ")[2].lower(): text.partition(": ")[2] for category, text in described}
    clauses = [row for row in parquet(source / "clauses.parquet") if 0 <= row["end"] - row["start"] <= PASSAGE // 2]
    clauses = [row for row in clauses if row["start"] >= 0]
    of_contract: dict[str, list[Row]] = {}
    for row in clauses:
        of_contract.setdefault(row["contract"], []).append(row)
    for split, max_rows in (("train", 2000), ("test", 500)):
        sampled = sorted((row for row in clauses if row["split"] == split), key=lambda row: number(repr(row)))[
            :max_rows
        ]
        data = [_question(row, texts[row["contract"]], of_contract[row["contract"]], questions) for row in sampled]
        (work / f"{split}.json").write_text(json.dumps({"version": "v2.0", "data": data}), encoding="utf-8")
    return ["--data", f"{work}/train.json", "--test", f"{work}/test.json"]


def _question(row: Row, text: str, other_rows: list[Row], questions: Mapping[str, str]) -> Row:
    """An article with one passage and one question. The question asks for the clause's category; in one of three
    articles it asks for a category that occurs elsewhere in the contract, and not in the passage."""
    draw = number(repr(row))
    margin = PASSAGE - (row["end"] - row["start"])
    begin = max(0, row["start"] - draw % margin)
    passage = text[begin : begin + PASSAGE]
    inside = {
        clause["category"] for clause in other_rows if begin < clause["end"] and clause["start"] < begin + PASSAGE
    }
    outside = sorted({clause["category"] for clause in other_rows} - inside)
    absent = draw % 3 == 0 and bool(outside)
    category = outside[draw % len(outside)] if absent else row["category"]
    answers = [
        {"text": text[clause["start"] : clause["end"]], "answer_start": clause["start"] - begin}
        for clause in other_rows
        if clause["category"] == category and begin <= clause["start"] and clause["end"] <= begin + PASSAGE
    ]
    question = {
        "id": f"{draw:016x}",
        "question": questions[category.lower()],
        "is_impossible": absent,
        "answers": answers,
    }
    return {"title": row["contract"], "paragraphs": [{"context": passage, "qas": [question]}]}


def legal(source: Path, work: Path) -> Arguments:
    """Sections of contracts, each with a summary that someone wrote in plain words."""
    rows = json.loads((source / "all_v1.json").read_text(encoding="utf-8")).values()
    paragraphs = (
        {"text": row["original_text"], "summary": row["reference_summary"], "part": row["uid"].rstrip("0123456789")}
        for row in rows
    )
    return ["--data", str(write(work / "rows.jsonl", paragraphs)), *setting(slices=["part"])]


# --------------------------------------------------------------------------------------------------------- tags, spans


def ncbi(source: Path, work: Path) -> Arguments:
    files = ["--data", f"{source}/train.tsv", "--valid", f"{source}/devel.tsv", "--test", f"{source}/test.tsv"]
    return [*files, *setting(format="conll")]


def fin(source: Path, work: Path) -> Arguments:
    files = ["--data", f"{source}/train_FIN5.txt", "--test", f"{source}/test_FIN3.txt"]
    return [*files, *setting(format="conll")]


def twitter(source: Path, work: Path) -> Arguments:
    """The test rows are section f and the validation rows the second half of section h, as is usual for this set."""
    lines = (source / "h.conll").read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    half = len(lines) // 2
    train = [
        part for name in "abeg" for part in (source / f"{name}.conll").read_text("utf-8").strip("\n").split("\n\n")
    ]
    parts = {"train": train + lines[:half], "valid": lines[half:]}
    for name, sentences in parts.items():
        (work / f"{name}.conll").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
    files = ["--data", f"{work}/train.conll", "--valid", f"{work}/valid.conll", "--test", f"{source}/f.conll"]
    return [*files, *setting(format="conll")]


def squad(source: Path, work: Path) -> Arguments:
    """Training rows are questions about Wikipedia and reviews that share no article with the test rows."""
    return ["--data", f"{source}/*.json.gz", "--test", f"{source.parent}/squad_v1_dev/dev-v1.1.json.gz"]
