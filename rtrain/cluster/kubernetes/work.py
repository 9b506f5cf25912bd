"""Rules about what a cluster is made for: jobs that go on where they are tried again, and services."""

import importlib.util
import posixpath
import shlex
from pathlib import PurePosixPath

import yaml

from rtrain.cluster.jobs import naming
from rtrain.cluster.kubernetes import manifests, walk
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import get
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found
from rtrain.errors import ConfigError

OWN_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes that are a pod's own, or hold no run."""


def jobs(documents: list[Document], around: Around) -> Found:
    for document in documents:
        if walk.kind(document) != "RayJob":
            continue
        entry = str(document.get("spec", "entrypoint", default=""))
        again = naming.ENTRY in entry or "--resume" in entry
        if not again:
            what = "the entry point begins anew where it is tried again"
            yield document.line("spec", "entrypoint"), what, f"start it by python -m {naming.ENTRY} VERB ..."
        if not document.get("spec", "backoffLimit"):
            yield (
                document.line("spec", "backoffLimit"),
                "a job that fails once is not tried again",
                "write backoffLimit: 3",
            )
        if document.get("spec", "shutdownAfterJobFinishes") is not True:
            what = "the job's cluster stays, and is paid for"
            yield document.line("spec", "shutdownAfterJobFinishes"), what, "write shutdownAfterJobFinishes: true"
        yield from _brought(document)
        line = document.line("spec", "entrypoint")
        try:
            words = shlex.split(entry)
        except ValueError as error:
            yield line, f"the entry point is no command: {error}", "mend its quotes"
            continue
        verb = words[words.index(naming.ENTRY) + 1 :] if naming.ENTRY in words else []
        if verb and around.verbs and verb[0] not in around.verbs:
            yield line, f"rtrain has no verb {verb[0]}", f"it has {', '.join(sorted(around.verbs))}"
        try:
            run = naming.run_of(verb)
        except ConfigError as error:
            for problem in error.problems:
                yield line, f"{problem.field}: {problem.reason}", problem.fix
            continue
        shared = _shared(document)
        if run and not any(PurePosixPath(posixpath.normpath(run)).is_relative_to(folder) for folder in shared):
            what = f"--out: {run} is in no folder that the job's pods share, and goes with its pod"
            below = min(shared, default=manifests.SHARED)
            yield line, what, f"write --out {below}/runs/{run.name}"


def _brought(job: Document) -> Found:
    """What is wrong in what a job brings along, which is YAML in the YAML."""
    line = job.line("spec", "runtimeEnvYAML")
    try:
        brought = yaml.safe_load(str(job.get("spec", "runtimeEnvYAML", default="")))
    except yaml.YAMLError as error:
        yield line, f"runtimeEnvYAML is no YAML: {getattr(error, 'problem', error)}", "mend it"
        return
    if not isinstance(brought, dict | None):
        yield line, "runtimeEnvYAML holds no names with values", "write e.g. 'env_vars: {A: b}'"
    elif others := sorted(map(str, set(brought or ()) - {"env_vars"})):
        what = f"the job brings {others[0]} along: each pod fetches it anew, in whatever version there is then"
        yield line, what, "put it into the image; bring env_vars alone"


def _shared(job: Document) -> set[str]:
    """The folders that all pods of a job's cluster mount, and keep what is in them."""
    found = []
    for group in walk.groups([job]):
        pod = group.within("template", "spec")
        kept = {str(one.get("name")) for one in pod.each("volumes") if not any(one.get(kind) for kind in OWN_VOLUMES)}
        mounts = [one for container in pod.each("containers") for one in container.each("volumeMounts")]
        found.append({str(one.get("mountPath")) for one in mounts if str(one.get("name")) in kept})
    return set.intersection(*found) if found else set()


def services(documents: list[Document], around: Around) -> Found:
    for document in documents:
        if walk.kind(document) != "RayService":
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
                yield line, f"nothing is imported by the path {path!r}", "write serve.service:application"
        for group in walk.groups([document]):
            container = group.within("template", "spec", "containers", 0)
            if not walk.is_head(group) and container.get("readinessProbe", "httpGet", "path") != "/v2/health/ready":
                what = "a pod gets requests before its model is ready"
                yield container.line("readinessProbe"), what, "probe /v2/health/ready on the port of Serve"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
