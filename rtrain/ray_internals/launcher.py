"""Private names of Ray's launcher (`ray up`), each by a function that says what it means: as `rtrain.ray_internals`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNINITIALIZED = "uninitialized"
"""The status of a node on which nothing has run yet."""


def bootstrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster's file as `ray up` hands it on: its gaps filled, and resolved by what its cloud has. Asks the cloud."""
    import ray.autoscaler._private.commands as launcher

    found: dict[str, Any] = launcher._bootstrap_config(dict(config), no_config_cache=True)
    return found


def cloud_of(config: Mapping[str, Any]) -> Any:
    """The node provider of a file that was bootstrapped."""
    import ray.autoscaler._private.providers as providers

    return providers._get_node_provider(config["provider"], config["cluster_name"], use_cache=False)


def start_head(config: Mapping[str, Any], file: Path, cloud: Any, runner: Any) -> None:
    """What `ray up` does for a new cluster. `runner` takes the place of `subprocess`, by which it calls SSH. Raises
    what `ray up` ends with where the head cannot be set up."""
    import ray.autoscaler._private.commands as launcher

    launcher.get_or_create_head_node(
        dict(config),
        str(file),
        no_restart=False,
        restart_only=False,
        yes=True,
        override_cluster_name=None,
        _provider=cloud,
        _runner=runner,
    )
