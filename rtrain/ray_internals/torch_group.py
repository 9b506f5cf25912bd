"""Ray Train's TorchTrainer and its TorchConfig, without torch where nothing is computed: in the process that starts a
worker group, and in the group's controller. Each would take 1.7 s of a core to import it, and hold 130 MB.

`groups` imports this module when it starts a group: unlike its neighbours, it needs Ray Train from the start.
"""

import importlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil
import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig

logger = logging.getLogger(__name__)

GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
"""Gloo's variable for its network interface. The default is the interface of the host's name, which has the address
127.0.1.1 on Debian: unreachable from other machines."""
SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds for workers to leave their process group; after that they end with it."""
TRAINER_MODULE = "ray.train.v2.torch.torch_trainer"
TRAINER_PACKAGE = "ray.train.v2.torch"
LOCAL_MODE_MODULE = "ray.train.v2._internal.execution.local_mode.torch"
"""The package of `TRAINER_MODULE`, with functions for workers; and its import for trainings without workers."""


def import_torch_trainer() -> type[Any]:
    """Import Ray Train's TorchTrainer. Its own module uses no torch; two imported modules that do are replaced by
    stubs."""
    if not {TRAINER_MODULE, "torch"} & set(sys.modules):
        stub_modules = {name: _make_stub_module(name) for name in (TRAINER_PACKAGE, LOCAL_MODE_MODULE)}
        vars(stub_modules[LOCAL_MODE_MODULE])["LocalTorchController"] = None
        sys.modules.update(stub_modules)
        try:
            importlib.import_module(TRAINER_MODULE)
        finally:
            for name in stub_modules:
                del sys.modules[name]
    trainer_class: type[Any] = importlib.import_module(TRAINER_MODULE).TorchTrainer
    return trainer_class


def _make_stub_module(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@dataclass
class TorchConfig(BackendConfig):
    """The counterpart of Ray Train's own, which imports torch."""

    backend: str
    """`gloo` or `nccl`."""
    timeout_s: int
    """Seconds after which a collective fails."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroupBackend

    @property
    def train_func_context(self) -> type[Any]:
        return TrainDeviceContext


class ProcessGroupBackend(Backend):
    """Joins the workers into one process group of torch.distributed."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        rendezvous_env = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        group_args = (backend_config.backend, len(worker_group), backend_config.timeout_s)
        ray.get(
            [
                worker_group.execute_single_async(rank, _join_group, rank, rendezvous_env, *group_args)
                for rank in range(group_args[1])
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            ray.get(worker_group.execute_async(_leave_group, len(worker_group) > 1), timeout=SHUTDOWN_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            logger.warning("the workers have not left their process group in %s s", SHUTDOWN_TIMEOUT_S)


def _join_group(rank: int, rendezvous_env: dict[str, str], backend: str, num_workers: int, timeout_s: int) -> None:
    """Join the process group, in a worker."""
    from ray.train.torch import config

    os.environ.update(rendezvous_env)
    address = ray.util.get_node_ip_address()
    if interface := find_interface(address):
        os.environ.setdefault(GLOO_INTERFACE_ENV, interface)
    config._set_torch_distributed_env_vars()
    try:
        config._setup_torch_process_group(backend, rank, num_workers, "env://", timeout_s)
    except RuntimeError as error:
        # The traceback's last line names at most one address.
        interface_name = os.environ.get(GLOO_INTERFACE_ENV, "the interface of the host's name")
        raise RuntimeError(
            f"{error}\nworker {rank} of {num_workers} at {address} ({interface_name}) could not join the group at "
            f"{rendezvous_env['MASTER_ADDR']}:{rendezvous_env['MASTER_PORT']}: {str(error).splitlines()[0]}"
        ) from error


def find_interface(address: str) -> str | None:
    """Return the network interface with an address of this machine; None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def _leave_group(destroys_group: bool) -> None:
    from ray.train.torch import config

    config._shutdown_torch(destroy_process_group=destroys_group)


class TrainDeviceContext:
    """Makes the worker's GPU the current device of torch."""

    def __init__(self) -> None:
        from ray.train.torch import config

        self._ray_context = config.TorchConfigContextManager()

    def __enter__(self) -> None:
        self._ray_context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._ray_context.__exit__(*error)
