"""The connection to Ray: what a private cluster is started with. Ray itself is met in the tests of what runs on it."""

import pytest

from rtrain import config
from rtrain.cluster.session import DATA_CPUS, data_cpus
from rtrain.errors import ConfigError


@pytest.mark.parametrize(("workers", "cpus"), [(1, 2), (2, 2), (4, 2), (7, 2), (8, 3), (16, 4), (100, 14), (1000, 127)])
def test_data_tasks_have_more_cpus_where_there_are_more_workers(workers: int, cpus: int) -> None:
    assert data_cpus(None, workers) == cpus >= DATA_CPUS


@pytest.mark.parametrize("workers", [1, 1000])
def test_data_tasks_have_as_many_cpus_as_are_asked_for(workers: int) -> None:
    assert config.load("intent").deploy.cluster.data_cpus is None
    asked = config.load("intent", {"cluster.data_cpus": 5}).deploy.cluster.data_cpus
    assert data_cpus(asked, workers) == 5


def test_no_cpu_for_data_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.data_cpus=0: "):
        config.load("intent", {"cluster.data_cpus": 0})
