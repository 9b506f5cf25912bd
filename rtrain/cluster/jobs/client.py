"""Jobs on a cluster, by Ray's job API: submit, follow, read, stop. A job uploads the git-tracked files of a folder, and
nothing else."""

import asyncio
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rtrain import ray_internals
from rtrain.cluster.jobs import job_names
from rtrain.core.errors import CommandInterruptedError, TemporaryFailureError, UserError, redact

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
STOP_GRACE_S = 60
"""Seconds that a job may take to stop. Ray's default is 3: an endpoint would drop its requests, and a run could not
report the interruption."""
TAIL_LINES = 12
INCLUDE_ALL_FILES = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES": ""}
"""Environment in which Ray's client uploads every file of a folder."""
MAX_UPLOAD_BYTES = 5_000_000
MAX_LISTED_FILES = 10
EXCLUDED_FOLDERS = ("benchmarks/", "docs/", "tests/")
"""Folders of rtrain's own checkout that no job needs: more than half of it."""
PACKAGE_MARKER = "rtrain/cluster/jobs/entry.py"
"""File that identifies rtrain's own checkout."""
RAY_IGNORE_FILE = ".rayignore"
"""Ray's client skips files listed in such a file; it is not uploaded, since all tracked files are."""


class PollingPolicy(NamedTuple):
    """Timeouts for the head, in seconds."""

    poll_interval_s: float = 1.0
    agent_timeout_s: float = 60.0
    """Until the head's agent is up: the API responds some seconds before it accepts jobs."""
    head_timeout_s: float = 30.0
    """Without a response of the head until a followed job counts as lost."""


class JobInfo(NamedTuple):
    id: str
    status: str
    entrypoint: str
    started_at: float | None
    """Seconds since 1970."""
    ended_at: float | None
    driver_exit_code: int | None
    error: str | None
    """Ray's error of a failed job; None otherwise."""


DEFAULT_POLLING = PollingPolicy()


@dataclass(frozen=True)
class Upload:
    root: Path
    files: tuple[tuple[str, int], ...]
    """(path, bytes), largest first."""
    untracked_files: int
    """Untracked files that are not ignored; they are not uploaded."""

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def describe(self) -> str:
        summary = f"{len(self.files)} tracked files, {self.total_bytes / 1e6:.1f} MB"
        name, size = self.files[0] if self.files else ("none", 0)
        untracked_note = f"; {self.untracked_files} untracked files are not uploaded" if self.untracked_files else ""
        return f"{summary}, the largest {name} ({size / 1e6:.2f} MB){untracked_note}"


class JobClient:
    """The job API at `address`; None: RAY_API_SERVER_ADDRESS, or port 8265 of this machine."""

    def __init__(self, address: str | None = None, client: Any = None, polling: PollingPolicy = DEFAULT_POLLING):
        """`client`: a JobSubmissionClient; None creates one."""
        self._polling = polling
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            message = f"{self.address}: not the address of a job API; write one such as {DEFAULT_ADDRESS}"
            raise UserError(message, code="invalid_address")
        self._client: Any = client
        if client is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
            logging.getLogger("ray").setLevel(logging.ERROR)  # it logs each step of an upload
            from ray.job_submission import JobSubmissionClient

            with self._translate_errors(is_read_only=True):
                self._client = JobSubmissionClient(self.address)

    def list_jobs(self) -> dict[str, JobInfo]:
        with self._translate_errors(is_read_only=True):
            details = self._client.list_jobs()
        return {
            detail.submission_id: JobInfo(
                detail.submission_id,
                str(getattr(detail.status, "value", detail.status)),
                detail.entrypoint or "",
                detail.start_time / 1000 if detail.start_time else None,
                detail.end_time / 1000 if detail.end_time else None,
                detail.driver_exit_code,
                detail.error_type,
            )
            for detail in details
            if detail.submission_id
        }

    def list_run_jobs(self, run: str) -> list[JobInfo]:
        """The jobs of a run in order (`job_names.find_attempts`)."""
        jobs = self.list_jobs()
        return [jobs[job] for job in job_names.find_attempts(run, list(jobs))]

    def submit(self, words: Sequence[str], files: Upload, log: Callable[[str], None]) -> str:
        """Submit the job of `words`; returns its id. A running job with that id is left alone."""
        run = job_names.resolve_run_folder(words)
        base_id = job_names.job_id(words, run)
        known_jobs, decision = self._decide(base_id)
        if decision.is_running and known_jobs[decision.job_id].status == "RUNNING":
            self._refresh(decision.job_id)
            known_jobs, decision = self._decide(base_id)
        entrypoint = shlex.join(["python", "-m", job_names.JOB_ENTRYPOINT, *words])
        job = decision.job_id
        if decision.is_running:
            running_entrypoint = known_jobs[job].entrypoint
            is_other = running_entrypoint != entrypoint
            difference = f", with another command ({redact(running_entrypoint)})" if is_other else ""
            log(f"{job} is there already{difference}: nothing is started")
            return job
        log(f"{job}: {files.describe()}")
        deadline = time.monotonic() + self._polling.agent_timeout_s
        with temporary_copy(files) as folder, self._translate_errors(), _include_all_files():
            environment = {"working_dir": str(folder), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S)}}
            metadata = {"rtrain_run": str(run or "")}
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=entrypoint, submission_id=job, runtime_env=environment, metadata=metadata
                    )
                    return job
                except (RuntimeError, OSError) as error:
                    if "already exists" in str(error):  # another command submitted it meanwhile
                        log(f"{job} already exists: nothing is started")
                        return job
                    has_disconnected = _is_disconnect(error)
                    if not (has_disconnected or "No available agent" in str(error)) or time.monotonic() > deadline:
                        raise
                time.sleep(self._polling.poll_interval_s)
                if has_disconnected and job in self.list_jobs():  # it was accepted, and the response lost
                    return job

    def _decide(self, base_id: str) -> tuple[dict[str, JobInfo], job_names.SelectedJob]:
        known_jobs = self.list_jobs()
        return known_jobs, job_names.attach_or_start(base_id, {job.id: job.status for job in known_jobs.values()})

    def _refresh(self, job: str) -> None:
        """Force the head to refresh a job that is marked RUNNING.

        A head that restarted from its Redis checks the supervisors of its jobs only when its own agent gets a request:
        otherwise jobs that died with the old processes would stay RUNNING. Submitting the id of a known job is such a
        request without effect: the agent refuses it before it starts or writes anything. Deleting the job would remove
        the record of a job that has ended meanwhile, and reading a log needs the agent of the job's machine, which may
        be gone.
        """
        with suppress(UserError, RuntimeError), self._translate_errors():
            self._client.submit_job(entrypoint="true", submission_id=job)
        time.sleep(self._polling.poll_interval_s)

    def cluster_status(self) -> str:
        """The autoscaler's status of nodes and demand, as `ray status` prints it."""
        with self._translate_errors(is_read_only=True):
            status = ray_internals.cluster_status(self._client)
        return (status or "the cluster reports no nodes").strip()

    def head_ip(self) -> str | None:
        """The IP address of the head; None if the API does not report it."""
        with self._translate_errors(is_read_only=True):
            return ray_internals.head_ip(self._client)

    def get_logs(self, job: str) -> str:
        with self._translate_errors():
            return str(self._client.get_job_logs(job))

    def stop(self, job: str) -> bool:
        with self._translate_errors():
            return bool(self._client.stop_job(job))

    def wait_for_line(self, job: str, prefix: str) -> str:
        """Wait for a line of a job's log that begins with `prefix`. Raises `CommandInterruptedError` if the job ends
        first, with its exit code and last lines."""
        while True:
            if (job_info := self.list_jobs().get(job)) is None:
                raise _unknown_job_error(job)
            log = self.get_logs(job)
            line = next((line for line in log.splitlines() if line.startswith(prefix)), None)
            if line is not None:
                return line
            if job_info.status in job_names.FINAL_STATUSES:
                code = job_names.exit_code(job_info.status, job_info.driver_exit_code, job_info.error)
                tail = "\n".join(log.strip().splitlines()[-TAIL_LINES:])
                message = f"{job} has ended as {job_info.status}; its last lines:\n{tail}"
                raise CommandInterruptedError(message, code or UserError.exit_code)
            time.sleep(self._polling.poll_interval_s)

    def watch(self, job: str, show: Callable[[str], None]) -> JobInfo:
        """Stream a job's log until it ends. Raises `TemporaryFailureError` if the head is lost meanwhile."""
        shown, answered_at = 0, time.monotonic()

        def show_new(text: str) -> None:  # counted at once: a stream may break off at any chunk
            nonlocal shown
            shown += len(text)
            show(text)

        while True:
            try:
                job_info = self.list_jobs().get(job)
                self._tail(job, shown, show_new)
                answered_at = time.monotonic()
            except (UserError, OSError):
                if time.monotonic() - answered_at > self._polling.head_timeout_s:
                    message = f"the head at {self.address} does not respond; submit the same command again later: "
                    message += "the run resumes from its storage"
                    raise TemporaryFailureError(message, code="head_lost") from None
                job_info = None
            else:
                if job_info is None:
                    raise _unknown_job_error(job)
                if job_info.status in job_names.FINAL_STATUSES:
                    unseen = self.get_logs(job)
                    if len(unseen) > shown:
                        show(unseen[shown:])
                    return job_info
            time.sleep(self._polling.poll_interval_s)

    def _tail(self, job: str, offset: int, show: Callable[[str], None]) -> None:
        """Show the log after the first `offset` characters, until the stream ends, breaks off or stays silent: a head
        whose machine is gone closes no connection, so the caller must probe it."""

        from aiohttp import ClientError

        async def follow() -> None:
            received, portions = 0, aiter(self._client.tail_job_logs(job))
            while (portion := await asyncio.wait_for(anext(portions, None), self._polling.head_timeout_s)) is not None:
                if new_text := portion[max(0, offset - received) :]:
                    show(new_text)
                received += len(portion)

        # The job has not started, its log does not exist yet, or the connection broke.
        with suppress(RuntimeError, TimeoutError, ClientError):
            asyncio.run(follow())

    @contextmanager
    def _translate_errors(self, *, is_read_only: bool = False) -> Iterator[None]:
        """Translate errors of Ray's client into one line. `is_read_only`: the block only reads responses, so any other
        error comes from a server that is not Ray's."""
        try:
            yield
        except ConnectionError as error:
            message = (
                f"no job API responds at {self.address} ({_first_line(error)}); start the cluster, and forward its "
                "port: ray dashboard cluster.yaml"
            )
            raise UserError(message, code="unreachable") from None
        except Exception as error:
            text = str(error)
            failure = _SERVER_ERROR.search(text)
            if _is_unauthorized(error, text):
                message = (
                    f"{self.address} requires the cluster's token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to "
                    "the file of ray rsync-down"
                )
                raise UserError(message, code="wrong_token") from None
            if failure is not None or _is_disconnect(error):
                reason = failure[0] if failure else "the connection broke off"
                message = (
                    f"the head at {self.address} fails ({reason}): it is starting, stopping or overloaded; retry, then "
                    "read its logs"
                )
                raise UserError(message, code="unreachable") from None
            if is_read_only and isinstance(error, LookupError | TypeError | ValueError | RuntimeError | OSError):
                message = (
                    f"{self.address} does not respond like Ray's job API ({type(error).__name__}: "
                    f"{_first_line(error)}); write the address that ray dashboard forwards, "
                    f"{DEFAULT_ADDRESS} by default"
                )
                raise UserError(message, code="not_ray") from None
            raise


_SERVER_ERROR = re.compile(r"status code 5\d\d.*")
"""Fragments of errors of Ray's client: its proxy got no response or an error."""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


@contextmanager
def _include_all_files() -> Iterator[None]:
    """Upload every file: Ray's client skips files in .gitignore, and all folders called venv or __pycache__, although
    git may track them."""
    previous = {name: os.environ[name] for name in INCLUDE_ALL_FILES if name in os.environ}
    os.environ.update(INCLUDE_ALL_FILES)
    try:
        yield
    finally:
        for name in INCLUDE_ALL_FILES:
            del os.environ[name]
        os.environ.update(previous)


def _unknown_job_error(job: str) -> TemporaryFailureError:
    message = f"{job} is unknown to this cluster; submit the same command again"
    return TemporaryFailureError(message, code="head_restarted")


def _is_disconnect(error: Exception) -> bool:
    """Whether the head closed or refused a connection: its API ends with its process, and under overload."""
    from requests import exceptions

    return isinstance(error, exceptions.ConnectionError | exceptions.Timeout)


def _is_unauthorized(error: Exception, text: str) -> bool:
    return "Authentication" in type(error).__name__ or any(
        fragment in text for fragment in ("status code 401", "status code 403", "Unauthorized", "authentication token")
    )


def collect_upload(folder: Path, max_bytes: int = MAX_UPLOAD_BYTES) -> Upload:
    """Collect the tracked files of the git work tree whose root is `folder`, submodules included; of rtrain's own
    checkout only the needed ones. Raises `UserError` if `folder` is not a work tree's root, for more than `max_bytes`
    bytes, for a missing submodule, and for a link to an untracked file, which would be uploaded."""
    root = Path("".join(_run_git(folder, "rev-parse", "--show-toplevel")).removesuffix("\n"))
    if root.resolve() != folder.resolve():
        message = (
            f"{folder} is a part of the checkout {root}, which a job uploads as a whole; run the command there, or "
            f"write --folder {shlex.quote(str(root))}"
        )
        raise UserError(message, code="part_of_checkout")
    tracked_names = _run_git(folder, "ls-files", "-z", "--recurse-submodules")
    tracked_paths = {folder.resolve() / name for name in tracked_names}
    excluded = EXCLUDED_FOLDERS if PACKAGE_MARKER in tracked_names else ()
    existing_names = [
        file
        for name in tracked_names
        if not name.startswith(excluded)
        for file in _expand_tracked(folder, name, tracked_paths)
        if PurePosixPath(file).name != RAY_IGNORE_FILE
    ]
    files = [(name, (folder / name).stat().st_size) for name in existing_names]
    untracked_files = len(_run_git(folder, "ls-files", "-z", "--others", "--exclude-standard"))
    upload = Upload(folder, tuple(sorted(files, key=lambda file: (-file[1], file[0]))), untracked_files)
    if upload.total_bytes > max_bytes:
        largest_files = "\n".join(f"  {size / 1e6:8.2f} MB  {name}" for name, size in upload.files[:MAX_LISTED_FILES])
        message = (
            f"{folder}: its tracked files are {upload.total_bytes / 1e6:.1f} MB; the maximum is {max_bytes / 1e6:.0f} "
            f"MB. The largest:\n{largest_files}\nKeep data out of git, on storage of the nodes, or raise --max-mb"
        )
        raise UserError(message, code="too_large")
    return upload


def _expand_tracked(folder: Path, name: str, tracked_paths: Set[Path]) -> list[str]:
    """Expand a tracked name into files: itself; for a link to a folder the tracked files in it (`tracked_paths`,
    absolute), under the link's name; nothing if it was deleted."""
    path, names = folder / name, [name]
    if not os.path.lexists(path):
        return []
    target = path.resolve()
    if path.is_symlink() and path.is_dir():
        linked_paths = [tracked.relative_to(target) for tracked in tracked_paths if target in tracked.parents]
        linked_names = sorted(str(PurePosixPath(name, linked_path)) for linked_path in linked_paths)
        names = [linked_name for linked_name in linked_names if (folder / linked_name).is_file()]
    elif path.is_dir():
        fix = f"run git submodule update --init {shlex.quote(name)}, or take it out of git"
        raise UserError(f"{path} is a submodule without files here: {fix}", code="missing_submodule")
    if not names or any((folder / name).resolve() not in tracked_paths for name in names):
        message = f"{path} leads to {target}, which git does not track here; take it out of git"
        raise UserError(message, code="untracked_link")
    return names


@contextmanager
def temporary_copy(upload: Upload) -> Iterator[Path]:
    """A folder with copies of the files, while the block runs."""
    with TemporaryDirectory(prefix="rtrain-upload-") as folder:
        for name, _ in upload.files:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(upload.root / name, target)
        yield Path(folder)


def _run_git(folder: Path, *words: str) -> list[str]:
    try:
        completed = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is missing; install it: a job uploads tracked files", code="not_installed") from None
    if completed.returncode:
        reason = completed.stderr.decode(errors="replace").strip().splitlines()
        message = (
            f"{folder} is not a git work tree ({reason[-1] if reason else 'git failed'}); a job uploads tracked files. "
            "Name one with --folder, create one (git init), or use ray job submit"
        )
        raise UserError(message, code="no_git")
    try:
        return [name.decode() for name in completed.stdout.split(b"\0") if name]
    except UnicodeDecodeError as error:
        name = ascii(os.fsdecode(error.object))
        message = f"{folder}: the name {name} is not UTF-8, which Ray cannot upload; rename it"
        raise UserError(message, code="not_utf8") from None
