"""`rtrain cluster init`: write a commented cluster file for a cloud.

`base.yaml.j2` holds the shared part; a template for each cloud fills its blocks.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rtrain.cluster.cluster_file import (
    FILL_IN,
    INSTANCES,
    INSTANCES_BY_NAME,
    InstanceType,
    find_instance_with_gpu,
    list_gpus,
)
from rtrain.core.errors import ConfigError, Problem

DEFAULT_MAX_WORKERS = 4
"""Maximum workers in a new file."""
NUMBER_WORDS = (
    *("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
)
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
    autoescape=False,
)
RAY_VERSION, FSSPEC_VERSION = "2.60.0", "2026.9.0"
"""Versions on the nodes; a test compares them with constraints.txt."""


@dataclass(frozen=True)
class CloudTemplate:
    head_instance: str | None = None
    worker_instance: str | None = None
    """Instance types; None if the user's machines, or SkyPilot, decide."""
    bucket: str = "s3://"
    private_network: str = "the network"
    file: str = "cluster.yaml"


CLOUD_TEMPLATES: Mapping[str, CloudTemplate] = {
    "aws": CloudTemplate("m7i.large", "c7i.2xlarge", private_network="the VPC"),
    "gcp": CloudTemplate("n2-standard-2", "n2-standard-8", bucket="gs://"),
    "azure": CloudTemplate("Standard_D2s_v5", "Standard_F8s_v2", bucket="abfs://"),
    "onprem": CloudTemplate(),
    "sky": CloudTemplate(file="sky.yaml"),
}


def render_cluster_file(
    cloud: str, gpu: str | None = None, instance: str | None = None, file: str | None = None
) -> str:
    """Render a cluster file whose commands call it `file`. Raises `ConfigError` for an unknown cloud, GPU or instance
    type."""
    if cloud not in CLOUD_TEMPLATES:
        fix = f"write one of {', '.join(CLOUD_TEMPLATES)}; rtrain cluster kubernetes prints manifests for KubeRay"
        raise ConfigError([Problem("--cloud", cloud, "unknown", fix, code="unknown_name")])
    cloud_template = CLOUD_TEMPLATES[cloud]
    if instance is None:
        worker = _worker_instance(cloud, cloud_template, gpu)
    else:
        worker = _find_instance(cloud, instance, gpu)
        gpu = worker.gpu
    variables: dict[str, Any] = {
        "cloud": cloud,
        "file": shlex.quote(file or cloud_template.file),
        "home": "/home/ubuntu",
        "most": DEFAULT_MAX_WORKERS,
        "ray": RAY_VERSION,
        "fsspec": FSSPEC_VERSION,
        "gpu": gpu,
        "head": INSTANCES_BY_NAME.get(cloud_template.head_instance or ""),
        "worker": worker,
        "bucket": cloud_template.bucket,
        "private_network": cloud_template.private_network,
        "example_workers": min(8, DEFAULT_MAX_WORKERS * worker.gpus) if worker and gpu else 8,
        "switches": f" --instance {instance}" if instance else f" --gpu {gpu}" if gpu else "",
    }
    template = TEMPLATES.get_template(f"{cloud}.yaml.j2")
    draft = template.render(variables, fill_ins="")
    count = sum(line.count(FILL_IN) for line in draft.splitlines() if not line.lstrip().startswith("#"))
    return template.render(variables, fill_ins=NUMBER_WORDS[count] if count < len(NUMBER_WORDS) else str(count))


def _worker_instance(cloud: str, cloud_template: CloudTemplate, gpu: str | None) -> InstanceType | None:
    if gpu is None or cloud_template.worker_instance is None:
        return INSTANCES_BY_NAME.get(cloud_template.worker_instance or "")
    instance = find_instance_with_gpu(cloud, gpu)
    if instance is None:
        reason = f"no known instance type of {cloud} has this GPU"
        fix = f"write one of {', '.join(list_gpus(cloud))}, or write another type into the file"
        raise ConfigError([Problem("--gpu", gpu, reason, fix, code="unknown_name")])
    return instance


def _find_instance(cloud: str, name: str, gpu: str | None) -> InstanceType:
    """The instance type by name. Raises `ConfigError` if it is unknown, or combined with `--gpu`."""
    if gpu is not None:
        reason = "sets the worker type, as --gpu does"
        raise ConfigError([Problem("--instance", name, reason, "leave one of them out", code="conflicting_settings")])
    instance = INSTANCES_BY_NAME.get(name)
    if instance is None or instance.cloud != cloud:
        names = [instance.name for instance in INSTANCES if instance.cloud == cloud]
        fix = f"write one of {', '.join(names)}, or write another one into the file" if names else "leave it out"
        raise ConfigError([Problem("--instance", name, f"unknown instance type of {cloud}", fix, code="unknown_name")])
    return instance
