"""Resolve `train.strategy=auto` by the memory forecast. The decision is made once, when the run is created, and stored
in its configuration."""

from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import capacity
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.store.store import Store
from rtrain.models import device, precision
from rtrain.parallel import layout
from rtrain.planning import memory_fit


def resolve_strategy(
    config: Config, selected_device: device.DeviceChoice, store: Store, model: Path
) -> tuple[Config, dict[str, Any] | None]:
    """Return the configuration with a strategy, and the fields of the `strategy` event (None if the strategy is
    manual).

    The layout of an elastic run fits the minimum number of workers too.

    Raises:
        ConfigError: no layout fits, or the memory of the nodes is unknown.

    """
    recipe = config.recipe
    if recipe.train.strategy == "manual":
        return config, None
    labels = config.deploy.cluster.labels
    nodes = [*capacity.nodes_with_labels(labels), *capacity.startable_node_types(labels).values()]
    micro_batch_spec = _micro_batch_spec(config, selected_device, store)

    def fit_strategy(workers: int) -> tuple[memory_fit.LayoutChoice, dict[str, Any]]:
        memory = memory_fit.tightest_memory_limit(nodes, selected_device.device, workers)
        if memory is None:
            reason = f"the memory of the cluster's {capacity.WORKER_RESOURCE[selected_device.device]}s is unknown"
            fix = "write manual, with train.zero_stage or train.tensor_parallel_size"
            raise ConfigError([Problem("train.strategy", "auto", reason, fix, code="unknown_memory")])
        layouts = layout.iter_valid_layouts(recipe, model, workers)
        choice = memory_fit.first_fitting_layout(
            memory_fit.memory_of_layouts(recipe, model, layouts, micro_batch_spec, workers, selected_device.device),
            memory,
        )
        memory_fields = {
            "used_bytes": round(memory.used_bytes(choice.worker_memory)),
            "limit_bytes": round(memory.limit_bytes),
        }
        return choice, {
            "reason": choice.reason,
            "settings": choice.layout.settings,
            "workers": workers,
            **memory_fields,
        }

    # The minimum has the largest shards; the maximum may share a node; a number that fills a node leaves the least
    # memory.
    min_workers = recipe.train.min_workers or selected_device.workers
    workers_by_node = (capacity.count_worker_slots([node], selected_device.device) for node in nodes)
    worker_counts = {
        min_workers,
        selected_device.workers,
        *(min(max(number, min_workers), selected_device.workers) for number in workers_by_node),
    }
    choices = [fit_strategy(workers) for workers in sorted(worker_counts)]
    parallel_layout = layout.merge_layouts([choice.layout for choice, _ in choices])
    event_fields = next((fields for choice, fields in choices if choice.layout == parallel_layout), choices[-1][1])
    return configuration.with_overrides(
        config, {"train.strategy": "manual", **parallel_layout.settings}
    ), event_fields | {"settings": parallel_layout.settings}


def _micro_batch_spec(config: Config, selected_device: device.DeviceChoice, store: Store) -> memory_fit.MicroBatchShape:
    recipe, lengths = config.recipe, store.column("train", "length")
    requested = recipe.train.precision
    # On a GPU all formats but fp32 have the same size.
    precision_format = (
        "bf16" if selected_device.device == "gpu" and requested == "auto" else precision.local_precision(requested)
    )
    return memory_fit.MicroBatchShape(
        memory_fit.largest_micro_batch(recipe, selected_device.device, int(lengths.max())),
        precision_format,
        max(1, len(store.manifest.labels)),
        tokens_per_step=recipe.global_batch_size * float(lengths.mean()),
    )
