"""The packages for inference as wheels of the installed versions, for a machine without a package index.

An int8 artifact needs neither torch nor transformers, and `rtrain predict` does not need Ray: the smallest set has
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

Purpose = Literal["predict", "serve", "all"]
"""Use of the other machine: `rtrain predict`, also `rtrain serve`, or all of rtrain."""
PURPOSES: dict[Purpose, str] = {"predict": "predict", "serve": "serve", "all": "use all of rtrain"}
PREDICT_PACKAGES = ("fsspec", "numpy", "pyarrow", "pydantic", "PyYAML", "regex", "rich", "tokenizers", "typer")
"""Needed by the command line, by inference, and for files of rows (pyarrow)."""
ENGINE_PACKAGES = {"torch": ("torch", "transformers", "safetensors")}
"""Packages of engines; default: the package with the engine's name."""
SERVE_PACKAGES = ("ray[data,serve]", "fastapi", "fastapi-offline", "limits", "prometheus_client", "psutil", "scipy")
WHEEL_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rtrain", "serve", "tune")
"""Files of a checkout from which rtrain's own wheel is built."""
BUILD_TIME = "315532800"
"""Time of the files in rtrain's own wheel: 1980, the earliest in a zip. Equal files give equal bytes."""
MAX_ERROR_LINES = 5
"""Last lines of pip's output in an error."""


def required_packages(purpose: Purpose, engines: Iterable[str]) -> list[str]:
    """Return the names of the packages for artifacts of these engines, without their dependencies."""
    if purpose == "all":
        requirements = metadata.requires("rtrain") or ()
        needed = [line for line in requirements if "extra ==" not in line or 'extra == "train"' in line]
        return sorted({_requirement_name(line) for line in needed}, key=str.lower)
    names = {*PREDICT_PACKAGES, *(SERVE_PACKAGES if purpose == "serve" else ())}
    for engine_name in engines:
        names.update(ENGINE_PACKAGES.get(engine_name, (engine_name,)))
    return sorted(names, key=str.lower)


def fetch_wheels(purpose: Purpose, engines: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels, and build rtrain's own, into an empty folder. Raises `UserError` if pip fails."""
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in installed_constraints()), encoding="utf-8")
    _run_pip(download_arguments(required_packages(purpose, engines), constraints, folder))
    _build_own_wheel(folder)
    constraints.unlink()
    return sorted(folder.glob("*.whl"))


def download_arguments(names: Sequence[str], constraints: Path, folder: Path) -> list[str]:
    """Return pip's arguments. Wheels only: the other machine has no build tools."""
    return ["download", "--only-binary=:all:", "--dest", str(folder), "--constraint", str(constraints), *names]


def installed_constraints() -> list[str]:
    """Return `name==version` of all installed packages but rtrain, as pip constraints.

    Without the local part (`+cpu`): an index that has the same version in another build serves as well.
    """
    constraint_by_name: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() != "rtrain":
            constraint_by_name.setdefault(name.lower(), f"{name}=={distribution.version.partition('+')[0]}")
    return [constraint_by_name[name] for name in sorted(constraint_by_name)]


def install_command(folder: str) -> str:
    """Return the command that installs the wheels of a folder without an index."""
    return f"python -m pip install --no-index --no-deps {folder}/*.whl"


def torch_build_warning(names: Iterable[str]) -> str | None:
    """Return a warning about torch: PyPI has the CUDA build in place of this machine's build."""
    version = metadata.version("torch") if "torch" in names else ""
    if "+" not in version or any(os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")):
        return None
    build = version.partition("+")[2]
    return (
        f"torch here is {version}; PyPI has its CUDA build in that place, of gigabytes. For this one set "
        f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{build}"
    )


def format_instructions(run: str, file: str, purpose: Purpose) -> str:
    """Return INSTALL.txt: the commands for a machine without rtrain."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    platform_text = f"{version}, {platform.system()} {platform.machine()}"
    return (
        f"The run {run}, and the wheels that it takes to {PURPOSES[purpose]}: {platform_text}.\n\n"
        f"tar -xf {shlex.quote(file)} wheels\n"
        f"{version} -m venv env\n"
        f". env/bin/activate\n"
        f"{install_command('wheels')}\n"
        f"rtrain import {shlex.quote(file)}\n"
    )


def _build_own_wheel(folder: Path) -> None:
    """Build rtrain's own wheel from its checkout, or download it."""
    checkout = Path(rtrain.__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        _run_pip(["download", "--no-deps", "--dest", str(folder), f"rtrain=={rtrain.__version__}"])
        return
    copy = folder / "checkout"  # a build writes files into its folder
    copy.mkdir()
    for name in WHEEL_SOURCES:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, copy / name)
    _run_pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(copy)])
    shutil.rmtree(copy)


def _run_pip(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": BUILD_TIME, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    arguments_line = [sys.executable, "-m", "pip", *arguments]
    completed = subprocess.run(arguments_line, capture_output=True, text=True, env=environment, check=False)
    if completed.returncode:
        error_lines = "\n  ".join(completed.stderr.strip().splitlines()[-MAX_ERROR_LINES:])
        raise UserError(
            f"pip could not fetch the wheels:\n  {error_lines}\nThis machine must reach a package index "
            "(PIP_INDEX_URL, "
            "PIP_EXTRA_INDEX_URL); export without --with-wheels where the other machine has rtrain already.",
            code="unreachable",
        )


def _requirement_name(requirement: str) -> str:
    """Return name and extras of a requirement, without its version."""
    end = next((place for place, char in enumerate(requirement) if char in "<>=!~; "), len(requirement))
    return requirement[:end]
