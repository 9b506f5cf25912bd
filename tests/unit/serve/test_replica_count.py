"""How many replicas a machine gets where nobody has said it."""

from pathlib import Path
from typing import Any

import pytest

from rtrain.config import ServeConfig
from serve import replica_count
from serve.replica_count import HostCapacity


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    (folder / "model.int8.bin").write_bytes(bytes(20_000_000))
    return folder


@pytest.mark.parametrize(
    ("host", "number", "line"),
    [
        (HostCapacity(1, 8000), 1, ""),
        (HostCapacity(2, 24_000), 1, ""),
        (HostCapacity(3, 24_000), 2, "2 replicas, by 3 cores (serve.replicas)"),
        (HostCapacity(4, 24_000), 3, "3 replicas, by 4 cores (serve.replicas)"),
        (HostCapacity(64, 240_000), 4, "4 replicas, by 64 cores (serve.replicas)"),
        (HostCapacity(64, 2_000), 2, "2 replicas, by 64 cores and 2.0 GB of free memory (serve.replicas)"),
        (HostCapacity(64, 100), 1, "1 replica, by 64 cores and 0.1 GB of free memory (serve.replicas)"),
        (HostCapacity(64, 240_000, is_multi_node=True), 1, ""),
    ],
)
def test_a_core_each_beside_haproxy_s_as_far_as_memory_goes(
    folder: Path, host: HostCapacity, number: int, line: str
) -> None:
    settings, message = replica_count.resolve_replicas(ServeConfig(), [folder], host)
    assert (settings.replicas, message) == (number, line)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"replicas": 7}, 7),
        ({"max_replicas": 3}, 1),
        ({"threads": 4}, 3),
        ({"threads": 32}, 1),
    ],
)
def test_what_is_said_counts_and_what_it_leaves_open_is_in_keeping(
    folder: Path, options: dict[str, Any], number: int
) -> None:
    assert replica_count.resolve_replicas(ServeConfig(**options), [folder], HostCapacity(16, 1e6))[0].replicas == number


def test_several_models_have_engines_and_memory_of_their_own(folder: Path) -> None:
    assert replica_count.resolve_replicas(ServeConfig(), [folder] * 3, HostCapacity(8, 1e6))[0].replicas == 2
    assert replica_count.resolve_replicas(ServeConfig(), [folder] * 3, HostCapacity(16, 3_000))[0].replicas == 1


def test_a_graph_that_keeps_plans_by_shape_needs_memory_for_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.int8.bin").read_bytes())
    assert replica_count.resolve_replicas(ServeConfig(), [tmp_path], HostCapacity(64, 1_000))[0].replicas == 2
    assert replica_count.resolve_replicas(ServeConfig(), [folder], HostCapacity(64, 1_000))[0].replicas == 1
