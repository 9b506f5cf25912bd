"""K-fold cross-validation in one command: `rtrain train RECIPE --data FILE --folds 5`.

FOLDER/fold-0 ...                 runs, each an ordinary run with data.folds and data.fold
FOLDER/folds.json, folds.md       the scores of each fold, with mean and standard deviation
FOLDER/predictions-folds.parquet  the test rows of all folds: each row once, predicted by the model that has not seen it

All folds have one group of workers, and each fold is a view of one token store. A command with --resume skips
finished folds and continues the interrupted one.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import atomic_write, events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.runs import controller, prepare, run_folders, worker_pool

SCORES_FILE, PAGE_FILE, PREDICTIONS_FILE = "folds.json", "folds.md", "predictions-folds.parquet"
WORKERS_FOLDER = ".workers"
"""Folder of Ray Train's files of the shared worker group."""
OnEvent = Callable[[dict[str, Any]], None]


def resolve_folds(config: Config, folder: Path, reuse: run_folders.Reuse) -> tuple[Config, Path]:
    """Return the configuration with the rows of databases copied, and the folder of the folds.

    Raises `ConfigError` for settings that contradict folds, and `UserError` if the folder is in use.
    """
    data = config.recipe.data
    if data.fold:
        fix = "leave it out: each fold is trained"
        problem = Problem("data.fold", data.fold, "--folds sets it", fix, code="conflicting_settings")
        raise ConfigError([problem])
    is_used = folder.is_dir() and any(folder.iterdir())
    if reuse == "new" and is_used:
        numbers = (number for number in range(2, 1_000_000) if not folder.with_name(f"{folder.name}-{number}").exists())
        folder = folder.with_name(f"{folder.name}-{next(numbers)}")
    elif reuse == "refuse" and is_used:
        reason = f"--out: {folder} is not empty; write --resume to continue its folds, or --new for another folder"
        raise UserError(reason, code="already_exists")
    if (storage := config.deploy.cluster.storage) is not None:  # folds of other folders have the same names
        explicit_settings = config.explicit_settings
        config = configuration.with_overrides(config, {"cluster.storage": f"{storage}/{folder.name}"})
        config = replace(config, explicit_settings=explicit_settings)
    first_fold = get_fold_run(folder, 0)
    fold_reuse: run_folders.Reuse = "resume" if first_fold.exists else "refuse"
    _, resolved_config = prepare.resolve_run_folder(_make_fold_config(config, 0), first_fold.folder, fold_reuse)
    rows = {f"data.{name}": getattr(resolved_config.recipe.data, name) for name in ("path", "query")}
    return replace(configuration.with_overrides(config, rows), explicit_settings=config.explicit_settings), folder


def get_fold_run(folder: Path, fold: int) -> Run:
    return Run(folder / f"fold-{fold}")


def _make_fold_config(config: Config, fold: int) -> Config:
    return configuration.with_overrides(config, {"data.fold": fold})


def train_folds(config: Config, folder: Path, source: row_reader.DataSource, on_event: OnEvent) -> dict[str, Any]:
    """Train each fold of `data.folds` to its end, and write the scores and predictions of all; returns the content of
    folds.json. The token store lies in the parent of `folder`, for other runs of the same rows."""
    num_folds = config.recipe.data.folds or 0
    runs = [get_fold_run(folder, fold) for fold in range(num_folds)]
    folder.mkdir(parents=True, exist_ok=True)
    workers = worker_pool.ReusableWorkerGroup(Run(folder / WORKERS_FOLDER), worker_pool.start_mailbox_server())
    summaries: list[dict[str, Any]] = []
    try:
        for fold, run in enumerate(runs):
            on_event(events.make_phase_event(f"fold {fold + 1} of {num_folds}", "folds"))
            reuse: run_folders.Reuse = "resume" if run.exists else "refuse"
            fold_config = _make_fold_config(config, fold)
            prepared = prepare.prepare_run(fold_config, run.folder, reuse, tokens_root=folder.parent, source=source)
            follow = on_event if fold == 0 else _skip_row_events(on_event)
            summaries.append(controller.fit(prepared, workers=workers, write_reports=False, on_event=follow))
    finally:
        workers.shut_down()
    document = {"name": config.recipe.name, "folds": num_folds, **collect_scores(summaries), "folder": str(folder)}
    document["rows"] = write_predictions(folder / PREDICTIONS_FILE, runs)
    atomic_write.write_text(folder / SCORES_FILE, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    atomic_write.write_text(folder / PAGE_FILE, format_page(document))
    return document


def _skip_row_events(on_event: OnEvent) -> OnEvent:
    """The events of a fold after the first, without those about the rows, which are the same."""
    return lambda event: None if event["kind"] in events.ROW_EVENTS else on_event(event)


# --------------------------------------------------------------------------------------------------------------- result


def collect_scores(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The test scores of the folds: `fold_scores`, one for each fold, and `scores` with mean, std (of a sample), min
    and max of each metric."""
    fold_scores = [
        {name: value for name, value in (summary["metrics"]["test"] or {}).items() if isinstance(value, int | float)}
        for summary in summaries
    ]
    names = [name for name in fold_scores[0] if name != "rows" and all(name in scores for scores in fold_scores)]
    statistics_by_name = {}
    for name in names:
        values = [scores[name] for scores in fold_scores if math.isfinite(scores[name])]
        if values:
            std = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.fmean(values)
            statistics_by_name[name] = {"mean": mean, "std": std, "min": min(values), "max": max(values)}
    return {"scores": statistics_by_name, "fold_scores": fold_scores}


def write_predictions(path: Path, runs: Sequence[Run]) -> int:
    """Write the predictions for the test rows of all folds, with the number of the fold; returns the number of rows."""
    tables = []
    for fold, run in enumerate(runs):
        table = pyarrow.parquet.read_table(run.predictions("test"))
        tables.append(table.add_column(0, "fold", pa.array([fold] * table.num_rows, pa.int32())))
    predictions = pa.concat_tables(tables)
    with atomic_write.replace_file(path) as draft:
        pyarrow.parquet.write_table(predictions, draft)
    return int(predictions.num_rows)


def format_page(document: Mapping[str, Any]) -> str:
    """The scores as Markdown, a line for each metric."""
    folds = range(document["folds"])
    header = ["metric", "mean", "std", *(f"fold {fold}" for fold in folds)]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name, figures in document["scores"].items():
        values = [figures["mean"], figures["std"], *(scores[name] for scores in document["fold_scores"])]
        lines.append(f"| {name} | {' | '.join(f'{value:.4f}' for value in values)} |")
    title = f"# {document['name']}: {document['folds']} folds, {document['rows']:,} rows"
    predictions = f"Predictions for each row, by the fold that tests it: {PREDICTIONS_FILE}"
    return "\n".join([title, "", *lines, "", predictions, ""])
