"""Compiled graphs are kept by the artefact's version, few of them, and never where they cannot be."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rtrain.compress import quantize
from rtrain.core import env
from rtrain.inference.predictor import Predictor
from rtrain.models import compile_cache
from tests.support import quantizing
from tests.support.quantizing import complete
from tests.support.tiny import CORPUS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache" / "openvino"


def test_a_second_process_loads_what_the_first_compiled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete(quantizing.make(tmp_path, rows=40), tmp_path / "int8", calibration_rows=8)
    first = Predictor.load(folder)
    (cached,) = cache.iterdir()
    assert cached.name == first.artifact.version
    before = {path.name: path.stat().st_mtime_ns for path in cached.iterdir()}
    second = Predictor.load(folder)
    assert {path.name: path.stat().st_mtime_ns for path in cached.iterdir()} == before
    assert len(before) == 1
    monkeypatch.setenv(env.CACHE_ENV, "")
    for item in (second, Predictor.load(folder)):
        pairs = zip(first.logits(CORPUS), item.logits(CORPUS), strict=True)
        assert max(float(np.abs(left - right).max()) for left, right in pairs) <= 1e-5


def test_a_damaged_unpacked_graph_is_unpacked_again_and_none_where_there_is_no_room(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete(quantizing.make(tmp_path, rows=40), tmp_path / "int8", calibration_rows=8)
    plain = Predictor.load(folder).logits(CORPUS)
    quantize.compress_graph(folder)
    packed = Predictor.load(folder)
    cached = cache / packed.artifact.version
    graph = next(cached.glob("*.bin"))
    content = graph.read_bytes()
    for damaged in (b"", content[:-1]):  # as a machine leaves it that stops before the bytes are on its disk
        graph.write_bytes(damaged)
        for blob in cached.glob("*.blob"):
            blob.unlink()
        assert np.array_equal(np.stack(Predictor.load(folder).logits(CORPUS)), np.stack(plain))
        assert graph.read_bytes() == content
    for path in cached.iterdir():
        path.unlink()

    def full(source: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert np.array_equal(np.stack(Predictor.load(folder).logits(CORPUS)), np.stack(plain))
    assert list(cached.iterdir()) == []


def test_what_is_used_is_kept_however_old_it_is(cache: Path) -> None:
    for number in range(compile_cache.MAX_CACHED):
        actual = compile_cache.cache_folder(f"version{number}")
        assert actual is not None
        os.utime(actual, (number, number))
    assert compile_cache.cache_folder("version0") is not None  # loaded again
    compile_cache.cache_folder("another")
    assert {path.name for path in cache.iterdir()} == {
        "another",
        "version0",
        *(f"version{number}" for number in range(2, compile_cache.MAX_CACHED)),
    }


def test_nothing_is_kept_where_there_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for root in ("", str(tmp_path / "file")):
        monkeypatch.setenv(env.CACHE_ENV, root)
        assert compile_cache.cache_folder("abc") is None
    monkeypatch.setenv(env.CACHE_ENV, str(tmp_path / "cache"))
    assert compile_cache.cache_folder("") is None  # an artefact that is being made has no version yet
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
