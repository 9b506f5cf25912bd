"""Jobs on a cluster, by Ray's job API: asked for, watched, read, stopped."""

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
from rtrain.core.errors import Ended, TryAgain, UserError, hide

IGNORE_GITIGNORE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
DEFAULT_EXCLUDES = "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES"
ALL_FILES = {IGNORE_GITIGNORE: "1", DEFAULT_EXCLUDES: ""}
"""With these in its environment, Ray's client leaves nothing out of a folder."""

DEFAULT = "http://127.0.0.1:8265"
STOP_S = 60
"""Seconds that a job which is told to end has for it. By default Ray kills what it has started after 3: an endpoint
would cut its requests off, and a run not say that it was interrupted."""
LAST_LINES = 12


class Waiting(NamedTuple):
    """How long the head is waited for, in seconds."""

    look_every_s: float = 1.0
    agent_s: float = 60.0
    """Until the head's agent is there: the API answers some seconds before it takes jobs."""
    patience_s: float = 30.0
    """Without an answer of the head, after which a watched job counts as lost with it."""


class Job(NamedTuple):
    id: str
    status: str
    entrypoint: str
    started: float | None
    """Seconds since 1970."""
    ended: float | None
    driver_exit_code: int | None
    error: str | None
    """Why it has failed, in Ray's words; None for one that has not."""


PATIENT = Waiting()


class Jobs:
    """The job API at `address`; None stands for RAY_API_SERVER_ADDRESS, or this machine's port 8265."""

    def __init__(self, address: str | None = None, client: Any = None, waiting: Waiting = PATIENT):
        """`client`: a JobSubmissionClient; None to make one."""
        self._waiting = waiting
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT
        if not self.address.startswith(("http://", "https://")):
            raise UserError(
                f"{self.address}: not the address of a job API; write one such as {DEFAULT}", code="invalid_address"
            )
        self._client: Any = client
        if client is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
            logging.getLogger("ray").setLevel(logging.ERROR)  # it would tell each step of an upload
            from ray.job_submission import JobSubmissionClient

            with self._asked(reads=True):
                self._client = JobSubmissionClient(self.address)

    def all(self) -> dict[str, Job]:
        with self._asked(reads=True):
            found = self._client.list_jobs()
        return {
            one.submission_id: Job(
                one.submission_id,
                str(getattr(one.status, "value", one.status)),
                one.entrypoint or "",
                one.start_time / 1000 if one.start_time else None,
                one.end_time / 1000 if one.end_time else None,
                one.driver_exit_code,
                one.error_type,
            )
            for one in found
            if one.submission_id
        }

    def of_run(self, name: str) -> list[Job]:
        """The jobs of a run, in their order (`naming.meant`)."""
        jobs = self.all()
        return [jobs[job] for job in job_names.meant(name, list(jobs))]

    def submit(self, words: Sequence[str], files: upload.Upload, say: Callable[[str], None]) -> str:
        """Ask for the job that `words` name; returns its id. One that is there already is left as it is."""
        run = job_names.run_of(words)
        base = job_names.identity(words, run)
        known, decided = self._decided(base)
        if isinstance(decided, job_names.Attach) and known[decided.job].status == "RUNNING":
            self._wake(decided.job)
            known, decided = self._decided(base)
        entrypoint = shlex.join(["python", "-m", job_names.ENTRY, *words])
        if isinstance(decided, job_names.Attach):
            other = known[decided.job].entrypoint
            with_words = "" if other == entrypoint else f", with other words ({hide(other)})"
            say(f"{decided.job} is there already{with_words}: nothing is started")
            return decided.job
        say(f"{decided.job}: {files.text()}")
        give_up = time.monotonic() + self._waiting.agent_s
        with upload.copied(files) as folder, self._asked(), _all_files():
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=decided.job,
                        runtime_env={
                            "working_dir": str(folder),
                            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)},
                        },
                        metadata={"rtrain_run": str(run or "")},
                    )
                    return decided.job
                except (RuntimeError, OSError) as error:
                    if "already exists" in str(error):  # another command has asked for it meanwhile
                        say(f"{decided.job} is there already: nothing is started")
                        return decided.job
                    broke_off = _broke_off(error)
                    if not (broke_off or "No available agent" in str(error)) or time.monotonic() > give_up:
                        raise
                time.sleep(self._waiting.look_every_s)
                if broke_off and decided.job in self.all():  # it was taken, and its answer lost
                    return decided.job

    def _decided(self, base: str) -> tuple[dict[str, Job], job_names.Attach | job_names.Start]:
        known = self.all()
        return known, job_names.decide(base, {job.id: job.status for job in known.values()})

    def _wake(self, job: str) -> None:
        """Force the head to refresh a job that is marked RUNNING.

        A head that came back with the contents of its Redis checks the supervisors of its jobs once its own agent gets
        a request, and not before: jobs that were lost with the old processes would run for ever. A submission under
        the id of a known job is such a request and changes nothing: the agent refuses it before it starts or writes
        anything. To delete the job would remove the record of one that has ended meanwhile, and a log is read by the
        agent of the job's machine, which may be gone."""
        with suppress(UserError, RuntimeError), self._asked():
            self._client.submit_job(entrypoint="true", submission_id=job)
        time.sleep(self._waiting.look_every_s)

    def nodes(self) -> str:
        """What the autoscaler says of nodes and demand; as `ray status` prints it."""
        with self._asked(reads=True):
            told = ray_internals.cluster_status(self._client)
        return (told or "the cluster says nothing of its nodes").strip()

    def head_ip(self) -> str | None:
        """The address of the head's node; None where the API does not say it."""
        with self._asked(reads=True):
            return ray_internals.head_ip(self._client)

    def logs(self, job: str) -> str:
        with self._asked():
            return str(self._client.get_job_logs(job))

    def stop(self, job: str) -> bool:
        with self._asked():
            return bool(self._client.stop_job(job))

    def await_line(self, job: str, sign: str) -> str:
        """The line of a job's log that begins with `sign`, once it is there. Raises `Ended` where the job ends first,
        with its exit code and its last lines."""
        while True:
            if (found := self.all().get(job)) is None:
                raise _forgotten(job)
            log = self.logs(job)
            line = next((line for line in log.splitlines() if line.startswith(sign)), None)
            if line is not None:
                return line
            if found.status in job_names.ENDED:
                code = job_names.exit_code(found.status, found.driver_exit_code, found.error) or UserError.exit_code
                last = "\n".join(log.strip().splitlines()[-LAST_LINES:])
                raise Ended(f"{job} has ended as {found.status}; its last lines:\n{last}", code)
            time.sleep(self._waiting.look_every_s)

    def watch(self, job: str, show: Callable[[str], None]) -> Job:
        """Show a job's lines as they come, until it has ended. Raises `TryAgain` where the head is lost meanwhile."""
        shown, answered = 0, time.monotonic()

        def new(text: str) -> None:  # counted at once: a stream may break off after any portion
            nonlocal shown
            shown += len(text)
            show(text)

        while True:
            try:
                found = self.all().get(job)
                self._tail(job, shown, new)
                answered = time.monotonic()
            except (UserError, OSError):
                if time.monotonic() - answered > self._waiting.patience_s:
                    raise TryAgain(
                        f"the head at {self.address} does not answer any more; submit the same command again when it "
                        "does: the run goes on from its storage",
                        code="head_lost",
                    ) from None
                found = None
            else:
                if found is None:
                    raise _forgotten(job)
                if found.status in job_names.ENDED:
                    rest = self.logs(job)
                    if len(rest) > shown:
                        show(rest[shown:])
                    return found
            time.sleep(self._waiting.look_every_s)

    def _tail(self, job: str, already: int, show: Callable[[str], None]) -> None:
        """Show what follows the first `already` characters, until the stream ends, breaks off or is silent for long: a
        head whose machine is gone closes no connection, and the caller is to ask whether it is there."""

        from aiohttp import ClientError

        async def follow() -> None:
            seen, portions = 0, aiter(self._client.tail_job_logs(job))
            while (portion := await asyncio.wait_for(anext(portions, None), self._waiting.patience_s)) is not None:
                if new := portion[max(0, already - seen) :]:
                    show(new)
                seen += len(portion)

        # The job has not begun, its log is not there yet, or the connection is cut.
        with suppress(RuntimeError, TimeoutError, ClientError):
            asyncio.run(follow())

    @contextmanager
    def _asked(self, *, reads: bool = False) -> Iterator[None]:
        """Turn the errors of Ray's client into a line for the user. `reads`: the block only reads what the address
        answers, so that any other error comes from an answer that is not Ray's."""
        try:
            yield
        except ConnectionError as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"no job API answers at {self.address} ({first}); start the cluster, and forward its port: "
                "ray dashboard cluster.yaml",
                code="unreachable",
            ) from None
        except Exception as error:
            text = str(error)
            if _is_refusal(error, text):
                raise UserError(
                    f"{self.address} asks for the cluster's token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to "
                    "the file that ray rsync-down has brought",
                    code="wrong_token",
                ) from None
            told = _FAILED.search(text)
            if told is not None or _broke_off(error):
                why = told[0] if told else "the connection broke off"
                raise UserError(
                    f"the head at {self.address} fails ({why}): it is starting, ending or has too much to do; ask "
                    "again, and read its logs where that does not help",
                    code="unreachable",
                ) from None
            if reads and isinstance(error, LookupError | TypeError | ValueError | RuntimeError | OSError):
                first = next(iter(text.strip().splitlines()), "")
                raise UserError(
                    f"{self.address} does not answer as Ray's job API does ({type(error).__name__}: {first}); write "
                    f"the address that ray dashboard forwards, {DEFAULT} by default",
                    code="not_ray",
                ) from None
            raise


_FAILED = re.compile(r"status code 5\d\d.*")
"""In the errors of Ray's client: its proxy found nobody to answer, or the answer was an error."""


@contextmanager
def _all_files() -> Iterator[None]:
    """Ray's client leaves out what a .gitignore of the folder names, and every folder called venv or __pycache__; git
    tracks some of that all the same, and it was promised to go along."""
    before = {name: os.environ.get(name) for name in ALL_FILES}
    os.environ.update(ALL_FILES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forgotten(job: str) -> TryAgain:
    """Its head was started anew meanwhile."""
    return TryAgain(f"{job} is not known here any more; submit the same command again", code="head_restarted")


def _broke_off(error: Exception) -> bool:
    """Whether the head closed a connection that it had taken, or took none: its API ends with its process, and on a
    head that has too much to do."""
    from requests import exceptions

    return isinstance(error, exceptions.ConnectionError | exceptions.Timeout)


def _is_refusal(error: Exception, text: str) -> bool:
    return "Authentication" in type(error).__name__ or any(
        told in text for told in ("status code 401", "status code 403", "Unauthorized", "authentication token")
    )
