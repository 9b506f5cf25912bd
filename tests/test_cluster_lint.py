"""`rtrain cluster lint`: each rule broken once in our own file, and found at its line; nothing is found in the file
itself."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from rtrain.cluster import supply
from rtrain.cluster.lint import findings, lint
from rtrain.cluster.lint.around import Around, installed
from rtrain.cluster.lint.document import Unreadable, read
from rtrain.cluster.lint.shell import options, words
from rtrain.cluster.variants import variants
from rtrain.doctor.forecast import layouts
from tests.test_cli import Cli, run  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
VERBS = ("train", "tune", "serve")
HERE = Around(ROOT, verbs=VERBS)


class Broken(NamedTuple):
    rule: str
    old: str
    new: str
    at: str
    """What the line of the finding holds."""


WORKER = "      # May: read the data's bucket. Nothing else.\n      IamInstanceProfile: {Name: FILL-IN-worker}"
EXPORTS = "export PATH=$HOME/venv/bin:$PATH RAY_AUTH_MODE"
HEAD = "    ray start --head --port=6379\n"
BROKEN = (
    Broken("yaml", "cluster_name: rtrain", "cluster_name: [rtrain", "max_workers: 4"),
    Broken("schema", "max_workers: 4\n#", "max_workers: four\n#", "max_workers: four"),
    Broken("schema", "cluster_name: rtrain", "cluster_name: rtrain\nsetup_comands: []", "setup_comands"),
    Broken("schema", "head_node_type: head", "head_node_type: haed", "head_node_type: haed"),
    Broken("schema", "resources: {CPU: 8}", "resources: {CPU: 7.5}", "resources: {CPU: 7.5}"),
    Broken("provider", "type: aws", "type: awss", "type: awss"),
    Broken("provider", "type: aws", "type: AWS", "type: AWS"),
    Broken("key-twice", "idle_timeout_minutes: 5", "idle_timeout_minutes: 5\nmax_workers: 40", "max_workers: 40"),
    Broken(
        "open-to-all",
        "  cache_stopped_nodes: false",
        "  security_group:\n    IpPermissions:\n      - FromPort: 22\n        ToPort: 22\n        IpProtocol: tcp\n"
        "        IpRanges: [{CidrIp: 0.0.0.0/0}]\n  cache_stopped_nodes: false",
        "0.0.0.0/0",
    ),
    Broken("no-network", "      SecurityGroupIds: *groups\n", "", "node_config:\n      InstanceType: c7i.2xlarge"),
    Broken("public-address", "use_internal_ips: true", "use_internal_ips: false", "use_internal_ips: false"),
    Broken("metadata-service", "HttpTokens: required", "HttpTokens: optional", "HttpTokens: optional"),
    Broken("metadata-service", "HopLimit: 1", "HopLimit: 2", "HopLimit: 2"),
    Broken(
        "rights",
        "{Name: FILL-IN-worker}",
        "{Name: FILL-IN-head}",
        "IamInstanceProfile: {Name: FILL-IN-head}\n      MetadataOptions: *",
    ),
    Broken("rights", WORKER, "      # nothing", "node_config:\n      InstanceType: c7i.2xlarge"),
    Broken("disk", "Encrypted: true", "Encrypted: false", "Encrypted: false"),
    Broken("disk", ", DeleteOnTermination: true", "", "Encrypted: true}"),
    Broken("stopped-nodes", "cache_stopped_nodes: false", "cache_stopped_nodes: true", "cache_stopped_nodes: true"),
    Broken(
        "spot-head",
        "      IamInstanceProfile: {Name: FILL-IN-head}",
        "      InstanceMarketOptions: {MarketType: spot}\n      IamInstanceProfile: {Name: FILL-IN-head}",
        "node_config:\n      InstanceType: m7i.large",
    ),
    Broken("spot-watch", "-m rtrain.cluster.spot", "-m another.watcher", "worker_start_ray_commands:"),
    Broken("spot-watch", "-m rtrain.cluster.spot aws", "-m rtrain.cluster.spot", "-m rtrain.cluster.spot"),
    Broken("spot-watch", "-m rtrain.cluster.spot aws", "-m rtrain.cluster.spot gcp", "-m rtrain.cluster.spot gcp"),
    Broken("spot-label", "    labels: {ray.io/market-type: spot}\n", "", "  worker:\n"),
    Broken("spot-label", "{ray.io/market-type: spot}", "{for: training}", "{for: training}"),
    Broken(
        "spot-request",
        "        MarketType: spot",
        "        MarketType: spot\n        SpotOptions: {SpotInstanceType: persistent}",
        "persistent",
    ),
    Broken(
        "spot-request",
        "        MarketType: spot",
        "        MarketType: spot\n        SpotOptions: {InstanceInterruptionBehavior: hibernate}",
        "hibernate",
    ),
    Broken("zone", "availability_zone: us-west-2a", "availability_zone: us-west-2a,us-east-1b", "us-east-1b"),
    Broken("head-tasks", "resources: {CPU: 0}", "resources: {CPU: 2}", "resources: {CPU: 2}"),
    Broken("resources", "resources: {CPU: 8}", "resources: {CPU: 16}", "resources: {CPU: 16}"),
    Broken("resources", "InstanceType: c7i.2xlarge", "InstanceType: g6.2xlarge", "resources: {CPU: 8}"),
    Broken("price", "InstanceType: c7i.2xlarge", "InstanceType: x9z.large", "InstanceType: x9z.large"),
    Broken("zone", "--region us-west-2 --target", "--region us-east-1 --target", "--region us-east-1 --target"),
    Broken("zone", "efs.us-west-2.", "efs.eu-west-1.", "efs.eu-west-1."),
    Broken("limits", "max_workers: 4\n#", "#", "# A Ray cluster on AWS"),
    Broken("limits", "idle_timeout_minutes: 5", "idle_timeout_minutes: 600", "idle_timeout_minutes: 600"),
    Broken("limits", "min_workers: 0 ", "min_workers: 9 ", "min_workers: 9"),
    Broken("secret", "ulimit -n 65536;", "AWS_SECRET_ACCESS_KEY=abcdefghijklmnop; ulimit -n 65536;", "AWS_SECRET"),
    Broken("secret", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN=0f3c RAY_AUTH_MODE=token X", "=0f3c"),
    Broken("secret", "cluster_name: rtrain", "cluster_name: AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    Broken("secret", "https://download", "https://me:pa55word@download", "pa55word"),
    Broken("credentials", "  cache_stopped", "  aws_credentials: {a: b}\n  cache_stopped", "aws_credentials"),
    Broken("secret-file", "rsync_exclude:", "  /home/ubuntu/.aws: ~/.aws\nrsync_exclude:", "~/.aws"),
    Broken(
        "secret-file",
        "cluster_synced_files: [/home/ubuntu/.ray/auth_token]",
        "cluster_synced_files: [/home/ubuntu/.ray/auth_token, /home/ubuntu/.aws/credentials]",
        ".aws/credentials",
    ),
    Broken("host-key", "aws ssm start-session", "ssh -o StrictHostKeyChecking=no -W %h:%p b", "KeyChecking=no"),
    Broken("host-key", "aws ssm start-session", "ssh -o UserKnownHostsFile=/dev/null -W %h:%p b", "/dev/null -W"),
    Broken("tls", "use_internal_ips: true", "use_internal_ips: false", "ray start --head"),
    Broken("tls", EXPORTS, EXPORTS.replace("RAY_AUTH", "RAY_USE_TLS=1 RAY_AUTH"), "RAY_USE_TLS=1"),
    Broken("tls", EXPORTS, EXPORTS.replace("RAY_AUTH", "RAY_USE_TLS=1 RAY_AUTH"), "ray start --address"),
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
        "token-of-workers",
        "cluster_synced_files: [/home/ubuntu/.ray/auth_token]",
        "cluster_synced_files: []",
        "cluster_synced_files",
    ),
    Broken("public-storage", "sudo apt-get -qq update", "aws s3 cp --no-sign-request s3://b/x /shared", "--no-sign"),
    Broken("image", "head_node_type: head", "head_node_type: head\ndocker: {image: rayproject/ray:latest}", "docker:"),
    Broken("image", "      ImageId: *image\n", "", "node_config:\n      InstanceType: c7i.2xlarge"),
    Broken("package", "s3fs==2026.9.0", "s3fs==2026.9.0 && pip install wandb", "pip install wandb"),
    Broken("package", "'.[train,demo]'", "https://host/ray-wheels/latest/ray-3.0.0.dev0.whl", "ray-wheels/latest"),
    Broken("hashes", "-c constraints.txt '.[", "--extra-index-url https://x/ -c constraints.txt '.[", "--extra-index"),
    Broken("hashes", "--index-url https://", "--index-url http://", "--index-url http://"),
    Broken("hashes", "--index-url https://", "--trusted-host x --index-url https://", "--trusted-host"),
    Broken("hashes", "install -q -c constraints.txt '.[", "install -r constraints.txt '.[", "pip install -r"),
    Broken(
        "runtime-env",
        "8265 --working-dir . -- \\\n",
        '8265 --runtime-env-json=\'{"pip": ["x"]}\' -- \\\n',
        "runtime-env-json",
    ),
    Broken("script", "cloud-init status --wait > /dev/null || true", "curl -s https://host/x.sh | sudo bash", "x.sh"),
    Broken("version", "s3fs==2026.9.0", "ray==2.55.1 s3fs==2026.9.0", "ray==2.55.1"),
    Broken("version", "nodes get (2.60.0)", "nodes get (2.59.0)", "2.59.0"),
    Broken("version", "s3fs==2026.9.0", "s3fs==2025.1.0", "s3fs==2025.1.0"),
    Broken("mount", "/rtrain/serve: serve", "/rtrain/serve: sevre", "sevre"),
    Broken("dashboard", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "--dashboard-host=0.0.0.0"),
    Broken(
        "client-port",
        "\n    RAY_START_HOOK=rtrain.cluster.session.on_node_start RAY_JOB_STOP_WAIT_TIME_S=60;",
        ";",
        "ray start --head",
    ),
    Broken("option", "--dashboard-agent-grpc-port=6383", "--dashboard-grpc=6383", "--dashboard-grpc=6383"),
    Broken("port", "--object-manager-port=6381", "--object-manager-port=6380", "--object-manager-port=6380"),
    Broken("autoscaler", " --autoscaling-config=~/ray_bootstrap_config.yaml", "", "ray start --head"),
    Broken(
        "autoscaler", "config=~/ray_bootstrap_config.yaml", "config=~/mine.yaml", "--autoscaling-config=~/mine.yaml"
    ),
    Broken("address", "ray start --address=$RAY_HEAD_IP:6379", "ray start", "ray start\n    --node-manager"),
    Broken("address", "start --address=$RAY_HEAD_IP:6379", "start --address=$RAY_HEAD_IP:6399", "RAY_HEAD_IP:6399"),
    Broken("storage", "sudo mount -t nfs4\n", "true\n", "setup_commands:"),
    Broken("storage", "sudo mount -t nfs4\n", "mount-s3 bucket /shared; true\n", "mount-s3 bucket"),
    Broken("storage", "wsize=1048576,hard,", "wsize=1048576,soft,", "wsize=1048576,soft,"),
    Broken("storage", ".efs.us-west-2.", ".efs.eu-west-1.", ".efs.eu-west-1."),
    Broken("hook", "session.on_node_start", "session.on_start", "RAY_START_HOOK=rtrain.cluster.session.on_start"),
    Broken("name", "python -m rtrain tune intent", "python -m rtrain tune intnt", "tune intnt"),
    Broken("name", "--watch -- train intent", "--watch -- train intnt", "train intnt"),
    Broken("name", "python -m rtrain serve", "python -m rtrain sevre", "sevre"),
    Broken("room", "--workers 8", "--workers 64", "max_workers: 4\n#"),
)


def test_room_is_counted_on_nodes_that_may_be_up_together() -> None:
    """GPUs and CPUs are both there, and not at a time."""
    text = TEXT.replace("max_workers: 4\n#", "max_workers: 1\n#").replace("resources: {CPU: 8}", "resources: {CPU: 1}")
    more = "  big:\n    resources: {CPU: 3, GPU: 8}\n    max_workers: 1\n    node_config: {}\n"
    text = text.replace("available_node_types:\n", f"available_node_types:\n{more}", 1)
    assert not [one for one in lint.check(text, HERE) if one.rule == "room"]
    short = text.replace("{CPU: 3, GPU: 8}", "{CPU: 2, GPU: 8}")
    [found] = [one for one in lint.check(short, HERE) if one.rule == "room"]
    assert found.what == (
        "no nodes that may be up together have 8 GPUs for workers and 3 CPUs for their data tasks; there may be "
        "big (8 GPU and 2 CPU), worker (1 CPU); max_workers: 1 over all types"
    )
    assert found.mend == "raise max_workers, 1 over all types, or take larger nodes"


def test_what_the_rule_of_the_watcher_says_to_write_is_what_it_accepts() -> None:
    text = TEXT.replace("-m rtrain.cluster.spot aws", "-m another.watcher", 1)
    [found] = [one for one in lint.check(text, HERE) if one.rule == "spot-watch"]
    mended = text.replace(
        "worker_start_ray_commands:\n", f"worker_start_ray_commands:\n  - {found.mend.partition(': ')[2]}\n"
    )
    assert lint.check(mended, HERE) == []


def line_of(text: str, words_: str) -> int:
    assert words_ in text, words_
    return text[: text.index(words_)].count("\n") + 1


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case.rule}: {case.at[:30]}".replace("\n", " "))
def test_each_rule_is_broken_once_and_found_at_its_line(case: Broken) -> None:
    assert TEXT.count(case.old) >= 1
    text = TEXT.replace(case.old, case.new, 1)
    found = lint.check(text, HERE)
    lines = {one.line for one in found if one.rule == case.rule}
    assert line_of(text, case.at) in lines, [one.text("cluster.yaml") for one in found]
    assert all(one.what and one.mend for one in found)


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
    assert rule in {one.rule for one in lint.check(TEXT.replace(old, new, 1), HERE)}


@pytest.mark.parametrize("own", [5, "required", ["x"]])
@pytest.mark.parametrize("name", ["BlockDeviceMappings", "MetadataOptions"])
def test_what_a_cloud_is_told_in_another_shape_is_a_finding(name: str, own: object) -> None:
    document = yaml.safe_load(TEXT)
    document["available_node_types"]["worker"]["node_config"][name] = own
    assert lint.check(yaml.safe_dump(document), HERE)


@pytest.mark.parametrize(
    "command",
    [
        "pip install -q boto3==1.40.0 > ~/pip.log 2>&1",
        "pip install -q boto3==1.40.0 >>~/pip.log 2> ~/errors",
        "pip install --timeout 60 --retries 5 boto3==1.40.0",
        "uv pip install --python ~/venv/bin/python boto3==1.40.0",
    ],
)
def test_what_is_no_package_is_taken_for_none(command: str) -> None:
    text = TEXT.replace("cloud-init status --wait > /dev/null || true", command, 1)
    assert [one for one in lint.check(text, HERE) if one.rule == "package"] == []
    loose = [one for one in lint.check(text.replace("boto3==1.40.0", "boto3"), HERE) if one.rule == "package"]
    assert [one.what.split()[0] for one in loose] == ["boto3"]


@pytest.mark.parametrize("recipe", ["config.yaml", "recipes/mine.yaml", "/shared/runs/intent", "intent"])
def test_a_recipe_may_be_a_file_or_a_run(recipe: str) -> None:
    text = TEXT.replace("--watch -- train intent", f"--watch -- train {recipe}", 1)
    assert text != TEXT or recipe == "intent"
    assert lint.check(text, HERE) == []


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
    assert [one.rule for one in lint.check(text, HERE)] == ["zone"] * count


def test_a_region_is_changed_in_all_of_its_places() -> None:
    """One of them may be in a comment alone."""
    text = TEXT.replace("us-west-2", "eu-central-1")
    assert lint.check(text, HERE) == []
    of_google = variants.render("gcp")
    assert lint.check(of_google.replace("us-central1", "europe-west4"), HERE) == []
    half = of_google.replace("region: us-central1", "region: europe-west4")
    half = half.replace("availability_zone: us-central1-a", "availability_zone: europe-west4-a")
    found = {half.splitlines()[one.line - 1].strip() for one in lint.check(half, HERE)}
    assert len(found) == 2
    assert all("us-central1" in line for line in found)


def test_a_file_without_a_limit_is_counted_with_ray_s_in_every_place() -> None:
    """Its defaults have two workers at most: as many as a plan counts with."""
    document = yaml.safe_load(TEXT)
    del document["max_workers"]
    assert supply.startable(document).limit == layouts.of_document(document).limit == 2
    document["available_node_types"]["worker"] |= {"min_workers": 3, "max_workers": 4}
    found = [one.what for one in lint.check(yaml.safe_dump(document), HERE) if one.rule == "limits"]
    assert len(found) == 2
    assert "3 nodes" in found[1]


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
    assert lint.check(TEXT.replace(old, new, 1), HERE)


def test_every_rule_has_its_case() -> None:
    assert {case.rule for case in BROKEN} == {rule.name for rule in lint.rules(HERE)} | {"yaml"}
    assert len({rule[0] for rule in lint.RULES}) == len(lint.RULES)


def test_nothing_is_found_in_our_own_file() -> None:
    assert lint.check(TEXT, HERE) == []
    assert len(lint.to_fill_in(TEXT)) == 6


def test_nodes_of_the_same_ray_as_here_and_a_price_of_one_s_own_are_fine() -> None:
    here = installed("ray")
    assert lint.check(TEXT.replace("s3fs==2026.9.0", f"ray=={here} s3fs==2026.9.0"), HERE) == []
    text = TEXT.replace("InstanceType: c7i.2xlarge", "InstanceType: x9z.large")
    assert (
        lint.check(
            text.replace("head_node_type: head", "head_node_type: head\nmetadata: {prices: {x9z.large: 1}}"), HERE
        )
        == []
    )
    assert installed("no-such-package") is None


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: 1\n---\nb: 2\n", "{", "a: &a [*a]\n", "a: b\x01\n", "a: 2026-13-45\n"]
)
def test_what_is_no_file_of_a_cluster_is_one_finding(text: str) -> None:
    found = lint.check(text, HERE)
    assert found
    assert {one.level for one in found} == {"error"}


def test_a_file_of_another_shape_does_not_end_the_check() -> None:
    """Every value replaced by a text, a list, a number and nothing: there are findings, and no traceback."""
    [document] = read(TEXT)
    for key in document.value:
        for value in ("x", "[1, x]", "7", "null", "{x: y}"):
            lines = TEXT.splitlines()
            start = document.lines[(key,)] - 1
            later = [line - 1 for place, line in document.lines.items() if len(place) == 1 and line - 1 > start]
            text = "\n".join([*lines[:start], f"{key}: {value}", *lines[min(later, default=len(lines)) :]])
            lint.check(text, HERE)


def test_sarif_has_a_result_for_each_finding_and_names_its_rule() -> None:
    found = lint.check(TEXT.replace("cache_stopped_nodes: false", "cache_stopped_nodes: true"), HERE)
    rules = lint.every_rule(HERE)
    document = json.loads(json.dumps(findings.sarif(found, rules, "cluster.yaml")))
    assert document["version"] == "2.1.0"
    [made] = document["runs"]
    [result] = made["results"]
    assert made["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "stopped-nodes"
    [place] = result["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "cluster.yaml"},
        "region": {"startLine": found[0].line},
    }
    assert result["level"] == "error"


def test_lines_of_nested_values_and_of_aliases() -> None:
    [document] = read("a:\n  - x\n  - {b: 1,\n     c: 2}\nd: &e\n  f: 1\ng: *e\nh: {<<: *e, i: 1}\n")
    assert document.lines[("a", 1, "c")] == 4
    assert (document.line("g"), document.line("g", "f"), document.line("a", 0)) == (7, 6, 2)
    assert document.line("nothing", "here") == 1
    assert document.get("a", 1, "b") == 1
    with pytest.raises(Unreadable) as refused:
        read("a: 1\nb: [\n")
    assert refused.value.line == 3


def test_words_and_options_of_a_command() -> None:
    assert options(words("--head --port=6379 --num-cpus 4 --block")) == {
        "--head": "",
        "--port": "6379",
        "--num-cpus": "4",
        "--block": "",
    }
    assert words("a 'b") == ["a", "'b"]


# -------------------------------------------------------------------------------------------------------- the verb


def test_the_verb_counts_prints_and_fails(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    code, out, _ = run("cluster", "lint", ROOT / "cluster.yaml")
    assert (code, "0 errors, 0 warnings" in out) == (0, True)
    code, out, _ = run("cluster", "lint", ROOT / "cluster.yaml", "--filled")
    assert (code, out.count("[fill-in]")) == (1, 6)
    for key in ("head.node_config.ImageId", "SubnetIds", "worker.node_config.IamInstanceProfile.Name", "commands[2]"):
        assert out.count(key) == 1
    (tmp_path / "mine.yaml").write_text(TEXT.replace("cache_stopped_nodes: false", "cache_stopped_nodes: true"))
    code, out, _ = run("cluster", "lint", "mine.yaml", "--json")
    document = json.loads(out)
    rules = [one["rule"] for one in document["findings"]]
    assert (code, "stopped-nodes" in rules, set(rules) <= {"stopped-nodes", "mount"}) == (1, True, True)
    code, out, _ = run("cluster", "lint", "mine.yaml", "--sarif")
    assert (code, json.loads(out)["version"]) == (1, "2.1.0")
    code, _, err = run("cluster", "lint", "mien.yaml")
    assert (code, "did you mean" in err) == (1, True)


def test_a_warning_alone_does_not_fail(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.yaml").write_text(TEXT.replace("resources: {CPU: 0}", "resources: {CPU: 2}"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "rtrain", "serve", "tune"):
        (tmp_path / name).symlink_to(ROOT / name)
    code, out, _ = run("cluster", "lint", "mine.yaml")
    assert (code, "0 errors, 1 warnings" in out) == (0, True)
