"""Checks of what would fail later, before a training starts.

Most are pure: facts in, problems out. `shared` and `Question` ask nodes of the cluster, `disk` and `described` look at
files.
"""

import hashlib
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.cluster import address as addresses, capacity as cluster_capacity, placement
from rtrain.config import Config, Recipe
from rtrain.core.errors import Problem, UserError

MOST_A_CORE = 4
"""Most workers of a search that share a core of a private Ray's machine; each needs some 1 GB."""


def checkpoint_copies(keep: int) -> int:
    """The size of a run's checkpoints, as a multiple of the size of its fp32 weights.

    A checkpoint holds the weights and two moments. There are `keep` of them, the best, and one in the making.
    """
    return 3 * (keep + 2)


def rows(recipe: Recipe, train_rows: int) -> list[Problem]:
    """A problem if there are fewer training rows than replicas: each needs a row in at least one update."""
    workers, within = recipe.train.workers, recipe.train.within
    if train_rows < recipe.train.replicas:
        return [
            Problem(
                "train.workers",
                workers,
                f"only {train_rows} training rows for {workers} workers",
                f"write --workers {within * max(1, train_rows)}, or give more rows",
                code="too_few_rows",
            )
        ]
    return []


def overbooked(config: Config, cores: int) -> list[Problem]:
    """A problem if a search has more workers at a time than the machine's cores can carry, where Ray is a private one:
    that has as many logical CPUs as it is told, and refuses nothing."""
    workers, asked = config.recipe.train.workers, config.deploy.tune.concurrent or 1
    if addresses.of(config) is not None or asked == 1 or asked * workers <= MOST_A_CORE * cores:
        return []
    reason = f"{asked} trials of {workers} workers are {asked * workers} processes at a time, on {cores} cores"
    return [
        Problem(
            "tune.concurrent",
            asked,
            reason,
            f"write {max(1, MOST_A_CORE * cores // workers)}, or leave it out",
            code="too_many_workers",
        )
    ]


def capacity(
    recipe: Recipe,
    needs: cluster_capacity.Needs,
    hosts: Sequence[cluster_capacity.Host],
    may: cluster_capacity.Startable,
) -> list[Problem]:
    """A problem if the cluster can never place the workers or their data tasks, which would then wait for ever.

    `hosts`: the nodes that are up. `may`: what its autoscaler may start. At least one of workers with GPUs must
    have room: a run without a least number takes as many as there can be (`network.device`).
    """
    train, with_gpus = recipe.train, needs.device != "cpu"
    workers = train.min_workers or (1 if with_gpus else train.workers)
    fitting = placement.workers(hosts, may, needs, workers)
    if fitting >= workers:
        return []
    need, room = needs.of(workers), needs.offered(hosts or may.heads)
    fewer = f"write --workers {fitting}, or " if fitting else ""
    if may.kinds:
        of = (
            f"{need.places} {cluster_capacity.NEEDS[needs.device]}s for workers and {need.data} CPUs for their data "
            "tasks"
        )
        reason = f"no nodes that may be up together have {of}; there may be {placement.told(may, needs)}"
        fix = f"{fewer}{placement.remedy(may, needs, need)} in the cluster's file"
    elif with_gpus:
        reason = f"data tasks need {need.data} logical CPUs beside the GPUs, the Ray cluster has {room.data}"
        fix = "start nodes with more --num-cpus"
    else:
        reason = f"workers and data tasks need {need.cpus} logical CPUs, the Ray cluster has {room.cpus}"
        fix = f"{fewer}start nodes with more --num-cpus"
    return [Problem("train.workers", workers, reason, fix, code="no_room")]


ANSWER_S = 60.0
"""Seconds in which a node must answer whether it shares a folder; the first task on a node starts a process."""
LOOKS = 5
"""How often a new file is looked for, a second apart, since network file systems show it late."""


HASHED_BYTES = 1 << 25
"""Files up to this size (a model's configuration, its tokenizer) are compared by content, larger ones by size."""
Files = Mapping[Path, tuple[int, str | None]]
"""(size in bytes, SHA-256) by path; None instead of a SHA-256 that is not compared."""


def described(paths: Iterable[Path]) -> dict[Path, tuple[int, str | None]]:
    """The files as this process sees them."""
    sizes = {path: path.stat().st_size for path in paths}
    return {path: (size, _digest(path) if size <= HASHED_BYTES else None) for path, size in sizes.items()}


class Answers(NamedTuple):
    """What nodes answer."""

    unshared: str | None
    """What is wrong with the folder."""
    lacking: dict[str, list[str]]
    """By the name of a group of files, the nodes that lack such a file or have another one in its place."""


class Question:
    """Asks nodes whether they share a folder: each reads a file of this process and writes one of its own. In the same
    pass it looks for the files of `needed`, which are grouped by the name that a user gives them."""

    def __init__(self, folder: Path, nodes: Mapping[str, str], needed: Mapping[str, Files]):
        """`nodes`: what they are called, by id."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._folder, self._nodes, self._needed = folder, nodes, needed
        folder.mkdir(parents=True, exist_ok=True)
        self._marker = folder / f".shared-{uuid.uuid4().hex}"
        self._marker.write_text(self._marker.name)
        answer = ray.remote(num_cpus=0, max_retries=0)(answer_here)
        self._asked = {
            answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                str(self._marker), f"{self._marker}-{node}", needed
            ): node
            for node in nodes
        }

    def is_answered(self, seconds: float) -> bool:
        """Wait so long at most until all have answered, or are gone."""
        import ray

        return not ray.wait(list(self._asked), num_returns=len(self._asked), timeout=seconds)[1]

    def answers(self) -> Answers:
        """Those that are there; nodes that have not answered, or are gone, are left out."""
        import ray

        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        found = {self._asked[one]: result for one in answered if (result := _result(one)) is not None}
        shares = {self._nodes[node]: (read, _seen(Path(f"{self._marker}-{node}"))) for node, (read, _) in found.items()}
        lack = {what: sorted(self._nodes[node] for node in found if what in found[node][1]) for what in self._needed}
        return Answers(unshared(self._folder, shares), {what: names for what, names in lack.items() if names})

    def close(self) -> None:
        for path in self._folder.glob(f"{self._marker.name}*"):
            path.unlink(missing_ok=True)


def nodes_up() -> dict[str, str]:
    """What the nodes of the cluster that are up are called, by id; none where this process is connected to none."""
    import ray

    if not ray.is_initialized():
        return {}
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} {node['NodeID'][:8]}" for node in ray.nodes() if node["Alive"]
    }


def shared(folder: Path, needed: Mapping[str, Files] | None = None) -> dict[str, list[str]]:
    """Raise `UserError` if some node of the Ray cluster does not share `folder`.

    Workers there would read nothing, or write checkpoints that no other node sees. Returns the nodes that lack files of
    `needed`, by the name of their group; see `Question`.
    """
    nodes = nodes_up()
    if len(nodes) < 2:  # there is only this machine
        return {}
    question = Question(folder, nodes, needed or {})
    try:
        question.is_answered(ANSWER_S)
        answers = question.answers()
    finally:
        question.close()
    if answers.unshared:
        raise UserError(answers.unshared, code="not_shared")
    return answers.lacking


def unreadable(field: str, what: str, nodes: Sequence[str]) -> Problem:
    """The problem of a setting `field` whose file `what` these nodes lack."""
    named = ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    reason = f"cannot be read, or is another file, on {'node' if len(nodes) == 1 else 'nodes'} {named}"
    return Problem(field, what, reason, "put it on storage that every node mounts (NFS, EFS)", code="not_shared")


def unshared(folder: Path, nodes: Mapping[str, tuple[bool, bool]]) -> str | None:
    """What is wrong with a folder, or None. `nodes` says of each node whether it read our file, and we its file.

    Nodes that have gone meanwhile are not among them, since they did not answer.
    """
    apart = [name for name, answer in nodes.items() if not all(answer)]
    if not apart:
        return None
    return (
        f"--out: {folder} is another folder on {len(apart)} of {len(nodes)} nodes ({', '.join(sorted(apart)[:5])}). "
        "Name one on storage that every node mounts (NFS, EFS)."
    )


def answer_here(marker: str, own: str, needed: Mapping[str, Files]) -> tuple[bool, list[str]]:
    """What a node answers: whether it sees the file `marker`, and the names of the files in `needed` that it lacks.

    A node that sees the marker writes the file `own` beside it.
    """
    lacking = [what for what, files in needed.items() if not all(_same(path, *known) for path, known in files.items())]
    if not _seen(Path(marker)):
        return False, lacking
    Path(own).write_text(Path(own).name)
    return True, lacking


def _same(path: Path, size: int, sha256: str | None) -> bool:
    try:
        with path.open("rb"):  # a file may exist and not be readable
            return path.stat().st_size == size and sha256 in (None, _digest(path))
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seen(path: Path) -> bool:
    for _ in range(LOOKS):
        if path.is_file() and path.read_text() == path.name:
            return True
        time.sleep(1.0)
    return False


def _result(reference: Any) -> tuple[bool, list[str]] | None:
    """A node's answer, or None if the node has gone. An error on the node (it cannot read or write) counts as no."""
    import ray

    try:
        read, lacking = ray.get(reference)
        return bool(read), list(lacking)
    except ray.exceptions.RayTaskError:
        return False, []
    except ray.exceptions.RayError:
        return None


class Short(UserError):
    """A disk has too little space, until some is freed."""


def disk(folder: Path, needed: int) -> None:
    """Raise `Short` if the disk of `folder` has less than `needed` bytes free for a run's checkpoints."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise Short(
            f"{existing} has {free / 1e6:,.0f} MB free; this run may write {needed / 1e6:,.0f} MB. "
            "Free some space, or name another disk with --out.",
            code="disk_full",
        )
