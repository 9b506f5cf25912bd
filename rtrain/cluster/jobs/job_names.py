"""Names of jobs: the run that a command writes, the job's id, and whether a new submission attaches or starts. Pure."""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from rtrain.core.errors import ConfigError, Problem, TemporaryFailureError

SUPERVISED_VERBS = ("train", "tune", "distill")
"""Verbs that write and resume a run folder."""
RUN_VERBS = (*SUPERVISED_VERBS, "demo")
"""Verbs that write a folder; their logs lie beside it."""
LOG_FOLDER = ".jobs"
"""Folder of logs beside the runs."""
FINAL_STATUSES = ("SUCCEEDED", "FAILED", "STOPPED")
VALUELESS_OPTIONS = (
    *("--all", "--choose-k", "--dry-run", "--full", "--insecure", "--int8", "--json", "--new", "--public"),
    *("--no-texts", "--overwrite", "--inject-bugs", "--print-config", "--resume", "--rollback", "--scores", "--search"),
    *("--standalone", "--stores", "--text", "--trackers", "--ungated", "--update", "--with-wheels", "--yes"),
)
"""Options without a value, of any verb."""
JOB_ENTRYPOINT = "rtrain.cluster.jobs.entry"
MAX_NAME_LENGTH = 60
DIGEST_LENGTH = 8
"""Digits of the digest that distinguishes jobs of equal run names."""


def option_value(words: Sequence[str], name: str) -> str | None:
    """The last value of an option in a command."""
    return next(iter(reversed(_option_values(words, name))), None)


def _option_values(words: Sequence[str], name: str) -> list[str]:
    """The values of an option in order, written `NAME VALUE` or `NAME=VALUE`."""
    values = []
    for position, word in enumerate(words):
        if word == name and position + 1 < len(words):
            values.append(words[position + 1])
        elif word.startswith(f"{name}="):
            values.append(word.partition("=")[2])
    return values


def assignments(words: Sequence[str]) -> list[str]:
    """The values of `--set`, in order."""
    return _option_values(words, "--set")


def plugin_addresses(words: Sequence[str]) -> list[str]:
    """The values of `--plugin`, in order."""
    return _option_values(words, "--plugin")


def positional_arguments(words: Sequence[str]) -> list[str]:
    """Positional arguments of a verb: words that are neither options nor their values."""
    positionals, value_follows = [], False
    for word in words[1:]:
        if value_follows:
            value_follows = False
        elif word.startswith("-"):
            value_follows = "=" not in word and word not in VALUELESS_OPTIONS
        else:
            positionals.append(word)
    return positionals


def first_positional(words: Sequence[str]) -> str | None:
    """The recipe or run of a verb: the first of its `positional_arguments`."""
    return next(iter(positional_arguments(words)), None)


def resolve_run_folder(words: Sequence[str]) -> PurePosixPath | None:
    """The run folder that a command writes; None for other verbs. Raises `ConfigError` if --out is missing, since the
    job's own folder is deleted with the job, and for --new, since a job that is submitted again must resume its run."""
    out = option_value(words, "--out")
    if not words or words[0] not in RUN_VERBS:
        return None
    if out is None or not out.startswith("/"):
        reason = "must be the absolute path of a folder that all nodes share"
        raise ConfigError([Problem("--out", out, reason, f"write --out /shared/runs/{words[0]}", code="not_absolute")])
    if "--new" in words:
        reason = "a job that is submitted again resumes its run, and --new would begin another one"
        fix = f"name another --out instead, such as {out}-2"
        raise ConfigError([Problem("--new", None, reason, fix, code="conflicting_settings")])
    return PurePosixPath(out)


def log_path(run: PurePosixPath) -> PurePosixPath:
    return run.parent / LOG_FOLDER / f"{run.name}.log"


def storage_path(storage: str, name: str) -> str:
    """Base path in the storage of the run's log, NAME.log, and its owner file, NAME.run."""
    return f"{storage.rstrip('/')}/{LOG_FOLDER}/{name}"


def job_id(words: Sequence[str], run: PurePosixPath | None) -> str:
    """The job's id: the run's name (for an endpoint also the artifact's run), else the verb's, and a digest of the
    run's path, of all artifacts, or of all words. Equal requests have equal ids."""
    served_paths = [word.rstrip("/") for word in positional_arguments(words)] if [*words[:1]] == ["serve"] else []
    name = run.name if run else serving_job_name(served_paths[0]) if served_paths else words[0] if words else "job"
    digest_source = str(run or shlex.join(served_paths or words))
    digest = hashlib.sha256(digest_source.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"rtrain-{_sanitize(name)[:MAX_NAME_LENGTH]}-{digest}"


def _sanitize(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "job"


def serving_job_name(artifact: str) -> str:
    """Name of an endpoint's job: after the run of its artifact, if there is one."""
    path = PurePosixPath(artifact.partition("://")[2] or artifact)
    return f"serve-{path.parent.name if path.name.startswith('artifact') and path.parent.name else path.name}"


class SelectedJob(NamedTuple):
    job_id: str
    is_running: bool
    """Whether the job exists and has not ended: then nothing is started."""


def list_attempts(base_id: str, jobs: Sequence[str]) -> list[str]:
    """The jobs of a base id in order: NAME, NAME-try-2, NAME-try-3, ..."""
    pattern = re.compile(rf"{re.escape(base_id)}(?:-try-(\d+))?")
    numbered_jobs = [(int(match[1] or 1), job) for job in jobs if (match := pattern.fullmatch(job))]
    return [job for _, job in sorted(numbered_jobs)]


def find_attempts(run: str, jobs: Sequence[str]) -> list[str]:
    """The jobs of a run in order, by its full folder, its name or a job id. Raises `ConfigError` if several runs have
    the name."""
    if run.startswith("/"):
        return list_attempts(job_id((), PurePosixPath(run)), jobs)
    sanitized = _sanitize(PurePosixPath(run).name)
    # A run's name is truncated; a job id has the prefix `rtrain-` and a digest.
    lengths = (MAX_NAME_LENGTH, MAX_NAME_LENGTH + 1 + DIGEST_LENGTH)
    names = {prefix[:length] for prefix in (sanitized, sanitized.removeprefix("rtrain-")) for length in lengths}
    alternatives = "|".join(map(re.escape, sorted(names)))
    pattern = re.compile(rf"(rtrain-(?:{alternatives})(?:-[0-9a-f]{{{DIGEST_LENGTH}}})?)(?:-try-\d+)?")
    base_ids = sorted({match[1] for job in jobs if (match := pattern.fullmatch(job))})
    if len(base_ids) > 1:
        reason = f"several jobs have this name: {', '.join(base.removeprefix('rtrain-') for base in base_ids)}"
        raise ConfigError([Problem("run", run, reason, "write one of these names", code="ambiguous_name")])
    return list_attempts(base_ids[0], jobs) if base_ids else []


def attach_or_start(base_id: str, statuses: Mapping[str, str]) -> SelectedJob:
    """Decide whether a request for the job `base_id` attaches to a job or starts a new one. `statuses`: all jobs of the
    cluster by id."""
    attempts = list_attempts(base_id, list(statuses))
    running = [job for job in attempts if statuses[job] not in FINAL_STATUSES]
    if running:
        return SelectedJob(running[-1], True)
    if not attempts:
        return SelectedJob(base_id, False)
    match = re.fullmatch(r".*-try-(\d+)", attempts[-1])
    return SelectedJob(f"{base_id}-try-{int(match[1]) + 1 if match else 2}", False)


INFRASTRUCTURE_ERRORS = (
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
)
"""Ray's messages for a job that ended without its verb's fault, such as a failure of the head."""


def exit_code(status: str, driver_exit_code: int | None, error: str | None = None) -> int:
    """The exit code of a command that followed a job to its end; 75 if the job should be submitted again.
    `driver_exit_code`: exit code of the entry point, negative for a signal; None if it was killed. `error`: Ray's
    message."""
    if status == "SUCCEEDED":
        return 0
    if status == "FAILED" and (error in INFRASTRUCTURE_ERRORS if driver_exit_code is None else driver_exit_code < 0):
        return TemporaryFailureError.exit_code
    return driver_exit_code if driver_exit_code and driver_exit_code > 0 else 1
