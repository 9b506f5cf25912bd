"""A question-answering artefact in twelve languages: `python -m benchmarks.questions DATA ARTIFACT`.

The files are those of XQuAD, the same questions in each; the encoder that rtrain packages has read English alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.questions", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds `xquad`")
    parser.add_argument("artifact", type=Path)
    chosen = parser.parse_args()
    print("| language | questions | EM | F1 |\n|---|---|---|---|")
    for path in sorted((chosen.data / "xquad").glob("xquad.*.json.gz")):
        command = [sys.executable, "-m", "rtrain", "evaluate", str(chosen.artifact), "--data", str(path), "--json"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        scores = report["scores"]
        language = path.name.split(".")[1]
        print(f"| {language} | {scores['rows']} | {scores['exact_match']:.4f} | {scores['f1']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
