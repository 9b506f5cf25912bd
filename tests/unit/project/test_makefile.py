"""What the Makefile says and does on a machine that lacks something (python is a stand-in)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.root import ROOT

PROXIES = [f"{kind}_proxy" for kind in ("http", "https", "all", "no")]
OURS = ("PYTHON", "TORCH_INDEX", "ARGS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")

# Notes how it was called and answers what the Makefile asks of a Python. `-m venv` copies it to where it is told, if
# that is no link (Python's own refuses one).
PYTHON = """\
#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  *version_info*) echo {version} ;;
  *ensurepip*) exit {ensurepip} ;;
  "-m venv"*) [ {venv} = 0 ] || exit {venv}; [ ! -L "$4" ] || exit 1; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip install"*) exit {pip} ;;
  "-m rtrain demo"*) echo "demo under $no_proxy $NO_PROXY" ;;
esac
"""


@dataclass
class Machine:
    """A folder with the project's Makefile, and a PATH where nothing but the stand-ins is a Python."""

    root: Path

    def __post_init__(self) -> None:
        self.bin, self.log = self.root / "bin", self.root / "calls.log"
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        for tool in ("sh", "sed", "cat", "cksum", "printenv", "rm", "mkdir", "cp", "uname", "make"):
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)

    def python(self, name: str = "python3", version: str = "3.11", **exits: int) -> None:
        """Put a Python on the PATH. `exits` are the exit codes of `ensurepip`, `venv` and `pip`, where not 0."""
        codes = {"ensurepip": 0, "venv": 0, "pip": 0, **exits}
        self.script(name, PYTHON.format(log=self.log, version=version, **codes))

    def script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make(self, target: str, *settings: str, **environ: str) -> tuple[int, str]:
        unwanted = {*OURS, *PROXIES, *(name.upper() for name in PROXIES)}
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        done = subprocess.run(
            ["make", target, *settings],
            cwd=self.root,
            env={**kept, **environ, "PATH": str(self.bin)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    def installs(self) -> list[str]:
        """The calls of `pip install` so far."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return [call for call in calls if call.startswith("-m pip install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# What the preflight says


def test_no_python(machine: Machine) -> None:
    code, said = machine.make("preflight")
    assert code != 0
    assert "no supported Python" in said


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10", "3.14"])
def test_unsupported_python(machine: Machine, version: str) -> None:
    machine.python(version=version)
    code, said = machine.make("preflight")
    assert code != 0
    assert f"python3 is {version}" in said


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_supported_python(machine: Machine, version: str) -> None:
    machine.python("python3", "3.9")
    machine.python(f"python{version}", version)
    assert machine.make("preflight") == (0, "")


def test_commands_get_no_proxy(machine: Machine) -> None:
    machine.python()
    code, said = machine.make("demo", NO_PROXY="intranet")
    assert code == 0
    assert "demo under intranet,127.0.0.1,localhost intranet,127.0.0.1,localhost" in said


# What is installed, and when


def test_install_once(machine: Machine) -> None:
    machine.python()
    assert machine.make("install")[0] == 0
    assert len(machine.installs()) == 1
    assert machine.installs()[0].endswith("-c constraints.txt -e .[train,demo,test]")
    assert machine.make("install") == (0, "")
    assert len(machine.installs()) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_install_again_after_a_change(machine: Machine, name: str) -> None:
    machine.python()
    machine.make("install")
    os.utime(machine.root / name)
    assert machine.make("install") == (0, "")
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    assert machine.make("install")[0] == 0
    assert len(machine.installs()) == 2


def test_a_failed_installation_is_explained_and_tried_again(machine: Machine) -> None:
    machine.python(pip=1)
    code, said = machine.make("test")
    assert code != 0
    assert "the installation failed" in said
    machine.make("test")
    assert len(machine.installs()) == 2


def test_torch_comes_from_the_named_index(machine: Machine) -> None:
    machine.python()
    assert machine.make("install", "TORCH_INDEX=https://example.org/whl/cpu")[0] == 0
    first, second = machine.installs()
    assert first.endswith("-c constraints.txt --no-deps --index-url https://example.org/whl/cpu torch")
    assert "example.org" not in second


# What is pinned


def test_constraints_are_exact_and_cover_the_dependencies() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {name.partition("[")[0].partition("=")[0].partition(">")[0] for name in wanted}
    assert names <= pins.keys()
