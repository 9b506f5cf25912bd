"""Node provider of Ray's autoscaler in a rehearsal (provider type `external`).

It writes requests to the machine registry and reads its state; `cloud.SimulatedCloud` starts and terminates the
machines, as a cloud does behind its API. Ray's autoscaler v2 wraps this version 1 provider.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

from rtrain.rehearsal.machine import MachineRegistry
from rtrain.rehearsal.plan import FOLDER_SETTING


class RehearsalNodeProvider(NodeProvider):
    """Thread-safe: each call reads or writes complete files."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._registry = MachineRegistry(Path(provider_config[FOLDER_SETTING]))

    # --------------------------------------------------------------------------------------------------------- queries

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        required_tags = tag_filters.items()
        return [
            name
            for name, live_machine in self._registry.live_machines().items()
            if required_tags <= live_machine.tags.items() and not live_machine.is_unwanted
        ]

    def is_running(self, node_id: str) -> bool:
        machine = self._registry.live_machines().get(node_id)
        return machine is not None and machine.pid is not None

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._registry.live_machines()

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict(self._registry.all_machines()[node_id].tags)

    def internal_ip(self, node_id: str) -> str:
        """All machines share this host; the autoscaler identifies them by name."""
        return node_id

    external_ip = internal_ip

    # -------------------------------------------------------------------------------------------------------- requests

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> dict[str, Any]:
        node_type = tags[TAG_RAY_USER_NODE_TYPE]
        if self._registry.is_exhausted:
            raise NodeLaunchException("no capacity", f"there is no capacity for {node_type}", None)
        return {self._registry.request_machine(node_type, resources, labels, tags): {} for _ in range(count)}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._registry.set_tags(node_id, {**self.node_tags(node_id), **tags})

    def terminate_node(self, node_id: str) -> None:
        self._registry.request_end(node_id)
