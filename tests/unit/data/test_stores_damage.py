"""A token store that was changed after it was built is refused with the file's name and a fix."""

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
from rtrain.data.order import RowOrder
from rtrain.data.store import builder, store
from rtrain.data.store.store import SPLITS, Store
from rtrain.data.stream import StreamSpec
from rtrain.inference import artifact
from rtrain.runs import controller, prepare
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_artifact, make_encoder, make_store
from tests.unit.data.test_store import NAMES, make
from tests.unit.data.test_stream import through_arrow

INDEXES = tuple(f"index-{split}.arrow" for split in SPLITS)
ROWS = tuple(f"rows-{split}.arrow" for split in SPLITS)
SEEN = ("in-training-set-valid.arrow", "in-training-set-test.arrow")


@pytest.fixture
def token_store(tmp_path: Path) -> Store:
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
        opened.read_tokens(split, np.arange(opened.num_rows(split)))


# ------------------------------------------------------------------------------------------------------ before a start


@pytest.mark.parametrize("name", [*INDEXES, *NAMES])
def test_a_missing_or_cut_file_is_refused_by_its_size_alone(token_store: Store, name: str) -> None:
    token_store.check(size_only=True)
    path = token_store.folder / name
    data = path.read_bytes()
    for wrong in (data[:-1], b"", data + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(UserError, check=caused_by("damaged_store")):
            token_store.check(size_only=True)
    path.unlink()
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        token_store.check(size_only=True)


# ------------------------------------------------------------------------------------------------------ on first use


@pytest.mark.parametrize("name", [*INDEXES, *NAMES])
def test_a_byte_that_changed_anywhere_is_refused_before_a_row_is_read(token_store: Store, name: str) -> None:
    path = token_store.folder / name
    size = path.stat().st_size
    assert size > 200
    for place in (*range(0, size, 23), size - 1):
        flip(path, place)
        with pytest.raises(UserError, check=caused_by("damaged_store")):
            read_all(token_store.folder)
        flip(path, place)
    read_all(token_store.folder)


def test_only_what_is_used_is_read(token_store: Store) -> None:
    """However large the store, a start does not read it as a whole."""
    flip(token_store.folder / NAMES[1])
    flip(token_store.folder / "index-valid.arrow")
    opened = Store(token_store.folder)
    assert opened.read_tokens("train", np.array([0, 1])).ids.tolist() == [5, 6, 7, 8]
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        opened.read_tokens("train", np.array([0, 2]))


def test_a_file_that_is_cut_while_a_run_goes_on_is_refused_before_it_is_mapped(token_store: Store) -> None:
    """Reading beyond the end of a mapped file would kill the process without a word."""
    opened = Store(token_store.folder)
    opened.check(size_only=True)
    path = token_store.folder / NAMES[0]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        opened.read_tokens("train", np.array([0]))


# ------------------------------------------------------------------------------------------------------- the manifest


def test_a_byte_of_the_manifest_that_changed_is_refused_or_means_nothing(token_store: Store) -> None:
    """Its labels and numbers of rows are trained on as well."""
    path = token_store.folder / "manifest.json"
    places = range(0, path.stat().st_size, 3)
    codes: list[str | None] = []
    for place in places:
        flip(path, place)
        try:
            store = Store(token_store.folder).manifest
        except UserError as error:
            codes.append(error.code)
        else:
            assert store == token_store.manifest
        flip(path, place)
    assert len(codes) > 0.9 * len(places)  # the rest is white space
    assert set(codes) <= {"damaged_store", "other_version"}


@pytest.mark.parametrize(("field", "value"), [("labels", ["yes", "né"]), ("rows", {"train": 2, "valid": 1, "test": 0})])
def test_an_edited_manifest_is_refused(token_store: Store, field: str, value: object) -> None:
    path = token_store.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        Store(token_store.folder)


# -------------------------------------------------------------------------------------------------- the start of a run


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = write_rows(tmp_path / "rows.csv", labelled_rows(90))
    return config.load_config(
        "intent", {"data.path": str(path), "model.name": str(make_encoder(tmp_path / "encoder"))}
    ).recipe


def ensure(recipe: Recipe, root: Path) -> tuple[Store, bool]:
    return builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), Path(recipe.model.name), root)


@pytest.mark.parametrize("name", ["index-valid.arrow", "shards/000000-000000.arrow"])
def test_a_store_with_a_cut_file_is_not_reused_and_its_removal_is_all_it_needs(
    recipe: Recipe, tmp_path: Path, name: str
) -> None:
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    path = token_store.folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        ensure(recipe, tmp_path)
    shutil.rmtree(token_store.folder)
    second_result = make_store(recipe, Path(recipe.model.name), tmp_path)
    assert (second_result.folder, second_result.manifest) == (token_store.folder, token_store.manifest)
    assert ensure(recipe, tmp_path)[0].folder == token_store.folder


def test_a_store_without_manifest_is_refused_before_a_job_is_started(recipe: Recipe, tmp_path: Path) -> None:
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    (token_store.folder / "manifest.json").unlink()
    with pytest.raises(UserError, check=caused_by("unfinished_store")):
        ensure(recipe, tmp_path)
    assert [path.name for path in (tmp_path / ".tokens").iterdir()] == [token_store.folder.name]


def test_what_a_killed_job_left_is_removed_also_where_the_store_is_reused(recipe: Recipe, tmp_path: Path) -> None:
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    left = token_store.folder.with_name(f".{token_store.folder.name}.0123abcd")
    left.mkdir()
    os.utime(left, (0, 0))
    assert ensure(recipe, tmp_path)[1] is False
    assert list((tmp_path / ".tokens").iterdir()) == [token_store.folder]


def test_what_the_manifest_says_of_a_file_is_what_lies_there(recipe: Recipe, tmp_path: Path) -> None:
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    read = {str(path.relative_to(token_store.folder)) for path in token_store.folder.rglob("*.arrow")}
    assert set(token_store.manifest.files) == read == {*INDEXES, *ROWS, *SEEN, "shards/000000-000000.arrow"}
    assert token_store.manifest.schema_version == store.SCHEMA_VERSION == 5
    for name, entry in token_store.manifest.files.items():
        assert entry == manifest.compute_entry(token_store.folder / name)


# ----------------------------------------------------------------------------------------------------- during a run


@pytest.mark.parametrize("name", ["index-train.arrow", "shards/000000-000000.arrow"])
def test_a_stream_of_updates_ends_with_the_refusal_of_a_data_task(recipe: Recipe, tmp_path: Path, name: str) -> None:
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    share = StreamSpec(
        token_store.folder, RowOrder(token_store.manifest.digest, token_store.num_rows("train"), 20, 1, 0), 1, 0, 8
    )
    assert len(list(stream.verify_batches(stream.decode_tables(through_arrow(share, 0, 2, blocks=2)), share, 0))) == 2
    flip(token_store.folder / name)
    store.open_store.cache_clear()
    tables = through_arrow(share, 0, 2, blocks=2)  # no task raises: Ray would wrap the error
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        next(stream.decode_tables(tables))


def test_a_teacher_is_not_asked_about_a_changed_store(recipe: Recipe, tmp_path: Path) -> None:
    """Refused before the data tasks that would read it; this test has no Ray to start them."""
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    teacher = make_artifact(tmp_path / "teacher")
    name = "shards/000000-000000.arrow"
    flip(token_store.folder / name)
    with pytest.raises(UserError, check=caused_by("damaged_store")):
        teaching.ensure_answers(token_store, teacher, artifact.read_artifact(teacher))


@pytest.mark.ray
@pytest.mark.slow
def test_the_user_of_a_run_reads_which_file_was_changed_and_no_traceback(
    ray_session: Path, recipe: Recipe, tmp_path: Path
) -> None:
    """The shard is mapped by a data task for a train worker: the message comes through both of Ray's libraries."""
    token_store = make_store(recipe, Path(recipe.model.name), tmp_path)
    selected = config.load_config(
        "intent", {"data.path": recipe.data.path, "model.name": recipe.model.name, "train.precision": "fp32"}
    )
    prepared = prepare.prepare_run(selected, tmp_path / "run")
    assert prepared.store.folder == token_store.folder
    flip(token_store.folder / "shards/000000-000000.arrow")
    with pytest.raises(UserError):
        controller.fit(prepared)
    results = [event["kind"] for event in events.read_events(prepared.run.folder)]
    assert results == ["created", "tokens_reused", "labels", "texts", "machines", "started", "failed"]
    assert list(prepared.run.folder.glob("error-*")) == []
