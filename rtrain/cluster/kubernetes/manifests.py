"""`rtrain cluster kubernetes`: what KubeRay makes a cluster, a job and a service of, from the same pins as a
launcher's file.

Pods hold no right of their own, run as no root, and are reached by each other and by KubeRay alone. A pod that is to go
drains its node first, so that a run saves and goes on without it; that of the head, on which the jobs' drivers live,
asks them to end with a checkpoint.
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
from rtrain.cluster.templates.render import RAY
from rtrain.core.errors import ConfigError, Problem

Map = dict[str, Any]
SHARED = "/shared"
KEYS = "/keys"
"""Where the pods of the endpoint have the secret with the file of keys."""
DRAIN_S = 90
"""Seconds that a pod has to drain; Kubernetes ends it `SPARE_S` later."""
SPARE_S = 30
IDLE_S = 300
PORT = 8000
HOOK = "rtrain.cluster.connection.on_node_start"
ENTRY = "rtrain.cluster.jobs.entry"
LABEL = "rtrain-cluster"
"""The label of all that is one cluster's, with its name as value. KubeRay's own are not to be taken: its services look
for the head by some of them, and find none where a pod's template says otherwise."""
ROLE = {"rtrain-role": "workers"}
"""Ray's labels of the workers' nodes, by which `cluster.labels` and `serve.labels` name them."""
DATA_ROLE = {"rtrain-role": "data"}
"""The same of nodes for data tasks, for `cluster.data_labels`."""
BUCKET_DRIVER = "gcsfuse.csi.storage.gke.io"
BUCKET_SIDECAR = {"gke-gcsfuse/volumes": "true"}
BUCKET_OPTIONS = (
    "implicit-dirs,rename-dir-limit=100000,uid=1000,gid=1000,"
    "metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
)
"""Checkpoints and stores are moved to their places as whole folders, which this driver does only up to such a number of
files. What it remembers of them for a minute would let a node miss a spot notice, or take one twice. (Buckets of S3,
mounted, neither append to a file nor rename one: a run's log needs the one, its checkpoints the other.)"""
CLIENTS = {"rtrain-client": "true"}
"""Pods with this label may ask the endpoint."""
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
"""What KubeRay's pod is labelled by its Helm chart and by its own manifests; as `name` they say different things."""


@dataclass(frozen=True)
class Settings:
    image: str = "FILL-IN/rtrain@sha256:FILL-IN"
    name: str = "rtrain"
    workers: int = 4
    """The most workers' pods at a time."""
    cpus: int = 8
    memory: str = "16Gi"
    gpus: int = 0
    storage: str = "100Gi"
    storage_class: str = "FILL-IN"
    bucket: str | None = None
    """Google's, by its name, in place of a claim."""
    data_workers: int = 0
    """The most pods for data tasks alone at a time, without GPUs: a second group of workers."""
    verb: tuple[str, ...] = ("train", "intent", "--data", f"{SHARED}/messages.csv", "--out", f"{SHARED}/runs/intent")
    artifact: str | None = None
    """What the service serves; None for that of the job's run."""

    @property
    def served(self) -> str:
        """Which of a search's trials wins is not known before, nor which run another verb means."""
        out, verb = (job_names.option(self.verb, "--out") or "").rstrip("/"), self.verb[:1]
        trial = "/trial-FILL-IN" if verb == ("tune",) else ""
        run = f"{out}{trial}" if verb and verb[0] in job_names.SUPERVISED else f"{SHARED}/runs/FILL-IN"
        return self.artifact or f"{run}/artifact"


def bucket_of(address: str) -> str:
    """The name of a bucket by its address. Raises `ConfigError` for one in which no run folder can lie."""
    found = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/?", address)
    if found is None:
        reason = "only a bucket of Google's, mounted, takes a run's folder: it must append to files and rename them"
        fix = "write gs://NAME; elsewhere keep the claim, and write --set cluster.storage=s3://... in the job's verb"
        raise ConfigError([Problem("--bucket", address, reason, fix, code="unsupported_storage")])
    return found[1]


NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
"""KubeRay appends to a cluster's name; a name of Kubernetes has 63 characters at most."""
MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?|k)?")


def check(settings: Settings) -> None:
    """Raise `ConfigError` for a name or an amount of memory that Kubernetes refuses."""
    problems = []
    if not NAME.fullmatch(settings.name):
        fix = "write up to 47 of a-z, 0-9 and -, a letter first"
        problems.append(Problem("--name", settings.name, "is no name of Kubernetes", fix, code="invalid_name"))
    if not MEMORY.fullmatch(settings.memory):
        problems.append(
            Problem("--memory", settings.memory, "is no amount of memory", "write e.g. 16Gi", code="invalid_amount")
        )
    if problems:
        raise ConfigError(problems)


class Part(NamedTuple):
    """A document, and what is said above it."""

    comment: str
    manifest: Map


def parts(settings: Settings) -> list[Part]:
    claim = Part(
        "The folder that all pods share: token stores, checkpoints and artefacts are written by one and read by\n"
        "all. Its class must know ReadWriteMany (NFS, EFS, Filestore, Azure Files).",
        _claim(settings),
    )
    identity = Part(
        "Who the pods are to Google: bind it to an account that may read and write the bucket. The cluster needs\n"
        "the driver of Cloud Storage FUSE and workload identity.",
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named(settings, "-bucket")},
    )
    return [
        identity if settings.bucket else claim,
        Part(
            "Pods of the cluster reach each other, KubeRay reaches the head, and pods with the label rtrain-client\n"
            "the endpoint; nobody else reaches any. The network plug-in must know NetworkPolicy.",
            _policy(settings),
        ),
        Part("A cluster for jobs by hand: rtrain cluster submit, with its port 8265 forwarded.", _cluster(settings)),
        Part(
            "A job with a cluster of its own, which ends with it. It is tried again where it fails, and goes on from\n"
            "its newest checkpoint: the entry point resumes the run that it finds.",
            _job(settings),
        ),
        Part(
            "The endpoint: its replicas come with the requests, and their pods with them. A new artefact is served\n"
            "before the old one goes. It asks for keys: rtrain serve keys add keys.json NAME\n"
            f"kubectl create secret generic {settings.name}-keys --from-file=keys.json",
            _service(settings),
        ),
    ]


def text(settings: Settings, kinds: Sequence[str] = ()) -> str:
    """The manifests as YAML, each under its comment; those of `kinds` alone, where some are named."""
    chosen = [part for part in parts(settings) if not kinds or part.manifest["kind"] in kinds]
    return "---\n".join(_commented(part) for part in chosen)


def dockerfile(gpu: bool = False) -> str:
    """The image of the pods, for the Python that runs here, so that both ends of a job have the same. With `gpu` torch
    comes with CUDA."""
    source = (Path(__file__).parent / "Dockerfile.j2").read_text(encoding="utf-8")
    template = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False).from_string(source)
    return template.render(ray=RAY, python=f"{sys.version_info.major}.{sys.version_info.minor}", gpu=gpu)


def _commented(part: Part) -> str:
    comment = "".join(f"# {line}\n" for line in part.comment.splitlines())
    return comment + yaml.dump(part.manifest, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and no aliases: what is equal is written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


# --------------------------------------------------------------------------------------------------------- manifests


def _labels(settings: Settings) -> Map:
    return {LABEL: settings.name}


def _named(settings: Settings, suffix: str = "") -> Map:
    return {"name": f"{settings.name}{suffix}", "labels": _labels(settings)}


def _claim(settings: Settings) -> Map:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _named(settings, "-shared"),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": settings.storage_class,
            "resources": {"requests": {"storage": settings.storage}},
        },
    }


def _policy(settings: Settings) -> Map:
    everywhere: Map = {"namespaceSelector": {}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _named(settings),
        "spec": {
            "podSelector": {"matchLabels": _labels(settings)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": _labels(settings)}}]},
                {
                    "from": [{**everywhere, "podSelector": {"matchLabels": dict(OPERATOR)}}],
                    "ports": [{"protocol": "TCP", "port": 8265}, {"protocol": "TCP", "port": PORT}],
                },
                {
                    "from": [{"podSelector": {"matchLabels": dict(CLIENTS)}}],
                    "ports": [{"protocol": "TCP", "port": PORT}],
                },
            ],
        },
    }


def _cluster(settings: Settings) -> Map:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _named(settings),
        "spec": _spec(settings),
    }


def _job(settings: Settings) -> Map:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _named(settings, "-job"),
        "spec": {
            "entrypoint": shlex.join(["python", "-m", ENTRY, *settings.verb]),
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": IDLE_S,
            "backoffLimit": 3,
            "submitterPodTemplate": {
                "metadata": {"labels": _labels(settings)},
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
            "rayClusterSpec": _spec(settings),
        },
    }


def _service(settings: Settings) -> Map:
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [
            {
                "name": "rtrain",
                "route_prefix": "/",
                "import_path": "serve.kuberay_app:application",
                "args": {"artifact": settings.served, "keys": f"{KEYS}/keys.json"},
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
    probe = {"httpGet": {"path": "/v2/health/ready", "port": PORT}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": _named(settings, "-service"),
        "spec": {
            "serveConfigV2": yaml.safe_dump(config, sort_keys=False),
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": _spec(settings, probe=probe, least=1, gpus=0),
        },
    }


def _spec(settings: Settings, probe: Map | None = None, least: int = 0, gpus: int | None = None) -> Map:
    """The cluster: a head without CPUs for tasks, and workers that come with the work."""
    gpus = settings.gpus if gpus is None else gpus
    head = _pod(settings, "ray-head", _resources(2, "8Gi"), keys=probe is not None)
    head["spec"]["containers"][0]["ports"] = [
        {"containerPort": 6379, "name": "gcs-server"},
        {"containerPort": 8265, "name": "dashboard"},
        {"containerPort": PORT, "name": "serve"},
    ]
    groups = [Group("workers", ROLE, settings.workers, least, gpus)]
    if settings.data_workers and probe is None:  # an endpoint has no data tasks
        groups.append(Group("data", DATA_ROLE, settings.data_workers))
    # KubeRay does not tell jobs what it may start.
    types = {
        group.name: {
            "resources": {"CPU": settings.cpus, **({"GPU": group.gpus} if group.gpus else {})},
            "labels": dict(group.labels),
            **({"max_workers": group.most} if len(groups) > 1 else {}),
        }
        for group in groups
    }
    may = {"max_workers": sum(group.most for group in groups), "available_node_types": types}
    head["spec"]["containers"][0]["env"].append({"name": capacity.AUTOSCALER_FILE, "value": json.dumps(may)})
    leave = ["python", "-m", "rtrain.cluster.graceful_shutdown", "--seconds", str(DRAIN_S)]
    head["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": leave}}}
    head["spec"]["terminationGracePeriodSeconds"] = DRAIN_S + SPARE_S
    return {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": IDLE_S,
            "resources": _resources(1, "1Gi"),
            "securityContext": _container_security(),
        },
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0"},
            "template": head,
        },
        "workerGroupSpecs": [_group(settings, group, probe) for group in groups],
    }


class Group(NamedTuple):
    """A group of workers' pods."""

    name: str
    labels: Map
    most: int
    least: int = 0
    gpus: int = 0


def _group(settings: Settings, group: Group, probe: Map | None) -> Map:
    resources = _resources(settings.cpus, settings.memory, group.gpus)
    worker = _pod(settings, "ray-worker", resources, keys=probe is not None)
    worker["spec"]["automountServiceAccountToken"] = False
    drain = ["python", "-m", "rtrain.cluster.spot_watcher", "now", "--wait", "--seconds", str(DRAIN_S)]
    worker["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": drain}}}
    worker["spec"]["terminationGracePeriodSeconds"] = DRAIN_S + SPARE_S
    if probe is not None:
        worker["spec"]["containers"][0]["readinessProbe"] = probe
    return {
        "groupName": group.name,
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "idleTimeoutSeconds": IDLE_S,
        "labels": dict(group.labels),
        "rayStartParams": {},
        "template": worker,
    }


def _pod(settings: Settings, container: str, resources: Map, keys: bool) -> Map:
    shared: Map = {"persistentVolumeClaim": {"claimName": f"{settings.name}-shared"}}
    if settings.bucket:
        attributes = {"bucketName": settings.bucket, "mountOptions": BUCKET_OPTIONS}
        shared = {"csi": {"driver": BUCKET_DRIVER, "volumeAttributes": attributes}}
    mounts: list[Map] = [{"name": "shared", "mountPath": SHARED}]
    volumes: list[Map] = [{"name": "shared", **shared}]
    if keys:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": f"{settings.name}-keys"}})
    return {
        "metadata": {"labels": _labels(settings), **({"annotations": dict(BUCKET_SIDECAR)} if settings.bucket else {})},
        "spec": {
            **_pod_security(),
            **({"serviceAccountName": f"{settings.name}-bucket"} if settings.bucket else {}),
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": container,
                    "image": settings.image,
                    "env": [{"name": "RAY_START_HOOK", "value": HOOK}],
                    "resources": resources,
                    "securityContext": _container_security(),
                    # KubeRay mounts /dev/shm itself, as large as the pod's memory, where a pod has no mount there.
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _resources(cpus: int, memory: str, gpus: int = 0) -> Map:
    """The same for request and limit: a pod that may take more is the first to be ended."""
    each: Map = {"cpu": str(cpus), "memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {"requests": dict(each), "limits": dict(each)}


def _pod_security() -> Map:
    return {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    }


def _container_security() -> Map:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
