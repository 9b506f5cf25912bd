"""The nodes of a run: whether each can read the rows and the model, and the machines of its workers for the run log."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import ray_internals
from rtrain.cluster import capacity, preflight
from rtrain.config import Config
from rtrain.core import env, hub
from rtrain.core.errors import ConfigError
from rtrain.data import row_reader, unlabeled
from rtrain.data.store import builder as store_builder
from rtrain.models import builder as models_builder
from rtrain.parallel import collectives
from rtrain.runs import run_folders

if TYPE_CHECKING:
    import torch

LOCAL_PREFIX = "file://"
DMI_FOLDER = Path("/sys/class/dmi/id")
"""Firmware information. AWS writes the instance type there; other clouds serve it over the network."""


def check_nodes(
    config: Config, source: row_reader.DataSource, weights: Path, root: Path
) -> tuple[row_reader.DataSource, Path]:
    """Return the rows and the model folder that every node of the Ray cluster can read.

    Hub files are copied under `root`, the folder of the token stores. The packaged model is copied only if a node lacks
    it or nodes may still join.

    Raises:
        UserError: a node does not share `root`, or cannot read a file that the user named.
    """
    recipe, hub_sources = config.recipe, run_folders.hub_names(config)
    for kind, name in hub_sources.values():
        hub.save_copy(kind, name, root)
    if "model.name" in hub_sources:
        weights = models_builder.resolve_folder(recipe.model.name, root)
    if any(kind == "dataset" for kind, _ in hub_sources.values()):
        source = unlabeled.inspect_all_sources(recipe, root)

    model_files = {} if root in weights.parents else hub.list_model_files(weights)
    local_files = {file.uri: file for file in source.files if file.uri.startswith(LOCAL_PREFIX)}
    paths = {uri: Path(uri.removeprefix(LOCAL_PREFIX)) for uri in local_files}
    required_files: dict[str, preflight.FileFingerprints] = {
        str(weights): preflight.fingerprint_files(model_files.values()),
        # By size alone: files may have gigabytes, and their digests are checked when they are read.
        **{uri: {path: (path.stat().st_size, None)} for uri, path in paths.items()},
    }
    unreadable_nodes = preflight.check_shared_folder(root, required_files)
    problems = []
    nodes_without_model = unreadable_nodes.pop(str(weights), None)
    is_packaged = recipe.model.name == hub.PACKAGED_MODEL and bool(model_files)
    if is_packaged and (
        nodes_without_model or (preflight.live_node_names() and capacity.load_autoscaler_config() is not None)
    ):
        name = f"{hub.PACKAGED_MODEL}@{models_builder.PACKAGED_SHA256[:16]}"
        weights = hub.save_files(model_files, root / hub.COPY_FOLDERS["model"] / name)
    elif nodes_without_model:
        problems.append(preflight.unreadable_file_problem("model.name", str(weights), nodes_without_model))
    if unreadable_nodes and not (root / ".tokens" / store_builder.compute_digest(recipe, source, weights)).is_dir():
        settings = {"train": "data.path", unlabeled.ROLE: unlabeled.SETTING}
        for uri, node_names in unreadable_nodes.items():
            setting = settings.get(local_files[uri].role, f"data.{local_files[uri].role}")
            problems.append(preflight.unreadable_file_problem(setting, str(paths[uri]), node_names))
    if problems:
        raise ConfigError(problems)
    return source, weights


# --------------------------------------------------------------------------- machines, from which costs are computed


def event_fields(device: "torch.device", gpu_share: float = 1.0) -> list[dict[str, Any]]:
    """Return the machines with their number of workers. Collective."""
    return merge_by_host(collectives.all_gather_object(describe_machine(device, gpu_share)))


def merge_by_host(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the workers' machines by host name; `workers` and `gpus` are sums."""
    counts = Counter(worker["host"] for worker in workers)
    by_host = {worker["host"]: worker for worker in workers}
    return [
        {**item, "workers": counts[host], "gpus": counts[host] * item["gpus"], "cores": item["cores"]}
        for host, item in by_host.items()
    ]


def describe_machine(device: "torch.device", gpu_share: float = 1.0) -> dict[str, Any]:
    """Return this worker's machine; `gpus` is this worker's share."""
    gpu_name = None
    if device.type == "cuda":
        import torch

        gpu_name = torch.cuda.get_device_name(device)
    return {
        "host": os.uname().nodename,
        "cores": env.available_cores(),
        "gpus": gpu_share if gpu_name is not None else 0,
        "gpu": gpu_name,
        "instance": instance_type(),
        "spot": capacity.matches_labels(capacity.current_node().labels, capacity.SPOT_LABELS),
    }


def describe_head() -> dict[str, Any]:
    """Return the head's machine. Its instance type is known only if the driver runs on it, as a job's driver does."""
    if ray_internals.HEAD_RESOURCE in capacity.current_node().resources:
        return {"host": os.uname().nodename, "instance": instance_type()}
    return {"host": capacity.head_hostname(), "instance": None}


def instance_type(dmi: Path = DMI_FOLDER) -> str | None:
    """Return the cloud's name of this machine's type; None if the firmware lacks it."""
    try:
        vendor, product_name = (
            (dmi / file).read_text(encoding="utf-8").strip() for file in ("sys_vendor", "product_name")
        )
    except OSError:
        return None
    return product_name if vendor == "Amazon EC2" else None
