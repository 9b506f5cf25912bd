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

from rtrain.cluster.checks.clouds import get_nested
from rtrain.cluster.checks.findings import Level, LintContext, LintFinding, RuleResults
from rtrain.cluster.checks.shell_commands import parse_options
from rtrain.cluster.checks.yaml_document import Document, YamlPath
from rtrain.cluster.jobs import job_names
from rtrain.cluster.kubernetes import manifests
from rtrain.core.errors import ConfigError

Documents = list[Document]
ManifestRule = Callable[[Documents, LintContext], RuleResults]
CLUSTER_SPEC_PATHS: Mapping[str, YamlPath] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
"""Path of the cluster spec, by kind."""
VERSION_RULE = "k8s-version"
"""Rule that compares the manifests' Ray version with the local one."""
POD_LOCAL_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Volume types that are local to a pod, or cannot hold a run."""


@dataclass(frozen=True)
class DocumentView:
    """A node of a document."""

    document: Document
    path: YamlPath

    @property
    def value(self) -> Any:
        return self.document.get(*self.path)

    def get(self, *keys: str | int) -> Any:
        return get_nested(self.value, *keys)

    def line(self, *keys: str | int) -> int:
        return self.document.line(*self.path, *keys)

    def child(self, *keys: str | int) -> "DocumentView":
        return DocumentView(self.document, (*self.path, *keys))

    def children(self, *keys: str | int) -> Iterator["DocumentView"]:
        """The elements of a nested list."""
        elements = self.get(*keys)
        for number in range(len(elements)) if isinstance(elements, list) else ():
            yield self.child(*keys, number)


def manifest_kind(document: Document) -> str:
    return str(document.get("kind"))


def iter_clusters(documents: list[Document]) -> Iterator[DocumentView]:
    for document in documents:
        if (path := CLUSTER_SPEC_PATHS.get(manifest_kind(document))) and isinstance(document.get(*path), dict):
            yield DocumentView(document, path)


def iter_groups(documents: list[Document]) -> Iterator[DocumentView]:
    """Head and worker groups of all clusters."""
    for cluster in iter_clusters(documents):
        yield cluster.child("headGroupSpec")
        yield from cluster.children("workerGroupSpecs")


def is_head_group(group: DocumentView) -> bool:
    return group.path[-1] == "headGroupSpec"


def check_token_mode(documents: Documents, context: LintContext) -> RuleResults:
    for cluster in iter_clusters(documents):
        if cluster.get("authOptions", "mode") != "token":
            message = "the cluster requires no token: every pod that reaches it may run code"
            yield cluster.line("authOptions", "mode"), message, "write authOptions: {mode: token}"


def check_ray_version(documents: Documents, context: LintContext) -> RuleResults:
    local_version = context.get_version("ray")
    for cluster in iter_clusters(documents):
        if local_version and cluster.get("rayVersion") != local_version:
            message = f"rayVersion is {cluster.get('rayVersion')}, and this machine has {local_version}"
            yield (
                cluster.line("rayVersion"),
                message,
                f"write rayVersion: {local_version}, and use an image of that version",
            )


def check_head_tasks(documents: Documents, context: LintContext) -> RuleResults:
    for group in iter_groups(documents):
        if is_head_group(group) and group.get("rayStartParams", "num-cpus") != "0":
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
        if not is_head_group(group):
            min_replicas, current, max_replicas = (group.get(f"{name}eplicas") for name in ("minR", "r", "maxR"))
            if not 0 <= (min_replicas or 0) <= (min_replicas if current is None else current) <= (max_replicas or 0):
                message = (
                    f"minReplicas {min_replicas}, replicas {current} and maxReplicas {max_replicas} are not ascending"
                )
                yield group.line("replicas"), message, "write minReplicas <= replicas <= maxReplicas"


def check_prestop_drains(documents: Documents, context: LintContext) -> RuleResults:
    for group in iter_groups(documents):
        pod, is_head = group.child("template", "spec"), is_head_group(group)
        for container in list(pod.children("containers"))[:1]:
            command = list(map(str, container.get("lifecycle", "preStop", "exec", "command") or ()))
            if ("rtrain.cluster.graceful_shutdown" if is_head else "rtrain.cluster.spot_watcher") not in command:
                action = "tell its jobs" if is_head else "drain its node"
                fix = (
                    "python -m rtrain.cluster.graceful_shutdown"
                    if is_head
                    else "python -m rtrain.cluster.spot_watcher now --wait"
                )
                message = f"a stopping pod does not {action}: the last steps are lost"
                yield container.line("lifecycle"), message, f"let preStop run {fix}"
                continue
            drain_s, grace_s = (
                float(parse_options(command).get("--seconds", 60)),
                pod.get("terminationGracePeriodSeconds") or 30,
            )
            if grace_s <= drain_s:
                message = f"the pod is ended after {grace_s} s, and drains for {drain_s:g}"
                yield pod.line("terminationGracePeriodSeconds"), message, "give it more than the drain"


def check_storage(documents: Documents, context: LintContext) -> RuleResults:
    claims = {
        str(document.get("metadata", "name")): document
        for document in documents
        if manifest_kind(document) == "PersistentVolumeClaim"
    }
    for name, claim in claims.items():
        if "ReadWriteMany" not in (claim.get("spec", "accessModes") or ()):
            message = f"{name} can be written by one machine only, but all write checkpoints"
            yield claim.line("spec", "accessModes"), message, "write accessModes: [ReadWriteMany]"
    for group in iter_groups(documents):
        pod = group.child("template", "spec")
        volumes = {str(volume.get("name")): volume for volume in pod.children("volumes")}
        for container in pod.children("containers"):
            mounts = {str(mount.get("name")): mount for mount in container.children("volumeMounts")}
            for name in mounts.keys() - volumes.keys():
                yield mounts[name].line("name"), f"unknown volume {name}", "name one of spec.volumes"
        volume_claims = [(volume, volume.get("persistentVolumeClaim", "claimName")) for volume in volumes.values()]
        claimed_volumes = [(volume, claim) for volume, claim in volume_claims if claim]
        mounts_bucket = any(volume.get("csi", "driver") == manifests.BUCKET_DRIVER for volume in volumes.values())
        if not claimed_volumes and not mounts_bucket:
            yield pod.line("volumes"), "this pod does not mount the shared folder", "mount a claim"
        if (
            mounts_bucket
            and manifests.BUCKET_SIDECAR.items() - (group.get("template", "metadata", "annotations") or {}).items()
        ):
            message = "the bucket is not mounted: the pod lacks the driver's annotation"
            fix = f"write annotations: {manifests.BUCKET_SIDECAR}"
            yield group.line("template", "metadata"), message, fix
        for volume, claim in claimed_volumes:
            if claim not in claims:
                yield (
                    volume.line("persistentVolumeClaim"),
                    f"the claim {claim} is not in the file",
                    "add it, or name one",
                )


def check_jobs(documents: list[Document], context: LintContext) -> RuleResults:
    for document in documents:
        if manifest_kind(document) != "RayJob":
            continue
        entrypoint = str(document.get("spec", "entrypoint", default=""))
        is_resumable = job_names.JOB_ENTRYPOINT in entrypoint or "--resume" in entrypoint
        if not is_resumable:
            message = "a retry of the entry point starts a new run"
            yield (
                document.line("spec", "entrypoint"),
                message,
                f"start it by python -m {job_names.JOB_ENTRYPOINT} VERB ...",
            )
        if not document.get("spec", "backoffLimit"):
            yield (
                document.line("spec", "backoffLimit"),
                "a failed job is not retried",
                "write backoffLimit: 3",
            )
        if document.get("spec", "shutdownAfterJobFinishes") is not True:
            message = "the job's cluster stays, and is billed"
            yield document.line("spec", "shutdownAfterJobFinishes"), message, "write shutdownAfterJobFinishes: true"
        line = document.line("spec", "entrypoint")
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
        lasting_volumes = {
            str(child.get("name"))
            for child in pod.children("volumes")
            if not any(child.get(volume_type) for volume_type in POD_LOCAL_VOLUMES)
        }
        mounts = [child for container in pod.children("containers") for child in container.children("volumeMounts")]
        folders_by_group.append(
            {str(mount.get("mountPath")) for mount in mounts if str(mount.get("name")) in lasting_volumes}
        )
    return set.intersection(*folders_by_group) if folders_by_group else set()


def check_services(documents: list[Document], context: LintContext) -> RuleResults:
    for document in documents:
        if manifest_kind(document) != "RayService":
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
            if not is_head_group(group) and container.get("readinessProbe", "httpGet", "path") != "/v2/health/ready":
                message = "a pod gets requests before its model is ready"
                yield container.line("readinessProbe"), message, "probe /v2/health/ready on the port of Serve"


def _module_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


RULES: tuple[tuple[str, Level, ManifestRule], ...] = (
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


def check_manifests(documents: Documents, context: LintContext) -> Iterator[LintFinding]:
    for name, level, rule in RULES:
        for line, message, fix in rule(documents, context):
            yield LintFinding(name, level, line, message, fix)
