"""What is wrong in manifests for KubeRay, where its schemas say nothing: they take any cluster without a token, any
entry point, and pods that go without a word. (kubeconform checks by the schemas, kube-linter rights and limits.)"""

import importlib.util
import posixpath
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from rtrain.cluster.checks.clouds import get
from rtrain.cluster.checks.findings import Around, Finding, Found, Level
from rtrain.cluster.checks.shell_commands import options
from rtrain.cluster.checks.yaml_document import Document, Place
from rtrain.cluster.jobs import job_names
from rtrain.cluster.kubernetes import manifests
from rtrain.core.errors import ConfigError

Documents = list[Document]
Check = Callable[[Documents, Around], Found]
CLUSTERS: Mapping[str, Place] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
"""Where each kind has its cluster."""
VERSION = "k8s-version"
"""The rule that compares the Ray of the manifests with that of this machine."""
OWN_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes that are a pod's own, or hold no run."""


@dataclass(frozen=True)
class Part:
    """A part of a document."""

    document: Document
    place: Place

    @property
    def value(self) -> Any:
        return self.document.get(*self.place)

    def get(self, *inner: str | int) -> Any:
        return get(self.value, *inner)

    def line(self, *inner: str | int) -> int:
        return self.document.line(*self.place, *inner)

    def within(self, *inner: str | int) -> "Part":
        return Part(self.document, (*self.place, *inner))

    def each(self, *inner: str | int) -> Iterator["Part"]:
        """The elements of a list in it."""
        found = self.get(*inner)
        for number in range(len(found)) if isinstance(found, list) else ():
            yield self.within(*inner, number)


def kind(document: Document) -> str:
    return str(document.get("kind"))


def clusters(documents: list[Document]) -> Iterator[Part]:
    for document in documents:
        if (place := CLUSTERS.get(kind(document))) and isinstance(document.get(*place), dict):
            yield Part(document, place)


def groups(documents: list[Document]) -> Iterator[Part]:
    """Head and worker groups of all clusters."""
    for cluster in clusters(documents):
        yield cluster.within("headGroupSpec")
        yield from cluster.each("workerGroupSpecs")


def is_head(group: Part) -> bool:
    return group.place[-1] == "headGroupSpec"


def token(documents: Documents, around: Around) -> Found:
    for cluster in clusters(documents):
        if cluster.get("authOptions", "mode") != "token":
            what = "the cluster asks for no token: every pod that reaches it may run code there"
            yield cluster.line("authOptions", "mode"), what, "write authOptions: {mode: token}"


def versions(documents: Documents, around: Around) -> Found:
    here = around.version("ray")
    for cluster in clusters(documents):
        if here and cluster.get("rayVersion") != here:
            what = f"rayVersion is {cluster.get('rayVersion')}, and this machine has {here}"
            yield cluster.line("rayVersion"), what, f"write rayVersion: {here}, with an image that has it"


def head_tasks(documents: Documents, around: Around) -> Found:
    for group in groups(documents):
        if is_head(group) and group.get("rayStartParams", "num-cpus") != "0":
            what = "tasks are placed on the head: where they use up its memory, the cluster goes with them"
            yield group.line("rayStartParams"), what, 'write rayStartParams: {num-cpus: "0"} for the head'


def autoscaler(documents: Documents, around: Around) -> Found:
    for cluster in clusters(documents):
        if cluster.get("enableInTreeAutoscaling") is not True:
            yield cluster.line("enableInTreeAutoscaling"), "workers do not come with the work", "write true"
        elif cluster.get("autoscalerOptions", "version") != "v2":
            what = "version 1 of the autoscaler does not know idle times of a group, nor labels"
            yield cluster.line("autoscalerOptions", "version"), what, "write autoscalerOptions: {version: v2}"
        elif not cluster.get("autoscalerOptions", "idleTimeoutSeconds"):
            what = "no idle time is said: a pod without work is paid for as long as KubeRay's default"
            yield cluster.line("autoscalerOptions"), what, "write idleTimeoutSeconds: 300"
    for group in groups(documents):
        if group.get("template", "spec", "restartPolicy") != "Never":
            what = "a pod whose Ray has ended is started again in place, which the autoscaler takes for a new node"
            yield group.line("template", "spec", "restartPolicy"), what, "write restartPolicy: Never"


def replicas(documents: Documents, around: Around) -> Found:
    for group in groups(documents):
        if not is_head(group):
            least, now, most = (group.get(f"{name}eplicas") for name in ("minR", "r", "maxR"))
            if not 0 <= (least or 0) <= (least if now is None else now) <= (most or 0):
                what = f"minReplicas {least}, replicas {now} and maxReplicas {most} do not rise"
                yield group.line("replicas"), what, "write minReplicas <= replicas <= maxReplicas"


def leaving(documents: Documents, around: Around) -> Found:
    for group in groups(documents):
        pod, of_head = group.within("template", "spec"), is_head(group)
        for container in list(pod.each("containers"))[:1]:
            command = list(map(str, container.get("lifecycle", "preStop", "exec", "command") or ()))
            if ("rtrain.cluster.graceful_shutdown" if of_head else "rtrain.cluster.spot_watcher") not in command:
                does = "tell its jobs" if of_head else "drain its node"
                mend = (
                    "python -m rtrain.cluster.graceful_shutdown"
                    if of_head
                    else "python -m rtrain.cluster.spot_watcher now --wait"
                )
                what = f"a pod that is to go does not {does}: the last updates are lost"
                yield container.line("lifecycle"), what, f"let preStop run {mend}"
                continue
            seconds, grace = (
                float(options(command).get("--seconds", 60)),
                pod.get("terminationGracePeriodSeconds") or 30,
            )
            if grace <= seconds:
                what = f"the pod is ended after {grace} s, and drains for {seconds:g}"
                yield pod.line("terminationGracePeriodSeconds"), what, "give it more than the drain"


def storage(documents: Documents, around: Around) -> Found:
    claims = {str(one.get("metadata", "name")): one for one in documents if kind(one) == "PersistentVolumeClaim"}
    for name, claim in claims.items():
        if "ReadWriteMany" not in (claim.get("spec", "accessModes") or ()):
            what = f"{name} is written by one machine alone, and checkpoints are written by all"
            yield claim.line("spec", "accessModes"), what, "write accessModes: [ReadWriteMany]"
    for group in groups(documents):
        pod = group.within("template", "spec")
        volumes = {str(volume.get("name")): volume for volume in pod.each("volumes")}
        for container in pod.each("containers"):
            mounted = {str(mount.get("name")): mount for mount in container.each("volumeMounts")}
            for name in mounted.keys() - volumes.keys():
                yield mounted[name].line("name"), f"there is no volume {name}", "name one of spec.volumes"
        claimed = [(volume, volume.get("persistentVolumeClaim", "claimName")) for volume in volumes.values()]
        named = [(volume, claim) for volume, claim in claimed if claim]
        mounts_bucket = any(volume.get("csi", "driver") == manifests.BUCKET_DRIVER for volume in volumes.values())
        if not named and not mounts_bucket:
            yield pod.line("volumes"), "this pod does not mount the folder that all share", "mount a claim"
        if (
            mounts_bucket
            and manifests.BUCKET_SIDECAR.items() - (group.get("template", "metadata", "annotations") or {}).items()
        ):
            what = "the bucket is not mounted: the driver looks for pods that say so"
            mend = f"write annotations: {manifests.BUCKET_SIDECAR}"
            yield group.line("template", "metadata"), what, mend
        for volume, claim in named:
            if claim not in claims:
                yield (
                    volume.line("persistentVolumeClaim"),
                    f"the claim {claim} is not in the file",
                    "add it, or name one",
                )


def jobs(documents: list[Document], around: Around) -> Found:
    for document in documents:
        if kind(document) != "RayJob":
            continue
        entry = str(document.get("spec", "entrypoint", default=""))
        again = job_names.ENTRY in entry or "--resume" in entry
        if not again:
            what = "the entry point begins anew where it is tried again"
            yield document.line("spec", "entrypoint"), what, f"start it by python -m {job_names.ENTRY} VERB ..."
        if not document.get("spec", "backoffLimit"):
            yield (
                document.line("spec", "backoffLimit"),
                "a job that fails once is not tried again",
                "write backoffLimit: 3",
            )
        if document.get("spec", "shutdownAfterJobFinishes") is not True:
            what = "the job's cluster stays, and is paid for"
            yield document.line("spec", "shutdownAfterJobFinishes"), what, "write shutdownAfterJobFinishes: true"
        line = document.line("spec", "entrypoint")
        try:
            words = shlex.split(entry)
        except ValueError as error:
            yield line, f"the entry point is no command: {error}", "mend its quotes"
            continue
        verb = words[words.index(job_names.ENTRY) + 1 :] if job_names.ENTRY in words else []
        if verb and around.verbs and verb[0] not in around.verbs:
            yield line, f"rtrain has no verb {verb[0]}", f"it has {', '.join(sorted(around.verbs))}"
        try:
            run = job_names.run_of(verb)
        except ConfigError as error:
            for problem in error.problems:
                yield line, f"{problem.field}: {problem.reason}", problem.fix
            continue
        shared = _shared(document)
        if run and not any(PurePosixPath(posixpath.normpath(run)).is_relative_to(folder) for folder in shared):
            what = f"--out: {run} is in no folder that the job's pods share, and goes with its pod"
            below = min(shared, default=manifests.SHARED)
            yield line, what, f"write --out {below}/runs/{run.name}"


def _shared(job: Document) -> set[str]:
    """The folders that all pods of a job's cluster mount, and keep what is in them."""
    found = []
    for group in groups([job]):
        pod = group.within("template", "spec")
        kept = {str(one.get("name")) for one in pod.each("volumes") if not any(one.get(kind) for kind in OWN_VOLUMES)}
        mounts = [one for container in pod.each("containers") for one in container.each("volumeMounts")]
        found.append({str(one.get("mountPath")) for one in mounts if str(one.get("name")) in kept})
    return set.intersection(*found) if found else set()


def services(documents: list[Document], around: Around) -> Found:
    for document in documents:
        if kind(document) != "RayService":
            continue
        line = document.line("spec", "serveConfigV2")
        try:
            config = yaml.safe_load(str(document.get("spec", "serveConfigV2", default="")))
        except yaml.YAMLError as error:
            yield line, f"serveConfigV2 is no YAML: {getattr(error, 'problem', error)}", "mend it"
            continue
        for application in get(config, "applications") or [{}]:
            path = str(get(application, "import_path") or "")
            module = path.partition(":")[0]
            if not module or (module.startswith(("serve", "rtrain")) and not _exists(module)):
                yield line, f"nothing is imported by the path {path!r}", "write serve.kuberay_app:application"
        for group in groups([document]):
            container = group.within("template", "spec", "containers", 0)
            if not is_head(group) and container.get("readinessProbe", "httpGet", "path") != "/v2/health/ready":
                what = "a pod gets requests before its model is ready"
                yield container.line("readinessProbe"), what, "probe /v2/health/ready on the port of Serve"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


RULES: tuple[tuple[str, Level, Check], ...] = (
    ("k8s-token", "error", token),
    (VERSION, "error", versions),
    ("k8s-head-tasks", "warning", head_tasks),
    ("k8s-autoscaler", "error", autoscaler),
    ("k8s-replicas", "error", replicas),
    ("k8s-leaving", "error", leaving),
    ("k8s-storage", "error", storage),
    ("k8s-job", "error", jobs),
    ("k8s-service", "error", services),
)


def check(documents: Documents, around: Around) -> Iterator[Finding]:
    for name, level, look in RULES:
        for line, what, mend in look(documents, around):
            yield Finding(name, level, line, what, mend)
