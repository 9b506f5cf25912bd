"""Table of each cloud's node settings in a launcher file, for the rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.cluster.checks.yaml_document import Document, YamlPath

ConfigMapping = Mapping[str, Any]


def get_nested(config: Any, *path: str | int) -> Any:
    """Get a nested value of maps and lists; None if missing."""
    for key in path:
        try:
            config = config[key]
        except (KeyError, IndexError, TypeError):
            return None
    return config


@dataclass(frozen=True)
class CloudSchema:
    """Accessors of a cloud's `node_config`."""

    instance_type_path: tuple[str, ...]
    """Path of the instance type."""
    is_spot: Callable[[ConfigMapping], bool]
    is_internal: Callable[[ConfigMapping, ConfigMapping], bool]
    """Whether a node with this provider and node_config has no public address."""


def _is_gcp_spot(node: ConfigMapping) -> bool:
    scheduling = node.get("scheduling") or {}
    schedulings: list[ConfigMapping] = scheduling if isinstance(scheduling, list) else [scheduling]
    return any(
        get_nested(part, "preemptible") or get_nested(part, "provisioningModel") == "SPOT" for part in schedulings
    )


def _is_gcp_internal(provider: ConfigMapping, node: ConfigMapping) -> bool:
    interfaces: list[Any] = node.get("networkInterfaces") or []
    return (
        provider.get("use_internal_ips") is True
        and bool(interfaces)
        and not any(get_nested(face, "accessConfigs") for face in interfaces)
    )


def _is_internal(provider: ConfigMapping, node: ConfigMapping) -> bool:
    return provider.get("use_internal_ips") is True and not provider.get("use_external_head_ip")


CLOUDS: dict[str, CloudSchema] = {
    "aws": CloudSchema(
        instance_type_path=("InstanceType",),
        is_spot=lambda node: get_nested(node, "InstanceMarketOptions", "MarketType") == "spot",
        is_internal=lambda provider, node: (
            _is_internal(provider, node)
            and not any(get_nested(face, "AssociatePublicIpAddress") for face in node.get("NetworkInterfaces") or ())
        ),
    ),
    "gcp": CloudSchema(
        instance_type_path=("machineType",),
        is_spot=_is_gcp_spot,
        is_internal=_is_gcp_internal,
    ),
    "azure": CloudSchema(
        instance_type_path=("azure_arm_parameters", "vmSize"),
        is_spot=lambda node: str(get_nested(node, "azure_arm_parameters", "priority")).lower() == "spot",
        is_internal=_is_internal,
    ),
}


@dataclass(frozen=True)
class NodeTypeConfig:
    """A node type of a launcher file."""

    name: str
    spec: Mapping[str, Any]
    cloud: CloudSchema
    is_head: bool

    @property
    def config(self) -> ConfigMapping:
        node_config = self.spec.get("node_config")
        return node_config if isinstance(node_config, dict) else {}

    @property
    def instance_type(self) -> str | None:
        name = get_nested(self.config, *self.cloud.instance_type_path)
        return name if isinstance(name, str) else None

    @property
    def is_spot(self) -> bool:
        return self.cloud.is_spot(self.config)

    def path(self, *keys: str | int) -> YamlPath:
        return ("available_node_types", self.name, "node_config", *keys)


def iter_node_types(document: Document) -> Iterator[NodeTypeConfig]:
    """Iterate over the node types of a supported cloud."""
    provider, types = document.get("provider", "type"), document.get("available_node_types")
    cloud = CLOUDS.get(provider) if isinstance(provider, str) else None
    if cloud is None or not isinstance(types, dict):
        return
    head_type = document.get("head_node_type")
    for name, spec in types.items():
        if isinstance(spec, dict):
            yield NodeTypeConfig(name, spec, cloud, name == head_type)
