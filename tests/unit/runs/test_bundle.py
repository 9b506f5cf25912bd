"""Export and import of a run: its files, atomic unpacking, and hostile bundles."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rtrain.core import manifest
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import html, summary
from rtrain.runs import run_folders
from rtrain.runs.store import bundle
from tests.conftest import labelled_rows, write_rows
from tests.support import stock
from tests.support.reports import answers_of, make_run, page_of, write_predictions
from tests.support.root import ROOT
from tests.support.tiny import make_artifact
from tests.unit.cli import test_cli

run = test_cli.run  # a fixture: the command line, in an empty folder
Cli = test_cli.Cli


# ------------------------------------------------------------------------------------------------------ there and back


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that answers, with its report."""
    root = tmp_path_factory.mktemp("whole")
    folder = make_run(root)
    write_predictions(folder, *answers_of(("login", "parcel", "refund"), 30, 0.8))
    make_artifact(folder / "artifact", ("login", "parcel", "refund"))
    summary.write_summary(Run(folder))
    stock.checkpoint(Run(folder), 20)
    html.make_report(Run(folder))
    return root


def test_a_run_goes_to_another_folder_and_answers_and_reports_there(full: Path, tmp_path: Path, run: Cli) -> None:
    answer = run("predict", full / "run", "where is my parcel?")[1]
    code, out, err = run("export", full / "run", "--out", "a.tar")
    assert code == 0, err
    store = (full / ".tokens").rename(full / "away")  # this machine becomes another one
    try:
        code, out, err = run("import", "a.tar", "--json")
        assert code == 0, err
        came = Run(tmp_path / "runs" / "run")
        assert run("predict", "runs/run", "where is my parcel?")[1] == answer
        assert run("report", "runs/run")[0] == 0
        assert page_of(came.folder).text
        code, out, _ = run("runs", "--json")
        [messages] = json.loads(out)["runs"]
        assert (messages["status"], messages["score"]["name"]) == ("finished", "accuracy")
        assert not came.checkpoints.exists()
        assert summary.summarize(came) == summary.summarize(Run(full / "run"))
    finally:
        store.rename(full / ".tokens")


def test_texts_of_rows_are_told_and_left_out_where_that_is_asked_for(full: Path, run: Cli) -> None:
    text = page_texts(full / "run")
    code, out, err = run("export", full / "run", "--out", "all.tar", "--json")
    assert code == 0, err
    messages = json.loads(out)["with_texts"]
    assert {"predictions-test.parquet", "report.html"} <= set(messages)
    assert (
        {"run/predictions-test.parquet"} <= set(holding(Path("all.tar"), text)) <= {f"run/{name}" for name in messages}
    )
    code, out, err = run("export", full / "run", "--out", "none.tar", "--no-texts", "--json")
    assert (code, json.loads(out)["with_texts"]) == (0, []), err
    assert holding(Path("none.tar"), text) == []
    assert run("import", "none.tar")[0] == 0
    assert run("report", "runs/run")[0] == 0


def page_texts(folder: Path) -> list[str]:
    """Texts of the run's test rows."""
    every: list[str] = pyarrow.parquet.read_table(Run(folder).predictions("test"), columns=["text"])["text"].to_pylist()
    return every


def holding(file: Path, texts: list[str]) -> list[str]:
    """Members of a parcel that hold a text."""
    result = []
    with tarfile.open(file) as tar:
        for member in tar.getmembers():
            used_names = tar.extractfile(member)
            assert used_names is not None
            content = used_names.read()
            if member.name.endswith(".parquet"):
                content = str(pyarrow.parquet.read_table(io.BytesIO(content)).to_pydict()).encode()
            if any(text.encode() in content for text in texts):
                result.append(member.name)
    return result


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    item = stock.make(tmp_path / "a")
    (item.folder / "artifact" / "naïve.txt").write_text("x")
    first = bundle.export_bundle(item, "a", tmp_path / "1.tar").file.read_bytes()
    shutil.copytree(item.folder, tmp_path / "copy" / "a")
    stock.age(tmp_path / "copy" / "a")
    os.chmod(tmp_path / "copy" / "a" / "config.yaml", 0o600)
    second = bundle.export_bundle(Run(tmp_path / "copy" / "a"), "a", tmp_path / "2.tar").file.read_bytes()
    assert first == second


def test_what_is_not_a_run_s_own_stays_behind_and_is_named(tmp_path: Path) -> None:
    item = stock.make(tmp_path / "a")
    stock.artifact(item.int8_artifact, "int8")
    (item.folder / "notes").mkdir()
    (item.folder / "notes" / "x.md").write_text("mine")
    (item.artifact / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (item.artifact / "model.int8.bin").write_bytes(b"graph")
    (item.folder / "report.html").symlink_to("/etc/hostname")
    with run_folders.lock(item):
        pass
    sent = bundle.export_bundle(item, "a", tmp_path / "a.tar")
    assert sent.left_out == ("artifact/pytorch_model.bin", "notes", "report.html")
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = tar.getnames()
        assert {(member.mtime, member.uid, member.uname, member.mode) for member in tar} == {(0, 0, "", 0o644)}
    assert names == [
        *("MANIFEST.json", "run/artifact-int8/MANIFEST.json", "run/artifact-int8/artifact.json"),
        *("run/artifact-int8/model.safetensors", "run/artifact/MANIFEST.json"),
        *("run/artifact/artifact.json", "run/artifact/model.int8.bin", "run/artifact/model.safetensors"),
        *("run/config.yaml", "run/decisions.json", "run/events.jsonl"),
    ]
    single = bundle.export_bundle(item, "a", tmp_path / "int8.tar", int8=True)
    assert single.num_files == 6


def test_a_refused_artefact_is_carried_where_that_is_asked_for_alone(run: Cli, tmp_path: Path) -> None:
    item = stock.make(tmp_path / "a")
    gate = {"version": "int8", "verdict": "refuse", "reasons": ["accuracy 0.7 against 0.9"]}
    stock.artifact(item.int8_artifact, "int8", gate=gate)
    assert (run("export", "a", "--out", "a.tar")[0], (tmp_path / "a.tar").exists()) == (1, False)
    with pytest.raises(UserError) as result:
        bundle.require_accepted(bundle.load_verdicts(item))
    assert result.value.code == "refused_by_gate"
    code, out, _ = run("export", "a", "--out", "a.tar", "--ungated", "--json")
    assert code == 0
    assert json.loads(out)["gate"] == {"artifact": None, "artifact-int8": "refuse"}
    assert run("import", "a.tar", "--out", "there")[0] == 0
    assert json.loads((tmp_path / "there" / "artifact-int8" / "artifact.json").read_text())["gate"] == gate


def test_a_search_sends_its_winner_under_its_own_name(run: Cli, tmp_path: Path) -> None:
    stock.search(tmp_path / "runs" / "s")
    assert run("export", "runs/s", "--out", "s.tar")[0] == 0
    assert run("import", "s.tar", "--out", "there/won")[0] == 0
    assert Run(tmp_path / "there" / "won").is_finished


def test_names_in_use_and_runs_without_artefact_are_refused(run: Cli, tmp_path: Path) -> None:
    item, unfinished = stock.make(tmp_path / "runs" / "a"), stock.make(tmp_path / "runs" / "open", ended=None)
    (tmp_path / "used").touch()
    for arguments, out, int8, code in (
        (unfinished, "o.tar", False, "no_artifact"),
        (item, "a.tar", True, "no_artifact"),
        (item, "none/a.tar", False, "not_found"),
        (item, "used", False, "already_exists"),
    ):
        with pytest.raises(UserError) as refused:
            bundle.check_export(arguments, tmp_path / out, int8)
        assert refused.value.code == code
    bundle.export_bundle(item, "a", tmp_path / "a.tar")
    for name, code in (("nowhere.tar", "not_found"), ("runs", "unreadable"), ("a.tar", "already_exists")):
        with pytest.raises(UserError) as refused:
            bundle.import_bundle(tmp_path / name, None, tmp_path / "runs")
        assert refused.value.code == code
    for words in (("export", "runs/open", "--out", "o.tar"), ("export", "nowhere", "--out", "a.tar"), ("import", "no")):
        code_, _, err = run(*words)
        assert (code_, "Traceback" in err) == (1, False)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_resume_of_a_run_that_came_without_checkpoints_is_refused(tmp_path: Path) -> None:
    item = stock.make(tmp_path / "a")
    stock.artifact(item.int8_artifact, "int8")
    bundle.export_bundle(item, "a", tmp_path / "a.tar", int8=True)
    came = bundle.import_bundle(tmp_path / "a.tar", tmp_path / "b", tmp_path).run
    with pytest.raises(UserError):
        run_folders.choose_folder(came.folder, run_folders.load_config(came.folder), "resume")


# -------------------------------------------------------------------------------------------------------- hostile files

Files = dict[str, bytes]
RUN: Files = {"run/config.yaml": b"name: intent\n", "run/events.jsonl": b"{}\n"}


def hostile(
    path: Path, recorded: Files, members: Callable[[tarfile.TarFile], None] = lambda tar: None, **change: Any
) -> Path:
    """A parcel with these files, all rightly recorded, and whatever `members` adds."""
    entries = {name: manifest.entry_from_bytes(data) for name, data in recorded.items()}
    document = {"schema_version": 1, "run": "a", "rtrain": "0", "files": entries, **change}
    with tarfile.open(path, "w") as tar:
        for name, data in {manifest.FILE_NAME: json.dumps(document).encode(), **recorded}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        members(tar)
    return path


def special(name: str, kind: bytes, target: str = "") -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member)

    return add


def nothing_came(root: Path, file: Path, code: str = "invalid_bundle") -> None:
    before = stock.names(root)
    with pytest.raises(bundle.InvalidBundle) as refused:
        bundle.import_bundle(file, None, root / "runs")
    assert refused.value.code == code
    assert stock.names(root) == before
    assert not list(root.glob("runs/*")) + list(root.glob("runs/.*"))


def test_a_right_parcel_is_received(tmp_path: Path) -> None:
    """So that the refusals below are not of something else."""
    assert bundle.import_bundle(hostile(tmp_path / "a.tar", RUN), None, tmp_path / "runs").run.exists


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "../outside.json", "run/../../outside.json", "run/./x.json", "run//x.json", "run"),
        *("elsewhere/x.json", "x.json", "run/..\\x.json", "run/a\nb.json", "run/.", "", "MANIFEST.json"),
        *("run/artifact/pytorch_model.bin", "run/state.pkl", "run/hook.py", "run/noname"),
        *("wheels/x.sh", "wheels/deep/x.whl", "wheels/../run/x.json"),
    ],
)
def test_a_path_that_leads_elsewhere_or_a_kind_that_no_run_holds_is_refused(tmp_path: Path, name: str) -> None:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))

    recorded = {path: manifest.entry_from_bytes(data) for path, data in {**RUN, name: b"x"}.items()}
    nothing_came(tmp_path, hostile(tmp_path / "a.tar", RUN, add, files=recorded))


@pytest.mark.parametrize(
    "members",
    [
        special("run/link.json", tarfile.SYMTYPE, "/etc/passwd"),
        special("run/hard.json", tarfile.LNKTYPE, "run/config.yaml"),
        special("run/pipe.json", tarfile.FIFOTYPE),
        special("run/device.json", tarfile.CHRTYPE),
        special("run/block.json", tarfile.BLKTYPE),
        special("run/folder", tarfile.DIRTYPE),
        special("run/sparse.json", tarfile.GNUTYPE_SPARSE),
    ],
)
def test_links_devices_and_folders_are_refused(tmp_path: Path, members: Callable[[tarfile.TarFile], None]) -> None:
    nothing_came(tmp_path, hostile(tmp_path / "a.tar", RUN, members))


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/tmp/x", ".hidden", "-rf", "a\nb", 5, None, ["a"]])
def test_a_name_that_no_run_can_have_is_refused(tmp_path: Path, name: object) -> None:
    nothing_came(tmp_path, hostile(tmp_path / "a.tar", RUN, run=name))


def test_what_is_not_recorded_or_comes_twice_or_lacks_is_refused(tmp_path: Path) -> None:
    def duplicate(name: str) -> Callable[[tarfile.TarFile], None]:
        return lambda tar: tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))

    nothing_came(tmp_path, hostile(tmp_path / "1.tar", RUN, duplicate("run/more.json")))
    nothing_came(tmp_path, hostile(tmp_path / "2.tar", RUN, duplicate("run/config.yaml")))
    lacking = {"run/lost.json": {"size": 1, "sha256": "0"}}
    nothing_came(tmp_path, hostile(tmp_path / "3.tar", RUN, files=lacking))
    short = hostile(tmp_path / "4.tar", {"run/config.yaml": b""}, files={"run/config.yaml": {}, **lacking})
    nothing_came(tmp_path, short)
    nothing_came(tmp_path, hostile(tmp_path / "5.tar", {"run/events.jsonl": b""}))
    nothing_came(tmp_path, hostile(tmp_path / "6.tar", RUN, schema_version=2), "other_version")
    nothing_came(tmp_path, hostile(tmp_path / "7.tar", RUN, files=dict.fromkeys(RUN, 5)))
    clash = {**RUN, "run/a.json": b"", "run/a.json/b.json": b""}
    with pytest.raises(UserError) as refused:
        bundle.import_bundle(hostile(tmp_path / "8.tar", clash), None, tmp_path / "runs")
    assert refused.value.code == "unreadable"
    assert list((tmp_path / "runs").iterdir()) == []


def test_every_changed_byte_of_a_file_and_every_cut_is_seen(tmp_path: Path) -> None:
    sent = bundle.export_bundle(stock.make(tmp_path / "a", updates=()), "a", tmp_path / "a.tar").file.read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        inside = [(member.offset_data, member.size) for member in tar if member.size]
    (tmp_path / "a.tar").unlink()
    shutil.rmtree(tmp_path / "a")
    bad = tmp_path / "bad.tar"
    for start, size in inside:
        changed = bytearray(sent)
        changed[start + size // 2] ^= 1
        bad.write_bytes(changed)
        nothing_came(tmp_path, bad)
    for length in (0, 1, 511, 512, 3000, len(sent) // 2, inside[-1][0] + 1):
        bad.write_bytes(sent[:length])
        nothing_came(tmp_path, bad)
    bad.write_bytes(os.urandom(10_000))
    nothing_came(tmp_path, bad)


def test_a_compressed_file_is_refused_since_it_may_grow_without_end(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(ROOT / "README.md", manifest.FILE_NAME)
    nothing_came(tmp_path, tmp_path / "a.tar.gz")


# --------------------------------------------------------------------------------------------------------------- wheels


def test_the_packages_depend_on_the_purpose_and_on_the_engine() -> None:
    minimum = set(bundle.required_packages("predict", ["openvino"]))
    assert "openvino" in minimum
    assert not minimum & {"torch", "transformers", "ray[data,serve]", "starlette", "nncf"}
    assert set(bundle.required_packages("serve", ["openvino"])) > minimum | {"ray[data,serve]"}
    # The extras are imported alone in tests/unit/project/test_small_installation.py.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed_by: dict[bundle.Purpose, list[str]] = {
        "predict": project["dependencies"],
        "serve": [*project["dependencies"], *project["optional-dependencies"]["serve"]],
    }
    for purpose, lines in needed_by.items():
        needed = {re.split("[<>=!~; ]", line)[0] for line in lines}
        assert needed <= set(bundle.required_packages(purpose, ["openvino"]))
    assert set(bundle.required_packages("predict", ["torch", "openvino"])) > minimum | {"torch", "transformers"}
    assert {"nncf", "ray[data,default,serve,train,tune]", "torch"} <= set(bundle.required_packages("all", []))


def test_pip_is_asked_for_wheels_of_the_installed_versions(tmp_path: Path) -> None:
    assert bundle.download_arguments(["openvino", "numpy"], tmp_path / "c.txt", tmp_path) == [
        *("download", "--only-binary=:all:", "--dest", str(tmp_path), "--constraint", str(tmp_path / "c.txt")),
        *("openvino", "numpy"),
    ]
    versions = dict(line.split("==") for line in bundle.installed_constraints())
    assert versions["numpy"] == metadata.version("numpy")
    assert versions["torch"] == metadata.version("torch").partition("+")[0]
    assert "rtrain" not in versions


def test_a_build_of_torch_that_pypi_lacks_is_told_unless_its_index_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in (bundle.torch_build_warning(["torch"]) or "")
    assert bundle.torch_build_warning(["openvino"]) is None
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://download.pytorch.org/whl/cpu")
    assert bundle.torch_build_warning(["torch"]) is None


def test_wheels_come_with_the_command_that_installs_them(tmp_path: Path, run: Cli) -> None:
    item = stock.make(tmp_path / "a")
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"wheel")
    text = bundle.format_instructions("a", "my file.tar", "serve")
    assert bundle.install_command("wheels") in text
    bundle.export_bundle(item, "a", tmp_path / "a.tar", wheels=[tmp_path / "x-1-py3-none-any.whl"], install=text)
    code, out, err = run("import", "a.tar", "--json")
    assert (code, json.loads(out)["install"]) == (0, bundle.install_command("runs/a/wheels")), err
    assert (tmp_path / "runs" / "a" / "wheels" / "x-1-py3-none-any.whl").read_bytes() == b"wheel"


def test_pip_that_fails_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(UserError) as failed:
        bundle.fetch_wheels("predict", ["openvino"], tmp_path)
    assert failed.value.code == "unreachable"


RESTRICTED = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
allowed = {*sys.argv[1].split(","), "rtrain", "serve", "tune", *sys.stdlib_module_names}
class Only(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        return super().find_spec(name, path, target) if top in allowed or top.startswith("_sysconfigdata") else None
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Only]
from rtrain.cli.app import main
main(sys.argv[2:])
"""


def modules_of(names: list[str]) -> set[str]:
    """Top-level modules of packages and of their installed dependencies."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen: set[str] = set()
    queue = [(canonicalize_name(Requirement(name).name), Requirement(name).extras) for name in names]
    while queue:
        name, extras = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                queue.append((canonicalize_name(needed.name), needed.extras))
    tops = metadata.packages_distributions()
    return {top for top, owners in tops.items() if {canonicalize_name(owner) for owner in owners} & seen}


def test_the_smallest_set_answers_and_lists_runs(tmp_path: Path) -> None:
    """The artifact has the float engine; an int8 one needs its own."""
    rows, instance = write_rows(tmp_path / "rows.csv", labelled_rows(5)), make_artifact(tmp_path / "a" / "artifact")
    stock.make(tmp_path / "b")
    for engine, words in (
        ("torch", ["predict", str(instance), "--data", str(rows), "--out", str(tmp_path / "answers.csv")]),
        ("openvino", ["clean", str(tmp_path)]),
    ):
        allowed = ",".join(sorted(modules_of(bundle.required_packages("predict", [engine]))))
        command = [sys.executable, "-c", RESTRICTED, allowed, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


SERVING = """
from rtrain.cluster.connection import session, silence_ray_loggers, wait_until_interrupted
from rtrain.report import progress
from serve import app, deployment, model
from serve.auth import preflight
silence_ray_loggers()
"""
"""What `rtrain serve` imports; `tests/unit/project/test_small_installation.py` runs it too."""
