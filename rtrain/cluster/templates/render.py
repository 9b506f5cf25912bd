"""`rtrain cluster init`: a commented file of a cluster, for each cloud from the same source.

What all clouds share stands once, in `base.yaml.j2`; a cloud's own file fills its blocks.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rtrain.cluster import instance_types
from rtrain.cluster.checks.check_file import FILL_IN
from rtrain.cluster.instance_types import BY_NAME, Instance
from rtrain.core.errors import ConfigError, Problem

MOST = 4
"""Workers at a time, in a new file."""
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
HERE = Path(__file__).parent
RAY, FSSPEC = "2.60.0", "2026.9.0"
"""Versions that nodes get; a test compares them with constraints.txt."""


@dataclass(frozen=True)
class Place:
    """Where a cluster is made."""

    head: str | None = None
    worker: str | None = None
    """Instance types; None where the user's machines, or SkyPilot, decide."""
    bucket: str = "s3://"
    private_network: str = "the network"
    file: str = "cluster.yaml"


PLACES: Mapping[str, Place] = {
    "aws": Place("m7i.large", "c7i.2xlarge", private_network="the VPC"),
    "gcp": Place("n2-standard-2", "n2-standard-8", bucket="gs://"),
    "azure": Place("Standard_D2s_v5", "Standard_F8s_v2", bucket="abfs://"),
    "onprem": Place(),
    "sky": Place(file="sky.yaml"),
}


def render(cloud: str, gpu: str | None = None, instance: str | None = None, file: str | None = None) -> str:
    """The text of a file, whose commands name it `file`. Raises `ConfigError` for an unknown cloud, GPU or type of
    instance."""
    place = _place(cloud)
    if instance is None:
        worker = _worker(cloud, place, gpu)
    else:
        worker = _instance(cloud, instance, gpu)
        gpu = worker.gpu
    known: dict[str, Any] = {
        "cloud": cloud,
        "file": shlex.quote(file or place.file),
        "home": "/home/ubuntu",
        "most": MOST,
        "ray": RAY,
        "fsspec": FSSPEC,
        "gpu": gpu,
        "head": BY_NAME.get(place.head or ""),
        "worker": worker,
        "bucket": place.bucket,
        "private_network": place.private_network,
        "example_workers": min(8, MOST * worker.gpus) if worker and gpu else 8,
        "switches": f" --instance {instance}" if instance else f" --gpu {gpu}" if gpu else "",
    }
    template = _templates().get_template(f"{cloud}.yaml.j2")
    first = template.render(known, fill_ins="")
    count = sum(line.count(FILL_IN) for line in first.splitlines() if not line.lstrip().startswith("#"))
    return template.render(known, fill_ins=NUMBERS[count] if count < len(NUMBERS) else str(count))


def _place(cloud: str) -> Place:
    if cloud in PLACES:
        return PLACES[cloud]
    fix = f"write one of {', '.join(PLACES)}; rtrain cluster kubernetes prints manifests for KubeRay"
    raise ConfigError([Problem("--cloud", cloud, "unknown", fix, code="unknown_name")])


def _worker(cloud: str, place: Place, gpu: str | None) -> Instance | None:
    if gpu is None or place.worker is None:
        return BY_NAME.get(place.worker or "")
    found = instance_types.with_gpu(cloud, gpu)
    if found is None:
        have = ", ".join(instance_types.gpus(cloud))
        reason = f"no machine of {cloud} with such a GPU is in the table"
        fix = f"write one of {have}, and put the type of another one into the file"
        raise ConfigError([Problem("--gpu", gpu, reason, fix, code="unknown_name")])
    return found


def _instance(cloud: str, name: str, gpu: str | None) -> Instance:
    """The type of that name. Raises `ConfigError` where the table has none such, and beside what chooses one too."""
    if gpu is not None:
        reason = "chooses the workers' type as --gpu does"
        raise ConfigError([Problem("--instance", name, reason, "leave one of them out", code="conflicting_settings")])
    found = BY_NAME.get(name)
    if found is None or found.cloud != cloud:
        have = ", ".join(one.name for one in instance_types.INSTANCES if one.cloud == cloud)
        fix = f"write one of {have}, and put another one into the file" if have else "leave it out"
        reason = f"no such type of {cloud} is in the table"
        raise ConfigError([Problem("--instance", name, reason, fix, code="unknown_name")])
    return found


def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
