"""Installed, not checked out: the wheel in an environment of its own, started from a folder that hides its modules."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rtrain import __version__, config
from rtrain.core import manifest
from serve.ingress.address import Address
from tests.conftest import labelled_rows, write_rows
from tests.support.heads import free_ports
from tests.support.processes import end
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

pytestmark = [pytest.mark.ray, pytest.mark.serve, pytest.mark.timeout(600)]

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rtrain", "serve", "tune")
COMMAND_WITHIN_S, READY_WITHIN_S, ENDED_WITHIN_S = 240, 120, 30
SMALL = ("train.epochs=2", "train.workers=1", "train.precision=fp32", "optim.lr=5e-3", "train.log_every=1")
SEARCH = (*SMALL, "tune.trials=2", "tune.points_to_evaluate=[{optim.lr: 1e-6}]")


@dataclass(frozen=True)
class Installed:
    """The new environment, and the folder from which its commands are started."""

    environment: Path
    folder: Path

    @property
    def site_packages(self) -> Path:
        (site_packages,) = self.environment.glob("lib/python*/site-packages")
        return site_packages

    @property
    def console(self) -> list[str]:
        return [str(self.environment / "bin" / "rtrain")]

    @property
    def module(self) -> list[str]:
        """This puts the current folder, with the decoys, first on the module path."""
        return [str(self.environment / "bin" / "python"), "-m", "rtrain"]

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=COMMAND_WITHIN_S,
        )

    def environ(self) -> dict[str, str]:
        """This process's, less what would lead Python or Ray elsewhere."""
        ours = ("PYTHON", "RAY_", "VIRTUAL_ENV", "COV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**environment, "RAY_TMPDIR": os.environ.get("RAY_TMPDIR", "/tmp/ray")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that setuptools leaves nothing in the checkout and takes nothing that lies about in it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, env=no_python())
    pip("--python", str(environment / "bin" / "python"), "install", "--no-deps", str(wheel))
    folder = tmp_path_factory.mktemp("folder")
    for name in ("serve", "tune"):
        (folder / f"{name}.py").write_text('raise SystemExit("decoy")\n')
    new = Installed(environment, folder)
    # The dependencies, after its own packages. Python reads no .pth file there, so that a checkout which is installed
    # in editable form stays out of sight.
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (new.site_packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in paths))
    return new


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run([*command, "--no-index"], capture_output=True, text=True, env=no_python())
    assert done.returncode == 0, done.stdout + done.stderr


def no_python() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def settings(assignments: tuple[str, ...]) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def succeeded(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "decoy" not in done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


# -------------------------------------------------------------------------------------------------- installation--


def test_the_wheel_holds_the_packages_with_their_data_and_one_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    ours = {
        str(path.relative_to(ROOT))
        for package in ("rtrain", "serve", "tune")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert wheel.name == f"rtrain-{__version__}-py3-none-any.whl"
    assert re.findall(r"^(\S+) *=", commands, re.M) == ["rtrain"]  # `serve` and `tune` belong to Ray


def test_every_module_comes_from_the_new_environment(installed: Installed) -> None:
    script = "import rtrain.cli.app, serve.app, tune, ray, sys; print(*(sys.modules[n].__file__ for n in sys.argv[1:]))"
    python = str(installed.environment / "bin" / "python")
    done = installed.run(python, "-P", "-c", script, "rtrain", "serve", "tune", "ray")
    *ours, theirs = done.stdout.split()
    assert ours == [str(installed.site_packages / name / "__init__.py") for name in ("rtrain", "serve", "tune")]
    assert not theirs.startswith(str(installed.environment))
    path = installed.run(python, "-c", "import sys; print(*sys.path, sep='\\n')", cwd=installed.environment).stdout
    assert str(ROOT) not in path.splitlines()


def test_recipes_are_found_without_the_checkout(installed: Installed) -> None:
    for start in (installed.console, installed.module):
        lines = installed.run(*start, "recipes", "list").stdout.splitlines()
        assert [line.split()[0] for line in lines] == config.list_recipe_names()


# -------------------------------------------------------------------------------------------------------- search, serve


@pytest.mark.slow
def test_it_searches_and_serves_beside_files_with_the_names_of_its_modules(installed: Installed) -> None:
    """A search is two trainings on Ray's workers, where the decoys would come first on the module path too."""
    folder = installed.folder
    arguments = rows_and_encoder(folder)
    command = [*installed.module, "tune", "intent", *arguments, "--out", "runs/search", *settings(SEARCH)]
    output = succeeded(installed.run(*command))
    assert [trial["settings"] for trial in output["trials"] if trial["repeat_of"] is None] == [{}, {"optim.lr": 1e-6}]
    assert output["winner"]["status"] == "finished"
    artifact = folder / "runs" / "search" / "trial-000" / "artifact"
    assert manifest.find_damage(artifact) is None

    serve(installed, artifact)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        *("encoder", "rows.csv", "runs", "serve.py", "tune.py")
    ]


@pytest.mark.slow
def test_its_console_command_trains(installed: Installed) -> None:
    arguments = rows_and_encoder(installed.folder)
    command = [*installed.console, "train", "intent", *arguments, "--out", "runs/one", *settings(SMALL)]
    summary = succeeded(installed.run(*command))
    assert (summary["status"], summary["workers"]) == ("finished", 1)
    assert manifest.find_damage(installed.folder / "runs" / "one" / "artifact") is None


def rows_and_encoder(folder: Path) -> list[str]:
    """The arguments that name them: relative to a folder that rtrain will leave."""
    write_rows(folder / "rows.csv", labelled_rows(240))
    make_encoder(folder / "encoder")
    return ["--data", "rows.csv", "--model", "encoder", "--json"]


def serve(installed: Installed, artifact: Path) -> None:
    """Serve in the background, send a request, stop with SIGTERM: correct answer, one message, nothing left."""
    (port,) = free_ports(1)
    log = installed.folder.parent / f"{installed.folder.name}.log"
    command = [*installed.module, "serve", str(artifact.relative_to(installed.folder)), "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, cwd=installed.folder, env=installed.environ(), stdout=file, stderr=file, start_new_session=True
        )
    family: list[psutil.Process] = []
    try:
        answer = ask(server, f"http://127.0.0.1:{port}/predict", log)
        family = psutil.Process(server.pid).children(recursive=True)
        titles = [" ".join(process.cmdline()[:1]) for process in family]
        server.terminate()
        code = server.wait(ENDED_WITHIN_S)
    finally:
        _, alive = psutil.wait_procs(family, timeout=ENDED_WITHIN_S if server.poll() is not None else 0)
        end(server, family)
    # Each process that was started ahead has become an actor, and no other was started.
    actors = sorted(re.findall(r"^ray::(\w+)", title)[0] for title in titles if title.startswith("ray::"))
    assert actors == ["HAProxyManager", "RuntimeEnvAgent", "ServeController", "ServeReplica"]
    labels = {entry["label"] for entry in answer}
    assert labels <= {"login", "parcel", "refund"}
    assert labels
    assert "decoy" not in log.read_text()
    assert (code, alive) == (143, []), log.read_text()
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["starting", "serving", "next:", "ending", "rtrain:"], lines
    assert lines[-1] == "rtrain: ended by SIGTERM"
    assert Address("127.0.0.1", port).is_free()


def ask(server: subprocess.Popen[bytes] | subprocess.Popen[str], url: str, log: Path) -> list[dict[str, Any]]:
    give_up = time.monotonic() + READY_WITHIN_S
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        if "serving" in log.read_text():
            break
        time.sleep(0.2)
    response = httpx.post(url, json={"inputs": "where is my parcel"}, timeout=30, trust_env=False)
    assert response.status_code == 200
    answers: list[list[dict[str, Any]]] = response.json()
    return answers[0]
