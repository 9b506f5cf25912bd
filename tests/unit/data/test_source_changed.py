"""A run is resumed on the rows that it was started with, or refused with the name of the changed file; without Ray."""

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.cluster import capacity
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import ConfigError, UserError
from rtrain.data import order, row_reader, sources
from rtrain.data.store import builder, shards
from rtrain.runs import prepare, run_folders
from rtrain.tasks.encode import load_tokenizer
from tests.conftest import Row, labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_encoder

ROWS = labelled_rows(120)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The token jobs of a test, which run without Ray: the tasks one after another, and a cluster of four CPUs."""
    ran: list[Path] = []

    def run(job: shards.TokenizeJob, source: row_reader.DataSource) -> list[dict[str, Any]]:
        ran.append(job.folder)
        return [
            row
            for file in shards.plan_tasks(source)
            for part in shards.split_task(file, job.recipe)
            for row in shards.write_shards(part, job)
        ]

    monkeypatch.setattr(builder, "run_tasks", run)
    monkeypatch.setattr(capacity, "live_nodes", lambda: [capacity.NodeSpec({"CPU": 4.0})])
    monkeypatch.setattr(capacity, "load_autoscaler_config", lambda: None)
    return ran


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    """Three files of training rows in a folder, one of test rows beside it, an encoder."""
    (tmp_path / "parts").mkdir()
    for number in range(3):
        write_rows(tmp_path / "parts" / f"{number}.csv", ROWS[number * 30 : (number + 1) * 30])
    write_rows(tmp_path / "test.csv", ROWS[90:])
    make_encoder(tmp_path / "encoder")
    return tmp_path


def settings(ground: Path, **overrides: Any) -> Config:
    paths = {"data.path": ground / "parts", "data.test": ground / "test.csv", "model.name": ground / "encoder"}
    return config.load_config("intent", {**{name: str(path) for name, path in paths.items()}, **overrides})


def start(ground: Path, reuse: run_folders.Reuse = "refuse") -> prepare.PreparedRun:
    return prepare.prepare_run(settings(ground), ground / "runs" / "run", reuse)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(ground: Path, jobs: list[Path]) -> list[str]:
    """Messages of a resume about the files, after checks that nothing was written and no row was tokenized."""
    before, ran = contents(ground / "runs"), len(jobs)
    with pytest.raises(UserError) as caught:
        start(ground, "resume")
    assert contents(ground / "runs") == before
    assert len(jobs) == ran
    first, *files, last = str(caught.value).splitlines()
    assert first == f"--resume: {ground / 'runs' / 'run'} was started on other rows:"
    assert last == "Restore these files, or start another run with --new."
    return [line.removeprefix("  ") for line in files]


def test_a_run_is_resumed_on_its_store(ground: Path, jobs: list[Path]) -> None:
    first = start(ground)
    second_result = start(ground, "resume")
    assert second_result.store.folder == first.store.folder
    assert len(jobs) == 1
    kinds = [event["kind"] for event in events.read_events(first.run.folder)]
    assert kinds == ["created", "tokenized", "labels", "texts", "tokens_reused", "labels", "texts"]


def test_a_file_that_was_edited_is_named(ground: Path, jobs: list[Path]) -> None:
    first = start(ground)
    path = ground / "parts" / "1.csv"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"please", b"plaese", 1))
    assert refused(ground, jobs) == [f"{path} was changed"]
    path.write_bytes(data)  # the first way out
    assert start(ground, "resume").store.folder == first.store.folder


def test_files_that_came_and_went_are_named(ground: Path, jobs: list[Path]) -> None:
    start(ground)
    (ground / "parts" / "0.csv").unlink()
    write_rows(ground / "parts" / "9.csv", ROWS[:5])
    write_rows(ground / "test.csv", ROWS[95:])
    assert refused(ground, jobs) == [
        f"{ground / 'test.csv'} was changed",
        f"{ground / 'parts' / '0.csv'} was removed",
        f"{ground / 'parts' / '9.csv'} was added",
    ]


def test_a_store_that_was_removed_is_made_again(ground: Path, jobs: list[Path]) -> None:
    first = start(ground)
    before = contents(first.store.folder)
    shutil.rmtree(first.store.folder)
    second_result = start(ground, "resume")
    assert len(jobs) == 2
    assert second_result.store.folder == first.store.folder
    assert contents(second_result.store.folder) == before


def test_a_resume_may_name_the_new_place_of_the_same_rows(ground: Path) -> None:
    start(ground)
    (ground / "parts").rename(ground / "moved")
    with pytest.raises(ConfigError):
        start(ground, "resume")
    shifted = settings(ground, **{"data.path": str(ground / "moved"), "data.max_bad_rows": 0.5})
    resumed = prepare.prepare_run(shifted, ground / "runs" / "run", "resume")
    assert resumed.config.recipe.data.path == str(ground / "moved")


def test_the_store_and_the_run_say_what_they_are_made_from(ground: Path) -> None:
    store = start(ground)
    paths = {"train": sorted((ground / "parts").iterdir()), "test": [ground / "test.csv"]}
    expected = {role: {str(path): sources.hash_file(str(path)) for path in match} for role, match in paths.items()}
    tokenizer = sources.hash_tokenizer(ground / "encoder")
    expected["tokenizer"] = {f"tokenizer.json of {ground / 'encoder'}": tokenizer}
    assert store.store.manifest.sources == expected
    assert events.read_events(store.run.folder)[0]["origin"] == expected


# ------------------------------------------------------------------------------------------------ the order of the rows


def test_what_checkpoints_are_known_by_has_the_order_s_version_where_there_are_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_order = order.RowOrder("digest", 262_144, 64, epochs=2, seed=7)
    assert row_order.planned_digest == "dfc2f151a4266ef6"
    monkeypatch.setattr(order, "SHUFFLE_WINDOW_ROWS", 262_143)
    assert row_order.planned_digest == "d766ddfaea3d2d1d"


def test_a_digest_that_is_wrong_is_forgotten_by_the_start_that_finds_out(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_UNCHANGED_S", -60)
    shutil.rmtree(start(ground).store.folder)
    memory = ground / "runs" / sources.CACHE_FILE
    expected = json.loads(memory.read_text())
    expected[f"file://{ground / 'test.csv'}"][1] = "0" * 64
    memory.write_text(json.dumps(expected))
    with pytest.raises(UserError, check=caused_by("changed_files")):
        start(ground, "new")
    assert sum(start(ground, "new").store.manifest.rows.values()) == 120


# ------------------------------------------------------------------------- between a file's digest and its rows


def rewritten(path: Path, before: bytes, after: bytes) -> None:
    """Other bytes of the same size, under the same name, of the same age."""
    assert before != after
    assert len(before) == len(after)
    result = path.stat()
    path.write_bytes(after)
    os.utime(path, ns=(result.st_atime_ns, result.st_mtime_ns))


def at_the_job(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Have something done once, after the files were hashed and before their rows are read."""
    run, changes = builder.run_tasks, [change]

    def late(job: shards.TokenizeJob, source: row_reader.DataSource) -> list[dict[str, Any]]:
        if changes:
            changes.pop()()
        return run(job, source)

    monkeypatch.setattr(builder, "run_tasks", late)


def as_format(path: Path, rows: list[Row]) -> bytes:
    """The rows in the format of the file's name; of equally many bytes where the rows are."""
    texts, labels = [text for text, _ in rows], [label for _, label in rows]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"text": texts, "label": labels}), path, compression="none")
    elif path.suffix == ".gz":
        content = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
        path.write_bytes(gzip.compress(content.encode(), compresslevel=0, mtime=0))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    else:
        write_rows(path, rows)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.jsonl", "rows.parquet"])
def test_rows_of_a_file_that_changed_since_it_was_hashed_are_not_stored(
    ground: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = ground / name
    after = as_format(path, [(text.replace("please help", "never mind "), label) for text, label in ROWS[:60]])
    before = as_format(path, ROWS[:60])
    at_the_job(monkeypatch, lambda: rewritten(path, before, after))
    selected = settings(ground, **{"data.path": str(path)})
    with pytest.raises(UserError, check=caused_by("changed_files")) as caught:
        prepare.prepare_run(selected, ground / "runs" / "run")
    assert str(path) in str(caught.value)
    assert str(ground / "test.csv") not in str(caught.value)
    assert not list((ground / "runs" / ".tokens").iterdir())
    store = prepare.prepare_run(selected, ground / "runs" / "run")
    assert store.store.manifest.sources["train"] == {str(path): hashlib.sha256(after).hexdigest()}
    tokenizer = load_tokenizer(ground / "encoder", 64)
    ids = {tuple(tokenizer.encode(text).ids) for text, _ in ROWS[:60]}
    results = {
        tuple(store.store.read_tokens("train", np.array([row])).ids.tolist())
        for row in range(store.store.num_rows("train"))
    }
    assert len(results) > 30
    assert not results & ids


def test_a_file_that_is_cut_off_while_it_is_read_is_named(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ground / "rows.csv.gz"
    full = as_format(path, ROWS[:60])
    at_the_job(monkeypatch, lambda: os.truncate(path, len(full) // 2))
    with pytest.raises(UserError, check=caused_by("changed_files")):
        prepare.prepare_run(settings(ground, **{"data.path": str(path)}), ground / "runs" / "run")


def test_what_cannot_be_read_of_a_file_that_is_as_it_was_is_told_as_it_is(ground: Path) -> None:
    path = ground / "rows.csv.gz"
    full = as_format(path, ROWS[:60])
    path.write_bytes(full[:-12])
    with pytest.raises(UserError, check=caused_by("damaged_file")):
        prepare.prepare_run(settings(ground, **{"data.path": str(path)}), ground / "runs" / "run")
