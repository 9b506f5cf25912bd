"""Rehearsal plan: the cluster of a cluster file, and the command for another run folder. Pure, except that local paths
of the command must exist.

An argument of the command is an option with its value, a setting (`--set name=value`), or a positional word.
"""

import glob
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rtrain import config
from rtrain.cluster import placement, pricing
from rtrain.cluster.capacity import AutoscalerLimits, NodeSpec, ResourceRequest
from rtrain.cluster.cluster_file import CLOUDS, ClusterFile, InvalidYaml, get_nested, parse_documents
from rtrain.cluster.jobs import job_names
from rtrain.core.errors import ConfigError, Problem

PROVIDER_CLASS, FOLDER_SETTING = "rtrain.rehearsal.provider.RehearsalNodeProvider", "rehearsal_folder"
"""Node provider of the autoscaler, and its setting with the folder of the machine registry."""
MAX_IDLE_S = 60.0
"""Maximum idle timeout in seconds of a rehearsed node. With a much shorter one, nodes that an elastic run requested are
terminated before it has grown onto them."""
SMALL_NODE_CPUS = 2
REPLACED_OPTIONS = (
    *("--address", "--autoscaling-config", "--block", "--disable-usage-stats", "--head"),
    *("--labels", "--object-store-memory", "--resources"),
)
"""Options of the file's `ray start` that the rehearsal sets itself, besides ports, folders and amounts."""
COMMAND_LISTS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""Command lists that Ray's autoscaler requires in a file, even if it runs none."""
LOCAL_PATH_SETTINGS = (
    *("data.path", "data.valid", "data.test", "model.name", "augment.paraphrase", "augment.back_translation_model"),
    *("compress.unlabeled_rows_path", "distill.unlabeled_rows_path", "distill.student", "cluster.prices"),
)
"""Settings whose value may be a local file or folder."""
SETTING_OF_OPTION = {"--data": "data.path", "--valid": "data.valid", "--test": "data.test", "--model": "model.name"}
"""Options whose value may be a local file or folder, and their settings."""
REHEARSAL_OPTIONS = ("--out", "--address", "cluster.address", "cluster.storage")
"""Options and settings that the rehearsal sets itself."""
DROPPED_FLAGS = ("--resume", "--new", "--json")
SET_OPTION = "--set"


@dataclass(frozen=True)
class RehearsedNodeType:
    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    min_workers: int
    max_workers: int
    is_spot: bool
    instance_type: str | None
    dollars_per_hour: float | None
    """On-demand price per hour; None if unknown."""


@dataclass(frozen=True)
class RehearsalPlan:
    head: RehearsedNodeType
    node_types: tuple[RehearsedNodeType, ...]
    """Worker node types."""
    max_workers: int
    """Maximum workers of all types."""
    idle_timeout_s: float
    """Idle timeout of the file in seconds."""
    watcher: str | None
    """Cloud of the spot watcher on each worker; None if the file starts no watcher."""
    head_options: tuple[str, ...]
    """Options of the file's `ray start` that apply to a rehearsal."""
    worker_options: tuple[str, ...]
    start_hook: str | None
    """The file's RAY_START_HOOK."""

    @property
    def min_workers(self) -> int:
        """Workers that are always up."""
        return sum(node_type.min_workers for node_type in self.node_types)

    @property
    def has_gpus(self) -> bool:
        """Whether its nodes have GPUs: a rehearsal only declares them."""
        return any(node_type.resources.get("GPU") for node_type in self.node_types)

    @property
    def rehearsal_idle_timeout_s(self) -> float:
        return min(self.idle_timeout_s, MAX_IDLE_S)

    @property
    def types_by_name(self) -> dict[str, RehearsedNodeType]:
        return {node_type.name: node_type for node_type in (self.head, *self.node_types)}

    def autoscaler_config(self, folder: str) -> dict[str, Any]:
        """Autoscaler configuration in place of the file: the same cluster on this machine, whose machine registry is in
        `folder`. Machines start Ray themselves."""
        node_types = {
            node_type.name: {
                "resources": {name: int(amount) for name, amount in node_type.resources.items()},
                "labels": dict(node_type.labels),
                "min_workers": node_type.min_workers,
                "max_workers": node_type.max_workers,
                "node_config": {},
            }
            for node_type in (self.head, *self.node_types)
        }
        return {
            "cluster_name": "rehearsal",
            "max_workers": self.max_workers,
            "idle_timeout_minutes": self.rehearsal_idle_timeout_s / 60,
            "provider": {
                "type": "external",
                "module": PROVIDER_CLASS,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                FOLDER_SETTING: folder,
            },
            "auth": {},
            "head_node_type": self.head.name,
            "available_node_types": node_types,
            "file_mounts": {},
            "cluster_synced_files": [],
            **{f"{name}_commands": [] for name in COMMAND_LISTS},
        }

    def shrink_to(self, workers: int, data_cpus: int) -> "RehearsalPlan | None":
        """The same cluster with nodes of two CPUs, so few that a CPU run with its data tasks needs all of them, and
        shrinks without one. None without CPU nodes."""
        cpu_types = [node for node in self.node_types if node.resources.get("CPU", 0) >= 1 and node.max_workers]
        if not cpu_types:
            return None
        nodes = math.ceil((workers + data_cpus) / SMALL_NODE_CPUS)
        small_type = replace(cpu_types[0], resources={"CPU": float(SMALL_NODE_CPUS)}, min_workers=0, max_workers=nodes)
        return replace(self, node_types=(small_type,), max_workers=nodes)

    def required_nodes(self, workers: int, request: ResourceRequest) -> int | None:
        """Minimum worker nodes with capacity for a run and its data tasks; None if the limits are too small."""

        def spec(node: RehearsedNodeType) -> NodeSpec:
            return NodeSpec(node.resources, node.labels)

        node_types = {node.name: (spec(node), node.max_workers) for node in self.node_types}
        limits = AutoscalerLimits([spec(self.head)], node_types, self.max_workers)
        counts = placement.min_node_counts(limits, request, request.capacity_for(workers))
        return None if counts is None else sum(counts)


def parse_plan(text: str) -> RehearsalPlan:
    """Parse a cluster file. Raises `ConfigError` with all problems that prevent a rehearsal."""
    file = parse_launcher_file(text)
    specs, head_type = file.get("available_node_types"), file.get("head_node_type")
    if not isinstance(specs, dict) or not specs:
        fix = "write them, as rtrain cluster init --cloud aws does"
        raise ConfigError([_file_problem("no_node_types", "the file has no available_node_types to scale", fix)])
    if head_type not in specs:
        reason = f"head_node_type is {head_type}, which is not one of {', '.join(map(str, specs))}"
        raise ConfigError([_file_problem("unknown_name", reason, "name the head's type")])
    prices = pricing.load_price_table(metadata=file.get("metadata"))
    node_types, problems = [], []
    for node in file.node_types:
        resources = node.resources
        if not resources and node.spec.get("resources") is None:
            instance = node.instance_type or "its instance type"
            reason = f"the node type {node.name} has no resources, and the autoscaler does not know those of {instance}"
            problems.append(_file_problem("no_resources", reason, f"write resources: {{CPU: ...}} in {node.name}"))
        if fractional := [f"{key}: {amount:g}" for key, amount in resources.items() if not amount.is_integer()]:
            reason = f"the node type {node.name} has fractional resources: {', '.join(fractional)}"
            problems.append(_file_problem("not_integer", reason, "write integers, e.g. 1000 for 1"))
        price = prices.get(node.instance_type or "")
        node_types.append(
            RehearsedNodeType(
                name=node.name,
                resources=resources,
                labels=node.labels,
                min_workers=node.min_workers,
                max_workers=min(file.max_workers, node.max_workers(file.max_workers)),
                is_spot=node.is_spot,
                instance_type=node.instance_type,
                dollars_per_hour=price.on_demand if price else None,
            )
        )
    if problems:
        raise ConfigError(problems)
    ray_starts = {start.is_head: start for start in file.ray_starts()}
    head_start, worker_start = ray_starts.get(True), ray_starts.get(False)
    return RehearsalPlan(
        head=next(node_type for node_type in node_types if node_type.name == head_type),
        node_types=tuple(node_type for node_type in node_types if node_type.name != head_type),
        max_workers=file.max_workers,
        idle_timeout_s=60.0 * float(file.get("idle_timeout_minutes", default=5)),
        watcher=next((cloud for _, cloud in file.watchers() if cloud in CLOUDS), None),
        head_options=_usable_options(head_start.options) if head_start else (),
        worker_options=_usable_options(worker_start.options) if worker_start else (),
        start_hook=head_start.environment.get("RAY_START_HOOK") if head_start else None,
    )


def _file_problem(code: str, reason: str, fix: str) -> Problem:
    return Problem("--file", None, reason, fix, code=code)


def parse_launcher_file(text: str) -> ClusterFile:
    """Parse a launcher file. Raises `ConfigError` for any other file."""
    try:
        parsed = parse_documents(text)
    except InvalidYaml as error:
        reason = f"line {error.line}: invalid YAML: {error.reason}"
        raise ConfigError([_file_problem("unreadable", reason, "fix it")]) from None
    if len(parsed) != 1 or not isinstance(parsed[0].value, dict) or "apiVersion" in parsed[0].value:
        reason, fix = "the file is not a Ray launcher file", "write one with rtrain cluster init --cloud aws"
        raise ConfigError([_file_problem("not_a_cluster_file", reason, fix)])
    return ClusterFile.from_document(parsed[0])


def _usable_options(options: Mapping[str, str]) -> tuple[str, ...]:
    dropped_options = re.compile(r"--(?:[a-z-]+-port|port|temp-dir|plasma-directory|num-[cg]pus|memory|min-.*|max-.*)")
    return tuple(
        f"{name}={value}" if value else name
        for name, value in options.items()
        if name not in REPLACED_OPTIONS and not dropped_options.fullmatch(name)
    )


@dataclass(frozen=True)
class CommandArgument:
    name: str
    """Name of an option (`--data`) or of a setting (`data.path`), or a positional word."""
    value: str | None = None

    @property
    def words(self) -> list[str]:
        if self.value is None:
            return [self.name]
        return [self.name, self.value] if self.name.startswith("-") else [SET_OPTION, f"{self.name}={self.value}"]


def parse_words(words: Sequence[str]) -> Iterator[CommandArgument]:
    remaining = iter(words)
    for word in remaining:
        name, has_value, value = word.partition("=")
        if not word.startswith("-") or word in job_names.VALUELESS_OPTIONS:
            yield CommandArgument(word)
            continue
        value = value if has_value else next(remaining, "")
        if name == SET_OPTION:
            name, _, value = value.partition("=")
        yield CommandArgument(name.strip(), value)


def join_words(arguments: Iterable[CommandArgument]) -> list[str]:
    return [part for word in arguments for part in word.words]


def rehearsal_command(words: Sequence[str], out: str, storage: str) -> list[str]:
    """The command for the run folder `out` with the rehearsal's settings: each step is logged, and remote copies go to
    `storage` if the user set one."""
    arguments = list(parse_words(words))
    user_arguments = [word for word in arguments if word.name not in (*REHEARSAL_OPTIONS, *DROPPED_FLAGS)]
    rehearsal_arguments = [CommandArgument("--out", out), CommandArgument("train.log_every", "1")]
    if any(word.name == "cluster.storage" for word in arguments):
        rehearsal_arguments.append(CommandArgument("cluster.storage", storage))
    return join_words([*user_arguments, *rehearsal_arguments])


def override_command(words: Sequence[str], model: str, *settings: str) -> list[str]:
    """The command with another model, and with these settings last."""
    other_arguments = [word for word in parse_words(words) if word.name not in ("--model", "model.name")]
    return [
        *join_words([*other_arguments, CommandArgument("--model", model)]),
        *(part for setting in settings for part in (SET_OPTION, setting)),
    ]


def count_workers(words: Sequence[str]) -> int:
    """How many workers the command trains with, by its words or its recipe."""
    values = [word.value or "" for word in parse_words(words) if word.name in ("--workers", "train.workers")]
    overrides = dict(config.parse_assignment(f"train.workers={value}") for value in values)
    recipe = job_names.first_positional(words) or config.list_recipe_names()[0]
    return config.load_config(recipe, overrides).recipe.train.workers


def resolve_local_paths(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Resolve the local paths of a command, and report missing files.

    The settings of a recipe file are included, unless the command overrides them.
    """
    arguments, problems = list(parse_words(words)), list[Problem]()
    recipe = job_names.first_positional(words)
    assigned_names = {SETTING_OF_OPTION.get(word.name, word.name) for word in arguments}
    for index, word in enumerate(arguments):
        if word.name in (*SETTING_OF_OPTION, *LOCAL_PATH_SETTINGS) and word.value is not None:
            absolute_path = _absolute_path(word.value)
            if absolute_path is None and word.value.startswith(("/", "~", ".")):
                reason, fix = "is not on this machine", "rehearse with a local file; a few hundred rows are enough"
                problems.append(Problem("path", word.value, reason, fix, code="not_found"))
            arguments[index] = replace(word, value=absolute_path or word.value)
        elif word.value is None and word.name == recipe and Path(word.name).expanduser().is_file():
            path = Path(word.name).expanduser().absolute()
            arguments[index] = CommandArgument(str(path))
            arguments += [recipe_path for recipe_path in _recipe_paths(path) if recipe_path.name not in assigned_names]
    return join_words(arguments), problems


def _absolute_path(value: str) -> str | None:
    """Absolute path of a file, a folder or a glob; None for anything else, such as a URL or a hub name."""
    path = Path(value).expanduser()
    if "://" in value or not (path.exists() or glob.glob(str(path), recursive=True)):
        return None
    return str(path.absolute())


def _recipe_paths(path: Path) -> Iterator[CommandArgument]:
    """Settings of a recipe file with local paths; the training itself reports other errors in it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    for name in LOCAL_PATH_SETTINGS:
        value = get_nested(document, *name.split("."))
        if isinstance(value, str) and _absolute_path(value) not in (None, value):
            yield CommandArgument(name, _absolute_path(value))
