"""CPUs and nodes of the data tasks, which read a run's rows and stream them to its workers."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

MIN_DATA_CPUS = 2
"""Minimum logical CPUs of Ray Data beside the workers' CPUs: one for a reading task, and one for a task that may wait
for it. Without them a data stream hangs silently."""
WORKERS_PER_DATA_CPU = 8
"""Number of workers per additional CPU of Ray Data."""


def resolve_data_cpus(data_cpus: int | None, workers: int) -> int:
    """Logical CPUs reserved for the data tasks of `workers` workers, beside the workers' own.

    `data_cpus` is the setting `cluster.data_cpus`; None takes `MIN_DATA_CPUS`, and one more per `WORKERS_PER_DATA_CPU`
    workers. All users take this number: a private cluster starts with it (`connection.session`), a shared cluster must
    provide it (`ResourceRequest`, `preflight.check_capacity`), the autoscaler is asked for it (`autoscaler_requests`),
    and `cpus_per_data_task` divides it.
    """
    return MIN_DATA_CPUS + workers // WORKERS_PER_DATA_CPU if data_cpus is None else data_cpus


def cpus_per_data_task(data_cpus: int | None, workers: int) -> float:
    """Logical CPUs of a data task: one, or a fraction if each worker's stream needs a task within the data CPUs. A task
    without capacity would make the autoscaler start a node."""
    return min(1.0, math.floor(100 * resolve_data_cpus(data_cpus, workers) / workers) / 100)


@contextmanager
def restrict_data_tasks(labels: Mapping[str, str]) -> Iterator[None]:
    """Restrict the data tasks that this process starts in the `with` block to nodes with the labels."""
    if not labels:
        yield
        return
    from ray.data import DataContext

    options = DataContext.get_current().execution_options
    previous_selector, options.label_selector = options.label_selector, dict(labels)
    try:
        yield
    finally:
        options.label_selector = previous_selector
