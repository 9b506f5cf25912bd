"""Rules about how Ray is started, with which token and versions, where runs lie, and what the file calls by name."""

import functools
import importlib
import re

from rtrain import config
from rtrain.cluster import capacity, placement
from rtrain.cluster.checks.findings import Around, Found, shown
from rtrain.cluster.checks.shell_commands import HEAD_START, WORKER_START, commands, starts
from rtrain.cluster.checks.yaml_document import Document

OF_S3 = r"(?:^|[;&|({]|\bsudo\b)\s*(?:mount-s3|s3fs|goofys)\s+\S"
BOOTSTRAP, DEFAULT_PORT = "ray_bootstrap_config.yaml", "6379"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOUNTS = (
    r"\bmount\b[^;&|]*?-t\s+(?:nfs4?|efs|lustre|cifs|fuse\.\w+)\b(?P<tail>[^;&|)]*)"
    r"|\b(?:gcsfuse|blobfuse2)\b"
)
TOKEN = "/.ray/auth_token"
OURS = ("ray", "rtrain")
"""Packages of which nodes and this machine must have the same version."""


def dashboard(document: Document, around: Around) -> Found:
    for start in starts(document):
        host = start.options.get("--dashboard-host")
        if host is not None and host not in LOOPBACK:
            what = f"the dashboard and the job API listen on {host}"
            mend = "write --dashboard-host=127.0.0.1, and reach them by SSH: ray dashboard FILE"
            yield document.within(start.command.place, "--dashboard-host"), what, mend


def autoscaler_file(document: Document, around: Around) -> Found:
    if document.get("provider", "type") in (None, "local"):
        return
    for start in starts(document):
        if "--head" in start.options and "--autoscaling-config" not in start.options:
            what = "the head is not given the autoscaler's file: no worker ever starts"
            mend = f"add --autoscaling-config=~/{BOOTSTRAP}"
            yield document.within(start.command.place, "ray start"), what, mend
        elif (given := start.options.get("--autoscaling-config")) and given.rpartition("/")[2] != BOOTSTRAP:
            what = f"the autoscaler's file is called {BOOTSTRAP} on the head, not {given.rpartition('/')[2]}"
            mend = f"write --autoscaling-config=~/{BOOTSTRAP}"
            yield document.within(start.command.place, "--autoscaling-config"), what, mend


def joined(document: Document, around: Around) -> Found:
    """Workers are told where the head is, at the port that it has."""
    every = list(starts(document))
    heads = [start.options.get("--port") or DEFAULT_PORT for start in every if "--head" in start.options]
    for start in every:
        if "--head" in start.options or start.command.place[0] == HEAD_START:
            continue
        address = start.options.get("--address")
        if not address:
            what = "ray start with neither --head nor --address does not start"
            mend = "write --address=$RAY_HEAD_IP:6379"
            yield document.within(start.command.place, "ray start"), what, mend
        elif heads and (port := address.rpartition(":")[2]).isdigit() and port not in heads:
            what = f"workers look for the head at port {port}, and it has {heads[0]}: none joins"
            yield document.within(start.command.place, "--address"), what, f"write --address=$RAY_HEAD_IP:{heads[0]}"


def storage(document: Document, around: Around) -> Found:
    if document.get("provider", "type") is None or not document.get(HEAD_START):
        return
    for one in commands(document):
        if re.search(OF_S3, one.text):
            what = "a mounted bucket of S3 neither appends to files nor renames them: it holds no run"
            mend = "mount EFS; cluster.storage=s3://BUCKET copies runs to the bucket"
            yield document.within(one.place, "s3"), what, mend
    found = [(one, match) for one in commands(document) if (match := re.search(MOUNTS, one.text))]
    everywhere = [one for one, _ in found if not one.on_head_alone and not one.on_workers_alone]
    here = {
        name for one, _ in found for name, on in (("head", one.on_head_alone), ("workers", one.on_workers_alone)) if on
    }
    if not everywhere and here != {"head", "workers"}:
        where = f"on the {next(iter(here))} alone" if here else "nowhere"
        what = f"a folder that all nodes share is mounted {where}: checkpoints of one node are not there for the others"
        yield document.line("setup_commands"), what, "mount one (NFS, EFS, Filestore) in setup_commands"
    for command, match in found:
        tail = match.group("tail") or ""
        if re.search(r"(?:^|[\s,])soft(?:[\s,]|$)", tail):
            what = "a soft mount: where the storage is away for a moment, a write fails and a checkpoint breaks"
            yield document.within(command.place, "soft"), what, "mount it hard"


def hook(document: Document, around: Around) -> Found:
    for start in starts(document):
        name = start.environment.get("RAY_START_HOOK")
        module, _, attribute = (name or "").rpartition(".")
        if "--head" in start.options and not name:
            what = "the head opens the Ray Client's port, 10001, which rtrain does not use"
            mend = "export RAY_START_HOOK=rtrain.cluster.connection.on_node_start before ray start"
            yield document.within(start.command.place, "ray start"), what, mend
        if name and not (module.startswith("rtrain.") and _has(module, attribute)):
            what, mend = f"there is no {name}: Ray does not start", "write rtrain.cluster.connection.on_node_start"
            yield document.within(start.command.place, "RAY_START_HOOK"), what, mend


def _has(module: str, attribute: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def names(document: Document, around: Around) -> Found:
    for number, line in enumerate(document.text.splitlines(), 1):
        for verb, recipe in re.findall(r"(?:python -m rtrain|cluster submit\b.* --) ([a-z]+)(?: ([a-z]\S*))?", line):
            if around.verbs and verb not in around.verbs:
                yield number, f"rtrain has no verb {verb}", f"it has {', '.join(sorted(around.verbs))}"
            elif verb in ("train", "tune") and re.fullmatch(r"[\w-]+", recipe) and recipe not in config.recipe_names():
                yield number, f"there is no recipe {recipe}", f"there are {', '.join(config.recipe_names())}"


@functools.cache
def _workers_of_recipes() -> int:
    return max(config.load(name).recipe.train.workers for name in config.recipe_names())


def room(document: Document, around: Around) -> Found:
    """The workers of each recipe, and of each command in the comments, have room in what may be started, beside their
    data tasks."""
    types = document.get("available_node_types")
    if not isinstance(types, dict) or document.get("provider", "type") == "local":
        return
    may = capacity.startable(document.value)
    told = [int(number) for number in re.findall(r"--workers[ =](\d+)", document.text)]
    wanted = max([_workers_of_recipes(), *told])
    if any(placement.workers([], may, capacity.Needs(device), wanted) == wanted for device in capacity.NEEDS):
        return
    has_gpus = any(host.has.get("GPU") for host, _ in may.kinds.values())
    needs = capacity.Needs("gpu" if has_gpus else "cpu")
    of = f"{wanted} {capacity.NEEDS[needs.device]}s for workers and {needs.of(wanted).data} CPUs for their data tasks"
    what = f"no nodes that may be up together have {of}; there may be {placement.told(may, needs)}"
    yield document.line("max_workers"), what, f"{placement.remedy(may, needs, needs.of(wanted))} or take larger nodes"


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


def versions(document: Document, around: Around) -> Found:
    pinned_fsspec = around.constraints().get("fsspec")
    for number, line in enumerate(document.text.splitlines(), 1):
        if (pin := re.search(r"\bs3fs==([\w.]+)", line)) and pinned_fsspec not in (None, pin[1]):
            what = f"s3fs {pin[1]} wants fsspec {pin[1]}, and constraints.txt pins {pinned_fsspec}"
            yield number, what, f"write s3fs=={pinned_fsspec}"
        for package in OURS:
            told = re.findall(rf"(?<![\w.-]){package}(?:\[[\w,\s]*\])?==([\d.]+\w*)", line)
            told += re.findall(rf"\brayproject/{package}(?:-ml)?:(\d[\w.]*)", line)
            told += re.findall(r"\bRay version that the nodes get \(([\d.]+)\)", line) if package == "ray" else []
            here = around.version(package)
            for version in told:
                if here is not None and version != here:
                    what = f"nodes get {package} {version}, and this machine has {here}"
                    yield number, what, f"write {package}=={here}, or install {version} here"
    mounted = document.get("file_mounts", default={}) or {}
    for remote, local in mounted.items():
        for package in OURS if str(local).endswith("constraints.txt") else ():
            pinned, here = around.constraints().get(package), around.version(package)
            if pinned and here and pinned != here:
                what = f"nodes get {package} {pinned} by {local}, and this machine has {here}"
                yield document.line("file_mounts", remote), what, f"install {package}=={pinned} here, or mend {local}"


def missing_mounts(document: Document, around: Around) -> Found:
    mounts = document.get("file_mounts", default={}) or {}
    for remote, local in mounts.items():
        path = around.folder / str(local)
        if not str(local).startswith("~") and not path.exists():
            what = f"{local}, which is to be copied to the nodes, is not there"
            yield document.line("file_mounts", remote), what, "name a path relative to the folder of the file"
