"""Memory of a loaded artifact: a separate process loads it, predicts a batch and reports the added resident memory.

`python -m rtrain.evaluation.memory_footprint FOLDER THREADS` prints megabytes of resident memory.
"""

import subprocess
import sys
from pathlib import Path

from rtrain.core.errors import UserError

BATCH_ROWS = 32


def measure_memory_mb(folder: Path, threads: int) -> float:
    """Megabytes of an artifact in a process: library of the engine, weights, one batch."""
    command = [sys.executable, "-m", "rtrain.evaluation.memory_footprint", str(folder.absolute()), str(threads)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if process.returncode:
        last_line = process.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise UserError(f"{folder} could not be loaded in a separate process: {last_line[0]}", code="not_loaded")
    return float(process.stdout)


def measure_files_mb(folder: Path) -> float:
    """Megabytes of all files of an artifact."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _measure_added_mb(folder: Path, threads: int) -> float:
    import psutil

    from rtrain.inference import artifact, predictor as inference_predictor

    metadata, process = artifact.read_artifact(folder, verify=False), psutil.Process()
    rss_before = process.memory_info().rss
    predictor = inference_predictor.Predictor(folder, metadata, threads)
    inputs = inference_predictor.make_golden_inputs(predictor.task, predictor.head)
    predictor.logits((inputs * BATCH_ROWS)[:BATCH_ROWS])
    return float(process.memory_info().rss - rss_before) / 1e6


if __name__ == "__main__":
    sys.stdout.write(f"{_measure_added_mb(Path(sys.argv[1]), int(sys.argv[2])):.1f}\n")
