"""Rules about nodes: who reaches them, what they may do, what they are made of, what they cost."""

import re

from rtrain.cluster.instances import BY_NAME
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import get, nodes
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found, shown
from rtrain.cluster.supply import MAX_WORKERS

ZONES = {"aws": r"(?:[a-z]|-[a-z0-9-]+-\d+[a-z]?)", "gcp": r"-[a-z]+\d*[a-z]?"}
"""What follows the region in the name of a zone; those of AWS are also Local Zones and Wavelength Zones, as
`us-west-2-lax-1a` and `us-east-1-wl1-bos-wlz-1`."""
REGIONS = re.compile(
    r"\.efs\.(?P<host>[a-z0-9-]+)\.amazonaws\.|\bregions/(?P<path>[a-z0-9-]+)/"
    r"|--region[= ](?P<option>[a-z0-9-]+)|--zone[= ](?P<zone>[a-z0-9-]+)"
)
"""Where a file names its region or zone beside its provider: the host of a file system, a subnetwork, the tunnel to a
node. In another region or zone they are not found."""
EVERYONE = ("0.0.0.0/0", "::/0")
LONGEST_IDLE_MINUTES = 60


def open_to_all(document: Document, around: Around) -> Found:
    for place, value in document.walk():
        if isinstance(value, str) and value.strip() in EVERYONE:
            what = f"{shown(place)} lets in the whole internet ({value})"
            yield document.line(*place), what, "write the addresses that need it, or reach nodes by a proxy"


def no_network(document: Document, around: Around) -> Found:
    group = document.get("provider", "security_group", "IpPermissions")
    for node in nodes(document):
        own = [key for key in node.cloud.network if node.config.get(key)]
        faces = node.config.get("NetworkInterfaces")
        lacking = [] if faces else [key for key in node.cloud.network if key not in own]
        if group and "SecurityGroupIds" in lacking:
            lacking.remove("SecurityGroupIds")
        for key in lacking:
            what = f"{node.name} has no {key}: Ray takes one that exists, or makes one that admits SSH from anywhere"
            yield document.line(*node.place()), what, f"name a private one under {shown(node.place(key))}"


def public_address(document: Document, around: Around) -> Found:
    provider = document.get("provider", default={})
    for node in nodes(document):
        if not node.cloud.internal(provider, node.config):
            place = ("provider", "use_internal_ips") if provider.get("use_internal_ips") is not True else node.place()
            what = f"{node.name} gets a public address, at which the internet can try Ray's ports"
            mend = "write use_internal_ips: true under provider, and no address of its own under node_config"
            yield document.line(*place), what, mend
            return


def metadata_service(document: Document, around: Around) -> Found:
    if document.get("provider", "type") != "aws":
        return
    for node in nodes(document):
        options = node.config.get("MetadataOptions") or {}
        if options.get("HttpTokens") != "required":
            what = (
                f"{node.name} answers version 1 of the metadata service, which hands credentials to forwarded requests"
            )
            yield (
                document.line(*node.place("MetadataOptions", "HttpTokens")),
                what,
                "write MetadataOptions: {HttpTokens: required}",
            )
        elif options.get("HttpPutResponseHopLimit", 1) != 1:
            what = (
                f"the metadata service of {node.name} answers across a hop: a container on the node has its credentials"
            )
            yield (
                document.line(*node.place("MetadataOptions", "HttpPutResponseHopLimit")),
                what,
                "write HttpPutResponseHopLimit: 1",
            )


def rights(document: Document, around: Around) -> Found:
    if document.get("provider", "type") != "aws":
        return
    head = next((node.config.get("IamInstanceProfile") for node in nodes(document) if node.is_head), None)
    for node in nodes(document):
        profile = node.config.get("IamInstanceProfile")
        if not profile:
            what = f"{node.name} has no IamInstanceProfile: Ray gives the head one that may do all in EC2 and S3"
            yield document.line(*node.place()), what, "name a profile with the rights that it needs, and no more"
        elif not node.is_head and profile == head:
            what = f"{node.name} has the head's rights: each worker may start and end instances"
            yield (
                document.line(*node.place("IamInstanceProfile")),
                what,
                "name a profile that may read the data, and no more",
            )


def disks(document: Document, around: Around) -> Found:
    for node in nodes(document):
        for number, device in enumerate(node.config.get("BlockDeviceMappings") or ()):
            place, disk = node.place("BlockDeviceMappings", number, "Ebs"), get(device, "Ebs") or {}
            if disk.get("Encrypted") is not True:
                yield document.line(*place), f"a disk of {node.name} is not encrypted", "write Encrypted: true"
            if disk.get("DeleteOnTermination") is not True:
                what = f"a disk of {node.name} stays, and is paid for, when its node has ended"
                yield document.line(*place), what, "write DeleteOnTermination: true"


def stopped_nodes(document: Document, around: Around) -> Found:
    provider = document.get("provider", default={})
    if provider.get("type") in ("aws", "azure") and provider.get("cache_stopped_nodes") is not False:
        what = "nodes are stopped and not ended: their disks are paid for, and they come back with old state"
        yield document.line("provider", "cache_stopped_nodes"), what, "write cache_stopped_nodes: false under provider"


def zone(document: Document, around: Around) -> Found:
    provider = document.get("provider", default={})
    region, named = provider.get("region"), provider.get("availability_zone")
    if provider.get("type") not in ("aws", "gcp") or not region or not named:
        return
    zones = [one.strip() for one in str(named).split(",")]
    for one in zones:
        if not re.fullmatch(rf"{re.escape(str(region))}{ZONES[provider['type']]}", one):
            what = f"the zone {one} is not in the region {region}: no node starts"
            yield document.line("provider", "availability_zone"), what, f"name zones of {region}"
    known = {"region": [str(region)], "zone": zones}
    for place, value in document.walk():
        for found in REGIONS.finditer(value) if isinstance(value, str) else ():
            kind, name = "zone" if found["zone"] else "region", found[found.lastgroup or 0]
            if name not in known[kind]:
                what = f"{shown(place)} names the {kind} {name}, and provider {' and '.join(known[kind])}"
                yield document.within(place, name), what, f"write {known[kind][0]}"


def head_without_tasks(document: Document, around: Around) -> Found:
    for node in nodes(document):
        cpus = get(node.kind, "resources", "CPU")
        if node.is_head and cpus != 0 and document.get("max_workers", default=MAX_WORKERS):
            place = ("available_node_types", node.name, "resources")
            what = "tasks are placed on the head: where they use up its memory, the cluster goes with them"
            yield document.line(*place, "CPU"), what, "write resources: {CPU: 0} for the head"


def resources(document: Document, around: Around) -> Found:
    for node in nodes(document):
        known, said = BY_NAME.get(node.instance or ""), node.kind.get("resources") or {}
        for name, has in (("CPU", known.cpus), ("GPU", known.gpus)) if known else ():
            place = ("available_node_types", node.name, "resources", name)
            if said.get(name, 0) > has:
                what = f"{node.name} says {name}: {said[name]}, and {node.instance} has {has}"
                yield document.line(*place), what, f"write {name}: {has}"
            elif name == "GPU" and has and not said.get(name):
                what = f"{node.instance} has {has} GPU, and {node.name} does not say so: none is started for its sake"
                yield document.line(*place), what, f"write GPU: {has}"


def price(document: Document, around: Around) -> Found:
    own = document.get("metadata", "prices", default={})
    for node in nodes(document):
        if node.instance and node.instance not in BY_NAME and node.instance not in own:
            what = f"the price of {node.instance} is not known: no one can say what an hour costs at most"
            mend = f"write it, in dollars an hour: metadata: {{prices: {{{node.instance}: 1.00}}}}"
            yield document.line(*node.place(*node.cloud.instance)), what, mend


def unbounded(document: Document, around: Around) -> Found:
    if document.get("max_workers") is None and document.get("available_node_types"):
        what = f"there is no max_workers: Ray takes {MAX_WORKERS}, whatever the node types say"
        yield 1, what, "write max_workers, the upper limit of what an hour can cost"
    idle = document.get("idle_timeout_minutes", default=5)
    if isinstance(idle, int | float) and idle > LONGEST_IDLE_MINUTES:
        what = f"a worker without work is paid for {idle:g} minutes"
        yield document.line("idle_timeout_minutes"), what, f"write {LONGEST_IDLE_MINUTES} or less; 5 is usual"
    kinds = document.get("available_node_types", default={})
    most = document.get("max_workers", default=MAX_WORKERS)
    for name, kind in kinds.items() if isinstance(kinds, dict) else ():
        least, limit = get(kind, "min_workers") or 0, get(kind, "max_workers")
        may = most if limit is None else min(limit, most)
        if least > may and name != document.get("head_node_type"):
            what = f"{name} asks for {least} nodes at least, and may have {may}"
            yield document.line("available_node_types", name, "min_workers"), what, "lower min_workers"
