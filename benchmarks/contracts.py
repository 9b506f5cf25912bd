"""What it is worth to read contracts whole: `python -m benchmarks.contracts DATA --out DIR [--seeds 0 1 2]`.

Each contract of CUAD, cut behind its first 2,048 tokens, is told by its type. Three trainings of the packaged encoder
read it in windows of 512 tokens whose outputs are averaged (what it was made for); whole, by a table of positions that
is repeated; and whole with local attention (256 tokens on either side, and the first one). They differ in nothing else,
and are compared on the same test rows as `rtrain compare` does. DATA holds CUAD in a folder of its name. A finished
training is not repeated. `contracts.json` in DIR has what was found, after each seed.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from benchmarks import few, sets
from benchmarks.results import Results
from benchmarks.tasks import headline, train
from rtrain.comparison import compare
from rtrain.network import model

SCORES = ("accuracy", "macro_f1")


def reading(tokens: int, window: int, stride: int, reach: int) -> dict[str, dict[str, object]]:
    """The settings of each side, by its name; the first is that of today."""
    whole = {"data.window": "null", "data.max_tokens": tokens, "model.positions": tokens}
    return {
        "windows": {"data.window": window, "data.stride": stride},
        "whole": whole,
        "whole, local": {**whole, "model.local_attention": reach},
    }


def shared(epochs: int, seed: int) -> dict[str, object]:
    """Settings of all sides."""
    return {
        "data.max_row_bytes": 2_000_000,
        "model.attention_dropout": 0,
        "optim.lr": 3e-4,
        "train.epochs": epochs,
        "train.rows_per_update": 16,
        "train.seed": seed,
    }


def beginnings(texts: Sequence[str], folder: Path, tokens: int) -> list[str]:
    """Each text as far as so many tokens go, of which two are not of the text; `folder` holds the tokenizer."""
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.no_truncation()
    found = []
    for text in texts:
        ends = made.encode(text, add_special_tokens=False).offsets
        found.append(text[: ends[tokens - 3][1]] if len(ends) > tokens - 2 else text)
    return found


def measure(given: argparse.Namespace, seed: int, folder: Path, rows: list[str]) -> dict[str, Any]:
    """The three trainings of a seed, beside each other."""
    runs, found = [], dict[str, Any]()
    for name, settings in reading(given.tokens, given.window, given.stride, given.reach).items():
        run = folder / f"{name.replace(', ', '-')}-{seed}"
        chosen: Mapping[str, object] = {**shared(given.epochs, seed), "model.name": given.model, **settings}
        named = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        seconds = train(run, ["train", "intent", *rows, "--out", str(run), *named])
        figures = headline(run)
        found[name] = {"seconds": seconds, **{score: figures[score] for score in SCORES}}
        runs.append(run)
    compared = compare.compare(runs)
    return {"sides": found, "verdict": compared.verdict, "compared": compare.document(compared)["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder that holds cuad")
    parser.add_argument("--out", type=Path, default=Path("runs/contracts"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a contract that are read")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--reach", type=int, default=256, help="tokens that a token reads on either side")
    parser.add_argument("--rows", type=int, default=10_000, help="most training rows")
    parser.add_argument("--model", default="minilm")
    given = parser.parse_args()
    given.data, given.out = given.data.absolute(), given.out.absolute()
    about = {name: getattr(given, name) for name in ("epochs", "tokens", "window", "stride", "reach", "rows", "model")}
    results = Results(given.out / "contracts.json", **about)
    found = sets.contract_types(given.data / "cuad")
    cut = beginnings([row["text"] for row in found], model.resolve(given.model), given.tokens)
    read = (row | {"text": text} for row, text in zip(found, cut, strict=True))
    file = sets.write(results.folder / "rows.jsonl", read)
    rows = few.arguments(["--data", str(file), *sets.setting(split="split", valid_share=0.1)], given.rows, file.parent)
    for seed in given.seeds:
        results.measure(f"seed {seed}", lambda keep, seed=seed: measure(given, seed, given.out, rows))  # type: ignore[misc]
    for name in reading(0, 0, 0, 0):
        each = [part["sides"][name] for part in results.parts.values() if "sides" in part]
        shown = ", ".join(f"{score} {statistics.fmean(one[score] for one in each):.4f}" for score in SCORES)
        print(f"{name:14} {shown}, {statistics.fmean(one['seconds'] for one in each):.0f} s ({len(each)} seeds)")
    for name, part in results.parts.items():
        print(f"{name}: {part['verdict']}")
    print(json.dumps({name: part["sides"] for name, part in results.parts.items()}))


if __name__ == "__main__":
    main()
