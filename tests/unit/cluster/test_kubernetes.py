"""`rtrain cluster kubernetes`: its manifests, and findings in broken manifests that schemas accept."""

import json
from importlib import metadata
from typing import Any

import pytest
import yaml

from rtrain.cluster import capacity, kubernetes_manifests as manifests, placement
from rtrain.cluster.checks import LintContext, check_file, installed_version, kubernetes_rules as rules
from rtrain.cluster.cluster_file import parse_documents
from rtrain.core.errors import ConfigError
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.unit.cli.test_cli import Cli, run  # noqa: F401
from tests.unit.cluster.test_check_file import Broken, line_of

GOLDEN = ROOT / "tests" / "golden_kubernetes.yaml"


def render(**options: Any) -> str:
    return manifests.render_manifests(manifests.ManifestOptions(**options))


def rules_of(text: str) -> list[str]:
    return [finding.rule for finding in check_file.check_text(text, CONTEXT)]


TEXT = render()
CONTEXT = LintContext(ROOT)
IMAGE = f"registry/rtrain@sha256:{'0' * 64}"


def test_the_manifests_are_those_of_the_golden_file() -> None:
    """After a change that is meant: rtrain cluster kubernetes > tests/golden_kubernetes.yaml"""
    assert GOLDEN.read_text(encoding="utf-8") == TEXT


def test_nothing_is_found_in_ours() -> None:
    assert check_file.check_text(TEXT, CONTEXT) == []
    assert check_file.check_text(render(gpus=4, workers=1, image=IMAGE), CONTEXT) == []


def test_the_service_serves_the_artefact_of_the_job_s_run() -> None:
    """Unless another is named; and a run that goes with its pod is found."""

    def served(**arguments: Any) -> str:
        service = list(yaml.safe_load_all(render(**arguments)))[-1]
        [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        return str(application["args"]["artifact"])

    words = ("train", "intent", "--data", "/shared/a.csv")
    assert served() == "/shared/runs/intent/artifact"
    assert served(verb=(*words, "--out", "/shared/runs/other/")) == "/shared/runs/other/artifact"
    assert served(verb=("tune", *words[1:], "--out", "/shared/s")) == "/shared/s/trial-FILL-IN/artifact"
    assert served(verb=("predict", "/shared/m")) == "/shared/runs/FILL-IN/artifact"
    assert served(verb=(*words, "--out=/shared/x"), artifact="/shared/y/artifact") == "/shared/y/artifact"
    for out, lost in (("/shared/x", False), ("/data/x", True), ("/shared/../x", True), ("/shared2/x", True)):
        assert rules_of(render(verb=(*words, "--out", out))) == ["k8s-job"] * lost


def test_jobs_know_what_may_be_started_by_its_labels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that names its nodes by labels is not refused while no worker pod is up."""
    monkeypatch.setattr(capacity, "live_nodes", lambda: [capacity.NodeSpec({"CPU": 0.0})])
    for document in parse_documents(TEXT):
        groups = list(rules.iter_groups([document]))
        for head, workers in zip(groups[::2], groups[1::2], strict=True):
            [container] = head.get("template", "spec", "containers")
            environment = {variable["name"]: variable["value"] for variable in container["env"]}
            value = environment[capacity.AUTOSCALER_FILE_VARIABLE]
            monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, value)
            assert capacity.find_unmatched_labels("cluster.labels", workers.get("labels")) == []
            assert capacity.startable_node_types(workers.get("labels")) == {"workers": {"CPU": 8.0}}


def test_gpus_are_the_workers_own() -> None:
    result = parse_documents(render(gpus=2))
    requested = {
        (document.get("kind"), group.is_head_group): group.get(
            "template", "spec", "containers", 0, "resources", "limits", "nvidia.com/gpu"
        )
        for document in result
        for group in rules.iter_groups([document])
    }
    with_gpus = {key for key, amount in requested.items() if amount == "2"}
    assert (len(requested), with_gpus) == (6, {("RayCluster", False), ("RayJob", False)})
    assert {amount for key, amount in requested.items() if key not in with_gpus} == {None}


def test_a_second_group_is_for_data_tasks_and_jobs_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(gpus=2, workers=3, data_workers=5, image=IMAGE)
    assert check_file.check_text(text, CONTEXT) == []
    [cluster] = [document for document in parse_documents(text) if document.get("kind") == "RayCluster"]
    groups = {group.get("groupName"): group for group in rules.iter_groups([cluster]) if not group.is_head_group}
    limits = ("template", "spec", "containers", 0, "resources", "limits", "nvidia.com/gpu")
    assert {name: (group.get("maxReplicas"), group.get(*limits)) for name, group in groups.items()} == {
        "workers": (3, "2"),
        "data": (5, None),
    }
    [head] = [group for group in rules.iter_groups([cluster]) if group.is_head_group]
    environ = {variable["name"]: variable["value"] for variable in head.get("template", "spec", "containers", 0, "env")}
    may = capacity.parse_autoscaler_limits(json.loads(environ[capacity.AUTOSCALER_FILE_VARIABLE]))
    needs = capacity.ResourceRequest("gpu", 20, manifests.WORKER_ROLE, manifests.DATA_ROLE)
    assert (may.max_nodes, placement.max_workers([], may, needs, 99)) == (8, 6)
    assert placement.max_workers([], may, needs._replace(data_labels=manifests.WORKER_ROLE), 99) == 6
    [service] = [document for document in parse_documents(text) if document.get("kind") == "RayService"]
    assert len([group for group in rules.iter_groups([service]) if not group.is_head_group]) == 1


def test_a_bucket_is_mounted_in_place_of_a_claim_by_pods_that_say_so() -> None:
    text = render(bucket=manifests.parse_bucket_name("gs://my-runs/"), image=IMAGE)
    assert check_file.check_text(text, CONTEXT) == []
    assert "PersistentVolumeClaim" not in text
    [account, *_] = yaml.safe_load_all(text)
    for document in parse_documents(text):
        for group in rules.iter_groups([document]):
            pod = group.get("template", "spec")
            assert pod["serviceAccountName"] == account["metadata"]["name"]
            [shared] = [volume for volume in pod["volumes"] if volume["name"] == "shared"]
            assert shared["csi"]["volumeAttributes"]["bucketName"] == "my-runs"
    silent = text.replace("        annotations:\n          gke-gcsfuse/volumes: 'true'\n", "", 1)
    assert silent != text
    assert rules_of(silent) == ["k8s-storage"]
    for other in ("s3://bucket", "gs://", "bucket", "gs://A/b"):
        with pytest.raises(ConfigError):
            manifests.parse_bucket_name(other)


BROKEN = (
    Broken("k8s-token", "mode: token", "mode: disabled"),
    Broken("k8s-token", "  authOptions:\n    mode: token\n", "", "spec:\n  rayVersion"),
    Broken("k8s-autoscaler", "restartPolicy: Never", "restartPolicy: Always"),
    Broken("k8s-version", "rayVersion: 2.60.0", "rayVersion: 2.9.0"),
    Broken("k8s-head-tasks", "num-cpus: '0'", "num-cpus: '4'", "rayStartParams:"),
    Broken("k8s-replicas", "maxReplicas: 4", "maxReplicas: -1", "replicas: 0"),
    Broken("k8s-prestop", "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 30", "Seconds: 30\n"),
    Broken("k8s-prestop", "- rtrain.cluster.graceful_shutdown\n", "- rtrain.cluster.live\n", "lifecycle:"),
    Broken(
        "k8s-prestop",
        "- rtrain.cluster.spot_watcher\n",
        "- rtrain.cluster.stop\n",
        "lifecycle:\n            preStop:\n              exec:\n                command:\n                - python\n"
        "                - -m\n                - rtrain.cluster.stop",
    ),
    Broken(
        "k8s-storage", "- name: shared\n            mountPath", "- name: shard\n            mountPath", "name: shard"
    ),
    Broken("k8s-storage", "claimName: rtrain-shared", "claimName: another", "persistentVolumeClaim:"),
    Broken("k8s-job", "backoffLimit: 3", "backoffLimit: 0"),
    Broken("k8s-job", "python -m rtrain.cluster.jobs.entry train", "python -m rtrain train", "entrypoint:"),
    Broken(
        "k8s-service", "import_path: serve.kuberay_app:application", "import_path: serve.nothing:app", "serveConfigV2"
    ),
    Broken("k8s-service", "path: /v2/health/ready", "path: /healthy", "readinessProbe:"),
)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case.rule}: {case.new[:30]}".replace("\n", " "))
def test_each_rule_is_broken_once_and_found_at_its_line(case: Broken) -> None:
    assert case.old in TEXT, case.old
    text = TEXT.replace(case.old, case.new, 1)
    findings = check_file.check_text(text, CONTEXT)
    lines = {finding.line for finding in findings if finding.rule == case.rule}
    around = line_of(text, case.at or case.new)
    assert lines & {around, around + 1, around + 2}, [finding.format("x") for finding in findings]


def test_a_cluster_s_policy_admits_its_own_pods_alone() -> None:
    """Its pods keep the labels that KubeRay's services select the head by."""
    a, b = (list(yaml.safe_load_all(render(name=name))) for name in "ab")
    [policy] = [manifest for manifest in a if manifest["kind"] == "NetworkPolicy"]
    selected = [policy["spec"]["podSelector"], policy["spec"]["ingress"][0]["from"][0]["podSelector"]]
    assert selected == [{"matchLabels": {"rtrain-cluster": "a"}}] * 2
    for name, documents in (("a", a), ("b", b)):
        groups = list(rules.iter_groups(parse_documents(yaml.safe_dump_all(documents))))
        assert [group.get("template", "metadata", "labels") for group in groups] == [{"rtrain-cluster": name}] * 6


def test_every_rule_has_its_case() -> None:
    assert {case.rule for case in BROKEN} == {rule[0] for rule in rules.RULES}


def test_a_manifest_of_another_shape_is_a_finding_and_no_traceback() -> None:
    findings = check_file.check_text(
        "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: []\nspec: {headGroupSpec: [1]}\n", CONTEXT
    )
    assert "error" in {finding.level for finding in findings}


# ------------------------------------------------------------------------------------------------- image and verb


@pytest.mark.parametrize("gpu", [False, True])
def test_the_image_has_the_pins_and_no_root(gpu: bool) -> None:
    text = manifests.render_dockerfile(gpu)
    assert ("download.pytorch.org/whl/cpu" in text) != gpu
    assert text.count("-c constraints.txt") == (1 if gpu else 2)
    assert text.rstrip().splitlines()[-2] == "USER 1000"
    copies = {word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copies - {"--from=build", "/opt/rtrain"})
    assert f"Ray {LintContext(ROOT).load_constraints()['ray']}" in text


def test_manifests_are_printed_where_the_local_ray_is_another(
    run: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Manifests may be applied from any machine. A finding reports the version, outside the manifests."""
    installed_version.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(metadata, "version", lambda package: "2.60.99")
        code, out, err = run("cluster", "kubernetes")
    installed_version.cache_clear()
    assert (code, out) == (0, TEXT)
    assert "2.60.99" in err
    assert run("cluster", "kubernetes")[2] == ""


def test_the_verb_prints_and_refuses(run: Cli) -> None:  # noqa: F811
    code, out, _ = run("cluster", "kubernetes")
    assert (code, out) == (0, TEXT)
    code, out, _ = run("cluster", "kubernetes", "--kind", "RayJob", "--", "tune", "intent", "--out", "/shared/runs/s")
    [job] = yaml.safe_load_all(out)
    assert (code, job["spec"]["entrypoint"].split()[3:]) == (0, ["tune", "intent", "--out", "/shared/runs/s"])
    for amount in ("1Gi", "16G", "17179869184", "16384000Ki"):
        assert run("cluster", "kubernetes", "--memory", amount)[0] == 0
    for words in (
        ["--name", "My Cluster"],
        ["--memory", "16GB"],
        ["--", "tarin", "intent", "--out", "/shared/runs/s"],
        ["--", "train", "intent", "--out", "runs/s"],
        ["--kind", "RayJbo"],
    ):
        code, out, _ = run("cluster", "kubernetes", *words)
        assert (code, out) == (2, "")
    assert run("cluster", "kubernetes", "--dockerfile")[1] == manifests.render_dockerfile()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(({"name": name}, "invalid_name") for name in ("My Cluster", "1abc", "a_b", "a" * 48)),
        *(({"memory": amount}, "invalid_amount") for amount in ("16GB", "-5Gi", "+5Gi", "much")),
    ],
)
def test_what_kubernetes_refuses_is_refused_before(arguments: dict[str, str], code: str) -> None:
    with refused_with(code):
        manifests.check_options(manifests.ManifestOptions(**arguments))  # type: ignore[arg-type]
