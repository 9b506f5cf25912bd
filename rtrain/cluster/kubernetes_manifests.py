"""`rtrain cluster kubernetes`: KubeRay manifests of a cluster, a job and a service, with the versions of launcher
files.

Pods have no permissions, do not run as root, and are reachable only by each other and by KubeRay. A pod that stops
drains its node first, so that a run saves and resumes without it; the head's pod, which hosts the jobs' drivers,
requests a checkpoint and the end of the jobs.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from rtrain.cluster import capacity
from rtrain.cluster.jobs import job_names
from rtrain.cluster.render import RAY_VERSION, TEMPLATES
from rtrain.core.errors import ConfigError, Problem

YamlMapping = dict[str, Any]
SHARED_MOUNT = "/shared"
DRAIN_S = 90
"""Seconds that a pod has to drain; Kubernetes kills it `TERMINATION_MARGIN_S` later."""
TERMINATION_MARGIN_S = 30
TEMPLATE_VALUES = {
    "ray": RAY_VERSION,
    "shared_mount": SHARED_MOUNT,
    # The secret with the API key file, in the endpoint's pods.
    "keys_mount": "/keys",
    "drain_s": DRAIN_S,
    "grace_s": DRAIN_S + TERMINATION_MARGIN_S,
    "idle_s": 300,
    "serve_port": 8000,
    # Label of all objects of a cluster. KubeRay's own labels must not be set: its services select the head by some.
    "cluster_label": "rtrain-cluster",
    "limits_variable": capacity.AUTOSCALER_FILE_VARIABLE,
}
WORKER_ROLE = {"rtrain-role": "workers"}
"""Ray labels of the workers' nodes, for `cluster.labels` and `serve.labels`."""
DATA_ROLE = {"rtrain-role": "data"}
"""Ray labels of nodes for data tasks, for `cluster.data_labels`."""
BUCKET_DRIVER = "gcsfuse.csi.storage.gke.io"
BUCKET_SIDECAR = {"gke-gcsfuse/volumes": "true"}


@dataclass(frozen=True)
class ManifestOptions:
    image: str = "FILL-IN/rtrain@sha256:FILL-IN"
    name: str = "rtrain"
    workers: int = 4
    """Maximum number of worker pods."""
    cpus: int = 8
    memory: str = "16Gi"
    gpus: int = 0
    storage: str = "100Gi"
    storage_class: str = "FILL-IN"
    bucket: str | None = None
    """Google Cloud Storage bucket instead of a claim."""
    data_workers: int = 0
    """Maximum number of pods for data tasks only, without GPUs: a second worker group."""
    verb: tuple[str, ...] = (
        *("train", "intent", "--data", f"{SHARED_MOUNT}/messages.csv", "--out", f"{SHARED_MOUNT}/runs/intent"),
    )
    artifact: str | None = None
    """Artifact of the service; None: the artifact of the job's run."""

    @property
    def served_artifact(self) -> str:
        """The run is unknown for a search, whose winner is not known yet, and for other verbs."""
        out, verb = (job_names.option_value(self.verb, "--out") or "").rstrip("/"), self.verb[:1]
        trial = "/trial-FILL-IN" if verb == ("tune",) else ""
        run = f"{out}{trial}" if verb and verb[0] in job_names.SUPERVISED_VERBS else f"{SHARED_MOUNT}/runs/FILL-IN"
        return self.artifact or f"{run}/artifact"


def parse_bucket_name(address: str) -> str:
    """The bucket name of a URL. Raises `ConfigError` for storage that cannot hold a run folder."""
    match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/?", address)
    if match is None:
        reason = "only Google Cloud Storage can be mounted for run folders, which need appends and renames"
        fix = "write gs://NAME; elsewhere keep the claim, and write --set cluster.storage=s3://... in the job's verb"
        raise ConfigError([Problem("--bucket", address, reason, fix, code="unsupported_storage")])
    return match[1]


NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""KubeRay appends to a cluster's name; Kubernetes names have at most 63 characters."""
MEMORY_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?|k)?")


def check_options(settings: ManifestOptions) -> None:
    """Raise `ConfigError` for a name or memory amount that Kubernetes rejects."""
    problems = []
    if not NAME_PATTERN.fullmatch(settings.name):
        fix = "write up to 47 of a-z, 0-9 and -, a letter first"
        problems.append(Problem("--name", settings.name, "is not a Kubernetes name", fix, code="invalid_name"))
    if not MEMORY_PATTERN.fullmatch(settings.memory):
        reason, fix = "is not an amount of memory", "write e.g. 16Gi"
        problems.append(Problem("--memory", settings.memory, reason, fix, code="invalid_amount"))
    if problems:
        raise ConfigError(problems)


class PodGroup(NamedTuple):
    name: str
    labels: YamlMapping
    max_replicas: int
    min_replicas: int = 0
    gpus: int = 0


class PodCluster(NamedTuple):
    """A RayCluster: its worker groups, and its limits in the form of an autoscaler's file."""

    groups: list[PodGroup]
    autoscaler_limits: str
    is_endpoint: bool


def make_cluster(settings: ManifestOptions, *, is_endpoint: bool = False) -> PodCluster:
    """The cluster of jobs, or of an endpoint, which has neither GPUs nor data tasks."""
    groups = [PodGroup("workers", WORKER_ROLE, settings.workers, gpus=settings.gpus)]
    if is_endpoint:
        groups = [PodGroup("workers", WORKER_ROLE, settings.workers, min_replicas=1)]
    elif settings.data_workers:
        groups.append(PodGroup("data", DATA_ROLE, settings.data_workers))
    node_types = {
        group.name: {
            "resources": {"CPU": settings.cpus, **({"GPU": group.gpus} if group.gpus else {})},
            "labels": dict(group.labels),
            **({"max_workers": group.max_replicas} if len(groups) > 1 else {}),
        }
        for group in groups
    }
    limits = {"max_workers": sum(group.max_replicas for group in groups), "available_node_types": node_types}
    return PodCluster(groups, json.dumps(limits), is_endpoint)


class CommentedManifest(NamedTuple):
    """A document, and the comment above it."""

    comment: str
    manifest: YamlMapping


def build_manifests(settings: ManifestOptions) -> list[CommentedManifest]:
    text = TEMPLATES.get_template("kubernetes.yaml.j2").render(
        TEMPLATE_VALUES,
        settings=settings,
        entrypoint=shlex.join(["python", "-m", job_names.JOB_ENTRYPOINT, *settings.verb]),
        jobs=make_cluster(settings),
        endpoint=make_cluster(settings, is_endpoint=True),
        bucket_driver=BUCKET_DRIVER,
        bucket_sidecar=BUCKET_SIDECAR,
    )
    manifests: list[YamlMapping] = list(yaml.safe_load_all(text))
    for manifest in manifests:
        if "serveConfigV2" in manifest.get("spec", {}):  # a text of YAML
            manifest["spec"]["serveConfigV2"] = yaml.safe_dump(manifest["spec"]["serveConfigV2"], sort_keys=False)
    return [CommentedManifest(manifest.pop("comment"), manifest) for manifest in manifests]


def render_manifests(settings: ManifestOptions, kinds: Sequence[str] = ()) -> str:
    """Render the manifests as YAML, each under its comment; only `kinds`, if given."""
    selected = [part for part in build_manifests(settings) if not kinds or part.manifest["kind"] in kinds]
    return "---\n".join(_format_manifest(part) for part in selected)


def render_dockerfile(gpu: bool = False) -> str:
    """The image of the pods, for the local Python version, since both ends of a job must match. With `gpu`, torch comes
    with CUDA."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return TEMPLATES.get_template("Dockerfile.j2").render(ray=RAY_VERSION, python=python, gpu=gpu)


def _format_manifest(commented: CommentedManifest) -> str:
    comment = "".join(f"# {line}\n" for line in commented.comment.splitlines())
    return comment + yaml.dump(commented.manifest, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """YAML style: multi-line strings as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
