"""cluster.yaml by `ray up` and Ray's own provider for AWS, on moto's EC2: what they would really ask for.

The file's own subnets, groups, image and profiles are planted first, as its user makes them.
"""

import gc
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster.rehearsal import plan as plans
from rtrain.cluster.rehearsal.aws import instances, launch as launches
from rtrain.cluster.rehearsal.aws.instances import Instance
from rtrain.cluster.rehearsal.aws.launch import Launched
from rtrain.errors import ConfigError

# `ray up`'s thread ends at its first SSH by SystemExit, which Python takes for no error, and pytest for one.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")


def launched(folder: Path, document: dict[str, Any]) -> Launched:
    plan = plans.of(yaml.safe_dump(document))
    found = launches.launch(plan, document, ROOT / "cluster.yaml", folder / "ray-up.log")
    with warnings.catch_warnings():  # a file that `ray up` leaves to be closed by who collects it: another test
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("launch")
    names = ("HOME", "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_PROFILE")
    before = {name: os.environ.get(name) for name in names}
    found = launched(folder, yaml.safe_load(TEXT))
    assert {name: os.environ.get(name) for name in names} == before  # its own are nobody's
    assert "Launched a new head node" in (folder / "ray-up.log").read_text()
    return found


def test_the_project_s_own_file_is_launched_as_it_says(ours: Launched) -> None:
    assert ours.problems() == []
    assert [(one.kind, one.started, one.most) for one in ours.instances] == [("head", 1, 1), ("worker", 4, 4)]
    assert ours.first_ssh is not None
    assert "ProxyCommand=aws ssm start-session --region us-west-2 --target %h" in ours.first_ssh
    assert ours.left == 0
    # No group of Ray's own, which would admit SSH from anywhere.
    assert ours.stays == ["key pair ray-autoscaler_us-west-2, and its private key in ~/.ssh"]


@pytest.mark.parametrize(("kind", "market"), [("head", "on demand"), ("worker", "spot")])
def test_an_instance_is_what_the_file_says(ours: Launched, kind: str, market: str) -> None:
    plan = plans.of(TEXT)
    [facts] = [one.facts for one in ours.instances if one.kind == kind]
    assert facts == {
        "InstanceType": plan.by_name[kind].instance,
        "ImageId": "ami-FILL-IN",
        "SubnetId": "subnet-FILL-IN",
        "SecurityGroupIds": ["sg-FILL-IN"],
        "profile": f"FILL-IN-{kind}",
        "market": market,
        "cluster": "rtrain",
        **{
            "metadata HttpTokens": "required",
            "metadata HttpPutResponseHopLimit": 1,
            "metadata HttpEndpoint": "enabled",
        },
        **{"disk VolumeSize": 60, "disk VolumeType": "gp3", "disk Encrypted": True, "disk DeleteOnTermination": True},
    }


def test_what_moto_does_not_tell_of_a_spot_instance_is_said_to_be_compared_with_nothing() -> None:
    market = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.1"}}
    found = instances.compared_not({"ImageId": "a", "Placement": {}, "InstanceMarketOptions": market})
    assert found == ["InstanceMarketOptions.SpotOptions", "Placement"]


@pytest.mark.slow
def test_a_file_without_groups_gets_one_of_ray_s_that_lets_anybody_in(tmp_path: Path) -> None:
    document = yaml.safe_load(TEXT)
    for kind in document["available_node_types"].values():
        del kind["node_config"]["SecurityGroupIds"]
    found = launched(tmp_path, document)
    assert [one for one in found.problems() if one.startswith("anybody may reach port 22")]
    assert any(one.startswith("security group ray-autoscaler-rtrain") for one in found.stays)


# ----------------------------------------------------------------------------------------------------- the certificate


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"started": 3}, "worker: 3 instances were started where 4 were asked for"),
        ({"wanted": {"market": "spot"}}, "worker: market is 'on demand', and the file says 'spot'"),
        ({"wanted": {"metadata HttpTokens": "required"}}, "worker: metadata HttpTokens is None, and the file says"),
    ],
)
def test_an_instance_unlike_the_file_is_a_problem(changes: dict[str, Any], why: str) -> None:
    one = Instance("worker", 4, 4, {"market": "on demand"}, {"market": "on demand"}, ("Placement",))
    sound = Launched([one], "ssh x", [], [], 0, 3.0)
    assert sound.passed
    assert "handed on and not compared: Placement" in sound.text()
    found = Launched([replace(one, **changes)], "ssh x", [], [], 0, 3.0)
    assert [problem for problem in found.problems() if why in problem]
    assert found.text().splitlines()[-1] == "FAILED (3 s)"
    assert json.loads(json.dumps(found.to_document()))["passed"] is False


def test_whatever_else_is_wrong_with_a_launch_is_said() -> None:
    assert Launched([], None, [], [], 0, 1.0).problems() == ["ray up did not come as far as its first SSH"]
    assert Launched([], None, [], [], 0, 1.0, ["ray up has failed: x"]).problems() == ["ray up has failed: x"]
    found = Launched([], "ssh x", ["port 22 of the group g"], [], 2, 1.0).problems()
    assert found == ["anybody may reach port 22 of the group g", "left behind: 2 instances"]


def test_what_an_instance_must_have_is_read_from_its_configuration() -> None:
    node = {"InstanceType": "t3.large", "IamInstanceProfile": {"Arn": "arn:aws:iam::1:instance-profile/nodes"}}
    assert instances.wanted_of(node, "mine") == {
        **{"InstanceType": "t3.large", "profile": "nodes", "market": "on demand", "cluster": "mine"}
    }


def test_what_has_no_machines_or_is_no_aws_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        launches.check("azure", ["train"], ["resize"], True)
    assert [problem.field for problem in refused.value.problems] == ["--cloud", "verb", "--also", "--commands"]
    launches.check("moto", [], [], False)
    with pytest.raises(ConfigError, match="the file's provider is gcp"):
        launched(tmp_path, {**yaml.safe_load(TEXT), "provider": {"type": "gcp"}})
