"""What answering needs, as wheels of the installed versions, for a machine that reaches no package index.

An int8 artefact is answered without torch and transformers, and `rtrain predict` without Ray: the smallest set has
some 150 MB, and all of rtrain several hundred.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import rtrain
from rtrain.core.errors import UserError

What = Literal["predict", "serve", "all"]
"""What the other machine is to do: answer by `rtrain predict`, serve too, or everything that rtrain does."""
PURPOSES: dict[What, str] = {"predict": "answer", "serve": "serve", "all": "do all that rtrain does"}
PREDICT = ("fsspec", "numpy", "pyarrow", "pydantic", "PyYAML", "regex", "rich", "tokenizers", "typer")
"""Needed by the command line, by every answer, and by rows of files (pyarrow)."""
ENGINE = {"torch": ("torch", "transformers", "safetensors")}
"""Needed by an engine; of those that are not here, the package of its own name."""
SERVE = ("ray[data,serve]", "fastapi", "fastapi-offline", "limits", "prometheus_client", "psutil", "scipy")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rtrain", "serve", "tune")
"""What rtrain's own wheel is built from, in a checkout."""
BUILT_AT = "315532800"
"""Time of the files in rtrain's own wheel, 1980, since a zip knows no earlier: equal files give equal bytes."""
SHOWN_LINES = 5
"""Last lines of pip's that an error shows."""


def packages(what: What, engine: Iterable[str]) -> list[str]:
    """The packages to fetch, by name, for artefacts of these engines; what they need in turn is for pip to find."""
    if what == "all":
        known = metadata.requires("rtrain") or ()
        wanted = [line for line in known if "extra ==" not in line or 'extra == "train"' in line]
        return sorted({_name(line) for line in wanted}, key=str.lower)
    found = {*PREDICT, *(SERVE if what == "serve" else ())}
    for name in engine:
        found.update(ENGINE.get(name, (name,)))
    return sorted(found, key=str.lower)


def fetch(what: What, engine: Iterable[str], folder: Path) -> list[Path]:
    """Put the wheels into an empty folder, rtrain's own among them. Raises `UserError` where pip fails."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in installed()), encoding="utf-8")
    _pip(download(packages(what, engine), constraints, folder))
    _own(folder)
    constraints.unlink()
    return sorted(folder.glob("*.whl"))


def download(names: Sequence[str], constraints: Path, folder: Path) -> list[str]:
    """pip's arguments. Wheels alone: a source archive would want its build tools, which the other machine lacks."""
    return ["download", "--only-binary=:all:", "--dest", str(folder), "--constraint", str(constraints), *names]


def installed() -> list[str]:
    """`name==version` of all that is installed here but rtrain, in the form of pip's constraints.

    Without the local part (`+cpu`): an index that has the same version in another build serves as well.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() != "rtrain":
            found.setdefault(name.lower(), f"{name}=={distribution.version.partition('+')[0]}")
    return [found[name] for name in sorted(found)]


def command(folder: str) -> str:
    """The one command that installs the wheels of a folder, without an index."""
    return f"python -m pip install --no-index --no-deps {folder}/*.whl"


def doubt(names: Iterable[str]) -> str | None:
    """What pip may do that nobody wants: a build of torch for this machine alone is not on PyPI, which has the one with
    CUDA in its place."""
    version = metadata.version("torch") if "torch" in names else ""
    if "+" not in version or any(os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")):
        return None
    build = version.partition("+")[2]
    return (
        f"torch here is {version}; PyPI has its CUDA build in that place, of gigabytes. For this one set "
        f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{build}"
    )


def instructions(run: str, file: str, what: What) -> str:
    """INSTALL.txt: what to do on a machine that has nothing yet."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    where = f"{version}, {platform.system()} {platform.machine()}"
    return (
        f"The run {run}, and the wheels that it takes to {PURPOSES[what]}: {where}.\n\n"
        f"tar -xf {shlex.quote(file)} wheels\n"
        f"{version} -m venv env\n"
        f". env/bin/activate\n"
        f"{command('wheels')}\n"
        f"rtrain import {shlex.quote(file)}\n"
    )


def _own(folder: Path) -> None:
    """rtrain's own wheel: built from the checkout that it runs from, else fetched like the others."""
    checkout = Path(rtrain.__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        _pip(["download", "--no-deps", "--dest", str(folder), f"rtrain=={rtrain.__version__}"])
        return
    copy = folder / "checkout"  # building leaves files in the folder that is built
    copy.mkdir()
    for name in SOURCES:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy / name)
    _pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(copy)])
    shutil.rmtree(copy)


def _pip(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": BUILT_AT, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        told = "\n  ".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise UserError(
            f"pip could not fetch the wheels:\n  {told}\nThis machine must reach a package index (PIP_INDEX_URL, "
            "PIP_EXTRA_INDEX_URL); export without --with-wheels where the other machine has rtrain already.",
            code="unreachable",
        )


def _name(requirement: str) -> str:
    """Name and extras of a requirement, without its version."""
    end = next((place for place, char in enumerate(requirement) if char in "<>=!~; "), len(requirement))
    return requirement[:end]
