"""Checkpoints and their manifest: whole or not at all, verified before use, readable without pickle."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.format import (
    CheckpointState,
    Snapshot,
    checkpoint_path,
    find_latest,
    list_steps,
    load_checkpoint,
    write_checkpoint,
)
from rtrain.config import OptimConfig
from rtrain.core import manifest
from rtrain.trainer import optimizers

RUN = "the run"
STATE = CheckpointState(step=12, ledger="ab" * 32, best_step=None, best_score=None, run_id=RUN)
FILES = ["MANIFEST.json", "model.safetensors", "optim.safetensors", "state.json"]


def make_network(seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


def train(network: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        inputs = torch.arange(6.0).reshape(2, 3) + number
        optimizer.zero_grad()
        network(inputs).square().sum().backward()
        optimizer.step()


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def saved(folder: Path, *updates: int) -> None:
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig())
    train(network, optimizer, 1)
    for update in updates:
        write_checkpoint(folder, Snapshot.capture(network, optimizer, CheckpointState(update, "00", None, None, RUN)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_state(path: Path, *parameters: str) -> None:
    """Take the optimizer state of these parameters out of a checkpoint, and write its manifest anew."""
    tensors = load_file(path / "optim.safetensors")
    kept = {key: value for key, value in tensors.items() if key.rsplit(":", 1)[0] not in parameters}
    save_file(kept, path / "optim.safetensors")
    (path / "MANIFEST.json").unlink()
    manifest.write_manifest(path)


# ------------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("lost", [["0.weight"], ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]])
def test_a_checkpoint_without_optimizer_state_is_refused(tmp_path: Path, lost: list[str]) -> None:
    """Its manifest is in order: it would load, and train on as another run."""
    saved(tmp_path, 1)
    path = checkpoint_path(tmp_path, 1)
    without_state(path, *lost)
    assert find_latest(tmp_path, RUN) == 1
    network = make_network()
    with pytest.raises(checkpoint_format.IncompleteCheckpointError):
        load_checkpoint(path, network, optimizers.build_optimizer(network, OptimConfig()))
    load_checkpoint(path, network)  # weights alone are wanted where a best checkpoint is exported


def test_a_parameter_that_never_had_a_gradient_resumes_without_state(tmp_path: Path) -> None:
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig())
    network.get_submodule("0")(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    path = write_checkpoint(tmp_path, Snapshot.capture(network, optimizer, STATE))
    other = make_network(seed=1)
    restored = optimizers.build_optimizer(other, OptimConfig())
    load_checkpoint(path, other, restored)
    assert len(restored.state) == len(optimizer.state) == 2


def test_weights_optimizer_and_state_come_back_exactly(tmp_path: Path) -> None:
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.01))
    train(network, optimizer, 3)
    state = CheckpointState(step=3, ledger="cd" * 32, best_step=2, best_score=0.1 + 0.2)
    path = write_checkpoint(tmp_path, Snapshot.capture(network, optimizer, state))

    other = make_network(seed=9)
    fresh = optimizers.build_optimizer(other, OptimConfig(lr=0.01))
    assert not equal(other.state_dict(), network.state_dict())
    assert load_checkpoint(path, other, fresh) == state
    assert equal(other.state_dict(), network.state_dict())
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert set(optimizer.state[one]) == {"step", "exp_avg", "exp_avg_sq"}
        assert equal(optimizer.state[one], fresh.state[two])
    train(network, optimizer, 4)
    train(other, fresh, 4)
    assert equal(other.state_dict(), network.state_dict())


def test_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    saved(tmp_path, 12)
    folder = tmp_path / "step-00000012"
    assert names(tmp_path) == [folder.name]  # no draft is left
    assert names(folder) == FILES
    parameters = {name for name, _ in make_network().named_parameters()}
    assert set(load_file(folder / "model.safetensors")) == parameters
    assert set(load_file(folder / "optim.safetensors")) == {
        f"{name}:{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert json.loads((folder / "state.json").read_text()) == {
        "step": 12,
        "ledger": "00",
        "best_step": None,
        "best_score": None,
        "run_id": RUN,
        "schema_version": 4,
        "scale": None,
        "best_loss": None,
    }


def test_tensors_that_share_memory_or_are_turned_are_saved(tmp_path: Path) -> None:
    network = torch.nn.Linear(3, 4)
    network.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
    assert not network.weight.is_contiguous()
    path = write_checkpoint(
        tmp_path, Snapshot.capture(network, optimizers.build_optimizer(network, OptimConfig()), STATE)
    )
    other = torch.nn.Linear(3, 4)
    load_checkpoint(path, other)
    assert torch.equal(other.weight, network.weight)


# -------------------------------------------------------------------------------------------------------- whole or not


def test_an_incomplete_folder_of_the_name_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    (tmp_path / "step-00000004" / "MANIFEST.json").unlink()
    (tmp_path / "step-00000004" / "stray").touch()
    assert list_steps(tmp_path) == []
    saved(tmp_path, 4)
    assert names(tmp_path / "step-00000004") == FILES


# ------------------------------------------------------------------------------------------------ selection, retention


def test_the_newest_is_selected_by_number(tmp_path: Path) -> None:
    saved(tmp_path, 9, 10, 100_000_000, 2)
    assert list_steps(tmp_path) == [2, 9, 10, 100_000_000]
    assert find_latest(tmp_path, RUN) == 100_000_000


# ------------------------------------------------------------------------------------------------------------ manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their manifest."""
    made = tmp_path / "folder"
    made.mkdir()
    (made / "a.bin").write_bytes(bytes(range(256)))
    (made / "b.txt").write_text("hello")
    manifest.write_manifest(made)
    return made


def test_the_manifest_holds_sizes_and_hashes(folder: Path) -> None:
    assert json.loads((folder / manifest.FILE_NAME).read_text()) == {
        "schema_version": 1,
        "files": {
            "a.bin": {"size": 256, "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880"},
            "b.txt": {"size": 5, "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"},
        },
    }
    assert manifest.find_damage(folder) is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda folder: flip(folder / "a.bin"), "a.bin does not match its SHA-256"),
        (lambda folder: (folder / "a.bin").write_bytes(b"short"), "a.bin has 5 bytes instead of 256"),
        (lambda folder: (folder / "b.txt").write_text("hello\n"), "b.txt has 6 bytes instead of 5"),
        (lambda folder: (folder / "b.txt").unlink(), "b.txt is missing"),
        (lambda folder: (folder / "a.bin").rename(folder / "c.bin"), "a.bin is missing"),
        (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json is missing or unreadable"),
        (lambda folder: (folder / "MANIFEST.json").write_text("[]"), "MANIFEST.json is missing or unreadable"),
        (
            lambda folder: (folder / "MANIFEST.json").write_text('{"files": 1}'),
            "MANIFEST.json is missing or unreadable",
        ),
        (lambda folder: shutil.rmtree(folder), "MANIFEST.json is missing or unreadable"),
    ],
    ids=["flipped bit", "truncated", "longer", "missing", "renamed", "no manifest", "a list", "no files", "no folder"],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], object], found: str) -> None:
    harm(folder)
    assert manifest.find_damage(folder) == found


def test_any_flipped_bit_of_the_manifest_itself_is_found(folder: Path) -> None:
    path = folder / manifest.FILE_NAME
    content = path.read_bytes()
    head = content.index(b'"files"')  # before it lies the version, which says nothing of the files
    for place in range(head, len(content)):
        for bit in (1, 4, 64):
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            assert manifest.find_damage(folder) is not None, (place, bit)
