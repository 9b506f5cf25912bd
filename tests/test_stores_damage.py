"""A token store that was changed after it was made is refused: with the file's name, and with what to do."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rtrain import config
from rtrain.compress import teacher as teaching
from rtrain.config import Recipe
from rtrain.core import events, manifest
from rtrain.core.errors import UserError
from rtrain.data import row_reader, stream
from rtrain.data.order import Order
from rtrain.data.store import builder, store
from rtrain.data.store.store import SPLITS, Store
from rtrain.data.stream import Share
from rtrain.inference import artifact
from rtrain.runs import controller, prepare
from tests.causes import caused_by
from tests.conftest import labelled_rows, write_rows
from tests.test_data_ingest import through_arrow
from tests.test_stores_store import NAMES, make
from tests.tiny import make_artifact, make_encoder, make_store

INDEXES = tuple(f"index-{split}.arrow" for split in SPLITS)
ROWS = tuple(f"rows-{split}.arrow" for split in SPLITS)
SEEN = ("seen-valid.arrow", "seen-test.arrow")


@pytest.fixture
def made(tmp_path: Path) -> Store:
    return make(tmp_path / "abc")


def flip(path: Path, place: int = -1) -> None:
    """Change one byte; the size stays."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def read_all(folder: Path) -> None:
    """Open the store as a new process does, and read every row of it."""
    opened = Store(folder)
    for split in SPLITS:
        opened.read(split, np.arange(opened.rows(split)))


# ------------------------------------------------------------------------------------------------------ before a start


@pytest.mark.parametrize("name", [*INDEXES, *NAMES])
def test_a_missing_or_cut_file_is_refused_by_its_size_alone(made: Store, name: str) -> None:
    made.check(size_only=True)
    path = made.folder / name
    data = path.read_bytes()
    for wrong in (data[:-1], b"", data + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(UserError, check=caused_by("damaged_store")):
            made.check(size_only=True)
    path.unlink()
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        made.check(size_only=True)


# ------------------------------------------------------------------------------------------------------ on first use


@pytest.mark.parametrize("name", [*INDEXES, *NAMES])
def test_a_byte_that_changed_anywhere_is_refused_before_a_row_is_read(made: Store, name: str) -> None:
    path = made.folder / name
    size = path.stat().st_size
    assert size > 200
    for place in range(size):
        flip(path, place)
        with pytest.raises(UserError, check=caused_by("damaged_store")):
            read_all(made.folder)
        flip(path, place)
    read_all(made.folder)


def test_only_what_is_used_is_read(made: Store) -> None:
    """However large the store, a start does not read it as a whole."""
    flip(made.folder / NAMES[1])
    flip(made.folder / "index-valid.arrow")
    opened = Store(made.folder)
    assert opened.read("train", np.array([0, 1])).ids.tolist() == [5, 6, 7, 8]
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        opened.read("train", np.array([0, 2]))


def test_a_file_that_is_cut_while_a_run_goes_on_is_refused_before_it_is_mapped(made: Store) -> None:
    """Reading beyond the end of a mapped file would kill the process without a word."""
    opened = Store(made.folder)
    opened.check(size_only=True)
    path = made.folder / NAMES[0]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        opened.read("train", np.array([0]))


# ------------------------------------------------------------------------------------------------------- the manifest


def test_a_byte_of_the_manifest_that_changed_is_refused_or_means_nothing(made: Store) -> None:
    """Its labels and numbers of rows are trained on as well."""
    path = made.folder / "manifest.json"
    size, refused = path.stat().st_size, 0
    said: set[str] = set()
    for place in range(size):
        flip(path, place)
        try:
            found = Store(made.folder).manifest
        except UserError as error:
            said.add(str(error).partition(": ")[0])
            refused += 1
        else:
            assert found == made.manifest
        flip(path, place)
    assert refused > 0.9 * size  # the rest is white space
    assert said == {
        f"{path} is not readable",
        f"{path} does not match its SHA-256",
        f"{made.folder} is of another version of rtrain; remove the folder and train again",
    }


@pytest.mark.parametrize(("field", "value"), [("labels", ["yes", "né"]), ("rows", {"train": 2, "valid": 1, "test": 0})])
def test_an_edited_manifest_is_refused(made: Store, field: str, value: object) -> None:
    path = made.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        Store(made.folder)


# -------------------------------------------------------------------------------------------------- the start of a run


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = write_rows(tmp_path / "rows.csv", labelled_rows(90))
    return config.load("intent", {"data.path": str(path), "model.name": str(make_encoder(tmp_path / "encoder"))}).recipe


def ensure(recipe: Recipe, root: Path) -> tuple[Store, bool]:
    return builder.ensure(recipe, row_reader.inspect(recipe.data), Path(recipe.model.name), root)


@pytest.mark.parametrize("name", ["index-valid.arrow", "shards/000000-000000.arrow"])
def test_a_store_with_a_cut_file_is_not_reused_and_its_removal_is_all_it_needs(
    recipe: Recipe, tmp_path: Path, name: str
) -> None:
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    path = made.folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        ensure(recipe, tmp_path)
    shutil.rmtree(made.folder)
    again = make_store(recipe, Path(recipe.model.name), tmp_path)
    assert (again.folder, again.manifest) == (made.folder, made.manifest)
    assert ensure(recipe, tmp_path)[0].folder == made.folder


def test_a_store_without_manifest_is_refused_before_a_job_is_started(recipe: Recipe, tmp_path: Path) -> None:
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    (made.folder / "manifest.json").unlink()
    with pytest.raises(UserError, check=caused_by("unfinished_store")):
        ensure(recipe, tmp_path)
    assert [path.name for path in (tmp_path / ".tokens").iterdir()] == [made.folder.name]


def test_what_a_killed_job_left_is_removed_also_where_the_store_is_reused(recipe: Recipe, tmp_path: Path) -> None:
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    left = made.folder.with_name(f".{made.folder.name}.0123abcd")
    left.mkdir()
    os.utime(left, (0, 0))
    assert ensure(recipe, tmp_path)[1] is False
    assert list((tmp_path / ".tokens").iterdir()) == [made.folder]


def test_what_the_manifest_says_of_a_file_is_what_lies_there(recipe: Recipe, tmp_path: Path) -> None:
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    read = {str(path.relative_to(made.folder)) for path in made.folder.rglob("*.arrow")}
    assert set(made.manifest.files) == read == {*INDEXES, *ROWS, *SEEN, "shards/000000-000000.arrow"}
    assert made.manifest.schema_version == store.SCHEMA_VERSION == 4
    for name, entry in made.manifest.files.items():
        assert entry == manifest.entry(made.folder / name)


# ----------------------------------------------------------------------------------------------------- during a run


@pytest.mark.parametrize("name", ["index-train.arrow", "shards/000000-000000.arrow"])
def test_a_stream_of_updates_ends_with_the_refusal_of_a_data_task(recipe: Recipe, tmp_path: Path, name: str) -> None:
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    share = Share(made.folder, Order(made.manifest.digest, made.rows("train"), 20, 1, 0), 1, 0, 8)
    assert len(list(stream.verified(stream.decoded(through_arrow(share, 0, 2, blocks=2)), share, 0))) == 2
    flip(made.folder / name)
    store.open_store.cache_clear()
    tables = through_arrow(share, 0, 2, blocks=2)  # none raises: what a task raises, Ray hides in an error of its own
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        next(stream.decoded(tables))


def test_a_teacher_is_not_asked_about_a_changed_store(recipe: Recipe, tmp_path: Path) -> None:
    """Refused before the data tasks that would read it; this test has no Ray to start them."""
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    teacher = make_artifact(tmp_path / "teacher")
    name = "shards/000000-000000.arrow"
    flip(made.folder / name)
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        teaching.ensure_answers(made, teacher, artifact.read(teacher))


@pytest.mark.ray
@pytest.mark.slow
def test_the_user_of_a_run_reads_which_file_was_changed_and_no_traceback(
    ray_session: Path, recipe: Recipe, tmp_path: Path
) -> None:
    """The shard is mapped by a data task for a train worker: the message comes through both of Ray's libraries."""
    made = make_store(recipe, Path(recipe.model.name), tmp_path)
    chosen = config.load(
        "intent", {"data.path": recipe.data.path, "model.name": recipe.model.name, "train.precision": "fp32"}
    )
    prepared = prepare.prepare(chosen, tmp_path / "run")
    assert prepared.store.folder == made.folder
    flip(made.folder / "shards/000000-000000.arrow")
    with pytest.raises(UserError):
        controller.fit(prepared)
    said = [event["kind"] for event in events.read(prepared.run.folder)]
    assert said == ["created", "tokens_reused", "labels", "machines", "started", "failed"]
    assert list(prepared.run.folder.glob("error-*")) == []
