"""A run folder as a training leaves it, made in a second without Ray: store, settings, events, answers; its page."""

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rtrain import config
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.ragged import Head, RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import scores
from rtrain.parallel import profiler
from rtrain.report import collect, html
from rtrain.runs import predictions as answered, run_folders
from rtrain.tasks import base
from rtrain.tasks.encode import resolve_window_spec
from tests.conftest import Row, labelled_rows, write_rows
from tests.ray import test_tasks
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact

UPDATES_PER_EPOCH = 10
PARTS = {
    "get_batch": 0.002,
    "forward": 0.03,
    "backward": 0.05,
    "gradient_sync": 0.01,
    "optimizer": 0.005,
    "idle": 0.003,
}
STAGES = [{**dict.fromkeys(profiler.STEP_PARTS, 0.0), **PARTS, "hidden": 0.004, "cores_busy": 0.75}] * 2
"""The mean update of each of two workers, 100 ms."""
MACHINE = {"host": "here", "workers": 2, "cores": 2, "gpus": 0, "gpu": None, "instance": "m7i.large"}
SECONDS = {"setup": 2.0, "first_batch": 1.0, "train": 20.0, "evaluate": 3.0, "checkpoint": 0.5, "input_wait": 0.25}


class Counted(str):
    """A text that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def settings(folder: Path, rows: Sequence[Row], **overrides: Any) -> Config:
    """An intent recipe on a csv of these rows, with a tiny encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_rows(folder / "rows.csv", list(rows))
    base = {"data.path": str(path), "data.max_bad_rows": 0.5, "model.name": str(make_encoder(folder / "encoder"))}
    return config.load_config("intent", {**base, "train.epochs": 2, **overrides})


def make_run(folder: Path, rows: Sequence[Row] | None = None, *, trained: bool = True, **overrides: Any) -> Path:
    """A run that is created or, by default, trained to its end, with no answers yet."""
    return begin(folder, settings(folder, labelled_rows(300) if rows is None else rows, **overrides), trained=trained)


def begin(folder: Path, chosen: Config, *, trained: bool = True) -> Path:
    """The run of any configuration whose model is `<folder>/encoder`."""
    store = make_store(chosen.recipe, folder / "encoder", folder)
    chosen = config.with_overrides(
        chosen,
        {
            "train.global_batch_size": -(-store.num_rows("train") // UPDATES_PER_EPOCH),
            "train.aggregation_frequency": None,
        }
        | {"train.save_every": 5},
    )
    run = folder / "run"
    frozen = run_folders.write_frozen_config(Run(run), chosen)
    created = {"recipe": chosen.recipe.name, "task": chosen.recipe.task, "data_digest": store.manifest.digest}
    origin = store.manifest.sources
    events.append_event(
        run, "created", run="run", **created, store=str(store.folder), origin=origin, versions={"ray": "2.60"}
    )
    counts = {"rows": store.manifest.rows, "quarantined": store.manifest.quarantined}
    events.append_event(run, "tokenized", **counts, store=str(store.folder))
    if trained:
        train(run, frozen.recipe.global_batch_size)
    return run


def train(run: Path, rows_per_update: int) -> None:
    """Events of 20 updates, of which the first start reached 12 and crashed; it went on from update 10."""
    for first, last in ((0, 12), (10, 20)):
        context = {"workers": 2, "precision": "fp32", "global_batch_size": rows_per_update}
        events.append_event(run, "machines", machines=[MACHINE], price=None)
        events.append_event(run, "started", step=first, total_steps=20, **context)
        for update in range(first + 1, last + 1):
            loss, rows = 2.0 / update, (update - first) * rows_per_update
            events.append_event(
                run, "progress", step=update, total_steps=20, loss=loss, rows=rows, real_tokens=9 * rows, ledger="ab"
            )
            if update % UPDATES_PER_EPOCH == 0:
                scores = {"accuracy": update / 40, "macro_f1": update / 50, "rows": 30}
                events.append_event(run, "evaluated", split="valid", step=update, scores=scores)
        if first == 0:
            crash = {"cause": "crash", "resumes_from": 10, "error": "Worker died", "hang_tracebacks": []}
            events.append_event(run, "crashed", **crash)
    events.append_event(run, "evaluated", split="test", step=20, scores={"accuracy": 0.5, "macro_f1": 0.4, "rows": 40})
    sums = {
        "rows_seen": 480,
        "real_tokens": 4000,
        "padded_tokens": 5000,
        "micro_batches_per_step": 4.0,
        "seconds": SECONDS,
    }
    events.append_event(run, "trained", steps=20, best_step=20, order_digest="cd", **sums, finished=True, stages=STAGES)
    events.append_event(run, "finished", step=20)


def write_predictions(
    run: Path,
    target: Sequence[Any],
    prediction: Sequence[Any],
    *,
    text: Sequence[str] | None = None,
    score: Sequence[float] | None = None,
    split: str = "test",
    source: str = "rows.csv",
    seed: int = 0,
    measured: bool = True,
    **slices: Sequence[str],
) -> Path:
    """predictions-<split>.parquet as an evaluation of labels leaves it, and scores-<split>.json where they are
    `measure_scores`; a loss that is larger where the answer is wrong."""
    if measured:
        write_scores(run, target, prediction, split=split, **slices)
    rows, random = len(target), np.random.default_rng(seed)
    wrong = np.array([a != b for a, b in zip(target, prediction, strict=True)], dtype=np.float64)
    columns = {
        "position": pa.array(np.arange(rows), pa.int64()),
        "row_id": pa.array(np.arange(rows, dtype=np.uint64)),
        "source": [source] * rows,
        "line": pa.array(np.arange(rows) + 2, pa.int64()),
        "tokens": pa.array(random.integers(5, 60, rows), pa.int32()),
        "text": list(text or [f"text number {row}" for row in range(rows)]),
        "target": list(target),
        "prediction": list(prediction),
        "score": pa.array(random.uniform(0.3, 1.0, rows) if score is None else score, pa.float64()),
        "loss": pa.array(wrong * 3 + random.uniform(0, 1, rows), pa.float64()),
    }
    path = Run(run).predictions(split)
    pyarrow.parquet.write_table(pa.table({**columns, **{name: list(values) for name, values in slices.items()}}), path)
    return path


def write_scores(
    run: Path, target: Sequence[str], prediction: Sequence[str], *, split: str = "test", **slices: Sequence[str]
) -> Path:
    """scores-<split>.json of answers that are nine tenths sure."""
    names = sorted({*target, *prediction})
    true, messages = (np.array([names.index(label) for label in labels]) for labels in (target, prediction))
    logits = np.where(np.eye(len(names))[messages] > 0, np.log(9 * max(1, len(names) - 1)), 0.0)
    task, lengths = base.get_task("classification"), np.arange(len(true))
    head, result = Head(tuple(names)), RaggedArray.from_matrix(logits)
    path = Run(run).scores(split)
    scores.write_scores(
        path, scores.measure_split(task, head, split, result, RaggedArray.from_matrix(true), lengths, slices)
    )
    return path


def make_answered(folder: Path, task: str, seed: int = 3, **overrides: Any) -> Path:
    """A run of any task with all that training leaves: its artefact is of random weights, its answers are its own."""
    folder.mkdir(parents=True, exist_ok=True)
    settings_used = config.with_overrides(settings_of(task, folder), overrides)
    run = begin(folder, settings_used)
    store = open_store(Path(next(event["store"] for event in events.read_events(run) if "store" in event)))
    result, head = base.get_task(task), store.manifest.head
    limit = resolve_window_spec(result, settings_used.recipe.data).max_tokens
    predictor = Predictor.load(make_task_artifact(run / "artifact", task, head, seed, limit), threads=1)
    outcomes = {
        split: score.predict_split(predictor, store, split, np.arange(store.num_rows(split))).row_results
        for split in ("valid", "test")
    }
    chosen_there = result.calibrate(outcomes["valid"], store.targets("valid"), head)
    head = Head(head.labels, {**head.facts, **chosen_there})
    for split, rows in outcomes.items():
        answered.write_predictions(Run(run).predictions(split), split, store, result, head, rows, predictor.tokenizer)
        document = answered.measure_scores(store, split, result, head, rows)
        scores.write_scores(Run(run).scores(split), document)
        values = {name: value for name, value in document["scores"].items() if np.isfinite(value)}
        events.append_event(run, "evaluated", split=split, step=20, scores=values)
    return run


def settings_of(task: str, folder: Path) -> Config:
    """A recipe for the task and rows for it."""
    if task == "masked_lm":
        path = write_rows(folder / "rows.csv", [(" ".join(CORPUS[n % 9 :]) + f" {n}", "x") for n in range(120)])
        values = {"data.path": str(path), "data.max_tokens": 48, "data.window": None}
        model = {"model.name": str(make_encoder(folder / "encoder"))}
        return config.load_config("domain-adapt", {**values, **model, "data.label": None})
    result = test_tasks.settings(task, folder)
    if task == "regression":  # enough rows for slices
        lines = [f"{text},{1 + len(text.split()) // 3},{label}" for text, label in labelled_rows(900)]
        (folder / "essays.csv").write_text("essay,score,kind\n" + "\n".join(lines) + "\n")
    return result


def answers_of(labels: Sequence[str], rows: int, right: float, seed: int = 0) -> tuple[list[str], list[str]]:
    """(targets, predictions) of which about a share of `right` agree."""
    random = np.random.default_rng(seed)
    target = random.integers(0, len(labels), rows)
    other = (target + random.integers(1, len(labels), rows)) % len(labels)
    messages = np.where(random.uniform(size=rows) < right, target, other)
    return [labels[code] for code in target], [labels[code] for code in messages]


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run: Path) -> Page:
    return Page(html.write_report(Run(run)).read_text(encoding="utf-8"))


def read(run: Path | Run) -> Any:
    """Read the data of a run; untyped, since tests know which parts are present."""
    return collect.read_run_data(run if isinstance(run, Run) else Run(run))
