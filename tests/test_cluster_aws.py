"""cluster.yaml by Ray's own provider for AWS, on moto's EC2: what the launcher and the autoscaler would really ask for.

The file's own subnets, groups, image and profiles are planted first, as its user makes them. moto starts one instance,
however many are asked for at a time, checks no rights, and gives images and prices that are its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from rtrain.cluster.rehearsal import plan as plans

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
REGION = yaml.safe_load(TEXT)["provider"]["region"]
KEY = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}


@dataclass(frozen=True)
class Account:
    ec2: Any
    config: dict[str, Any]
    """The file, filled in with what is there, as `ray up` hands it to its provider."""
    group: str
    subnet: str
    groups_before: int


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.util import prepare_config

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name, value in KEY.items():
            patch.setenv(name, value)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # Ray makes a key pair in ~/.ssh
        ec2, iam = boto3.client("ec2", REGION), boto3.client("iam", REGION)
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        zone = yaml.safe_load(TEXT)["provider"]["availability_zone"]
        made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24", AvailabilityZone=zone)
        subnet = made["Subnet"]["SubnetId"]
        group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
        ec2.authorize_security_group_ingress(
            GroupId=group, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
        )
        for name in ("rtrain-head", "rtrain-worker"):
            iam.create_instance_profile(InstanceProfileName=name)
        image = ec2.describe_images()["Images"][0]["ImageId"]
        text = TEXT
        for left, planted in (
            *(("ami-FILL-IN", image), ("subnet-FILL-IN", subnet), ("sg-FILL-IN", group)),
            *(("FILL-IN-head", "rtrain-head"), ("FILL-IN-worker", "rtrain-worker"), ("fs-FILL-IN", "fs-1")),
        ):
            assert left in text
            text = text.replace(left, planted)
        groups = len(ec2.describe_security_groups()["SecurityGroups"])
        yield Account(ec2, bootstrap_aws(prepare_config(yaml.safe_load(text))), group, subnet, groups)


def started(account: Account, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The instance that the provider makes of a node type, and its disk, as EC2 describes them; it is ended again."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    provider = AWSNodeProvider(account.config["provider"], account.config["cluster_name"])
    tags = {TAG_RAY_NODE_KIND: "head" if kind == "head" else "worker", TAG_RAY_USER_NODE_TYPE: kind}
    made = list(provider.create_node(dict(account.config["available_node_types"][kind]["node_config"]), tags, 1))
    [found] = account.ec2.describe_instances(InstanceIds=made)["Reservations"]
    attached = [{"Name": "attachment.instance-id", "Values": made}]
    [volume] = account.ec2.describe_volumes(Filters=attached)["Volumes"]
    assert set(provider.non_terminated_nodes({})) == set(made)
    provider.terminate_nodes(made)
    assert provider.non_terminated_nodes({}) == []
    return found["Instances"][0], volume


def test_ray_takes_what_the_file_names_and_makes_no_network_of_its_own(account: Account) -> None:
    assert len(account.ec2.describe_security_groups()["SecurityGroups"]) == account.groups_before
    for kind in account.config["available_node_types"].values():
        assert kind["node_config"]["SubnetIds"] == [account.subnet]
        assert kind["node_config"]["SecurityGroupIds"] == [account.group]
    profiles = boto3.client("iam", REGION).list_instance_profiles()["InstanceProfiles"]
    assert sorted(one["InstanceProfileName"] for one in profiles) == ["rtrain-head", "rtrain-worker"]


def test_the_nodes_group_lets_nobody_in_but_the_nodes(account: Account) -> None:
    [group] = account.ec2.describe_security_groups(GroupIds=[account.group])["SecurityGroups"]
    sources = [
        (rule["IpRanges"], [one["GroupId"] for one in rule["UserIdGroupPairs"]]) for rule in group["IpPermissions"]
    ]
    assert sources == [([], [account.group])]


@pytest.mark.parametrize(("kind", "life"), [("head", None), ("worker", "spot")])
def test_an_instance_is_what_the_file_says(account: Account, kind: str, life: str | None) -> None:
    plan = plans.of(TEXT)
    one, volume = started(account, kind)
    tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
    assert one["InstanceType"] == plan.by_name[kind].instance
    assert one["SubnetId"] == account.subnet
    assert [group["GroupId"] for group in one["SecurityGroups"]] == [account.group]
    assert one["IamInstanceProfile"]["Arn"].endswith(f"/rtrain-{kind}")
    assert (tags["ray-cluster-name"], tags["ray-user-node-type"]) == ("rtrain", kind)
    assert one["MetadataOptions"]["HttpTokens"] == "required"
    assert one["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert one.get("InstanceLifecycle") == life
    assert (volume["Encrypted"], volume["Size"], volume["VolumeType"]) == (True, 60, "gp3")
    assert one["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"] is True
