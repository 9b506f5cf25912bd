"""An instance of EC2 beside what the file says of its node type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain.cluster.rehearsal.aws.account import Planted

COMPARED = {
    *("InstanceType", "SubnetIds", "SecurityGroupIds", "IamInstanceProfile", "MetadataOptions", "ImageId"),
    *("BlockDeviceMappings", "InstanceMarketOptions"),
}
DISK = ("VolumeSize", "VolumeType", "Encrypted", "DeleteOnTermination")
METADATA = ("HttpTokens", "HttpPutResponseHopLimit", "HttpEndpoint")


@dataclass(frozen=True)
class Instance:
    """What EC2 has of a node type, after Ray's own provider has asked for it."""

    kind: str
    started: int
    most: int
    """How many the file allows at a time."""
    facts: Mapping[str, Any]
    """By the name of what the file says: what the instance has of it."""
    wanted: Mapping[str, Any]
    compared_not: Sequence[str] = ()
    """Keys of the node's configuration that are handed to EC2 and not looked at again."""

    def problems(self) -> list[str]:
        found = [
            f"{self.kind}: {name} is {self.facts.get(name)!r}, and the file says {value!r}"
            for name, value in self.wanted.items()
            if self.facts.get(name) != value
        ]
        if self.started != self.most:
            found.append(f"{self.kind}: {self.started} instances were started where {self.most} were asked for")
        return found


def wanted_of(node: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    """What an instance must have by its configuration in the file."""
    disks = [dict(one["Ebs"]) for one in node.get("BlockDeviceMappings", []) if "Ebs" in one]
    profile = node.get("IamInstanceProfile") or {}
    found = {
        "InstanceType": node.get("InstanceType"),
        "ImageId": node.get("ImageId"),
        "SubnetId": (node.get("SubnetIds") or [None])[0],
        "SecurityGroupIds": sorted(node.get("SecurityGroupIds", [])) or None,
        "profile": profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2] or None,
        "market": (node.get("InstanceMarketOptions") or {}).get("MarketType", "on demand"),
        "cluster": cluster,
        **{f"metadata {name}": value for name, value in (node.get("MetadataOptions") or {}).items()},
        **{f"disk {name}": value for name, value in (disks[0] if disks else {}).items() if name in DISK},
    }
    return {name: value for name, value in found.items() if value is not None}


def compared_not(node: Mapping[str, Any]) -> list[str]:
    """What of a configuration is handed to EC2 and not looked at again."""
    market = node.get("InstanceMarketOptions") or {}
    return sorted(
        [*(node.keys() - COMPARED), *(f"InstanceMarketOptions.{name}" for name in market.keys() - {"MarketType"})]
    )


def facts_of(account: Planted, instance: str) -> dict[str, Any]:
    """The same of an instance, as EC2 describes it, by the file's own names."""
    [found] = account.ec2.describe_instances(InstanceIds=[instance])["Reservations"]
    one = found["Instances"][0]
    attached = [{"Name": "attachment.instance-id", "Values": [instance]}]
    volumes = account.ec2.describe_volumes(Filters=attached)["Volumes"]
    tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
    disk = dict(volumes[0], VolumeSize=volumes[0]["Size"]) if volumes else {}
    for mapping in one.get("BlockDeviceMappings", [])[:1]:
        disk["DeleteOnTermination"] = mapping["Ebs"]["DeleteOnTermination"]
    facts = {
        "InstanceType": one["InstanceType"],
        "ImageId": one["ImageId"],
        "SubnetId": one["SubnetId"],
        "SecurityGroupIds": sorted(group["GroupId"] for group in one["SecurityGroups"]),
        "profile": one.get("IamInstanceProfile", {}).get("Arn", "").rpartition("/")[2],
        "market": one.get("InstanceLifecycle", "on demand"),
        "cluster": tags.get("ray-cluster-name"),
        **{f"metadata {name}": one.get("MetadataOptions", {}).get(name) for name in METADATA},
        **{f"disk {name}": disk.get(name) for name in DISK},
    }
    return {name: account.named(value) for name, value in facts.items()}
