"""What Ray's autoscaler takes for a cloud: the provider `external` of a rehearsed cluster's file.

It writes down what is asked for and reads what there is (`book`); the rehearsal itself starts and ends the machines
(`cloud`), as a cloud does behind its API. Ray's autoscaler v2 wraps a provider of version 1, which this one is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

from rtrain.rehearsal.machines.machine_registry import Book
from rtrain.rehearsal.plan import FOLDER


class Rehearsed(NodeProvider):
    """Safe for threads: each call reads or writes whole files."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str):
        super().__init__(provider_config, cluster_name)
        self._book = Book(Path(provider_config[FOLDER]))

    # --------------------------------------------------------------------------------------------------- what there is

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        wanted = tag_filters.items()
        return [name for name, one in self._book.up().items() if wanted <= one.tags.items() and not one.unwanted]

    def is_running(self, node_id: str) -> bool:
        found = self._book.up().get(node_id)
        return found is not None and found.pid is not None

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._book.up()

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict(self._book.all()[node_id].tags)

    def internal_ip(self, node_id: str) -> str:
        """All machines are this one; the autoscaler tells them by their names."""
        return node_id

    external_ip = internal_ip

    # ------------------------------------------------------------------------------------------------ what is asked for

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> dict[str, Any]:
        kind = tags[TAG_RAY_USER_NODE_TYPE]
        if self._book.sold_out:
            raise NodeLaunchException("no capacity", f"there is no {kind} to be had now", None)
        return {self._book.ask(kind, resources, labels, tags): {} for _ in range(count)}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._book.tag(node_id, {**self.node_tags(node_id), **tags})

    def terminate_node(self, node_id: str) -> None:
        self._book.unwant(node_id)
