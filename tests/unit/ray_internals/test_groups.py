"""Ray Train and Ray Tune: the private names of worker groups still exist and mean the same."""

import json
import os
import socket
import subprocess
import sys

import ray

from rtrain.ray_internals import torch_group
from tests.support.root import ROOT

JOIN = """
import json, sys
from types import SimpleNamespace
import psutil, ray, ray.train
from rtrain.ray_internals import torch_group

port, rank, workers, limit = map(int, sys.argv[2:])
context = SimpleNamespace(
    **{f"get_{name}": lambda value=value: value for name, value in {
        "local_rank": rank, "local_world_size": workers, "node_rank": 0, "world_rank": rank, "world_size": workers
    }.items()}
)
ray.train.get_context = lambda: context
import ray.train.torch
ray.train.torch.get_device = lambda: "cpu"
there = {"MASTER_ADDR": sys.argv[1], "MASTER_PORT": str(port)}
torch_group._join_group(rank, there, "gloo", workers, limit)
found = psutil.Process().net_connections("tcp")
print(json.dumps([one.laddr.ip for one in found if one.status == "LISTEN" and one.laddr.port != port]))
"""


def joining(port: int, rank: int, workers: int, limit_s: int) -> "subprocess.Popen[str]":
    address = ray.util.get_node_ip_address()
    arguments = [sys.executable, "-c", JOIN, address, *map(str, (port, rank, workers, limit_s))]
    environment = {name: value for name, value in os.environ.items() if name != torch_group.GLOO_INTERFACE_ENV}
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_workers_listen_where_ray_s_address_is_whatever_the_host_s_name_leads_to() -> None:
    port = free_port()
    processes = [joining(port, rank, 2, 60) for rank in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert json.loads(out) == [ray.util.get_node_ip_address()]


def test_a_worker_that_cannot_join_names_its_address_and_the_group_s() -> None:
    port, address = free_port(), ray.util.get_node_ip_address()
    _, err = joining(port, 1, 2, 2).communicate(timeout=100)
    last = err.strip().splitlines()[-1]
    assert f"at {address} (" in last
    assert f"{address}:{port}" in last


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def test_a_group_is_started_without_torch_by_ray_s_own_trainer_which_is_whole_afterwards() -> None:
    """In a fresh process, up to what is sent to the controller and read there."""
    program = (
        "import sys; from rtrain import ray_internals; from ray import cloudpickle\n"
        "made = ray_internals.make_trainer_class()(print, torch_config=ray_internals.make_torch_config('gloo', 5))\n"
        "sent = cloudpickle.dumps([made._create_default_callbacks(), made._get_train_func(), made.train_run_context])\n"
        "cloudpickle.loads(sent)\n"
        "left_out = ('torch', 'ray.train.torch', 'ray.train.v2.torch')\n"
        "print([name for name in left_out if name in sys.modules])\n"
        "import ray.train.torch; from ray.train.v2._internal.execution.local_mode import torch\n"
        "print(isinstance(made, ray.train.torch.TorchTrainer), ray.train.torch.prepare_model.__module__)\n"
        "print(torch.LocalTorchController.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "True ray.train.v2.torch.train_loop_utils", "LocalTorchController"], (
        done.stderr
    )
