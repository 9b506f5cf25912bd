"""By what a cluster's file makes a node: its commands, as the launcher runs them, and the files that it gets. Pure.

A machine of a rehearsal has no system of its own: what would change this one's, or fetch something, is left out, and
listed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rtrain.cluster.lint import shell
from rtrain.cluster.lint.document import Document

CHANGING = {
    *("sudo", "apt", "apt-get", "yum", "dnf", "pip", "pip3", "conda", "mamba", "uv", "docker", "mount", "systemctl"),
    *("modprobe", "curl", "wget", "git", "aws", "gcloud", "az"),
}
"""Programs that change the system, or fetch something: a command that calls one is left out."""
WRAPPERS = {
    *("nohup", "setsid", "exec", "env", "time", "command", "nice"),
    *("if", "then", "elif", "else", "while", "until", "do", "!"),
}
"""Programs that call the one behind them, and words of the shell before a command."""
BEFORE = ("initialization_commands", "setup_commands")
GCS_PORT, DASHBOARD_PORT = 6379, 8265
"""Ray's own, where the file names none."""
TOKEN = "~/.ray/auth_token"


@dataclass(frozen=True)
class Commands:
    """What one node runs, in this order, and where its files are."""

    setup: tuple[str, ...]
    start: tuple[str, ...]
    """Those that start Ray, each time that a head takes the node."""
    left_out: tuple[str, ...]
    environments: tuple[str, ...]
    """Folders in the home, by whose `bin` the commands call python or ray."""

    @property
    def run(self) -> tuple[str, ...]:
        return (*self.setup, *self.start)


@dataclass(frozen=True)
class File:
    """What a cluster's file says of its machines."""

    document: Document
    home: str
    """The home of its user, on the nodes."""

    def of(self, kind: str, is_head: bool) -> Commands:
        """Those of a node of that type."""
        role = "head" if is_head else "worker"
        node = ("available_node_types", kind)
        setup = [
            *self._list(*node, BEFORE[0], otherwise=(BEFORE[0],)),
            *self._list(BEFORE[1]),
            *(self._list("head_setup_commands") if is_head else ()),
            *(() if is_head else self._list(*node, "worker_setup_commands", otherwise=("worker_setup_commands",))),
        ]
        start = self._list(f"{role}_start_ray_commands")
        left = tuple(text for text in (*setup, *start) if CHANGING & programs(text))
        named = dict.fromkeys(name for text in (*setup, *start) for name in re.findall(r"~/([\w.-]+)/bin/", text))
        kept = [tuple(text for text in listed if text not in left) for listed in (setup, start)]
        return Commands(kept[0], kept[1], left, tuple(named))

    def _list(self, *place: str, otherwise: tuple[str, ...] = ()) -> Sequence[str]:
        found = self.document.get(*place)
        if not found and otherwise:
            found = self.document.get(*otherwise)
        return [str(text) for text in found or ()]

    @property
    def mounts(self) -> Mapping[str, str]:
        """Where on the nodes files and folders of the file's own folder go, and which."""
        found = self.document.get("file_mounts", default={}) or {}
        return {self.at_home(str(target)): str(source) for target, source in found.items()}

    @property
    def synced(self) -> Sequence[str]:
        """Files of the head that each worker gets."""
        return [self.at_home(str(path)) for path in self.document.get("cluster_synced_files", default=[]) or []]

    def at_home(self, path: str) -> str:
        """A path of a node, with `~` for the home of its user."""
        where = PurePosixPath(path)
        return f"~/{where.relative_to(self.home)}" if where.is_relative_to(self.home) else path

    def option(self, name: str, is_head: bool = True) -> str | None:
        """The value of an option of the head's, or the workers', `ray start`."""
        return next(
            (start.options[name] for start in self._starts(is_head) if name in start.options),
            None,
        )

    def number(self, name: str, default: int) -> int:
        value = self.option(name) or ""
        return int(value) if value.isdigit() else default

    @property
    def token(self) -> str:
        """Where the head has the cluster's token."""
        said = [start.environment.get("RAY_AUTH_TOKEN_PATH") for start in self._starts(True)]
        path = next((path for path in said if path), TOKEN)
        return self.at_home(path.replace("$HOME", "~").replace("${HOME}", "~"))

    def ports(self) -> dict[str, set[int]]:
        """The ports that the file gives to each kind of Ray's processes, by the words of `rehearsal.ports`; for those
        that it gives none, nothing."""
        found: dict[str, set[int]] = {}
        for role, names in PORTS.items():
            values = [self.option(name, is_head) or "" for name in names for is_head in (True, False)]
            if numbers := {int(value) for value in values if value.isdigit()}:
                found[role] = numbers
        # The head's agent starts jobs, for which it becomes a driver of Ray's: it listens as workers do.
        low, high = self.option("--min-worker-port", True), self.option("--max-worker-port", True)
        if AGENT in found and (low or "").isdigit() and (high or "").isdigit():
            found[AGENT] |= set(range(int(low or 0), int(high or 0) + 1))
        return found

    def _starts(self, is_head: bool) -> Iterator[shell.Start]:
        return (start for start in shell.starts(self.document) if ("--head" in start.options) == is_head)


def programs(text: str) -> set[str]:
    """The programs that a shell command calls, by name, and the modules that python runs."""
    found = set[str]()
    for words in shell.parts(text):
        called = [word for word in words if not re.match(r"[A-Za-z_]\w*=", word) and word not in WRAPPERS]
        if not called:
            continue
        found.add(called[0].rpartition("/")[2])
        for place, word in enumerate(called[1:-1], 1):
            if word == "-m":
                found.add(called[place + 1])
            elif word == "-c" and called[0].rpartition("/")[2] in ("sh", "bash"):
                found |= programs(called[place + 1])
    return found


AGENT = "node agent"
PORTS: Mapping[str, tuple[str, ...]] = {
    "control service": ("--port",),
    "raylet": ("--node-manager-port", "--object-manager-port"),
    "runtime environments": ("--runtime-env-agent-port",),
    AGENT: ("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--metrics-export-port"),
    "dashboard": ("--dashboard-port",),
}
"""By the role of a process, the options of `ray start` that say on which ports it listens."""


def of(document: Document) -> File:
    user = str(document.get("auth", "ssh_user", default="root"))
    return File(document, "/root" if user == "root" else f"/home/{user}")
