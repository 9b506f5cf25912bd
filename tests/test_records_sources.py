"""Sources of more than one file: folders, globs, a test file, and what `datasets` saves or loads."""

from pathlib import Path

import pytest

from rtrain.config import Data
from rtrain.data import records
from rtrain.data.records import Record
from tests.test_records import problems, read

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
    found = read(Data(path=str(folder)))
    assert [(record.line, record.text, record.label) for record in found] == [
        (1, "one", "x"),
        (2, "two", "x"),
        (2, "four", "y"),
        (2, "five", "z"),
    ]


def test_a_glob_is_the_files_that_match(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "parts")
    source = records.inspect(Data(path=str(folder / "*.csv")))
    assert [Path(piece.uri).name for piece in source.pieces] == ["b.csv"]
    (folder / "README.md").unlink()
    assert [record.text for record in read(Data(path=str(folder / "*")))] == ["one", "two", "four"]


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    [problem] = problems(Data(path=str(tmp_path)))
    assert problem.reason == "no data file in it"
    assert problem.fix == "expected .conll, .csv, .json, .jsonl, .ndjson, .parquet, .tsv"


def test_every_file_of_a_folder_needs_the_columns(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "parts")
    (folder / "d.csv").write_text("message,label\nsix,x\n")
    [problem] = problems(Data(path=str(folder)))
    assert (problem.field, problem.value) == ("data.text", "text")
    assert problem.fix == "d.csv has message, label; write --set data.text=COLUMN"


def test_the_test_file_is_a_piece_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    (tmp_path / "test.csv").write_text("text,label\nc,d\n")
    source = records.inspect(Data(path=str(tmp_path / "train.csv"), test=str(tmp_path / "test.csv")))
    assert [(Path(piece.uri).name, piece.role, piece.format) for piece in source.pieces] == [
        ("train.csv", "train", "csv"),
        ("test.csv", "test", "csv"),
    ]
    assert source.has_test
    assert not records.inspect(Data(path=str(tmp_path / "train.csv"))).has_test
    assert source.columns == ("text", "label")


def test_digest_is_over_roles_formats_and_bytes_not_names(tmp_path: Path) -> None:
    first, copy, other = tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"
    for path in (first, copy):
        path.write_text("text,label\na,b\n")
    other.write_text("text,label\na,c\n")
    digests = {
        name: records.inspect(Data(path=str(path), test=None if test is None else str(test))).digest()
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
    assert read(Data(path=str(datasets_folder / "train"))) == [
        Record(1, "a", None, "parcel", None),
        Record(2, "b", None, "login", None),
        Record(3, "c", None, "", "column 'label' is empty; write a label or remove the row"),
    ]


def test_a_datasets_folder_of_splits_is_train_and_test(datasets_folder: Path) -> None:
    source = records.inspect(Data(path=str(datasets_folder)))
    assert [(piece.role, piece.format) for piece in source.pieces] == [("train", "datasets"), ("test", "datasets")]
    assert source.has_test
    assert source.columns == ("text", "label")
    assert [record.text for record in read(Data(path=str(datasets_folder)))] == ["a", "b", "c", "d"]


def test_the_test_split_of_a_datasets_folder_may_be_the_test(datasets_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,login\n")
    source = records.inspect(Data(path=str(path), test=str(datasets_folder)))
    assert [(piece.role, piece.format) for piece in source.pieces] == [("train", "csv"), ("test", "datasets")]


def test_a_datasets_folder_without_the_split_names_what_it_has(datasets_folder: Path) -> None:
    (datasets_folder / "dataset_dict.json").write_text('{"splits": ["test", "unsupervised"]}')
    [problem] = problems(Data(path=str(datasets_folder)))
    assert (problem.reason, problem.fix) == ("no split 'train'", "it has test, unsupervised; name the folder of one")


def test_a_name_that_no_hub_gives_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(name: str, **settings: object) -> None:
        raise ConnectionError(f"no network to look up {name}")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    [problem] = problems(Data(path="someone/rows", format="datasets"))
    assert problem.reason == "could not be loaded (no network to look up someone/rows)"
    assert problem.fix == "write a folder or file instead"


def test_a_name_from_the_hub_is_read_from_its_local_files(
    datasets_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    whole = datasets.load_from_disk(str(datasets_folder))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **settings: whole)
    data = Data(path="someone/rows", format="datasets")
    assert [piece.role for piece in records.inspect(data).pieces] == ["train", "test"]
    assert [(record.text, record.label) for record in read(data)] == [
        ("a", "parcel"),
        ("b", "login"),
        ("c", ""),
        ("d", "login"),
    ]
