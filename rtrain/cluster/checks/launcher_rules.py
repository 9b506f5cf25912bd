"""Rules for launcher files: network access, location, resources, spot nodes, tokens, versions, shared storage, and
names in commands."""

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

from rtrain import config
from rtrain.cluster import capacity, placement
from rtrain.cluster.checks import Level, LintContext, RuleResults, installed_version
from rtrain.cluster.cluster_file import (
    CLOUDS,
    DEFAULT_MAX_WORKERS,
    HEAD_START,
    WATCHER_MODULE,
    WORKER_START,
    ClusterFile,
    NodeType,
    format_path,
    get_nested,
)

ZONE_PATTERNS = {"aws": r"(?:[a-z]|-[a-z0-9-]+-\d+[a-z]?)", "gcp": r"-[a-z]+\d*[a-z]?"}
"""Suffix of a zone after its region; AWS has also Local Zones and Wavelength Zones, such as `us-west-2-lax-1a` and
`us-east-1-wl1-bos-wlz-1`."""
REGION_REFERENCES = re.compile(
    r"\.efs\.(?P<host>[a-z0-9-]+)\.amazonaws\.|\bregions/(?P<path>[a-z0-9-]+)/"
    r"|--region[= ](?P<option>[a-z0-9-]+)|--zone[= ](?P<zone>[a-z0-9-]+)"
)
"""Patterns of a region or zone outside the provider section: the host of a file system, a subnetwork, the tunnel to a
node. A mismatch makes them unreachable."""
MAX_IDLE_MINUTES = 60
S3_MOUNT = r"(?:^|[;&|({]|\bsudo\b)\s*(?:mount-s3|s3fs|goofys)\s+\S"
SHARED_STORAGE_MOUNT = (
    r"\bmount\b[^;&|]*?-t\s+(?:nfs4?|efs|lustre|cifs|fuse\.\w+)\b(?P<tail>[^;&|)]*)"
    r"|\b(?:gcsfuse|blobfuse2)\b"
)
BOOTSTRAP_FILE, DEFAULT_PORT = "ray_bootstrap_config.yaml", "6379"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_HOOK = "rtrain.cluster.connection.on_node_start"
TOKEN_SUFFIX = "/.ray/auth_token"
PINNED_PACKAGES = ("ray", "rtrain")
"""Packages whose versions must be equal on nodes and on this machine."""


@functools.cache
def _ray_schema() -> Any:
    """The schema of launcher files that ships with Ray."""
    return json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text(encoding="utf-8"))


def check_schema(file: ClusterFile, context: LintContext) -> RuleResults:
    import jsonschema

    for error in jsonschema.Draft7Validator(_ray_schema()).iter_errors(file.value):
        path = tuple(error.absolute_path)
        unknown_keys = re.findall(r"'([^']+)'", error.message) if error.validator == "additionalProperties" else []
        line = file.line(*path, *unknown_keys[:1])
        yield line, f"{format_path(path)}: {error.message}", "write a key or value that Ray's launcher supports"
    node_types = file.get("available_node_types")
    if isinstance(node_types, dict) and file.get("head_node_type") not in node_types:
        message = "head_node_type is not one of available_node_types"
        yield file.line("head_node_type"), message, f"write one of {', '.join(map(str, node_types))}"


def check_provider(file: ClusterFile, context: LintContext) -> RuleResults:
    if file.provider not in (None, "local", *CLOUDS):
        message = f"provider.type is {file.provider}: rules about nodes, addresses and permissions do not support it"
        yield file.line("provider", "type"), message, f"write {', '.join(CLOUDS)} or local"


# -------------------------------------------------------------------------------------------------------------- nodes


def check_public_address(file: ClusterFile, context: LintContext) -> RuleResults:
    provider = file.get("provider", default={})
    uses_internal_ips = provider.get("use_internal_ips") is True
    for node in file.node_types:
        if node.cloud and not (
            uses_internal_ips
            and node.cloud.is_internal(node.config)
            and not (provider.get("use_external_head_ip") and file.provider != "gcp")
        ):
            path = node.path("node_config") if uses_internal_ips else ("provider", "use_internal_ips")
            message = f"{node.name} gets a public address, which exposes Ray's ports to the internet"
            fix = "write use_internal_ips: true under provider, and no address of its own under node_config"
            yield file.line(*path), message, fix
            return


def check_zone(file: ClusterFile, context: LintContext) -> RuleResults:
    provider = file.get("provider", default={})
    region, zone_setting = provider.get("region"), provider.get("availability_zone")
    if file.provider not in ZONE_PATTERNS or not region or not zone_setting:
        return
    zones = [zone.strip() for zone in str(zone_setting).split(",")]
    for zone in zones:
        if not re.fullmatch(rf"{re.escape(str(region))}{ZONE_PATTERNS[file.provider]}", zone):
            message = f"the zone {zone} is not in the region {region}: no node starts"
            yield file.line("provider", "availability_zone"), message, f"name zones of {region}"
    allowed_names = {"region": [str(region)], "zone": zones}
    for path, value in file.walk():
        for match in REGION_REFERENCES.finditer(value) if isinstance(value, str) else ():
            kind, name = "zone" if match["zone"] else "region", match[match.lastgroup or 0]
            if name not in (allowed := allowed_names[kind]):
                message = f"{format_path(path)} names the {kind} {name}, and provider {' and '.join(allowed)}"
                yield file.line_of_text(path, name), message, f"write {allowed[0]}"


def check_head_tasks(file: ClusterFile, context: LintContext) -> RuleResults:
    for node in file.cloud_node_types:
        if node.is_head and get_nested(node.spec, "resources", "CPU") != 0 and file.max_workers:
            message = "tasks run on the head: if they exhaust its memory, the cluster is lost"
            yield file.line(*node.path("resources", "CPU")), message, "write resources: {CPU: 0} for the head"


def check_resources(file: ClusterFile, context: LintContext) -> RuleResults:
    for node in file.cloud_node_types:
        counts = (("CPU", node.instance.cpus), ("GPU", node.instance.gpus)) if node.instance else ()
        for name, available in counts:
            amount, line = node.resources.get(name, 0), file.line(*node.path("resources", name))
            if amount > available:
                message = f"{node.name} says {name}: {amount:g}, and {node.instance_type} has {available}"
                yield line, message, f"write {name}: {available}"
            elif name == "GPU" and available and not amount:
                message = (
                    f"{node.instance_type} has {available} GPU, which {node.name} does not declare: the autoscaler "
                    "does not count it"
                )
                yield line, message, f"write GPU: {available}"


def check_limits(file: ClusterFile, context: LintContext) -> RuleResults:
    if file.get("max_workers") is None and file.get("available_node_types"):
        message = f"max_workers is missing: Ray uses {DEFAULT_MAX_WORKERS}, whatever the node types say"
        yield 1, message, "write max_workers, which limits the hourly cost"
    idle_minutes = file.get("idle_timeout_minutes", default=5)
    if isinstance(idle_minutes, int | float) and idle_minutes > MAX_IDLE_MINUTES:
        message = f"an idle worker is billed for {idle_minutes:g} minutes"
        yield file.line("idle_timeout_minutes"), message, f"write {MAX_IDLE_MINUTES} or less; 5 is usual"
    for node in file.node_types:
        allowed = min(file.max_workers, node.max_workers(file.max_workers))
        if node.min_workers > allowed:
            message = f"{node.name} asks for {node.min_workers} nodes at least, and may have {allowed}"
            yield file.line(*node.path("min_workers")), message, "lower min_workers"


@functools.cache
def _max_recipe_workers() -> int:
    return max(config.load_config(name).recipe.train.workers for name in config.list_recipe_names())


def check_capacity(file: ClusterFile, context: LintContext) -> RuleResults:
    """Nodes that may be up together have capacity for the workers and data tasks of each recipe and of each command in
    the comments."""
    if not file.node_types or file.provider == "local":
        return
    limits = capacity.parse_autoscaler_limits(file.value)
    stated_workers = [int(number) for number in re.findall(r"--workers[ =](\d+)", file.text)]
    workers = max([_max_recipe_workers(), *stated_workers])
    requests = {device: capacity.ResourceRequest(device) for device in capacity.WORKER_RESOURCE}
    if any(placement.max_workers([], limits, request, workers) == workers for request in requests.values()):
        return
    request = requests[
        "gpu" if any(node.resources.get("GPU") for node in file.node_types if not node.is_head) else "cpu"
    ]
    message, fix = placement.explain_shortage(limits, request, workers)
    yield file.line("max_workers"), message, f"{fix} or take larger nodes"


def check_spot_head(file: ClusterFile, context: LintContext) -> RuleResults:
    for node in file.node_types:
        if node.is_head and node.is_spot:
            message = "the head is a spot node: its preemption ends the whole cluster and its jobs"
            yield file.line(*node.path("node_config")), message, "use an on-demand head"


def _spot_workers(file: ClusterFile) -> list[NodeType]:
    return [node for node in file.node_types if node.is_spot and not node.is_head]


def check_spot_watcher(file: ClusterFile, context: LintContext) -> RuleResults:
    spot_workers, watchers = _spot_workers(file), list(file.watchers())
    fix = f"start it in the background: python -m {WATCHER_MODULE} {file.provider} --address=$RAY_HEAD_IP:6379 &"
    if spot_workers and not watchers:
        message = f"no spot watcher runs on {spot_workers[0].name}: an interruption loses its last steps"
        yield file.line(WORKER_START), message, fix
    for command, cloud in watchers if spot_workers else ():
        if cloud != file.provider:
            action = f"asks the metadata service of {cloud}" if cloud else "has no cloud argument, and exits at once"
            message = f"the watcher {action}: the spot notice is missed on {spot_workers[0].name}"
            yield file.line_of_text(command.path, WATCHER_MODULE), message, fix


def check_spot_label(file: ClusterFile, context: LintContext) -> RuleResults:
    [(name, value)] = capacity.SPOT_LABELS.items()
    for node in _spot_workers(file):
        if not capacity.matches_labels(node.spec.get("labels"), capacity.SPOT_LABELS):
            message = f"{node.name} lacks the spot label: each loss without a notice counts as a crash"
            yield file.line(*node.path("labels")), message, f"write labels: {{{name}: {value}}}"


# ------------------------------------------------------------------------------------------------------- start of Ray


def check_token_mode(file: ClusterFile, context: LintContext) -> RuleResults:
    ray_starts = list(file.ray_starts())
    for name in (HEAD_START, WORKER_START):
        if file.get(name) and not any(start.command.path[0] == name for start in ray_starts):
            message = f"no command of {name} starts Ray: its token and ports cannot be checked"
            yield file.line(name), message, "write ray start as a command of its own"
    for start in ray_starts:
        path, line = format_path(start.command.path), file.line_of_text(start.command.path, "ray start")
        if start.environment.get("RAY_AUTH_MODE") != "token":
            message = f"{path} starts Ray without token mode: anyone who reaches its ports may run code"
            yield line, message, "export RAY_AUTH_MODE=token before ray start"
        elif not start.environment.get("RAY_AUTH_TOKEN_PATH"):
            fix = "export RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token before ray start"
            yield line, f"{path} does not set the path of the token", fix


def _copies_token(paths: Iterator[object]) -> bool:
    return any(str(path).endswith(TOKEN_SUFFIX) for path in paths)


def check_token_file(file: ClusterFile, context: LintContext) -> RuleResults:
    token_writes = [command for command in file.commands() if re.search(r">\s*\S*auth_token", command.text)]
    for command in token_writes:
        if not re.search(r"umask 0?[0-7]?77\b|chmod (?:0?600|u=rw)", command.text):
            message = "the token's file is readable by every user of the node"
            yield file.line_of_text(command.path, "auth_token"), message, "write it under umask 077"
    is_created = token_writes or _copies_token(iter(file.get("file_mounts") or ()))
    if not is_created and any(file.ray_starts()):
        message = "no command creates the token or copies it: Ray does not start in token mode"
        yield file.line(HEAD_START), message, f"make it first in {HEAD_START}, under umask 077"


def check_worker_token(file: ClusterFile, context: LintContext) -> RuleResults:
    copied_paths = [*(file.get("cluster_synced_files") or ()), *(file.get("file_mounts") or ())]
    if file.get(WORKER_START) and file.get(HEAD_START) and not _copies_token(iter(copied_paths)):
        message = "the workers do not get the head's token, and cannot join"
        yield file.line("cluster_synced_files"), message, "name the token's file in cluster_synced_files"


def check_versions(file: ClusterFile, context: LintContext) -> RuleResults:
    pins, local_versions = context.load_constraints(), {name: installed_version(name) for name in PINNED_PACKAGES}
    for number, line in enumerate(file.text.splitlines(), 1):
        if (pin := re.search(r"\bs3fs==([\w.]+)", line)) and pins.get("fsspec") not in (None, pin[1]):
            message = f"s3fs {pin[1]} requires fsspec {pin[1]}, and constraints.txt pins {pins['fsspec']}"
            yield number, message, f"write s3fs=={pins['fsspec']}"
        for package, local_version in local_versions.items():
            pattern = rf"(?<![\w.-]){package}(?:\[[\w,\s]*\])?==([\d.]+\w*)|\brayproject/{package}(?:-ml)?:(\d[\w.]*)"
            pattern += r"|\bRay version that the nodes get \(([\d.]+)\)" if package == "ray" else ""
            for match in re.finditer(pattern, line):
                version = match[match.lastindex or 0]
                if local_version is not None and version != local_version:
                    message = f"nodes get {package} {version}, and this machine has {local_version}"
                    yield number, message, f"write {package}=={local_version}, or install {version} here"
    for remote, local in (file.get("file_mounts") or {}).items():
        for package, local_version in local_versions.items() if str(local).endswith("constraints.txt") else ():
            version = pins.get(package)
            if version and local_version and version != local_version:
                message = f"nodes get {package} {version} by {local}, and this machine has {local_version}"
                yield file.line("file_mounts", remote), message, f"install {package}=={version} here, or fix {local}"


def check_file_mounts(file: ClusterFile, context: LintContext) -> RuleResults:
    for remote, local in (file.get("file_mounts") or {}).items():
        if not str(local).startswith("~") and not (context.folder / str(local)).exists():
            message = f"{local}, which is copied to the nodes, does not exist"
            yield file.line("file_mounts", remote), message, "name a path relative to the folder of the file"


def check_dashboard(file: ClusterFile, context: LintContext) -> RuleResults:
    for start in file.ray_starts():
        host = start.options.get("--dashboard-host", LOOPBACK[0])
        if host not in LOOPBACK:
            message = f"the dashboard and the job API listen on {host}"
            fix = "write --dashboard-host=127.0.0.1, and reach them by SSH: ray dashboard FILE"
            yield file.line_of_text(start.command.path, "--dashboard-host"), message, fix


def check_autoscaler_file(file: ClusterFile, context: LintContext) -> RuleResults:
    for start in file.ray_starts() if file.provider not in (None, "local") else ():
        path = start.options.get("--autoscaling-config", "")
        name = path.rpartition("/")[2]
        if start.is_head and "--autoscaling-config" not in start.options:
            message, fix = "the head has no --autoscaling-config: no worker starts", "add"
            line = file.line_of_text(start.command.path, "ray start")
        elif path and name != BOOTSTRAP_FILE:
            message, fix = f"the autoscaler's file is {BOOTSTRAP_FILE} on the head, not {name}", "write"
            line = file.line_of_text(start.command.path, "--autoscaling-config")
        else:
            continue
        yield line, message, f"{fix} --autoscaling-config=~/{BOOTSTRAP_FILE}"


def check_worker_joins_head(file: ClusterFile, context: LintContext) -> RuleResults:
    """Workers join the head at its address and port."""
    ray_starts = list(file.ray_starts())
    head_ports = [start.options.get("--port") or DEFAULT_PORT for start in ray_starts if start.is_head]
    for start in ray_starts:
        if start.is_head or start.command.path[0] == HEAD_START:
            continue
        address = start.options.get("--address")
        if not address:
            line = file.line_of_text(start.command.path, "ray start")
            yield line, "ray start needs --head or --address", "write --address=$RAY_HEAD_IP:6379"
        elif head_ports and (port := address.rpartition(":")[2]).isdigit() and port not in head_ports:
            message = f"workers connect to the head at port {port}, but it listens on {head_ports[0]}: none joins"
            line = file.line_of_text(start.command.path, "--address")
            yield line, message, f"write --address=$RAY_HEAD_IP:{head_ports[0]}"


def check_storage(file: ClusterFile, context: LintContext) -> RuleResults:
    if file.provider is None or not file.get(HEAD_START):
        return
    for command in file.commands():
        if re.search(S3_MOUNT, command.text):
            message = "a mounted S3 bucket supports neither appends nor renames, and cannot hold a run"
            fix = "mount EFS; cluster.storage=s3://BUCKET copies runs to the bucket"
            yield file.line_of_text(command.path, "s3"), message, fix
    matches = [(command, re.search(SHARED_STORAGE_MOUNT, command.text)) for command in file.commands()]
    mounts = [(command, match) for command, match in matches if match]
    mounted_on = {
        "head" if command.is_head_only else "workers" if command.is_worker_only else "all" for command, _ in mounts
    }
    if "all" not in mounted_on and mounted_on != {"head", "workers"}:
        location = f"on the {next(iter(mounted_on))} alone" if mounted_on else "nowhere"
        message = f"a folder that all nodes share is mounted {location}: other nodes cannot read its checkpoints"
        yield file.line("setup_commands"), message, "mount one (NFS, EFS, Filestore) in setup_commands"
    for command, match in mounts:
        if re.search(r"(?:^|[\s,])soft(?:[\s,]|$)", match["tail"] or ""):
            message = "a soft mount: a short outage of the storage breaks a checkpoint"
            yield file.line_of_text(command.path, "soft"), message, "mount it hard"


def check_start_hook(file: ClusterFile, context: LintContext) -> RuleResults:
    for start in file.ray_starts():
        hook = start.environment.get("RAY_START_HOOK")
        if start.is_head and not hook:
            message = "the head opens the Ray Client's port, 10001, which rtrain does not use"
            line = file.line_of_text(start.command.path, "ray start")
            yield line, message, f"export RAY_START_HOOK={START_HOOK} before ray start"
        if hook and not (hook.startswith("rtrain.") and _can_import(hook)):
            line = file.line_of_text(start.command.path, "RAY_START_HOOK")
            yield line, f"there is no {hook}: Ray does not start", f"write {START_HOOK}"


def _can_import(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def check_command_names(file: ClusterFile, context: LintContext) -> RuleResults:
    recipes = config.list_recipe_names()
    for number, line in enumerate(file.text.splitlines(), 1):
        for verb, recipe in re.findall(r"(?:python -m rtrain|cluster submit\b.* --) ([a-z]+)(?: ([a-z]\S*))?", line):
            if context.verbs and verb not in context.verbs:
                yield number, f"rtrain has no verb {verb}", f"it has {', '.join(sorted(context.verbs))}"
            elif verb in ("train", "tune") and re.fullmatch(r"[\w-]+", recipe) and recipe not in recipes:
                yield number, f"there is no recipe {recipe}", f"there are {', '.join(recipes)}"


LauncherRule = Callable[[ClusterFile, LintContext], RuleResults]
RULES: tuple[tuple[str, Level, LauncherRule], ...] = (
    ("schema", "error", check_schema),
    ("provider", "error", check_provider),
    ("public-address", "error", check_public_address),
    ("zone", "error", check_zone),
    ("head-tasks", "warning", check_head_tasks),
    ("resources", "error", check_resources),
    ("limits", "error", check_limits),
    ("spot-head", "error", check_spot_head),
    ("spot-watcher", "warning", check_spot_watcher),
    ("spot-label", "warning", check_spot_label),
    ("token-mode", "error", check_token_mode),
    ("token-file", "error", check_token_file),
    ("worker-token", "error", check_worker_token),
    ("version", "error", check_versions),
    ("mount", "error", check_file_mounts),
    ("dashboard", "error", check_dashboard),
    ("autoscaler", "error", check_autoscaler_file),
    ("address", "error", check_worker_joins_head),
    ("storage", "error", check_storage),
    ("start-hook", "error", check_start_hook),
    ("command-names", "error", check_command_names),
    ("capacity", "error", check_capacity),
)
