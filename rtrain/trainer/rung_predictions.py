"""The answers to the validation rows at a rung of a search, kept in the run's folder for whoever compares trials.

A rung changes nothing in the run: it is no evaluation among which the best weights are chosen. So a run that was
frozen at a rung and thawed ends as one that never paused.
"""

from rtrain.core import atomic_write
from rtrain.core.ragged import Ragged
from rtrain.core.run_folder import Run


def keep(run: Run, update: int, outcomes: Ragged) -> int:
    """Write the outcomes of the validation rows by the weights after `update` updates, in index order; returns their
    number."""
    from safetensors.numpy import save_file

    path = run.rung(update)
    path.parent.mkdir(exist_ok=True)
    with atomic_write.replacement(path) as draft:
        save_file({"values": outcomes.values, "counts": outcomes.counts}, draft)
    return len(outcomes)


def read(run: Run, update: int) -> Ragged | None:
    """The outcomes that `keep` wrote; None where the run has not come to that rung."""
    from safetensors.numpy import load_file

    path = run.rung(update)
    if not path.is_file():
        return None
    found = load_file(path)
    return Ragged(found["values"], found["counts"])
