"""`rtrain profile RECIPE`: expand the sweeps into rows, measure them in sequence, and write the page, the JSON document
and the trace."""

import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import env, events, json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.models.precision import read_cpu_name
from rtrain.parallel import profiler
from rtrain.parallel.profiler import COMM_ASYNC, STEP_PARTS, StepWindow, TimeSpan
from rtrain.profiling import tables
from rtrain.report import summary
from rtrain.runs import controller, prepare

DOCUMENT_KIND, DOCUMENT_VERSION = "rtrain profile", 2
REQUIRED_KEYS = ("name", "recipe", "task", "model", "length", "machine", "rows")
"""Required keys of a profile document."""
JSON_FILE, PAGE_FILE, TRACE_FILE = "profile.json", "profile.html", "trace.json"
SETTING_ALIASES = {"workers": "train.workers", "loader": "cluster.data_cpus", "precision": "train.precision"}
"""Settings by their short names in a sweep; any other setting is swept by its full name."""


MAX_ROWS = 32
"""Maximum rows of a profile: each starts its own workers."""


UNCHANGED_ROW = "unchanged"


_BATCH_SIZE_SETTINGS = {"train.global_batch_size", "train.aggregation_frequency"}


@dataclass(frozen=True)
class ProfileLength:
    """Steps of a profile: `warm_up_steps` that are not measured, `steps` that are, and one more that ends with a
    checkpoint."""

    steps: int
    warm_up_steps: int

    @property
    def total_steps(self) -> int:
        return self.warm_up_steps + self.steps + 1


@dataclass(frozen=True)
class ProfileRow:
    name: str
    settings: dict[str, Any]
    """Swept values by setting name."""
    config: Config


@dataclass(frozen=True)
class ProfiledStep:
    window: StepWindow
    rows: int
    """Rows on this worker, as are micro-batches and tokens."""
    micro_batches: int
    real_tokens: int


@dataclass(frozen=True)
class ProfiledWorker:
    rank: int
    host: str
    cores: int
    """Cores that the process may use."""
    cpu_seconds: float
    """CPU seconds of the process, all threads, over all steps."""
    seconds: float
    """Wall seconds of all steps."""
    epoch: int
    """Nanoseconds since 1970 at its clock's zero."""
    steps: tuple[ProfiledStep, ...]


MeasuredRow = tuple[dict[str, Any], Sequence[ProfiledWorker]]
"""The row in the profile's JSON document, and its workers."""
SessionFactory = Callable[[Config, Path], AbstractContextManager[None]]
OnEvent = Callable[[dict[str, Any]], None]


def check_profile(configs: Iterable[Config], folder: Path) -> None:
    """Refuse before Ray starts: each row is checked like a training run."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder", code="not_empty")
    for config in configs:
        prepare.check_run(config, folder.parent)


def run_profile(
    config: Config,
    rows: Sequence[ProfileRow],
    length: ProfileLength,
    folder: Path,
    session: SessionFactory,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Measure `rows` of a recipe, write the profile's files into `folder`, and return its document.

    Each row has its own `session`: the number of Ray's CPUs is part of the measurement.
    """
    check_profile((row.config for row in rows), folder)
    load_before, measured_rows = os.getloadavg()[0], list[MeasuredRow]()
    for index, row in enumerate(rows):
        with session(row.config, folder):
            if len(rows) > 1:
                on_event({"kind": "stage", "text": f"row {index + 1} of {len(rows)}: {row.name}"})
            on_event(events.make_phase_event("reading the rows", "rows"))
            row_folder, train = folder / f"row-{index:02d}", config.recipe.train
            measured_rows.append(measure_row(row, row_folder, length, train.epochs, on_event, train.evaluate_every))
    document = {
        "kind": DOCUMENT_KIND,
        "version": DOCUMENT_VERSION,
        "name": folder.name,
        "recipe": config.recipe.name,
        "task": config.recipe.task,
        "model": config.recipe.model.name,
        "time": round(time.time(), 3),
        "length": {"steps": length.steps, "warm_up": length.warm_up_steps},
        "machine": {
            **{"host": os.uname().nodename, "cores": env.available_cores(), "processor": read_cpu_name()},
            "load": [load_before, os.getloadavg()[0]],
        },
        "rows": [row_summary for row_summary, _ in measured_rows],
    }
    trace_events = [
        event
        for number, (row, (_, workers)) in enumerate(zip(rows, measured_rows, strict=True))
        for event in build_trace_events(row.name, number, workers)
    ]
    trace = json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events})
    (folder / TRACE_FILE).write_text(trace, encoding="utf-8")
    (folder / PAGE_FILE).write_text(tables.render_profile(document), encoding="utf-8")
    (folder / JSON_FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return document


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile document from its file or its folder. Raises `UserError` for anything else."""
    file = path / JSON_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--compare: {path} is not a profile; name a {JSON_FILE} or its folder", code="not_found")
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = document["version"] if document["kind"] == DOCUMENT_KIND else None
    except (ValueError, KeyError, TypeError):
        version = None
    if version != DOCUMENT_VERSION:
        fix = "profile again with this version of rtrain" if version else f"name a {JSON_FILE} of rtrain profile"
        reason = f"--compare: {file} is not a profile of version {DOCUMENT_VERSION}"
        raise UserError(f"{reason}; {fix}", code="other_version")
    if missing := [name for name in REQUIRED_KEYS if not document.get(name)]:
        raise UserError(f"--compare: {file} lacks {', '.join(missing)}; profile again", code="incomplete")
    return document


# ----------------------------------------------------------------------------------------------------- the Chrome trace

# The Trace Event Format of Perfetto (ui.perfetto.dev) and chrome://tracing: nested complete events (`X`) on a worker's
# main thread, and pairs of asynchronous events (`b`, `e`) for gradient buckets in flight, since several overlap.
MAIN_THREAD = 1
"""Thread of the worker's own work."""
PROCESS_IDS_PER_ROW = 1000
"""Process ids per row of the profile."""


def build_trace_events(name: str, index: int, workers: Sequence[ProfiledWorker]) -> list[dict[str, Any]]:
    """Build the trace events of row `index` (from 0). Times are microseconds since its first step."""
    start_ns = min(worker.steps[0].window.start + worker.epoch for worker in workers)
    return [
        event for worker in workers for event in _worker_events(name, index * PROCESS_IDS_PER_ROW, worker, start_ns)
    ]


def _worker_events(name: str, first_process_id: int, worker: ProfiledWorker, start_ns: int) -> Iterator[dict[str, Any]]:
    process_id = first_process_id + worker.rank
    label = f"{name}, worker {worker.rank} on {worker.host}"
    yield {"ph": "M", "name": "process_name", "pid": process_id, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process_id, "args": {"sort_index": process_id}}
    yield {"ph": "M", "name": "thread_name", "pid": process_id, "tid": MAIN_THREAD, "args": {"name": "training"}}

    def to_trace_time(time_ns: int) -> float:
        return (time_ns + worker.epoch - start_ns) / 1e3

    for step in worker.steps:
        window = step.window
        counts = {"rows": step.rows, "micro_batches": step.micro_batches, "tokens": step.real_tokens}
        timing = {"ts": to_trace_time(window.start), "dur": window.wall / 1e3, "pid": process_id, "tid": MAIN_THREAD}
        yield {"ph": "X", "name": f"step {window.step_number}", "cat": "step", **timing, "args": counts}
        for index, span in enumerate(window.spans):
            common = {"name": span.kind, "cat": span.kind, "pid": process_id, "tid": MAIN_THREAD}
            if span.kind == COMM_ASYNC:
                span_id = f"{process_id}-{window.step_number}-{index}"
                yield {"ph": "b", "id": span_id, "ts": to_trace_time(span.start), **common}
                yield {"ph": "e", "id": span_id, "ts": to_trace_time(span.stop), **common}
            else:
                yield {"ph": "X", "ts": to_trace_time(span.start), "dur": (span.stop - span.start) / 1e3, **common}


def expand_sweeps(config: Config, sweeps: Sequence[str], length: ProfileLength) -> list[ProfileRow]:
    """Expand sweeps into rows: `workers=1,2` and `precision=fp32,bf16` make four.

    All rows keep the recipe's global batch size unless it is swept. Raises `ConfigError` with all problems.
    """
    values_by_setting, problems = dict[str, list[Any]](), list[Problem]()
    for sweep in sweeps:
        name, values = _parse_sweep(sweep, problems)
        if name in values_by_setting:
            fix = "write all its values in one --sweep"
            problems.append(Problem("--sweep", sweep, f"{name} is swept twice", fix, code="duplicate"))
        values_by_setting[name] = values
    fixed_overrides = _fixed_overrides(config, length, set(values_by_setting))
    for name in values_by_setting:
        if name in fixed_overrides and name not in _BATCH_SIZE_SETTINGS:
            reason, fix = "the profile sets this setting itself", "leave it out; --steps sets the number of steps"
            problems.append(Problem("--sweep", name, reason, fix, code="conflicting_settings"))
    rows, combinations = list[ProfileRow](), list(itertools.product(*values_by_setting.values()))
    if len(combinations) > MAX_ROWS:
        reason, fix = f"{len(combinations)} rows; the maximum is {MAX_ROWS}", "sweep fewer settings at a time"
        problems.append(Problem("--sweep", None, reason, fix, code="out_of_range"))
    if problems:
        raise ConfigError(problems)
    for combination in combinations:
        swept = dict(zip(values_by_setting, combination, strict=True))
        try:
            row_config = configuration.with_overrides(config, {**fixed_overrides, **swept})
            rows.append(ProfileRow(_row_name(swept), swept, row_config))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return rows


def _fixed_overrides(config: Config, length: ProfileLength, swept: set[str]) -> dict[str, Any]:
    """Overrides of all rows: no row evaluates, ends its training within the measured steps, or writes a remote copy,
    whose name rows of other profiles share."""
    train = config.recipe.train
    overrides: dict[str, Any] = {
        "train.epochs": max(train.epochs, length.total_steps + 1),  # an epoch has at least one step
        "train.evaluate_every": length.total_steps + 1,
        "cluster.storage": None,
    }
    if not swept & _BATCH_SIZE_SETTINGS:
        overrides |= {"train.global_batch_size": config.recipe.global_batch_size, "train.aggregation_frequency": None}
    elif "train.global_batch_size" in swept:
        overrides["train.aggregation_frequency"] = None
    else:
        overrides["train.global_batch_size"] = None
    return overrides


def _parse_sweep(text: str, problems: list[Problem]) -> tuple[str, list[Any]]:
    name, separator, values = text.partition("=")
    name = SETTING_ALIASES.get(name.strip(), name.strip())
    fix = f"write e.g. --sweep {next(iter(SETTING_ALIASES))}=1,2, or the full name of a setting"
    if not separator or not values.strip():
        problems.append(Problem("--sweep", text, "has no values", fix, code="missing"))
        return name, []
    try:
        parsed_values = yaml.safe_load(f"[{values}]")
    except (yaml.YAMLError, ValueError):  # ValueError: an invalid date
        problems.append(Problem("--sweep", text, "the values are not a list", fix, code="invalid_value"))
        return name, []
    if len(parsed_values) != len({repr(value) for value in parsed_values}):
        problems.append(Problem("--sweep", text, "has a duplicate value", "leave it out", code="duplicate"))
    return name, parsed_values


def _row_name(swept: dict[str, Any]) -> str:
    aliases = {setting: name for name, setting in SETTING_ALIASES.items()}
    return " ".join(f"{aliases.get(name, name)}={value}" for name, value in swept.items()) or UNCHANGED_ROW


def measure_row(
    profile_row: ProfileRow,
    folder: Path,
    length: ProfileLength,
    epochs: int,
    on_event: Callable[[dict[str, Any]], None],
    evaluate_every: int | None = None,
) -> MeasuredRow:
    """Train `length` steps of a row and measure their parts.

    The run folder is created at `folder` and removed at the end; the token store beside it is shared with training.
    `epochs` and `evaluate_every` belong to a full run of the recipe. If the training fails, the folder and its log
    remain.
    """
    prepared = prepare.prepare_run(profile_row.config, folder, tokens_root=folder.parent.parent)

    def forward_event(event: dict[str, Any]) -> None:
        # The profile ends before the run would.
        on_event({**event, "total_steps": length.total_steps} if event["kind"] == "progress" else event)

    try:
        controller.fit(prepared, end_step=length.total_steps, profile=True, write_reports=False, on_event=forward_event)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    run, recipe, steps_per_epoch = Run(folder), prepared.config.recipe, prepared.order.steps_per_epoch
    workers = sorted(map(read_worker, folder.glob(run.profile("*").name)), key=lambda worker: worker.rank)
    run_summary = summary.summarize(run)
    info = ProfiledRunInfo(
        name=profile_row.name,
        settings=profile_row.settings,
        precision=run_summary["precision"],
        device=run_summary["device"],
        global_batch_size=recipe.global_batch_size,
        order_digest=run_summary["order_digest"],
        # Each evaluation saves a checkpoint.
        save_every=min(recipe.train.save_every or steps_per_epoch, evaluate_every or steps_per_epoch),
        run_steps=epochs * steps_per_epoch,
        workers_per_replica=recipe.train.workers_per_replica,
    )
    row_summary = summarize_row(info, workers, length)
    shutil.rmtree(folder)
    return row_summary, workers


def read_worker(path: Path) -> ProfiledWorker:
    document, steps = json_files.load_json_object(path), list[ProfiledStep]()
    for entry in document.pop("steps"):
        spans = tuple(TimeSpan(*span) for span in entry["spans"])
        window = StepWindow(entry["step_number"], entry["start"], entry["stop"], spans)
        steps.append(ProfiledStep(window, entry["rows"], entry["micro_batches"], entry["real_tokens"]))
    return ProfiledWorker(**document, steps=tuple(steps))


@dataclass(frozen=True)
class ProfiledRunInfo:
    """Settings and results of a row."""

    name: str
    settings: Mapping[str, Any]
    precision: str
    device: str
    global_batch_size: int
    order_digest: str
    """Digest of the rows of all trained steps, in order."""
    save_every: int
    """Steps between two checkpoints in a run of the recipe."""
    run_steps: int
    """Steps of a full run of the recipe."""
    workers_per_replica: int = 1
    """Workers per replica; each reports the replica's rows."""


def summarize_row(info: ProfiledRunInfo, workers: Sequence[ProfiledWorker], length: ProfileLength) -> dict[str, Any]:
    """Build a row of the profile's JSON document. Times are seconds; the `parts` of a worker add up to its `step_s`.

    Raises `UserError` if a worker has not trained all steps of `length`.
    """
    steps_by_rank = {worker.rank: _measured_steps(worker, length) for worker in workers}
    worker_summaries = [_summarize_worker(worker, steps_by_rank[worker.rank]) for worker in workers]
    step_s = statistics.fmean(worker_summary["step_s"] for worker_summary in worker_summaries)
    steps = list(zip(*steps_by_rank.values(), strict=True))
    counts = {
        name: statistics.fmean(sum(getattr(step, name) for step in worker_steps) for worker_steps in steps)
        / info.workers_per_replica
        for name in ("rows", "real_tokens", "micro_batches")
    }
    breakdowns = [profiler.break_down(step.window).nanoseconds for worker in workers for step in worker.steps]
    save_times = [parts[profiler.CHECKPOINT] / 1e9 for parts in breakdowns if parts[profiler.CHECKPOINT]]
    mean_save_s = statistics.fmean(save_times) if save_times else 0.0
    return {
        "name": info.name,
        "settings": dict(info.settings),
        "workers": len(workers),
        "precision": info.precision,
        "device": info.device,
        "global_batch_size": info.global_batch_size,
        "micro_batches_per_step": round(counts["micro_batches"] * info.workers_per_replica / len(workers), 3),
        "step_s": step_s,
        "median_step_s": statistics.median(
            step.window.wall / 1e9 for steps in steps_by_rank.values() for step in steps
        ),
        "rows_per_second": counts["rows"] / step_s,
        "real_tokens_per_second": counts["real_tokens"] / step_s,
        "worker_summaries": worker_summaries,
        "checkpoint": {"seconds": mean_save_s, "every": info.save_every, "per_step": mean_save_s / info.save_every},
        "order_digest": info.order_digest,
        "run_steps": info.run_steps,
        "hosts": {worker.host: worker.cores for worker in workers},
    }


def _measured_steps(worker: ProfiledWorker, length: ProfileLength) -> list[ProfiledStep]:
    """Measured steps: without warm-up, and without the last, which ends with a checkpoint."""
    if len(worker.steps) != length.total_steps:
        reason = f"worker {worker.rank} trained {len(worker.steps)} of {length.total_steps} steps"
        raise UserError(f"{reason}: the attempt was interrupted; profile again", code="interrupted")
    return list(worker.steps[length.warm_up_steps : -1])


def _summarize_worker(worker: ProfiledWorker, steps: Sequence[ProfiledStep]) -> dict[str, Any]:
    parts_by_step = [profiler.break_down(step.window) for step in steps]
    return {
        "rank": worker.rank,
        "host": worker.host,
        "step_s": statistics.fmean(step.window.wall for step in steps) / 1e9,
        "parts": {
            name: statistics.fmean(parts.nanoseconds[name] for parts in parts_by_step) / 1e9 for name in STEP_PARTS
        },
        "hidden": statistics.fmean(parts.hidden for parts in parts_by_step) / 1e9,
        "cores_busy": round(worker.cpu_seconds / worker.seconds, 3),
        "steps": [
            {
                "step": step.window.step_number,
                "seconds": step.window.wall / 1e9,
                "parts": {name: value / 1e9 for name, value in parts.nanoseconds.items()},
                "hidden": parts.hidden / 1e9,
            }
            for step, parts in zip(steps, parts_by_step, strict=True)
        ],
    }
