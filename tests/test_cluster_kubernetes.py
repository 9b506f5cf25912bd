"""`rtrain cluster kubernetes`: what it prints, and what is found in broken manifests, by KubeRay's definitions and
where they let a mistake pass."""

import json
import os
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rtrain.cluster import feasible, supply
from rtrain.cluster.kubernetes import crd, image, manifests, rules, walk
from rtrain.cluster.lint import around, lint
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.document import read
from rtrain.errors import ConfigError, UserError
from tests.test_cli import Cli, run  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden_kubernetes.yaml"
DEFINITIONS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "schemas" / "kuberay"))
"""KubeRay's own definitions, where they lie beside the checkout or where KUBERAY_CRDS says."""
TEXT = manifests.text(manifests.Settings())
HERE = Around(ROOT)
IMAGE = f"registry/rtrain@sha256:{'0' * 64}"


def test_the_manifests_are_those_of_the_golden_file() -> None:
    """After a change that is meant: rtrain cluster kubernetes > tests/golden_kubernetes.yaml"""
    assert GOLDEN.read_text(encoding="utf-8") == TEXT


def test_there_is_a_cluster_a_job_a_service_and_what_they_share() -> None:
    kinds = [document["kind"] for document in yaml.safe_load_all(TEXT)]
    assert kinds == ["PersistentVolumeClaim", "NetworkPolicy", "RayCluster", "RayJob", "RayService"]


def test_nothing_is_found_in_ours() -> None:
    assert lint.check(TEXT, HERE) == []
    assert lint.check(manifests.text(manifests.Settings(gpus=4, workers=1, image=IMAGE)), HERE) == []


def test_the_job_goes_on_and_the_service_imports_what_is_there() -> None:
    job, service = list(yaml.safe_load_all(TEXT))[-2:]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:5] == ["python", "-m", "rtrain.cluster.jobs.entry", "train", "intent"]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    import importlib

    assert callable(getattr(importlib.import_module(module), name))


def test_the_service_serves_the_artefact_of_the_job_s_run() -> None:
    """Unless another is named; and a run that goes with its pod is found."""

    def served(**given: Any) -> str:
        service = list(yaml.safe_load_all(manifests.text(manifests.Settings(**given))))[-1]
        [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        return str(application["args"]["artifact"])

    words = ("train", "intent", "--data", "/shared/a.csv")
    assert served() == "/shared/runs/intent/artifact"
    assert served(verb=(*words, "--out", "/shared/runs/other/")) == "/shared/runs/other/artifact"
    assert served(verb=("tune", *words[1:], "--out", "/shared/s")) == "/shared/s/trial-FILL-IN/artifact"
    assert served(verb=("predict", "/shared/m")) == "/shared/runs/FILL-IN/artifact"
    assert served(verb=(*words, "--out=/shared/x"), artifact="/shared/y/artifact") == "/shared/y/artifact"
    for out, lost in (("/shared/x", False), ("/data/x", True), ("/shared/../x", True), ("/shared2/x", True)):
        found = lint.check(manifests.text(manifests.Settings(verb=(*words, "--out", out))), HERE)
        assert [(one.rule, one.mend) for one in found] == [("k8s-job", "write --out /shared/runs/x")] * lost


def test_jobs_know_what_may_be_started_by_its_labels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no worker's pod up, a run that asks for its nodes by their labels is not refused."""
    monkeypatch.setattr(supply, "up", lambda: [supply.Host({"CPU": 0.0})])
    for document in read(TEXT):
        for group in walk.groups([document]):
            if not walk.is_head(group):
                continue
            [container] = group.get("template", "spec", "containers")
            [value] = [one["value"] for one in container["env"] if one["name"] == supply.AUTOSCALER_FILE]
            monkeypatch.setenv(supply.AUTOSCALER_FILE, value)
            [workers] = [one for one in walk.groups([document]) if not walk.is_head(one)]
            assert supply.absent("cluster.labels", workers.get("labels")) == []
            assert supply.types(workers.get("labels")) == {"workers": {"CPU": 8.0}}


def test_ray_s_objects_stay_in_memory() -> None:
    """KubeRay mounts /dev/shm as large as the pod's memory, unless the pod has a mount there itself: a smaller one
    sends Ray's object store, 30 % of the memory, to /tmp."""
    groups = list(walk.groups(read(TEXT)))
    assert len(groups) == 6
    for group in groups:
        [container] = group.get("template", "spec", "containers")
        assert all(mount["mountPath"] in (manifests.SHARED, manifests.KEYS) for mount in container["volumeMounts"])
        assert all(volume["name"] in ("shared", "keys") for volume in group.get("template", "spec", "volumes"))


def test_gpus_are_the_workers_own() -> None:
    found = read(manifests.text(manifests.Settings(gpus=2)))
    asked = {
        (document.get("kind"), walk.is_head(group)): group.get(
            "template", "spec", "containers", 0, "resources", "limits", "nvidia.com/gpu"
        )
        for document in found
        for group in walk.groups([document])
    }
    assert asked == {
        ("RayCluster", True): None,
        ("RayCluster", False): "2",
        ("RayJob", True): None,
        ("RayJob", False): "2",
        ("RayService", True): None,
        ("RayService", False): None,
    }


def test_a_second_group_is_for_data_tasks_and_jobs_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = manifests.Settings(gpus=2, workers=3, data_workers=5, image=IMAGE)
    text = manifests.text(settings)
    assert lint.check(text, HERE) == []
    [cluster] = [document for document in read(text) if document.get("kind") == "RayCluster"]
    groups = {group.get("groupName"): group for group in walk.groups([cluster]) if not walk.is_head(group)}
    limits = ("template", "spec", "containers", 0, "resources", "limits", "nvidia.com/gpu")
    assert {name: (group.get("maxReplicas"), group.get(*limits)) for name, group in groups.items()} == {
        "workers": (3, "2"),
        "data": (5, None),
    }
    [head] = [group for group in walk.groups([cluster]) if walk.is_head(group)]
    environ = {one["name"]: one["value"] for one in head.get("template", "spec", "containers", 0, "env")}
    may = supply.startable(json.loads(environ[supply.AUTOSCALER_FILE]))
    needs = supply.Needs("gpu", 20, manifests.ROLE, manifests.DATA_ROLE)
    assert (may.limit, feasible.workers([], may, needs, 99)) == (8, 6)
    assert feasible.workers([], may, needs._replace(data_labels=manifests.ROLE), 99) == 6
    [service] = [document for document in read(text) if document.get("kind") == "RayService"]
    assert len([group for group in walk.groups([service]) if not walk.is_head(group)]) == 1


def test_a_bucket_is_mounted_in_place_of_a_claim_by_pods_that_say_so() -> None:
    text = manifests.text(manifests.Settings(bucket=manifests.bucket_of("gs://my-runs/"), image=IMAGE))
    assert lint.check(text, HERE) == []
    assert "PersistentVolumeClaim" not in text
    [account, *_] = yaml.safe_load_all(text)
    for document in read(text):
        for group in walk.groups([document]):
            pod = group.get("template", "spec")
            assert pod["serviceAccountName"] == account["metadata"]["name"]
            [shared] = [volume for volume in pod["volumes"] if volume["name"] == "shared"]
            assert shared["csi"]["volumeAttributes"]["bucketName"] == "my-runs"
    silent = text.replace("        annotations:\n          gke-gcsfuse/volumes: 'true'\n", "", 1)
    assert silent != text
    [found] = lint.check(silent, HERE)
    assert (found.rule, "not mounted" in found.what) == ("k8s-storage", True)
    for other in ("s3://bucket", "gs://", "bucket", "gs://A/b"):
        with pytest.raises(ConfigError, match="only a bucket of Google's"):
            manifests.bucket_of(other)


class Broken(NamedTuple):
    rule: str
    old: str
    new: str
    at: str
    seen: bool = False
    """Whether KubeRay's definitions see it too."""


BROKEN = (
    Broken("k8s-token", "mode: token", "mode: disabled", "mode: disabled"),
    Broken("k8s-token", "  authOptions:\n    mode: token\n", "", "spec:\n  rayVersion"),
    Broken("k8s-start", "num-cpus: '0'", "num-cpu: '0'", "num-cpu: '0'"),
    Broken("k8s-start", "num-cpus: '0'", "num-cpus: 0", "num-cpus: 0", seen=True),
    Broken("k8s-autoscaler", "restartPolicy: Never", "restartPolicy: Always", "restartPolicy: Always"),
    Broken("k8s-enum", "restartPolicy: Never", "restartPolicy: Sometimes", "restartPolicy: Sometimes"),
    Broken("k8s-enum", "submissionMode: K8sJobMode", "submissionMode: K8sMode", "submissionMode: K8sMode"),
    Broken("k8s-enum", "- ReadWriteMany", "- ReadWriteAll", "accessModes:"),
    Broken("k8s-quantity", "memory: 16Gi", "memory: 16GB", "memory: 16GB", seen=True),
    Broken("k8s-memory", "memory: 16Gi", "memory: 8Gi", "memory: 16Gi"),
    Broken("k8s-image", "@sha256:FILL-IN", ":latest", ":latest"),
    Broken("k8s-image", "@sha256:FILL-IN", "@sha256:0", "@sha256:0"),
    Broken("k8s-version", "rayVersion: 2.60.0", "rayVersion: 2.9.0", "rayVersion: 2.9.0"),
    Broken("k8s-kind", "apiVersion: ray.io/v1\n", "apiVersion: ray.io/v1alpha1\n", "apiVersion: ray.io/v1alpha1"),
    Broken("k8s-kind", "kind: RayJob", "kind: RayJobs", "kind: RayJobs"),
    Broken("k8s-name", "name: rtrain-job", "name: rtrain_job", "name: rtrain_job"),
    Broken(
        "k8s-name",
        "kind: RayCluster\nmetadata:\n  name: rtrain\n",
        "kind: RayCluster\nmetadata:\n  name: 1abc\n",
        "1abc",
    ),
    Broken(
        "k8s-name",
        "        labels:\n          rtrain-cluster: rtrain\n",
        "        labels:\n          app.kubernetes.io/name: rtrain\n",
        "app.kubernetes.io/name: rtrain",
    ),
    Broken(
        "k8s-whole",
        "  rayClusterSpec:\n",
        "  rayClusterSpecs:\n",
        "    rtrain-cluster: rtrain\nspec:\n  entrypoint",
        seen=True,
    ),
    Broken(
        "k8s-whole", "        containers:\n", "        container:\n", "      spec:\n        securityContext", seen=True
    ),
    Broken("k8s-head-tasks", "num-cpus: '0'", "num-cpus: '4'", "rayStartParams:"),
    Broken("k8s-replicas", "maxReplicas: 4", "maxReplicas: -1", "replicas: 0"),
    Broken("k8s-leaving", "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 30", "Seconds: 30\n"),
    Broken("k8s-leaving", "- rtrain.cluster.leave\n", "- rtrain.cluster.live\n", "lifecycle:"),
    Broken(
        "k8s-leaving",
        "- rtrain.cluster.spot\n",
        "- rtrain.cluster.stop\n",
        "lifecycle:\n            preStop:\n              exec:\n                command:\n                - python\n"
        "                - -m\n                - rtrain.cluster.stop",
    ),
    Broken("k8s-exposed", "serviceType: ClusterIP", "serviceType: LoadBalancer", "serviceType: LoadBalancer"),
    Broken("k8s-policy", "kind: NetworkPolicy", "kind: ConfigMap", "    template:\n      metadata:\n        labels"),
    Broken("k8s-rights", "runAsNonRoot: true", "runAsNonRoot: false", "      spec:\n        securityContext"),
    Broken(
        "k8s-rights",
        "    securityContext:\n      allowPrivilegeEscalation: false\n",
        "    securityContext:\n      allowPrivilegeEscalation: true\n",
        "    securityContext:\n      allowPrivilegeEscalation: true\n",
    ),
    Broken("k8s-rights", "restartPolicy: Never", "hostNetwork: true\n        restartPolicy: Never", "hostNetwork"),
    Broken(
        "k8s-storage", "- name: shared\n            mountPath", "- name: shard\n            mountPath", "name: shard"
    ),
    Broken("k8s-storage", "claimName: rtrain-shared", "claimName: another", "persistentVolumeClaim:"),
    Broken("k8s-job", "backoffLimit: 3", "backoffLimit: 0", "backoffLimit: 0"),
    Broken("k8s-job", "python -m rtrain.cluster.jobs.entry train", "python -m rtrain train", "entrypoint:"),
    Broken(
        "k8s-job",
        "  submissionMode: K8sJobMode",
        "  runtimeEnvYAML: '{pip: [x], env_vars: {A: b}}'\n  submissionMode: K8sJobMode",
        "runtimeEnvYAML",
    ),
    Broken("k8s-service", "import_path: serve.service:application", "import_path: serve.nothing:app", "serveConfigV2"),
    Broken("k8s-service", "path: /v2/health/ready", "path: /healthy", "readinessProbe:"),
    Broken("k8s-secret", "value: rtrain.cluster.session.on_node_start", "value: AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7"),
    Broken("k8s-key-twice", "  rayVersion: 2.60.0", "  rayVersion: 2.9.0\n  rayVersion: 2.60.0", "rayVersion: 2.60.0"),
    Broken("k8s-schema", "enableInTreeAutoscaling: true", "enableInTreeAutoscale: true", "spec:\n  rayV", seen=True),
    Broken("k8s-schema", "idleTimeoutSeconds: 300", "idleTimeoutSeconds: soon", "idleTimeoutSeconds: soon", seen=True),
    Broken("k8s-schema", "version: v2", "version: v3", "version: v3", seen=True),
    Broken("k8s-schema", "  - groupName: workers", "  - minReplica: 0", "  - minReplica: 0", seen=True),
)


def broken_text(case: Broken) -> str:
    assert case.old in TEXT, case.old
    return TEXT.replace(case.old, case.new, 1)


def line_of(text: str, words: str) -> int:
    assert words in text, words
    return text[: text.index(words)].count("\n") + 1


OURS = [case for case in BROKEN if case.rule != "k8s-schema"]


@pytest.mark.parametrize("case", OURS, ids=lambda case: f"{case.rule}: {case.new[:30]}".replace("\n", " "))
def test_each_rule_is_broken_once_and_found_at_its_line(case: Broken) -> None:
    text = broken_text(case)
    found = lint.check(text, HERE)
    lines = {one.line for one in found if one.rule == case.rule}
    around = line_of(text, case.at)
    assert lines & {around, around + 1, around + 2}, [one.text("x") for one in found]


def changed(kind: str, change: Callable[[Any], Any]) -> list[str]:
    """The rules that find something once a manifest of that kind is changed."""
    documents = list(yaml.safe_load_all(TEXT))
    change(next(one for one in documents if one["kind"] == kind))
    return [one.rule for one in lint.check(yaml.safe_dump_all(documents, sort_keys=False), HERE)]


def spec(**fields: Any) -> Callable[[Any], Any]:
    return lambda one: one["spec"].update(fields)


def first_container(one: Any) -> Any:
    return one["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]


def given(variable: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda one: first_container(one)["env"].append(variable)


def selected_by(operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": manifests.LABEL, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    "change",
    [
        spec(ingress=[{}]),
        spec(ingress=[{"from": []}]),
        spec(ingress=[{"from": [{"namespaceSelector": {}}]}]),
        spec(ingress=[{"from": [{"namespaceSelector": {}, "podSelector": {}}]}]),
        spec(ingress=[{"from": [{"podSelector": {}}]}]),
        spec(ingress=[{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]),
        spec(ingress=[{"from": [{"ipBlock": {"cidr": "0.0.0.0/1"}}]}]),
        spec(policyTypes=["Egress"]),
        spec(podSelector=selected_by("In", "nobody")),
        spec(podSelector=selected_by("DoesNotExist")),
        lambda one: one["metadata"].update(namespace="elsewhere"),
    ],
)
def test_a_policy_that_leaves_pods_open_is_found(change: Callable[[Any], Any]) -> None:
    assert "k8s-policy" in changed("NetworkPolicy", change)


@pytest.mark.parametrize(
    "change",
    [
        *(spec(podSelector={}), spec(podSelector=selected_by("NotIn", "x")), spec(policyTypes=None)),
        spec(ingress=[{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]),
    ],
)
def test_a_policy_that_selects_all_pods_is_fine(change: Callable[[Any], Any]) -> None:
    assert "k8s-policy" not in changed("NetworkPolicy", change)


def test_a_cluster_s_policy_admits_its_own_pods_alone() -> None:
    """And its pods keep the labels by which KubeRay's services find the head."""
    a, b = (list(yaml.safe_load_all(manifests.text(manifests.Settings(name=name)))) for name in "ab")
    [policy] = [one for one in a if one["kind"] == "NetworkPolicy"]
    selected = [policy["spec"]["podSelector"], policy["spec"]["ingress"][0]["from"][0]["podSelector"]]
    assert selected == [{"matchLabels": {"rtrain-cluster": "a"}}] * 2
    for name, documents in (("a", a), ("b", b)):
        pods = list(walk.pods(read(yaml.safe_dump_all(documents))))
        assert [pod.get("metadata", "labels") for pod in pods] == [{"rtrain-cluster": name}] * 7


def test_a_port_of_the_machine_and_a_literal_secret_are_found() -> None:
    assert "k8s-exposed" in changed("RayCluster", lambda one: first_container(one)["ports"][1].update(hostPort=8265))
    for name in ("RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        assert "k8s-secret" in changed("RayCluster", given({"name": name, "value": "wJalrXUtnFEMIKbPxRfi"}))
    by_reference = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": "ray", "key": "token"}}}
    assert "k8s-secret" not in changed("RayCluster", given(by_reference))


def test_the_autoscaler_s_container_has_no_more_rights_than_ours() -> None:
    """KubeRay adds it to the head's pod, which a namespace under Pod Security `restricted` would refuse otherwise."""
    assert "k8s-rights" in changed("RayCluster", lambda one: one["spec"]["autoscalerOptions"].pop("securityContext"))


def test_every_rule_has_its_case() -> None:
    assert {case.rule for case in OURS} == {rule[0] for rule in rules.RULES}


def test_a_manifest_of_another_shape_is_a_finding_and_no_traceback() -> None:
    found = lint.check("apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: []\nspec: {headGroupSpec: [1]}\n", HERE)
    assert "error" in {one.level for one in found}


@pytest.mark.parametrize("brought", ["env_vars: {A: [b", "just text", "[1, 2]"])
def test_what_a_job_brings_along_is_looked_at_whatever_it_is(brought: str) -> None:
    assert "k8s-job" in changed("RayJob", spec(runtimeEnvYAML=brought))
    assert "k8s-job" not in changed("RayJob", spec(runtimeEnvYAML="env_vars: {A: b}"))


SMALL = """
kind: CustomResourceDefinition
spec:
  names: {kind: Small}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              properties:
                count: {type: integer}
                amount: {x-kubernetes-int-or-string: true, type: string}
                free: {type: object, additionalProperties: {type: string}}
                open: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {a: {type: string}}}
"""


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ("{count: 1, amount: 2, free: {x: y}, open: {b: 1}}", []),
        ("{count: one}", ["spec.count: 'one' is not of type 'integer'"]),
        ("{cuont: 1}", ["spec: Additional properties are not allowed ('cuont' was unexpected)"]),
        ("{free: {x: 1}}", ["spec.free.x: 1 is not of type 'string'"]),
        ("{amount: []}", ["spec.amount: [] is not valid under any of the given schemas"]),
    ],
)
def test_unknown_fields_are_refused_but_where_a_definition_keeps_them(
    spec: str, wrong: list[str], tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    documents = read(f"apiVersion: x/v1\nkind: Small\nmetadata: {{name: a, labels: {{b: c}}}}\nspec: {spec}\n")
    found = list(crd.check(documents, crd.read(tmp_path)))
    assert [one.what for one in found] == wrong
    assert {one.line for one in found} <= {4}


def test_a_folder_without_definitions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CustomResourceDefinition"):
        crd.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: [a", "is no YAML"),
        ("{{- if .Values.crd }}\nkind: x\n{{- end }}\n", "is no YAML"),
        ("kind: CustomResourceDefinition\nspec: {}\n", "holds half a definition"),
        ("kind: CustomResourceDefinition\nspec: {versions: [{name: v1}]}\n", "holds half a definition"),
    ],
)
def test_a_file_that_is_no_definition_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=f"a.yaml {said}"):
        crd.read(tmp_path)


@pytest.mark.slow
def test_kuberay_s_definitions_find_what_they_can_and_nothing_in_ours() -> None:
    if not DEFINITIONS.is_dir():
        pytest.skip("KubeRay's definitions are not here")
    assert lint.check(TEXT, HERE, DEFINITIONS) == []
    definitions = crd.read(DEFINITIONS)
    assert set(definitions) == set(walk.CLUSTERS)
    for case in BROKEN:
        documents = read(broken_text(case))
        found = [one for one in crd.check(documents, definitions) if one.rule == crd.RULE]
        assert bool(found) == case.seen, (case, found)
        if case.rule == crd.RULE:
            line = line_of(broken_text(case), case.at)
            assert {one.line for one in found} & {line, line + 1}, found
    if crd.knows_cel():
        other = TEXT.replace("spec:\n  rayVersion", "spec:\n  managedBy: somebody\n  rayVersion", 1)
        [refused] = crd.check(read(other), definitions)
        assert (refused.rule, "managedBy field value must be either" in refused.what) == (crd.CEL_RULE, True)
    assert sum(not case.seen for case in BROKEN) >= 4
    assert len(BROKEN) >= 10


def test_rules_in_cel_are_asked_where_a_library_is_there() -> None:
    rule = "!(has(self.a) && has(self.b))"
    expected = [None, None] if not crd.knows_cel() else [True, False]
    assert [crd.holds(rule, {"a": 1}), crd.holds(rule, {"a": 1, "b": 2})] == expected
    assert crd.holds("self.a > 1", {"b": 1}) is None  # it cannot be asked; the schema says what is wrong


# ------------------------------------------------------------------------------------------------- image and verb


@pytest.mark.parametrize("gpu", [False, True])
def test_the_image_has_the_pins_and_no_root(gpu: bool) -> None:
    text = image.dockerfile(gpu)
    assert ("download.pytorch.org/whl/cpu" in text) != gpu
    assert text.count("-c constraints.txt") == (1 if gpu else 2)
    assert text.rstrip().splitlines()[-2] == "USER 1000"
    copied = {word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied - {"--from=build", "/opt/rtrain"})
    assert f"Ray {Around(ROOT).constraints()['ray']}" in text


def test_manifests_are_printed_where_the_local_ray_is_another(
    run: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be applied from any machine. What is found says so, and is no part of the manifests."""
    around.installed.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(metadata, "version", lambda package: "2.60.99")
        code, out, err = run("cluster", "kubernetes")
    around.installed.cache_clear()
    assert (code, out) == (0, TEXT)
    assert "2.60.99" in err
    assert run("cluster", "kubernetes")[2] == ""


def test_the_verb_prints_and_refuses(run: Cli) -> None:  # noqa: F811
    code, out, _ = run("cluster", "kubernetes")
    assert (code, out) == (0, TEXT)
    code, out, _ = run("cluster", "kubernetes", "--kind", "RayJob", "--", "tune", "intent", "--out", "/shared/runs/s")
    [job] = yaml.safe_load_all(out)
    assert (code, job["spec"]["entrypoint"].split()[3:]) == (0, ["tune", "intent", "--out", "/shared/runs/s"])
    for amount in ("1Gi", "16G", "1.5e10", "17179869184", "16384000Ki"):
        assert run("cluster", "kubernetes", "--memory", amount)[0] == 0
    for words, said in (
        (["--name", "My Cluster"], "the name 'My Cluster' is none of Kubernetes'"),
        (["--memory", "16GB"], "16GB"),
        *((["--memory", amount], "write e.g. 16Gi") for amount in ("16", "0", "1k", "1023Mi", "1e400", "2Ei")),
        *((["--memory", amount], f"{amount} is no amount of memory") for amount in ("-5Gi", "+5Gi")),
        (["--", "tarin", "intent", "--out", "/shared/runs/s"], "rtrain has no verb tarin; it has"),
        (["--", "train", "intent", "--out", "runs/s"], "must be the absolute path of a folder that all nodes share"),
    ):
        code, out, err = run("cluster", "kubernetes", *words)
        assert (code, out) == (2, "")
        assert said in err
    code, _, err = run("cluster", "kubernetes", "--kind", "RayJbo")
    assert (code, "write one of PersistentVolumeClaim" in err) == (2, True)
    assert run("cluster", "kubernetes", "--dockerfile")[1] == image.dockerfile()
