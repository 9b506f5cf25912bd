"""How each cloud's nodes are written down in a launcher's file: one table, which the rules read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.cluster.checks.yaml_document import Document, Place

Settings = Mapping[str, Any]


def get(settings: Any, *place: str | int) -> Any:
    """A value inside of maps and lists; None where there is none."""
    for key in place:
        try:
            settings = settings[key]
        except (KeyError, IndexError, TypeError):
            return None
    return settings


@dataclass(frozen=True)
class Cloud:
    """What a rule wants to know of a node's `node_config`."""

    instance: tuple[str, ...]
    """Where the name of the instance type stands."""
    is_spot: Callable[[Settings], bool]
    internal: Callable[[Settings, Settings], bool]
    """Whether a node of such a provider and node_config has no public address."""


def _gcp_spot(node: Settings) -> bool:
    scheduling = node.get("scheduling") or {}
    parts: list[Settings] = scheduling if isinstance(scheduling, list) else [scheduling]
    return any(get(part, "preemptible") or get(part, "provisioningModel") == "SPOT" for part in parts)


def _gcp_internal(provider: Settings, node: Settings) -> bool:
    faces: list[Any] = node.get("networkInterfaces") or []
    return (
        provider.get("use_internal_ips") is True
        and bool(faces)
        and not any(get(face, "accessConfigs") for face in faces)
    )


def _internal(provider: Settings, node: Settings) -> bool:
    return provider.get("use_internal_ips") is True and not provider.get("use_external_head_ip")


CLOUDS: dict[str, Cloud] = {
    "aws": Cloud(
        instance=("InstanceType",),
        is_spot=lambda node: get(node, "InstanceMarketOptions", "MarketType") == "spot",
        internal=lambda provider, node: (
            _internal(provider, node)
            and not any(get(face, "AssociatePublicIpAddress") for face in node.get("NetworkInterfaces") or ())
        ),
    ),
    "gcp": Cloud(
        instance=("machineType",),
        is_spot=_gcp_spot,
        internal=_gcp_internal,
    ),
    "azure": Cloud(
        instance=("azure_arm_parameters", "vmSize"),
        is_spot=lambda node: str(get(node, "azure_arm_parameters", "priority")).lower() == "spot",
        internal=_internal,
    ),
}


@dataclass(frozen=True)
class Node:
    """A node type of a file."""

    name: str
    kind: Mapping[str, Any]
    cloud: Cloud
    is_head: bool

    @property
    def config(self) -> Settings:
        found = self.kind.get("node_config")
        return found if isinstance(found, dict) else {}

    @property
    def instance(self) -> str | None:
        found = get(self.config, *self.cloud.instance)
        return found if isinstance(found, str) else None

    @property
    def is_spot(self) -> bool:
        return self.cloud.is_spot(self.config)

    def place(self, *inner: str | int) -> Place:
        return ("available_node_types", self.name, "node_config", *inner)


def nodes(document: Document) -> Iterator[Node]:
    """The node types of a cloud that is in the table."""
    provider, types = document.get("provider", "type"), document.get("available_node_types")
    cloud = CLOUDS.get(provider) if isinstance(provider, str) else None
    if cloud is None or not isinstance(types, dict):
        return
    head = document.get("head_node_type")
    for name, kind in types.items():
        if isinstance(kind, dict):
            yield Node(name, kind, cloud, name == head)
