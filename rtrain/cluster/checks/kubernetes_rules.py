"""Rules for KubeRay manifests that its schemas do not check: clusters without a token, invalid entry points, pods
without draining. (kubeconform checks schemas, kube-linter permissions and limits.)"""

import importlib.util
import posixpath
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from rtrain.cluster import kubernetes_manifests as manifests
from rtrain.cluster.checks import Level, LintContext, RuleResults, installed_version
from rtrain.cluster.cluster_file import WATCHER_MODULE, Document, YamlPath, get_nested, parse_options
from rtrain.cluster.jobs import job_names
from rtrain.core.errors import ConfigError

Documents = list[Document]
CLUSTER_SPEC_PATHS: Mapping[str, YamlPath] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
"""Path of the cluster spec, by kind."""
SHUTDOWN_MODULE = "rtrain.cluster.graceful_shutdown"
VERSION_RULE = "k8s-version"
"""Rule that compares the manifests' Ray version with the local one."""
POD_LOCAL_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Volume types that are local to a pod, or cannot hold a run."""


@dataclass(frozen=True)
class DocumentView:
    document: Document
    path: YamlPath

    @property
    def is_head_group(self) -> bool:
        return self.path[-1] == "headGroupSpec"

    def get(self, *keys: str | int) -> Any:
        return self.document.get(*self.path, *keys)

    def line(self, *keys: str | int) -> int:
        return self.document.line(*self.path, *keys)

    def child(self, *keys: str | int) -> "DocumentView":
        return DocumentView(self.document, (*self.path, *keys))

    def children(self, *keys: str | int) -> list["DocumentView"]:
        """The elements of a nested list."""
        elements = self.get(*keys)
        return [self.child(*keys, n) for n in range(len(elements))] if isinstance(elements, list) else []

    def children_by_name(self, *keys: str | int) -> dict[str, "DocumentView"]:
        return {str(child.get("name")): child for child in self.children(*keys)}


def iter_clusters(documents: Documents) -> Iterator[DocumentView]:
    for document in documents:
        path = CLUSTER_SPEC_PATHS.get(str(document.get("kind")))
        if path and isinstance(document.get(*path), dict):
            yield DocumentView(document, path)


def iter_groups(documents: Documents) -> Iterator[DocumentView]:
    """Head and worker groups of all clusters."""
    for cluster in iter_clusters(documents):
        yield cluster.child("headGroupSpec")
        yield from cluster.children("workerGroupSpecs")


def check_token_mode(documents: Documents, context: LintContext) -> RuleResults:
    for cluster in iter_clusters(documents):
        if cluster.get("authOptions", "mode") != "token":
            message = "the cluster requires no token: every pod that reaches it may run code"
            yield cluster.line("authOptions", "mode"), message, "write authOptions: {mode: token}"


def check_ray_version(documents: Documents, context: LintContext) -> RuleResults:
    local_version = installed_version("ray")
    for cluster in iter_clusters(documents):
        if local_version and cluster.get("rayVersion") != local_version:
            message = f"rayVersion is {cluster.get('rayVersion')}, and this machine has {local_version}"
            fix = f"write rayVersion: {local_version}, and use an image of that version"
            yield cluster.line("rayVersion"), message, fix


def check_head_tasks(documents: Documents, context: LintContext) -> RuleResults:
    for group in iter_groups(documents):
        if group.is_head_group and group.get("rayStartParams", "num-cpus") != "0":
            message = "tasks run on the head: if they exhaust its memory, the cluster is lost"
            yield group.line("rayStartParams"), message, 'write rayStartParams: {num-cpus: "0"} for the head'


def check_autoscaler(documents: Documents, context: LintContext) -> RuleResults:
    for cluster in iter_clusters(documents):
        if cluster.get("enableInTreeAutoscaling") is not True:
            yield cluster.line("enableInTreeAutoscaling"), "workers are not autoscaled", "write true"
        elif cluster.get("autoscalerOptions", "version") != "v2":
            message = "autoscaler v1 supports neither idle timeouts of a group nor labels"
            yield cluster.line("autoscalerOptions", "version"), message, "write autoscalerOptions: {version: v2}"
        elif not cluster.get("autoscalerOptions", "idleTimeoutSeconds"):
            message = "the idle timeout is missing: an idle pod is billed for KubeRay's default"
            yield cluster.line("autoscalerOptions"), message, "write idleTimeoutSeconds: 300"
    for group in iter_groups(documents):
        if group.get("template", "spec", "restartPolicy") != "Never":
            message = "a pod is restarted in place after its Ray ended, which the autoscaler takes for a new node"
            yield group.line("template", "spec", "restartPolicy"), message, "write restartPolicy: Never"


def check_replica_bounds(documents: Documents, context: LintContext) -> RuleResults:
    for group in iter_groups(documents):
        low, replicas, high = group.get("minReplicas") or 0, group.get("replicas"), group.get("maxReplicas") or 0
        current = low if replicas is None else replicas
        if not group.is_head_group and not 0 <= low <= current <= high:
            message = f"minReplicas {low}, replicas {current} and maxReplicas {high} are not ascending"
            yield group.line("replicas"), message, "write minReplicas <= replicas <= maxReplicas"


def check_prestop_drains(documents: Documents, context: LintContext) -> RuleResults:
    for group in iter_groups(documents):
        pod = group.child("template", "spec")
        module, action, fix = (
            (SHUTDOWN_MODULE, "tell its jobs", SHUTDOWN_MODULE)
            if group.is_head_group
            else (WATCHER_MODULE, "drain its node", f"{WATCHER_MODULE} now --wait")
        )
        for container in pod.children("containers")[:1]:
            command = list(map(str, container.get("lifecycle", "preStop", "exec", "command") or ()))
            drain_s = float(parse_options(command).get("--seconds", 60))
            grace_s = pod.get("terminationGracePeriodSeconds") or 30
            if module not in command:
                message = f"a stopping pod does not {action}: the last steps are lost"
                yield container.line("lifecycle"), message, f"let preStop run python -m {fix}"
            elif grace_s <= drain_s:
                message = f"the pod is ended after {grace_s} s, and drains for {drain_s:g}"
                yield pod.line("terminationGracePeriodSeconds"), message, "give it more than the drain"


def check_storage(documents: Documents, context: LintContext) -> RuleResults:
    claim_documents = [document for document in documents if document.get("kind") == "PersistentVolumeClaim"]
    claims = {str(document.get("metadata", "name")): document for document in claim_documents}
    for name, claim in claims.items():
        if "ReadWriteMany" not in (claim.get("spec", "accessModes") or ()):
            message = f"{name} can be written by one machine only, but all write checkpoints"
            yield claim.line("spec", "accessModes"), message, "write accessModes: [ReadWriteMany]"
    for group in iter_groups(documents):
        pod = group.child("template", "spec")
        volumes = pod.children_by_name("volumes")
        for container in pod.children("containers"):
            mounts = container.children_by_name("volumeMounts")
            for name in mounts.keys() - volumes.keys():
                yield mounts[name].line("name"), f"unknown volume {name}", "name one of spec.volumes"
        claim_names = [(volume, volume.get("persistentVolumeClaim", "claimName")) for volume in volumes.values()]
        claimed_volumes = [(volume, name) for volume, name in claim_names if name]
        mounts_bucket = any(volume.get("csi", "driver") == manifests.BUCKET_DRIVER for volume in volumes.values())
        if not claimed_volumes and not mounts_bucket:
            yield pod.line("volumes"), "this pod does not mount the shared folder", "mount a claim"
        annotations = group.get("template", "metadata", "annotations") or {}
        if mounts_bucket and manifests.BUCKET_SIDECAR.items() - annotations.items():
            message = "the bucket is not mounted: the pod lacks the driver's annotation"
            yield group.line("template", "metadata"), message, f"write annotations: {manifests.BUCKET_SIDECAR}"
        for volume, name in claimed_volumes:
            if name not in claims:
                message = f"the claim {name} is not in the file"
                yield volume.line("persistentVolumeClaim"), message, "add it, or name one"


def check_jobs(documents: Documents, context: LintContext) -> RuleResults:
    for document in documents:
        if document.get("kind") != "RayJob":
            continue
        entrypoint, line = str(document.get("spec", "entrypoint", default="")), document.line("spec", "entrypoint")
        if job_names.JOB_ENTRYPOINT not in entrypoint and "--resume" not in entrypoint:
            fix = f"start it by python -m {job_names.JOB_ENTRYPOINT} VERB ..."
            yield line, "a retry of the entry point starts a new run", fix
        if not document.get("spec", "backoffLimit"):
            yield document.line("spec", "backoffLimit"), "a failed job is not retried", "write backoffLimit: 3"
        if document.get("spec", "shutdownAfterJobFinishes") is not True:
            message = "the job's cluster stays, and is billed"
            yield document.line("spec", "shutdownAfterJobFinishes"), message, "write shutdownAfterJobFinishes: true"
        try:
            words = shlex.split(entrypoint)
        except ValueError as error:
            yield line, f"the entry point is not a command: {error}", "mend its quotes"
            continue
        verb_words = words[words.index(job_names.JOB_ENTRYPOINT) + 1 :] if job_names.JOB_ENTRYPOINT in words else []
        if verb_words and context.verbs and verb_words[0] not in context.verbs:
            yield line, f"rtrain has no verb {verb_words[0]}", f"it has {', '.join(sorted(context.verbs))}"
        try:
            run = job_names.resolve_run_folder(verb_words)
        except ConfigError as error:
            for problem in error.problems:
                yield line, f"{problem.field}: {problem.reason}", problem.fix
            continue
        shared_folders = _shared_folders(document)
        if run and not any(PurePosixPath(posixpath.normpath(run)).is_relative_to(folder) for folder in shared_folders):
            message = f"--out: {run} is not on a shared folder of the job's pods, and is lost with its pod"
            parent_folder = min(shared_folders, default=manifests.SHARED_MOUNT)
            yield line, message, f"write --out {parent_folder}/runs/{run.name}"


def _shared_folders(job: Document) -> set[str]:
    """Persistent folders that all pods of a job's cluster mount."""
    folders_by_group = []
    for group in iter_groups([job]):
        pod = group.child("template", "spec")
        volumes = pod.children_by_name("volumes").items()
        lasting_volumes = {name for name, volume in volumes if not any(map(volume.get, POD_LOCAL_VOLUMES))}
        mounts = [mount for container in pod.children("containers") for mount in container.children("volumeMounts")]
        folders_by_group.append(
            {str(mount.get("mountPath")) for mount in mounts if str(mount.get("name")) in lasting_volumes}
        )
    return set.intersection(*folders_by_group) if folders_by_group else set()


def check_services(documents: Documents, context: LintContext) -> RuleResults:
    for document in documents:
        if document.get("kind") != "RayService":
            continue
        line = document.line("spec", "serveConfigV2")
        try:
            config = yaml.safe_load(str(document.get("spec", "serveConfigV2", default="")))
        except yaml.YAMLError as error:
            yield line, f"serveConfigV2 is invalid YAML: {getattr(error, 'problem', error)}", "fix it"
            continue
        for application in get_nested(config, "applications") or [{}]:
            path = str(get_nested(application, "import_path") or "")
            module = path.partition(":")[0]
            if not module or (module.startswith(("serve", "rtrain")) and not _module_exists(module)):
                yield line, f"the import path is invalid: {path!r}", "write serve.kuberay_app:application"
        for group in iter_groups([document]):
            container = group.child("template", "spec", "containers", 0)
            path = container.get("readinessProbe", "httpGet", "path")
            if not group.is_head_group and path != "/v2/health/ready":
                message = "a pod gets requests before its model is ready"
                yield container.line("readinessProbe"), message, "probe /v2/health/ready on the port of Serve"


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


RULES: tuple[tuple[str, Level, Callable[[Documents, LintContext], RuleResults]], ...] = (
    ("k8s-token", "error", check_token_mode),
    (VERSION_RULE, "error", check_ray_version),
    ("k8s-head-tasks", "warning", check_head_tasks),
    ("k8s-autoscaler", "error", check_autoscaler),
    ("k8s-replicas", "error", check_replica_bounds),
    ("k8s-prestop", "error", check_prestop_drains),
    ("k8s-storage", "error", check_storage),
    ("k8s-job", "error", check_jobs),
    ("k8s-service", "error", check_services),
)
