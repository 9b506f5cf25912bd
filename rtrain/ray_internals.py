"""Every private name of Ray that rtrain uses, each by a function that says what it means.

A new version may take any of them away: `tests/test_ray_internals.py` asks that each still exists and means the same.
Ray is not imported before a function is called.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import ray.data
    from ray.serve import Deployment
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.tune.callback import Callback as TuneCallback
    from ray.util.placement_group import PlacementGroup

HEAD_RESOURCE = "node:__internal_head__"
"""A resource that the head node has, and no other."""

# ------------------------------------------------------------------------------------------------------------- cluster


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


def stream_within(cpus: float) -> None:
    """Have the data sets that this process streams ask for no nodes, and count on so many CPUs at least.

    Each of them would ask for twice what it has, as long as its tasks keep that busy, for itself alone. And what
    others have asked for counts as theirs: where that is all, a stream has none, and says so.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler, resource_utilization_gauge
    from ray.data._internal.execution import streaming_executor

    usual: Any = rate_based_cluster_autoscaler.RateBasedClusterAutoscaler
    gauge = resource_utilization_gauge.RollingLogicalUtilizationGauge

    class Within(usual):  # type: ignore[misc]
        def _is_cluster_utilization_low(self, utilization: Any) -> bool:
            return True

        def get_total_resources(self) -> ExecutionResources:
            found: ExecutionResources = super().get_total_resources()
            return found.copy(cpu=max(found.cpu, cpus))

    executor: Any = streaming_executor
    executor.create_cluster_autoscaler = lambda topology, resources, context, *, execution_id: Within(
        list(topology),
        execution_id=execution_id,
        max_cluster_limits=context.execution_options.resource_limits,
        utility_calculator=gauge(resources),
    )


def numbers(count: int, blocks: int, cpus: float) -> "ray.data.Dataset":
    """`ray.data.range` whose tasks reserve so many CPUs, with those that follow them in the same process."""
    import ray.data
    from ray.data._internal.datasource.range_datasource import RangeDatasource

    source = RangeDatasource(n=count, block_format="arrow", column_name="id")
    found: ray.data.Dataset = ray.data.read_datasource(source, num_cpus=cpus, override_num_blocks=blocks)
    return found


def cluster_status(client: Any) -> str | None:
    """What `ray status` prints, asked of the head's API by a JobSubmissionClient; None where it says nothing."""
    answer = client._do_request("GET", "/api/cluster_status?format=1")
    told = answer.json().get("data", {}).get("clusterStatus") if answer.status_code == 200 else None
    return told if told is None else str(told)


def cluster_config() -> list[tuple[str, dict[str, float], int]]:
    """The nodes that the cluster may have, where whoever manages it has said so: (type, resources of a node, number;
    -1 for any). Empty where nothing is known."""
    import ray

    found: Any = ray._private.state.state.get_cluster_config()
    groups = [] if found is None else found.node_group_configs
    return [
        (group.name, {name: float(most) for name, most in group.resources.items()}, group.max_count) for group in groups
    ]


# -------------------------------------------------------------------------------------------------------- this process


def session_folder() -> Path | None:
    """Where the Ray that this process is connected to keeps its files; None without a connection."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if ray.is_initialized() else None


def end_log_monitor() -> None:
    """End the process that reads every log file of the session again and again, of a Ray that this process started."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    node.kill_log_monitor(check_alive=False)


def store_has_ended() -> bool:
    """Whether the store (GCS) of a Ray that this process has started has ended; Ray ends a minute later."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and any(one.process.poll() is not None for one in node.all_processes.get("gcs_server", ()))


def drop_forwarded_output() -> None:
    """Print nothing of what other processes of the cluster send to this one's standard streams."""
    import ray._private.worker

    ray._private.worker.print_to_stdstream = lambda *data, **settings: None


# ------------------------------------------------------------------------------------------------------- worker groups


def on_group_start(tell: Callable[[str], None]) -> "WorkerGroupCallback":
    """A callback of Ray Train's that tells the id, in hex, of the placement group that the workers hold."""
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class Started(WorkerGroupCallback):
        def after_worker_group_start(self, worker_group: Any) -> None:
            tell(worker_group.get_worker_group_state().placement_group_handle.placement_group.id.hex())

    return Started()


def placement_group(identity: str) -> "PlacementGroup":
    """The placement group of that id, in hex."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID.from_hex(identity))


def torch_trainer(asks: bool = True) -> type[Any]:
    """Ray Train's TorchTrainer without three habits of it; and, where it `asks` not, without a fourth, to ask an
    autoscaler for its workers.

    It leaves Ctrl-C to this process: Ray's own handler would end it with SystemExit, and stay behind after `fit`. (A
    `fit` in a side thread sets no handler either, but the session then ends while that thread is still inside Ray's
    core, which ended one interrupted search with a segmentation fault.) And it starts no process for the data sets of a
    Trainer: workers read their own streams. Nor does it start a process that frees the CPUs of a dead controller, which
    `runs.placement` does: where there is no dashboard to ask, as in a private session, that process made the end of
    every training shorter than 12 s wait for 12 s.
    """
    import ray.train.torch
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    unwanted = (DatasetsCallback, PlacementGroupCleanerCallback)

    class Trainer(ray.train.torch.TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            pass

        def _create_default_callbacks(self) -> list[Any]:
            found = super()._create_default_callbacks()  # type: ignore[misc]
            return [callback for callback in found if not isinstance(callback, unwanted)]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            if not asks:
                given["scaling_policy"] = _silent_policy(self.scaling_config)
            return super()._initialize_and_run_controller(**given)  # type: ignore[misc]

    return Trainer


def _silent_policy(scaling: Any) -> Any:
    """Ray Train's rule for a fixed number of workers, without its requests for them."""
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class Silent(FixedScalingPolicy):
        def _send_resource_request(self) -> None:
            pass

        _maybe_send_resource_request = _cancel_resource_request = _send_resource_request

    return Silent(scaling)


def silent_progress() -> "TuneCallback":
    """A callback of Ray Tune's that takes the place of its own, which prints a line at the end of each of its trials,
    however little it was told to print."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Silent(TrialProgressCallback):
        def log_result(self, trial: Any, result: dict[str, Any], error: bool = False) -> None:
            pass

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            pass

    return Silent()


def serve_controller() -> tuple[str, str]:
    """Name and namespace of Ray Serve's controller; its other actors are in the same namespace."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


LAST_ANSWERS_S = 1.0
"""Seconds for which connections to a proxy of Ray Serve that is to end are still answered, one request each."""


def end_proxies(seconds: float) -> None:
    """Have Ray Serve's own proxies take no more connections, and wait until what they have accepted is answered, at
    most for so long. Ray itself kills them, with what they have in hand."""
    import ray
    from ray.serve._private.constants import SERVE_PROXY_NAME

    space = serve_controller()[1]
    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == space]
    proxies: list[Any] = [ray.get_actor(name, space) for name in named if name.startswith(SERVE_PROXY_NAME)]
    give_up = time.monotonic() + seconds
    with contextlib.suppress(ray.exceptions.RayError):  # one that has died has nothing in hand
        ray.get([proxy.__ray_call__.remote(_end_server) for proxy in proxies], timeout=seconds)
        while time.monotonic() < give_up:
            if all(ray.get([proxy.__ray_call__.remote(_server_has_ended) for proxy in proxies], timeout=seconds)):
                return
            time.sleep(0.05)


def _end_server(proxy: Any) -> None:
    """In a proxy's process: end its HTTP server softly. uvicorn ends connections that wait for a request at once, and a
    client may just be sending one; so each is first told, with its next answer, that this was the last."""
    server = proxy._start_http_server_task.result()[1]
    last = (b"connection", b"close")
    server.config.encoded_headers = [*server.config.encoded_headers, last]
    server.server_state.default_headers = [*server.server_state.default_headers, last]
    for listening in server.servers:
        listening.close()
    asyncio.get_running_loop().call_later(LAST_ANSWERS_S, setattr, server, "should_exit", True)


def _server_has_ended(proxy: Any) -> bool:
    return bool(proxy._start_http_server_task.result()[0].done())


def with_version(deployment: "Deployment", version: str) -> "Deployment":
    """The deployment with a code version of ours. Ray Serve draws one at each `run`, and starts all replicas anew for
    it; where it is the same, a change of `user_config` is handed to the replicas there are."""
    return deployment.options(version=version, _internal=True)


class ReplicaServer(NamedTuple):
    """The HTTP server that a replica of Ray Serve is about to start, for a proxy that connects to it."""

    application: Callable[..., Awaitable[None]]
    """Ray's own way to the deployment, ASGI; it answers the proxy's questions, whose paths begin with `/-/`."""
    track: Callable[[int], None]
    """Told 1 for a request that begins, -1 for one that ends: Ray waits for them before it ends the replica."""
    options: Any
    """Ray's HTTPOptions: host, port, keep_alive_timeout_s."""
    loop: Any
    """The event loop on which it is to run."""


def replace_replica_server(start: Callable[[ReplicaServer], Awaitable[tuple[Any, Any] | None]]) -> None:
    """Have the replica that this process is start its HTTP server by `start`, which gives the server's task and the
    uvicorn.Server; or None, for Ray's own. To be called in the deployment's constructor: the server starts after it."""
    import ray.serve._private.replica
    from ray.serve._private.common import RequestMetadata, RequestProtocol

    replicas: Any = ray.serve._private.replica
    usual = replicas.start_asgi_http_server
    counted = RequestMetadata("", "", _request_protocol=RequestProtocol.HTTP, is_direct_ingress=True)

    async def started(app: Any, options: Any, *, event_loop: Any, **others: Any) -> tuple[Any, Any]:
        metrics = app.__self__._metrics_manager

        def track(change: int) -> None:
            (metrics.inc_num_ongoing_requests if change > 0 else metrics.dec_num_ongoing_requests)(counted)

        found = await start(ReplicaServer(app, track, options, event_loop))
        return found or await usual(app, options, event_loop=event_loop, **others)

    replicas.start_asgi_http_server = started
