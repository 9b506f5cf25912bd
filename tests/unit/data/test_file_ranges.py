"""Large files read in parts: the same rows, lines and reasons as of the file read as a whole, and the same store."""

import csv
import hashlib
import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings, strategies as st

from rtrain.config import DataConfig
from rtrain.data import file_ranges, row_reader, sources
from rtrain.data.row_reader import SourceRow
from rtrain.data.sources import SourceFile
from rtrain.data.store import builder, store
from tests.conftest import labelled_rows
from tests.support.tiny import make_store
from tests.unit.data.test_builder import recipe_of

SCRAPS = [
    *('"', '""', ",", "\n", "\r\n", "\r", "a", "é", " ", "\t", "\x00", "\ufeff"),
    *('","', '"\n"', "x,y\n", '"x","y"\n'),
]
SOUP = st.lists(st.sampled_from([scrap.encode() for scrap in SCRAPS] + [b"\xff"]), max_size=60).map(b"".join)
FIELDS = st.text(st.sampled_from('ab",\r\n é'), max_size=12)


def written(rows: list[list[str]], ending: str) -> bytes:
    """As csv writers do it."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=ending).writerows(rows)
    return file.getvalue().encode()


WRITTEN = st.builds(written, st.lists(st.lists(FIELDS, min_size=2, max_size=2)), st.sampled_from(["\n", "\r\n"]))


def use_parts(patch: pytest.MonkeyPatch, part_bytes: int, buffer: int = 64) -> None:
    patch.setattr(file_ranges, "PART_BYTES", part_bytes)
    patch.setattr(file_ranges, "BUFFER", buffer)


def read(path: Path, format: str, part_bytes: int, buffer: int, delimiter: str = ",") -> tuple[list[SourceRow], int]:
    """The rows of all parts, one part after another, and the number of parts; each part has the digest of the plan."""
    file, data = SourceFile(f"file://{path}", format, "train", delimiter), DataConfig(text="text", label="label")
    results: list[SourceRow] = []
    with pytest.MonkeyPatch.context() as patch:
        use_parts(patch, part_bytes, buffer)
        cut = file_ranges.split_file(file.uri, format, hashlib.sha256(path.read_bytes()).hexdigest(), delimiter)
        for part, sha256 in cut:
            total = hashlib.sha256()
            results += row_reader.read_rows(file, data, part, total)
            assert total.hexdigest() == sha256
    assert [part.start for part, _ in cut[1:]] == [part.stop for part, _ in cut[:-1]]
    assert (cut[0][0].start, cut[-1][0].stop) == (0, file_ranges.MAX_OFFSET)
    return results, len(cut)


@given(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.one_of(SOUP, WRITTEN),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["csv", "tsv", "jsonl"]),
)
@example(b"", b'5" pipe,a\n"quoted ""twice"" and\nmore",b\nplain,c\n', 1, 1, "csv")
@example(b"", b'"closed"late"r,a\n"never closed,b\nx,c\n', 1, 3, "csv")
@example(b"", b'a\rb","c\nx,"y\n",z\n', 1, 2, "csv")
@settings(deadline=None, max_examples=100)
def test_a_file_in_parts_has_the_rows_of_the_whole_file(
    mark: bytes, content: bytes, part_bytes: int, buffer: int, format: str
) -> None:
    header = {"csv": b"text,label\n", "tsv": b"text\tlabel\n", "jsonl": b'{"text": "a", "label": "b"}\n'}[format]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.write_bytes(mark + header + content)
        full = list(row_reader.read_rows(SourceFile(f"file://{path}", format, "train"), DataConfig()))
        assert read(path, format, part_bytes, buffer)[0] == full


@pytest.mark.parametrize("delimiter", [",", ";", ", "])
def test_a_well_formed_file_is_cut_as_finely_as_asked(tmp_path: Path, delimiter: str) -> None:
    rows = [[f'text {number}{delimiter}"quoted"\nin two lines', f"label\n{number % 3}"] for number in range(500)]
    path = tmp_path / "rows.csv"
    lines = [delimiter.join('"{}"'.format(value.replace('"', '""')) for value in row) for row in rows]
    path.write_bytes("\r\n".join([f"text{delimiter[0]}label", *lines, ""]).encode())
    source_rows, count = read(path, "csv", part_bytes=300, buffer=64, delimiter=delimiter[0])
    assert [(source_row.text, source_row.label) for source_row in source_rows] == [tuple(row) for row in rows]
    assert [source_row.line for source_row in source_rows] == list(range(2, 1502, 3))
    assert path.stat().st_size / 600 < count < path.stat().st_size / 300


@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 3000))
@settings(deadline=None, max_examples=30)
def test_a_parquet_file_in_parts_has_the_rows_of_the_whole_file(rows: int, group: int, part_bytes: int) -> None:
    table = pa.table({"text": [f"text {number}" * (number % 5) for number in range(rows)], "label": ["a"] * rows})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=group)
        full = list(row_reader.read_rows(SourceFile(f"file://{path}", "parquet", "train"), DataConfig()))
        source_rows, count = read(path, "parquet", part_bytes, 64)
    assert source_rows == full
    assert [row.line for row in source_rows] == list(range(1, rows + 1))
    assert part_bytes > 1 or count == -(-rows // group)


@pytest.mark.parametrize(
    ("name", "large"),
    [("a.csv", True), ("a.tsv", True), ("a.jsonl", True), ("a.parquet", True), ("a.csv.gz", False), ("a.conll", False)],
)
def test_files_that_can_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, large: bool) -> None:
    use_parts(monkeypatch, 99)
    path = tmp_path / name
    format = sources.FORMAT_BY_SUFFIX[Path(name.removesuffix(".gz")).suffix]
    for size, expected in ((99, False), (100, large)):
        path.write_bytes(bytes(size))
        assert file_ranges.is_large(f"file://{path}", format) is expected
    assert not file_ranges.is_large("https://host.invalid/a.csv", "csv")


@pytest.mark.parametrize("augment", [False, True])
def test_a_store_is_the_same_whatever_the_parts(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, augment: bool
) -> None:
    rows = [[f'{text}\nand "more"', label] for text, label in [*labelled_rows(150), *labelled_rows(40)]]
    rows[20][0] = rows[77][1] = ""
    path = tmp_path / "rows.csv"
    path.write_bytes(written([["text", "label"], *rows], "\r\n"))
    recipe = recipe_of(path, max_bad_rows=0.1)
    if augment:
        recipe = recipe.model_copy(update={"augment": recipe.augment.model_copy(update={"copies": 1, "drop": 0.3})})
    results: list[store.Store] = []
    for number, size in enumerate((1 << 20, 1000, 2500)):
        use_parts(monkeypatch, size)
        results.append(make_store(recipe, encoder, tmp_path / str(number)))
    assert len(results[0].manifest.shards) == 1
    assert (len(results[1].manifest.shards) > 8) is not augment  # the order of copies is a batch's
    first, *other_values = results
    assert first.manifest.copies > 0 or not augment
    for other, split in itertools.product(other_values, store.SPLITS):
        assert other.manifest.digest == first.manifest.digest
        assert other.manifest.rows == first.manifest.rows
        positions = np.arange(first.num_rows(split))
        assert contents(other.read_tokens(split, positions)) == contents(first.read_tokens(split, positions))
        assert other.origins(split).to_pylist() == first.origins(split).to_pylist()
        quarantined = [pyarrow.parquet.read_table(entry.folder / "quarantine.parquet") for entry in (first, other)]
        assert quarantined[0].num_rows == 2
        assert quarantined[0].equals(quarantined[1])


def contents(tokens: Any) -> list[list[Any]]:
    return [
        getattr(tokens, name).tolist()
        for name in ("ids", "window_lengths", "pair_start", "targets", "targets_per_row", "row_ids")
    ]


@pytest.mark.slow
def test_a_large_file_is_read_by_several_tasks_of_ray_data(ray_session: Path, tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "rows.csv"
    filler = "x,\n" * 40_000
    rows = [[text, label, f"{filler}{number}"] for number, (text, label) in enumerate(labelled_rows(600))]
    path.write_bytes(written([["text", "label", "filler"], *rows], "\n"))
    assert 2 * file_ranges.PART_BYTES < path.stat().st_size < 3 * file_ranges.PART_BYTES
    recipe = recipe_of(path)
    token_store, built_store = builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), encoder, tmp_path)
    assert built_store
    assert len(token_store.manifest.shards) == 3
    expected = make_store(recipe, encoder, tmp_path / "alone")
    assert sum(token_store.manifest.rows.values()) == 600
    for split in store.SPLITS:
        positions = np.arange(expected.num_rows(split))
        assert contents(token_store.read_tokens(split, positions)) == contents(expected.read_tokens(split, positions))
        assert token_store.origins(split).to_pylist() == expected.origins(split).to_pylist()
