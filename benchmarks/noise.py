"""Measure how artefacts answer texts with typing errors: `python -m benchmarks.noise DATA ARTIFACT [ARTIFACT ...]`.

Artefacts are scored on the test rows of banking77 as they are, and with noise on their words: the noise by which
`augment` makes copies of training rows, drawn anew. Artefacts of runs with and without such copies stand side by side.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.sets import number
from rtrain.data.augment.noise import Noise, noisy

SHARES = (0.0, 0.1, 0.2, 0.4)
"""Shares of words with a typing error."""
SEED = 1
"""Seed of the noise; copies of training rows have another seed."""


def mistyped(source: Path, target: Path, share: float) -> Path:
    """The rows of a csv file, with typing errors in the share `share` of the words of `text`."""
    with (
        source.open(encoding="utf-8", newline="") as original,
        target.open("w", encoding="utf-8", newline="") as file,
    ):
        rows = list(csv.DictReader(original))
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "text": noisy(row["text"], Noise(typo=share), SEED, 0, number(row["text"]))})
    return target


def accuracy(artifact: Path, data: Path) -> float:
    command = [sys.executable, "-m", "rtrain", "evaluate", str(artifact), "--data", str(data), "--json"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return float(report["scores"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds `banking77`")
    parser.add_argument("artifacts", type=Path, nargs="+")
    chosen = parser.parse_args()
    print("| words with an error | " + " | ".join(str(path) for path in chosen.artifacts) + " |")
    print("|---|" + "---|" * len(chosen.artifacts))
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            test = mistyped(chosen.data / "banking77" / "test.csv", Path(folder) / f"{share}.csv", share)
            found = [accuracy(path, test) for path in chosen.artifacts]
            print(f"| {share:g} | " + " | ".join(f"{value:.4f}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
