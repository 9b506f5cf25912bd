"""What Ray's launcher does for a cluster's file: `ray rsync-down`, `ray down`."""

import ipaddress
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rtrain.core import atomic_write
from rtrain.core.errors import UserError, meant


def run_ray(*words: str) -> int:
    """The exit code of `ray WORDS`."""
    return subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], check=False).returncode


def bring(file: Path, remote: str, to: Path, ray: Callable[..., int] = run_ray) -> None:
    """Copy a folder of the head into the new folder `to`, by `ray`."""
    _there(file)
    if to.exists():
        raise UserError(f"{to} is there already; name another folder with --to", code="already_exists")
    if not remote.startswith("/"):
        raise UserError(
            f"{remote}: name the run's folder on the nodes, e.g. /shared/runs/{remote}, or give --storage",
            code="not_absolute",
        )
    atomic_write.sweep(to)
    draft = atomic_write.Draft(to)
    try:
        inside = draft.folder / to.name
        inside.mkdir()
        if code := ray("rsync-down", str(file), f"{remote.rstrip('/')}/", f"{inside}/"):
            raise UserError(
                f"ray rsync-down ended with {code}; see its lines above. Nothing is kept of it", code="launcher_failed"
            )
        inside.rename(to)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def down(file: Path, yes: bool) -> int:
    """End every node of the file; returns the launcher's exit code. Without `yes` it asks first."""
    _there(file)
    return run_ray("down", str(file), *(["--yes"] if yes else []))


def head_ip(file: Path) -> str | None:
    """The address of the head of the file's cluster, asked of its cloud. None where the cluster is not up, and where
    the launcher knows the head by a name or a public address, which its nodes do not use."""
    _there(file)
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-head-ip", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    *_, last = ["", *done.stdout.split()]
    with suppress(ValueError):
        if done.returncode == 0 and ipaddress.ip_address(last).is_private:
            return last
    return None


def _there(file: Path) -> None:
    if not file.is_file():
        fix = f"{meant(file) or 'name the file that ray up was called with'}; a cluster that ray start made has none"
        raise UserError(
            f"{file}: no such file; {fix}: copy from its head yourself, or give the run's --storage", code="not_found"
        )
