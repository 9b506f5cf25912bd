"""`rtrain cluster lint`: each rule broken once in our own file, and found at its line; nothing is found in the file
itself."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from rtrain.cluster import capacity, render
from rtrain.cluster.checks import LintContext, check_file, installed_version, launcher_rules
from rtrain.cluster.cluster_file import InvalidYaml, parse_documents
from rtrain.planning import placement
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.unit.cli.test_cli import Cli, run  # noqa: F401

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
VERBS = ("train", "tune", "serve")
CONTEXT = LintContext(ROOT, verbs=VERBS)


class Broken(NamedTuple):
    rule: str
    old: str
    new: str
    at: str = ""
    """Text in the finding's line; empty: `new`."""


EXPORTS = "export PATH=$HOME/venv/bin:$PATH RAY_AUTH_MODE"
HEAD = "    ray start --head --port=6379\n"
BROKEN = (
    Broken("yaml", "cluster_name: rtrain", "cluster_name: [rtrain", "max_workers: 4"),
    Broken("schema", "max_workers: 4\n#", "max_workers: four\n#", "max_workers: four"),
    Broken("schema", "cluster_name: rtrain", "cluster_name: rtrain\nsetup_comands: []", "setup_comands"),
    Broken("schema", "head_node_type: head", "head_node_type: haed"),
    Broken("schema", "resources: {CPU: 8}", "resources: {CPU: 7.5}"),
    Broken("provider", "type: aws", "type: awss"),
    Broken("provider", "type: aws", "type: AWS"),
    Broken("public-address", "use_internal_ips: true", "use_internal_ips: false"),
    Broken(
        "spot-head",
        "      IamInstanceProfile: {Name: FILL-IN-head}",
        "      InstanceMarketOptions: {MarketType: spot}\n      IamInstanceProfile: {Name: FILL-IN-head}",
        "node_config:\n      InstanceType: m7i.large",
    ),
    Broken("spot-watcher", "-m rtrain.cluster.spot_watcher", "-m another.watcher", "worker_start_ray_commands:"),
    Broken("spot-watcher", "-m rtrain.cluster.spot_watcher aws", "-m rtrain.cluster.spot_watcher"),
    Broken("spot-watcher", "-m rtrain.cluster.spot_watcher aws", "-m rtrain.cluster.spot_watcher gcp"),
    Broken("spot-label", "    labels: {ray.io/market-type: spot}\n", "", "  worker:\n"),
    Broken("spot-label", "{ray.io/market-type: spot}", "{for: training}"),
    Broken("zone", "availability_zone: us-west-2a", "availability_zone: us-west-2a,us-east-1b", "us-east-1b"),
    Broken("head-tasks", "resources: {CPU: 0}", "resources: {CPU: 2}"),
    Broken("resources", "resources: {CPU: 8}", "resources: {CPU: 16}"),
    Broken("zone", "--region us-west-2 --target", "--region us-east-1 --target"),
    Broken("zone", "efs.us-west-2.", "efs.eu-west-1."),
    Broken("limits", "max_workers: 4\n#", "#", "# A Ray cluster on AWS"),
    Broken("limits", "idle_timeout_minutes: 5", "idle_timeout_minutes: 600"),
    Broken("limits", "min_workers: 0 ", "min_workers: 9 ", "min_workers: 9"),
    Broken(
        "token-mode",
        "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token\n    RAY_START",
        "RAY_START",
        "ray start --head",
    ),
    Broken(
        "token-mode", " RAY_AUTH_TOKEN_PATH=$HOME/.ray/auth_token\n    RAY_START", "\n    RAY_START", "ray start --head"
    ),
    Broken("token-file", "(umask 077; mkdir", "(mkdir", "~/.ray/auth_token || (mkdir"),
    Broken("token-file", "> ~/.ray/auth_token)", "> ~/.ray/tok)", "head_start_ray_commands:"),
    Broken(
        "worker-token",
        "cluster_synced_files: [/home/ubuntu/.ray/auth_token]",
        "cluster_synced_files: []",
        "cluster_synced_files",
    ),
    Broken("version", "s3fs==2026.9.0", "ray==2.55.1 s3fs==2026.9.0", "ray==2.55.1"),
    Broken("version", "nodes get (2.60.0)", "nodes get (2.59.0)", "2.59.0"),
    Broken("version", "s3fs==2026.9.0", "s3fs==2025.1.0"),
    Broken("mount", "/rtrain/serve: serve", "/rtrain/serve: sevre", "sevre"),
    Broken("dashboard", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0"),
    Broken(
        "start-hook",
        "\n    RAY_START_HOOK=rtrain.cluster.connection.on_node_start RAY_JOB_STOP_WAIT_TIME_S=60;",
        ";",
        "ray start --head",
    ),
    Broken("autoscaler", " --autoscaling-config=~/ray_bootstrap_config.yaml", "", "ray start --head"),
    Broken(
        "autoscaler", "config=~/ray_bootstrap_config.yaml", "config=~/mine.yaml", "--autoscaling-config=~/mine.yaml"
    ),
    Broken("address", "ray start --address=$RAY_HEAD_IP:6379", "ray start", "ray start\n    --node-manager"),
    Broken("address", "start --address=$RAY_HEAD_IP:6379", "start --address=$RAY_HEAD_IP:6399", "RAY_HEAD_IP:6399"),
    Broken("storage", "sudo mount -t nfs4\n", "true\n", "setup_commands:"),
    Broken("storage", "sudo mount -t nfs4\n", "mount-s3 bucket /shared; true\n", "mount-s3 bucket"),
    Broken("storage", "wsize=1048576,hard,", "wsize=1048576,soft,"),
    Broken(
        "start-hook",
        "connection.on_node_start",
        "connection.on_start",
        "RAY_START_HOOK=rtrain.cluster.connection.on_start",
    ),
    Broken("command-names", "python -m rtrain tune intent", "python -m rtrain tune intnt", "tune intnt"),
    Broken("command-names", "--watch -- train intent", "--watch -- train intnt", "train intnt"),
    Broken("command-names", "python -m rtrain serve", "python -m rtrain sevre", "sevre"),
    Broken("capacity", "--workers 8", "--workers 64", "max_workers: 4\n#"),
)


def test_room_is_counted_on_nodes_that_may_be_up_together() -> None:
    """GPUs and CPUs are both there, and not at a time."""
    text = TEXT.replace("max_workers: 4\n#", "max_workers: 1\n#").replace("resources: {CPU: 8}", "resources: {CPU: 1}")
    more = "  big:\n    resources: {CPU: 3, GPU: 8}\n    max_workers: 1\n    node_config: {}\n"
    text = text.replace("available_node_types:\n", f"available_node_types:\n{more}", 1)
    assert not [finding for finding in check_file.check_text(text, CONTEXT) if finding.rule == "capacity"]
    short = text.replace("{CPU: 3, GPU: 8}", "{CPU: 2, GPU: 8}")
    assert [finding for finding in check_file.check_text(short, CONTEXT) if finding.rule == "capacity"]


def line_of(text: str, words_: str) -> int:
    assert words_ in text, words_
    return text[: text.index(words_)].count("\n") + 1


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case.rule}: {case.new[:30]}".replace("\n", " "))
def test_each_rule_is_broken_once_and_found_at_its_line(case: Broken) -> None:
    assert TEXT.count(case.old) >= 1
    text = TEXT.replace(case.old, case.new, 1)
    findings = check_file.check_text(text, CONTEXT)
    lines = {finding.line for finding in findings if finding.rule == case.rule}
    assert line_of(text, case.at or case.new) in lines, [finding.format("cluster.yaml") for finding in findings]
    assert all(finding.message and finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("token-mode", EXPORTS, EXPORTS.replace("export", "true")),  # given to `true` alone
        ("token-mode", HEAD, "    unset RAY_AUTH_MODE; env RAY_AUTH_MODE= ray start --head --port=6379\n"),
        ("token-mode", HEAD, "    ray\n    stat --head --port=6379\n"),  # no command of the head starts Ray
        ("dashboard", "--dashboard-host=127.0.0.1", "--dashboard-host=127.0.0.1; ray start --dashboard-host=0.0.0.0"),
        ("dashboard", f"{HEAD}    --node", "    ray   start --dashboard-host=::; ray start\n    --node"),
        (
            "dashboard",
            f"{HEAD}    --node",
            "    (sudo -E ~/venv/bin/ray start --head --dashboard-host=:: )\n    --node",
        ),
    ],
)
def test_whatever_starts_ray_is_looked_at(rule: str, old: str, new: str) -> None:
    assert TEXT.count(old) >= 1
    assert rule in {finding.rule for finding in check_file.check_text(TEXT.replace(old, new, 1), CONTEXT)}


@pytest.mark.parametrize("recipe", ["config.yaml", "recipes/mine.yaml", "/shared/runs/intent", "intent"])
def test_a_recipe_may_be_a_file_or_a_run(recipe: str) -> None:
    text = TEXT.replace("--watch -- train intent", f"--watch -- train {recipe}", 1)
    assert text != TEXT or recipe == "intent"
    assert check_file.check_text(text, CONTEXT) == []


@pytest.mark.parametrize(
    ("zone", "count"),
    [
        ("us-west-2-lax-1a", 0),
        ("us-west-2a, us-west-2-den-1a", 0),
        ("us-west-2-wl1-las-wlz-1", 0),
        ("us-east-1-bos-1a", 1),
        ("us-west-2", 1),
    ],
)
def test_local_zones_and_wavelength_zones_are_zones_of_their_region(zone: str, count: int) -> None:
    text = TEXT.replace("availability_zone: us-west-2a", f"availability_zone: {zone}")
    assert [finding.rule for finding in check_file.check_text(text, CONTEXT)] == ["zone"] * count


def test_a_region_is_changed_in_all_of_its_places() -> None:
    """One of them may be in a comment alone."""
    text = TEXT.replace("us-west-2", "eu-central-1")
    assert check_file.check_text(text, CONTEXT) == []
    of_google = render.render_cluster_file("gcp")
    assert check_file.check_text(of_google.replace("us-central1", "europe-west4"), CONTEXT) == []
    half = of_google.replace("region: us-central1", "region: europe-west4")
    half = half.replace("availability_zone: us-central1-a", "availability_zone: europe-west4-a")
    result = {half.splitlines()[finding.line - 1].strip() for finding in check_file.check_text(half, CONTEXT)}
    assert len(result) == 2
    assert all("us-central1" in line for line in result)


def test_a_file_without_a_limit_is_counted_with_ray_s_in_every_place() -> None:
    """Its defaults have two workers at most: as many as a plan counts with."""
    document = yaml.safe_load(TEXT)
    del document["max_workers"]
    assert capacity.parse_autoscaler_limits(document).max_nodes == placement.parse_cluster(document).max_nodes == 2
    document["available_node_types"]["worker"] |= {"min_workers": 3, "max_workers": 4}
    assert [finding.rule for finding in check_file.check_text(yaml.safe_dump(document), CONTEXT)] == [
        "limits",
        "limits",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_workers: 4\n#", "max_workers: .inf\n#"),
        ("{CPU: 0}", "{CPU: .inf}"),
        ("    max_workers: 4", "    max_workers: .inf"),
    ],
)
def test_a_number_without_end_is_a_finding(old: str, new: str) -> None:
    assert old in TEXT
    assert check_file.check_text(TEXT.replace(old, new, 1), CONTEXT)


@pytest.mark.parametrize(
    ("cloud", "old", "new", "rules"),
    [("gcp", "n2-standard-8", "g2-standard-8", ["resources"]), ("aws", "c7i.2xlarge", "g6.2xlarge", [])],
)
def test_gpus_are_declared_unless_ray_fills_them_in(cloud: str, old: str, new: str, rules: list[str]) -> None:
    """Ray's provider of AWS adds the GPUs of the instance type to the declared resources; the others do not."""
    text = render.render_cluster_file(cloud).replace(old, new)
    assert [finding.rule for finding in check_file.check_text(text, CONTEXT)] == rules


def test_every_rule_has_its_case() -> None:
    names = [name for name, _, _ in launcher_rules.RULES]
    assert {case.rule for case in BROKEN} == {*names, "yaml"}
    assert len(set(names)) == len(names)


def test_nothing_is_found_in_our_own_file() -> None:
    assert check_file.check_text(TEXT, CONTEXT) == []
    assert len(check_file.fill_in_lines(TEXT)) == 6


def test_nodes_of_the_same_ray_as_here_are_fine() -> None:
    version = installed_version("ray")
    assert check_file.check_text(TEXT.replace("s3fs==2026.9.0", f"ray=={version} s3fs==2026.9.0"), CONTEXT) == []
    assert installed_version("no-such-package") is None


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: 1\n---\nb: 2\n", "{", "a: &a [*a]\n", "a: b\x01\n", "a: 2026-13-45\n"]
)
def test_what_is_no_file_of_a_cluster_is_one_finding(text: str) -> None:
    findings = check_file.check_text(text, CONTEXT)
    assert findings
    assert {finding.level for finding in findings} == {"error"}


def test_a_file_of_another_shape_does_not_end_the_check() -> None:
    """Every value replaced by a text, a list, a number and nothing: there are findings, and no traceback."""
    [document] = parse_documents(TEXT)
    for key in document.value:
        for value in ("x", "[1, x]", "7", "null", "{x: y}"):
            lines = TEXT.splitlines()
            start = document.lines[(key,)] - 1
            later = [line - 1 for place, line in document.lines.items() if len(place) == 1 and line - 1 > start]
            text = "\n".join([*lines[:start], f"{key}: {value}", *lines[min(later, default=len(lines)) :]])
            check_file.check_text(text, CONTEXT)


def test_lines_of_nested_values_and_of_aliases() -> None:
    [document] = parse_documents("a:\n  - x\n  - {b: 1,\n     c: 2}\nd: &e\n  f: 1\ng: *e\nh: {<<: *e, i: 1}\n")
    assert document.lines[("a", 1, "c")] == 4
    assert (document.line("g"), document.line("g", "f"), document.line("a", 0)) == (7, 6, 2)
    assert document.line("nothing", "here") == 1
    assert document.get("a", 1, "b") == 1
    with pytest.raises(InvalidYaml) as refused:
        parse_documents("a: 1\nb: [\n")
    assert refused.value.line == 3


# -------------------------------------------------------------------------------------------------------- the verb


def test_the_verb_counts_prints_and_fails(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    code, out, _ = run("cluster", "lint", ROOT / "cluster.yaml", "--json")
    assert (code, json.loads(out)["findings"], len(json.loads(out)["fill_in"])) == (0, [], 6)
    code, out, _ = run("cluster", "lint", ROOT / "cluster.yaml", "--strict", "--json")
    document = json.loads(out)["findings"]
    assert (code, [finding["rule"] for finding in document]) == (1, ["fill-in"] * 6)
    assert len({finding["line"] for finding in document}) == 6
    (tmp_path / "mine.yaml").write_text(TEXT.replace("use_internal_ips: true", "use_internal_ips: false"))
    code, out, _ = run("cluster", "lint", "mine.yaml", "--json")
    rules = {finding["rule"] for finding in json.loads(out)["findings"]}
    assert (code, "public-address" in rules, rules <= {"public-address", "mount"}) == (1, True, True)
    assert run("cluster", "lint", "mien.yaml")[0] == 1
    with refused_with("not_found"):
        check_file.read_file(tmp_path / "mien.yaml")


def test_a_warning_alone_does_not_fail(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.yaml").write_text(TEXT.replace("resources: {CPU: 0}", "resources: {CPU: 2}"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "rtrain", "serve", "tune"):
        (tmp_path / name).symlink_to(ROOT / name)
    code, out, _ = run("cluster", "lint", "mine.yaml", "--json")
    assert (code, [finding["level"] for finding in json.loads(out)["findings"]]) == (0, ["warning"])
