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

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Gloo's setting of the interface on which it listens. By default that is the one of the host's name, which Debian
gives the address 127.0.1.1: no other machine can reach it."""
LEAVE_S = 30.0
"""Seconds that workers have to leave their process group; then they end with it."""
TRAINER = "ray.train.v2.torch.torch_trainer"
AROUND = "ray.train.v2.torch"
LOCAL = "ray.train.v2._internal.execution.local_mode.torch"
"""The package of `TRAINER`, whose functions are for workers; and what it imports for trainings without any."""


def stock_trainer() -> type[Any]:
    """Ray Train's TorchTrainer. Its own module uses no torch. Two that do are not run while it is imported."""
    if not {TRAINER, "torch"} & set(sys.modules):
        left_out = {name: _not_run(name) for name in (AROUND, LOCAL)}
        vars(left_out[LOCAL])["LocalTorchController"] = None
        sys.modules.update(left_out)
        try:
            importlib.import_module(TRAINER)
        finally:
            for name in left_out:
                del sys.modules[name]
    found: type[Any] = importlib.import_module(TRAINER).TorchTrainer
    return found


def _not_run(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@dataclass
class TorchConfig(BackendConfig):
    """As Ray Train's own, which a group's workers import."""

    backend: str
    """`gloo` or `nccl`."""
    timeout_s: int
    """Seconds after which an exchange fails."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessGroup

    @property
    def train_func_context(self) -> type[Any]:
        return Device


class ProcessGroup(Backend):
    """Workers that torch.distributed joins into one process group."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        there = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        given = (backend_config.backend, len(worker_group), backend_config.timeout_s)
        ray.get([worker_group.execute_single_async(rank, _join, rank, there, *given) for rank in range(given[1])])

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            ray.get(worker_group.execute_async(_leave, len(worker_group) > 1), timeout=LEAVE_S)
        except ray.exceptions.GetTimeoutError:
            logger.warning("the workers have not left their process group in %s s", LEAVE_S)


def _join(rank: int, there: dict[str, str], backend: str, workers: int, timeout_s: int) -> None:
    """In a worker."""
    from ray.train.torch import config

    os.environ.update(there)
    address = ray.util.get_node_ip_address()
    if interface := interface_of(address):
        os.environ.setdefault(INTERFACE, interface)
    config._set_torch_distributed_env_vars()
    try:
        config._setup_torch_process_group(backend, rank, workers, "env://", timeout_s)
    except RuntimeError as error:
        # Not the traceback's last line alone, which names at most one address.
        chosen = os.environ.get(INTERFACE, "the interface of the host's name")
        raise RuntimeError(
            f"{error}\nworker {rank} of {workers} at {address} ({chosen}) could not join the group at "
            f"{there['MASTER_ADDR']}:{there['MASTER_PORT']}: {str(error).splitlines()[0]}"
        ) from error


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine; None where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def _leave(joined: bool) -> None:
    from ray.train.torch import config

    config._shutdown_torch(destroy_process_group=joined)


class Device:
    """Within it, the worker's GPU is the one that torch uses."""

    def __init__(self) -> None:
        from ray.train.torch import config

        self._stock = config.TorchConfigContextManager()

    def __enter__(self) -> None:
        self._stock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stock.__exit__(*error)
