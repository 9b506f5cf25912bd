"""Memory of a loaded artefact: a process of its own that loads it, answers a batch and says what that has added.

`python -m rtrain.evaluation.memory_footprint FOLDER THREADS` prints megabytes of resident memory.
"""

import subprocess
import sys
from pathlib import Path

from rtrain.core.errors import UserError

BATCH_ROWS = 32


def memory_mb(folder: Path, threads: int) -> float:
    """Megabytes that an artefact takes in a process: its engine's library, its weights, a batch of answers."""
    command = [sys.executable, "-m", "rtrain.evaluation.memory_footprint", str(folder.absolute()), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no word of why"]
        raise UserError(f"{folder} could not be loaded in a process of its own: {last[0]}", code="not_loaded")
    return float(done.stdout)


def files_mb(folder: Path) -> float:
    """Megabytes of all files of an artefact."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _added_mb(folder: Path, threads: int) -> float:
    import psutil

    from rtrain.inference import artifact, predictor as inference_predictor

    made, process = artifact.read(folder, verify=False), psutil.Process()
    before = process.memory_info().rss
    predictor = inference_predictor.Predictor(folder, made, threads)
    asked = inference_predictor.golden_inputs(predictor.task, predictor.head)
    predictor.logits((asked * BATCH_ROWS)[:BATCH_ROWS])
    return float(process.memory_info().rss - before) / 1e6


if __name__ == "__main__":
    sys.stdout.write(f"{_added_mb(Path(sys.argv[1]), int(sys.argv[2])):.1f}\n")
