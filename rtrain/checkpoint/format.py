"""Checkpoints of a run: one folder each, written atomically and verified before use. No pickle.

checkpoints/step-00000120/
    model.safetensors   optim.safetensors   state.json
    MANIFEST.json       size and SHA-256 of each file; written last
checkpoints/.step-*       drafts, and checkpoints that are being deleted
checkpoints/quarantine/   checkpoints that did not verify, unchanged, with the reason in REASON.txt
"""

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError
from rtrain.parallel import dtensor_utils

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 4
CHECKPOINT_FILES = ("model.safetensors", "optim.safetensors", "state.json")
QUARANTINE_FOLDER, REASON_FILE = "quarantine", "REASON.txt"
STATELESS_KEY = "stateless"
"""Metadata key of the optimizer file: parameters without optimizer state, since they never had a gradient."""
STEP_STATE = "step"
"""The kind of optimizer state that is a scalar, whatever the parameter's shape."""


class WrongModelError(UserError):
    """A checkpoint of a model with other weights."""

    code = "other_model"


class IncompleteCheckpointError(UserError):
    """A checkpoint with intact files that lacks state for a resume."""

    code = "incomplete_checkpoint"


class UnsupportedVersionError(UserError):
    """A checkpoint of another version of rtrain: possibly intact, but unreadable for this version."""

    code = "other_version"


class WrongRunError(UserError):
    """An intact checkpoint of other settings than the run: neither to load nor to delete."""

    code = "other_run"

    def __init__(self, location: object):
        self.location = location
        super().__init__(
            f"{location} belongs to another run: its settings or rows differ from config.yaml. Restore the config.yaml "
            "of its training, or name a new folder with --new; to continue without it, move it away."
        )

    def __reduce__(self) -> tuple[type["WrongRunError"], tuple[object]]:
        return type(self), (self.location,)  # for pickling, from a Ray worker


INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**16, 2.0**-10, 2.0**24
GROWTH_INTERVAL = 2000
"""Finite gradients in a row after which the scale is doubled."""
MAX_CONSECUTIVE_OVERFLOWS = 20
"""Non-finite gradients in a row after which the cause is not the scale."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale of the next step; a function of the steps before it, equal on every worker. It keeps small
    gradients of fp16 from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).

    The loss is multiplied by the scale and the gradient divided by it. A non-finite gradient is discarded and the scale
    is halved; after many finite gradients in a row the scale is doubled. Scales are powers of two, so scaling rounds
    nothing. torch.amp.GradScaler has the same rules (a test compares the two). It is not used, since it checks the
    gradients of one worker's parameters and keeps its state in tensors: here the norm of the full gradient decides.
    """

    value: float = INITIAL_SCALE
    finite_steps: int = 0
    """Finite gradients in a row since the scale last changed."""
    overflow_steps: int = 0
    """Non-finite gradients in a row."""

    def next_scale(self, *, is_finite: bool) -> "LossScale":
        """Return the scale after a gradient that was finite or not."""
        if not is_finite:
            return LossScale(self.value / 2, 0, self.overflow_steps + 1)
        if self.finite_steps + 1 < GROWTH_INTERVAL:
            return replace(self, finite_steps=self.finite_steps + 1, overflow_steps=0)
        return LossScale(min(2 * self.value, MAX_SCALE))

    @property
    def is_exhausted(self) -> bool:
        """Whether a smaller scale would not help."""
        return self.overflow_steps >= MAX_CONSECUTIVE_OVERFLOWS or self.value < MIN_SCALE


def initial_scale(precision: str) -> LossScale | None:
    """Return the first scale of a run in this precision; None where the loss is not scaled."""
    return LossScale() if precision == "fp16" else None


@dataclass(frozen=True)
class CheckpointState:
    """The state of a run after `step` steps, in addition to weights and optimizer state."""

    step: int
    ledger: str
    """Hash chain over the rows of all steps so far."""
    best_step: int | None
    best_score: float | None
    run_id: str = ""
    """Identity of the run; no other run loads this checkpoint."""
    schema_version: int = SCHEMA_VERSION
    scale: LossScale | None = None
    """Loss scale of the next step, where the loss is scaled."""
    best_loss: float | None = None
    """Mean validation loss of the best weights; None where no row has a loss."""
    best_evaluations: tuple[tuple[int, float, float | None], ...] = ()
    """(step, score, loss) of the `train.keep_best` best evaluations, the best first; empty where one is kept."""

    @property
    def best_steps(self) -> set[int]:
        """Steps of the checkpoints that the end of the run may need."""
        steps = {entry[0] for entry in self.best_evaluations}
        return steps if self.best_step is None else steps | {self.best_step}


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state in separate memory: model and optimizer may change meanwhile."""

    model: "dict[str, torch.Tensor]"
    optimizer: "dict[str, torch.Tensor]"
    """The optimizer's state by parameter name and kind, `<name>:<kind>`: the optimizer's own indices are not stable."""
    stateless_names: tuple[str, ...]
    state: CheckpointState

    @classmethod
    def capture(
        cls,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        state: CheckpointState,
        buffers: "Snapshot | None" = None,
        gather: "GatherTensors" = dict.items,
    ) -> "Snapshot":
        """Copy to CPU memory, into the tensors of `buffers`, an earlier snapshot that is no longer read.

        `gather` yields full tensors from this worker's shards; on other ranks than 0 it yields none, and the snapshot
        is empty.
        """
        weights = _copy_to_cpu(gather(model.state_dict()), buffers.model if buffers else {})
        moments = _copy_to_cpu(gather(collect_optimizer_state(model, optimizer)), buffers.optimizer if buffers else {})
        names_with_state = {key.rpartition(":")[0] for key in moments}
        stateless_names = tuple(name for name, _ in model.named_parameters() if name not in names_with_state)
        return cls(weights, moments, stateless_names, state)


GatherTensors = Callable[[dict[str, "torch.Tensor"]], Iterable[tuple[str, "torch.Tensor"]]]


def collect_optimizer_state(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> "dict[str, torch.Tensor]":
    """Return this worker's optimizer state; see `Snapshot.optimizer`."""
    return {
        f"{name}:{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _copy_to_cpu(
    tensors: "Iterable[tuple[str, torch.Tensor]]", buffers: "dict[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """Copy into `buffers` where shapes match: new memory costs several times the copy, since the kernel clears its
    pages."""
    import torch

    copies = {}
    for name, tensor in tensors:
        buffer = buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            copies[name] = buffer.copy_(tensor.detach())
        else:
            copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint under `folder`; a crash at any moment leaves all of it, or a draft for `remove_drafts`."""
    state = snapshot.state
    final_path = checkpoint_path(folder, state.step)
    if is_complete(final_path) and verify_or_quarantine(folder, state.step, state.run_id):
        return final_path
    if not folder.is_dir():
        folder.mkdir(parents=True)
        atomic_write.sync(folder.parent)
    draft = _draft_path(final_path)
    draft.mkdir()
    try:
        _save_tensors(draft / "model.safetensors", snapshot.model)
        metadata = {STATELESS_KEY: json.dumps(list(snapshot.stateless_names))}
        _save_tensors(draft / "optim.safetensors", snapshot.optimizer, metadata)
        document = asdict(state)
        if not state.best_evaluations:
            del document["best_evaluations"]
        (draft / "state.json").write_text(json.dumps(document))
        manifest.write_manifest(draft)
        delete_checkpoint(final_path)  # only an incomplete one: see above
        draft.rename(final_path)
        atomic_write.sync(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final_path


def _save_tensors(path: Path, tensors: "dict[str, torch.Tensor]", metadata: dict[str, str] | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # safetensors wraps a full disk and similar errors
        raise OSError(str(error)) from None


def load_checkpoint(
    path: Path,
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer | None" = None,
    average_with: Sequence[Path] = (),
) -> CheckpointState:
    """Load a checkpoint into `model` and `optimizer`, which may be sharded. `average_with`: checkpoints whose weights
    are averaged with its weights.

    Raises `IncompleteCheckpointError` for missing optimizer state and `WrongModelError` for another model.
    """
    _load_mean_weights([path, *average_with], model)
    if optimizer is not None:
        _restore_optimizer(path / "optim.safetensors", model, optimizer)
    return read_state(path)


def _load_mean_weights(paths: Sequence[Path], model: "torch.nn.Module") -> None:
    """Load the mean of the weights of checkpoints, added in float64; integers are those of the first."""
    import torch
    from safetensors import safe_open

    model_state = model.state_dict()
    with contextlib.ExitStack() as stack, torch.no_grad():
        files = [stack.enter_context(safe_open(path / "model.safetensors", "pt")) for path in paths]
        for path, file in zip(paths, files, strict=True):
            if mismatched_names := set(model_state) ^ set(file.keys()):
                raise WrongModelError(
                    f"{path} is of another model: only one of the two has {', '.join(sorted(mismatched_names)[:3])}"
                )
        for name, value in model_state.items():  # one by one: no worker holds all of them
            if dtensor_utils.is_materialized(value):
                tensor = files[0].get_tensor(name)
                if len(files) > 1 and tensor.is_floating_point():
                    total = sum((file.get_tensor(name).double() for file in files[1:]), tensor.double())
                    tensor = (total / len(files)).to(tensor.dtype)
                dtensor_utils.copy_into(value, tensor)


def read_state(path: Path) -> CheckpointState:
    document = json.loads((path / "state.json").read_text())
    if (version := document.pop("schema_version", None)) != SCHEMA_VERSION:
        raise UnsupportedVersionError(
            f"{path} was written by another version of rtrain (checkpoint format {version}; this one reads "
            f"{SCHEMA_VERSION}). Continue the run with that version, or start another run with --new."
        )
    scale = document.pop("scale")
    evaluations = tuple(tuple(entry) for entry in document.pop("best_evaluations", ()))
    scale = None if scale is None else LossScale(**scale)
    return CheckpointState(**document, scale=scale, best_evaluations=evaluations)


def _restore_optimizer(path: Path, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stateless_names = json.loads((file.metadata() or {}).get(STATELESS_KEY, "[]"))
        state_kinds: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118 - a file, not a dict
            name, _, kind = key.rpartition(":")
            state_kinds.setdefault(name, []).append(kind)
        for name, parameter in model.named_parameters():
            if not dtensor_utils.is_materialized(parameter):
                continue
            if parameter_state := {kind: file.get_tensor(f"{name}:{kind}") for kind in state_kinds.get(name, ())}:
                optimizer.state[parameter] = {
                    kind: value.to(parameter.device)
                    if kind == STEP_STATE
                    else dtensor_utils.distribute_like(value, parameter)
                    for kind, value in parameter_state.items()
                }
            elif name not in stateless_names:
                # Training would continue as another run: AdamW would restart its moments and bias correction.
                raise IncompleteCheckpointError(
                    f"{path} has no optimizer state for {name}: resuming would not continue this run. Remove that "
                    "checkpoint's folder to resume from an older one, or start another run with --new."
                )


# ------------------------------------------------------------------------------------------------------- selection


def is_complete(folder: Path) -> bool:
    return (folder / manifest.FILE_NAME).is_file()


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, ascending."""
    steps = [parse_step(path.name) for path in folder.glob("step-*")] if folder.is_dir() else []
    return sorted(step for step in steps if step is not None and is_complete(checkpoint_path(folder, step)))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for another name."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def find_latest(folder: Path, run_id: str) -> int | None:
    """Return the step of the newest checkpoint of `run_id` that verifies."""
    return next((step for step in reversed(list_steps(folder)) if verify_or_quarantine(folder, step, run_id)), None)


def verify_or_quarantine(folder: Path, step: int, run_id: str) -> bool:
    """Whether a checkpoint verifies; a damaged one is moved to `quarantine/`, never loaded and never deleted.

    Raises `UnsupportedVersionError`, `WrongRunError` or `manifest.UnreadableFileError`: checkpoints of another version
    or run, and files that cannot be read at the moment, are not damaged.
    """
    path = checkpoint_path(folder, step)
    if (problem := find_problem(path, step, run_id)) is None:
        return True
    if path.is_dir():
        quarantine_path = folder / QUARANTINE_FOLDER / f"{path.name}-{uuid.uuid4().hex[:8]}"
        quarantine_path.parent.mkdir(exist_ok=True)
        path.rename(quarantine_path)
        (quarantine_path / REASON_FILE).write_text(f"{problem}\n", encoding="utf-8")
    return False


def list_quarantined(folder: Path) -> dict[str, str]:
    """Return the names of the quarantined checkpoints with the reasons."""
    return {
        path.parent.name: path.read_text().strip()
        for path in sorted((folder / QUARANTINE_FOLDER).glob(f"*/{REASON_FILE}"))
    }


def find_problem(path: Path, step: int, run_id: str) -> str | None:
    """Return why a folder is not the checkpoint of `run_id` after `step` steps, or None. Every byte is compared. Raises
    the errors of `verify_or_quarantine`."""
    if (problem := manifest.find_damage(path, CHECKPOINT_FILES)) is not None:
        return problem
    state = read_state(path)
    if state.step != step:  # an older checkpoint was copied over a newer one
        return f"it is of step {state.step}"
    if state.run_id != run_id:
        raise WrongRunError(path)
    return None


# --------------------------------------------------------------------------------------------------------- removal


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint. It is renamed to a draft first: a crash never leaves a checkpoint that looks damaged."""
    if path.is_dir():
        shutil.rmtree(path.rename(_draft_path(path)), ignore_errors=True)


def remove_drafts(folder: Path) -> None:
    """Remove drafts and partly deleted checkpoints of crashed processes. Only call while nothing is being saved."""
    for draft in folder.glob(".step-*"):
        shutil.rmtree(draft, ignore_errors=True)


def _draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
