"""Which run a job makes, what the job is called, and whether asking for it again starts another one. Pure."""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from rtrain.core.errors import ConfigError, Problem, TryAgain

SUPERVISED = ("train", "tune", "distill")
"""Verbs that write a run folder, which they resume."""
MAKE_RUNS = (*SUPERVISED, "demo")
"""Verbs that write a folder, beside which their lines are kept."""
LOGS = ".jobs"
"""Folder beside the runs, with a log for each."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
FLAGS = (
    *("--all", "--alone", "--choose-k", "--dry-run", "--full", "--insecure", "--int8", "--json", "--new"),
    *("--no-texts", "--overwrite", "--planted", "--print-config", "--resume", "--rollback", "--scores", "--search"),
    *("--stores", "--text", "--ungated", "--update", "--with-wheels", "--yes"),
)
"""Options that take no value, whichever verb has them."""
ENTRY = "rtrain.cluster.jobs.entry"
LONGEST = 60
DIGITS = 8
"""Digits of the digest that tells jobs apart whose runs have one name."""


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option in the words of a command, the last one where there are several."""
    found = None
    for place, word in enumerate(words):
        if word == name and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def assignments(words: Sequence[str]) -> list[str]:
    """What `--set` is given, in its order."""
    behind = [(place, words[place + 1]) for place, word in enumerate(words[:-1]) if word == "--set"]
    joined = [(place, word.partition("=")[2]) for place, word in enumerate(words) if word.startswith("--set=")]
    return [text for _, text in sorted(behind + joined)]


def arguments(words: Sequence[str]) -> list[str]:
    """What a verb is given: its words that are no options, nor the values of some."""
    found, value_follows = [], False
    for word in words[1:]:
        if value_follows:
            value_follows = False
        elif word.startswith("-"):
            value_follows = "=" not in word and word not in FLAGS
        else:
            found.append(word)
    return found


def given(words: Sequence[str]) -> str | None:
    """The recipe or the run that a verb is given: the first of its `arguments`."""
    return next(iter(arguments(words)), None)


def run_of(words: Sequence[str]) -> PurePosixPath | None:
    """The run folder that a command makes; None for a verb that makes none. Raises `ConfigError` for one that makes
    a run and does not say where: the job's own folder is collected with the job. And for --new, since a job that is
    asked for again goes on with its run: the words must name the same one each time."""
    out = option(words, "--out")
    if not words or words[0] not in MAKE_RUNS:
        return None
    if out is None or not out.startswith("/"):
        reason = "must be the absolute path of a folder that all nodes share"
        raise ConfigError([Problem("--out", out, reason, f"write --out /shared/runs/{words[0]}", code="not_absolute")])
    if "--new" in words:
        reason = "a job that is asked for again goes on with its run, and this would begin another each time"
        raise ConfigError(
            [
                Problem(
                    "--new",
                    None,
                    reason,
                    f"name another --out in its place, such as {out}-2",
                    code="conflicting_settings",
                )
            ]
        )
    return PurePosixPath(out)


def log_of(run: PurePosixPath) -> PurePosixPath:
    return run.parent / LOGS / f"{run.name}.log"


def stored(storage: str, name: str) -> str:
    """Where the storage has what is kept beside the run of that name: its log, NAME.log, and its folder, NAME.run."""
    return f"{storage.rstrip('/')}/{LOGS}/{name}"


def identity(words: Sequence[str], run: PurePosixPath | None) -> str:
    """What the job is called: the run's name, of an endpoint that of what it serves too, else the verb's; and a digest
    of the run's whole path, of all artefacts', or of all words. It is the same for the same request alone."""
    served = [word.rstrip("/") for word in arguments(words)] if [*words[:1]] == ["serve"] else []
    name = run.name if run else served_name(served[0]) if served else words[0] if words else "job"
    asked = str(run or shlex.join(served or words))
    return f"rtrain-{_plain(name)[:LONGEST]}-{hashlib.sha256(asked.encode()).hexdigest()[:DIGITS]}"


def _plain(name: str) -> str:
    """A name in the letters that a job's id may have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "job"


def served_name(artifact: str) -> str:
    """What the job that serves an artefact is called: after its run, where it lies in one."""
    path = PurePosixPath(artifact.partition("://")[2] or artifact)
    return f"serve-{path.parent.name if path.name.startswith('artifact') and path.parent.name else path.name}"


class Attach(NamedTuple):
    """The job is there and has not ended: nothing is started."""

    job: str


class Start(NamedTuple):
    """A job of that id is to be started."""

    job: str


def attempts(base: str, jobs: Sequence[str]) -> list[str]:
    """The jobs of that name, in their order: NAME, NAME-try-2, NAME-try-3, ..."""
    pattern = re.compile(rf"{re.escape(base)}(?:-try-(\d+))?")
    found = [(int(match[1] or 1), job) for job in jobs if (match := pattern.fullmatch(job))]
    return [job for _, job in sorted(found)]


def meant(run: str, jobs: Sequence[str]) -> list[str]:
    """The jobs of a run, by its whole folder, its name or the job's own, in their order. Raises `ConfigError` where the
    name is that of several runs."""
    if run.startswith("/"):
        return attempts(identity((), PurePosixPath(run)), jobs)
    plain = _plain(PurePosixPath(run).name)
    # A run's name is cut; a job's own has `rtrain-` before it, and a digest behind it.
    lengths = (LONGEST, LONGEST + 1 + DIGITS)
    names = {one[:length] for one in (plain, plain.removeprefix("rtrain-")) for length in lengths}
    any_of = "|".join(map(re.escape, sorted(names)))
    pattern = re.compile(rf"(rtrain-(?:{any_of})(?:-[0-9a-f]{{{DIGITS}}})?)(?:-try-\d+)?")
    bases = sorted({match[1] for job in jobs if (match := pattern.fullmatch(job))})
    if len(bases) > 1:
        several = ", ".join(base.removeprefix("rtrain-") for base in bases)
        raise ConfigError(
            [
                Problem(
                    "run",
                    run,
                    f"several jobs are called so: {several}",
                    "write one of these names",
                    code="ambiguous_name",
                )
            ]
        )
    return attempts(bases[0], jobs) if bases else []


def decide(base: str, statuses: Mapping[str, str]) -> Attach | Start:
    """What a request for the job `base` comes to. `statuses`: by id, of all jobs that the cluster knows."""
    mine = attempts(base, list(statuses))
    running = [job for job in mine if statuses[job] not in ENDED]
    if running:
        return Attach(running[-1])
    if not mine:
        return Start(base)
    last = re.fullmatch(r".*-try-(\d+)", mine[-1])
    return Start(f"{base}-try-{int(last[1]) + 1 if last else 2}")


LOST = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
"""Ray's words for the end of a job that its verb had no part in, such as that of the head's processes."""


def exit_code(status: str, driver: int | None, error: str | None = None) -> int:
    """The exit code of a command that has watched a job until it ended; 75 for one that is to be submitted anew.

    `driver`: the exit code of the job's entry point, negative for a signal; None where it did not end by itself.
    `error`: why, in Ray's words.
    """
    if status == "SUCCEEDED":
        return 0
    if status == "FAILED" and (error in LOST if driver is None else driver < 0):
        return TryAgain.exit_code
    return driver if driver and driver > 0 else 1
