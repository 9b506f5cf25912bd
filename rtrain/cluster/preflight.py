"""Checks that find failures before a training starts.

Most are pure: facts in, problems out. `check_shared_folder` and `SharedFolderProbe` query nodes of the cluster,
`check_disk_space` and `fingerprint_files` read files.
"""

import hashlib
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.cluster import capacity as cluster_capacity, connection, placement
from rtrain.config import Config, Recipe
from rtrain.core.errors import Problem, UserError

MAX_WORKERS_PER_CORE = 4
"""Maximum workers of a search per core on a private cluster; each needs about 1 GB."""
RESPONSE_TIMEOUT_S = 60.0
"""Timeout in seconds for a node's response about a shared folder; the first task on a node starts a process."""
FILE_CHECK_ATTEMPTS = 5
"""Number of checks for a new file, one second apart: network file systems show it late."""
MAX_HASHED_BYTES = 1 << 25
"""Largest file (model configuration, tokenizer) that is compared by content; larger files are compared by size."""
FileFingerprints = Mapping[Path, tuple[int, str | None]]
"""(size in bytes, SHA-256) by path; None without a hash."""


def check_rows(recipe: Recipe, train_rows: int) -> list[Problem]:
    """Report fewer training rows than replicas: each replica needs a row in at least one step."""
    workers, workers_per_replica = recipe.train.workers, recipe.train.workers_per_replica
    if train_rows >= recipe.train.num_replicas:
        return []
    reason = f"only {train_rows} training rows for {workers} workers"
    fix = f"write --workers {workers_per_replica * max(1, train_rows)}, or provide more rows"
    return [Problem("train.workers", workers, reason, fix, code="too_few_rows")]


def check_oversubscription(config: Config, cores: int) -> list[Problem]:
    """Report a search with more concurrent workers than the cores of a private cluster can run: Ray's CPUs are logical
    there, so Ray refuses nothing."""
    workers, trials = config.recipe.train.workers, config.deploy.tune.max_concurrent_trials or 1
    is_private = connection.resolve_address(config) is None
    if not is_private or trials == 1 or trials * workers <= MAX_WORKERS_PER_CORE * cores:
        return []
    reason = f"{trials} trials of {workers} workers are {trials * workers} processes at a time, on {cores} cores"
    fix = f"write {max(1, MAX_WORKERS_PER_CORE * cores // workers)}, or leave it out"
    return [Problem("tune.max_concurrent_trials", trials, reason, fix, code="too_many_workers")]


def check_capacity(
    recipe: Recipe,
    request: cluster_capacity.ResourceRequest,
    nodes: Sequence[cluster_capacity.NodeSpec],
    limits: cluster_capacity.AutoscalerLimits,
) -> list[Problem]:
    """Report workers or data tasks that the cluster can never place, and that would hang. `nodes`: the live nodes.
    `limits`: the autoscaler's limits. At least one GPU worker must fit: a run without `min_workers` takes as many as
    possible (`models.device`)."""
    train, uses_gpus = recipe.train, request.device != "cpu"
    workers = train.min_workers or (1 if uses_gpus else train.workers)
    feasible_workers = placement.max_workers(nodes, limits, request, workers)
    if feasible_workers >= workers:
        return []
    required, available = request.capacity_for(workers), request.capacity_of(nodes or limits.head_nodes)
    fewer_workers_hint = f"write --workers {feasible_workers}, or " if feasible_workers else ""
    if limits.node_types:
        reason, change = placement.explain_shortage(limits, request, workers)
        fix = f"{fewer_workers_hint}{change} in the cluster's file"
    elif uses_gpus:
        reason = f"data tasks need {required.data_cpus} logical CPUs beside the GPUs, the Ray cluster has "
        reason, fix = f"{reason}{available.data_cpus}", "start nodes with more --num-cpus"
    else:
        reason = f"workers and data tasks need {required.shared_cpus} logical CPUs, the Ray cluster has "
        reason, fix = f"{reason}{available.shared_cpus}", f"{fewer_workers_hint}start nodes with more --num-cpus"
    return [Problem("train.workers", workers, reason, fix, code="insufficient_capacity")]


def checkpoint_size_factor(keep: int) -> int:
    """Size of a run's checkpoints, as a multiple of its fp32 weights: each holds the weights and two moments. There are
    `keep_checkpoints` of them, the best one, and one being written."""
    return 3 * (keep + 2)


class InsufficientDiskSpace(UserError):
    """The disk is too full; temporary until space is freed."""


def check_disk_space(folder: Path, required_bytes: int) -> None:
    """Raise `InsufficientDiskSpace` if the disk of `folder` has less than `required_bytes` free for a run's
    checkpoints."""
    existing_parent = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing_parent).free
    if free_bytes < required_bytes:
        message = (
            f"{existing_parent} has {free_bytes / 1e6:,.0f} MB free; this run may write {required_bytes / 1e6:,.0f} "
            "MB. Free some space, or name another disk with --out."
        )
        raise InsufficientDiskSpace(message, code="disk_full")


def live_node_names() -> dict[str, str]:
    """Names of the live nodes by id; empty if this process is not connected."""
    import ray

    if not ray.is_initialized():
        return {}
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} {node['NodeID'][:8]}" for node in ray.nodes() if node["Alive"]
    }


def check_shared_folder(
    folder: Path, required_files: Mapping[str, FileFingerprints] | None = None
) -> dict[str, list[str]]:
    """Raise `UserError` if a node of the cluster does not share `folder`: its workers could not read it, or would write
    checkpoints that no other node sees. Return the nodes that lack files of `required_files`, by group; see
    `SharedFolderProbe`."""
    nodes = live_node_names()
    if len(nodes) < 2:  # a single node
        return {}
    probe = SharedFolderProbe(folder, nodes, required_files or {})
    try:
        probe.wait_until_answered(RESPONSE_TIMEOUT_S)
        report = probe.collect_report()
    finally:
        probe.close()
    if report.folder_problem:
        raise UserError(report.folder_problem, code="not_shared")
    return report.nodes_missing_files


class SharedFolderReport(NamedTuple):
    folder_problem: str | None
    """The problem of the folder, if any."""
    nodes_missing_files: dict[str, list[str]]
    """Nodes that lack a file, or have a different one, by the group of the file."""


class SharedFolderProbe:
    """Ask nodes whether they share a folder: each reads a file of this process and writes its own. The same task checks
    the files of `required_files`, grouped by their setting."""

    def __init__(self, folder: Path, nodes: Mapping[str, str], required_files: Mapping[str, FileFingerprints]):
        """`nodes`: names of the nodes by id."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._folder, self._nodes, self._required_files = folder, nodes, required_files
        folder.mkdir(parents=True, exist_ok=True)
        self._marker = folder / f".shared-{uuid.uuid4().hex}"
        self._marker.write_text(self._marker.name)
        probe_task = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        self._pending_tasks: dict[Any, str] = {}
        for node in nodes:
            placed_task = probe_task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            self._pending_tasks[placed_task.remote(str(self._marker), f"{self._marker}-{node}", required_files)] = node

    def wait_until_answered(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until all nodes have responded or left."""
        import ray

        return not ray.wait(list(self._pending_tasks), num_returns=len(self._pending_tasks), timeout=timeout_s)[1]

    def collect_report(self) -> SharedFolderReport:
        """Collect the responses; nodes that have not responded, or have left, are excluded."""
        import ray

        ready, _ = ray.wait(list(self._pending_tasks), num_returns=len(self._pending_tasks), timeout=0)
        answers = {self._pending_tasks[task]: answer for task in ready if (answer := _get_answer(task)) is not None}
        folder_access = {
            self._nodes[node]: (read, _wait_for_file(Path(f"{self._marker}-{node}")))
            for node, (read, _) in answers.items()
        }
        missing = {
            group: sorted(self._nodes[node] for node, (_, lacks) in answers.items() if group in lacks)
            for group in self._required_files
        }
        folder_problem = find_folder_problem(self._folder, folder_access)
        return SharedFolderReport(folder_problem, {group: names for group, names in missing.items() if names})

    def close(self) -> None:
        for path in self._folder.glob(f"{self._marker.name}*"):
            path.unlink(missing_ok=True)


def fingerprint_files(paths: Iterable[Path]) -> dict[Path, tuple[int, str | None]]:
    sizes = {path: path.stat().st_size for path in paths}
    return {path: (size, _digest(path) if size <= MAX_HASHED_BYTES else None) for path, size in sizes.items()}


def unreadable_file_problem(field: str, file: str, nodes: Sequence[str]) -> Problem:
    """Problem of the setting `field`, whose file `file` is missing on these nodes."""
    node_names = ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    reason = f"is unreadable or different on {'node' if len(nodes) == 1 else 'nodes'} {node_names}"
    return Problem(field, file, reason, "put it on storage that every node mounts (NFS, EFS)", code="not_shared")


def find_folder_problem(folder: Path, access_by_node: Mapping[str, tuple[bool, bool]]) -> str | None:
    """The problem of a folder, or None. `access_by_node` says for each node whether it read the marker, and whether its
    reply was read here. Nodes that left meanwhile are missing from it."""
    unshared_nodes = sorted(name for name, answer in access_by_node.items() if not all(answer))
    if not unshared_nodes:
        return None
    return (
        f"--out: {folder} is a different folder on {len(unshared_nodes)} of {len(access_by_node)} nodes "
        f"({', '.join(unshared_nodes[:5])}). Name one on storage that every node mounts (NFS, EFS)."
    )


def probe_node(
    marker_path: str, reply_path: str, required_files: Mapping[str, FileFingerprints]
) -> tuple[bool, list[str]]:
    """Task on a node: whether it sees the file `marker_path`, and the names of the files in `required_files` that it
    lacks. A node that sees the marker writes the file `reply_path` beside it."""
    missing = [
        group
        for group, files in required_files.items()
        if not all(_matches_fingerprint(path, *file) for path, file in files.items())
    ]
    if not _wait_for_file(Path(marker_path)):
        return False, missing
    Path(reply_path).write_text(Path(reply_path).name)
    return True, missing


def _matches_fingerprint(path: Path, size: int, sha256: str | None) -> bool:
    try:
        with path.open("rb"):  # a file may exist and be unreadable
            return path.stat().st_size == size and sha256 in (None, _digest(path))
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wait_for_file(path: Path) -> bool:
    for _ in range(FILE_CHECK_ATTEMPTS):
        if path.is_file() and path.read_text() == path.name:
            return True
        time.sleep(1.0)
    return False


def _get_answer(reference: Any) -> tuple[bool, list[str]] | None:
    """The response of a node, or None if the node has left. An error on the node counts as no."""
    import ray

    try:
        is_shared, missing = ray.get(reference)
        return bool(is_shared), list(missing)
    except ray.exceptions.RayTaskError:
        return False, []
    except ray.exceptions.RayError:
        return None
