"""Model of a cluster file of Ray's launcher: its lines, node types and commands, and the launcher's own commands on it.

A path is the tuple of keys and indices of a value. A value behind an alias has the line of its anchor. Prices of
instance types are on-demand list prices for Linux in dollars: AWS us-west-2, Google us-central1, Azure westus2. They
change, and are no invoice.
"""

import ipaddress
import itertools
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import yaml

from rtrain.core import atomic_write
from rtrain.core.errors import ConfigError, Problem, UserError, suggest_path

YamlPath = tuple[str | int, ...]
ConfigMapping = Mapping[str, Any]
FILL_IN = "FILL-IN"
"""Text of a cluster file at values that the user must write."""
DEFAULT_MAX_WORKERS: Final = 2
"""Worker nodes that Ray's launcher allows if its file has no `max_workers`."""
HEAD_START, WORKER_START = "head_start_ray_commands", "worker_start_ray_commands"
WATCHER_MODULE = "rtrain.cluster.spot_watcher"
SEPARATORS = "();&|"
"""Characters that end a simple command."""


# --------------------------------------------------------------------------------------------------------- documents


def format_path(path: YamlPath) -> str:
    """Format a YAML path: `provider.region`, `setup_commands[2]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


def get_nested(config: Any, *path: str | int, default: Any = None) -> Any:
    """Get a nested value of maps and lists; `default` if missing."""
    for key in path:
        try:
            config = config[key]
        except (KeyError, IndexError, TypeError):
            return default
    return config


@dataclass(frozen=True)
class Document:
    text: str
    """Text of the whole file."""
    value: Any
    lines: Mapping[YamlPath, int]
    """1-based line of each key or list element."""

    def get(self, *path: str | int, default: Any = None) -> Any:
        return get_nested(self.value, *path, default=default)

    def line(self, *path: str | int) -> int:
        """The line of a path, or of its innermost existing parent."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    def line_of_text(self, path: YamlPath, text: str) -> int:
        """The line of the first `text` at or after the line of `path`; the line of `path` if it is not found."""
        first_line = self.line(*path)
        lines = self.text.splitlines()[first_line - 1 :]
        return next((number for number, line in enumerate(lines, first_line) if text in line), first_line)

    def walk(self, path: YamlPath = ()) -> Iterator[tuple[YamlPath, Any]]:
        """Iterate over all values below a path, with their paths."""
        node = self.get(*path)
        entries: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in entries:
            yield (*path, key), value
            yield from self.walk((*path, key))


class InvalidYaml(Exception):
    """The text is invalid YAML; holds the reason and its line."""

    def __init__(self, reason: str, line: int):
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass
class _LineRecorder:
    loader: yaml.SafeLoader
    lines: dict[YamlPath, int] = field(default_factory=dict)

    def record(self, node: yaml.Node, path: YamlPath) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                # The merge key `<<` has no value of its own.
                is_merge_key = key.tag == "tag:yaml.org,2002:merge"
                name = key.value if is_merge_key else self.loader.construct_object(key, deep=True)
                self.lines[(*path, name)] = key.start_mark.line + 1
                self.record(value, (*path, name))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.lines[(*path, number)] = value.start_mark.line + 1
                self.record(value, (*path, number))


def parse_documents(text: str) -> list[Document]:
    """Parse the documents of a file; empty ones are skipped. Raises `InvalidYaml`."""
    loader, documents = None, []
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node: Any = loader.get_node()
            recorder = _LineRecorder(loader)
            recorder.record(node, ())
            value = loader.construct_document(node)
            if value is not None:
                recorder.lines[()] = node.start_mark.line + 1
                documents.append(Document(text, value, recorder.lines))
    # RecursionError: an alias inside its own anchor. ValueError: an invalid date.
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InvalidYaml(str(getattr(error, "problem", None) or error), mark.line + 1 if mark else 1) from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


def require_number(value: object, name: str) -> float:
    """Require a number of an unchecked cluster file. Raises `ConfigError`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    fix = "write a number; run rtrain cluster lint"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is not a number", fix, code="wrong_type")])


def require_mapping(value: object, name: str) -> dict[Any, Any]:
    """Require a map of an unchecked cluster file; empty if missing. Raises `ConfigError`."""
    if value is None or isinstance(value, dict):
        return value or {}
    fix = f"write {name.rpartition('.')[2]}: {{NAME: VALUE}}; run rtrain cluster lint"
    raise ConfigError([Problem(f"{name} of the cluster's file", value, "is no map", fix, code="wrong_type")])


# --------------------------------------------------------------------------------------------------------- node types


class InstanceType(NamedTuple):
    cloud: str
    name: str
    cpus: int
    memory_gb: float
    dollars_per_hour: float
    """On-demand price per hour."""
    gpu: str | None = None
    gpus: int = 0
    efa_interfaces: int = 0
    """AWS Elastic Fabric Adapter cards; 0 if the type supports none."""


INSTANCES = (
    InstanceType("aws", "m7i.large", 2, 8, 0.101),
    InstanceType("aws", "m7i.xlarge", 4, 16, 0.202),
    InstanceType("aws", "m7i.2xlarge", 8, 32, 0.403),
    InstanceType("aws", "c7i.xlarge", 4, 8, 0.179),
    InstanceType("aws", "c7i.2xlarge", 8, 16, 0.357),
    InstanceType("aws", "c7i.4xlarge", 16, 32, 0.714),
    InstanceType("aws", "c7i.8xlarge", 32, 64, 1.428),
    InstanceType("aws", "g4dn.2xlarge", 8, 32, 0.752, "T4", 1),
    InstanceType("aws", "g4dn.8xlarge", 32, 128, 2.176, "T4", 1, efa_interfaces=1),
    InstanceType("aws", "g5.2xlarge", 8, 32, 1.212, "A10G", 1),
    InstanceType("aws", "g5.8xlarge", 32, 128, 2.448, "A10G", 1, efa_interfaces=1),
    InstanceType("aws", "g6.2xlarge", 8, 32, 0.978, "L4", 1),
    InstanceType("aws", "g6.8xlarge", 32, 128, 2.014, "L4", 1, efa_interfaces=1),
    InstanceType("aws", "g6e.2xlarge", 8, 64, 2.242, "L40S", 1),
    InstanceType("aws", "g6e.8xlarge", 32, 256, 4.529, "L40S", 1, efa_interfaces=1),
    InstanceType("aws", "p4d.24xlarge", 96, 1152, 21.958, "A100", 8, efa_interfaces=4),
    InstanceType("aws", "p5.48xlarge", 192, 2048, 55.04, "H100", 8, efa_interfaces=32),
    InstanceType("gcp", "n2-standard-2", 2, 8, 0.097),
    InstanceType("gcp", "n2-standard-8", 8, 32, 0.388),
    InstanceType("gcp", "g2-standard-8", 8, 32, 0.854, "L4", 1),
    InstanceType("gcp", "a2-highgpu-1g", 12, 85, 3.673, "A100", 1),
    InstanceType("azure", "Standard_D2s_v5", 2, 8, 0.096),
    InstanceType("azure", "Standard_F8s_v2", 8, 16, 0.338),
    InstanceType("azure", "Standard_NC8as_T4_v3", 8, 56, 0.752, "T4", 1),
    InstanceType("azure", "Standard_NC24ads_A100_v4", 24, 220, 3.673, "A100", 1),
)
INSTANCES_BY_NAME = {instance.name: instance for instance in INSTANCES}


def find_instance_with_gpu(cloud: str, gpu: str) -> InstanceType | None:
    return next((instance for instance in INSTANCES if instance.cloud == cloud and instance.gpu == gpu), None)


def list_gpus(cloud: str) -> list[str]:
    return sorted({instance.gpu for instance in INSTANCES if instance.cloud == cloud and instance.gpu})


@dataclass(frozen=True)
class CloudSchema:
    """Accessors of a cloud's `node_config`."""

    instance_type_path: tuple[str, ...]
    """Path of the instance type."""
    is_spot: Callable[[ConfigMapping], bool]
    is_internal: Callable[[ConfigMapping], bool]
    """Whether a node has no public address, if the provider uses internal addresses."""
    fills_resources: bool = False
    """Whether Ray's node provider adds the processors and GPUs of the instance type to the declared resources: only the
    one of AWS does (`fillout_available_node_types_resources`, Ray 2.60)."""


def _is_gcp_spot(node: ConfigMapping) -> bool:
    scheduling = node.get("scheduling") or {}
    schedulings: list[ConfigMapping] = scheduling if isinstance(scheduling, list) else [scheduling]
    return any(
        get_nested(part, "preemptible") or get_nested(part, "provisioningModel") == "SPOT" for part in schedulings
    )


def _is_gcp_internal(node: ConfigMapping) -> bool:
    interfaces: list[Any] = node.get("networkInterfaces") or []
    return bool(interfaces) and not any(get_nested(face, "accessConfigs") for face in interfaces)


CLOUDS: dict[str, CloudSchema] = {
    "aws": CloudSchema(
        ("InstanceType",),
        lambda node: get_nested(node, "InstanceMarketOptions", "MarketType") == "spot",
        lambda node: (
            not any(get_nested(face, "AssociatePublicIpAddress") for face in node.get("NetworkInterfaces") or ())
        ),
        fills_resources=True,
    ),
    "gcp": CloudSchema(("machineType",), _is_gcp_spot, _is_gcp_internal),
    "azure": CloudSchema(
        ("azure_arm_parameters", "vmSize"),
        lambda node: str(get_nested(node, "azure_arm_parameters", "priority")).lower() == "spot",
        lambda node: True,
    ),
}


@dataclass(frozen=True)
class NodeType:
    """A node type of a cluster file. Properties raise `ConfigError` for a value of a wrong type."""

    name: str
    spec: ConfigMapping
    cloud: CloudSchema | None
    """None for the user's own machines, and for providers without a schema."""
    is_head: bool

    @property
    def config(self) -> ConfigMapping:
        node_config = self.spec.get("node_config")
        return node_config if isinstance(node_config, dict) else {}

    @property
    def instance_type(self) -> str | None:
        name = get_nested(self.config, *self.cloud.instance_type_path) if self.cloud else None
        return name if isinstance(name, str) else None

    @property
    def instance(self) -> InstanceType | None:
        """The instance type; None if it is not in the table."""
        return INSTANCES_BY_NAME.get(self.instance_type or "")

    @property
    def is_spot(self) -> bool:
        return self.cloud is not None and self.cloud.is_spot(self.config)

    @property
    def resources(self) -> dict[str, float]:
        """Resources of a node, as the autoscaler counts them: declared amounts override amounts that Ray fills in."""
        instance = self.instance if self.cloud and self.cloud.fills_resources else None
        defaults = {"CPU": instance.cpus, "GPU": instance.gpus} if instance else {}
        declared = require_mapping(self.spec.get("resources"), f"{self.name}.resources")
        amounts = {name: amount for name, amount in defaults.items() if amount} | declared
        return {name: require_number(amount, f"{self.name}.resources.{name}") for name, amount in amounts.items()}

    @property
    def labels(self) -> dict[str, str]:
        labels = require_mapping(self.spec.get("labels"), f"{self.name}.labels")
        return {name: str(value) for name, value in labels.items()}

    @property
    def min_workers(self) -> int:
        """Nodes that are always up. The head is no worker."""
        return 0 if self.is_head else self._count("min_workers", 0)

    def max_workers(self, default: int) -> int:
        return 0 if self.is_head else self._count("max_workers", default)

    def _count(self, key: str, default: int) -> int:
        return int(require_number(self.spec.get(key, default), f"{self.name}.{key}"))

    def path(self, *keys: str | int) -> YamlPath:
        return ("available_node_types", self.name, *keys)


# ----------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Command:
    path: YamlPath
    text: str

    @property
    def is_head_only(self) -> bool:
        return str(self.path[0]).startswith("head_")

    @property
    def is_worker_only(self) -> bool:
        return str(self.path[0]).startswith("worker_") or self.path[0] == "available_node_types"


@dataclass(frozen=True)
class RayStart:
    """A `ray start` in a command."""

    command: Command
    options: dict[str, str]
    """Options; the value of a flag is empty."""
    environment: dict[str, str]
    """Environment variables: exported before, or set for this command only."""

    @property
    def is_head(self) -> bool:
        return "--head" in self.options


def split_commands(text: str) -> list[list[str]]:
    """Split a shell command into simple commands and their words; quoted text is one word."""
    text = re.sub(r"(?m)^\s*#.*$", "", text.replace("\\\n", " ")).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(SEPARATORS):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:  # unbalanced quotes
        commands = [part.split() for part in re.split(r"[;&|\n]", text)]
    return [part for part in commands if part]


def _parse_assignments(words: list[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words if re.match(r"[A-Za-z_]\w*=", word))
    return {name: value for name, _, value in pairs}


def _find_ray_start(words: list[str]) -> int | None:
    """The position of `ray start` in a command; `ray` may be a path."""
    pairs = enumerate(itertools.pairwise(words))
    return next((n for n, (word, verb) in pairs if word.rpartition("/")[2] == "ray" and verb == "start"), None)


def parse_options(words: list[str]) -> dict[str, str]:
    """Options of a command line, written `--name=value` or `--name value`."""
    options: dict[str, str] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            following = words[position + 1] if position + 1 < len(words) else "--"
            options[name] = value if has_value else "" if following.startswith("-") else following
    return options


# ---------------------------------------------------------------------------------------------------------- the file


class ClusterFile(Document):
    """A file of Ray's launcher: the one interpretation for lint, rehearsal, capacity and prices."""

    @classmethod
    def from_document(cls, document: Document) -> Self:
        return cls(document.text, document.value, document.lines)

    @classmethod
    def from_mapping(cls, value: ConfigMapping) -> Self:
        """A file whose lines are unknown."""
        return cls("", value, {})

    @property
    def provider(self) -> Any:
        """The type of the provider: a key of `CLOUDS`, `local`, or any other value."""
        return self.get("provider", "type")

    @property
    def max_workers(self) -> int:
        """Maximum worker nodes of all types. Raises `ConfigError`."""
        return int(require_number(self.get("max_workers", default=DEFAULT_MAX_WORKERS), "max_workers"))

    @property
    def node_types(self) -> list[NodeType]:
        specs, head_type = self.get("available_node_types"), self.get("head_node_type")
        cloud = CLOUDS.get(self.provider) if isinstance(self.provider, str) else None
        return [
            NodeType(name, spec if isinstance(spec, dict) else {}, cloud, name == head_type)
            for name, spec in (specs.items() if isinstance(specs, dict) else ())
        ]

    @property
    def cloud_node_types(self) -> list[NodeType]:
        """Node types with a known `node_config`; empty for a provider without a schema."""
        return [node for node in self.node_types if node.cloud is not None]

    def commands(self) -> Iterator[Command]:
        """Iterate over all commands, in file order."""
        for path, value in self.walk():
            if isinstance(value, str) and len(path) > 1 and str(path[-2]).endswith("_commands"):
                yield Command(path, value)

    def ray_starts(self) -> Iterator[RayStart]:
        """Iterate over all `ray start` commands; a shell command may have several."""
        for command in self.commands():
            exported = dict[str, str]()
            for words in split_commands(command.text):
                if words[:1] == ["export"]:
                    exported |= _parse_assignments(words)
                if (position := _find_ray_start(words)) is not None:
                    options, environment = parse_options(words[position + 2 :]), _parse_assignments(words[:position])
                    yield RayStart(command, options, exported | environment)

    def watchers(self) -> Iterator[tuple[Command, str | None]]:
        """Iterate over the commands that start the spot watcher on workers, with its cloud, or None without one."""
        for command in self.commands():
            for words in split_commands(command.text):
                if WATCHER_MODULE in words and not command.is_head_only:
                    arguments = words[words.index(WATCHER_MODULE) + 1 :]
                    yield command, next((word for word in arguments if not word.startswith(("-", ">", "<"))), None)


# ----------------------------------------------------------------------------------------- commands of Ray's launcher


def run_ray(*words: str) -> int:
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
