"""Rules about the token and other secrets."""

import re
from pathlib import PurePosixPath

from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.document import Document, Place
from rtrain.cluster.lint.findings import Found, shown
from rtrain.cluster.lint.shell import HEAD_START, WORKER_START, commands, starts

SECRETS = (
    ("a key of AWS", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    ("a token of GitHub", r"\bgh[pousr]_[A-Za-z0-9]{30,}\b|\bgithub_pat_[A-Za-z0-9_]{30,}\b"),
    ("a token of the model hub", r"\bhf_[A-Za-z0-9]{30,}\b"),
    ("a key of Google", r"\bAIza[0-9A-Za-z_-]{35}\b"),
    ("a password in an address", r"\b[a-z][a-z0-9+]*://[^/\s:@$]+:[^/\s:@$]+@"),
    ("Ray's token", r"\bRAY_AUTH_TOKEN=(?!\$\()['\"]?[^\s'\"$]"),
    (
        "a secret",
        r"(?i)\b[a-z_]*(?:secret(?:_access)?_key|password|passwd|api_?key|access_?token|_token|_secret)\s*[=:]\s*"
        r"['\"]?(?![\s'\"$<{~/]|FILL-IN)[^\s'\"]{6,}",
    ),
)
SECRET_FILES = (".aws", ".ssh", ".env", ".netrc", ".kube", ".azure", "gcloud", "credentials.json", ".git-credentials")
TOKEN = "/.ray/auth_token"


def in_file(document: Document, around: Around) -> Found:
    for number, line in enumerate(document.text.splitlines(), 1):
        if name := found(line):
            what = f"{name} is written down: whoever reads the file, its history or a node's process list has it"
            yield number, what, "take it out, replace it where it came from, and read it from a file on the node"


def found(line: str) -> str | None:
    """What secret a line holds, by its form; None where it holds none."""
    return next((name for name, pattern in SECRETS if re.search(pattern, line)), None)


def credentials(document: Document, around: Around) -> Found:
    for key in ("gcp_credentials", "aws_credentials"):
        if document.get("provider", key):
            what = f"provider.{key} holds credentials, and the file is copied to the head"
            yield document.line("provider", key), what, "leave it out: nodes have their rights by their own identity"


def carried(document: Document, around: Around) -> Found:
    mounts, synced = document.get("file_mounts", default={}), document.get("cluster_synced_files") or []
    taken: list[tuple[Place, str]] = [
        *((("file_mounts", remote), str(local)) for remote, local in mounts.items() if isinstance(mounts, dict)),
        *((("cluster_synced_files", number), str(path)) for number, path in enumerate(synced)),
    ]
    for place, path in taken:
        if found := [name for name in SECRET_FILES if name in PurePosixPath(path).parts]:
            what = f"{found[0]} is copied to every node, with the secrets in it"
            yield document.line(*place), what, "leave it out: nodes have rights of their own"


def host_key(document: Document, around: Around) -> Found:
    """Ray itself asks for no host's key: a proxy is what can."""
    command = str(document.get("auth", "ssh_proxy_command") or "")
    pattern = r"(?i)StrictHostKeyChecking[= ]+(?:no|off)\b|UserKnownHostsFile[= ]+/dev/null"
    if found := re.search(pattern, command):
        what = f"{found[0]}: whoever answers in the bastion's place reads all that is sent, the token among it"
        line = document.within(("auth", "ssh_proxy_command"), found[0])
        yield line, what, "leave it out, and put the bastion's key into ~/.ssh/known_hosts"


def token_mode(document: Document, around: Around) -> Found:
    every = list(starts(document))
    for name in (HEAD_START, WORKER_START):
        if document.get(name) and not any(start.command.place[0] == name for start in every):
            what = f"no command of {name} is seen to start Ray: nothing is known of its token and its ports"
            yield document.line(name), what, "write ray start as a command of its own"
    for start in every:
        place = start.command.place
        if start.environment.get("RAY_AUTH_MODE") != "token":
            what = f"{shown(place)} starts Ray without token mode: whoever reaches a port of it may run code"
            yield document.within(place, "ray start"), what, "export RAY_AUTH_MODE=token before ray start"
        elif not start.environment.get("RAY_AUTH_TOKEN_PATH"):
            what = f"{shown(place)} does not say where the token lies"
            mend = "export RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token before ray start"
            yield document.within(place, "ray start"), what, mend


def token_file(document: Document, around: Around) -> Found:
    writes = [one for one in commands(document) if re.search(r">\s*\S*auth_token", one.text)]
    for command in writes:
        if not re.search(r"umask 0?[0-7]?77\b|chmod (?:0?600|u=rw)", command.text):
            what = "the token's file is readable by every user of the node"
            yield document.within(command.place, "auth_token"), what, "write it under umask 077"
    mounted = [str(name) for name in document.get("file_mounts", default={}) or {}]
    if not writes and not any(name.endswith(TOKEN) for name in mounted) and any(starts(document)):
        what = "no command makes the token, and none is copied: Ray does not start in token mode"
        yield document.line(HEAD_START), what, f"make it first in {HEAD_START}, under umask 077"


def token_of_workers(document: Document, around: Around) -> Found:
    synced = [*(document.get("cluster_synced_files") or ()), *(document.get("file_mounts") or {})]
    if document.get(WORKER_START) and document.get(HEAD_START) and not any(str(one).endswith(TOKEN) for one in synced):
        what = "the workers do not get the head's token, and cannot join"
        yield document.line("cluster_synced_files"), what, "name the token's file in cluster_synced_files"


def public_storage(document: Document, around: Around) -> Found:
    pattern = r"public-read\S*|--no-sign-request|\ballUsers\b|allow[-_]public\S*|--anonymous\b"
    for number, line in enumerate(document.text.splitlines(), 1):
        if (found := re.search(pattern, line)) and not line.lstrip().startswith("#"):
            what = f"{found[0]}: data that anyone can read, or replace, is used for training"
            yield number, what, "keep the bucket private, and give the nodes' identity the right to read it"
