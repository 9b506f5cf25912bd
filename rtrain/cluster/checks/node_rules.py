"""Rules about nodes: network access, location, resources, spot nodes."""

import re
from collections.abc import Iterator

from rtrain.cluster import capacity
from rtrain.cluster.checks.clouds import NodeTypeConfig, get_nested, iter_node_types
from rtrain.cluster.checks.findings import LintContext, RuleResults, format_path
from rtrain.cluster.checks.shell_commands import WORKER_START, Command, iter_commands, split_commands
from rtrain.cluster.checks.yaml_document import Document
from rtrain.cluster.instance_types import INSTANCES_BY_NAME

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
WATCHER_MODULE = "rtrain.cluster.spot_watcher"


def check_public_address(document: Document, context: LintContext) -> RuleResults:
    provider = document.get("provider", default={})
    for node in iter_node_types(document):
        if not node.cloud.is_internal(provider, node.config):
            path = ("provider", "use_internal_ips") if provider.get("use_internal_ips") is not True else node.path()
            message = f"{node.name} gets a public address, which exposes Ray's ports to the internet"
            fix = "write use_internal_ips: true under provider, and no address of its own under node_config"
            yield document.line(*path), message, fix
            return


def check_zone(document: Document, context: LintContext) -> RuleResults:
    provider = document.get("provider", default={})
    region, zone_setting = provider.get("region"), provider.get("availability_zone")
    if provider.get("type") not in ("aws", "gcp") or not region or not zone_setting:
        return
    zones = [zone.strip() for zone in str(zone_setting).split(",")]
    for zone_name in zones:
        if not re.fullmatch(rf"{re.escape(str(region))}{ZONE_PATTERNS[provider['type']]}", zone_name):
            message = f"the zone {zone_name} is not in the region {region}: no node starts"
            yield document.line("provider", "availability_zone"), message, f"name zones of {region}"
    allowed_names = {"region": [str(region)], "zone": zones}
    for path, value in document.walk():
        for match in REGION_REFERENCES.finditer(value) if isinstance(value, str) else ():
            kind, name = "zone" if match["zone"] else "region", match[match.lastgroup or 0]
            if name not in allowed_names[kind]:
                message = (
                    f"{format_path(path)} names the {kind} {name}, and provider {' and '.join(allowed_names[kind])}"
                )
                yield document.line_of_text(path, name), message, f"write {allowed_names[kind][0]}"


def check_head_tasks(document: Document, context: LintContext) -> RuleResults:
    for node in iter_node_types(document):
        cpus = get_nested(node.spec, "resources", "CPU")
        if node.is_head and cpus != 0 and document.get("max_workers", default=capacity.DEFAULT_MAX_WORKERS):
            path = ("available_node_types", node.name, "resources")
            message = "tasks run on the head: if they exhaust its memory, the cluster is lost"
            yield document.line(*path, "CPU"), message, "write resources: {CPU: 0} for the head"


def check_resources(document: Document, context: LintContext) -> RuleResults:
    for node in iter_node_types(document):
        instance_type, declared = INSTANCES_BY_NAME.get(node.instance_type or ""), node.spec.get("resources") or {}
        for name, available in (("CPU", instance_type.cpus), ("GPU", instance_type.gpus)) if instance_type else ():
            path = ("available_node_types", node.name, "resources", name)
            if declared.get(name, 0) > available:
                message = f"{node.name} says {name}: {declared[name]}, and {node.instance_type} has {available}"
                yield document.line(*path), message, f"write {name}: {available}"
            elif name == "GPU" and available and not declared.get(name):
                message = (
                    f"{node.instance_type} has {available} GPU, which {node.name} does not declare: the autoscaler "
                    "does not count it"
                )
                yield document.line(*path), message, f"write GPU: {available}"


def check_limits(document: Document, context: LintContext) -> RuleResults:
    if document.get("max_workers") is None and document.get("available_node_types"):
        message = f"max_workers is missing: Ray uses {capacity.DEFAULT_MAX_WORKERS}, whatever the node types say"
        yield 1, message, "write max_workers, which limits the hourly cost"
    idle_minutes = document.get("idle_timeout_minutes", default=5)
    if isinstance(idle_minutes, int | float) and idle_minutes > MAX_IDLE_MINUTES:
        message = f"an idle worker is billed for {idle_minutes:g} minutes"
        yield document.line("idle_timeout_minutes"), message, f"write {MAX_IDLE_MINUTES} or less; 5 is usual"
    node_types = document.get("available_node_types", default={})
    max_workers = document.get("max_workers", default=capacity.DEFAULT_MAX_WORKERS)
    for name, spec in node_types.items() if isinstance(node_types, dict) else ():
        min_workers, limit = get_nested(spec, "min_workers") or 0, get_nested(spec, "max_workers")
        allowed = max_workers if limit is None else min(limit, max_workers)
        if min_workers > allowed and name != document.get("head_node_type"):
            message = f"{name} asks for {min_workers} nodes at least, and may have {allowed}"
            yield document.line("available_node_types", name, "min_workers"), message, "lower min_workers"


def check_spot_head(document: Document, context: LintContext) -> RuleResults:
    for node in iter_node_types(document):
        if node.is_head and node.is_spot:
            message = "the head is a spot node: its preemption ends the whole cluster and its jobs"
            yield document.line(*node.path()), message, "use an on-demand head"


def _spot_workers(document: Document) -> list[NodeTypeConfig]:
    return [node for node in iter_node_types(document) if node.is_spot and not node.is_head]


def _watcher_commands(document: Document) -> Iterator[tuple[Command, str | None]]:
    """Commands that start the watcher, with their cloud."""
    for command in iter_commands(document):
        for words in split_commands(command.text):
            if WATCHER_MODULE in words and not command.is_head_only:
                arguments = [
                    word for word in words[words.index(WATCHER_MODULE) + 1 :] if not word.startswith(("-", ">", "<"))
                ]
                yield command, arguments[0] if arguments else None


def check_spot_watcher(document: Document, context: LintContext) -> RuleResults:
    spot_workers, cloud = _spot_workers(document), document.get("provider", "type")
    fix = f"start it in the background: python -m {WATCHER_MODULE} {cloud} --address=$RAY_HEAD_IP:6379 &"
    if spot_workers and not any(_watcher_commands(document)):
        message = f"no spot watcher runs on {spot_workers[0].name}: an interruption loses its last steps"
        yield document.line(WORKER_START), message, fix
    for command, watched_cloud in _watcher_commands(document) if spot_workers else ():
        if watched_cloud != cloud:
            problem = (
                f"asks the metadata service of {watched_cloud}"
                if watched_cloud
                else "has no cloud argument, and exits at once"
            )
            message = f"the watcher {problem}: the spot notice is missed on {spot_workers[0].name}"
            yield document.line_of_text(command.path, WATCHER_MODULE), message, fix


def check_spot_label(document: Document, context: LintContext) -> RuleResults:
    [(name, value)] = capacity.SPOT_LABELS.items()
    for node in _spot_workers(document):
        if not capacity.matches_labels(node.spec.get("labels"), capacity.SPOT_LABELS):
            message = f"{node.name} lacks the spot label: each loss without a notice counts as a crash"
            yield (
                document.line("available_node_types", node.name, "labels"),
                message,
                f"write labels: {{{name}: {value}}}",
            )
