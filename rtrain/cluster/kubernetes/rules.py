"""What is wrong in manifests for KubeRay, where its schemas say nothing: they take any text for an option of Ray, an
entry point, a policy of restarts or an amount of memory, and any cluster without a token."""

import re
from collections.abc import Callable, Iterator, Mapping

from rtrain.cluster.kubernetes import amounts, manifests, policies, walk, work
from rtrain.cluster.lint import secrets
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Finding, Found, Level
from rtrain.cluster.lint.nodes import EVERYONE
from rtrain.cluster.lint.pins import NAME_DIGEST, find_unpinned
from rtrain.cluster.lint.shell import options

Documents = list[Document]
Check = Callable[[Documents, Around], Found]
ENUMS: Mapping[str, tuple[str, ...]] = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "serviceType": ("ClusterIP", "NodePort", "LoadBalancer"),
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    "upscalingMode": ("Default", "Aggressive", "Conservative"),
    "medium": ("", "Memory", "HugePages"),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
}
"""Values that Kubernetes and KubeRay take, of fields that their schemas leave open or may."""
MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LETTER_FIRST = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Names of KubeRay's own kinds (RFC 1035), which become those of services."""
OWN_LABEL, OWN = "app.kubernetes.io/name", "kuberay"
"""A label that KubeRay gives pods where their templates do not, and by which its services select the head."""
LONGEST_NAME = 47
"""KubeRay appends to a cluster's name; a name of Kubernetes has 63 characters at most."""
VERSION = "k8s-version"
"""The rule that compares the Ray of the manifests with that of this machine."""
OTHERS = ("Service", "ServiceAccount", "Secret", "ConfigMap", "Namespace")
KINDS = (*walk.CLUSTERS, "PersistentVolumeClaim", "NetworkPolicy", *OTHERS)


def kinds(documents: Documents, around: Around) -> Found:
    for document in documents:
        version, kind = document.get("apiVersion"), walk.kind(document)
        if kind not in KINDS:
            yield document.line("kind"), f"the kind {kind} is not checked", f"write one of {', '.join(KINDS)}"
        elif kind in walk.CLUSTERS and version != "ray.io/v1":
            yield document.line("apiVersion"), f"KubeRay has no {kind} of {version}", "write apiVersion: ray.io/v1"


def names(documents: Documents, around: Around) -> Found:
    for document in documents:
        name, own = str(document.get("metadata", "name", default="")), walk.kind(document) in walk.CLUSTERS
        if not (LETTER_FIRST if own else NAME).fullmatch(name) or len(name) > LONGEST_NAME:
            what = f"the name {name!r} is none of Kubernetes', or too long for what KubeRay appends"
            first = ", a letter first" if own else ""
            yield document.line("metadata", "name"), what, f"write up to {LONGEST_NAME} of a-z, 0-9 and -{first}"
    for group in walk.groups(documents):
        called = group.get("template", "metadata", "labels", OWN_LABEL)
        if called not in (None, OWN):
            what = f"{OWN_LABEL}: {called} is in the place of KubeRay's own label: its services find no pod by theirs"
            yield group.line("template", "metadata", "labels", OWN_LABEL), what, "leave it out, or use another label"


def whole(documents: Documents, around: Around) -> Found:
    """KubeRay's schemas leave out what a cluster cannot be without, where it may stand elsewhere."""
    for document in documents:
        place = walk.CLUSTERS.get(walk.kind(document))
        if place and not isinstance(document.get(*place), dict):
            what = f"a {walk.kind(document)} without {'.'.join(map(str, place))} has no cluster"
            yield document.line(*place), what, "write it, as rtrain cluster kubernetes does"
    for group in walk.groups(documents):
        if not group.get("template", "spec", "containers"):
            yield group.line("template", "spec"), "a group without a container starts no pod", "write containers"


def token(documents: Documents, around: Around) -> Found:
    for cluster in walk.clusters(documents):
        if cluster.get("authOptions", "mode") != "token":
            what = "the cluster asks for no token: every pod that reaches it may run code there"
            yield cluster.line("authOptions", "mode"), what, "write authOptions: {mode: token}"


def versions(documents: Documents, around: Around) -> Found:
    here = around.version("ray")
    for cluster in walk.clusters(documents):
        if here and cluster.get("rayVersion") != here:
            what = f"rayVersion is {cluster.get('rayVersion')}, and this machine has {here}"
            yield cluster.line("rayVersion"), what, f"write rayVersion: {here}, with an image that has it"


def images(documents: Documents, around: Around) -> Found:
    for _, container in walk.containers(documents):
        if (what := find_unpinned(container.get("image"))) is not None:
            yield container.line("image"), what, NAME_DIGEST


def start_parameters(documents: Documents, around: Around) -> Found:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in getattr(parameter, "opts", ())}
    for group in walk.groups(documents):
        for name, value in (group.get("rayStartParams") or {}).items():
            line = group.line("rayStartParams", name)
            if f"--{name}" not in known:
                yield line, f"ray start has no option --{name}: the pod does not come up", "see ray start --help"
            elif not isinstance(value, str):
                yield line, f"{name} is no text, which KubeRay wants", f'write {name}: "{value}"'
            elif name.endswith("-port") and not value.isdigit():
                yield line, f"{name} is no port: {value}", "write a number in quotes"


def head_tasks(documents: Documents, around: Around) -> Found:
    for group in walk.groups(documents):
        if walk.is_head(group) and group.get("rayStartParams", "num-cpus") != "0":
            what = "tasks are placed on the head: where they use up its memory, the cluster goes with them"
            yield group.line("rayStartParams"), what, 'write rayStartParams: {num-cpus: "0"} for the head'


def autoscaler(documents: Documents, around: Around) -> Found:
    for cluster in walk.clusters(documents):
        if cluster.get("enableInTreeAutoscaling") is not True:
            yield cluster.line("enableInTreeAutoscaling"), "workers do not come with the work", "write true"
        elif cluster.get("autoscalerOptions", "version") != "v2":
            what = "version 1 of the autoscaler does not know idle times of a group, nor labels"
            yield cluster.line("autoscalerOptions", "version"), what, "write autoscalerOptions: {version: v2}"
        elif not cluster.get("autoscalerOptions", "idleTimeoutSeconds"):
            what = "no idle time is said: a pod without work is paid for as long as KubeRay's default"
            yield cluster.line("autoscalerOptions"), what, "write idleTimeoutSeconds: 300"
    for group in walk.groups(documents):
        if group.get("template", "spec", "restartPolicy") != "Never":
            what = "a pod whose Ray has ended is started again in place, which the autoscaler takes for a new node"
            yield group.line("template", "spec", "restartPolicy"), what, "write restartPolicy: Never"


def replicas(documents: Documents, around: Around) -> Found:
    for group in walk.groups(documents):
        if not walk.is_head(group):
            least, now, most = (group.get(f"{name}eplicas") for name in ("minR", "r", "maxR"))
            if not 0 <= (least or 0) <= (least if now is None else now) <= (most or 0):
                what = f"minReplicas {least}, replicas {now} and maxReplicas {most} do not rise"
                yield group.line("replicas"), what, "write minReplicas <= replicas <= maxReplicas"


def enums(documents: Documents, around: Around) -> Found:
    for document in documents:
        for place, value in document.walk():
            allowed = ENUMS.get(str(place[-1]))
            if allowed and isinstance(value, str) and value not in allowed:
                yield document.line(*place), f"{place[-1]} cannot be {value}", f"write one of {', '.join(allowed)}"
            if place[-1] == "accessModes" and isinstance(value, list):
                for wrong in (mode for mode in value if mode not in MODES):
                    yield document.line(*place), f"there is no access mode {wrong}", f"write one of {', '.join(MODES)}"
            if place[-1] in ("containerPort", "targetPort") and isinstance(value, int) and not 0 < value < 1 << 16:
                yield document.line(*place), f"{value} is no port", "write 1 to 65535"


def leaving(documents: Documents, around: Around) -> Found:
    for group in walk.groups(documents):
        pod, is_head = group.within("template", "spec"), walk.is_head(group)
        for container in list(pod.each("containers"))[:1]:
            command = list(map(str, container.get("lifecycle", "preStop", "exec", "command") or ()))
            if ("rtrain.cluster.leave" if is_head else "rtrain.cluster.spot") not in command:
                does = "tell its jobs" if is_head else "drain its node"
                mend = "python -m rtrain.cluster.leave" if is_head else "python -m rtrain.cluster.spot now --wait"
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


def exposed(documents: Documents, around: Around) -> Found:
    for document in documents:
        for place, value in document.walk():
            if place[-1] in ("serviceType", "type") and value in ("LoadBalancer", "NodePort"):
                what = f"{value}: the cluster is reached from outside"
                yield (
                    document.line(*place),
                    what,
                    "write ClusterIP, with kubectl port-forward or a gateway that asks for a key",
                )
            if value in EVERYONE:
                yield (
                    document.line(*place),
                    f"{value} is the whole internet",
                    "name the pods, or the addresses that need it",
                )
            if place[-1] == "hostPort":
                what = f"port {value} of the machine is the pod's: no NetworkPolicy closes it"
                yield document.line(*place), what, "leave hostPort out"
            if place[-1] == "enableIngress" and value is True:
                yield document.line(*place), "the dashboard is put on the ingress", "leave enableIngress out"


def rights(documents: Documents, around: Around) -> Found:
    # KubeRay adds the autoscaler to the head's pod.
    added = [
        (cluster.within("headGroupSpec", "template"), cluster.within("autoscalerOptions"))
        for cluster in walk.clusters(documents)
        if cluster.get("enableInTreeAutoscaling") is True
    ]
    for pod, container in [*walk.containers(documents), *added]:
        own, name = container.get("securityContext") or {}, container.get("name") or "the autoscaler's container"
        root = pod.get("spec", "securityContext", "runAsNonRoot") is not True and own.get("runAsNonRoot") is not True
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            what = f"{name} may take rights of its machine"
            yield container.line("securityContext"), what, "write securityContext: {allowPrivilegeEscalation: false}"
        elif root:
            yield pod.line("spec"), f"{name} may run as root", "write runAsNonRoot: true"
    for pod in walk.pods(documents):
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get("spec", name):
                yield pod.line("spec", name), f"{name}: the pod has a part of its machine", "leave it out"
        for volume in pod.each("spec", "volumes"):
            if volume.get("hostPath"):
                yield volume.line("hostPath"), "the pod mounts a folder of its machine", "use a claim"


def storage(documents: Documents, around: Around) -> Found:
    claims = {str(one.get("metadata", "name")): one for one in documents if walk.kind(one) == "PersistentVolumeClaim"}
    for name, claim in claims.items():
        if "ReadWriteMany" not in (claim.get("spec", "accessModes") or ()):
            what = f"{name} is written by one machine alone, and checkpoints are written by all"
            yield claim.line("spec", "accessModes"), what, "write accessModes: [ReadWriteMany]"
    for group in walk.groups(documents):
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


def secret(documents: Documents, around: Around) -> Found:
    if documents:  # all have the text of the whole file
        yield from secrets.in_file(documents[0], around)
    for _, container in walk.containers(documents):
        for variable in container.each("env"):
            if name := secrets.found(f"{variable.get('name')}={variable.get('value') or ''}"):
                what = f"{name} is the value of {variable.get('name')}: whoever reads the file or the pod's form has it"
                yield variable.line("value"), what, "take it from a Secret, by valueFrom: {secretKeyRef: ...}"


def key_twice(documents: Documents, around: Around) -> Found:
    from rtrain.cluster.lint.lint import twice

    for document in documents:
        yield from twice(document, around)


RULES: tuple[tuple[str, Level, Check, str], ...] = (
    ("k8s-key-twice", "error", key_twice, "YAML keeps the last of two equal keys and says nothing."),
    ("k8s-kind", "error", kinds, "What is not known is not checked."),
    ("k8s-name", "error", names, "Kubernetes refuses other names."),
    ("k8s-whole", "error", whole, "KubeRay refuses half a cluster, after the schema took it."),
    ("k8s-token", "error", token, "Without a token whoever reaches Ray may run code."),
    (VERSION, "error", versions, "Both ends of a job must have the same Ray."),
    ("k8s-image", "error", images, "An image that moves is another cluster tomorrow."),
    ("k8s-start", "error", start_parameters, "Schemas take any option; Ray does not."),
    ("k8s-head-tasks", "warning", head_tasks, "Tasks on the head can take the cluster with them."),
    ("k8s-autoscaler", "error", autoscaler, "Workers come with the work, and go."),
    ("k8s-replicas", "error", replicas, "Schemas do not compare numbers."),
    ("k8s-memory", "error", amounts.memory, "A pod that takes more than it asked for is ended."),
    ("k8s-quantity", "error", amounts.quantities, "Kubernetes refuses other amounts."),
    ("k8s-enum", "error", enums, "Kubernetes refuses other values, after the schema took them."),
    ("k8s-leaving", "error", leaving, "A pod that goes must let its run save."),
    ("k8s-exposed", "error", exposed, "Whoever reaches Ray may run code."),
    ("k8s-policy", "error", policies.check, "Without a policy all pods reach each other."),
    ("k8s-rights", "error", rights, "A pod that is taken over should own nothing."),
    ("k8s-storage", "error", storage, "Token stores, checkpoints and artefacts are read by every pod."),
    ("k8s-job", "error", work.jobs, "A job that is tried again should go on."),
    ("k8s-service", "error", work.services, "Requests go to pods that can answer them."),
    ("k8s-secret", "error", secret, "A secret in a file is in its history."),
)


def check(documents: Documents, around: Around) -> Iterator[Finding]:
    for name, level, look, _ in RULES:
        for line, what, mend in look(documents, around):
            yield Finding(name, level, line, what, mend)
