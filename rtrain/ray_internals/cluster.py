"""What Ray's state, its head and its autoscaler tell, and what they are asked for."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

HEAD_RESOURCE = "node:__internal_head__"
"""A resource that the head node has, and no other."""


def available_by_node() -> Mapping[str, Mapping[str, float]]:
    """What nobody holds of each node's resources, by node id."""
    import ray

    found: Mapping[str, Mapping[str, float]] = ray._private.state.state.available_resources_per_node()
    return found


def draining_nodes() -> set[str]:
    """Ids of the nodes that are about to be taken away."""
    import ray

    return set(ray._private.state.state.get_draining_nodes())


def actors() -> list[dict[str, Any]]:
    """What the cluster knows of its actors: ActorClassName, State, JobID, Pid, StartTime, Address."""
    import ray

    return list(ray._private.state.actors().values())


def running_here() -> str | None:
    """What Ray's address `auto` stands for: the address of a cluster that this machine is a node of; None without."""
    import ray._private.services as services

    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError:
        return None


def nodes_here() -> set[str]:
    """Ids of the nodes whose processes run on this machine. A driver connects through one of them."""
    import ray._private.services as services

    return set(services.find_node_ids())


def head(address: str, seconds: float) -> Literal["open", "closed", "none"]:
    """What answers at `host:port`: the head of a Ray cluster that lets this process in, one that asks for another
    token, or no head within `seconds`."""
    import grpc
    import ray._private.grpc_utils as grpc_utils

    with grpc_utils.init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        alive = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            alive(b"", timeout=seconds)
        except grpc.RpcError as error:
            refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            return "closed" if error.code() in refused else "none"
    return "open"


def drain(address: str, instance: str | None, why: str, deadline: float, seconds: float) -> list[str]:
    """Ask the head at `host:port` to drain this machine's node, which goes away at `deadline` (seconds since 1970).

    `instance`: the name that the node's launcher gave it, where several nodes run on this machine; else its processes
    tell. Returns the ids of the nodes that are drained now. Raises what Ray raises where its head does not answer
    within `seconds`. What is called is behind `ray drain-node`.
    """
    import ray._raylet
    from ray.core.generated import autoscaler_pb2, gcs_pb2

    generated: Any = (autoscaler_pb2, gcs_pb2)
    reason, alive = generated[0].DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, generated[1].GcsNodeInfo.ALIVE
    client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    up = [
        (node.hex(), info.instance_id)
        for node, info in client.get_all_node_info(timeout=seconds).items()
        if info.state == alive
    ]
    here = {node for node, name in up if instance and name == instance} or nodes_here() & {node for node, _ in up}
    return [node for node in sorted(here) if client.drain_node(node, reason, why, int(deadline * 1000), seconds)[0]]


def joined(address: str, seconds: float) -> dict[str, float]:
    """When each node that was ever there has joined the cluster whose head is at `host:port`, in seconds since 1970, by
    the name that its launcher gave it. Raises what Ray raises where the head does not answer within `seconds`."""
    import ray._raylet

    client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    found = client.get_all_node_info(timeout=seconds).values()
    return {info.instance_id: info.start_time_ms / 1000 for info in found}


def use_token_of_this_machine() -> None:
    """Show clusters the token that lies on this machine, where there is one, as Ray does with the address `auto`."""
    import ray._private.authentication.authentication_token_setup as tokens

    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


class Requests:
    """Requests of the name `name` for the size of the cluster, as Ray Data's coordinator takes them. It repeats all of
    them, of all libraries, to the autoscaler; each ends where its asker does not come again in time."""

    def __init__(self, name: str):
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import DefaultAutoscalingCoordinator

        self._coordinator = DefaultAutoscalingCoordinator(name)

    def ask(self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float) -> None:
        """Have the cluster at least as large as these, each on a node with its labels, and all other requests together,
        for `expire_s` seconds."""
        self._coordinator.request_resources(list(bundles), expire_s, label_selectors=list(labels))

    def take_back(self) -> None:
        self._coordinator.cancel_request()


def cluster_status(client: Any) -> str | None:
    """What `ray status` prints, asked of the head's API by a JobSubmissionClient; None where it says nothing."""
    answer = client._do_request("GET", "/api/cluster_status?format=1")
    told = answer.json().get("data", {}).get("clusterStatus") if answer.status_code == 200 else None
    return told if told is None else str(told)


def head_ip(client: Any) -> str | None:
    """The address of the head's node, asked of its API by a JobSubmissionClient; None where it does not say it."""
    answer = client._do_request("GET", "/nodes?view=summary")
    nodes = answer.json()["data"]["summary"] if answer.status_code == 200 else []
    raylets = (node["raylet"] for node in nodes)
    heads = (raylet for raylet in raylets if raylet.get("isHeadNode") and raylet.get("state") == "ALIVE")
    return next((str(raylet["nodeManagerAddress"]) for raylet in heads), None)


def cluster_config() -> list[tuple[str, dict[str, float], int]]:
    """The nodes that the cluster may have, where whoever manages it has said so: (type, resources of a node, number;
    -1 for any). Empty where nothing is known."""
    import ray

    found: Any = ray._private.state.state.get_cluster_config()
    groups = [] if found is None else found.node_group_configs
    return [
        (group.name, {name: float(most) for name, most in group.resources.items()}, group.max_count) for group in groups
    ]
