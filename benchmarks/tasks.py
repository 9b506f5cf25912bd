"""Every task on published data sets: `python -m benchmarks.tasks DATA --out DIR [--only banking77 ...]`.

Each line of the table is one or more runs of `rtrain train`, in their own processes, by the commands that are printed.
A finished run is not repeated. `results.json` in DIR has the measurements and their dates.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from benchmarks import sets
from rtrain.metrics import regression

Figures = dict[str, float]


def headline(run: Path) -> Figures:
    """Test scores that compare models, and the headline score of each slice."""
    document = json.loads((run / "scores-test.json").read_text(encoding="utf-8"))
    name = document["headline"]
    scores = dict(document["scores"])
    for column, values in document["slices"].items():
        if column != "length":
            scores |= {f"{column}={entry['value']}": entry["scores"][name] for entry in values}
    return scores


def macro_f1(run: Path) -> Figures:
    """The figures of `headline`, the macro F1 of each slice, and the mean of these."""
    document = json.loads((run / "scores-test.json").read_text(encoding="utf-8"))
    sliced = {
        f"{column}={entry['value']}": entry["scores"]["macro_f1"]
        for column, values in document["slices"].items()
        if column != "length"
        for entry in values
    }
    return {**document["scores"], **sliced, "mean_macro_f1": statistics.fmean(sliced.values())}


def kappa_by_prompt(run: Path) -> Figures:
    """Quadratic weighted kappa of each prompt on its own scale, and their mean, as the papers on ASAP report it."""
    table = pyarrow.parquet.read_table(run / "predictions-test.parquet")
    prompt = np.array([int(value) for value in table["set"].to_pylist()])
    figures = {}
    for number, (low, high) in sets.ASAP_RANGES.items():
        rows = prompt == number
        true, predicted = (low + (high - low) * table[name].to_numpy()[rows] for name in ("target", "prediction"))
        # Scores were stored as float32, in which 0.6 of 60 is not exactly 36.
        figures[f"prompt {number}"] = regression.make_kappa_metric(np.rint(true), predicted, low, high).scores()["qwk"]
    return {**headline(run), **figures, "mean_qwk": statistics.fmean(figures.values())}


@dataclass(frozen=True)
class Job:
    """A line of the table: one run for each of `variants`, whose figures are averaged."""

    name: str
    recipe: str
    folder: str
    """Folder of the set."""
    prepare: Callable[[Path, Path], sets.Arguments]
    figure: str
    """Name of the score that the line is about."""
    settings: Mapping[str, object] = field(default_factory=dict)
    variants: tuple[Mapping[str, object], ...] = ({},)
    measure: Callable[[Path], Figures] = headline
    floor: float | None = None
    """The score of a TF-IDF model on the same test rows."""
    target: float | None = None
    published: str = ""


def seeds(*numbers: int) -> tuple[Mapping[str, object], ...]:
    return tuple({"train.seed": number} for number in numbers)


def folds(number: int) -> tuple[Mapping[str, object], ...]:
    return tuple({"data.fold": fold} for fold in range(number))


REFIT = {"data.valid_share": 0}
"""The lines of the table. Epochs and learning rates were chosen on validation rows before."""

FEW_ROWS = {
    **{"train.epochs": 20, "optim.lr": 3e-4, "train.label_smoothing": 0.1, "train.global_batch_size": 32},
    **{"train.evaluate_every": 1000, **REFIT},
}
NOISE = {"augment.copies": 1, "augment.typo": 0.1, "augment.drop": 0.05, "augment.swap": 0.05}
"""Settings that give each row a copy; half as many epochs then make as many updates."""

JOBS = (
    Job(
        "banking77",
        "intent",
        "banking77",
        sets.banking77,
        "accuracy",
        {"train.epochs": 5, "optim.lr": 3e-4, "train.label_smoothing": 0.1, "train.global_batch_size": 64, **REFIT},
        seeds(0, 1, 2),
        floor=0.894,
        target=0.93,
        published="BERT-large 0.937",
    ),
    Job(
        "banking77, 10 rows a class", "intent", "banking77", sets.few_of_banking77, "accuracy", FEW_ROWS, seeds(0, 1, 2)
    ),
    Job(
        "banking77, 10 rows a class and noisy copies",
        "intent",
        "banking77",
        sets.few_of_banking77,
        "accuracy",
        {**FEW_ROWS, "train.epochs": 10, **NOISE},
        seeds(0, 1, 2),
    ),
    Job(
        "sentiment_labelled_sentences",
        "intent",
        "sentiment_labelled_sentences",
        sets.labelled_sentences,
        "accuracy",
        {"train.epochs": 4, "train.global_batch_size": 64, "optim.lr": 2e-4},
    ),
    Job(
        "umsab",
        "intent",
        "umsab",
        sets.umsab,
        "mean_macro_f1",
        {"train.epochs": 3, "train.global_batch_size": 128, "optim.lr": 2e-4},
        measure=macro_f1,
        floor=0.537,
        published="XLM-R 0.648 to 0.668",
    ),
    Job(
        "nusax_senti",
        "intent",
        "nusax_senti",
        sets.nusax,
        "mean_macro_f1",
        {"train.epochs": 4, "train.global_batch_size": 128, "optim.lr": 2e-4},
        measure=macro_f1,
        floor=0.764,
        published="0.65 to 0.80",
    ),
    Job(
        "xsid",
        "intent",
        "xsid",
        sets.xsid,
        "accuracy",
        {"train.epochs": 1, "train.global_batch_size": 128, "train.evaluate_every": 200, "optim.lr": 2e-4},
        floor=0.390,
    ),
    Job(
        "squadshifts",
        "squad",
        "squadshifts",
        sets.squad,
        "f1",
        {"train.epochs": 2, "train.global_batch_size": 32},
        target=0.65,
        published="BERT-base on all of SQuAD 0.885",
    ),
    Job(
        "asap_aes fold 0",
        "essay",
        "asap_aes",
        sets.asap,
        "mean_qwk",
        {"train.epochs": 2, "optim.lr": 2e-4, "train.global_batch_size": 32},
        measure=kappa_by_prompt,
        floor=0.644,
        target=0.74,
        published="NEA 0.761, R2BERT 0.794 (5 folds)",
    ),
    Job(
        "ielts_essays, 5 folds",
        "essay",
        "ielts_essays",
        sets.ielts,
        "rmse",
        {**{"train.epochs": 2, "optim.lr": 1e-4, "train.global_batch_size": 16, "data.folds": 5}, **REFIT},
        folds(5),
        floor=0.929,
        published="0.85 or 0.71 in its paper",
    ),
    Job(
        "ielts_essays, head alone, 5 folds",
        "essay",
        "ielts_essays",
        sets.ielts,
        "rmse",
        {
            **{"train.epochs": 2, "optim.lr": 2e-2, "train.global_batch_size": 4, "data.folds": 5},
            "model.freeze": "encoder",
        },
        folds(5),
        floor=0.929,
    ),
    Job(
        "ielts_essays, the paper's settings, fold 0",
        "essay-published",
        "ielts_essays",
        sets.ielts,
        "rmse",
        {"data.folds": 5, "train.global_batch_size": 16},
        folds(1),
        floor=0.929,
        published="0.85 or 0.71 in its paper",
    ),
    Job(
        "cuad clauses",
        "contract-clauses",
        "cuad",
        sets.clauses,
        "accuracy",
        {"train.epochs": 3, "optim.lr": 3e-4, "train.global_batch_size": 32},
        floor=0.766,
        target=0.80,
    ),
    Job("cuad spans", "squad", "cuad", sets.spans, "f1", {"train.epochs": 2, "train.global_batch_size": 32}),
    Job(
        "legal_summarization, 5 folds",
        "summary",
        "legal_summarization",
        sets.legal,
        "rouge1",
        {"train.epochs": 4, "train.global_batch_size": 16, "data.folds": 5},
        folds(5),
        published="the first sentences: `lead_rouge1` of the figures",
    ),
    Job(
        "ncbi_disease",
        "entities",
        "ncbi_disease",
        sets.ncbi,
        "f1",
        {"train.epochs": 5, "optim.lr": 4e-4, "train.global_batch_size": 32},
        seeds(0, 1),
        floor=0.476,
        target=0.79,
        published="BERT-base 0.856",
    ),
    Job(
        "fin_ner",
        "entities",
        "fin_ner",
        sets.fin,
        "f1",
        {"train.epochs": 10, "train.global_batch_size": 32},
        floor=0.744,
        published="CRF 0.83",
    ),
    Job(
        "broad_twitter_ner",
        "entities",
        "broad_twitter_ner",
        sets.twitter,
        "f1",
        {"train.global_batch_size": 32},
        floor=0.436,
    ),
)


def commands(job: Job, data: Path, out: Path, assignments: list[str]) -> list[tuple[Path, list[str]]]:
    """(run folder, command) of each of the job's runs, whose files are written on the way.

    `assignments` hold for all runs. Each run sets global_batch_size, so that the number of workers and the size of
    passes change only its speed.
    """
    folder = out / re.sub(r"[^\w-]+", "", job.name.replace(" ", "-"))
    work = folder / "data"
    work.mkdir(parents=True, exist_ok=True)
    rows = job.prepare(data / job.folder, work)
    commands = []
    for number, variant in enumerate(job.variants):
        run = folder / f"run-{number}"
        run_assignments = [f"{name}={value}" for name, value in {**job.settings, **variant}.items()]
        run_assignments += ["train.aggregation_frequency=null", *assignments]
        settings = [part for assignment in run_assignments for part in ("--set", assignment)]
        commands.append((run, ["train", job.recipe, *rows, *settings, "--out", str(run)]))
    return commands


def finished(run: Path) -> bool:
    path = run / "summary.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"


def train(run: Path, arguments: list[str]) -> float:
    """Make a run, or continue it where it was stopped; returns its seconds. A finished run is left as it is."""
    print(f"$ {shlex.join(['rtrain', *arguments])}", flush=True)
    if not finished(run):
        resume = ["--resume"] if (run / "config.yaml").is_file() else []
        subprocess.run([sys.executable, "-m", "rtrain", *arguments, *resume], check=True)
    seconds: float = json.loads((run / "summary.json").read_text(encoding="utf-8"))["seconds"]["total"]
    return seconds


def run(job: Job, data: Path, out: Path, assignments: list[str]) -> dict[str, Any]:
    """Make the job's runs that are not finished; returns the line of the table."""
    figures: list[Figures] = []
    shown, seconds = [], 0.0
    for folder, arguments in commands(job, data, out, assignments):
        shown.append(shlex.join(["rtrain", *arguments]))
        seconds += train(folder, arguments)
        figures.append(job.measure(folder))
    common = [name for name in figures[0] if all(name in run_figures for run_figures in figures)]
    values = [run_figures[job.figure] for run_figures in figures]
    return {
        "job": job.name,
        "figure": job.figure,
        "ours": statistics.fmean(values),
        "values": values,
        "floor": job.floor,
        "target": job.target,
        "published": job.published,
        "seconds": round(seconds, 1),
        "commands": shown,
        "figures": {name: statistics.fmean(run_figures[name] for run_figures in figures) for name in common},
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """The table, as Markdown that a terminal shows well."""
    rows = ["| set | score | floor | ours | runs | target | published | seconds |", "|---|---|---|---|---|---|---|---|"]
    for line in lines:
        spread = " ".join(f"{value:.4g}" for value in line["values"]) if len(line["values"]) > 1 else ""
        numbers = (line["floor"], line["ours"], spread, line["target"], line["published"], round(line["seconds"]))
        shown = " | ".join(
            "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in numbers
        )
        rows.append(f"| {line['job']} | {line['figure']} | {shown} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(job.name for job in JOBS)}")
    parser.add_argument("--set", action="append", default=[], dest="assignments", help="for all runs: train.workers=1")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - {job.name for job in JOBS}:
        parser.error(f"--only: no such line: {', '.join(sorted(unknown))}")
    data, out = options.data.absolute(), options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    lines = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    for job in JOBS:
        if options.only is None or job.name in options.only:
            lines[job.name] = run(job, data, out, options.assignments)
            results.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(lines[job.name] for job in JOBS if job.name in lines))


if __name__ == "__main__":
    main()
