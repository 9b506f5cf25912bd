"""Checkpoints that lie: whatever is done to their files, what is loaded is byte for byte what was saved, or older."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.format import (
    CHECKPOINT_FILES,
    CheckpointState,
    Snapshot,
    WrongRunError,
    checkpoint_path,
    find_latest,
    find_problem,
    list_steps,
    load_checkpoint,
    verify_or_quarantine,
    write_checkpoint,
)
from rtrain.config import OptimConfig
from rtrain.core import manifest
from rtrain.trainer import optimizers
from tests.unit.checkpoint.test_format import RUN, equal, make_network, names, saved, train

UPDATES = (1, 2, 3)
ALL = (*CHECKPOINT_FILES, manifest.FILE_NAME)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a run, each of other weights."""
    folder = tmp_path_factory.mktemp("whole")
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.01))
    for update in UPDATES:
        train(network, optimizer, 1)
        write_checkpoint(
            folder, Snapshot.capture(network, optimizer, CheckpointState(update, f"{update:02d}", 1, 0.5, RUN))
        )
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


def same(folder: Path, whole: Path, update: int) -> bool:
    first, second = (checkpoint_path(root, update) for root in (folder, whole))
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in CHECKPOINT_FILES)


def rewrite(path: Path, **fields: object) -> None:
    """Change state.json, and the manifest with it: as if it had been saved so."""
    (path / "state.json").write_text(json.dumps(json.loads((path / "state.json").read_text()) | fields))
    (path / manifest.FILE_NAME).unlink()
    manifest.write_manifest(path)


# ----------------------------------------------------------------------------------------------------- one by one


def test_an_older_copy_under_a_newer_name_is_refused(folder: Path, whole: Path) -> None:
    shutil.rmtree(checkpoint_path(folder, 3))
    shutil.copytree(checkpoint_path(folder, 1), checkpoint_path(folder, 3))
    assert manifest.find_damage(checkpoint_path(folder, 3), CHECKPOINT_FILES) is None
    assert find_problem(checkpoint_path(folder, 3), 3, RUN) == "it is of step 1"
    assert find_latest(folder, RUN) == 2
    assert same(folder, whole, 2)
    assert names(folder) == ["quarantine", "step-00000001", "step-00000002"]


def test_a_checkpoint_of_another_run_is_refused(folder: Path) -> None:
    """It may be the only one of a run whose config.yaml was changed: it stays where it is."""
    rewrite(checkpoint_path(folder, 3), run_id="another")
    with pytest.raises(WrongRunError):
        find_latest(folder, RUN)
    assert list_steps(folder) == [1, 2, 3]


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_manifest_must_record_every_file(folder: Path, name: str) -> None:
    path = checkpoint_path(folder, 3) / manifest.FILE_NAME
    document = json.loads(path.read_text())
    del document["files"][name]
    path.write_text(json.dumps(document))
    assert find_problem(path.parent, 3, RUN) == f"{manifest.FILE_NAME} does not record {name}"
    assert find_latest(folder, RUN) == 2


@pytest.mark.parametrize("name", ["optim.safetensors", manifest.FILE_NAME])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_file_that_cannot_be_read_now_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    bad, whole = checkpoint_path(folder, 3) / name, Path.open

    def failing(path: Path, *rest: Any, **options: Any) -> Any:
        if path == bad:
            raise OSError(number, os.strerror(number))
        return whole(path, *rest, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(manifest.UnreadableFileError) as told:
        find_latest(folder, RUN)
    assert told.value.exit_code == 75
    monkeypatch.undo()
    assert find_latest(folder, RUN) == 3
    assert not checkpoint_format.list_quarantined(folder)


@pytest.mark.parametrize("version", [3, 5])
def test_another_version_s_checkpoint_is_refused_by_name_and_left_where_it_is(folder: Path, version: int) -> None:
    path = checkpoint_path(folder, 3)
    rewrite(path, schema_version=version)
    with pytest.raises(checkpoint_format.UnsupportedVersionError):
        find_latest(folder, RUN)
    with pytest.raises(checkpoint_format.UnsupportedVersionError):
        load_checkpoint(path, make_network())
    assert list_steps(folder) == [1, 2, 3]


def test_a_save_replaces_a_damaged_checkpoint_of_its_name(folder: Path) -> None:
    (checkpoint_path(folder, 3) / "optim.safetensors").write_bytes(b"")
    saved(folder, 3)
    assert find_problem(checkpoint_path(folder, 3), 3, RUN) is None
    assert len(names(folder / "quarantine")) == 1


# ----------------------------------------------------------------------------------------------------- at random


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def flip(draw: random.Random, folder: Path) -> None:
    path = checkpoint_path(folder, draw.choice(UPDATES)) / draw.choice(ALL)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(draw: random.Random, folder: Path) -> None:
    path = checkpoint_path(folder, draw.choice(UPDATES)) / draw.choice(ALL)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def exchange_files(draw: random.Random, folder: Path) -> None:
    first, second = (checkpoint_path(folder, update) for update in draw.sample(UPDATES, 2))
    for name in draw.sample(ALL, draw.randint(1, len(ALL))):
        swap(first / name, second / name)


def exchange_folders(draw: random.Random, folder: Path) -> None:
    first, second = draw.sample(UPDATES, 2)
    swap(checkpoint_path(folder, first), checkpoint_path(folder, second))


def roll_back_files(draw: random.Random, folder: Path) -> None:
    older, newer = sorted(draw.sample(UPDATES, 2))
    for name in draw.sample(ALL, draw.randint(1, len(ALL))):
        shutil.copy(checkpoint_path(folder, older) / name, checkpoint_path(folder, newer) / name)


def roll_back_folder(draw: random.Random, folder: Path) -> None:
    older, newer = sorted(draw.sample(UPDATES, 2))
    shutil.rmtree(checkpoint_path(folder, newer))
    shutil.copytree(checkpoint_path(folder, older), checkpoint_path(folder, newer))


Harm = Callable[[random.Random, Path], None]
HARMS: list[Harm] = [flip, flip, cut, exchange_files, exchange_folders, roll_back_files, roll_back_folder]


def test_a_hundred_random_damages_and_no_silent_load(whole: Path, tmp_path: Path) -> None:
    loaded = {update: make_network(seed=9) for update in UPDATES}
    for update, network in loaded.items():
        load_checkpoint(checkpoint_path(whole, update), network)
    set_aside, chosen = 0, []
    for seed in range(100):
        draw, folder = random.Random(seed), Path(shutil.copytree(whole, tmp_path / str(seed)))
        harm = HARMS[seed % len(HARMS)]
        harm(draw, folder)
        newest = find_latest(folder, RUN)
        assert newest is not None, (seed, harm)  # no harm reaches all three
        assert same(folder, whole, newest), (seed, harm)
        network = make_network(seed=9)
        assert load_checkpoint(checkpoint_path(folder, newest), network).step == newest
        assert equal(network.state_dict(), loaded[newest].state_dict())
        for other in list_steps(folder):  # also those that a best checkpoint or a later start would ask for
            assert not verify_or_quarantine(folder, other, RUN) or same(folder, whole, other), (seed, harm)
        set_aside += (folder / "quarantine").is_dir()
        chosen.append(newest)
    assert set_aside >= 90  # some flips of a manifest change nothing that it says
    assert min(chosen.count(update) for update in UPDATES) >= 5
