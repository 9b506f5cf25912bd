"""Rules about how Ray is started, where runs are kept, and what the file calls by name."""

import functools
import importlib
import re

from rtrain import config
from rtrain.cluster import feasible, supply
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import nodes
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found
from rtrain.cluster.lint.shell import HEAD_START, commands, starts

OF_S3 = r"(?:^|[;&|({]|\bsudo\b)\s*(?:mount-s3|s3fs|goofys)\s+\S"
BOOTSTRAP, DEFAULT_PORT = "ray_bootstrap_config.yaml", "6379"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOUNTS = (
    r"\bmount\b[^;&|]*?-t\s+(?:nfs4?|efs|lustre|cifs|fuse\.\w+)\b(?P<tail>[^;&|)]*)"
    r"|\b(?:gcsfuse|blobfuse2)\b"
)


def dashboard(document: Document, around: Around) -> Found:
    for start in starts(document):
        host = start.options.get("--dashboard-host")
        if host is not None and host not in LOOPBACK:
            what = f"the dashboard and the job API listen on {host}"
            mend = "write --dashboard-host=127.0.0.1, and reach them by SSH: ray dashboard FILE"
            yield document.within(start.command.place, "--dashboard-host"), what, mend


TLS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
ON = ("1", "true", "True")


def tls(document: Document, around: Around) -> Found:
    """Where nodes are reached over the internet, the token must not cross it in plain text; and TLS is for all or for
    none."""
    every = list(starts(document))
    with_tls = [start for start in every if start.environment.get("RAY_USE_TLS") in ON]
    public = any(not node.cloud.internal(document.get("provider", default={}), node.config) for node in nodes(document))
    for start in every:
        line = document.within(start.command.place, "ray start")
        if start not in with_tls and (public or with_tls):
            why = "other nodes have it, and do not talk to it" if with_tls else "the token crosses the internet"
            mend = "export RAY_USE_TLS=1 with each node's certificate, or TLS nowhere, in a private network"
            yield line, f"{start.command.place[0]} starts Ray without TLS: {why}", mend
        lacking = [name for name in TLS if not start.environment.get(name)] if start in with_tls else []
        if lacking:
            what = f"{start.command.place[0]} starts Ray with TLS and without {', '.join(lacking)}: it does not start"
            yield document.within(start.command.place, "RAY_USE_TLS"), what, "export the paths of the node's own files"


def runtime_env(document: Document, around: Around) -> Found:
    """What a job brings along is installed on the nodes while they are paid for, by whoever may submit it."""
    for number, line in enumerate(document.text.splitlines(), 1):
        given = re.search(r"--runtime-env-json[= ]|--runtime-env[= ](?!-)", line)
        if given and (brought := re.search(r"\b(pip|conda|uv|py_modules|image_uri|container)\b", line[given.end() :])):
            what = f"a job brings {brought[1]} along: each node fetches it anew, in whatever version there is then"
            yield number, what, "install it in setup_commands, pinned; a job brings environment variables alone"


def client_port(document: Document, around: Around) -> Found:
    for start in starts(document):
        if "--head" in start.options and not start.environment.get("RAY_START_HOOK"):
            what = "the head opens the Ray Client's port, 10001, which rtrain does not use"
            mend = "export RAY_START_HOOK=rtrain.cluster.session.on_node_start before ray start"
            yield document.within(start.command.place, "ray start"), what, mend


def options_known(document: Document, around: Around) -> Found:
    from ray.scripts import scripts

    known = {option for parameter in scripts.start.params for option in getattr(parameter, "opts", ())}
    for start in starts(document):
        for name in start.options:
            if name not in known:
                what = f"ray start has no option {name}"
                yield document.within(start.command.place, name), what, "see ray start --help"


def ports(document: Document, around: Around) -> Found:
    for start in starts(document):
        seen: dict[str, str] = {}
        for name, value in start.options.items():
            if name.endswith("-port") and value.isdigit() and value != "0":
                if value in seen:
                    what = f"{name} and {seen[value]} are both {value}: Ray does not start"
                    yield document.within(start.command.place, f"{name}={value}"), what, "give each a port of its own"
                seen[value] = name


def autoscaler_file(document: Document, around: Around) -> Found:
    if document.get("provider", "type") in (None, "local"):
        return
    for start in starts(document):
        if "--head" in start.options and "--autoscaling-config" not in start.options:
            what = "the head is not given the autoscaler's file: no worker ever starts"
            mend = f"add --autoscaling-config=~/{BOOTSTRAP}"
            yield document.within(start.command.place, "ray start"), what, mend
        elif (given := start.options.get("--autoscaling-config")) and given.rpartition("/")[2] != BOOTSTRAP:
            what = f"the autoscaler's file is called {BOOTSTRAP} on the head, not {given.rpartition('/')[2]}"
            mend = f"write --autoscaling-config=~/{BOOTSTRAP}"
            yield document.within(start.command.place, "--autoscaling-config"), what, mend


def joined(document: Document, around: Around) -> Found:
    """Workers are told where the head is, at the port that it has."""
    every = list(starts(document))
    heads = [start.options.get("--port") or DEFAULT_PORT for start in every if "--head" in start.options]
    for start in every:
        if "--head" in start.options or start.command.place[0] == HEAD_START:
            continue
        address = start.options.get("--address")
        if not address:
            what = "ray start with neither --head nor --address does not start"
            mend = "write --address=$RAY_HEAD_IP:6379"
            yield document.within(start.command.place, "ray start"), what, mend
        elif heads and (port := address.rpartition(":")[2]).isdigit() and port not in heads:
            what = f"workers look for the head at port {port}, and it has {heads[0]}: none joins"
            yield document.within(start.command.place, "--address"), what, f"write --address=$RAY_HEAD_IP:{heads[0]}"


def storage(document: Document, around: Around) -> Found:
    if document.get("provider", "type") is None or not document.get(HEAD_START):
        return
    for one in commands(document):
        if re.search(OF_S3, one.text):
            what = "a mounted bucket of S3 neither appends to files nor renames them: it holds no run"
            mend = "mount EFS; cluster.storage=s3://BUCKET copies runs to the bucket"
            yield document.within(one.place, "s3"), what, mend
    found = [(one, match) for one in commands(document) if (match := re.search(MOUNTS, one.text))]
    everywhere = [one for one, _ in found if not one.on_head_alone and not one.on_workers_alone]
    here = {
        name for one, _ in found for name, on in (("head", one.on_head_alone), ("workers", one.on_workers_alone)) if on
    }
    if not everywhere and here != {"head", "workers"}:
        where = f"on the {next(iter(here))} alone" if here else "nowhere"
        what = f"a folder that all nodes share is mounted {where}: checkpoints of one node are not there for the others"
        yield document.line("setup_commands"), what, "mount one (NFS, EFS, Filestore) in setup_commands"
    region = document.get("provider", "region")
    for command, match in found:
        tail = match.group("tail") or ""
        if re.search(r"(?:^|[\s,])soft(?:[\s,]|$)", tail):
            what = "a soft mount: where the storage is away for a moment, a write fails and a checkpoint breaks"
            yield document.within(command.place, "soft"), what, "mount it hard"
        other = re.search(r"\.efs\.([a-z0-9-]+)\.amazonaws\.com", tail)
        if other and region and other[1] != region:
            what = f"the file system is in {other[1]}, the nodes are in {region}: they cannot reach it"
            yield document.within(command.place, ".efs."), what, f"name one in {region}"


def hook(document: Document, around: Around) -> Found:
    for start in starts(document):
        name = start.environment.get("RAY_START_HOOK")
        module, _, attribute = (name or "").rpartition(".")
        if name and not (module.startswith("rtrain.") and _has(module, attribute)):
            what, mend = f"there is no {name}: Ray does not start", "write rtrain.cluster.session.on_node_start"
            yield document.within(start.command.place, "RAY_START_HOOK"), what, mend


def _has(module: str, attribute: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def names(document: Document, around: Around) -> Found:
    for number, line in enumerate(document.text.splitlines(), 1):
        for verb, recipe in re.findall(r"(?:python -m rtrain|cluster submit\b.* --) ([a-z]+)(?: ([a-z]\S*))?", line):
            if around.verbs and verb not in around.verbs:
                yield number, f"rtrain has no verb {verb}", f"it has {', '.join(sorted(around.verbs))}"
            elif verb in ("train", "tune") and re.fullmatch(r"[\w-]+", recipe) and recipe not in config.recipe_names():
                yield number, f"there is no recipe {recipe}", f"there are {', '.join(config.recipe_names())}"


@functools.cache
def _workers_of_recipes() -> int:
    return max(config.load(name).recipe.train.workers for name in config.recipe_names())


def room(document: Document, around: Around) -> Found:
    """The workers of each recipe, and of each command in the comments, have room in what may be started, beside their
    data tasks."""
    types = document.get("available_node_types")
    if not isinstance(types, dict) or document.get("provider", "type") == "local":
        return
    may = supply.startable(document.value)
    told = [int(number) for number in re.findall(r"--workers[ =](\d+)", document.text)]
    wanted = max([_workers_of_recipes(), *told])
    if any(feasible.workers([], may, supply.Needs(device), wanted) == wanted for device in supply.NEEDS):
        return
    has_gpus = any(host.has.get("GPU") for host, _ in may.kinds.values())
    needs = supply.Needs("gpu" if has_gpus else "cpu")
    of = f"{wanted} {supply.NEEDS[needs.device]}s for workers and {needs.of(wanted).data} CPUs for their data tasks"
    what = f"no nodes that may be up together have {of}; there may be {feasible.told(may, needs)}"
    yield document.line("max_workers"), what, f"{feasible.remedy(may, needs, needs.of(wanted))} or take larger nodes"
