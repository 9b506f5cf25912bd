"""How published sets are read, which commands are run on them, the floors, and the file of results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from benchmarks import floors, sets, tasks, train
from benchmarks.compress import __main__ as compress
from benchmarks.gpu import __main__ as gpu
from benchmarks.results import Keep, PartResult, Results
from benchmarks.search import __main__ as search
from benchmarks.serve import __main__ as serve
from rtrain import config
from rtrain.cli.options import SETTINGS_BY_OPTION
from rtrain.data import row_reader, sources


def rows_of(arguments: list[str]) -> list[dict[str, Any]]:
    path = Path(arguments[arguments.index("--data") + 1])
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)


def test_lines_of_reviews_end_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "shop_labelled.txt").write_text("good\x85 and cheap\t1\nbad\tworse\t0\n", encoding="utf-8")
    result = rows_of(sets.labelled_sentences(tmp_path, tmp_path))
    assert [(row["text"], row["label"], row["shop"]) for row in result] == [
        ("good\x85 and cheap", "1", "shop"),
        ("bad\tworse", "0", "shop"),
    ]


def test_only_the_test_has_other_languages_than_english(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        rows: list[dict[str, Any]] = [
            {"lang": lang, "text": f"{split} {lang}", "intent": "a", "tokens": []} for lang in ("en", "de")
        ]
        write_parquet(tmp_path / f"{split}.parquet", rows)
    result = rows_of(sets.xsid(tmp_path, tmp_path))
    assert [row["text"] for row in result] == ["train en", "valid en", "test en", "test de"]


def test_scores_of_all_prompts_are_on_one_scale_and_measured_on_their_own(tmp_path: Path) -> None:
    essays = [
        {"essay_set": number, "essay": f"{number} {score}", "domain1_score": score, "test_fold": fold, "dev_fold": 1}
        for number, (low, high) in sets.ASAP_RANGES.items()
        for score, fold in ((low, 0), (high, 0), (low, 2), (high, 2))
    ]
    write_parquet(tmp_path / "asap_aes.parquet", essays)
    result = rows_of(sets.asap(tmp_path, tmp_path))
    assert {row["score"] for row in result} == {0.0, 1.0}
    assert [row["split"] for row in result[:4]] == ["test", "test", "train", "train"]

    # One prompt is answered the wrong way round: its kappa is -1, the others' 1.
    summary = [(row["set"], row["score"], row["score"] if row["set"] != "8" else 1 - row["score"]) for row in result]
    summary += [("7", float(np.float32(0.6)), float(np.float32(0.6)))] * 2  # as a store of 32 bits gives them back
    columns = zip(*summary, strict=True)
    table = dict(zip(("set", "target", "prediction"), (pa.array(list(column)) for column in columns), strict=True))
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "predictions-test.parquet")
    document = {"headline": "pearson", "scores": {"pearson": 0.5}, "slices": {}}
    (tmp_path / "scores-test.json").write_text(json.dumps(document))
    figures = tasks.kappa_by_prompt(tmp_path)
    assert (figures["prompt 1"], figures["prompt 8"]) == (1.0, -1.0)
    assert figures["mean_qwk"] == pytest.approx(6 / 8)


def test_a_clause_has_one_category_and_titles_have_none(tmp_path: Path) -> None:
    rows = [
        {"clause": "x", "category": "Audit Rights", "contract": "c", "split": "train"},
        {"clause": "x", "category": "Cap On Liability", "contract": "c", "split": "train"},
        {"clause": "y", "category": "Parties", "contract": "c", "split": "test"},
    ]
    write_parquet(tmp_path / "clauses.parquet", rows)
    assert [(row["clause"], row["category"]) for row in rows_of(sets.clauses(tmp_path, tmp_path))] == [
        ("x", "Audit Rights")
    ]


def test_the_last_tweets_choose_and_none_is_lost(tmp_path: Path) -> None:
    for name in "abefgh":
        (tmp_path / f"{name}.conll").write_text("".join(f"{name}{number}\tO\n\n" for number in range(4)))
    (tmp_path / "work").mkdir()
    sets.twitter(tmp_path, tmp_path / "work")
    result = {}
    for split in ("train", "valid"):
        piece = sources.SourceFile(str(tmp_path / "work" / f"{split}.conll"), "conll", split)
        recipe = config.load_config("entities", {"data.path": piece.uri}).recipe
        result[split] = [record.text for record in row_reader.read_rows(piece, recipe.data)]
    assert result["valid"] == ["h2", "h3"]
    assert len(result["train"]) == 4 * 4 + 2
    assert {text[0] for text in result["train"]} == set("abegh")


@pytest.mark.parametrize(
    "job", [job for job in tasks.JOBS if job.folder in ("banking77", "ielts_essays", "ncbi_disease")]
)
def test_commands_are_of_settings_that_there_are(job: tasks.Job, tmp_path: Path) -> None:
    (tmp_path / "banking77").mkdir()
    (tmp_path / "banking77" / "train.csv").write_text("text,category\na text,a\n", encoding="utf-8")
    for run, arguments in tasks.commands(job, tmp_path, tmp_path / "out", ["train.workers=1"]):
        verb, recipe, *rest = arguments
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        assignments = [value for name, value in zip(rest[::2], rest[1::2], strict=True) if name == "--set"]
        overrides = dict(config.parse_assignment(text) for text in assignments)
        overrides |= {
            SETTINGS_BY_OPTION[name[2:]]: value for name, value in options.items() if name[2:] in SETTINGS_BY_OPTION
        }
        recipe_config = config.load_config(recipe, overrides).recipe
        assert (verb, options["--out"], recipe_config.train.workers) == ("train", str(run), 1)
        assert recipe_config.global_batch_size == job.settings["train.global_batch_size"]


def test_every_line_of_the_table_has_a_name_of_its_own() -> None:
    assert len({job.name for job in tasks.JOBS}) == len(tasks.JOBS)
    lines = [{"job": "a", "figure": "f1", "floor": 0.5, "ours": 0.75, "values": [0.7, 0.8], "target": None}]
    shown = tasks.table([{**line, "published": "", "seconds": 12.3} for line in lines]).split("\n")
    assert shown[2] == "| a | f1 | 0.5 | 0.75 | 0.7 0.8 |  |  | 12 |"


def test_a_floor_is_of_each_language_s_own_rows() -> None:
    words = {"a": ("good thing", "bad thing"), "b": ("thing guter", "thing schlechter")}
    rows = [
        {"text": f"{text} {number}", "label": str(place), "lang": lang, "split": split}
        for lang, texts in words.items()
        for place, text in enumerate(texts)
        for number, split in enumerate(["train"] * 4 + ["test"] * 2)
    ]
    assert floors.floors(rows, "label", is_per_language=True) == {"a": (1.0, 1.0), "b": (1.0, 1.0)}
    english = [row for row in rows if row["split"] == "test" or row["lang"] == "a"]
    result = floors.floors(english, "label", is_per_language=False)
    assert result["a"] == (1.0, 1.0)
    assert result["b"][0] < 1.0


def test_the_floor_of_essays_never_saw_their_equals() -> None:
    """Each essay is there twice, and its score has nothing to do with its words: only a copy could tell it."""
    scores = [str(3 + number * 7 % 5) for number in range(40)]
    rows = [
        {"Question": "why", "Essay": f"essay word{number} term{number}", "Overall": score}
        for number, score in enumerate(scores)
    ] * 2
    result = floors.essays([*rows, {"Question": "why", "Essay": "no score", "Overall": " "}])
    assert result["rmse"] >= result["mae"] > 0.5
    assert result["r2"] < 0.1


def test_few_rows_of_each_intent_are_the_same_in_any_order(tmp_path: Path) -> None:
    rows = [(f"text {number} of {name}", name) for name in ("a", "b") for number in range(30)]
    result = []
    for turn, order in enumerate((rows, rows[::-1])):
        source = tmp_path / str(turn)
        source.mkdir()
        (source / "train.csv").write_text("text,category\n" + "".join(f"{text},{name}\n" for text, name in order))
        result.append({(row["text"], row["category"]) for row in rows_of(sets.few_of_banking77(source, source))})
    assert result[0] == result[1]
    assert sorted(name for _, name in result[0]) == ["a"] * sets.FEW + ["b"] * sets.FEW


def test_passages_hold_the_clause_that_is_asked_for_or_none(tmp_path: Path) -> None:
    kinds = {"Cap": "How much at most?", "Term": "Until when?"}
    (tmp_path / "category_descriptions.csv").write_text(
        "Category,Description\n" + "".join(f"Category: {kind},Description: {ask}\n" for kind, ask in kinds.items())
    )
    contracts, clauses = [], []
    for number in range(40):
        text = f"{'x ' * 700}the cap of {number} euros {'y ' * 900}the term of {number} years {'z ' * 300}"
        name, split = f"contract {number}", "test" if number % 4 == 0 else "train"
        contracts.append({"contract": name, "text": text, "split": split})
        for kind, clause in (("Cap", f"the cap of {number} euros"), ("Term", f"the term of {number} years")):
            start = text.index(clause)
            clauses.append(
                {"contract": name, "category": kind, "start": start, "end": start + len(clause), "split": split}
            )
        clauses.append({"contract": name, "category": "Cap", "start": -1, "end": -1, "split": split})
    write_parquet(tmp_path / "contracts.parquet", contracts)
    write_parquet(tmp_path / "clauses.parquet", clauses)
    arguments = sets.spans(tmp_path, tmp_path)
    summary: dict[str, list[Any]] = {}
    for split in ("train", "test"):
        data = json.loads(Path(arguments[arguments.index("--data" if split == "train" else "--test") + 1]).read_text())
        summary[split] = [
            (article["title"], article["paragraphs"][0]["context"], article["paragraphs"][0]["qas"][0])
            for article in data["data"]
        ]
    assert (len(summary["train"]), len(summary["test"])) == (60, 20)
    assert {title for title, *_ in summary["train"]}.isdisjoint(title for title, *_ in summary["test"])
    questions = summary["train"] + summary["test"]
    assert 5 < sum(question["is_impossible"] for *_, question in questions) < 60
    for _, context, question in questions:
        kind = "cap" if question["question"] == kinds["Cap"] else "term"
        assert (f"the {kind} of" in context) != question["is_impossible"]
        for answer in question["answers"]:
            assert context[answer["answer_start"] :].startswith(answer["text"])
            assert answer["text"].startswith(f"the {kind} of")
        assert bool(question["answers"]) != question["is_impossible"]


def test_a_part_stands_with_its_machine_and_options_and_is_replaced_alone(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    results = Results(out, rows=10)
    assert results.measure("speed", lambda keep: {"ratio": 2.0}) == json.loads(out.read_text())["speed"]
    results.measure("size", lambda keep: {"mb": 5})
    reopened = Results(out, rows=20)
    reopened.measure("speed", lambda keep: {"ratio": 3.0})
    parts = json.loads(out.read_text())
    assert json.loads(str(reopened)) == parts
    assert (parts["speed"]["ratio"], parts["size"]["mb"]) == (3.0, 5)
    assert (parts["speed"]["about"]["rows"], parts["size"]["about"]["rows"]) == (20, 10)


def test_what_a_part_knew_is_kept_where_it_breaks_off(tmp_path: Path) -> None:
    def broken(keep: Keep) -> PartResult:
        keep({"rounds": [1, 2]})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Results(tmp_path / "figures.json").measure("speed", broken)
    part = json.loads((tmp_path / "figures.json").read_text())["speed"]
    assert (part["rounds"], part["unfinished"]) == ([1, 2], True)


@pytest.mark.parametrize(
    ("parse", "wrong"),
    [
        *((train.parse, wrong) for wrong in ("", "data --rows 6", "data --rounds 0", "data --only no")),
        *((search.parse, wrong) for wrong in ("", "data --only gains", "data --rows 10", "data --searches 0")),
        *((compress.parse, wrong) for wrong in ("", "data --only speed", "data --epochs 0")),
        *(
            (serve.parse, f"student parent {wrong}")
            for wrong in ("--only no", "--rounds 0", "--seconds 0", "--minutes 0")
        ),
        (gpu.parse, "a-folder-that-was-not-prepared"),
    ],
)
def test_a_wrong_command_line_is_refused(parse: Callable[[list[str]], object], wrong: str) -> None:
    with pytest.raises(SystemExit):
        parse(wrong.split())
