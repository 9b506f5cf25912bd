"""Rules about the start of Ray: tokens, versions, shared storage, and names in commands."""

import functools
import importlib
import re

from rtrain import config
from rtrain.cluster import capacity, placement
from rtrain.cluster.checks.findings import LintContext, RuleResults, format_path
from rtrain.cluster.checks.shell_commands import HEAD_START, WORKER_START, iter_commands, iter_ray_starts
from rtrain.cluster.checks.yaml_document import Document

S3_MOUNT = r"(?:^|[;&|({]|\bsudo\b)\s*(?:mount-s3|s3fs|goofys)\s+\S"
BOOTSTRAP_FILE, DEFAULT_PORT = "ray_bootstrap_config.yaml", "6379"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHARED_STORAGE_MOUNT = (
    r"\bmount\b[^;&|]*?-t\s+(?:nfs4?|efs|lustre|cifs|fuse\.\w+)\b(?P<tail>[^;&|)]*)"
    r"|\b(?:gcsfuse|blobfuse2)\b"
)
TOKEN_SUFFIX = "/.ray/auth_token"
PINNED_PACKAGES = ("ray", "rtrain")
"""Packages whose versions must be equal on nodes and on this machine."""


def check_dashboard(document: Document, context: LintContext) -> RuleResults:
    for start in iter_ray_starts(document):
        host = start.options.get("--dashboard-host")
        if host is not None and host not in LOOPBACK:
            message = f"the dashboard and the job API listen on {host}"
            fix = "write --dashboard-host=127.0.0.1, and reach them by SSH: ray dashboard FILE"
            yield document.line_of_text(start.command.path, "--dashboard-host"), message, fix


def check_autoscaler_file(document: Document, context: LintContext) -> RuleResults:
    if document.get("provider", "type") in (None, "local"):
        return
    for start in iter_ray_starts(document):
        if "--head" in start.options and "--autoscaling-config" not in start.options:
            message = "the head has no --autoscaling-config: no worker starts"
            fix = f"add --autoscaling-config=~/{BOOTSTRAP_FILE}"
            yield document.line_of_text(start.command.path, "ray start"), message, fix
        elif (config_path := start.options.get("--autoscaling-config")) and config_path.rpartition("/")[
            2
        ] != BOOTSTRAP_FILE:
            message = f"the autoscaler's file is {BOOTSTRAP_FILE} on the head, not {config_path.rpartition('/')[2]}"
            fix = f"write --autoscaling-config=~/{BOOTSTRAP_FILE}"
            yield document.line_of_text(start.command.path, "--autoscaling-config"), message, fix


def check_worker_joins_head(document: Document, context: LintContext) -> RuleResults:
    """Workers join the head at its address and port."""
    ray_starts = list(iter_ray_starts(document))
    head_ports = [start.options.get("--port") or DEFAULT_PORT for start in ray_starts if "--head" in start.options]
    for start in ray_starts:
        if "--head" in start.options or start.command.path[0] == HEAD_START:
            continue
        address = start.options.get("--address")
        if not address:
            message = "ray start needs --head or --address"
            fix = "write --address=$RAY_HEAD_IP:6379"
            yield document.line_of_text(start.command.path, "ray start"), message, fix
        elif head_ports and (port := address.rpartition(":")[2]).isdigit() and port not in head_ports:
            message = f"workers connect to the head at port {port}, but it listens on {head_ports[0]}: none joins"
            yield (
                document.line_of_text(start.command.path, "--address"),
                message,
                f"write --address=$RAY_HEAD_IP:{head_ports[0]}",
            )


def check_storage(document: Document, context: LintContext) -> RuleResults:
    if document.get("provider", "type") is None or not document.get(HEAD_START):
        return
    for command in iter_commands(document):
        if re.search(S3_MOUNT, command.text):
            message = "a mounted S3 bucket supports neither appends nor renames, and cannot hold a run"
            fix = "mount EFS; cluster.storage=s3://BUCKET copies runs to the bucket"
            yield document.line_of_text(command.path, "s3"), message, fix
    mounts = [
        (command, match)
        for command in iter_commands(document)
        if (match := re.search(SHARED_STORAGE_MOUNT, command.text))
    ]
    mounts_on_all = [command for command, _ in mounts if not command.is_head_only and not command.is_worker_only]
    mounted_on = {
        name
        for command, _ in mounts
        for name, on in (("head", command.is_head_only), ("workers", command.is_worker_only))
        if on
    }
    if not mounts_on_all and mounted_on != {"head", "workers"}:
        location = f"on the {next(iter(mounted_on))} alone" if mounted_on else "nowhere"
        message = f"a folder that all nodes share is mounted {location}: other nodes cannot read its checkpoints"
        yield document.line("setup_commands"), message, "mount one (NFS, EFS, Filestore) in setup_commands"
    for mount_command, match in mounts:
        tail = match.group("tail") or ""
        if re.search(r"(?:^|[\s,])soft(?:[\s,]|$)", tail):
            message = "a soft mount: a short outage of the storage breaks a checkpoint"
            yield document.line_of_text(mount_command.path, "soft"), message, "mount it hard"


def check_start_hook(document: Document, context: LintContext) -> RuleResults:
    for start in iter_ray_starts(document):
        name = start.environment.get("RAY_START_HOOK")
        module, _, attribute = (name or "").rpartition(".")
        if "--head" in start.options and not name:
            message = "the head opens the Ray Client's port, 10001, which rtrain does not use"
            fix = "export RAY_START_HOOK=rtrain.cluster.connection.on_node_start before ray start"
            yield document.line_of_text(start.command.path, "ray start"), message, fix
        if name and not (module.startswith("rtrain.") and _has_attribute(module, attribute)):
            message, fix = f"there is no {name}: Ray does not start", "write rtrain.cluster.connection.on_node_start"
            yield document.line_of_text(start.command.path, "RAY_START_HOOK"), message, fix


def _has_attribute(module: str, attribute: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def check_command_names(document: Document, context: LintContext) -> RuleResults:
    for number, line in enumerate(document.text.splitlines(), 1):
        for verb, recipe in re.findall(r"(?:python -m rtrain|cluster submit\b.* --) ([a-z]+)(?: ([a-z]\S*))?", line):
            if context.verbs and verb not in context.verbs:
                yield number, f"rtrain has no verb {verb}", f"it has {', '.join(sorted(context.verbs))}"
            elif (
                verb in ("train", "tune")
                and re.fullmatch(r"[\w-]+", recipe)
                and recipe not in config.list_recipe_names()
            ):
                yield number, f"there is no recipe {recipe}", f"there are {', '.join(config.list_recipe_names())}"


@functools.cache
def _max_recipe_workers() -> int:
    return max(config.load_config(name).recipe.train.workers for name in config.list_recipe_names())


def check_capacity(document: Document, context: LintContext) -> RuleResults:
    """The startable nodes have capacity for the workers and data tasks of each recipe and of each command in the
    comments."""
    node_types = document.get("available_node_types")
    if not isinstance(node_types, dict) or document.get("provider", "type") == "local":
        return
    limits = capacity.parse_autoscaler_limits(document.value)
    stated_workers = [int(number) for number in re.findall(r"--workers[ =](\d+)", document.text)]
    requested_workers = max([_max_recipe_workers(), *stated_workers])
    if any(
        placement.max_workers([], limits, capacity.ResourceRequest(device), requested_workers) == requested_workers
        for device in capacity.WORKER_RESOURCE
    ):
        return
    has_gpus = any(node.resources.get("GPU") for node, _ in limits.node_types.values())
    request = capacity.ResourceRequest("gpu" if has_gpus else "cpu")
    requirement = (
        f"{requested_workers} {capacity.WORKER_RESOURCE[request.device]}s for workers and "
        f"{request.capacity_for(requested_workers).data_cpus} CPUs for their data tasks"
    )
    message = (
        f"nodes that may be up together do not have {requirement}; the limits are "
        f"{placement.describe_limits(limits, request)}"
    )
    yield (
        document.line("max_workers"),
        message,
        f"{placement.suggest_fix(limits, request, request.capacity_for(requested_workers))} or take larger nodes",
    )


def check_token_mode(document: Document, context: LintContext) -> RuleResults:
    ray_starts = list(iter_ray_starts(document))
    for name in (HEAD_START, WORKER_START):
        if document.get(name) and not any(start.command.path[0] == name for start in ray_starts):
            message = f"no command of {name} starts Ray: its token and ports cannot be checked"
            yield document.line(name), message, "write ray start as a command of its own"
    for start in ray_starts:
        path = start.command.path
        if start.environment.get("RAY_AUTH_MODE") != "token":
            message = f"{format_path(path)} starts Ray without token mode: anyone who reaches its ports may run code"
            yield document.line_of_text(path, "ray start"), message, "export RAY_AUTH_MODE=token before ray start"
        elif not start.environment.get("RAY_AUTH_TOKEN_PATH"):
            message = f"{format_path(path)} does not set the path of the token"
            fix = "export RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token before ray start"
            yield document.line_of_text(path, "ray start"), message, fix


def check_token_file(document: Document, context: LintContext) -> RuleResults:
    token_writes = [command for command in iter_commands(document) if re.search(r">\s*\S*auth_token", command.text)]
    for command in token_writes:
        if not re.search(r"umask 0?[0-7]?77\b|chmod (?:0?600|u=rw)", command.text):
            message = "the token's file is readable by every user of the node"
            yield document.line_of_text(command.path, "auth_token"), message, "write it under umask 077"
    mount_targets = [str(name) for name in document.get("file_mounts", default={}) or {}]
    if (
        not token_writes
        and not any(name.endswith(TOKEN_SUFFIX) for name in mount_targets)
        and any(iter_ray_starts(document))
    ):
        message = "no command creates the token or copies it: Ray does not start in token mode"
        yield document.line(HEAD_START), message, f"make it first in {HEAD_START}, under umask 077"


def check_worker_token(document: Document, context: LintContext) -> RuleResults:
    synced_files = [*(document.get("cluster_synced_files") or ()), *(document.get("file_mounts") or {})]
    if (
        document.get(WORKER_START)
        and document.get(HEAD_START)
        and not any(str(synced_file).endswith(TOKEN_SUFFIX) for synced_file in synced_files)
    ):
        message = "the workers do not get the head's token, and cannot join"
        yield document.line("cluster_synced_files"), message, "name the token's file in cluster_synced_files"


def check_versions(document: Document, context: LintContext) -> RuleResults:
    pinned_fsspec = context.load_constraints().get("fsspec")
    for number, line in enumerate(document.text.splitlines(), 1):
        if (pin := re.search(r"\bs3fs==([\w.]+)", line)) and pinned_fsspec not in (None, pin[1]):
            message = f"s3fs {pin[1]} requires fsspec {pin[1]}, and constraints.txt pins {pinned_fsspec}"
            yield number, message, f"write s3fs=={pinned_fsspec}"
        for package in PINNED_PACKAGES:
            node_versions = re.findall(rf"(?<![\w.-]){package}(?:\[[\w,\s]*\])?==([\d.]+\w*)", line)
            node_versions += re.findall(rf"\brayproject/{package}(?:-ml)?:(\d[\w.]*)", line)
            node_versions += (
                re.findall(r"\bRay version that the nodes get \(([\d.]+)\)", line) if package == "ray" else []
            )
            local_version = context.get_version(package)
            for version in node_versions:
                if local_version is not None and version != local_version:
                    message = f"nodes get {package} {version}, and this machine has {local_version}"
                    yield number, message, f"write {package}=={local_version}, or install {version} here"
    file_mounts = document.get("file_mounts", default={}) or {}
    for remote, local in file_mounts.items():
        for package in PINNED_PACKAGES if str(local).endswith("constraints.txt") else ():
            pinned_version, local_version = context.load_constraints().get(package), context.get_version(package)
            if pinned_version and local_version and pinned_version != local_version:
                message = f"nodes get {package} {pinned_version} by {local}, and this machine has {local_version}"
                yield (
                    document.line("file_mounts", remote),
                    message,
                    f"install {package}=={pinned_version} here, or fix {local}",
                )


def check_file_mounts(document: Document, context: LintContext) -> RuleResults:
    mounts = document.get("file_mounts", default={}) or {}
    for remote, local in mounts.items():
        path = context.folder / str(local)
        if not str(local).startswith("~") and not path.exists():
            message = f"{local}, which is copied to the nodes, does not exist"
            yield document.line("file_mounts", remote), message, "name a path relative to the folder of the file"
