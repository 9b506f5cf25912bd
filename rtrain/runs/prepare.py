"""From a configuration to a run that may start: everything that can be refused is refused, and its rows are there."""

import importlib.metadata
import platform
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.checkpoint import remote_copy
from rtrain.cluster import capacity as cluster_capacity, placement, preflight
from rtrain.config import Config
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data import checks, quarantine, row_reader, unlabeled
from rtrain.data.order import Order
from rtrain.data.sources import find
from rtrain.data.store import builder as store_builder, commit, shards
from rtrain.data.store.store import Store
from rtrain.models import builder as models_builder, device, heads, precision
from rtrain.parallel import constraints
from rtrain.report import label_counts, text_stats
from rtrain.report.live import trackers
from rtrain.runs import choose_strategy, node_checks, run_folders, trim_vocabulary
from rtrain.tasks import base
from rtrain.tasks.encode import reading_of
from rtrain.trainer import losses

DEVICE = "device"
"""The name under which a run keeps the decision."""


PACKAGES = ("rtrain", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
"""Those whose versions are logged with a run."""
TOLD = (
    *("tokenised", "tokens_reused", "strategy", "vocabulary", "bad_rows"),
    *("unlabelled", "head", "labels", "overlap", "texts", "conflicts"),
)
"""What is logged of a run's rows before it is followed, the first or the second of these first."""


@dataclass(frozen=True)
class Prepared:
    """A run that may start: its folder, its frozen configuration, its rows."""

    run: Run
    config: Config
    store: Store
    model: Path
    device: device.Choice
    teacher: Path | None = None
    """The artefact that a student learns from."""

    @property
    def order(self) -> Order:
        """The rows of the run's updates."""
        train, rows = self.config.recipe.train, self.store.rows("train")
        per_update = self.config.recipe.rows_per_update
        return Order(self.store.manifest.digest, rows, per_update, train.epochs, train.seed)

    @property
    def updates(self) -> int:
        return self.order.updates


def check(
    config: Config,
    root: Path | None = None,
    source: row_reader.Source | None = None,
    begun: bool = False,
) -> tuple[row_reader.Source, Path]:
    """Everything that can be refused before Ray starts, all at once: files, columns, model, precision.

    What was copied from the hub under `root` is not asked for again, and the files of a `source` that was found before
    are not looked at again. The settings of a run that has `begun` cannot be changed any more.
    """
    problems: list[Any] = [
        *store_builder.problems(config.recipe),
        *losses.problems(config.recipe),
        *models_builder.problems(config.recipe),
    ]
    folder = None
    try:
        source = source or unlabeled.source(config.recipe, root)
    except ConfigError as error:
        problems += [_put_back(one) if begun else one for one in error.problems]
    try:
        folder = models_builder.resolve(config.recipe.model.name, root)
        tokens_read = config.recipe.data.window_tokens
        problems += models_builder.check_architecture(folder, tokens_read, begun, config.recipe.model)
        problems += constraints.problems(config.recipe, folder)
    except ConfigError as error:
        problems += error.problems
    problems += trackers.missing(config)
    if config.deploy.cluster.address is None:
        problems += precision.refused_here(config.recipe.train.precision)
    if problems or source is None or folder is None:
        raise ConfigError(problems)
    return source, folder


def _put_back(problem: Problem) -> Problem:
    """A problem of a run that has begun: where its file is gone, another place may be named, and no other rows."""
    fix = "put it back at that path or name its new place, as a resume reads the rows that the run has begun with"
    return replace(problem, fix=fix) if problem.reason == find.NO_FILE else problem


def prepare(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    tokens_root: Path | None = None,
    source: row_reader.Source | None = None,
    taught: store_builder.Taught | None = None,
    begun: bool = False,
) -> Prepared:
    """Check, make or reuse the token store, and open the run folder. The folder is written only when nothing is wrong,
    and while no other process holds the run; the store is made before that, since other runs share it.

    The store lies under `tokens_root`, by default the folder that holds the run, so that runs side by side share it.
    `source` is what `check` found, where that was asked already: there may be thousands of files. `taught` has a
    student's teacher answer the rows. A run that is a part of what has `begun` is checked as that is.
    """
    chosen_folder, config = chosen(config, folder, reuse)
    run, root = Run(chosen_folder), tokens_root or chosen_folder.parent
    if run.exists:
        with run_folders.hold(run):  # what is being trained is refused before hours of reading its rows
            pass
    created = run.first("created")
    begun = begun or created is not None
    source, weights = node_checks.share(config, *check(config, root, source, begun=begun), root)
    source = source.beside(root)
    config = models_builder.resolved(config, weights)
    with cluster_capacity.data_tasks_on(config.deploy.cluster.data_labels):
        whole, weights = weights, trim_vocabulary.trimmed(config.recipe, source, weights, root)
    origin = commit.origin(config.recipe, source, weights)
    if created and created["data_digest"] != store_builder.digest(config.recipe, source, weights):
        raise _other_rows(run, created, origin)
    preflight.disk(run.folder, needed=_disk_needed(weights, config.recipe.train.keep))
    if not created:
        _refuse_copied(config, run)
    chosen_device = device_of(config, run)
    if problems := constraints.of_devices(config.recipe, chosen_device, weights):
        raise ConfigError(problems)
    with cluster_capacity.data_tasks_on(config.deploy.cluster.data_labels):
        store, made = store_builder.ensure(config.recipe, source, weights, root, taught)
    if problems := [*preflight.rows(config.recipe, store.rows("train")), *capacity(config, chosen_device.device)]:
        raise ConfigError(problems)
    config, laid_out = choose_strategy.decided(config, chosen_device, store, weights)
    task = base.get(config.recipe.task)
    with run_folders.claimed(run, reuse) as run:
        if run.folder != chosen_folder:
            _refuse_copied(config, run)
        frozen = run_folders.freeze(run, config)
        if config.recipe.train.device == "auto":
            run.decide(DEVICE, chosen_device.device)
        if not created:
            run.append(
                "created",
                run=run.name,
                recipe=frozen.recipe.name,
                task=frozen.recipe.task,
                data_digest=store.manifest.digest,
                store=str(store.folder),
                # The run's own names: its store may have been made from equal files elsewhere, and may be removed.
                origin=origin,
                identity=frozen.recipe.identity(),
                versions=_versions(),
            )
        run.append(
            "tokenised" if made else "tokens_reused",
            rows=store.manifest.rows,
            quarantined=store.manifest.quarantined,
            copies=store.manifest.copies,
            left_out=store.manifest.left_out,
            store=str(store.folder),
        )
        if laid_out:
            run.append("strategy", **laid_out)
        if weights != whole:
            run.append("vocabulary", **trim_vocabulary.told(run, config.recipe, source, whole, weights, store, root))
        if store.manifest.quarantined:
            file, reasons = store.folder / quarantine.NAME, quarantine.commonest(store.folder)
            run.append("bad_rows", rows=store.manifest.quarantined, reasons=reasons, file=str(file))
        if store.manifest.unlabelled:
            run.append("unlabelled", **store.manifest.unlabelled, confidence=config.recipe.distill.confidence)
        head = heads.told(json_files.read(weights / "config.json"), task.auto_model, store.manifest.labels)
        if head and not created:  # the head of a resumed run goes on from its checkpoint
            run.append("head", **head)
        for found in label_counts.told(store, task.output):
            run.append("labels", **found)
        for found in find_overlaps(store):
            run.append("overlap", **found)
        if not task.packs:  # blocks of text fill the model's window
            reading, tokenizer = reading_of(task, config.recipe.data), shards.tokenizer_of(config.recipe, weights)
            limit = f"data.max_tokens={reading.max_tokens}"
            if reading.max_windows > 1:
                limit = f"data.max_windows={reading.max_windows}"
            run.append("texts", **text_stats.describe_texts(store, tokenizer), limit=limit)
        if conflicts := text_stats.find_conflicts(store, task.output):
            run.append("conflicts", **conflicts)
    return Prepared(run, frozen, store, weights, chosen_device)


def _versions() -> dict[str, str]:
    """Version by name, of Python, of the packages that training depends on, and of the platform."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):  # rtrain from a checkout that was not installed
            found[name] = importlib.metadata.version(name)
    return found | {"platform": platform.platform()}


def _refuse_copied(config: Config, run: Run) -> None:
    """Refuse a new run under the name of one that the storage holds: its copies would be overwritten."""
    if (copy := remote_copy.of(config.deploy.cluster, run.folder)) and copy.exists():
        raise UserError(
            f"cluster.storage: {copy.url} holds a run already; write --resume to continue it, or another --out",
            code="already_exists",
        )


def refuse_lost(config: Config, folder: Path, reuse: run_folders.Reuse, *words: object) -> None:
    """Refuse a new search under the name of one that the storage holds; and any of which it holds the trials alone, as
    earlier versions have left it. `words` of a command line begin a run like its trials."""
    run, storage = Run(folder), f"{config.deploy.cluster.storage}/{folder.name}"
    if config.deploy.cluster.storage is None or run.exists:
        return
    if reuse != "resume":
        _refuse_copied(config, run)
    if remote_copy.Replica(config.deploy.cluster.storage, run.name).exists():
        return
    if not remote_copy.Replica(storage, run.trial(0).name).exists():
        return
    options = ("--resume", "--out", f"NEW/{run.trial(0).name}", "--set", f"cluster.storage={storage}")
    one = shlex.join(["rtrain", *map(str, words), *options])
    raise UserError(
        f"cluster.storage: {storage} holds the trials of a search whose folder is gone, and it cannot be gone on with "
        f"without; to start another, name another --out, without --resume. One of its trials goes on by itself: {one}",
        code="lost_folder",
    )


def find_overlaps(store: Store) -> list[dict[str, Any]]:
    """The splits with rows that are training rows too."""
    found: list[dict[str, Any]] = []
    for split in ("valid", "test"):
        seen, counted = store.seen(split), {"split": split, "rows": store.rows(split)}
        if seen is not None and seen.any():
            places = store.places(split, np.flatnonzero(seen))
            found.append({**counted, "seen": int(seen.sum()), "places": places})
    return found


def device_of(config: Config, run: Run) -> device.Choice:
    """What the run trains on: what the recipe says, else what the run has decided before, else what the cluster has or
    may start."""
    train = config.recipe.train
    wanted = train.device if train.device != "auto" else run.decisions.get(DEVICE, "auto")
    gpus = cluster_capacity.most("gpu", config.deploy.cluster.labels)
    room = gpus and placement.workers(
        cluster_capacity.up(), cluster_capacity.may_start(), cluster_capacity.needs(config, "gpu"), train.workers
    )
    return device.choose(wanted, train.workers, train.min_workers, gpus, device.usable(), room)


def said_of_rows(run: Run) -> list[dict[str, Any]]:
    """What the newest preparation of a run has logged of its rows."""
    log = run.events(*TOLD)
    last = max((place for place, event in enumerate(log) if event["kind"] in TOLD[:2]), default=0)
    return log[last:]


def chosen(config: Config, folder: Path, reuse: run_folders.Reuse) -> tuple[Path, Config]:
    """`opening.choose`, after a resumed run whose folder was lost with its machine is brought back from its copy."""
    if reuse == "resume":
        bring_back(config, folder)
    return run_folders.choose(folder, config, reuse)


def bring_back(config: Config, folder: Path) -> None:
    """Bring a run, or a search, whose folder was lost back from its copy, where it has one. The trials of a search come
    with its start."""
    if not Run(folder).exists and (copy := remote_copy.of(config.deploy.cluster, folder)) and copy.exists():
        copy.restore(folder)


def _other_rows(run: Run, created: dict[str, Any], origin: dict[str, dict[str, str]]) -> UserError:
    """The error of a resume on other rows: the order of a run and its scores belong to the rows it was started on."""
    changes = checks.changes(created["origin"], origin)
    if not changes:
        return UserError(
            f"--resume: {run} was started with a version of rtrain that makes other rows of the same files; "
            "continue it with that version, or start another run with --new",
            code="other_version",
        )
    listed = "\n  ".join([*changes[:10], *([f"and {len(changes) - 10} more"] if len(changes) > 10 else [])])
    return UserError(
        f"--resume: {run} was started on other rows:\n  {listed}\n"
        "Restore these files, or start another run with --new.",
        code="rows_changed",
    )


def _disk_needed(weights: Path, keep: int) -> int:
    return preflight.checkpoint_copies(keep) * sum(path.stat().st_size for path in weights.glob("*.safetensors"))


def capacity(config: Config, kind: str = "cpu") -> list[Problem]:
    """What keeps the workers, or their data tasks, from ever having room on the cluster."""
    settings = config.deploy.cluster
    absent = [
        *cluster_capacity.absent("cluster.labels", settings.labels),
        *cluster_capacity.absent("cluster.data_labels", settings.data_labels),
    ]
    needs = cluster_capacity.needs(config, kind)
    return absent or preflight.capacity(config.recipe, needs, cluster_capacity.up(), cluster_capacity.may_start())
