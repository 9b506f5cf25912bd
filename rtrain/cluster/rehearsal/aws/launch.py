"""A file for AWS by Ray's own code for it, on moto's EC2: what `ray up` and the autoscaler would really ask AWS for.

What the file names is planted first, as its user makes it: subnets, groups, images and profiles. Then `ray up` runs
until its first SSH, since behind it there is no machine, and each type of worker is started as often as the file
allows. Nothing is asked of AWS: moto answers in this process.
"""

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rtrain.cluster.rehearsal.aws.account import MOTO, Planted, planted
from rtrain.cluster.rehearsal.aws.instances import Instance, compared_not, facts_of, wanted_of
from rtrain.cluster.rehearsal.plan import Plan
from rtrain.errors import ConfigError, Problem
from rtrain.ray_internals import launcher

SOCKETS = "ray_ssh_*"
OPEN_WORLD = ("0.0.0.0/0", "::/0")
IGNORES = (
    "rights: moto lets the profiles, and whoever calls ray up, do everything",
    "whether an account has the subnets, groups, images and profiles that the file names: they were made for it",
    "quotas, capacity and prices of spot instances: every instance is there at once",
    "images, and everything behind the first SSH: rehearse without --cloud for the commands' part",
)
"""Where moto is another cloud than AWS."""


@dataclass
class Launched:
    """The certificate of a launch."""

    instances: Sequence[Instance]
    first_ssh: str | None
    """The command by which `ray up` would have gone on; None where it did not come so far."""
    open_ports: Sequence[str]
    """Ports of the nodes' groups that anybody may reach."""
    stays: Sequence[str]
    """What `ray up` has made beside instances, and `ray down` leaves there."""
    left: int
    """Instances that were left when all had been ended."""
    seconds: float
    errors: Sequence[str] = field(default=())

    def problems(self) -> list[str]:
        found = [*self.errors, *(text for one in self.instances for text in one.problems())]
        if self.first_ssh is None and not self.errors:
            found.append("ray up did not come as far as its first SSH")
        found += [f"anybody may reach {port}" for port in self.open_ports]
        return [*found, *([f"left behind: {self.left} instances"] if self.left else [])]

    @property
    def passed(self) -> bool:
        return not self.problems()

    def not_rehearsed(self) -> list[str]:
        keys = sorted({name for one in self.instances for name in one.compared_not})
        return [*IGNORES, *([f"handed on and not compared: {', '.join(keys)}"] if keys else [])]

    def to_document(self) -> dict[str, Any]:
        return {
            "cloud": MOTO,
            "passed": self.passed,
            "problems": self.problems(),
            **{name: value for name, value in asdict(self).items() if name != "errors"},
            "not_rehearsed": self.not_rehearsed(),
        }

    def text(self) -> str:
        lines = []
        for one in self.instances:
            facts = ", ".join(f"{name} {_shown(value)}" for name, value in one.facts.items())
            lines.append(f"{one.kind}: {one.started} of {one.most} started; {facts}")
        lines += [f"first SSH: {self.first_ssh}"] if self.first_ssh else []
        lines += [f"stays after ray down: {one}" for one in self.stays]
        lines += ["", *(f"not rehearsed: {one}" for one in self.not_rehearsed()), "", *self.problems()]
        lines.append(f"{'passed' if self.passed else 'FAILED'} ({self.seconds:.0f} s)")
        return "\n".join(lines)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# ------------------------------------------------------------------------------------------------------------- launched


class _FirstSsh:
    """In place of `subprocess`: keeps the first command, and ends the thread that calls it."""

    def __init__(self) -> None:
        self.command: str | None = None

    def check_call(self, command: Sequence[str], *_: Any, **__: Any) -> None:
        self.command = self.command or " ".join(command)
        raise SystemExit

    check_output = check_call


def check(cloud: str, words: Sequence[str], also: Collection[str], own: bool) -> None:
    """Raises `ConfigError` with what is wrong in what was asked for."""
    problems = []
    if cloud != MOTO:
        problems.append(Problem("--cloud", cloud, "has no stand-in here", f"write {MOTO}, which stands for AWS"))
    others = {"verb": " ".join(words), "--also": ", ".join(also), "--commands": "yes" if own else ""}
    reason = "needs machines, and with --cloud there are none"
    problems += [Problem(name, given, reason, "rehearse it without --cloud") for name, given in others.items() if given]
    if problems:
        raise ConfigError(problems)


def launch(plan: Plan, document: Mapping[str, Any], file: Path, log: Path) -> Launched:
    """`file`: that of the document, in whose folder its file mounts are. `log` gets what `ray up` prints."""
    begin = time.monotonic()
    with planted(document) as account, _told_to(log), _folder(file.parent), _without_sockets():
        groups, keys = _groups(account.ec2), _keys(account.ec2)
        runner, errors, instances = _FirstSsh(), list[str](), list[Instance]()
        config = launcher.bootstrapped(account.config)
        cloud = launcher.cloud_of(config)
        try:
            with suppress(SystemExit):  # where ray up ends, as it cannot go on over SSH
                launcher.start_head(config, file, cloud, runner)
        except Exception as error:
            if runner.command is None:
                errors.append(f"ray up has failed: {type(error).__name__}: {error}")
        for kind in (plan.head, *plan.kinds):
            instances.append(_instances(account, cloud, config, kind.name, 1 if kind is plan.head else kind.most, plan))
        ours = {group for one in instances for group in one.facts.get("SecurityGroupIds", [])}
        anybody = _open_ports(account, ours)
        ids = cloud.non_terminated_nodes({})
        if ids:
            cloud.terminate_nodes(ids)
        stays = [f"security group {name}" for name in sorted(_groups(account.ec2) - groups)]
        stays += [f"key pair {name}, and its private key in ~/.ssh" for name in sorted(_keys(account.ec2) - keys)]
        left = len(cloud.non_terminated_nodes({}))
    seconds = round(time.monotonic() - begin, 1)
    return Launched(instances, runner.command, anybody, stays, left, seconds, errors)


@contextmanager
def _told_to(log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        yield


@contextmanager
def _without_sockets() -> Iterator[None]:
    """Ray makes a folder for the sockets of its SSH, and leaves it there."""
    before = set(Path("/tmp").glob(SOCKETS))
    yield
    for folder in set(Path("/tmp").glob(SOCKETS)) - before:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _instances(account: Planted, cloud: Any, config: Mapping[str, Any], kind: str, most: int, plan: Plan) -> Instance:
    """As many instances of a type as there may be; the head's is there already, where `ray up` has made it."""
    from ray.autoscaler.tags import (
        NODE_KIND_HEAD,
        NODE_KIND_WORKER,
        TAG_RAY_NODE_KIND,
        TAG_RAY_NODE_NAME,
        TAG_RAY_NODE_STATUS,
        TAG_RAY_USER_NODE_TYPE,
    )

    node = config["available_node_types"][kind]["node_config"]
    is_head = kind == plan.head.name
    tags = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD if is_head else NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: kind}
    there = cloud.non_terminated_nodes(tags)
    more = {
        TAG_RAY_NODE_NAME: f"ray-{config['cluster_name']}-{kind}",
        TAG_RAY_NODE_STATUS: launcher.UNINITIALIZED,
    }
    for _ in range(most - len(there)):
        cloud.create_node(dict(node), tags | more, 1)  # moto starts one, however many are asked for at a time
    there = cloud.non_terminated_nodes(tags)
    asked = account.config["available_node_types"][kind].get("node_config") or {}
    facts = facts_of(account, there[0]) if there else {}
    wanted = {name: account.named(value) for name, value in wanted_of(asked, config["cluster_name"]).items()}
    return Instance(kind, len(there), most, facts, wanted, compared_not(asked))


def _groups(ec2: Any) -> set[str]:
    return {group["GroupName"] for group in ec2.describe_security_groups()["SecurityGroups"]}


def _keys(ec2: Any) -> set[str]:
    return {pair["KeyName"] for pair in ec2.describe_key_pairs()["KeyPairs"]}


def _open_ports(account: Planted, named: set[str]) -> list[str]:
    """Ports of the nodes' groups that have no limit on who asks."""
    found = []
    for group in account.ec2.describe_security_groups()["SecurityGroups"]:
        if account.named(group["GroupId"]) not in named:
            continue
        for rule in group["IpPermissions"]:
            ranges = [one["CidrIp"] for one in rule.get("IpRanges", [])]
            ranges += [one["CidrIpv6"] for one in rule.get("Ipv6Ranges", [])]
            if set(ranges) & set(OPEN_WORLD):
                found.append(f"port {rule.get('FromPort', 'any')} of the group {group['GroupName']}")
    return found
