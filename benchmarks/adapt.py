"""Measure what adapting an encoder to a domain's text is worth: `python -m benchmarks.adapt DATA --out DIR [--only
notes]`.

The packaged weights have no language-model head. So a run of the recipe `domain-adapt` is compared with a control run,
`domain-adapt-head`, which trains only a head, for as many updates on the same blocks. They are compared by the
perplexity of held-out text, and by classifiers of the domain that start from the adapted and from the packaged encoder.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import sets
from benchmarks.tasks import Figures, headline, train

BLOCKS = {"data.max_tokens": 256, "data.max_row_bytes": 2_000_000, "model.attention_dropout": 0}


class Domain(NamedTuple):
    folder: str
    text: Any
    """The function of `sets` that gives its plain text."""
    recipe: str
    rows: Any
    """The function of `sets` that gives the classifier's rows."""
    settings: dict[str, object]


DOMAINS = {
    "notes": Domain(
        "mtsamples",
        sets.notes,
        "intent",
        sets.specialties,
        {"data.max_tokens": 128, "train.epochs": 3, "optim.lr": 2e-4, "model.attention_dropout": 0},
    ),
    "contracts": Domain(
        "cuad",
        sets.contracts,
        "contract-clauses",
        sets.clauses,
        {},
    ),
}


def measure(
    name: str, data: Path, out: Path, epochs: int, share: float, classify: bool, assignments: list[str]
) -> dict[str, Figures]:
    """The figures of each run, by its name: two runs, or four with the classifiers."""
    domain, folder = DOMAINS[name], out / f"adapt-{name}"
    work = folder / "data"
    work.mkdir(parents=True, exist_ok=True)
    text = domain.text(data / domain.folder, work, share)
    chosen = [part for one in assignments for part in ("--set", one)]
    blocks = [part for key, value in {**BLOCKS, "train.epochs": epochs}.items() for part in ("--set", f"{key}={value}")]
    found: dict[str, Figures] = {}

    def add(run: str, arguments: list[str]) -> Path:
        seconds = train(folder / run, ["train", *arguments, *chosen, "--out", str(folder / run)])
        found[run] = {**headline(folder / run), "seconds": seconds}
        return folder / run

    add("control", ["domain-adapt-head", *text, *blocks])
    adapted = add("adapted", ["domain-adapt", *text, *blocks])
    if classify:
        settings = [part for key, value in domain.settings.items() for part in ("--set", f"{key}={value}")]
        rows = [*domain.rows(data / domain.folder, work), *settings]
        add("classifier", [domain.recipe, *rows])
        add("classifier-adapted", [domain.recipe, *rows, "--model", str(adapted / "artifact")])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapt", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--only", nargs="*", choices=sorted(DOMAINS), default=sorted(DOMAINS))
    parser.add_argument("--epochs", type=int, default=2, help="over the domain's text")
    parser.add_argument("--share", type=float, default=1.0, help="of the documents that are trained on")
    parser.add_argument("--no-classifier", action="store_true", help="perplexities alone")
    parser.add_argument("--set", action="append", default=[], dest="assignments", help="for all runs")
    chosen = parser.parse_args()
    for name in chosen.only:
        found = measure(
            name,
            chosen.data.absolute(),
            chosen.out.absolute(),
            chosen.epochs,
            chosen.share,
            not chosen.no_classifier,
            chosen.assignments,
        )
        (chosen.out / f"adapt-{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\n| {name} | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
        for figure in sorted({figure for one in found.values() for figure in one}):
            values = [one.get(figure) for one in found.values()]
            print(f"| {figure} | " + " | ".join("" if value is None else f"{value:.4g}" for value in values) + " |")


if __name__ == "__main__":
    main()
