"""Sources of several files: folders, globs, a test file, `datasets`; and the digests of files."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest

from rtrain.config import DataConfig
from rtrain.core import hub
from rtrain.data import row_reader, sources
from rtrain.data.row_reader import SourceRow
from tests.unit.data.test_row_reader import codes, read

# ------------------------------------------------------------------------------------------------------- several files


def write_parts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "b.csv").write_text("text,label\nfour,y\n")
    (folder / "a.jsonl").write_text('{"label": "x", "text": "one"}\n{"label": "x", "text": "two"}\n')
    (folder / "inner").mkdir()
    (folder / "inner" / "c.csv").write_text("label,text\nz,five\n")
    (folder / "README.md").write_text("not data")
    return folder


def test_a_folder_is_all_data_files_in_it_by_name(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "parts")
    rows = read(DataConfig(path=str(folder)))
    assert [(row.line, row.text, row.label) for row in rows] == [
        (1, "one", "x"),
        (2, "two", "x"),
        (2, "four", "y"),
        (2, "five", "z"),
    ]


def test_a_glob_is_the_files_that_match(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "parts")
    source = row_reader.inspect_source(DataConfig(path=str(folder / "*.csv")))
    assert [Path(file.uri).name for file in source.files] == ["b.csv"]
    (folder / "README.md").unlink()
    assert [row.text for row in read(DataConfig(path=str(folder / "*")))] == ["one", "two", "four"]


def test_hidden_copies_are_no_rows_unless_they_are_named(tmp_path: Path) -> None:
    """An editor's copy of the rows, and a Mac's metadata file."""
    folder = write_parts(tmp_path / "parts")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "b-checkpoint.csv").write_text("text,label\nfour,wrong\n")
    (folder / "._b.csv").write_bytes(b"\x00\x05\x16\x07Mac OS X")
    assert [row.text for row in read(DataConfig(path=str(folder)))] == ["one", "two", "four", "five"]
    assert [row.text for row in read(DataConfig(path=str(folder / "*.csv")))] == ["four"]
    assert [row.text for row in read(DataConfig(path=str(folder / "*" / "*.csv")))] == ["five"]
    for names in (".ipynb_checkpoints", ".ipynb_checkpoints/*.csv", ".ipynb*/*.csv"):
        assert [row.label for row in read(DataConfig(path=str(folder / names)))] == ["wrong"]


def test_files_of_a_folder_count_whatever_their_case_and_compression(tmp_path: Path) -> None:
    rows = b"text,label\n%s,x\n"
    packed: dict[str, Callable[[bytes], bytes]] = {
        "b.csv.bz2": bz2.compress,
        "c.CSV.GZ": gzip.compress,
        "d.csv.xz": lzma.compress,
    }
    (tmp_path / "a.CSV").write_bytes(rows % b"a")
    for name, compress in packed.items():
        (tmp_path / name).write_bytes(compress(rows % name[:1].encode()))
    assert [row.text for row in read(DataConfig(path=str(tmp_path)))] == ["a", "b", "c", "d"]


def test_a_state_of_another_program_makes_no_datasets_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\none,x\n")
    (tmp_path / "state.json").write_text("{}")
    assert codes(DataConfig(path=str(tmp_path))) == [("data.path", "no_header")]  # it is a file of rows like others


def test_folders_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    assert codes(DataConfig(path=str(tmp_path))) == [("data.path", "no_data_files")]
    assert codes(DataConfig(path=str(tmp_path), format="datasets")) == [("data.path", "not_a_dataset")]
    (tmp_path / "rows.csv").symlink_to("nowhere")
    assert codes(DataConfig(path=str(tmp_path))) == [("data.path", "not_found")]


def test_the_test_file_is_a_piece_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    (tmp_path / "test.csv").write_text("text,label\nc,d\n")
    source = row_reader.inspect_source(DataConfig(path=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv")))
    assert [(Path(file.uri).name, file.role, file.format) for file in source.files] == [
        ("train.csv", "train", "csv"),
        ("test.csv", "test", "csv"),
    ]
    assert source.has_test
    assert not row_reader.inspect_source(DataConfig(path=str(tmp_path / "train.csv"))).has_test
    assert source.columns == ("text", "label")


def test_digest_is_over_roles_formats_and_bytes_not_names(tmp_path: Path) -> None:
    first, copy, other = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"
    for path in (first, copy):
        path.write_text("text,label\na,b\n")
    other.write_text("text,label\na,c\n")
    digests = {
        name: row_reader.inspect_source(DataConfig(path=str(path), test=None if test is None else str(test))).digest()
        for name, path, test in (
            ("first", first, None),
            ("copy", copy, None),
            ("other", other, None),
            ("tested", first, other),
            ("swapped", other, first),
        )
    }
    assert digests["first"] == digests["copy"]
    assert len(set(digests.values())) == 4


# ------------------------------------------------------------------------------------------------------------ datasets


@pytest.fixture
def datasets_folder(tmp_path: Path) -> Path:
    """`save_to_disk` of a train and a test split, with label names beside codes."""
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["parcel", "login"])}
    )
    train = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, -1]}, features=features)
    test = datasets.Dataset.from_dict({"text": ["d"], "label": [1]}, features=features)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_datasets_folder_gives_label_names(datasets_folder: Path) -> None:
    assert read(DataConfig(path=str(datasets_folder / "train"))) == [
        SourceRow(1, "a", None, "parcel", None),
        SourceRow(2, "b", None, "login", None),
        SourceRow(3, "c", None, "", ANY),
    ]


def test_a_datasets_folder_without_the_split_is_refused(datasets_folder: Path) -> None:
    (datasets_folder / "dataset_dict.json").write_text('{"splits": ["test", "unsupervised"]}')
    assert codes(DataConfig(path=str(datasets_folder))) == [("data.path", "unknown_split")]


def test_a_datasets_folder_of_splits_is_train_and_test(datasets_folder: Path) -> None:
    source = row_reader.inspect_source(DataConfig(path=str(datasets_folder)))
    assert [(file.role, file.format) for file in source.files] == [("train", "datasets"), ("test", "datasets")]
    assert source.has_test
    assert source.columns == ("text", "label")
    assert [row.text for row in read(DataConfig(path=str(datasets_folder)))] == ["a", "b", "c", "d"]


def test_the_test_split_of_a_datasets_folder_may_be_the_test(datasets_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,login\n")
    source = row_reader.inspect_source(DataConfig(path=str(path), test=str(datasets_folder)))
    assert [(file.role, file.format) for file in source.files] == [("train", "csv"), ("test", "datasets")]


def test_a_mistyped_path_is_told_with_what_the_hub_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, root: Path | None) -> None:
        raise hub.HubError(f"there is no network to look up {name}", "find one")

    monkeypatch.setattr(hub, "fetch_dataset", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").touch()
    assert codes(DataConfig(path="row")) == [("data.path", "not_found")]


@pytest.mark.parametrize(
    "path", ["data/mesages.csv", "mesages.jsonl.gz", "./rows", "../rows", "/rows", "~/rows", "a/b/c"]
)
def test_what_can_only_be_a_path_is_asked_of_no_hub(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(hub, "fetch_dataset")
    assert codes(DataConfig(path=path)) == [("data.path", "not_found")]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{number}.csv" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"text,label\nrow {number},a\n")
    return paths


@pytest.fixture(autouse=True)
def minimum_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old enough for the cache at once."""
    monkeypatch.setattr(sources, "MIN_UNCHANGED_S", -60)


def start(root: Path, files: list[Path]) -> list[str]:
    """Compute and cache the digests as a start does; returns the SHA-256 of each file."""
    result = sources.compute_digests([f"file://{path}" for path in files], sources.load_cache(root))
    sources.update_cache(root, result)
    return [entry.sha256 for entry in result]


def mark_cached(root: Path) -> None:
    """Replace the cached digests, so that a digest shows whether it comes from the cache."""
    cache = {uri: (stamp, "cached") for uri, (stamp, _) in sources.load_cache(root).items()}
    (root / sources.CACHE_FILE).write_text(json.dumps(cache))


def test_unchanged_files_are_not_read_again(tmp_path: Path, files: list[Path]) -> None:
    assert start(tmp_path, files) == [sources.hash_file(str(path)) for path in files]
    mark_cached(tmp_path)
    assert start(tmp_path, files[::-1]) == ["cached"] * 40


def test_an_edit_that_keeps_size_and_time_is_detected(tmp_path: Path, files: list[Path]) -> None:
    start(tmp_path, files)
    mark_cached(tmp_path)
    before = files[7].stat()
    files[7].write_text("text,label\nROW 7,a\n")
    os.utime(files[7], ns=(before.st_atime_ns, before.st_mtime_ns))
    after = files[7].stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    digests = start(tmp_path, files)
    assert [position for position, digest in enumerate(digests) if digest != "cached"] == [7]
    assert digests[7] == sources.hash_file(str(files[7]))


def test_a_new_file_is_not_cached(tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_UNCHANGED_S", 3600)
    start(tmp_path, files)
    assert not (tmp_path / sources.CACHE_FILE).exists()


def test_a_file_that_changes_during_hashing_is_not_cached(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file = sources.hash_file

    def hash_and_change(uri: str) -> str:
        result = hash_file(uri)
        if uri.endswith("/3.csv"):
            files[3].write_text("text,label\nrow 3,b\n")
        return result

    monkeypatch.setattr(sources, "hash_file", hash_and_change)
    start(tmp_path, files)
    assert set(sources.load_cache(tmp_path)) == {f"file://{path}" for path in files} - {f"file://{files[3]}"}


def test_starts_on_other_files_keep_the_cache(tmp_path: Path, files: list[Path]) -> None:
    start(tmp_path, files[:20])
    start(tmp_path, files[20:])
    assert len(sources.load_cache(tmp_path)) == len(json.loads((tmp_path / sources.CACHE_FILE).read_text())) == 40
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [sources.CACHE_FILE]
    sources.clear_cache(tmp_path)
    sources.clear_cache(tmp_path)
    assert sources.load_cache(tmp_path) == {}
