"""Score a question-answering artefact in twelve languages: `python -m benchmarks.questions DATA ARTIFACT [--every 4]`.

The files are those of XQuAD, which hold the same questions in each language. The encoder that rtrain packages has read
only English.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def thinned(source: Path, target: Path, every: int) -> Path:
    """Write a SQuAD file with every n-th paragraph of another, the same ones for each language."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    count = 0
    for article in document["data"]:
        chosen = []
        for paragraph in article["paragraphs"]:
            if count % every == 0:
                chosen.append(paragraph)
            count += 1
        article["paragraphs"] = chosen
    target.write_text(json.dumps(document), encoding="utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.questions", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds `xquad`")
    parser.add_argument("artifact", type=Path)
    parser.add_argument(
        "--every", type=int, default=1, help="4: a quarter of the paragraphs, for a quarter of the time"
    )
    chosen = parser.parse_args()
    print("| language | questions | EM | F1 |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((chosen.data / "xquad").glob("xquad.*.json.gz")):
            language = path.name.split(".")[1]
            file = thinned(path, Path(folder) / f"{language}.json", chosen.every)
            rows = ["--data", str(file), "--set", "data.format=squad", "--json"]
            command = [sys.executable, "-m", "rtrain", "evaluate", str(chosen.artifact), *rows]
            report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            scores = report["scores"]
            print(f"| {language} | {scores['rows']} | {scores['exact_match']:.4f} | {scores['f1']:.4f} |", flush=True)


if __name__ == "__main__":
    main()
