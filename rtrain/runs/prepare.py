"""Prepare a run: check everything that can be refused, build the token store, create the run folder."""

import importlib.metadata
import platform
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.checkpoint import remote_copy
from rtrain.cluster import capacity, data_tasks, placement, preflight
from rtrain.config import Config, Recipe
from rtrain.config.data import is_table
from rtrain.core import events, json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data import checks, row_reader, sampling, sources, tables, unlabeled
from rtrain.data.order import RowOrder
from rtrain.data.store import builder as store_builder, commit, shards
from rtrain.data.store.store import Store
from rtrain.models import builder as models_builder, device, network_parts, precision
from rtrain.parallel import layout
from rtrain.planning import memory_estimate
from rtrain.report import data_stats, tracker_feed
from rtrain.runs import nodes, run_folders, trim_vocabulary
from rtrain.tasks import base
from rtrain.tasks.encode import resolve_window_spec
from rtrain.trainer import imbalance, losses, registered_loss, selection

DEVICE_KEY = "device"
"""Key of the decision in decisions.json."""
LOGGED_PACKAGES = ("rtrain", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
"""Packages whose versions are logged with a run."""


@dataclass(frozen=True)
class PreparedRun:
    """A prepared run: its folder, its frozen configuration, its rows."""

    run: Run
    config: Config
    store: Store
    model: Path
    device: device.DeviceChoice
    teacher: Path | None = None
    """The artifact of a student's teacher."""

    @property
    def order(self) -> RowOrder:
        """The order of the run's rows."""
        return sampling.make_order(self.config.recipe, self.store)

    @property
    def num_steps(self) -> int:
        return self.order.num_steps


@dataclass(frozen=True)
class _Inputs:
    """The rows and the model of a run, as every node reads them."""

    source: row_reader.DataSource
    full_weights: Path
    weights: Path
    """The model to train: `full_weights`, or a copy with a trimmed vocabulary."""


def prepare_run(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    tokens_root: Path | None = None,
    source: row_reader.DataSource | None = None,
    teacher_pass: store_builder.TeacherPass | None = None,
    is_resumed: bool = False,
) -> PreparedRun:
    """Check the configuration, build or reuse the token store, and open the run folder.

    The folder is written only after all checks, under the run's lock. The store is built before, since runs share it.

    Args:
        tokens_root: folder of the token stores; default: the parent of the run folder, so that sibling runs share it.
        source: result of `check_run`, if it ran already: there may be thousands of files.
        teacher_pass: computes the logits of a student's teacher.
        is_resumed: check as a resumed run, e.g. for the later trials of a search.
    """
    run_folder, config = resolve_run_folder(config, folder, reuse)
    run, root = Run(run_folder), tokens_root or run_folder.parent
    if run.exists:
        with run_folders.lock(run):  # refuse a run in use before its rows are read for hours
            pass
    created = run.first_event("created")
    config, inputs = _resolve_inputs(config, root, source, is_resumed=is_resumed or created is not None)
    origin = commit.hash_sources(config.recipe, inputs.source, inputs.weights)
    _refuse_before_tokenization(config, run, inputs, origin)
    selected_device = choose_device(config, run)
    store, was_built = _build_store(config, inputs, root, selected_device, teacher_pass)
    config, strategy_fields = resolve_strategy(config, selected_device, store, inputs.weights)
    with run_folders.lock_new_run(run, reuse) as run:
        if run.folder != run_folder:
            _refuse_existing_copy(config, run)
        frozen_config = run_folders.write_frozen_config(run, config)
        if config.recipe.train.device == "auto":
            run.decide_once(DEVICE_KEY, selected_device.device)
        if not created:
            run.append_event(
                "created",
                run=run.name,
                recipe=frozen_config.recipe.name,
                task=frozen_config.recipe.task,
                data_digest=store.manifest.digest,
                store=str(store.folder),
                # The run's own paths: its store may have been built from equal files elsewhere, and may be removed.
                origin=origin,
                recipe_digest=frozen_config.recipe.recipe_digest(),
                versions=_package_versions(),
            )
        run.append_event(
            "tokenized" if was_built else "tokens_reused",
            rows=store.manifest.rows,
            quarantined=store.manifest.quarantined,
            copies=store.manifest.copies,
            out_of_scope_rows=store.manifest.out_of_scope_rows,
            store=str(store.folder),
        )
        if strategy_fields:
            run.append_event("strategy", **strategy_fields)
        if inputs.weights != inputs.full_weights:
            run.append_event("vocabulary", **_vocabulary_fields(config.recipe, run, inputs, store, root))
        for kind, fields in _describe_rows(config.recipe, store, inputs.weights):
            if kind != "head" or not created:  # a resumed run loads the head from its checkpoint
                run.append_event(kind, **fields)
    return PreparedRun(run, frozen_config, store, inputs.weights, selected_device)


# --------------------------------------------------------------------------------------------------- rows and model


def check_run(
    config: Config, root: Path | None = None, source: row_reader.DataSource | None = None, is_resumed: bool = False
) -> tuple[row_reader.DataSource, Path]:
    """Check files, columns, model and precision before Ray starts; all problems are raised together.

    Args:
        root: folder with copies of hub files, which are not downloaded again.
        source: result of an earlier `inspect_all_sources`; its files are not inspected again.
        is_resumed: the run exists, so problems suggest no changed settings.
    """
    problems: list[Any] = [
        *store_builder.find_problems(config.recipe),
        *losses.check_label_smoothing(config.recipe),
        *imbalance.check_weighting(config.recipe),
        *registered_loss.check_loss(config.recipe),
        *selection.check_selection(config.recipe),
        *models_builder.check_model_settings(config.recipe),
    ]
    folder = None
    try:
        source = source or unlabeled.inspect_all_sources(config.recipe, root)
    except ConfigError as error:
        problems += [_with_resume_fix(problem) if is_resumed else problem for problem in error.problems]
    try:
        folder = models_builder.resolve_folder(config.recipe.model.name, root)
        tokens_read = config.recipe.data.window_tokens
        problems += models_builder.check_architecture(folder, tokens_read, is_resumed, config.recipe.model)
        problems += layout.check_parallelism(config.recipe, folder)
    except ConfigError as error:
        problems += error.problems
    problems += tracker_feed.check_installed(config)
    if config.deploy.cluster.address is None:
        problems += precision.check_local_precision(config.recipe.train.precision)
    if problems or source is None or folder is None:
        raise ConfigError(problems)
    return source, folder


def _with_resume_fix(problem: Problem) -> Problem:
    """The problem with a fix for a resumed run: a missing file may be at another path, but the rows cannot change."""
    fix = "restore it or name its new path: a resume reads the same rows"
    return replace(problem, fix=fix) if problem.reason == sources.NO_FILE_REASON else problem


def _resolve_inputs(
    config: Config, root: Path, source: row_reader.DataSource | None, *, is_resumed: bool
) -> tuple[Config, _Inputs]:
    """Check the inputs and return them as every node reads them, and the configuration with the model's pooling."""
    source, weights = nodes.check_nodes(config, *check_run(config, root, source, is_resumed=is_resumed), root)
    source = source.with_cached_digests(root)
    config = models_builder.resolve_pooling(config, weights)
    with data_tasks.restrict_data_tasks(config.deploy.cluster.data_labels):
        return config, _Inputs(source, weights, trim_vocabulary.trim_model(config.recipe, source, weights, root))


def _refuse_before_tokenization(config: Config, run: Run, inputs: _Inputs, origin: dict[str, dict[str, str]]) -> None:
    """Refuse a resume on changed rows, a full disk, and a new run that would overwrite a remote copy."""
    created, weights = run.first_event("created"), inputs.weights
    if created and created["data_digest"] != store_builder.compute_digest(config.recipe, inputs.source, weights):
        raise _changed_rows_error(run, created, origin)
    weight_bytes = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    train = config.recipe.train
    copies = preflight.checkpoint_size_factor(train.keep_checkpoints + train.keep_best - 1)
    preflight.check_disk_space(run.folder, required_bytes=copies * weight_bytes)
    if not created:
        _refuse_existing_copy(config, run)


def _changed_rows_error(run: Run, created: dict[str, Any], origin: dict[str, dict[str, str]]) -> UserError:
    """Return the error of a resume on changed rows: the order of a run and its scores depend on its rows."""
    changes = checks.describe_changes(created["origin"], origin)
    if not changes:
        return UserError(
            f"--resume: {run} was started with a version of rtrain that reads the same files "
            "differently; "
            "continue it with that version, or start another run with --new",
            code="other_version",
        )
    changes_text = "\n  ".join([*changes[:10], *([f"and {len(changes) - 10} more"] if len(changes) > 10 else [])])
    return UserError(
        f"--resume: {run} was started on other rows:\n  {changes_text}\n"
        "Restore these files, or start another run with --new.",
        code="rows_changed",
    )


def _build_store(
    config: Config,
    inputs: _Inputs,
    root: Path,
    selected_device: device.DeviceChoice,
    teacher_pass: store_builder.TeacherPass | None,
) -> tuple[Store, bool]:
    """Build or open the token store; return it, and whether it was built. Then the number of rows is known."""
    if problems := layout.check_devices(config.recipe, selected_device, inputs.weights):
        raise ConfigError(problems)
    with data_tasks.restrict_data_tasks(config.deploy.cluster.data_labels):
        store, was_built = store_builder.build_or_open(config.recipe, inputs.source, inputs.weights, root, teacher_pass)
    if problems := [
        *preflight.check_rows(config.recipe, store.num_rows("train")),
        *imbalance.check_class_weight_labels(config.recipe, store.manifest.labels),
        *selection.check_selection(config.recipe, store),
        *check_capacity(config, selected_device.device),
    ]:
        raise ConfigError(problems)
    return store, was_built


# ----------------------------------------------------------------------------------------------------- events of a run


def _package_versions() -> dict[str, str]:
    """Return the versions of Python, of the packages in `LOGGED_PACKAGES`, and of the platform."""
    versions = {"python": platform.python_version()}
    for name in LOGGED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):  # rtrain runs from a checkout
            versions[name] = importlib.metadata.version(name)
    return versions | {"platform": platform.platform()}


def _vocabulary_fields(recipe: Recipe, run: Run, inputs: _Inputs, store: Store, root: Path) -> dict[str, Any]:
    """Return the fields of the `vocabulary` event. The changed rows are counted once for a run."""
    if logged_fields := trim_vocabulary.vocabulary_lineage(run):
        return {**logged_fields[trim_vocabulary.VOCABULARY_EVENT], "model": str(inputs.weights)}
    labeled_source, _ = unlabeled.split_source(inputs.source)
    full_store, _ = store_builder.build_or_open(recipe, labeled_source, inputs.full_weights, root)
    return trim_vocabulary.event_fields(recipe, full_store, store, inputs.weights)


def _describe_rows(recipe: Recipe, store: Store, weights: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, fields) of the events about the rows of the token store."""
    task, manifest = base.get_task(recipe.task), store.manifest
    if manifest.quarantined:
        yield (
            "quarantined_rows",
            {
                "rows": manifest.quarantined,
                "reasons": checks.summarize_reasons(store.folder),
                "file": str(store.folder / checks.FILE_NAME),
            },
        )
    if manifest.selection:
        yield "selected_rows", {"left_out": 0, "relabeled": 0, **manifest.selection}
    if manifest.unlabeled:
        yield "unlabeled", {**manifest.unlabeled, "confidence": recipe.distill.confidence}
    model_config = json_files.load_json_object(weights / "config.json")
    if head := network_parts.head_event_fields(model_config, task.auto_model, manifest.labels):
        yield "head", head
    for fields in data_stats.describe_labels(store, task.output):
        yield "labels", fields
    for fields in find_overlaps(store):
        yield "overlap", fields
    if not task.packs_text:  # packed blocks fill the model's window
        reading, tokenizer = resolve_window_spec(task, recipe.data), shards.load_task_tokenizer(recipe, weights)
        limit = f"data.max_tokens={reading.max_tokens}"
        if reading.max_windows > 1:
            limit = f"data.max_windows={reading.max_windows}"
        yield "texts", {**data_stats.describe_texts(store, tokenizer), "limit": limit}
    if conflicts := data_stats.find_conflicts(store, task.output):
        yield "conflicts", conflicts


def find_overlaps(store: Store) -> list[dict[str, Any]]:
    """Return the fields of `overlap` events: splits with rows that are training rows too."""
    overlaps: list[dict[str, Any]] = []
    for split in ("valid", "test"):
        in_training_set, split_fields = store.in_training_set(split), {"split": split, "rows": store.num_rows(split)}
        if in_training_set is not None and in_training_set.any():
            row_places = store.describe_rows(split, np.flatnonzero(in_training_set))
            overlaps.append({**split_fields, "trained_rows": int(in_training_set.sum()), "row_places": row_places})
    return overlaps


def row_events(run: Run) -> list[dict[str, Any]]:
    """Return the events about the rows from the newest preparation of a run."""
    row_events = run.events(*events.ROW_EVENTS)
    starts = (place for place, event in enumerate(row_events) if event["kind"] in events.ROW_EVENTS[:2])
    return row_events[max(starts, default=0) :]


# ------------------------------------------------------------------------------------------- remote copies and folders


def _refuse_existing_copy(config: Config, run: Run) -> None:
    """Refuse a new run if the storage holds a run of this name, which it would overwrite."""
    if (run_copy := remote_copy.make_remote_copy(config.deploy.cluster, run.folder)) and run_copy.exists():
        raise UserError(
            f"cluster.storage: {run_copy.url} holds a run already; write --resume to continue it, or another --out",
            code="already_exists",
        )


def refuse_lost_search(config: Config, folder: Path, reuse: run_folders.Reuse, *command_words: object) -> None:
    """Refuse a new search if the storage holds a search of this name, or only its trials.

    Args:
        command_words: words of the command line that starts a run like its trials, for the message.
    """
    run, storage = Run(folder), f"{config.deploy.cluster.storage}/{folder.name}"
    if config.deploy.cluster.storage is None or run.exists:
        return
    if reuse != "resume":
        _refuse_existing_copy(config, run)
    if remote_copy.RemoteCopy(config.deploy.cluster.storage, run.name).exists():
        return
    if not remote_copy.RemoteCopy(storage, run.trial(0).name).exists():
        return
    options = ("--resume", "--out", f"NEW/{run.trial(0).name}", "--set", f"cluster.storage={storage}")
    trial_command = shlex.join(["rtrain", *map(str, command_words), *options])
    raise UserError(
        f"cluster.storage: {storage} has the trials of a search but not the search, which cannot be resumed without "
        "its journal; start another with another --out and without --resume. Resume one of its trials: "
        f"{trial_command}",
        code="lost_folder",
    )


def resolve_run_folder(config: Config, folder: Path, reuse: run_folders.Reuse) -> tuple[Path, Config]:
    """Restore a lost run folder from its remote copy, then choose the folder (`run_folders.choose_folder`), and copy
    the rows of databases (`rtrain.data.tables`)."""
    if reuse == "resume":
        restore_run(config, folder)
        if is_table(config.recipe.data.path):  # the run keeps its copy of the rows
            kept_settings = config.explicit_settings - {"data.path", "data.query"}
            config = replace(config, explicit_settings=kept_settings)
    folder, config = run_folders.choose_folder(folder, config, reuse)
    copies = tables.copy_tables(config.recipe.data, folder.parent)
    resolved_config = configuration.with_overrides(config, copies) if copies else config
    return folder, replace(resolved_config, explicit_settings=config.explicit_settings)


def restore_run(config: Config, folder: Path) -> None:
    """Restore a lost run or search from its remote copy, if there is one. The trials of a search are restored when it
    starts."""
    if (
        not Run(folder).exists
        and (run_copy := remote_copy.make_remote_copy(config.deploy.cluster, folder))
        and run_copy.exists()
    ):
        run_copy.restore(folder)


# ------------------------------------------------------------------------------------ devices, capacity and strategy


def choose_device(config: Config, run: Run) -> device.DeviceChoice:
    """Return the device: of the recipe, else of the run's earlier decision, else of the cluster's nodes and its
    autoscaler's node types."""
    train = config.recipe.train
    requested = train.device if train.device != "auto" else run.decisions.get(DEVICE_KEY, "auto")
    max_gpus = capacity.max_accelerators("gpu", config.deploy.cluster.labels)
    has_capacity = max_gpus and placement.max_workers(
        capacity.live_nodes(),
        capacity.autoscaler_limits(),
        capacity.resource_request_from_config(config, "gpu"),
        train.workers,
    )
    return device.choose_device(
        requested, train.workers, train.min_workers, max_gpus, device.can_use_gpus(), has_capacity
    )


def check_capacity(config: Config, device_type: str = "cpu") -> list[Problem]:
    """Return the problems that keep the workers or their data tasks from ever being placed on the cluster."""
    settings = config.deploy.cluster
    absent_labels = [
        *capacity.find_unmatched_labels("cluster.labels", settings.labels),
        *capacity.find_unmatched_labels("cluster.data_labels", settings.data_labels),
    ]
    needs = capacity.resource_request_from_config(config, device_type)
    return absent_labels or preflight.check_capacity(
        config.recipe, needs, capacity.live_nodes(), capacity.autoscaler_limits()
    )


def resolve_strategy(
    config: Config, selected_device: device.DeviceChoice, store: Store, model: Path
) -> tuple[Config, dict[str, Any] | None]:
    """Return the configuration with a strategy, and the fields of the `strategy` event (None if the strategy is
    manual).

    The layout of an elastic run fits the minimum number of workers too.

    Raises:
        ConfigError: no layout fits, or the memory of the nodes is unknown.
    """
    recipe, device_type = config.recipe, selected_device.device
    if recipe.train.strategy == "manual":
        return config, None
    labels = config.deploy.cluster.labels
    resources = [*capacity.nodes_with_labels(labels), *capacity.startable_node_types(labels).values()]
    micro_batch_spec = _micro_batch_spec(config, selected_device, store)

    def fit_strategy(workers: int) -> tuple[memory_estimate.LayoutChoice, dict[str, Any]]:
        memory = memory_estimate.tightest_memory_limit(resources, device_type, workers)
        if memory is None:
            reason = f"the memory of the cluster's {capacity.WORKER_RESOURCE[device_type]}s is unknown"
            fix = "write manual, with train.zero_stage or train.tensor_parallel_size"
            raise ConfigError([Problem("train.strategy", "auto", reason, fix, code="unknown_memory")])
        layouts = layout.iter_valid_layouts(recipe, model, workers)
        memories = memory_estimate.memory_of_layouts(recipe, model, layouts, micro_batch_spec, workers, device_type)
        choice = memory_estimate.first_fitting_layout(memories, memory)
        return choice, {
            "reason": choice.reason,
            "settings": choice.layout.settings,
            "workers": workers,
            "used_bytes": round(memory.used_bytes(choice.worker_memory)),
            "limit_bytes": round(memory.limit_bytes),
        }

    # The minimum has the largest shards; the maximum may share a node; a number that fills a node leaves the least
    # memory.
    max_workers = selected_device.workers
    min_workers = recipe.train.min_workers or max_workers
    slots_by_node = (capacity.count_worker_slots([node], device_type) for node in resources)
    worker_counts = {min_workers, max_workers, *(min(max(slots, min_workers), max_workers) for slots in slots_by_node)}
    choices = [fit_strategy(workers) for workers in sorted(worker_counts)]
    merged_layout = layout.merge_layouts([choice.layout for choice, _ in choices])
    fields = next((fields for choice, fields in choices if choice.layout == merged_layout), choices[-1][1])
    resolved_config = configuration.with_overrides(config, {"train.strategy": "manual", **merged_layout.settings})
    return resolved_config, fields | {"settings": merged_layout.settings}


def _micro_batch_spec(
    config: Config, selected_device: device.DeviceChoice, store: Store
) -> memory_estimate.MicroBatchShape:
    recipe, lengths = config.recipe, store.column("train", "length")
    requested = recipe.train.precision
    # On a GPU all formats but fp32 have the same size.
    precision_format = (
        "bf16" if selected_device.device == "gpu" and requested == "auto" else precision.local_precision(requested)
    )
    return memory_estimate.MicroBatchShape(
        memory_estimate.largest_micro_batch(recipe, selected_device.device, int(lengths.max())),
        precision_format,
        max(1, len(store.manifest.labels)),
        tokens_per_step=recipe.global_batch_size * float(lengths.mean()),
    )
