"""Runs copied to an object store, over HTTP to a real S3 server, and to a mounted folder: nothing torn comes back."""

import multiprocessing
import os
import shutil
import signal
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from rtrain.checkpoint import remote_copy
from rtrain.checkpoint.format import (
    CHECKPOINT_FILES,
    WrongRunError,
    checkpoint_path,
    find_problem,
    list_steps,
    parse_step,
    read_state,
)
from rtrain.checkpoint.remote_copy import RemoteCopy, RunTakenOverError, StorageUnreachableError
from rtrain.config import ClusterConfig
from rtrain.core import events, manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.runs import controller
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import Ran, start, update_name, weights_digest

ground, straight = test_trainer.ground, test_trainer.straight  # fixtures

BUCKET = "s3://runs"
EVERY: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 2, "log_every": 1}


def served(port: int = 0) -> Any:
    """An S3 server on this machine; what it holds outlives it in this process."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    return server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of an empty bucket of a server on this machine."""
    server = served()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        # What another module put is kept by the process, at whatever port; and fsspec keeps who asked the old port.
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
        type(fsspec.filesystem("s3")).clear_instance_cache()
        fsspec.filesystem("s3").mkdir("runs")
        yield BUCKET
    server.stop()


@pytest.fixture(params=["s3", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "mounted").as_uri()
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def claimed(storage: str, name: str = "run") -> RemoteCopy:
    copy = RemoteCopy(storage, name, [uuid.uuid4().hex])
    copy.claim_ownership()
    return copy


def failing(*_: Any, **__: Any) -> Any:
    raise OSError(5, "Input/output error")


def objects(storage: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(f"{storage}/run")
    files.invalidate_cache()
    return sorted(path.removeprefix(root).lstrip("/") for path in files.find(root))


def checkpoint_objects(*updates: int) -> list[str]:
    return [f"checkpoints/step-{u:08d}/{name}" for u in updates for name in (manifest.FILE_NAME, *CHECKPOINT_FILES)]


def test_a_run_whose_folder_is_lost_goes_on_from_its_copy_bit_for_bit(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, storage: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: intent\n")
    start(ground, run, kill=4, replica=claimed(storage), **EVERY)
    assert objects(storage) == [*checkpoint_objects(3, 4), "config.yaml", "owner"]
    shutil.rmtree(run)
    copy = claimed(storage)
    copy.restore(run)
    assert (run / "config.yaml").read_text() == "name: intent\n"
    resumed = start(ground, run, replica=copy, **EVERY)
    assert resumed.recorder.of("started")[0]["step"] == 4
    assert weights_digest(resumed.network) == weights_digest(straight[0].network)
    assert resumed.outcome == straight[0].outcome


def test_what_is_newer_here_is_not_fetched(ground: Path, tmp_path: Path, storage: str) -> None:
    start(ground, tmp_path / "run", kill=2, replica=claimed(storage), **EVERY)
    start(ground, tmp_path / "run", kill=4, **EVERY)  # the copies stay behind
    assert RemoteCopy(storage, "run").list_checkpoints() == [*map(update_name, (1, 2))]
    resumed = start(ground, tmp_path / "run", kill=5, replica=claimed(storage), **EVERY)
    assert resumed.recorder.of("started")[0]["step"] == 4
    assert RemoteCopy(storage, "run").list_checkpoints() == [*map(update_name, (3, 4, 5))]  # 3 is the best


def test_the_best_checkpoint_comes_back_with_the_newest(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    test_trainer.scripted(monkeypatch, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1)
    every = {**EVERY, "evaluate_every": 1, "keep_checkpoints": 1}
    start(ground, tmp_path / "run", kill=4, replica=claimed(storage), **every)
    shutil.rmtree(tmp_path / "run")
    test_trainer.scripted(monkeypatch, 0.2, 0.1)
    resumed = start(ground, tmp_path / "run", replica=claimed(storage), **every)
    assert resumed.outcome is not None
    assert resumed.outcome.best_step == 1
    assert not resumed.recorder.of("best_lost")


def test_a_copy_that_was_changed_is_set_aside_and_an_older_one_taken(
    ground: Path, tmp_path: Path, storage: str
) -> None:
    start(ground, tmp_path / "run", kill=4, replica=claimed(storage), **EVERY)
    shutil.rmtree(tmp_path / "run")
    files, root = fsspec.core.url_to_fs(f"{storage}/run/checkpoints/step-00000004/optim.safetensors")
    data = bytearray(files.cat_file(root))
    data[len(data) // 2] ^= 1
    files.pipe_file(root, bytes(data))
    resumed = start(ground, tmp_path / "run", kill=5, replica=claimed(storage), **EVERY)
    assert resumed.recorder.of("started")[0]["step"] == 3
    told = [event["reason"] for event in resumed.recorder.of("quarantined")]
    assert told == ["optim.safetensors does not match its SHA-256"] * 2  # it was fetched twice
    assert RemoteCopy(storage, "run").list_checkpoints() == [*map(update_name, (3, 4, 5))]  # 4 is the new one
    fetched = tmp_path / "again" / "step-00000004"
    RemoteCopy(storage, "run").pull(fetched)
    assert manifest.find_damage(fetched, CHECKPOINT_FILES) is None


@pytest.mark.parametrize("fault", ["a read error", "another run"])
def test_nothing_is_lost_in_the_storage_where_a_copy_cannot_be_judged(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    url = (tmp_path / "mounted").as_uri()
    copy = claimed(url)
    start(ground, tmp_path / "run", kill=4, replica=copy, **EVERY)
    before = objects(url)
    shutil.rmtree(tmp_path / "run")

    if fault == "a read error":
        monkeypatch.setattr(manifest, "_sha256", failing)
    error, rows = {
        "a read error": (manifest.UnreadableFileError, {}),
        "another run": (WrongRunError, {"global_batch_size": 20}),
    }[fault]
    with pytest.raises(error):
        start(ground, tmp_path / "run", replica=copy, **{**EVERY, **rows})
    monkeypatch.undo()
    assert objects(url) == before
    resumed = start(ground, tmp_path / "run", kill=4, replica=copy, **EVERY)
    assert resumed.recorder.of("started")[0]["step"] == 4


def test_a_start_that_was_taken_over_ends_and_spoils_nothing(ground: Path, tmp_path: Path, storage: str) -> None:
    first = claimed(storage)
    start(ground, tmp_path / "run", kill=2, replica=first, **EVERY)
    second = claimed(storage)
    with pytest.raises(RunTakenOverError):
        start(ground, tmp_path / "run", replica=first, **EVERY)
    assert second.list_checkpoints() == [*map(update_name, (1, 2))]


def test_storage_that_fails_for_a_while_costs_no_training(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = (tmp_path / "mounted").as_uri()
    copy, calls, whole = claimed(storage), [0], LocalFileSystem.put_file

    def failing_for_a_while(*rest: Any, **options: Any) -> None:
        calls[0] += 1
        # In the middle of the second copy and of the third.
        (failing if 6 <= calls[0] <= 9 else whole)(*rest, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", failing_for_a_while)
    ran = start(ground, tmp_path / "run", replica=copy, **EVERY)
    assert ran.outcome is not None
    told = ran.recorder.of("remote_copy_incomplete")
    assert len(told) >= 2
    assert all(
        "cluster.storage: file://" in event["error"] and "Input/output error" in event["error"] for event in told
    )
    kept = list_steps(tmp_path / "run" / "checkpoints")
    assert copy.list_checkpoints() == [*map(update_name, kept)]  # the later saves made up for it


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_run_has_its_whole_log_and_what_is_whole_of_its_checkpoints(tmp_path: Path, storage: str) -> None:
    run, to = tmp_path / "there" / "run", tmp_path / "to"
    for place in ("checkpoints/step-00000001", "checkpoints/step-00000002", "artifact/1_Pooling"):
        (run / place).mkdir(parents=True)
        (run / place / "state.json").write_text(place)
    manifest.write_manifest(run / "checkpoints" / "step-00000001")
    (run / "config.yaml").write_text("name: intent\n")
    copy = claimed(storage)
    for kind in ("created", "started", "finished"):
        events.append_event(run, kind)
        copy.push(run, sorted((run / "checkpoints").iterdir()))
    copy.push_artifact(run)
    size = RemoteCopy(storage, "run").fetch_run(to)
    shutil.rmtree(run / "checkpoints" / "step-00000002")  # of a copy that was cut short there is no manifest
    assert files_of(to) == files_of(run)
    assert size == sum(map(len, files_of(to).values()))
    with pytest.raises(UserError, check=lambda error: error.code == "already_exists"):
        copy.fetch_run(to)


def test_a_fetch_that_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, copy = tmp_path / "there" / "run", claimed((tmp_path / "mounted").as_uri())
    run.mkdir(parents=True)
    for name in remote_copy.RUN_FILES:
        (run / name).touch()
    copy.push(run, [])

    monkeypatch.setattr(LocalFileSystem, "get_file", failing)
    with pytest.raises(StorageUnreachableError):
        copy.fetch_run(tmp_path / "runs" / "to")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("name", ["../../../victim/authorized_keys", "artifact/../../../../victim", "artifact//x"])
def test_a_name_that_leads_out_of_the_run_is_not_written(tmp_path: Path, name: str) -> None:
    from fsspec.implementations.memory import MemoryFile

    memory, bucket = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    memory.pipe_file(f"{bucket}/run/config.yaml", b"x")
    memory.store[f"{bucket}/run/{name}"] = MemoryFile(memory, f"{bucket}/run/{name}", b"ssh-rsa")
    with pytest.raises(UserError, check=lambda error: error.code == "unsafe_path"):
        RemoteCopy(f"memory:/{bucket}", "run").fetch_run(tmp_path / "home" / "me" / "runs" / "run")
    assert not files_of(tmp_path)


RUNG = f"{remote_copy.RUNGS_FOLDER}/step-00000004.safetensors"


@pytest.mark.parametrize("error", [OSError("connection reset"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", [*remote_copy.RUN_FILES, *remote_copy.LOG_FILES, *remote_copy.PREDICTION_FILES, RUNG])
def test_a_run_that_came_back_in_part_is_brought_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    run, copy = tmp_path / "there" / "run", claimed((tmp_path / "mounted").as_uri())
    (run / remote_copy.RUNGS_FOLDER).mkdir(parents=True)
    for one in (*remote_copy.RUN_FILES, *remote_copy.LOG_FILES, *remote_copy.PREDICTION_FILES, RUNG):
        (run / one).write_text(f"{one}\n")
    (run / "artifact").mkdir()
    (run / "artifact" / "MANIFEST.json").write_text("{}")
    copy.push(run, [])
    copy.push_artifact(run)
    back = tmp_path / "back" / "run"

    def failing_at(files: LocalFileSystem, path: str, *rest: Any, **options: Any) -> Any:
        if path.endswith(name):
            raise error
        return whole(files, path, *rest, **options)

    call = "cat_file" if name in remote_copy.LOG_FILES else "get_file"  # logs are read in pieces
    whole = getattr(LocalFileSystem, call)
    monkeypatch.setattr(LocalFileSystem, call, failing_at)
    with pytest.raises((StorageUnreachableError, KeyboardInterrupt)):
        copy.restore(back)
    monkeypatch.undo()
    assert not Run(back).exists
    assert list(back.parent.iterdir()) == []
    for _ in range(2):  # the second time as after a kill between the artefact and the configuration
        copy.restore(back)
        assert files_of(back) == files_of(run)
        (back / "config.yaml").unlink()


@pytest.mark.parametrize("storage", ["s3://no-such-bucket-here/x", "nowhere://bucket", "file:///proc/rtrain"])
@pytest.mark.usefixtures("s3")
def test_storage_that_does_not_work_is_refused_at_once(storage: str, tmp_path: Path) -> None:
    with pytest.raises(StorageUnreachableError):
        RemoteCopy(storage, "run").pull(tmp_path / "one") if "no-such" in storage else claimed(storage)


def test_a_run_is_restarted_while_its_storage_is_away_and_copied_once_it_is_back(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, s3: str
) -> None:
    """A server of its own, stopped at a restart and started again: what is here suffices, and nothing is lost."""
    server = served()
    host, port = server.get_host_and_port()
    storage, run, owners = f"s3://runs/{tmp_path.name}", tmp_path / "run", ["first", "second"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.filesystem("s3").clear_instance_cache()
        first = RemoteCopy(storage, "run", owners[:1])
        first.claim_ownership()
        start(ground, run, kill=4, replica=first, **EVERY)
        server.stop()
        second = RemoteCopy(storage, "run", owners)
        with pytest.raises(StorageUnreachableError):
            second.claim_ownership()
        away = start(ground, run, kill=5, replica=second, **EVERY)
        assert [(event["step"], s3 in event["error"]) for event in away.recorder.of("storage_unreachable")] == [
            (4, True)
        ]
        assert away.recorder.of("started")[0]["step"] == 4
        assert len(away.recorder.of("remote_copy_incomplete")) == 1
        with pytest.raises(StorageUnreachableError):  # a run whose folder is lost has nothing else to go on from
            start(ground, tmp_path / "lost" / "run", replica=RemoteCopy(storage, "run", owners), **EVERY)
        server = served(port)
        again = start(ground, run, replica=RemoteCopy(storage, "run", owners), **EVERY)
        assert not again.recorder.of("storage_unreachable")
        assert RemoteCopy(storage, "run").list_checkpoints() == [*map(update_name, list_steps(run / "checkpoints"))]
        with pytest.raises(RunTakenOverError):  # the claim that failed was made up for
            first.push(run, [])
        server.stop()
        fsspec.filesystem("s3").clear_instance_cache()
    assert weights_digest(again.network) == weights_digest(straight[0].network)
    assert again.outcome == straight[0].outcome


def test_a_restart_with_its_best_checkpoint_in_the_storage_alone_does_not_go_on_without(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save would leave the storage without it too."""
    test_trainer.scripted(monkeypatch, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1)
    copy = claimed((tmp_path / "mounted").as_uri())
    start(ground, tmp_path / "run", kill=4, replica=copy, **{**EVERY, "evaluate_every": 1, "keep_checkpoints": 1})
    shutil.rmtree(checkpoint_path(tmp_path / "run" / "checkpoints", 1))

    monkeypatch.setattr(LocalFileSystem, "find", failing)
    with pytest.raises(StorageUnreachableError):
        start(ground, tmp_path / "run", replica=copy, **{**EVERY, "evaluate_every": 1, "keep_checkpoints": 1})


# ------------------------------------------------------------------------------------------------------------- the log


def test_a_log_is_copied_by_what_is_new_and_comes_back_byte_for_byte(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sent = tmp_path / "run", [0]
    run.mkdir()
    copy = claimed(storage)
    files = fsspec.core.url_to_fs(storage)[0]
    whole = files.pipe_file

    def counted(path: str, value: bytes, *rest: Any, **options: Any) -> Any:
        sent[0] += len(value)
        return whole(path, value, *rest, **options)

    monkeypatch.setattr(files, "pipe_file", counted)
    log = run / "events.jsonl"
    for number in range(40):
        events.append_event(run, "progress", step=number, text="größe " * 20)
        if number % 2:
            copy.push(run, [])
        if number == 20:  # another start of the same folder: whole once, and none of the parts that there were
            before, copy = sent[0], RemoteCopy(storage, "run", copy.owner_tokens)
            assert before == log.stat().st_size - len(log.read_bytes().splitlines(keepends=True)[-1])
    assert sent[0] <= log.stat().st_size * 1.6
    assert len([name for name in objects(storage) if name.startswith("events/")]) == 9
    RemoteCopy(storage, "run").restore(tmp_path / "back")
    assert (tmp_path / "back" / "events.jsonl").read_bytes() == log.read_bytes()
    other = RemoteCopy(storage, "run", copy.owner_tokens)  # where nothing is new, nothing but the log at its first copy
    other.push(run, [])
    sent[0] = 0
    other.push(run, [])
    assert sent[0] == 0


@pytest.mark.parametrize("name", ["exp[1]", "exp?", "ex*"])
def test_a_run_whose_name_is_a_pattern_is_copied_and_comes_back_and_other_runs_are_left_alone(
    tmp_path: Path, storage: str, name: str
) -> None:
    """To fsspec these stand for `exp1` too."""
    other, run = tmp_path / "exp1", tmp_path / name
    for folder in (other, run):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
    neighbour, copy = (claimed(storage, folder.name) for folder in (other, run))
    neighbour.push(other, [small(other, 1)])
    for update in (1, 2, 3):
        events.append_event(run, "progress", step=update)
        copy.push(run, [small(run, update)])
    assert neighbour.list_checkpoints() == ["step-00000001"]
    assert copy.list_checkpoints() == ["step-00000003"]
    back = tmp_path / "back" / name
    RemoteCopy(storage, name).restore(back)
    assert (back / events.FILE_NAME).read_bytes() == (run / events.FILE_NAME).read_bytes()
    again = RemoteCopy(storage, name, copy.owner_tokens)  # of another start: the log is whole once more
    again.push(run, [small(run, 3)])
    RemoteCopy(storage, name).restore(tmp_path / "again")
    assert (tmp_path / "again" / events.FILE_NAME).read_bytes() == (run / events.FILE_NAME).read_bytes()


def small(run: Path, update: int) -> Path:
    """A complete checkpoint of next to nothing."""
    folder = checkpoint_path(run / "checkpoints", update)
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text("{}")
    manifest.write_manifest(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------- kills


def _push_and_die(run: Path, storage: str, at: int) -> None:
    """In a child: dies by SIGKILL before the write number `at` to the storage."""
    calls = [0]

    def dying(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(files: LocalFileSystem, *rest: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(files, *rest, **options)

        return call

    for name in ("put_file", "rm_file", "rm"):
        setattr(LocalFileSystem, name, dying(getattr(LocalFileSystem, name)))
    copy = claimed(storage)
    folder = run / "checkpoints"
    copy.push(run, [checkpoint_path(folder, update) for update in list_steps(folder)])


def test_a_copy_killed_at_every_write_never_brings_back_anything_torn(ground: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    storage = (tmp_path / "mounted").as_uri()
    start(ground, run, kill=2, replica=claimed(storage), **EVERY)  # 1 and 2 are there, 3 and 4 are to replace them
    before = shutil.copytree(tmp_path / "mounted", tmp_path / "before")
    start(ground, run, kill=4, **EVERY)
    identity = read_state(checkpoint_path(run / "checkpoints", 4)).run_id
    context, found = multiprocessing.get_context("fork"), []
    for at in range(1, 100):
        shutil.rmtree(tmp_path / "mounted")
        shutil.copytree(before, tmp_path / "mounted")
        child = context.Process(target=_push_and_die, args=(run, storage, at))
        child.start()
        child.join()
        names = RemoteCopy(storage, "run").list_checkpoints()
        for name in names:
            back = tmp_path / f"back-{at}" / name
            RemoteCopy(storage, "run").pull(back)
            update = parse_step(name)
            assert update is not None
            assert find_problem(back, update, identity) is None, (at, name)
        assert names, at
        found.append(tuple(int(name[-1]) for name in names))
        copy, folder = claimed(storage), run / "checkpoints"
        copy.push(run, [checkpoint_path(folder, update) for update in list_steps(folder)])
        assert objects(storage) == [*checkpoint_objects(3, 4), "owner"], at  # nothing is left of the killed copy
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert len(found) >= 12
    assert (found[0], found[-1]) == ((1, 2), (3, 4))
    assert {max(names) for names in found} == {2, 3, 4}


# -------------------------------------------------------------------------------------------------------- configuration


def test_another_run_s_copy_is_neither_overwritten_nor_taken(tmp_path: Path) -> None:
    """A run of the same name, resumed with that storage named."""
    storage = f"file://{tmp_path}/storage"

    def run_of(folder: str, **created: str) -> Run:
        made = Run(tmp_path / folder / "intent")
        made.folder.mkdir(parents=True)
        made.config.write_text("name: intent\n")
        made.append_event("created", run="intent", **created)
        return made

    theirs, mine = (
        run_of("theirs", recipe_digest="1", data_digest="a"),
        run_of("mine", recipe_digest="2", data_digest="a"),
    )
    RemoteCopy(storage, "intent", ["theirs"]).claim_ownership()
    RemoteCopy(storage, "intent", ["theirs"]).push(theirs.folder, [])
    with pytest.raises(UserError, check=lambda error: error.code == "other_run"):
        RemoteCopy(storage, "intent", ["mine"]).refuse_other_run(mine.folder)
    RemoteCopy(storage, "intent", ["theirs", "again"]).refuse_other_run(theirs.folder)
    same = run_of("restored", recipe_digest="1", data_digest="a")
    RemoteCopy(storage, "intent", ["restored"]).refuse_other_run(same.folder)
    RemoteCopy(storage, "another", ["mine"]).refuse_other_run(mine.folder)
    cluster = ClusterConfig(storage=storage)
    with pytest.raises(UserError, check=lambda error: error.code == "other_run"):
        controller.claim_storage(mine, cluster)
    (mine.artifact).mkdir()
    with pytest.raises(UserError, check=lambda error: error.code == "other_run"):
        controller.complete_remote_copy(mine, cluster)
    assert (tmp_path / "storage" / "intent" / "owner").read_text() == "theirs"
