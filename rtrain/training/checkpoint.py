"""Checkpoints of a run: a folder each, written whole or not at all, verified before use. No pickle.

checkpoints/update-00000120/
    model.safetensors   optim.safetensors   state.json
    MANIFEST.json       size and SHA-256 of each file; written last
"""

import json
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain import manifest
from rtrain.errors import UserError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
STATELESS = "stateless"
"""Key of the optimizer file's note: parameters that had no optimizer state, since they never had a gradient."""


class Incomplete(UserError):
    """A checkpoint whose files are whole and which still lacks something that a resume needs."""


@dataclass(frozen=True)
class State:
    """Where a run stands after `update` updates, beside its weights and optimizer state."""

    update: int
    ledger: str
    """Hash chain over the rows of all updates so far."""
    best_update: int | None
    best_score: float | None
    schema_version: int = SCHEMA_VERSION


def save(folder: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", state: State) -> Path:
    """Write a checkpoint under `folder`; a crash at any moment leaves either all of it or an ignored hidden folder."""
    final = folder / f"update-{state.update:08d}"
    if is_complete(final):
        return final
    draft = folder / f".{final.name}.{uuid.uuid4().hex[:8]}"
    draft.mkdir(parents=True)
    _save_tensors(draft / "model.safetensors", model.state_dict())
    stateless = json.dumps([name for name, parameter in model.named_parameters() if parameter not in optimizer.state])
    _save_tensors(draft / "optim.safetensors", _flat_optimizer(model, optimizer), {STATELESS: stateless})
    (draft / "state.json").write_text(json.dumps(asdict(state)))
    manifest.write(draft)
    shutil.rmtree(final, ignore_errors=True)  # only ever an incomplete one: see above
    draft.rename(final)
    return final


def _save_tensors(path: Path, tensors: dict[str, "torch.Tensor"], notes: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path, notes)


def load(path: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> State:
    """Put a checkpoint into `model` and `optimizer`. Raises `Incomplete` where it lacks some optimizer state."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path / "model.safetensors"))
    if optimizer is not None:
        _restore_optimizer(path / "optim.safetensors", model, optimizer)
    return read_state(path)


def read_state(path: Path) -> State:
    return State(**json.loads((path / "state.json").read_text()))


def _flat_optimizer(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> dict[str, "torch.Tensor"]:
    """Optimizer state by parameter name: stable where the optimizer's own numbering is not."""
    return {
        f"{name}:{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore_optimizer(path: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - a file, not a dict
        stateless = json.loads((file.metadata() or {}).get(STATELESS, "[]"))
    for name, parameter in model.named_parameters():
        prefix = f"{name}:"
        found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if found:
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in found.items()}
        elif name not in stateless:
            # It would train on, as another run: AdamW would start its moments and its bias correction again.
            raise Incomplete(
                f"{path} has no optimizer state for {name}: resuming would not continue this run. Remove that "
                "checkpoint's folder to resume from an older one, or start another run with --new."
            )


# ------------------------------------------------------------------------------------------------------- selection


def is_complete(folder: Path) -> bool:
    return (folder / manifest.NAME).is_file()


def updates(folder: Path) -> list[int]:
    """Update numbers of the complete checkpoints, ascending."""
    found = folder.glob("update-*") if folder.is_dir() else ()
    return sorted(int(path.name.removeprefix("update-")) for path in found if is_complete(path))


def path_of(folder: Path, update: int) -> Path:
    return folder / f"update-{update:08d}"


def select(folder: Path) -> int | None:
    """The newest checkpoint that verifies."""
    return next((update for update in reversed(updates(folder)) if sound(folder, update)), None)


def sound(folder: Path, update: int) -> bool:
    """Whether a checkpoint verifies; a damaged one is set aside under `damaged/`, never loaded, never deleted."""
    path = path_of(folder, update)
    if manifest.damage(path) is None:
        return True
    if path.is_dir():
        aside = folder / "damaged"
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"{path.name}-{uuid.uuid4().hex[:8]}")
    return False


def retain(folder: Path, keep: Iterable[int | None]) -> None:
    """Delete all complete checkpoints but those of the updates to `keep`."""
    wanted = set(keep)
    for update in updates(folder):
        if update not in wanted:
            shutil.rmtree(path_of(folder, update))
