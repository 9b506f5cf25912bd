"""Jobs on a cluster: named, asked for again, watched, stopped, read when the cluster is gone. On a head that is started
as cluster.yaml starts it."""

import asyncio
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from threading import Thread
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import fsspec
import pytest
import requests
import typer
from aiohttp import ClientPayloadError
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, strategies
from ray._private.runtime_env.packaging import create_package
from ray.dashboard.modules.dashboard_sdk import SubmissionClient

from rtrain.cli import app, cluster
from rtrain.cluster import cluster_file
from rtrain.cluster.jobs import client, entry, job_names
from rtrain.cluster.jobs.job_names import SelectedJob
from rtrain.core.errors import CommandInterruptedError, TemporaryFailureError, UserError
from tests.conftest import STARTUP, labelled_rows, write_rows
from tests.support.heads import Head
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

WITHIN_S = 900


# ---------------------------------------------------------------------------------------------------------- names


def identify(words: list[str]) -> str:
    return job_names.job_id(words, job_names.resolve_run_folder(words))


@pytest.mark.parametrize("name", ["intent", "rtrain-a", "x" * 70])
def test_a_run_s_jobs_are_found_by_its_name(name: str) -> None:
    job = job_names.job_id((), PurePosixPath(f"/shared/runs/{name}"))
    jobs = [job, f"{job}-try-2", "rtrain-another-01234567"]
    for requested in (name, f"/shared/runs/{name}", job):
        assert job_names.find_attempts(requested, jobs) == jobs[:2]


@pytest.mark.parametrize(
    ("words", "run", "name"),
    [
        (["train", "intent", "--out", "/shared/runs/a b"], "/shared/runs/a b", "rtrain-a-b-"),
        (["tune", "intent", "--out=/shared/x"], "/shared/x", "rtrain-x-"),
        (["serve", "/shared/x/artifact"], None, "rtrain-serve-x-"),
        (["serve", "s3://bucket/models/x"], None, "rtrain-serve-x-"),
        (["evaluate"], None, "rtrain-evaluate-"),
    ],
)
def test_a_job_is_called_after_its_run(words: list[str], run: str | None, name: str) -> None:
    folder = job_names.resolve_run_folder(words)
    job = job_names.job_id(words, folder)
    assert (str(folder) if folder else None, job[: -job_names.DIGEST_LENGTH]) == (run, name)
    int(job[-job_names.DIGEST_LENGTH :], 16)


OTHER_COMMANDS = [
    ["train", "intent", "--out", "/shared/alice/intent"],
    ["train", "intent", "--out", "/shared/bob/intent"],
    ["train", "intent", "--out", "/shared/runs/intent-try-2"],
    ["train", "intent", "--out", f"/shared/runs/{'x' * job_names.MAX_NAME_LENGTH}-A"],
    ["train", "intent", "--out", f"/shared/runs/{'x' * job_names.MAX_NAME_LENGTH}-B"],
    ["predict", "/shared/m1", "--data", "/shared/a.csv", "--out", "/shared/a.out.csv"],
    ["predict", "/shared/m2", "--data", "/shared/b.csv", "--out", "/shared/b.out.csv"],
    ["serve", "/shared/alice/intent"],
    ["serve", "/shared/bob/intent/artifact"],
    ["serve", "/shared/bob/intent/artifact-int8"],
    ["serve", "s3://bucket/models/intent"],
    ["serve", "/a/m", "/b/m"],
    ["serve", "/a/m", "/c/m"],
    ["serve", "--insecure", "/d/m"],
    ["serve", "--alone", "/e/m"],
]


def test_what_is_another_request_is_another_job() -> None:
    jobs = [identify(words) for words in OTHER_COMMANDS]
    assert len(set(jobs)) == len(OTHER_COMMANDS)
    repeated = ["train", "sentiment", "--resume", "--out=/shared/alice/intent/"]  # one folder is one run
    assert identify(repeated) == jobs[0]


def test_a_run_s_jobs_are_found_by_its_folder_its_name_or_their_own() -> None:
    alice, bob, tried = (identify(words) for words in OTHER_COMMANDS[:3])
    jobs = [f"{alice}-try-2", bob, alice, tried, "rtrain-serve-intent-01234567"]
    assert job_names.find_attempts("/shared/alice/intent", jobs) == [alice, f"{alice}-try-2"]
    for name in (bob, bob.removeprefix("rtrain-")):
        assert job_names.find_attempts(name, jobs) == [bob]
    assert job_names.find_attempts("intent-try-2", jobs) == [tried]
    assert job_names.find_attempts("serve-intent", jobs) == ["rtrain-serve-intent-01234567"]
    with refused_with("ambiguous_name"):
        job_names.find_attempts("intent", jobs)
    assert job_names.find_attempts("intent", [bob, "rtrain-intention-01234567"]) == [bob]
    assert job_names.find_attempts("nobody", jobs) == []


@pytest.mark.parametrize(
    ("more", "code"),
    [([], "not_absolute"), (["--out", "runs/x"], "not_absolute"), (["--out", "/x", "--new"], "conflicting_settings")],
)
def test_a_job_names_a_folder_of_the_nodes_and_the_same_run_each_time(more: list[str], code: str) -> None:
    with refused_with(code):
        job_names.resolve_run_folder(["train", "intent", *more])


def test_settings_and_options_are_read_as_the_verb_reads_them() -> None:
    words = ["train", "--set", "cluster.storage=s3://a/b", "--set=cluster.storage=s3://c", "--out", "/x", "--out=/y"]
    assert job_names.assignments(words) == ["cluster.storage=s3://a/b", "cluster.storage=s3://c"]
    assert job_names.option_value(words, "--out") == "/y"


STATUSES = strategies.sampled_from(["PENDING", "RUNNING", *job_names.FINAL_STATUSES])


@given(strategies.lists(STATUSES, max_size=12), strategies.dictionaries(strategies.text(max_size=8), STATUSES))
def test_asked_again_a_job_is_there_or_a_new_one_follows_the_last(mine: list[str], foreign: dict[str, str]) -> None:
    names = ["rtrain-x", *(f"rtrain-x-try-{number}" for number in range(2, 99))][: len(mine)]
    foreign = {f"rtrain-x-{name}": status for name, status in foreign.items() if not name.startswith("try-")}
    statuses = {**dict(zip(names, mine, strict=True)), **foreign, "rtrain-xy": "RUNNING"}
    decided = job_names.attach_or_start("rtrain-x", statuses)
    running = [name for name in names if statuses[name] not in job_names.FINAL_STATUSES]
    if running:
        assert decided == SelectedJob(running[-1], True)
    else:
        assert decided == SelectedJob(f"rtrain-x-try-{len(names) + 1}" if names else "rtrain-x", False)
        assert decided.job_id not in statuses


@pytest.mark.parametrize(
    ("status", "driver", "error", "code"),
    [
        *(("SUCCEEDED", 0, None, 0), ("FAILED", 2, "JOB_ENTRYPOINT_COMMAND_ERROR", 2), ("STOPPED", None, None, 1)),
        *(("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR", 1), ("FAILED", 75, "JOB_ENTRYPOINT_COMMAND_ERROR", 75)),
        ("FAILED", -9, "JOB_ENTRYPOINT_COMMAND_ERROR", 75),  # the entry point was killed, not the verb that it runs
        ("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", 75),  # with the head's processes
        ("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", 1),  # it would only come again
    ],
)
def test_the_exit_code_is_the_driver_s_or_says_again(
    status: str, driver: int | None, error: str | None, code: int
) -> None:
    from ray.dashboard.modules.job.common import JobErrorType

    assert job_names.exit_code(status, driver, error) == code
    assert set(job_names.INFRASTRUCTURE_ERRORS) <= {error_type.value for error_type in JobErrorType}


# --------------------------------------------------------------------------------------------------------- upload


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "runs").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "code.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("/runs/\n")
    subprocess.run(["git", "add", "code.py", ".gitignore"], cwd=folder, check=True)
    (folder / "notes.txt").write_text("untracked")
    with (folder / "runs" / "weights").open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte of runs
    return folder


def test_tracked_files_go_along_and_nothing_else(checkout: Path) -> None:
    collected = client.collect_upload(checkout)
    assert sorted(name for name, _ in collected.files) == [".gitignore", "code.py"]
    assert (collected.total_bytes, collected.untracked_files) == (13, 1)
    with client.temporary_copy(collected) as folder:
        assert sorted(path.name for path in folder.rglob("*")) == [".gitignore", "code.py"]
        assert (folder / "code.py").read_text() == "x = 1\n"
    assert not folder.exists()


class Packs:
    """A job API that packs uploads with Ray's own client, and records the names."""

    packed: tuple[str, ...] = ()

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, runtime_env: dict[str, Any], **keywords: Any) -> None:
        SubmissionClient._upload_working_dir_if_needed(self, runtime_env)  # type: ignore[arg-type]

    def _upload_package_if_needed(
        self, folder: str, include_gitignore: bool, excludes: list[str], **keywords: Any
    ) -> str:
        with TemporaryDirectory() as place:
            out = Path(place, "packed.zip")
            create_package(folder, out, include_gitignore, excludes=excludes)
            self.packed = tuple(sorted(ZipFile(out).namelist()))
        return "gcs://packed.zip"


def jobs_of(api: Any, patience_s: float = 30.0, agent_s: float = 60.0) -> client.JobClient:
    return client.JobClient("http://head", api, client.PollingPolicy(0.0, agent_s, patience_s))


def packed(checkout: Path) -> tuple[str, ...]:
    """Names of a job's uploaded files."""
    api = Packs()
    jobs_of(api).submit(["train", "intent", "--out", "/x"], client.collect_upload(checkout), print)
    return api.packed


def test_what_ray_s_client_leaves_out_by_itself_goes_along_too(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("venv/a.py", "lib/__pycache__/b.py", "table.bin"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("1")
    (checkout / ".rayignore").write_text("*.py\n")
    with (checkout / ".gitignore").open("a") as file:
        file.write("*.bin\n")
    subprocess.run(["git", "add", "-f", "venv", "lib", "table.bin", ".rayignore"], cwd=checkout, check=True)
    for name in client.INCLUDE_ALL_FILES:
        monkeypatch.delenv(name, raising=False)
    assert packed(checkout) == (".gitignore", "code.py", "lib/__pycache__/b.py", "table.bin", "venv/a.py")
    assert not set(client.INCLUDE_ALL_FILES) & set(os.environ)


def test_submodules_and_links_to_folders_go_along(checkout: Path, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", other], check=True)
    (other / "m.py").write_text("m = 1\n")
    subprocess.run(["git", "add", "m.py"], cwd=other, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=other, check=True)
    subprocess.run([*git, "submodule", "--quiet", "add", other, "sub"], cwd=checkout, check=True)
    (checkout / "real").mkdir()
    (checkout / "real" / "x.py").write_text("x = 2\n")
    (checkout / "alias").symlink_to("real")
    subprocess.run(["git", "add", "real", "alias"], cwd=checkout, check=True)
    expected = {".gitignore", ".gitmodules", "code.py", "sub/m.py", "real/x.py", "alias/x.py"}
    assert {name for name, _ in client.collect_upload(checkout).files} == expected
    with client.temporary_copy(client.collect_upload(checkout)) as folder:
        assert (folder / "sub" / "m.py").read_text() == "m = 1\n"
        assert (folder / "alias" / "x.py").read_text() == "x = 2\n"
    subprocess.run(["git", "submodule", "--quiet", "deinit", "-f", "sub"], cwd=checkout, check=True)
    with refused_with("missing_submodule"):
        client.collect_upload(checkout)


def test_this_project_s_own_checkout_goes_along_without_its_tests() -> None:
    collected = client.collect_upload(ROOT)  # more than a job takes along, if it were whole
    names = {name for name, _ in collected.files}
    assert {"rtrain/cli/app.py", "serve/app.py", "tune/search.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
    assert sum((ROOT / name).stat().st_size for name in names) == collected.total_bytes


def test_a_link_takes_along_what_is_tracked_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    secret = tmp_path / "credentials"
    secret.write_text("aws_secret_access_key=XYZ")

    def linked(to: str | Path) -> client.Upload:
        (checkout / "link").unlink(missing_ok=True)
        (checkout / "link").symlink_to(to)
        subprocess.run(["git", "add", "link"], cwd=checkout, check=True)
        return client.collect_upload(checkout)

    for to in (secret, "../credentials", "runs/weights", "notes.txt", ".git/config", "runs", "nowhere"):
        with refused_with("untracked_link"):
            linked(to)
    result = linked("code.py")
    assert dict(result.files)["link"] == len("x = 1\n")  # bytes of the target, not of the link
    with client.temporary_copy(result) as folder:
        assert (folder / "link").read_text() == "x = 1\n"


def test_an_upload_is_refused_by_its_cause(checkout: Path, tmp_path: Path) -> None:
    """A job of a part of a checkout would lack what lies beside, or take none of the files that it was meant to."""
    with refused_with("part_of_checkout"):
        client.collect_upload(checkout / "runs")
    (checkout.parent / "link").symlink_to(checkout)
    assert len(client.collect_upload(checkout.parent / "link").files) == 2
    with refused_with("no_git"):
        client.collect_upload(tmp_path)
    (checkout / "big.bin").write_bytes(bytes(6_000_000))
    subprocess.run(["git", "add", "big.bin"], cwd=checkout, check=True)
    with refused_with("too_large"):
        client.collect_upload(checkout)
    assert client.collect_upload(checkout, 7_000_000).total_bytes > 6_000_000
    Path(os.fsdecode(bytes(checkout) + b"/caf\xe9.txt")).touch()
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    with refused_with("not_utf8"):
        client.collect_upload(checkout, 7_000_000)


def run_entry(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", job_names.JOB_ENTRYPOINT, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# ----------------------------------------------------------------------------------------------------- entry point


def test_a_run_that_is_there_is_resumed_also_from_its_storage(tmp_path: Path) -> None:
    run, words = tmp_path / "runs" / "x", ["train", "intent", "--out", str(tmp_path / "runs" / "x")]
    storage = f"file://{tmp_path}/storage"
    assert entry.resume_if_present(words, run, storage) == words
    (tmp_path / "storage" / "x").mkdir(parents=True)
    (tmp_path / "storage" / "x" / "config.yaml").touch()
    assert entry.resume_if_present(words, run, storage) == [*words, "--resume"]
    assert entry.resume_if_present(words, run, None) == words
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert entry.resume_if_present([*words, "--resume"], run, None) == [*words, "--resume"]


ENTRY_WITHOUT_VERB = """
import sys
from rtrain.cluster import supervisor
from rtrain.cluster.jobs import entry
supervisor.run_child = lambda words: 2
sys.exit(entry.main(sys.argv[1:]))
"""


def test_a_run_of_one_name_with_another_is_not_taken_over(tmp_path: Path) -> None:
    """The storage has January's run and log; February's folder has its name."""
    storage, old, run = tmp_path / "storage", tmp_path / "jan" / "x", tmp_path / "feb" / "x"
    for folder in (storage / "x", storage / ".jobs"):
        folder.mkdir(parents=True)
    (storage / "x" / "config.yaml").touch()
    words = ["train", "intent", "--data", "/none.csv", "--set", f"cluster.storage={storage}", "--out"]

    def started(out: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", ENTRY_WITHOUT_VERB, *words, str(out)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert f"{old} --resume" in started(old).stdout  # the copy has no owner file: it is resumed, and recorded
    assert (storage / ".jobs" / "x.run").read_text() == f"{old}\n"
    saved = (storage / ".jobs" / "x.log").read_bytes()
    done = started(run)
    assert (done.returncode, f"{run} --resume" in done.stdout) == (2, False), done.stderr
    assert (run.parent / ".jobs" / "x.log").is_file()
    assert (storage / ".jobs" / "x.log").read_bytes() == saved
    assert entry.find_other_run([*words, str(old)], old, str(storage)) is None
    assert entry.find_other_run([*words, str(run)], run, str(storage)) == str(old)
    assert entry.find_other_run([*words, str(run), "--resume"], run, str(storage)) is None  # who says so means it
    (storage / "x" / "config.yaml").unlink()  # nothing came of it
    assert entry.find_other_run([*words, str(run)], run, str(storage)) is None


class UnreachableStorage(MemoryFileSystem):  # type: ignore[misc]
    """A storage that does not answer, or refuses."""

    protocol = ("away",)

    def exists(self, path: str, **options: Any) -> bool:
        if "bucket" in path:
            raise OSError("no answer")
        raise PermissionError("not yours") if "closed" in path else ValueError("no credentials")


def test_a_storage_that_is_away_starts_nothing_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A new run would overwrite the remote copy. The verb refuses invalid storage."""
    fsspec.register_implementation("away", UnreachableStorage, clobber=True)
    run, words = tmp_path / "runs" / "x", ["train", "intent", "--out", str(tmp_path / "runs" / "x")]
    assert entry.main([*words, "--set", "cluster.storage=away://bucket"]) == 75
    error = capfd.readouterr().err
    assert ("away://bucket" in error, "Traceback" in error) == (True, False)
    assert not run.exists()
    for storage in ("away://closed", "away://keyless", "nonesuch://bucket"):
        assert entry.resume_if_present(words, run, storage) == words


def test_a_storage_that_connects_as_it_is_opened_says_try_again_too(tmp_path: Path) -> None:
    with refused_with("unreachable"):
        entry.resume_if_present(["train", "intent", "--out", "/x"], tmp_path / "x", "ftp://127.0.0.1:1")


def test_a_password_of_the_storage_is_in_no_line_nor_log(tmp_path: Path) -> None:
    """The log lies on the folder that all share, and is sent to the storage itself."""
    run, secret, storage = tmp_path / "runs" / "x", "hunter2pw", "ftp://me:hunter2pw@127.0.0.1:1"
    command = ["train", "intent", "--out", str(run), "--data", "/none.csv", "--set", f"cluster.storage={storage}"]
    done = run_entry(*command)
    assert done.returncode == 75, done.stderr
    log = (run.parent / ".jobs" / "x.log").read_text()
    assert "ftp://***@127.0.0.1:1" in log
    assert secret not in done.stdout + done.stderr + log
    run.mkdir()  # an existing run resumes while its storage is down
    (run / "config.yaml").write_text(f"name: x\ntask: classification\ncluster: {{storage: '{storage}'}}\n")
    done = run_entry(*command)
    assert (done.returncode != 75, "--resume" in done.stdout) == (True, True)
    assert secret not in done.stdout + done.stderr + (run.parent / ".jobs" / "x.log").read_text()
    with pytest.raises(UserError) as refused:
        entry.read_run_log("x", storage)
    assert refused.value.code == "unreachable"
    assert secret not in str(refused.value)


def test_the_storage_is_that_of_the_configuration(tmp_path: Path) -> None:
    """As the verb itself reads it: a recipe's file, quotes, null, and the run's own where there is one."""
    (tmp_path / "mine.yaml").write_text("name: x\ntask: classification\ncluster: {storage: s3://bucket/mine}\n")
    run, mine = tmp_path / "runs" / "x", str(tmp_path / "mine.yaml")

    def resolve(*words: str) -> str | None:
        return entry.resolve_storage(["train", *words, "--out", str(run)], run)

    assert resolve("intent") is None
    assert resolve(mine) == "s3://bucket/mine"
    assert resolve(mine, "--set", 'cluster.storage="s3://bucket/other"') == "s3://bucket/other"
    assert resolve(mine, "--set", "cluster.storage=null") is None
    assert resolve("intent", f"--set=cluster.storage={tmp_path}/here") == f"{tmp_path}/here"
    assert resolve("--resume", "--set", "cluster.storage=s3://bucket/mine") == "s3://bucket/mine"
    assert resolve(str(tmp_path / "none.yaml")) is None  # the verb reports the error
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\ntask: classification\ncluster: {storage: s3://bucket/its-own}\n")
    assert resolve("--resume") == "s3://bucket/its-own"
    assert entry.resolve_storage(["distill", str(run), "--out", "/shared/student"], Path("/shared/student")) == (
        "s3://bucket/its-own"
    )


def test_a_job_that_does_not_say_where_its_run_is_ends_with_2() -> None:
    done = run_entry("train", "intent", "--out", "runs/x")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


TEE_SCRIPT = """
import subprocess, sys
from pathlib import Path
from rtrain.cluster.jobs import entry
with entry.tee_output(Path(sys.argv[1]), sys.argv[2] or None):
    print("from python")
    subprocess.run(["sh", "-c", "echo from a child; echo from its errors >&2"])
    for number in range(20000):
        print("line", number)
print("after")
"""


def run_tee(log: Path, copy: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    script = options.pop("script", TEE_SCRIPT)
    return subprocess.run([sys.executable, "-c", script, str(log), copy], cwd=ROOT, text=True, check=True, **options)


def test_every_line_is_kept_and_printed_and_copied(tmp_path: Path) -> None:
    log, copy = tmp_path / ".jobs" / "x.log", f"file://{tmp_path}/storage/.jobs/x.log"
    for start in range(3):  # the second job appends, and so does the third after the folder was lost
        if start == 2:
            shutil.rmtree(log.parent)
        done = run_tee(log, copy, capture_output=True)
    once = "from python\nfrom a child\nfrom its errors\n" + "".join(f"line {number}\n" for number in range(20000))
    assert done.stdout == once + "after\n"
    assert log.read_text() == once * 3
    assert entry.read_run_log("x", f"file://{tmp_path}/storage") == once * 3
    assert entry.read_run_log(str(tmp_path / "x"), None) == once * 3
    assert entry.read_run_log("y", f"file://{tmp_path}/storage") is None


def test_a_log_whose_folder_was_lost_goes_on_behind_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, url, sent = tmp_path / "here" / "x.log", f"file://{tmp_path}/storage/.jobs/x.log", []
    monkeypatch.setattr(entry, "CHUNK_BYTES", 10)
    log.parent.mkdir()
    files = type(fsspec.core.url_to_fs(url)[0])
    pipe = files.pipe_file

    def piped(self: Any, path: str, value: bytes) -> None:
        sent.append(value)
        pipe(self, path, value)

    monkeypatch.setattr(files, "pipe_file", piped)
    lines = b""
    for start in range(3):
        copy = entry.ChunkedLog(log, url)
        copy.connect()
        for number in range(3):
            with log.open("ab") as file:
                file.write(new := b"%d.%d lines\n" % (start, number))
            lines += new
            copy.flush()
            copy.flush()  # nothing new
            assert entry.read_run_log("x", f"file://{tmp_path}/storage") == lines.decode()
        assert log.read_bytes() == lines
        shutil.rmtree(log.parent)  # with the machine
        log.parent.mkdir()
    assert all(len(value) <= 10 for value in sent)
    assert sum(map(len, sent)) < 2 * len(lines)


def test_a_storage_that_is_away_as_a_job_begins_keeps_what_it_has(tmp_path: Path) -> None:
    """The log is rewritten meanwhile; new lines are appended."""
    log, storage, url = tmp_path / "x.log", tmp_path / "storage", f"file://{tmp_path}/storage/.jobs/x.log"
    log.write_text("old lines\n")
    entry.ChunkedLog(log, url).flush()
    log.unlink()
    copy = entry.ChunkedLog(log, url)
    storage.rename(tmp_path / "away")
    storage.write_text("no folder")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        copy.connect()
    log.write_text("new lines\n")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        copy.flush()
    storage.unlink()
    (tmp_path / "away").rename(storage)
    copy.flush()
    assert entry.read_run_log("x", f"file://{storage}") == "old lines\nnew lines\n"
    assert log.read_text() == "new lines\n"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / ".jobs").write_text("a file in its way")
    assert run_tee(tmp_path / ".jobs" / "x.log", "", capture_output=True).stdout.endswith("line 19999\nafter\n")


def test_a_full_disk_under_the_job_s_own_log_ends_nothing(tmp_path: Path) -> None:
    script = TEE_SCRIPT.replace('print("after")', "sys.stdout = None")
    with open("/dev/full", "wb") as full:
        run_tee(tmp_path / "x.log", "", script=script, stdout=full, timeout=60)
    assert (tmp_path / "x.log").read_text().endswith("line 19999\n")


def test_what_came_of_a_run_before_ssh_failed_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").touch()
    codes = [255, 0]

    def rsync(*words: str) -> int:
        Path(words[-1], "events.jsonl").write_text("half")
        return codes.pop(0)

    to = tmp_path / "runs" / "x"
    with refused_with("launcher_failed"):
        cluster_file.rsync_down(tmp_path / "cluster.yaml", "/shared/runs/x", to, rsync)
    assert list(to.parent.iterdir()) == []
    cluster_file.rsync_down(tmp_path / "cluster.yaml", "/shared/runs/x", to, rsync)
    assert [path.name for path in to.iterdir()] == ["events.jsonl"]


def test_a_run_is_fetched_from_its_storage(tmp_path: Path) -> None:
    (tmp_path / "storage" / "x" / "artifact").mkdir(parents=True)
    (tmp_path / "storage" / ".jobs").mkdir()
    (tmp_path / "storage" / "x" / "config.yaml").write_text("a: 1\n")
    (tmp_path / "storage" / "x" / "artifact" / "artifact.json").write_text("{}")
    (tmp_path / "storage" / ".jobs" / "x.log").write_text("lines\n")
    storage = f"file://{tmp_path}/storage"
    cluster.fetch("/shared/x", tmp_path / "to", storage)
    result = {str(path.relative_to(tmp_path / "to")): path.read_text() for path in (tmp_path / "to").rglob("*.*")}
    assert result == {"config.yaml": "a: 1\n", "artifact/artifact.json": "{}", "job.log": "lines\n"}
    for name, to in (("x", "to"), ("y", "other"), ("..", "other")):
        with pytest.raises(UserError):
            cluster.fetch(name, tmp_path / to, storage)


def test_the_launcher_s_file_and_the_run_s_folder_are_asked_for_first(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    for file, run, to, code in (
        ("none.yaml", "/shared/runs/intent", "new", "not_found"),
        ("cluster.yaml", "intent", "new", "not_absolute"),
        ("cluster.yaml", "/shared/runs/intent", "to", "already_exists"),
    ):
        (tmp_path / "cluster.yaml").touch()
        with refused_with(code):
            cluster_file.rsync_down(tmp_path / file, run, tmp_path / to)


# ------------------------------------------------------------------------------------------- a head that goes away


class BreaksOff:
    """A job API that closes the connection after a submission, accepted or not."""

    def __init__(self, took: bool, times: int = 1):
        self._took, self._left = took, times
        self.jobs: list[str] = []

    def list_jobs(self) -> list[SimpleNamespace]:
        fields = {"status": "PENDING", "entrypoint": "", "start_time": None, "end_time": None}
        more = {"driver_exit_code": None, "error_type": None}
        return [SimpleNamespace(submission_id=job, **fields, **more) for job in self.jobs]

    def submit_job(self, submission_id: str, **keywords: Any) -> None:
        self._left -= 1
        if self._left < 0 or self._took:
            self.jobs.append(submission_id)
        if self._left >= 0:
            raise requests.exceptions.ConnectionError("Connection aborted.", "Remote end closed connection")


def test_options_without_a_value_are_known() -> None:
    """The word after a missing flag would count as its value, and give the job another name."""
    verbs = getattr(typer.main.get_command(app.app), "commands")  # noqa: B009  # a group's
    of_verbs = [param for verb in verbs.values() for param in verb.params if param.param_type_name == "option"]
    flags, valued_options = (
        {name for of_verb in of_verbs if of_verb.is_flag == is_flag for name in of_verb.opts}
        for is_flag in (True, False)
    )
    assert flags - valued_options == set(job_names.VALUELESS_OPTIONS)


class AcceptingApi(BreaksOff):
    """A job API that another command asks for the same job, a moment before."""

    def submit_job(self, submission_id: str, **keywords: Any) -> None:
        self.jobs.append(submission_id)
        raise RuntimeError(f"Job with submission_id {submission_id} already exists. Please use a different one.")


def test_a_job_that_another_command_has_asked_for_meanwhile_is_there_already(checkout: Path) -> None:
    api, messages = AcceptingApi(took=True), list[str]()
    words = ["train", "intent", "--out", "/x"]
    job = jobs_of(api).submit(words, client.collect_upload(checkout), messages.append)
    assert api.jobs == [job]


@pytest.mark.parametrize("took", [True, False])
def test_a_job_is_asked_for_again_where_the_connection_breaks_off_and_never_twice(took: bool, checkout: Path) -> None:
    api = BreaksOff(took)
    job = jobs_of(api).submit(["train", "intent", "--out", "/x"], client.collect_upload(checkout), print)
    assert api.jobs == [job]


def test_a_head_that_keeps_breaking_off_is_said_in_a_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, words = jobs_of(BreaksOff(took=False, times=9), agent_s=0.0), ["train", "intent", "--out", "/x"]
    with refused_with("unreachable"):
        jobs.submit(words, client.collect_upload(checkout), print)


class Lines:
    """A job API with one job, whose stream of lines breaks off and begins anew, as it does where a proxy ends it."""

    def __init__(self, statuses: list[str], streams: list[list[Any]], error: Exception | None = None):
        self.statuses, self.streams, self.error = statuses, streams, error

    def list_jobs(self) -> list[SimpleNamespace]:
        if not self.statuses and self.error is not None:
            raise self.error
        status = self.statuses.pop(0) if len(self.statuses) > 1 or self.error else self.statuses[0]
        times = {"start_time": 1000, "end_time": None, "driver_exit_code": None, "error_type": None}
        return [SimpleNamespace(submission_id="rtrain-x", status=status, entrypoint="e", **times)]

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for portion in self.streams.pop(0) if self.streams else []:
            if isinstance(portion, Exception):
                raise portion
            if portion is None:
                await asyncio.sleep(3600)
            yield portion

    def get_job_logs(self, job: str) -> str:
        return "one\ntwo\nthree\n"


BREAKS = (RuntimeError("closed"), OSError("reset"), UserError("503"), ClientPayloadError("cut"), TimeoutError(), None)


@pytest.mark.parametrize("cut", BREAKS)
def test_lines_are_shown_once_though_their_stream_ends_or_is_silent(cut: Exception | None) -> None:
    """A head whose machine is gone closes no connection."""
    api = Lines(["RUNNING", "RUNNING", "SUCCEEDED"], [["one\n", "tw", cut], ["one\ntwo\n"], []])
    shown: list[str] = []
    assert jobs_of(api, patience_s=0.05).watch("rtrain-x", shown.append).status == "SUCCEEDED"
    assert shown == ["one\n", "tw", "o\n", "three\n"]


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_proxy_without_its_head_is_no_traceback(status: int) -> None:
    error = RuntimeError(f"Request failed with status code {status}: Bad Gateway.")
    with refused_with("unreachable"):
        jobs_of(Lines([], [], error)).list_jobs()
    with pytest.raises(TemporaryFailureError) as lost:
        jobs_of(Lines(["RUNNING"], [["one\n"]], error), patience_s=0.0).watch("rtrain-x", lambda text: None)
    assert (lost.value.exit_code, lost.value.code) == (75, "head_lost")


def test_a_job_that_its_head_has_forgotten_is_to_be_asked_for_again() -> None:
    with refused_with("head_restarted"):
        jobs_of(Lines(["RUNNING"], [])).wait_for_line("rtrain-y", "two")


def test_a_line_of_a_job_is_awaited_or_its_end_is_told() -> None:
    assert jobs_of(Lines(["RUNNING"], [])).wait_for_line("rtrain-x", "two") == "two"
    with pytest.raises(CommandInterruptedError) as ended:
        jobs_of(Lines(["RUNNING", "FAILED"], [])).wait_for_line("rtrain-x", "four")
    assert ended.value.exit_code == 1


@pytest.mark.parametrize("artifact", ["runs/x", "x"])
def test_an_artefact_that_the_nodes_do_not_see_is_refused(artifact: str) -> None:
    with refused_with("not_absolute"):
        cluster.serve(artifact=artifact)


class NoRay(BaseHTTPRequestHandler):
    """A server that answers every request with its `content`."""

    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[NoRay]) -> Iterator[str]:
    """Address of a server."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_command_shows_the_token_of_the_home_folder_whatever_the_environment_says_of_it(tmp_path: Path) -> None:
    shown: list[str | None] = []

    class Head(NoRay):
        def do_GET(self) -> None:
            shown.append(self.headers.get("authorization"))
            self.send_error(503)

    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0f3c" * 16)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environ["HOME"] = str(tmp_path)
    with serving(Head) as address:
        done = subprocess.run(
            [sys.executable, "-m", "rtrain", "cluster", "status"],
            env={
                **environ,
                "HOME": str(tmp_path),
                "RAY_API_SERVER_ADDRESS": address,
                "PYTHONPATH": f"{ROOT}:{STARTUP}",
            },
            cwd=tmp_path,
            capture_output=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 1
    assert set(shown) == {f"Bearer {'0f3c' * 16}"}


# ------------------------------------------------------------------------------------------------- on a real head


def ask(head: Head, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """`rtrain cluster ...` of a user who has the token, or another one."""
    environ = {**head.environ, "RAY_API_SERVER_ADDRESS": head.api, "PYTHONPATH": f"{ROOT}:{STARTUP}"}
    if token is not None:
        (head.folder / "another").write_text(token)
        environ["RAY_AUTH_TOKEN_PATH"] = str(head.folder / "another")
    return subprocess.run(
        [sys.executable, "-m", "rtrain", "cluster", *words],
        env=environ,
        cwd=head.folder,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


@pytest.fixture(scope="module")
def command(head: Head) -> list[str]:
    """A training of seconds, into a folder that the head sees."""
    data, model = write_rows(head.folder / "rows.csv", labelled_rows(203)), make_encoder(head.folder / "encoder")
    settings = ["train.precision=fp32", "train.epochs=1", "train.workers=1"]
    words = ["train", "intent", "--data", str(data), "--model", str(model), "--json"]
    words += ["--out", str(head.folder / "runs" / "made"), *(w for setting in settings for w in ("--set", setting))]
    return [*words, "--set", f"cluster.storage=file://{head.folder}/storage"]


def job_of(run: Path) -> str:
    return job_names.job_id((), PurePosixPath(run))


def own_lines(done: "subprocess.CompletedProcess[str]") -> str:
    """Output of a followed job, without Ray's first lines."""
    lines = done.stdout.splitlines(keepends=True)
    return "".join(lines[1 + next(n for n, line in enumerate(lines) if line.startswith("Running entrypoint")) :])


@pytest.mark.ray
@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_a_job_is_watched_asked_for_again_and_read_when_the_cluster_is_gone(head: Head, command: list[str]) -> None:
    submit = ("submit", "--folder", str(ROOT), "--max-mb", "20")
    refused = ask(head, *submit, "--", *command, token="0" * 64)
    assert refused.returncode == 1, refused.stderr
    first = ask(head, *submit, "--watch", "--", *command)
    assert first.returncode == 0, first.stdout + first.stderr
    summary = json.loads(next(line for line in first.stdout.splitlines() if line.startswith('{"run"')))
    assert summary["status"] == "finished"
    # Asked for again, the run is resumed: it has ended, and trains nothing anew.
    second = ask(head, *submit, "--watch", "--", *command)
    assert second.returncode == 0, second.stdout + second.stderr
    repeated = json.loads(next(line for line in second.stdout.splitlines() if line.startswith('{"run"')))
    assert (repeated["status"], repeated["steps"]) == ("finished", summary["steps"])
    ids, job = {job["submission_id"]: job["status"] for job in head.jobs()}, job_of(head.folder / "runs" / "made")
    assert ids == {job: "SUCCEEDED", f"{job}-try-2": "SUCCEEDED"}
    output = ask(head, "status")
    assert (output.returncode, output.stdout.count("SUCCEEDED")) == (0, 2), output.stderr
    # Every line of both jobs is beside the run, and in its storage, where no head is asked.
    run_log = ask(head, "logs", str(head.folder / "runs" / "made"))
    assert run_log.returncode == 0, run_log.stderr
    assert own_lines(first) in run_log.stdout
    assert own_lines(second) in run_log.stdout
    saved = subprocess.run(
        [sys.executable, "-m", "rtrain", "cluster", "logs", "made", "--storage", f"file://{head.folder}/storage"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STARTUP}", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"},
        cwd=head.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert saved.stdout == run_log.stdout


@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_a_job_that_is_going_on_is_not_started_twice_and_is_stopped(head: Head, command: list[str]) -> None:
    out = head.folder / "runs" / "long"
    words = [str(out) if word == str(head.folder / "runs" / "made") else word for word in command]
    words += ["--set", "train.epochs=500"]
    submit = ("submit", "--folder", str(ROOT), "--max-mb", "20")
    first = ask(head, *submit, "--", *words)
    assert (first.returncode, first.stdout.strip()) == (0, job_of(out)), first.stderr
    second = ask(head, *submit, "--", *words)
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr
    give_up = time.monotonic() + WITHIN_S
    while not (out / "config.yaml").is_file():
        assert time.monotonic() < give_up, ask(head, "logs", str(out)).stdout
        time.sleep(0.5)
    stopped = ask(head, "stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    while (
        next(job for job in head.jobs() if job["submission_id"] == job_of(out))["status"]
        not in job_names.FINAL_STATUSES
    ):
        assert time.monotonic() < give_up
        time.sleep(0.5)
    script = "import sys; from rtrain.cluster.jobs import client; print(client.JobClient(sys.argv[1]).head_ip())"
    requested = subprocess.run(
        [sys.executable, "-c", script, head.api], env=head.environ, capture_output=True, text=True
    )
    assert ipaddress.ip_address(requested.stdout.strip()), requested.stderr
    assert ask(head, "stop", "long").returncode == 1


class Restarted(BreaksOff):
    """A head that restarted from its Redis: a job stays RUNNING until the head's agent is asked for
    something and finds that its supervisor is gone, or that it has ended by itself."""

    def __init__(self, end: str) -> None:
        super().__init__(took=False)
        self._left, self._end, self.statuses, self.started = 0, end, dict[str, str](), list[str]()

    def list_jobs(self) -> list[SimpleNamespace]:
        fields = {"entrypoint": "", "start_time": None, "end_time": None, "driver_exit_code": None, "error_type": None}
        return [SimpleNamespace(submission_id=job, status=status, **fields) for job, status in self.statuses.items()]

    def delete_job(self, job: str) -> bool:
        del self.statuses[job]
        return True

    def submit_job(self, submission_id: str, **keywords: Any) -> None:
        if submission_id in self.statuses:
            self.statuses[submission_id] = self._end
            raise RuntimeError(f"Job with submission_id {submission_id} already exists. Please use a different one.")
        self.statuses[submission_id] = "PENDING"
        self.started.append(submission_id)


@pytest.mark.parametrize("end", ["FAILED", "SUCCEEDED"])
def test_a_job_that_went_with_its_head_is_started_again(
    end: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the old one stays, also where it ended a moment before."""
    words = ["train", "intent", "--out", "/x"]
    base, api = identify(words), Restarted(end)
    api.statuses = {base: "RUNNING"}
    assert jobs_of(api).submit(words, client.collect_upload(checkout), print) == f"{base}-try-2"
    assert (api.statuses[base], api.started) == (end, [f"{base}-try-2"])


class Forwarded(NoRay):
    """The API of a head, with one job going on."""

    def do_GET(self) -> None:
        job = {"type": "SUBMISSION", "submission_id": "rtrain-a", "entrypoint": "python", "status": "RUNNING"}
        raylet = {"isHeadNode": True, "state": "ALIVE", "nodeManagerAddress": "10.0.0.7"}
        answers: dict[str, object] = {
            "/api/version": {"ray_version": "2.60.0", "version": "4", "session_name": "s", "ray_commit": "c"},
            "/api/jobs/": [job],
            "/nodes?view=summary": {"data": {"summary": [{"raylet": {"state": "ALIVE"}}, {"raylet": raylet}]}},
        }
        self.content = json.dumps(answers[self.path]).encode()
        super().do_GET()


@pytest.mark.parametrize(("file_head_ip", "is_refused"), [("10.0.0.7", True), ("10.0.0.8", False), (None, True)])
def test_a_cluster_is_not_kept_up_by_the_jobs_of_another_one(
    file_head_ip: str | None, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port that is forwarded may lead to any head; the launcher asks before it ends the file's own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(cluster_file, "find_head_ip", lambda file: file_head_ip)
    ended = list[Path]()
    monkeypatch.setattr(cluster_file, "tear_down", lambda file, yes: ended.append(file))
    expected = refused_with("still_running") if is_refused else nullcontext()
    with serving(Forwarded) as address, expected:
        cluster.down(tmp_path / "cluster.yaml", address=address)
    assert bool(ended) != is_refused


@pytest.mark.parametrize("content", [b"<html>", b"null", b'{"status": "ok"}', b'{"ray_version": "2.60.0"}'])
def test_an_address_that_is_no_ray_is_said_in_a_line(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with serving(type("Answers", (NoRay,), {"content": content})) as address, refused_with("not_ray"):
        client.JobClient(address).list_jobs()


def test_no_head_is_an_error_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for address, code in (("http://127.0.0.1:1", "unreachable"), ("127.0.0.1:8265", "invalid_address")):
        with refused_with(code):
            client.JobClient(address).list_jobs()
