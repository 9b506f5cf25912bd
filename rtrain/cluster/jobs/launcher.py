"""Commands of Ray's launcher on a cluster file: `ray rsync-down`, `ray down`."""

import ipaddress
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rtrain.core import atomic_write
from rtrain.core.errors import UserError, suggest_path


def run_ray(*words: str) -> int:
    """Run `ray WORDS`; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], check=False).returncode


def rsync_down(file: Path, remote: str, target: Path, run_command: Callable[..., int] = run_ray) -> None:
    """Copy a folder of the head into the new folder `target`, with `run_command`."""
    _require_file(file)
    if target.exists():
        raise UserError(f"{target} already exists; name another folder with --to", code="already_exists")
    if not remote.startswith("/"):
        raise UserError(
            f"{remote}: name the run's folder on the nodes, e.g. /shared/runs/{remote}, or give --storage",
            code="not_absolute",
        )
    atomic_write.remove_stale_drafts(target)
    draft = atomic_write.Draft(target)
    try:
        target_draft = draft.folder / target.name
        target_draft.mkdir()
        if code := run_command("rsync-down", str(file), f"{remote.rstrip('/')}/", f"{target_draft}/"):
            raise UserError(
                f"ray rsync-down ended with {code}; see its output above. Its copy was removed", code="launcher_failed"
            )
        target_draft.rename(target)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def tear_down(file: Path, yes: bool) -> int:
    """Terminate every node of the file; returns the launcher's exit code. Without `yes` it asks first."""
    _require_file(file)
    return run_ray("down", str(file), *(["--yes"] if yes else []))


def find_head_ip(file: Path) -> str | None:
    """The head's IP address, as its cloud reports it. None if the cluster is down, or if the launcher knows the head by
    a name or a public address, which its nodes do not use."""
    _require_file(file)
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-head-ip", str(file)]
    completed = subprocess.run(command, check=False, capture_output=True, text=True)
    *_, last_word = ["", *completed.stdout.split()]
    with suppress(ValueError):
        if completed.returncode == 0 and ipaddress.ip_address(last_word).is_private:
            return last_word
    return None


def _require_file(file: Path) -> None:
    if not file.is_file():
        fix = (
            f"{suggest_path(file) or 'name the file that ray up was called with'}; a cluster that ray start made "
            "has none"
        )
        raise UserError(
            f"{file}: the file does not exist; {fix}: copy from its head yourself, or give the run's --storage",
            code="not_found",
        )
