"""Two runs of one recipe beside each other: the rows that they were trained on, and what they came to."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.checkpoints import checkpoint
from rtrain.cluster.rehearsal.measured import Rows, Weights
from rtrain.proof import ledger
from rtrain.run import Run

Arrays = Mapping[str, npt.NDArray[Any]]


def rows(control: Run, run: Run) -> Rows:
    found, undisturbed = ledger.check(run), ledger.check(control)
    agrees = found.passed and undisturbed.passed
    same = (found.order_digest, found.updates) == (undisturbed.order_digest, undisturbed.updates)
    return Rows(agrees, found.missing, found.repeated, same)


def weights(control: Run, run: Run, same_workers: bool) -> Weights:
    """The newest checkpoints of two runs that have ended, compared."""
    ours, theirs = (_weights(one, max(checkpoint.updates(one.checkpoints))) for one in (run, control))
    identical = ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items()
    )
    norm = _norm(theirs)
    return Weights(identical, _norm(_apart(ours, theirs)) / norm if norm else 0.0, same_workers)


def at(run: Run, control: Run, update: int) -> tuple[bool, float]:
    """Two runs' checkpoints of one update: whether their rows came in one order, and how far their weights are apart,
    over how far the control's have moved since its checkpoint before."""
    states = [checkpoint.read_state(checkpoint.path_of(one.checkpoints, update)) for one in (run, control)]
    before = max(other for other in checkpoint.updates(control.checkpoints) if other < update)
    ours, theirs, start = _weights(run, update), _weights(control, update), _weights(control, before)
    moved = _norm(_apart(theirs, start))
    return states[0].ledger == states[1].ledger, _norm(_apart(ours, theirs)) / moved if moved else math.inf


def _weights(run: Run, update: int) -> Arrays:
    from safetensors.numpy import load_file

    return load_file(checkpoint.path_of(run.checkpoints, update) / "model.safetensors")


def _apart(ours: Arrays, theirs: Arrays) -> Arrays:
    """The differences, in float64; where one has a tensor that the other lacks, that itself."""
    wide = [{name: one.astype(np.float64) for name, one in tensors.items()} for tensors in (ours, theirs)]
    nothing = np.zeros(())
    return {name: np.asarray(wide[0].get(name, nothing) - wide[1].get(name, nothing)) for name in wide[0] | wide[1]}


def _norm(tensors: Arrays) -> float:
    return math.sqrt(sum(float(np.square(one.astype(np.float64)).sum()) for one in tensors.values()))
