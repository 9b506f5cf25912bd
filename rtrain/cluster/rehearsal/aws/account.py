"""An account of moto's that has what a cluster's file names: subnets, groups, an image, profiles."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rtrain.errors import ConfigError, Problem, UserError

MOTO = "moto"
KEYS = {"AWS_ACCESS_KEY_ID": "rehearsal", "AWS_SECRET_ACCESS_KEY": "rehearsal"}
RAY = {"RAY_UP_enable_autoscaler_v2": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class Planted:
    """An account of moto's with what a file names, by the file's own names."""

    ec2: Any
    config: dict[str, Any]
    """The file, with the ids of what was planted in place of its own."""
    names: dict[str, str]
    """The file's own names, by these ids."""

    def named(self, value: Any) -> Any:
        """A value with the file's own names."""
        if isinstance(value, list):
            return [self.named(one) for one in value]
        return self.names.get(value, value) if isinstance(value, str) else value


@contextmanager
def planted(document: Mapping[str, Any]) -> Iterator[Planted]:
    """Raises `ConfigError` for a file of another cloud, `UserError` where moto is missing."""
    provider = document.get("provider") or {}
    if provider.get("type") != "aws":
        reason = f"the file's provider is {provider.get('type')}, and {MOTO} stands for AWS"
        raise ConfigError([Problem("--cloud", MOTO, reason, "leave it out: nodes are rehearsed of any file")])
    try:
        import boto3
        from moto import mock_aws
    except ImportError as error:
        raise UserError(f"--cloud {MOTO} needs {error.name}: pip install 'rtrain[test]' boto3") from None
    region = str(provider["region"])
    with tempfile.TemporaryDirectory(prefix="rtrain-moto-") as home, _environment(home, region), mock_aws():
        yield _plant(document, boto3.client("ec2", region), boto3.client("iam", region))


def _plant(document: Mapping[str, Any], ec2: Any, iam: Any) -> Planted:
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    there = (str(image["ImageId"]) for image in ec2.describe_images()["Images"])
    zones = [zone.strip() for zone in str(document["provider"].get("availability_zone", "")).split(",") if zone.strip()]
    ids: dict[str, str] = {}
    images: dict[str, str] = {}

    def subnet(name: str) -> str:
        number, zone = len(ids), zones[len(ids) % len(zones)] if zones else None
        where = {"AvailabilityZone": zone} if zone else {}
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", **where)
        return str(made["Subnet"]["SubnetId"])

    def group(name: str) -> str:
        made = str(ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc)["GroupId"])
        own = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made}]}]
        ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=own)
        return made

    def of(name: str, make: Callable[[str], str]) -> str:
        if name not in ids:
            ids[name] = make(name)
        return ids[name]

    kinds, profiles = {}, set[str]()
    for kind, value in document["available_node_types"].items():
        node = dict(value.get("node_config") or {})
        if "SubnetIds" in node:
            node["SubnetIds"] = [of(name, subnet) for name in node["SubnetIds"]]
        if "SecurityGroupIds" in node:
            node["SecurityGroupIds"] = [of(name, group) for name in node["SecurityGroupIds"]]
        if "ImageId" in node:
            if node["ImageId"] not in images:
                images[node["ImageId"]] = next(there)
            node["ImageId"] = images[node["ImageId"]]
        profile = node.get("IamInstanceProfile") or {}
        if (name := profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]) and name not in profiles:
            profiles.add(name)
            iam.create_instance_profile(InstanceProfileName=name)
        kinds[kind] = {**value, "node_config": node}
    config = {**document, "available_node_types": kinds}
    return Planted(ec2, config, {made: name for name, made in (ids | images).items()})


@contextmanager
def _environment(home: str, region: str) -> Iterator[None]:
    """Keys that are nobody's, and a home of its own: Ray keeps the key pair that it makes in ~/.ssh."""
    changed = {**KEYS, "AWS_DEFAULT_REGION": region, "HOME": home, **RAY}
    dropped = {name for name in os.environ if name.startswith("AWS_")} - changed.keys()
    before = {name: os.environ.get(name) for name in (*changed, *dropped)}
    os.environ.update(changed)
    for name in dropped:
        del os.environ[name]
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
