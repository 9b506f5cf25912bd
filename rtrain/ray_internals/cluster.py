"""Queries to Ray's state, head and autoscaler, and this process's own connection to Ray."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import psutil

HEAD_RESOURCE = "node:__internal_head__"
"""A resource of the head node alone."""


def available_resources_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return the unreserved resources of each node, by node id."""
    import ray

    resources: Mapping[str, Mapping[str, float]] = ray._private.state.state.available_resources_per_node()
    return resources


def draining_node_ids() -> set[str]:
    """Return the ids of the draining nodes."""
    import ray

    return set(ray._private.state.state.get_draining_nodes())


def list_actors() -> list[dict[str, Any]]:
    """Return the actors of the cluster, each with ActorClassName, State, JobID, Pid, StartTime and Address."""
    import ray

    return list(ray._private.state.actors().values())


def local_cluster_address() -> str | None:
    """Resolve Ray's address `auto`: the address of the cluster with this machine as a node; None without one."""
    import ray._private.services as services

    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError:
        return None


def local_node_ids() -> set[str]:
    """Return the ids of the nodes with processes on this machine. A driver connects through one of them."""
    import ray._private.services as services

    return set(services.find_node_ids())


def probe_head(address: str, timeout_s: float) -> Literal["open", "closed", "none"]:
    """Probe `host:port`: `open` for the head of a Ray cluster that accepts this process, `closed` for a head with
    another token, `none` for anything else, or no answer within `timeout_s`."""
    import grpc
    import ray._private.grpc_utils as grpc_utils

    with grpc_utils.init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check_alive = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            check_alive(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            auth_errors = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            return "closed" if error.code() in auth_errors else "none"
    return "open"


def drain_local_nodes(
    address: str, instance_id: str | None, message: str, deadline: float, timeout_s: float
) -> list[str]:
    """Ask the head at `host:port` to drain this machine's node, which goes away at `deadline` (seconds since 1970).

    `instance_id`: the launcher's name of the node, where several nodes run on this machine; else nodes are found by
    their processes. Returns the ids of the draining nodes. Raises Ray's errors if the head does not answer within
    `timeout_s`. The call is that of `ray drain-node`.
    """
    import ray._raylet
    from ray.core.generated import autoscaler_pb2, gcs_pb2

    generated: Any = (autoscaler_pb2, gcs_pb2)
    reason_code, alive_state = generated[0].DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, generated[1].GcsNodeInfo.ALIVE
    client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    live_nodes = [
        (node.hex(), info.instance_id)
        for node, info in client.get_all_node_info(timeout=timeout_s).items()
        if info.state == alive_state
    ]
    local_ids = {node for node, name in live_nodes if instance_id and name == instance_id} or local_node_ids() & {
        node for node, _ in live_nodes
    }
    return [
        node
        for node in sorted(local_ids)
        if client.drain_node(node, reason_code, message, int(deadline * 1000), timeout_s)[0]
    ]


def node_start_times(address: str, timeout_s: float) -> dict[str, float]:
    """Return when each node, live or dead, joined the cluster with the head `host:port`, in seconds since 1970, by the
    launcher's name of the node. Raises Ray's errors if the head does not answer within `timeout_s`."""
    import ray._raylet

    client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    nodes = client.get_all_node_info(timeout=timeout_s).values()
    return {info.instance_id: info.start_time_ms / 1000 for info in nodes}


def enable_local_token_auth() -> None:
    """Authenticate with the token on this machine, if any, as Ray does with the address `auto`."""
    import ray._private.authentication.authentication_token_setup as tokens

    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


class AutoscalingClient:
    """Requests named `name` for the size of the cluster, through Ray Data's coordinator. It forwards the requests of
    all libraries to the autoscaler; each expires unless it is repeated in time."""

    def __init__(self, name: str):
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import DefaultAutoscalingCoordinator

        self._coordinator = DefaultAutoscalingCoordinator(name)

    def request_resources(
        self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float
    ) -> None:
        """Request a cluster with at least these resources, each on a node with its labels, in addition to all other
        requests, for `expire_s` seconds."""
        self._coordinator.request_resources(list(bundles), expire_s, label_selectors=list(labels))

    def cancel_request(self) -> None:
        self._coordinator.cancel_request()


def cluster_status(client: Any) -> str | None:
    """Return the output of `ray status` from the head's API, by a JobSubmissionClient; None without an answer."""
    response = client._do_request("GET", "/api/cluster_status?format=1")
    status = response.json().get("data", {}).get("clusterStatus") if response.status_code == 200 else None
    return status if status is None else str(status)


def head_ip(client: Any) -> str | None:
    """Return the IP of the head's node from its API, by a JobSubmissionClient; None without an answer."""
    response = client._do_request("GET", "/nodes?view=summary")
    nodes = response.json()["data"]["summary"] if response.status_code == 200 else []
    raylets = (node["raylet"] for node in nodes)
    heads = (raylet for raylet in raylets if raylet.get("isHeadNode") and raylet.get("state") == "ALIVE")
    return next((str(raylet["nodeManagerAddress"]) for raylet in heads), None)


def cluster_config() -> list[tuple[str, dict[str, float], int]]:
    """Return the node types of the cluster's autoscaler configuration: (type, resources of a node, largest number; -1
    for any). Empty without a configuration."""
    import ray

    config: Any = ray._private.state.state.get_cluster_config()
    groups = [] if config is None else config.node_group_configs
    return [
        (group.name, {name: float(most) for name, most in group.resources.items()}, group.max_count) for group in groups
    ]


# --------------------------------------------------------------------------------------- the connection of this process


def session_folder() -> Path | None:
    """Return the session folder of the connected Ray; None without a connection."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if ray.is_initialized() else None


def is_gcs_dead() -> bool:
    """Whether the store (GCS) of a Ray started by this process has died; Ray itself ends a minute later."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and any(
        info.process.poll() is not None for info in node.all_processes.get("gcs_server", ())
    )


def list_processes() -> "list[psutil.Process]":
    """Return the processes of the Ray started by this process: its children, their descendants, and on Linux all
    processes that write to its log files. Empty without such a Ray.

    Only the log files identify an orphaned worker: it has another parent, and its title has overwritten its command
    and its environment.
    """
    import psutil
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    if node is None:
        return []
    logs_prefix = str(Path(node.get_logs_dir_path()).resolve()) + os.sep
    ray_processes: dict[psutil.Process, None] = {}
    for pid in [info.process.pid for infos in node.all_processes.values() for info in infos]:
        with suppress(psutil.NoSuchProcess):
            ray_processes.update(dict.fromkeys([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]))
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended, or is another user's, or this system has no such folder
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(logs_prefix):
                ray_processes[process] = None
    return list(ray_processes)


def drop_forwarded_output() -> None:
    """Do not print the output that other processes of the cluster send to this process."""
    import ray._private.worker

    ray._private.worker.print_to_stdstream = lambda *data, **settings: None


def list_session_pids() -> list[int]:
    """Return the ids of this process, its descendants and its raylet's descendants (in a job the raylet is no
    descendant)."""
    import psutil

    roots, folder = [psutil.Process()], session_folder()
    pids: set[int] = set()
    for process in psutil.process_iter() if folder is not None else ():
        with suppress(psutil.Error):
            if any(str(folder) in argument for argument in process.cmdline()):
                roots.append(process)
    for root in roots:
        with suppress(psutil.Error):
            pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}
    return sorted(pids)
