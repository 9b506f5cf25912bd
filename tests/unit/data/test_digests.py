"""Digests of files: remembered where no change can go unseen, made anew everywhere else."""

import json
import os
from pathlib import Path

import pytest

from rtrain.data.sources import digests


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{number}.csv" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"text,label\nrow {number},a\n")
    return paths


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be hashed."""
    names: list[str] = []
    full = digests.hash_file

    def counted(uri: str) -> str:
        names.append(Path(uri).name)
        return full(uri)

    monkeypatch.setattr(digests, "hash_file", counted)
    return names


def start(root: Path, files: list[Path]) -> list[str]:
    """Compute and cache the digests as a start does; returns the SHA-256 of each file."""
    result = digests.compute_digests([f"file://{path}" for path in files], digests.load_cache(root))
    digests.update_cache(root, result)
    return [entry.sha256 for entry in result]


def test_files_that_are_unchanged_are_not_read_again(
    tmp_path: Path, files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MIN_UNCHANGED_S", -60)
    first = start(tmp_path, files)
    assert sorted(hashed) == sorted(path.name for path in files)
    assert first == [digests.hash_file(str(path)) for path in files]
    hashed.clear()
    assert start(tmp_path, files[::-1]) == first[::-1]
    assert hashed == []


def test_an_edit_that_keeps_size_and_time_is_seen(
    tmp_path: Path, files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MIN_UNCHANGED_S", -60)
    first = start(tmp_path, files)
    hashed.clear()
    before = files[7].stat()
    files[7].write_text("text,label\nROW 7,a\n")
    os.utime(files[7], ns=(before.st_atime_ns, before.st_mtime_ns))
    after = files[7].stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    second_result = start(tmp_path, files)
    assert hashed == ["7.csv"]
    assert [place for place in range(40) if first[place] != second_result[place]] == [7]


def test_a_file_of_this_moment_is_hashed_at_the_next_start_too(
    tmp_path: Path, files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MIN_UNCHANGED_S", 3600)
    assert start(tmp_path, files) == start(tmp_path, files)
    assert len(hashed) == 2 * len(files)
    assert not (tmp_path / digests.CACHE_FILE).exists()


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MIN_UNCHANGED_S", -60)
    full = digests.hash_file

    def late(uri: str) -> str:
        result = full(uri)
        if uri.endswith("/3.csv"):
            files[3].write_text("text,label\nrow 3,b\n")
        return result

    monkeypatch.setattr(digests, "hash_file", late)
    start(tmp_path, files)
    assert set(digests.load_cache(tmp_path)) == {f"file://{path}" for path in files} - {f"file://{files[3]}"}


def test_starts_on_other_files_keep_what_was_remembered(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MIN_UNCHANGED_S", -60)
    start(tmp_path, files[:20])
    start(tmp_path, files[20:])
    assert len(digests.load_cache(tmp_path)) == len(json.loads((tmp_path / digests.CACHE_FILE).read_text())) == 40
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [digests.CACHE_FILE]
    digests.clear_cache(tmp_path)
    digests.clear_cache(tmp_path)
    assert digests.load_cache(tmp_path) == {}
