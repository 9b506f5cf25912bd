"""Predictions on the validation rows at a rung of a search, kept in the run folder for the comparison of trials.

A rung does not change the run, since it is no evaluation for the selection of the best weights. So
a pause at a rung does not change the end of a run.
"""

from rtrain.core import atomic_write
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run


def write_rung(run: Run, step: int, row_results: RaggedArray) -> int:
    """Write the results of the validation rows by the weights after `step` steps, in index order; return their
    number."""
    from safetensors.numpy import save_file

    path = run.rung_predictions(step)
    path.parent.mkdir(exist_ok=True)
    with atomic_write.replace_file(path) as draft:
        save_file({"values": row_results.values, "counts": row_results.counts}, draft)
    return len(row_results)


def read_rung(run: Run, step: int) -> RaggedArray | None:
    """Read the results of `write_rung`; None if the run has not reached the rung."""
    from safetensors.numpy import load_file

    path = run.rung_predictions(step)
    if not path.is_file():
        return None
    arrays = load_file(path)
    return RaggedArray(arrays["values"], arrays["counts"])
