"""Private names of Ray: each still exists and means the same. Those of Ray and torch stand in a module each."""

import asyncio
import inspect
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from rtrain import ray_internals, ray_internals_launcher, torch_internals

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = re.compile(r"\b(ray|torch)(\.\w+)*\._\w+|\bray\.[\w.]*_internal\b|_set_params_and_buffers|__internal_head__")


def test_private_names_stand_in_their_modules() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("rtrain", "serve", "tune")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("ray_internals.py", "ray_internals_launcher.py", "torch_internals.py")
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    }
    assert found == set()
    for module in (ray_internals, torch_internals):
        assert PRIVATE.search(Path(str(module.__file__)).read_text())


def test_the_trainer_s_two_habits_are_still_methods_that_it_calls() -> None:
    import ray.train.torch

    made, stock = ray_internals.torch_trainer(), ray.train.torch.TorchTrainer
    assert issubclass(made, stock)
    source = "".join(inspect.getsource(base) for base in stock.__mro__[:-1] if base.__module__.startswith("ray.train"))
    for name in ("_register_sigint_handler", "_create_default_callbacks"):
        assert f"self.{name}(" in source
        assert list(inspect.signature(getattr(made, name)).parameters) == list(
            inspect.signature(getattr(stock, name)).parameters
        )


def test_workers_for_whom_a_run_asks_are_not_asked_for_by_ray_train() -> None:
    from ray.train import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy, scaling_policy

    silent: Any = ray_internals._silent_policy(ScalingConfig(num_workers=2))
    assert isinstance(silent, FixedScalingPolicy)
    source = inspect.getsource(scaling_policy) + inspect.getsource(FixedScalingPolicy)
    for name in ("_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request"):
        assert f"self.{name}()" in source
        getattr(silent, name)()  # Ray's own would need a coordinator
    decision: Any = silent.make_decision_for_non_running_worker_group()
    assert decision.num_workers == 2
    assert "scaling_policy=create_scaling_policy(" in inspect.getsource(ray_internals.torch_trainer().fit)


def test_the_launcher_s_steps_take_what_they_are_given() -> None:
    """They are run by tests/test_cluster_aws.py."""
    import ray.autoscaler._private.commands as launcher
    import ray.autoscaler._private.providers as providers
    from ray.autoscaler.tags import STATUS_UNINITIALIZED

    assert STATUS_UNINITIALIZED == ray_internals_launcher.UNINITIALIZED
    assert "no_config_cache" in inspect.signature(launcher._bootstrap_config).parameters
    assert {"_provider", "_runner", "yes"} <= inspect.signature(launcher.get_or_create_head_node).parameters.keys()
    assert "use_cache" in inspect.signature(providers._get_node_provider).parameters


def test_without_a_connection_there_is_no_session() -> None:
    import ray

    assert ray.is_initialized() or ray_internals.session_folder() is None
    assert not ray_internals.store_has_ended()


@pytest.mark.ray
def test_what_ray_knows_of_its_cluster(ray_session: Path) -> None:
    import ray

    [node] = ray.nodes()
    free = ray_internals.available_by_node()
    assert set(free) == {node["NodeID"]}
    assert 0 <= free[node["NodeID"]]["CPU"] <= node["Resources"]["CPU"]
    assert node["Resources"][ray_internals.HEAD_RESOURCE] == 1.0
    assert ray_internals.draining_nodes() == set()
    folder = ray_internals.session_folder()
    assert folder is not None
    assert (folder / "logs").is_dir()
    assert not ray_internals.store_has_ended()
    ended = [process for process in psutil.process_iter(["cmdline"]) if _monitors(process, str(folder))]
    assert ended == []  # the session of these tests was started by rtrain, which ends it


def _monitors(process: psutil.Process, session: str) -> bool:
    words = " ".join(process.info["cmdline"] or [])
    return "log_monitor.py" in words and session in words


@pytest.mark.ray
def test_what_ray_knows_of_an_actor_and_of_a_placement_group(ray_session: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    class Quiet:
        def seen(self) -> tuple[int, int]:
            return os.getpid(), os.nice(0)

    actor: Any = ray.remote(num_cpus=0)(Quiet).remote()
    pid, niceness = ray.get(actor.seen.remote())
    assert niceness == os.nice(0)  # no background work (env.SETTINGS)
    [known] = [one for one in ray_internals.actors() if one["Pid"] == pid]
    assert known["ActorClassName"].endswith("Quiet")
    assert (known["State"], known["JobID"]) == ("ALIVE", ray.get_runtime_context().get_job_id())
    assert known["Address"]["NodeID"] == ray.get_runtime_context().get_node_id()
    ray.kill(actor)
    made = placement_group([{"CPU": 0.001}])
    assert made.wait(30)
    again = ray_internals.placement_group(made.id.hex())
    assert placement_group_table(again) == placement_group_table(made)
    remove_placement_group(again)


def test_the_serve_controller_s_name_is_what_serve_starts_it_by() -> None:
    import ray.serve._private.default_impl as starts

    name, namespace = ray_internals.serve_controller()
    source = inspect.getsource(starts)
    assert "name=SERVE_CONTROLLER_NAME" in source
    assert "namespace=SERVE_NAMESPACE" in source
    assert name
    assert namespace


def test_a_group_s_start_is_told_to_callbacks() -> None:
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState

    told: list[str] = []
    made = ray_internals.on_group_start(told.append)
    assert isinstance(made, WorkerGroupCallback)
    assert "after_worker_group_start" in vars(WorkerGroupCallback)
    assert "placement_group_handle" in inspect.signature(WorkerGroupState).parameters


def test_tune_prints_through_the_callback_that_is_replaced() -> None:
    """Tune adds its own unless it is given one of that class."""
    from ray.tune.progress_reporter import TrialProgressCallback
    from ray.tune.utils.callback import _create_default_callbacks

    made = ray_internals.silent_progress()
    assert isinstance(made, TrialProgressCallback)
    found = _create_default_callbacks([made], air_verbosity=None)
    assert [one for one in found if isinstance(one, TrialProgressCallback)] == [made]
    assert {"log_result", "on_trial_complete"} <= vars(TrialProgressCallback).keys()


def test_the_callbacks_that_are_left_out_are_among_ray_s_own() -> None:
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    kinds: list[Any] = [TorchTrainer, ray_internals.torch_trainer()]
    stock, made = ({type(one) for one in kind(lambda: None)._create_default_callbacks()} for kind in kinds)
    assert stock - made == {DatasetsCallback, PlacementGroupCleanerCallback}
    assert made < stock


def test_a_replica_starts_the_server_that_it_was_given_or_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.serve._private.replica

    replicas: Any = ray.serve._private.replica
    assert "await start_asgi_http_server(\n                    self._direct_ingress_asgi," in inspect.getsource(
        replicas.Replica._maybe_start_direct_ingress_servers
    )
    counted: list[int] = []

    class Metrics(replicas.ReplicaMetricsManager):  # type: ignore[misc]  # it is taken for anything
        def __init__(self) -> None:
            pass

        def _change_num_ongoing_requests(self, request_metadata: Any, delta: int) -> None:
            counted.append(delta)

    class Replica:
        _metrics_manager = Metrics()

        async def ask(self, scope: Any, receive: Any, send: Any) -> None: ...

    async def usual(app: Any, options: Any, *, event_loop: Any, enable_so_reuseport: bool) -> tuple[str, str]:
        return "usual", options

    given: list[ray_internals.ReplicaServer] = []
    answers: list[Any] = [("ours", "server"), None]

    async def start(one: ray_internals.ReplicaServer) -> Any:
        given.append(one)
        return answers.pop(0)

    monkeypatch.setattr(replicas, "start_asgi_http_server", usual)
    ray_internals.replace_replica_server(start)
    replaced = replicas.start_asgi_http_server
    application = Replica().ask
    for expected in (("ours", "server"), ("usual", "options")):
        found = asyncio.run(replaced(application, "options", event_loop="loop", enable_so_reuseport=False))
        assert found == expected
    given[0].track(1)
    given[0].track(-1)
    assert counted == [1, -1]
    assert (given[0].application, given[0].options, given[0].loop) == (application, "options", "loop")


def test_a_deployment_keeps_the_version_that_it_was_given() -> None:
    from ray import serve

    deployment: Any = serve.deployment(name="a")(type("Anything", (), {}))
    given = ray_internals.with_version(deployment, "7")
    assert (deployment.version, given.version) == (None, "7")
    assert given.options(user_config={"artifact": "there"}).version == "7"


def test_a_proxy_that_is_to_end_answers_what_it_has_and_says_that_it_was_the_last() -> None:
    """One client waits for its answer, one has had one and asks again, one comes too late."""
    import ray.serve._private.proxy
    from ray.serve._private.http_util import start_asgi_http_server
    from ray.serve.config import HTTPOptions

    assert "self._start_http_server_task = " in inspect.getsource(ray.serve._private.proxy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            asked.set()
            await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(path: str, streams: Any) -> bytes:
        reader, writer = streams
        writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
        head: bytes = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"ok"
        return head.lower()

    async def check() -> None:
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            start_asgi_http_server(application, HTTPOptions(host="127.0.0.1", port=port), event_loop=loop)
        )
        server = (await starting)[1]
        while not server.started:
            await asyncio.sleep(0.01)
        proxy = SimpleNamespace(_start_http_server_task=starting)
        waiting, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        slow = loop.create_task(ask("/slow", waiting))
        await asked.wait()
        assert b"connection: close" not in await ask("/", idle)
        ray_internals._end_server(proxy)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert b"connection: close" in await ask("/", idle)
        await asyncio.sleep(ray_internals.LAST_ANSWERS_S + 0.2)
        assert not ray_internals._server_has_ended(proxy)
        may_answer.set()
        assert b"connection: close" in await slow
        await asyncio.wait_for(starting.result()[0], 5)
        assert ray_internals._server_has_ended(proxy)
        for _, writer in (waiting, idle):
            writer.close()

    asyncio.run(check())


def test_a_stream_of_data_asks_for_no_nodes_and_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own would ask for twice the two CPUs that it has been given, and for nothing where it has none."""
    from ray.data import ExecutionOptions, ExecutionResources
    from ray.data._internal.cluster_autoscaler import (
        rate_based_cluster_autoscaler as rates,
        resource_utilization_gauge as gauges,
    )
    from ray.data._internal.execution import streaming_executor

    asked, given = list[Any](), {"node": {"CPU": 2.0, "object_store_memory": 7.0}}

    class Coordinator:
        def __init__(self, **others: Any):
            pass

        def request_resources(self, resources: Any, **others: Any) -> None:
            asked.append(resources)

        def get_reserved_resources(self) -> Any:
            return given

    class Tasks:
        output_dependencies: ClassVar[list[Any]] = []
        metrics = SimpleNamespace(
            average_num_inputs_per_task=1.0, average_num_outputs_per_task=1.0, num_output_blocks_per_task_s=1.0
        )

        def per_task_resource_allocation(self) -> Any:
            return ExecutionResources(cpu=1)

        min_scheduling_resources = per_task_resource_allocation

        def get_max_concurrency_limit(self) -> None:
            return None

        def has_completed(self) -> bool:
            return False

    busy = SimpleNamespace(observe=lambda: None, get=lambda: gauges.ClusterUtil(cpu=1.0))
    executor: Any = streaming_executor
    monkeypatch.setattr(rates, "DefaultAutoscalingCoordinator", Coordinator)
    for module in (rates, gauges):
        monkeypatch.setattr(module, "RollingLogicalUtilizationGauge", lambda *given: busy)
    monkeypatch.setattr(executor, "create_cluster_autoscaler", executor.create_cluster_autoscaler)  # and back again
    context = SimpleNamespace(
        execution_options=ExecutionOptions(),
        scheduling_strategy=None,
        scheduling_strategy_large_args=None,
    )
    for ours in (False, True):
        if ours:
            ray_internals.stream_within(0.5)
        scaling = executor.create_cluster_autoscaler({Tasks(): None}, None, context, execution_id="a")
        scaling._last_request_time = -1e9
        scaling.try_trigger_scaling()
        assert asked[-1] == ([] if ours else [{"CPU": 1.0}] * 4)
        assert scaling.get_total_resources().cpu == 2.0
    given["node"]["CPU"] = 0.0
    assert (scaling.get_total_resources().cpu, scaling.get_total_resources().object_store_memory) == (0.5, 7.0)


@pytest.mark.ray
def test_numbers_come_from_tasks_that_reserve_what_is_said_and_are_fused(ray_session: Path) -> None:
    dataset = ray_internals.numbers(10, 2, 0.25).map_batches(lambda batch: batch, batch_size=None, num_cpus=0.25)
    assert [row["id"] for row in dataset.take_all()] == list(range(10))
    assert "ReadRange->MapBatches" in dataset.stats()
