"""Any input gives rows, and quarantined rows with their reasons: every column of every task, by Hypothesis, from the
file to the store."""

import csv
import itertools
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rtrain import config
from rtrain.data.readers import tabular
from rtrain.data.store.store import Store
from tests.support.tiny import make_store, make_tokenizer

TASKS: dict[str, dict[str, Any]] = {
    "classification": {"data.label": "label"},
    "outside": {"task": "classification", "data.label": "label", "data.out_of_scope_label": "c"},
    "multi_label": {"data.label": "label"},
    "separated": {"task": "multi_label", "data.label": "label", "data.separator": "|"},
    "multi_head": {"data.label": ["label", "mood"]},
    "one_column_of_heads": {"task": "multi_head", "data.label": "label"},
    "regression": {"data.label": "label", "data.text_pair": "pair"},
    "token_tags": {"data.label": "label"},
    "span_qa": {"data.label": "label", "data.text_pair": "pair", "data.window": 32, "data.stride": 8},
    "extractive_summary": {"data.label": "label", "data.window": 32, "data.stride": 8},
    "masked_lm": {"data.label": None},
}
"""Settings of each task, and of some in two ways."""
SHAPES = sorted(TASKS)


def shapes(*quick: str) -> list[Any]:
    """All shapes; those that are not `quick` are slow tests."""
    return [pytest.param(shape, marks=() if shape in quick else pytest.mark.slow) for shape in SHAPES]


LABELS: dict[str, tuple[Any, Any]] = {
    "classification": ("a", "b"),
    "outside": ("a", "b"),
    "multi_label": (["a"], ["b", "a"]),
    "separated": ("a|b", "b"),
    "multi_head": ("a", "b"),
    "one_column_of_heads": ({"x": "a", "y": "c"}, {"x": "b", "y": "d"}),
    "regression": (1.5, 2),
    "token_tags": (["O", "B-PER"], ["B-PER", "I-PER"]),
    "span_qa": ([{"text": "is my", "start": 6}], []),
    "extractive_summary": ("the parcel came", "nobody came"),
    "masked_lm": (None, None),
}
TEXT, WORDS, PAIR = "where is my parcel. nobody rang the bell", ["where", "parcel"], "where is my parcel today"

NASTY = st.sampled_from(
    [
        *("", " ", "\x00", "a\x00b", "\ufeff", "\u200b", "\u2028", "\r", "\ud800", "\udcff", "\U0001f600" * 3),
        *("[oops", "{oops", "['O', 'B-PER']", "['a' 'b']", "[1, 2", "[]", "{}", '""', "null", "[null]"),
        *("[NaN]", "[1e999]", '["\\ud800"]', '["O", ["B-PER"]]', '["O", 7]', '["a", "a"]', '[""]'),
        *('[{"text": "is my", "start": 6}]', '[{"text": "is my", "start": -18}]'),
        *('[{"text": "is my", "start": 1e999}]', '[{"text": "", "start": 0}]'),
        *('{"text": ["is my"], "answer_start": [6]}', '{"x": "a"}', '{"x": ["a"], "y": {}}'),
        *('{"x": null, "y": 3}', '{"x": "\\ud800"}', "[" * 5000, "[" * 100_000, "9" * 5000),
        *("[" + "9" * 5000 + "]", "1e300", "-1e308", "5e-324", "nan", "inf", "1_0", "O B-PER", "B-", "|"),
        *("a||b", "x" * 70_000, "a. " * 300, "word " * 5000),
    ]
)
WORDLESS = st.text(max_size=12)  # of any characters, lone surrogates included
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), NASTY, WORDLESS, st.just(10**400)
)
VALUES = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDLESS, inner)), max_leaves=6
    ),
    st.lists(st.fixed_dictionaries({"text": SCALARS, "start": SCALARS}), max_size=2),
    st.lists(st.fixed_dictionaries({"text": st.just("is my"), "start": st.sampled_from([6, 6.0, "6", -18, 7, True])})),
    st.fixed_dictionaries({"x": SCALARS, "y": SCALARS}),
    st.lists(st.sampled_from(["a", "b", "O", "B-PER", "I-PER", "B-LOC"]), max_size=3),
)
COLUMNS = ("text", "pair", "label", "mood", "slice", "group", "part")


def sound(shape: str, number: int) -> dict[str, Any]:
    """A row that any task can use, two labels in turn; train, valid and test in turn as well."""
    part = ("train", "valid", "test")[number // 2 % 3]
    text = WORDS if shape == "token_tags" else f"{number} {TEXT}"
    label = LABELS[shape][number % 2]
    label = "c" if shape == "outside" and part == "valid" and number % 2 else label
    mood = "bd"[number % 2]
    return {"text": text, "pair": PAIR, "label": label, "mood": mood, "slice": "en", "group": number, "part": part}


FUZZED = st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, min_size=1, max_size=2), min_size=1, max_size=6)
"""Replacements for the values of some columns of a row."""


@pytest.fixture(scope="module")
def encoder_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make_tokenizer(folder / "encoder")
    return folder


NUMBERS = itertools.count()


def store_of(encoder_root: Path, shape: str, path: Path, **overrides: Any) -> Store:
    columns = {"data.split_column": "part", "data.slices": ["slice"], "data.group_column": "group"}
    limits = {"data.max_tokens": 32, "data.max_bad_rows": 1.0}
    dotted = {"task": shape, **columns, **limits, **TASKS[shape], "data.path": str(path), **overrides}
    recipe = config.load_config("intent", dotted).recipe
    return make_store(recipe, encoder_root / "encoder", encoder_root / f"stores-{next(NUMBERS)}")


def rows_of(shape: str, fuzzed: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    good = [sound(shape, number) for number in range(6)]
    return good + [{**sound(shape, number), **values} for number, values in enumerate(fuzzed, start=6)]


def check(token_store: Store, rows: int, packs: bool = False) -> None:
    """Each row is stored, left out or quarantined, and reasons are short and say how to fix the row."""
    manifest = token_store.manifest
    if not packs:
        assert sum(manifest.rows.values()) + manifest.quarantined + manifest.out_of_scope_rows == rows
    reasons = pyarrow.parquet.read_table(token_store.folder / "quarantine.parquet")["reason"].to_pylist()
    assert len(reasons) == manifest.quarantined
    for reason in reasons:
        assert len(reason) < 400
        assert reason.isprintable()
    for split in ("train", "valid", "test"):
        positions = np.arange(token_store.num_rows(split))
        assert len(token_store.read_tokens(split, positions)) == len(positions)


slowly = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("shape", SHAPES)
@slowly
@given(fuzzed=FUZZED)
def test_any_json_is_rows_or_reasons(encoder_root: Path, shape: str, fuzzed: list[Mapping[str, Any]]) -> None:
    path, rows = encoder_root / "rows.jsonl", rows_of(shape, fuzzed)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    check(store_of(encoder_root, shape, path), len(rows), packs=shape == "masked_lm")


@pytest.mark.parametrize("shape", shapes("outside", "separated", "span_qa", "token_tags"))
@slowly
@given(fuzzed=FUZZED)
def test_any_csv_is_rows_or_reasons(encoder_root: Path, shape: str, fuzzed: list[Mapping[str, Any]]) -> None:
    path, rows = encoder_root / "rows.csv", rows_of(shape, fuzzed)
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:  # a list of words that is written as JSON is refused
            written = {name: tabular.to_string(value) for name, value in row.items()}
            writer.writerow({**written, "text": tabular.to_text(row["text"])})
    check(store_of(encoder_root, shape, path), len(rows), packs=shape == "masked_lm")


ODD = st.sampled_from(
    [
        pa.array([b"caf\xe9"]).view(pa.string()),
        pa.array([b"caf\xe9", b"ok"]).view(pa.string()).dictionary_encode().slice(0, 1),
        pa.array([b"x\xff"]),
        pa.array([b"is my"]),
        pa.array([None], pa.null()),
        pa.array([10**18]).cast(pa.timestamp("us")),
        pa.array([10**15]).cast(pa.timestamp("us", "Mars/Base")),
        pa.array([2**30], pa.int32()).cast(pa.date32()),
        pa.array([1.5], pa.float16()),
        pa.array([Decimal("1e30")], pa.decimal256(76, 2)),
        pa.array([[("is my", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([{"text": b"\xff", "start": [{"deep": None}]}]),
        pa.array([[{"text": "is my", "start": 6}]]),
        pa.array([{"text": ["is my"], "answer_start": [6]}]),
        pa.array([["O", None]]),
        pa.array([[["O"], ["B-PER"]]]),
        pa.array([[b"O", b"B-PER"]]),
        pa.array([[1.5, float("nan")]]),
        pa.array([["a", "b"]], pa.list_(pa.large_string())),
        pa.array([True]),
        pa.array([2**64 - 1], pa.uint64()),
    ]
)


@pytest.mark.parametrize("shape", shapes("classification", "multi_head", "regression", "extractive_summary"))
@slowly
@given(odd=st.dictionaries(st.sampled_from(COLUMNS), ODD, min_size=1, max_size=3))
def test_any_parquet_is_rows_or_reasons(encoder_root: Path, shape: str, odd: Mapping[str, pa.Array]) -> None:
    """Sound rows in a file of their own: a column of parquet has one type."""
    folder, rows = encoder_root / "parquet", rows_of(shape, [{}] * 2)
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first = pa.table({name: odd.get(name, pa.array([value])) for name, value in sound(shape, 8).items()})
    pyarrow.parquet.write_table(first, folder / "b.parquet")
    check(store_of(encoder_root, shape, folder), len(rows) + 1, packs=shape == "masked_lm")
