"""Checkpoints of a run: a folder each, written whole or not at all, verified before use. No pickle.

checkpoints/update-00000120/
    model.safetensors   optim.safetensors   state.json
    MANIFEST.json       size and SHA-256 of each file; written last
checkpoints/.update-*   drafts, and what is being deleted
checkpoints/damaged/    what did not verify, as it was found, and in REASON.txt why
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain.checkpoint.loss_scale import Scale
from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError
from rtrain.parallel import dtensor_utils

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 3
FILES = ("model.safetensors", "optim.safetensors", "state.json")
DAMAGED, REASON = "damaged", "REASON.txt"
STATELESS = "stateless"
"""Key of the optimizer file's note: parameters that had no optimizer state, since they never had a gradient."""


STEP = "step"
"""The kind of optimizer state that is one number, whatever the parameter's shape."""


class OtherWeights(UserError):
    """A checkpoint of a model with other weights than the one that is to take it up."""

    code = "other_model"


class Incomplete(UserError):
    """A checkpoint whose files are whole and which still lacks something that a resume needs."""

    code = "incomplete_checkpoint"


class OtherVersion(UserError):
    """A checkpoint that another version of rtrain wrote: it may be as good as ever, but this one cannot read it."""

    code = "other_version"


class OtherRun(UserError):
    """A checkpoint that is whole and of other settings than the run: to take it up would be wrong, to lose it too."""

    code = "other_run"

    def __init__(self, place: object):
        self.place = place
        super().__init__(
            f"{place} is of another run: its settings or its rows are not those of config.yaml. Put back the "
            "config.yaml that it was trained with, or name a new folder with --new; to go on without it, move it away."
        )

    def __reduce__(self) -> tuple[type["OtherRun"], tuple[object]]:
        return type(self), (self.place,)  # on the way back from a Ray worker


@dataclass(frozen=True)
class State:
    """Where a run stands after `update` updates, beside its weights and optimizer state."""

    update: int
    ledger: str
    """Hash chain over the rows of all updates so far."""
    best_update: int | None
    best_score: float | None
    run: str = ""
    """Identity of the run that this is a state of: no other run takes it up."""
    schema_version: int = SCHEMA_VERSION
    scale: Scale | None = None
    """Loss scale of the coming update, where the loss is scaled."""
    best_loss: float | None = None
    """Mean loss of the validation rows by the best weights; None where no row has one."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, in memory of its own: the model and the optimizer may go on."""

    model: "dict[str, torch.Tensor]"
    optimizer: "dict[str, torch.Tensor]"
    """The optimizer's state by parameter name and kind, `<name>:<kind>`: the optimizer's own numbers are not stable."""
    stateless: tuple[str, ...]
    state: State

    @classmethod
    def take(
        cls,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        state: State,
        over: "Snapshot | None" = None,
        gathered: "Gathered" = dict.items,
    ) -> "Snapshot":
        """Copy to the processor's memory: to that of `over`, an earlier one that nobody reads any more.

        `gathered` makes whole tensors of this worker's shares; where it gives none, on other workers than rank 0, the
        snapshot is empty.
        """
        weights = _copied(gathered(model.state_dict()), over.model if over else {})
        moments = _copied(gathered(moments_of(model, optimizer)), over.optimizer if over else {})
        having = {key.rpartition(":")[0] for key in moments}
        stateless = tuple(name for name, _ in model.named_parameters() if name not in having)
        return cls(weights, moments, stateless, state)


Gathered = Callable[[dict[str, "torch.Tensor"]], Iterable[tuple[str, "torch.Tensor"]]]


def moments_of(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> "dict[str, torch.Tensor]":
    """This worker's optimizer state; see `Snapshot.optimizer`."""
    return {
        f"{name}:{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _copied(
    tensors: "Iterable[tuple[str, torch.Tensor]]", over: "dict[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """New memory costs several times the copy: the kernel clears each of its pages first."""
    import torch

    found = {}
    for name, tensor in tensors:
        old = over.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            found[name] = old.copy_(tensor.detach())
        else:
            found[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return found


def save(folder: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer", state: State) -> Path:
    """Write a checkpoint under `folder`, and return when it is on the disk."""
    return write(folder, Snapshot.take(model, optimizer, state))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Put a checkpoint under `folder`; a crash at any moment leaves all of it, or a draft that `sweep` removes."""
    state = snapshot.state
    final = path_of(folder, state.update)
    if is_complete(final) and sound(folder, state.update, state.run):
        return final
    if not folder.is_dir():
        folder.mkdir(parents=True)
        atomic_write.sync(folder.parent)
    draft = _hidden(final)
    draft.mkdir()
    try:
        _save_tensors(draft / "model.safetensors", snapshot.model)
        _save_tensors(
            draft / "optim.safetensors", snapshot.optimizer, {STATELESS: json.dumps(list(snapshot.stateless))}
        )
        (draft / "state.json").write_text(json.dumps(asdict(state)))
        manifest.write(draft)
        discard(final)  # only ever an incomplete one: see above
        draft.rename(final)
        atomic_write.sync(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def _save_tensors(path: Path, tensors: "dict[str, torch.Tensor]", notes: dict[str, str] | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, notes)
    except SafetensorError as error:  # so it names a full disk and the like
        raise OSError(str(error)) from None


def load(path: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer | None" = None) -> State:
    """Put a checkpoint into `model` and `optimizer`, of which this worker may have a share.

    Raises `Incomplete` where it lacks some optimizer state, and `OtherWeights` where it is of another model.
    """
    import torch
    from safetensors import safe_open

    own = model.state_dict()
    with safe_open(path / "model.safetensors", "pt") as file, torch.no_grad():
        if other := set(own) ^ set(file.keys()):
            raise OtherWeights(
                f"{path} is of another model: {', '.join(sorted(other)[:3])} are in one of the two alone"
            )
        for name, value in own.items():  # one after another: no worker has to hold all of them
            if dtensor_utils.here(value):
                dtensor_utils.fill(value, file.get_tensor(name))
    if optimizer is not None:
        _restore_optimizer(path / "optim.safetensors", model, optimizer)
    return read_state(path)


def read_state(path: Path) -> State:
    document = json.loads((path / "state.json").read_text())
    if (version := document.pop("schema_version", None)) != SCHEMA_VERSION:
        raise OtherVersion(
            f"{path} was written by another version of rtrain (checkpoint format {version}; this one reads "
            f"{SCHEMA_VERSION}). Continue the run with that version, or start another run with --new."
        )
    scale = document.pop("scale")
    return State(**document, scale=None if scale is None else Scale(**scale))


def _restore_optimizer(path: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stateless = json.loads((file.metadata() or {}).get(STATELESS, "[]"))
        kinds: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - a file, not a dict
            name, _, kind = key.rpartition(":")
            kinds.setdefault(name, []).append(kind)
        for name, parameter in model.named_parameters():
            if not dtensor_utils.here(parameter):
                continue
            if found := {kind: file.get_tensor(f"{name}:{kind}") for kind in kinds.get(name, ())}:
                optimizer.state[parameter] = {
                    kind: dtensor_utils.like(value, parameter) if kind != STEP else value.to(parameter.device)
                    for kind, value in found.items()
                }
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
    found = [update_of(path.name) for path in folder.glob("update-*")] if folder.is_dir() else []
    return sorted(update for update in found if update is not None and is_complete(path_of(folder, update)))


def path_of(folder: Path, update: int) -> Path:
    return folder / f"update-{update:08d}"


def update_of(name: str) -> int | None:
    """The update that a checkpoint's folder is named for."""
    number = name.removeprefix("update-")
    return int(number) if number.isdecimal() else None


def select(folder: Path, run: str) -> int | None:
    """The newest checkpoint of `run` that verifies."""
    return next((update for update in reversed(updates(folder)) if sound(folder, update, run)), None)


def sound(folder: Path, update: int, run: str) -> bool:
    """Whether a checkpoint verifies; one that lies is set aside under `damaged/`, never loaded, never deleted.

    Raises `OtherVersion`, `OtherRun` or `manifest.Unreadable`: what this version cannot read, what belongs to another
    run and what cannot be read now is not damaged.
    """
    path = path_of(folder, update)
    if (wrong := flaw(path, update, run)) is None:
        return True
    if path.is_dir():
        aside = folder / DAMAGED / f"{path.name}-{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        (aside / REASON).write_text(f"{wrong}\n", encoding="utf-8")
    return False


def set_aside(folder: Path) -> dict[str, str]:
    """Names of the checkpoints that did not verify, and why."""
    return {path.parent.name: path.read_text().strip() for path in sorted((folder / DAMAGED).glob(f"*/{REASON}"))}


def flaw(path: Path, update: int, run: str) -> str | None:
    """Why a folder is not the checkpoint of `run` after `update` updates, or None. Every byte is compared. Raises as
    `sound` does."""
    if (wrong := manifest.damage(path, FILES)) is not None:
        return wrong
    state = read_state(path)
    if state.update != update:  # whole files under a wrong name: an older copy was put in a newer one's place
        return f"it is of update {state.update}"
    if state.run != run:
        raise OtherRun(path)
    return None


# --------------------------------------------------------------------------------------------------------- removal


def discard(path: Path) -> None:
    """Delete a checkpoint. Its name goes first: what a crash leaves of it is a draft, and never looks damaged."""
    if path.is_dir():
        shutil.rmtree(path.rename(_hidden(path)), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what crashes left: drafts, and the rest of deleted checkpoints. Only while nothing is being saved."""
    for draft in folder.glob(".update-*"):
        shutil.rmtree(draft, ignore_errors=True)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
