"""Checkpoints beside the training: what is taken, who waits for whom, what a failed write says, and what is kept."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from rtrain.checkpoint.format import CheckpointState, checkpoint_path, find_latest, list_steps, load_checkpoint
from rtrain.checkpoint.remote_copy import RemoteCopy
from rtrain.checkpoint.saver import CheckpointSaver, CheckpointWriteError
from rtrain.config import OptimConfig
from rtrain.core import manifest
from rtrain.trainer import optimizers
from tests.unit.checkpoint.test_format import RUN, equal, make_network, names, train

Model = tuple[torch.nn.Module, torch.optim.Optimizer]


@pytest.fixture
def model() -> Model:
    """A network and its optimizer, which has begun."""
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.01))
    train(network, optimizer, 1)
    return network, optimizer


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until this is set."""
    ready, whole = threading.Event(), safetensors.torch.save_file

    def slow(*rest: Any) -> None:
        assert ready.wait(30)
        whole(*rest)

    monkeypatch.setattr(safetensors.torch, "save_file", slow)
    yield ready
    ready.set()


def state(update: int, best: int | None = None) -> CheckpointState:
    return CheckpointState(update, "00", best, None, RUN)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


# ------------------------------------------------------------------------------------------------------ the background


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, model: Model, disk: threading.Event) -> None:
    network, optimizer = model
    with CheckpointSaver(tmp_path, keep_checkpoints=2) as saver:
        saver.save(*model, state(1))
        weights = copied(network.state_dict())
        moments = [copied(optimizer.state[parameter]) for parameter in network.parameters()]
        train(network, optimizer, 2)
        assert not equal(network.state_dict(), weights)
        assert list_steps(tmp_path) == []
        disk.set()
        saver.flush()
    assert find_latest(tmp_path, RUN) == 1
    assert names(tmp_path) == ["step-00000001"]
    other = make_network(seed=9)
    restored = optimizers.build_optimizer(other, OptimConfig())
    assert load_checkpoint(checkpoint_path(tmp_path, 1), other, restored) == state(1)
    assert equal(other.state_dict(), weights)
    for parameter, known in zip(other.parameters(), moments, strict=True):
        assert equal(restored.state[parameter], known)


def test_a_save_waits_for_the_one_before_and_takes_its_copy_only_then(
    tmp_path: Path, model: Model, disk: threading.Event
) -> None:
    saver = CheckpointSaver(tmp_path, keep_checkpoints=2)
    saver.save(*model, state(1))
    second = threading.Thread(target=saver.save, args=(*model, state(2)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(7)
    disk.set()
    second.join(30)
    saver.flush()
    assert list_steps(tmp_path) == [1, 2]
    found = make_network()
    load_checkpoint(checkpoint_path(tmp_path, 2), found)
    assert all(bool((value == 7).all()) for value in found.parameters())
    load_checkpoint(checkpoint_path(tmp_path, 1), found)
    assert not any(bool((value == 7).all()) for value in found.parameters())


def test_what_was_taken_is_written_when_the_training_fails(tmp_path: Path, model: Model, disk: threading.Event) -> None:
    def training() -> None:
        with CheckpointSaver(tmp_path, keep_checkpoints=2) as saver:
            saver.save(*model, state(1))
            assert list_steps(tmp_path) == []
            raise KeyboardInterrupt

    threading.Timer(0.2, disk.set).start()
    with pytest.raises(KeyboardInterrupt):
        training()
    assert list_steps(tmp_path) == [1]


# --------------------------------------------------------------------------------------------------------------- errors


def full(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "end",
    [
        lambda saver, *rest: saver.save(*rest),
        lambda saver, *_: saver.flush(),
        lambda saver, *_: saver.__exit__(None, None, None),
    ],
    ids=["save", "flush", "leaving"],
)
def test_a_full_disk_is_told_at_the_next_save_or_at_the_end(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    saver = CheckpointSaver(tmp_path, keep_checkpoints=1)
    saver.save(*model, state(1))
    saver.flush()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    saver.save(*model, state(2))
    with pytest.raises(CheckpointWriteError):
        end(saver, *model, state(3))
    saver.flush()  # it is told once
    assert names(tmp_path) == ["step-00000001"]  # the draft is gone, and with it the space that it took
    assert find_latest(tmp_path, RUN) == 1


def test_a_failed_write_does_not_hide_what_ended_the_training(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training() -> None:
        with CheckpointSaver(tmp_path, keep_checkpoints=2) as saver:
            saver.save(*model, state(1))
            raise ZeroDivisionError

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ZeroDivisionError) as caught:
        training()
    [note] = caught.value.__notes__
    assert "No space left" in note


# ------------------------------------------------------------------------------------------------------------ retention


def save_all(saver: CheckpointSaver, model: Model, *states: CheckpointState) -> None:
    for each in states:
        saver.save(*model, each)
    saver.flush()


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (1, [None] * 5, [5]),
        (2, [None] * 5, [4, 5]),
        (2, [1, 1, 1, 1, 1], [1, 4, 5]),
        (2, [1, 1, 1, 1, 5], [1, 4, 5]),  # a resume from 4, should 5 be lost, would know 1 as its best
        (2, [1, 1, 1, 4, 4], [4, 5]),
        (9, [None] * 5, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_of_each_are_kept(
    tmp_path: Path, model: Model, keep: int, best: list[int | None], kept: list[int]
) -> None:
    (tmp_path / "quarantine").mkdir()
    states = [state(number, known) for number, known in enumerate(best, start=1)]
    save_all(CheckpointSaver(tmp_path, keep), model, *states)
    assert names(tmp_path) == ["quarantine", *(f"step-{update:08d}" for update in kept)]


def test_what_is_left_of_a_checkpoint_here_is_not_in_the_way_of_its_copy(tmp_path: Path, model: Model) -> None:
    """A run folder that was copied from elsewhere and cut off: the newest checkpoint has no manifest yet."""
    here, storage = tmp_path / "run" / "checkpoints", (tmp_path / "mounted").as_uri()
    copy, told = RemoteCopy(storage, "run", ["a"]), list[str]()
    copy.claim_ownership()
    save_all(CheckpointSaver(here, keep_checkpoints=2, remote_copy=copy), model, state(1), state(2))
    (here / "step-00000002" / manifest.FILE_NAME).unlink()
    (here / "step-00000002" / "optim.safetensors").unlink()
    again = CheckpointSaver(
        here,
        keep_checkpoints=2,
        remote_copy=RemoteCopy(storage, "run", ["a"]),
        log_event=lambda kind, **fields: told.append(kind),
    )
    assert (again.select_checkpoint(RUN), told) == (2, [])
    assert names(here) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path, model: Model, restarted: bool) -> None:
    saver = CheckpointSaver(tmp_path, keep_checkpoints=2)
    save_all(saver, model, state(1), state(2))
    flip(tmp_path / "step-00000002" / "optim.safetensors")
    save_all(CheckpointSaver(tmp_path, keep_checkpoints=2) if restarted else saver, model, state(3))
    assert list_steps(tmp_path) == [1, 3]
    [aside] = (tmp_path / "quarantine").iterdir()
    assert aside.name.startswith("step-00000002-")
