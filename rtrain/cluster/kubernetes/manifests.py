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
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from rtrain.cluster import capacity
from rtrain.cluster.jobs import job_names
from rtrain.cluster.templates.render import RAY_VERSION
from rtrain.core.errors import ConfigError, Problem

YamlMapping = dict[str, Any]
SHARED_MOUNT = "/shared"
KEYS_MOUNT = "/keys"
"""Mount path of the secret with the API key file, in the endpoint's pods."""
DRAIN_S = 90
"""Seconds that a pod has to drain; Kubernetes kills it `TERMINATION_MARGIN_S` later."""
TERMINATION_MARGIN_S = 30
IDLE_TIMEOUT_S = 300
SERVE_PORT = 8000
START_HOOK = "rtrain.cluster.connection.on_node_start"
JOB_ENTRYPOINT = "rtrain.cluster.jobs.entry"
CLUSTER_LABEL = "rtrain-cluster"
"""Label of all objects of a cluster, with its name as value. KubeRay's own labels must not be set: its services select
the head by some of them."""
WORKER_ROLE = {"rtrain-role": "workers"}
"""Ray labels of the workers' nodes, for `cluster.labels` and `serve.labels`."""
DATA_ROLE = {"rtrain-role": "data"}
"""Ray labels of nodes for data tasks, for `cluster.data_labels`."""
BUCKET_DRIVER = "gcsfuse.csi.storage.gke.io"
BUCKET_SIDECAR = {"gke-gcsfuse/volumes": "true"}
BUCKET_OPTIONS = (
    "implicit-dirs,rename-dir-limit=100000,uid=1000,gid=1000,"
    "metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
)
"""Mount options of Google's bucket driver: checkpoints and stores are renamed as folders, which the driver supports up
to this number of files. Its one-minute metadata cache would let a node miss a spot notice, or handle one twice.
(Mounted S3 buckets support neither appends nor renames; a run's log and checkpoints need both.)"""
CLIENT_LABELS = {"rtrain-client": "true"}
"""Label of pods that may call the endpoint."""
OPERATOR_LABELS = {"app.kubernetes.io/component": "kuberay-operator"}
"""Labels of KubeRay's pod by its Helm chart and by its own manifests; their `name` labels differ."""


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
        "train",
        "intent",
        "--data",
        f"{SHARED_MOUNT}/messages.csv",
        "--out",
        f"{SHARED_MOUNT}/runs/intent",
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
        problems.append(
            Problem("--memory", settings.memory, "is not an amount of memory", "write e.g. 16Gi", code="invalid_amount")
        )
    if problems:
        raise ConfigError(problems)


class CommentedManifest(NamedTuple):
    """A document, and the comment above it."""

    comment: str
    manifest: YamlMapping


def build_manifests(settings: ManifestOptions) -> list[CommentedManifest]:
    claim = CommentedManifest(
        "The folder that all pods share: token stores, checkpoints and artifacts are written by one and read by\n"
        "all. Its class must know ReadWriteMany (NFS, EFS, Filestore, Azure Files).",
        _volume_claim(settings),
    )
    identity = CommentedManifest(
        "Who the pods are to Google: bind it to an account that may read and write the bucket. The cluster needs\n"
        "the driver of Cloud Storage FUSE and workload identity.",
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(settings, "-bucket")},
    )
    return [
        identity if settings.bucket else claim,
        CommentedManifest(
            "Pods of the cluster reach each other, KubeRay reaches the head, and pods with the label rtrain-client\n"
            "the endpoint; nobody else reaches any. The network plug-in must know NetworkPolicy.",
            _network_policy(settings),
        ),
        CommentedManifest(
            "A cluster for jobs by hand: rtrain cluster submit, with its port 8265 forwarded.", _ray_cluster(settings)
        ),
        CommentedManifest(
            "A job with a cluster of its own, which ends with it. It is retried after a failure, and resumes from\n"
            "its newest checkpoint: the entry point resumes the run that it finds.",
            _ray_job(settings),
        ),
        CommentedManifest(
            "The endpoint: its replicas come with the requests, and their pods with them. A new artifact is served\n"
            "before the old one goes. It asks for keys: rtrain serve keys add keys.json NAME\n"
            f"kubectl create secret generic {settings.name}-keys --from-file=keys.json",
            _ray_service(settings),
        ),
    ]


def render_manifests(settings: ManifestOptions, kinds: Sequence[str] = ()) -> str:
    """Render the manifests as YAML, each under its comment; only `kinds`, if given."""
    selected = [part for part in build_manifests(settings) if not kinds or part.manifest["kind"] in kinds]
    return "---\n".join(_format_manifest(part) for part in selected)


def render_dockerfile(gpu: bool = False) -> str:
    """The image of the pods, for the local Python version, since both ends of a job must match. With `gpu`, torch comes
    with CUDA."""
    source = (Path(__file__).parent / "Dockerfile.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False).from_string(source)
    return template.render(ray=RAY_VERSION, python=f"{sys.version_info.major}.{sys.version_info.minor}", gpu=gpu)


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


# --------------------------------------------------------------------------------------------------------- manifests


def _cluster_labels(settings: ManifestOptions) -> YamlMapping:
    return {CLUSTER_LABEL: settings.name}


def _metadata(settings: ManifestOptions, suffix: str = "") -> YamlMapping:
    return {"name": f"{settings.name}{suffix}", "labels": _cluster_labels(settings)}


def _volume_claim(settings: ManifestOptions) -> YamlMapping:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(settings, "-shared"),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": settings.storage_class,
            "resources": {"requests": {"storage": settings.storage}},
        },
    }


def _network_policy(settings: ManifestOptions) -> YamlMapping:
    any_namespace: YamlMapping = {"namespaceSelector": {}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(settings),
        "spec": {
            "podSelector": {"matchLabels": _cluster_labels(settings)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": _cluster_labels(settings)}}]},
                {
                    "from": [{**any_namespace, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}],
                    "ports": [{"protocol": "TCP", "port": 8265}, {"protocol": "TCP", "port": SERVE_PORT}],
                },
                {
                    "from": [{"podSelector": {"matchLabels": dict(CLIENT_LABELS)}}],
                    "ports": [{"protocol": "TCP", "port": SERVE_PORT}],
                },
            ],
        },
    }


def _ray_cluster(settings: ManifestOptions) -> YamlMapping:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(settings),
        "spec": _cluster_spec(settings),
    }


def _ray_job(settings: ManifestOptions) -> YamlMapping:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(settings, "-job"),
        "spec": {
            "entrypoint": shlex.join(["python", "-m", JOB_ENTRYPOINT, *settings.verb]),
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": IDLE_TIMEOUT_S,
            "backoffLimit": 3,
            "submitterPodTemplate": {
                "metadata": {"labels": _cluster_labels(settings)},
                "spec": {
                    **_pod_security(),
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "containers": [
                        {
                            "name": "submitter",
                            "image": settings.image,
                            "resources": _resources(1, "1Gi"),
                            "securityContext": _container_security(),
                        }
                    ],
                },
            },
            "rayClusterSpec": _cluster_spec(settings),
        },
    }


def _ray_service(settings: ManifestOptions) -> YamlMapping:
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": SERVE_PORT},
        "applications": [
            {
                "name": "rtrain",
                "route_prefix": "/",
                "import_path": "serve.kuberay_app:application",
                "args": {"artifact": settings.served_artifact, "keys": f"{KEYS_MOUNT}/keys.json"},
                "deployments": [
                    {
                        "name": "rtrain",
                        "ray_actor_options": {"num_cpus": 1},
                        "autoscaling_config": {"min_replicas": 1, "max_replicas": settings.workers},
                    }
                ],
            }
        ],
    }
    probe = {"httpGet": {"path": "/v2/health/ready", "port": SERVE_PORT}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": _metadata(settings, "-service"),
        "spec": {
            "serveConfigV2": yaml.safe_dump(config, sort_keys=False),
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": _cluster_spec(settings, probe=probe, min_replicas=1, gpus=0),
        },
    }


def _cluster_spec(
    settings: ManifestOptions, probe: YamlMapping | None = None, min_replicas: int = 0, gpus: int | None = None
) -> YamlMapping:
    """The cluster: a head without CPUs for tasks, and autoscaled workers."""
    gpus = settings.gpus if gpus is None else gpus
    head = _pod(settings, "ray-head", _resources(2, "8Gi"), keys=probe is not None)
    head["spec"]["containers"][0]["ports"] = [
        {"containerPort": 6379, "name": "gcs-server"},
        {"containerPort": 8265, "name": "dashboard"},
        {"containerPort": SERVE_PORT, "name": "serve"},
    ]
    groups = [PodGroup("workers", WORKER_ROLE, settings.workers, min_replicas, gpus)]
    if settings.data_workers and probe is None:  # an endpoint has no data tasks
        groups.append(PodGroup("data", DATA_ROLE, settings.data_workers))
    # KubeRay does not report its limits to jobs.
    node_types = {
        group.name: {
            "resources": {"CPU": settings.cpus, **({"GPU": group.gpus} if group.gpus else {})},
            "labels": dict(group.labels),
            **({"max_workers": group.max_replicas} if len(groups) > 1 else {}),
        }
        for group in groups
    }
    autoscaler_limits = {"max_workers": sum(group.max_replicas for group in groups), "available_node_types": node_types}
    head["spec"]["containers"][0]["env"].append(
        {"name": capacity.AUTOSCALER_FILE_VARIABLE, "value": json.dumps(autoscaler_limits)}
    )
    pre_stop = ["python", "-m", "rtrain.cluster.graceful_shutdown", "--seconds", str(DRAIN_S)]
    head["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": pre_stop}}}
    head["spec"]["terminationGracePeriodSeconds"] = DRAIN_S + TERMINATION_MARGIN_S
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": IDLE_TIMEOUT_S,
            "resources": _resources(1, "1Gi"),
            "securityContext": _container_security(),
        },
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0"},
            "template": head,
        },
        "workerGroupSpecs": [_worker_group(settings, group, probe) for group in groups],
    }


class PodGroup(NamedTuple):
    """A worker group."""

    name: str
    labels: YamlMapping
    max_replicas: int
    min_replicas: int = 0
    gpus: int = 0


def _worker_group(settings: ManifestOptions, group: PodGroup, probe: YamlMapping | None) -> YamlMapping:
    resources = _resources(settings.cpus, settings.memory, group.gpus)
    pod = _pod(settings, "ray-worker", resources, keys=probe is not None)
    pod["spec"]["automountServiceAccountToken"] = False
    pre_stop = ["python", "-m", "rtrain.cluster.spot_watcher", "now", "--wait", "--seconds", str(DRAIN_S)]
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": pre_stop}}}
    pod["spec"]["terminationGracePeriodSeconds"] = DRAIN_S + TERMINATION_MARGIN_S
    if probe is not None:
        pod["spec"]["containers"][0]["readinessProbe"] = probe
    return {
        "groupName": group.name,
        "replicas": group.min_replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        "idleTimeoutSeconds": IDLE_TIMEOUT_S,
        "labels": dict(group.labels),
        "rayStartParams": {},
        "template": pod,
    }


def _pod(settings: ManifestOptions, container: str, resources: YamlMapping, keys: bool) -> YamlMapping:
    shared_volume: YamlMapping = {"persistentVolumeClaim": {"claimName": f"{settings.name}-shared"}}
    if settings.bucket:
        attributes = {"bucketName": settings.bucket, "mountOptions": BUCKET_OPTIONS}
        shared_volume = {"csi": {"driver": BUCKET_DRIVER, "volumeAttributes": attributes}}
    mounts: list[YamlMapping] = [{"name": "shared", "mountPath": SHARED_MOUNT}]
    volumes: list[YamlMapping] = [{"name": "shared", **shared_volume}]
    if keys:
        mounts.append({"name": "keys", "mountPath": KEYS_MOUNT, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": f"{settings.name}-keys"}})
    return {
        "metadata": {
            "labels": _cluster_labels(settings),
            **({"annotations": dict(BUCKET_SIDECAR)} if settings.bucket else {}),
        },
        "spec": {
            **_pod_security(),
            **({"serviceAccountName": f"{settings.name}-bucket"} if settings.bucket else {}),
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": container,
                    "image": settings.image,
                    "env": [{"name": "RAY_START_HOOK", "value": START_HOOK}],
                    "resources": resources,
                    "securityContext": _container_security(),
                    # Without a mount KubeRay makes /dev/shm as large as the pod's memory.
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _resources(cpus: int, memory: str, gpus: int = 0) -> YamlMapping:
    """Equal request and limit: a pod above its request is evicted first."""
    amounts: YamlMapping = {"cpu": str(cpus), "memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _pod_security() -> YamlMapping:
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }


def _container_security() -> YamlMapping:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
