"""Two runs of one recipe beside each other: the rows that they were trained on, and what they came to."""

from collections.abc import Mapping
from typing import Any

from rtrain.checkpoints import checkpoint
from rtrain.cluster.rehearsal.measured import Rows, Weights
from rtrain.proof import ledger
from rtrain.run import Run


def rows(control: Run, run: Run) -> Rows:
    found, undisturbed = ledger.check(run), ledger.check(control)
    agrees = found.passed and undisturbed.passed
    same = (found.order_digest, found.updates) == (undisturbed.order_digest, undisturbed.updates)
    return Rows(agrees, found.missing, found.repeated, same)


def weights(control: Run, run: Run, same_workers: bool) -> Weights:
    """The newest checkpoints of two runs that have ended, compared."""
    import numpy as np
    from safetensors.numpy import load_file

    def last(one: Run) -> Mapping[str, Any]:
        update = max(checkpoint.updates(one.checkpoints))
        return load_file(checkpoint.path_of(one.checkpoints, update) / "model.safetensors")

    ours, theirs = last(run), last(control)
    identical = ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items()
    )
    off = norm = 0.0
    for name, tensor in theirs.items():
        whole, other = tensor.astype(np.float64), ours[name].astype(np.float64) if name in ours else 0.0
        off, norm = off + float(np.square(whole - other).sum()), norm + float(np.square(whole).sum())
    return Weights(identical, (off / norm) ** 0.5 if norm else 0.0, same_workers)
