"""Jobs on a cluster, by Ray's job API: submit, follow, read, stop."""

import asyncio
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rtrain import ray_internals
from rtrain.cluster.jobs import job_names, upload
from rtrain.core.errors import CommandInterruptedError, TemporaryFailureError, UserError, redact

IGNORE_GITIGNORE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
DEFAULT_EXCLUDES = "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES"
INCLUDE_ALL_FILES = {IGNORE_GITIGNORE: "1", DEFAULT_EXCLUDES: ""}
"""Environment in which Ray's client uploads every file of a folder."""

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
STOP_GRACE_S = 60
"""Seconds that a job may take to stop. Ray's default is 3: an endpoint would drop its requests, and a run could not
report the interruption."""
TAIL_LINES = 12


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


class JobClient:
    """The job API at `address`; None: RAY_API_SERVER_ADDRESS, or port 8265 of this machine."""

    def __init__(self, address: str | None = None, client: Any = None, polling: PollingPolicy = DEFAULT_POLLING):
        """`client`: a JobSubmissionClient; None creates one."""
        self._polling = polling
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            raise UserError(
                f"{self.address}: not the address of a job API; write one such as {DEFAULT_ADDRESS}",
                code="invalid_address",
            )
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

    def submit(self, words: Sequence[str], files: upload.Upload, log: Callable[[str], None]) -> str:
        """Submit the job of `words`; returns its id. A running job with that id is left alone."""
        run = job_names.resolve_run_folder(words)
        base_id = job_names.job_id(words, run)
        known_jobs, decision = self._decide(base_id)
        if isinstance(decision, job_names.ExistingJob) and known_jobs[decision.job_id].status == "RUNNING":
            self._refresh(decision.job_id)
            known_jobs, decision = self._decide(base_id)
        entrypoint = shlex.join(["python", "-m", job_names.JOB_ENTRYPOINT, *words])
        if isinstance(decision, job_names.ExistingJob):
            running_entrypoint = known_jobs[decision.job_id].entrypoint
            difference = (
                "" if running_entrypoint == entrypoint else f", with another command ({redact(running_entrypoint)})"
            )
            log(f"{decision.job_id} is there already{difference}: nothing is started")
            return decision.job_id
        log(f"{decision.job_id}: {files.describe()}")
        deadline = time.monotonic() + self._polling.agent_timeout_s
        with upload.temporary_copy(files) as folder, self._translate_errors(), _include_all_files():
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=decision.job_id,
                        runtime_env={
                            "working_dir": str(folder),
                            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S)},
                        },
                        metadata={"rtrain_run": str(run or "")},
                    )
                    return decision.job_id
                except (RuntimeError, OSError) as error:
                    if "already exists" in str(error):  # another command submitted it meanwhile
                        log(f"{decision.job_id} already exists: nothing is started")
                        return decision.job_id
                    has_disconnected = _is_disconnect(error)
                    if not (has_disconnected or "No available agent" in str(error)) or time.monotonic() > deadline:
                        raise
                time.sleep(self._polling.poll_interval_s)
                if has_disconnected and decision.job_id in self.list_jobs():  # it was accepted, and the response lost
                    return decision.job_id

    def _decide(self, base_id: str) -> tuple[dict[str, JobInfo], job_names.ExistingJob | job_names.NewJob]:
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
                code = (
                    job_names.exit_code(job_info.status, job_info.driver_exit_code, job_info.error)
                    or UserError.exit_code
                )
                tail = "\n".join(log.strip().splitlines()[-TAIL_LINES:])
                raise CommandInterruptedError(f"{job} has ended as {job_info.status}; its last lines:\n{tail}", code)
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
                    raise TemporaryFailureError(
                        f"the head at {self.address} does not respond; submit the same command again later: the run "
                        "resumes from its storage",
                        code="head_lost",
                    ) from None
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
            first_line = str(error).strip().splitlines()[0]
            raise UserError(
                f"no job API responds at {self.address} ({first_line}); start the cluster, and forward its port: "
                "ray dashboard cluster.yaml",
                code="unreachable",
            ) from None
        except Exception as error:
            text = str(error)
            if _is_unauthorized(error, text):
                raise UserError(
                    f"{self.address} requires the cluster's token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to "
                    "the file of ray rsync-down",
                    code="wrong_token",
                ) from None
            failure = _SERVER_ERROR.search(text)
            if failure is not None or _is_disconnect(error):
                reason = failure[0] if failure else "the connection broke off"
                raise UserError(
                    f"the head at {self.address} fails ({reason}): it is starting, stopping or overloaded; retry, then "
                    "read its logs",
                    code="unreachable",
                ) from None
            if is_read_only and isinstance(error, LookupError | TypeError | ValueError | RuntimeError | OSError):
                first_line = next(iter(text.strip().splitlines()), "")
                raise UserError(
                    f"{self.address} does not respond like Ray's job API ({type(error).__name__}: {first_line}); "
                    "write "
                    f"the address that ray dashboard forwards, {DEFAULT_ADDRESS} by default",
                    code="not_ray",
                ) from None
            raise


_SERVER_ERROR = re.compile(r"status code 5\d\d.*")
"""Fragments of errors of Ray's client: its proxy got no response or an error."""


@contextmanager
def _include_all_files() -> Iterator[None]:
    """Upload every file: Ray's client skips files in .gitignore, and all folders called venv or __pycache__, although
    git may track them."""
    previous = {name: os.environ.get(name) for name in INCLUDE_ALL_FILES}
    os.environ.update(INCLUDE_ALL_FILES)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _unknown_job_error(job: str) -> TemporaryFailureError:
    """The job is unknown: its head was restarted."""
    return TemporaryFailureError(
        f"{job} is unknown to this cluster; submit the same command again", code="head_restarted"
    )


def _is_disconnect(error: Exception) -> bool:
    """Whether the head closed or refused a connection: its API ends with its process, and under overload."""
    from requests import exceptions

    return isinstance(error, exceptions.ConnectionError | exceptions.Timeout)


def _is_unauthorized(error: Exception, text: str) -> bool:
    return "Authentication" in type(error).__name__ or any(
        fragment in text for fragment in ("status code 401", "status code 403", "Unauthorized", "authentication token")
    )
