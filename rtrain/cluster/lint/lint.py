"""`rtrain cluster lint`: what is wrong in a cluster's file, before anything is started for it.

A file is Ray's launcher's, or holds manifests of Kubernetes. Nothing is asked of any cloud: what is checked is what the
file itself shows.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path

from rtrain.cluster.lint import nodes, pins, running, secrets, spot
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.clouds import CLOUDS
from rtrain.cluster.lint.document import Document, Place, Unreadable, read
from rtrain.cluster.lint.findings import Finding, Found, Level, Rule, shown
from rtrain.errors import UserError, meant

Check = Callable[[Document, Around], Found]


def schema(document: Document, around: Around) -> Found:
    """Ray's own schema of a launcher's file, which comes with it."""
    import jsonschema

    rules = json.loads((resources.files("ray.autoscaler") / "ray-schema.json").read_text(encoding="utf-8"))
    for error in jsonschema.Draft7Validator(rules).iter_errors(document.value):
        place = tuple(error.absolute_path)
        unknown = re.findall(r"'([^']+)'", error.message) if error.validator == "additionalProperties" else []
        line = document.line(*place, *unknown[:1])
        yield line, f"{shown(place)}: {error.message}", "write what the launcher of Ray takes"
    types, head = document.get("available_node_types"), document.get("head_node_type")
    if isinstance(types, dict) and head not in types:
        what = "head_node_type names none of available_node_types"
        yield document.line("head_node_type"), what, f"write one of {', '.join(map(str, types))}"


def twice(document: Document, around: Around) -> Found:
    for place, line in document.twice:
        yield line, f"{shown(place)} is written twice, and the first one is dropped", "write it once"


def provider(document: Document, around: Around) -> Found:
    kind = document.get("provider", "type")
    if kind not in (None, "local", *CLOUDS):
        what = f"provider.type is {kind}: no rule about nodes, addresses and rights looks at such a file"
        yield document.line("provider", "type"), what, f"write {', '.join(CLOUDS)} or local"


RULES: tuple[tuple[str, Level, Check, str], ...] = (
    ("schema", "error", schema, "Ray's launcher refuses the file."),
    ("provider", "error", provider, "What is not known is not checked."),
    ("key-twice", "error", twice, "YAML keeps the last of two equal keys and says nothing."),
    ("open-to-all", "error", nodes.open_to_all, "Whoever reaches a port of Ray may run code."),
    ("no-network", "error", nodes.no_network, "Ray's own networks admit SSH from anywhere."),
    ("public-address", "error", nodes.public_address, "A node with a public address can be tried by everyone."),
    ("metadata-service", "error", nodes.metadata_service, "It hands out the node's credentials."),
    ("rights", "error", nodes.rights, "A node that is taken over should not rule the account."),
    ("disk", "error", nodes.disks, "Disks are read after, and paid for after, their node."),
    ("stopped-nodes", "error", nodes.stopped_nodes, "Stopped nodes cost, and keep old state."),
    ("zone", "error", nodes.zone, "A zone lies in one region."),
    ("spot-head", "error", spot.head, "With the head the cluster is lost."),
    ("spot-watch", "warning", spot.watch, "A notice that nobody hears costs the updates since a checkpoint."),
    ("spot-label", "warning", spot.label, "A spot node that is lost is no crash of the run."),
    ("spot-request", "error", spot.request, "What is taken away should be gone, and not be paid for."),
    ("head-tasks", "warning", nodes.head_without_tasks, "Tasks on the head can take the cluster with them."),
    ("resources", "error", nodes.resources, "The autoscaler counts with what the file says."),
    ("price", "warning", nodes.price, "What an hour may cost at most should be known before it is spent."),
    ("limits", "error", nodes.unbounded, "The limits of a cluster are the limits of its bill."),
    ("secret", "error", secrets.in_file, "A secret in a file is in its history, and on every node."),
    ("credentials", "error", secrets.credentials, "The file is copied to the head."),
    ("secret-file", "error", secrets.carried, "What is mounted is on every node."),
    ("host-key", "error", secrets.host_key, "A tunnel to nobody knows whom is none."),
    ("tls", "error", running.tls, "A token in plain text is everyone's on the way."),
    ("token-mode", "error", secrets.token_mode, "Without a token whoever reaches Ray may run code."),
    ("token-file", "error", secrets.token_file, "The token is for its owner alone."),
    ("token-of-workers", "error", secrets.token_of_workers, "Workers join with the head's token."),
    ("public-storage", "error", secrets.public_storage, "Public data can be read, and replaced, by anyone."),
    ("image", "error", pins.images, "An image that moves is another cluster tomorrow."),
    ("package", "error", pins.packages, "A package without a version is another one tomorrow."),
    ("hashes", "warning", pins.hashes, "A version is a name; a digest is the file."),
    ("runtime-env", "error", running.runtime_env, "What runs on nodes is installed before, and pinned."),
    ("script", "error", pins.scripts, "What is fetched and run at once was read by nobody."),
    ("version", "error", pins.versions, "Both ends of a job must have the same Ray and rtrain."),
    ("mount", "error", pins.missing_mounts, "Nodes need what the setup commands install."),
    ("dashboard", "error", running.dashboard, "The job API runs anyone's code."),
    ("client-port", "error", running.client_port, "An open port that nobody uses serves others."),
    ("option", "error", running.options_known, "Ray does not start with an option that it does not know."),
    ("port", "error", running.ports, "Two services cannot have one port."),
    ("autoscaler", "error", running.autoscaler_file, "Without its file there is no autoscaler."),
    ("address", "error", running.joined, "Workers that find no head are paid for, and do nothing."),
    ("storage", "error", running.storage, "Token stores, checkpoints and artefacts are read by every node."),
    ("hook", "error", running.hook, "Ray calls it by name when a node starts."),
    ("name", "error", running.names, "A verb or recipe that is not there is found out on a paid node."),
    ("room", "error", running.room, "A run that fits no cluster of the file is refused."),
)
FILL_IN = "FILL-IN"
UNEXPECTED = (TypeError, AttributeError, ValueError, KeyError, OverflowError)
"""What a rule raises where a value has another type than it reads, or is no finite number."""
BESIDE = (
    ("yaml", "What cannot be read cannot be checked."),
    ("fill-in", "What is left to be filled in is known to the user alone."),
)
"""Rules that are no check of a document."""


def rules(around: Around) -> list[Rule]:
    def bound(check: Check) -> Callable[[Document], Found]:
        return lambda document: check(document, around)

    return [Rule(name, level, why, bound(check)) for name, level, check, why in RULES]


def every_rule(around: Around) -> list[Rule]:
    """Those of a launcher's file, of manifests, and those that are no check of a document."""
    from rtrain.cluster.kubernetes import crd, rules as manifests

    named = [(name, level, why) for name, level, _, why in manifests.RULES]
    named += [(name, "error", why) for name, why in (*crd.RULES, *BESIDE)]
    return rules(around) + [Rule(name, level, why, lambda document: iter(())) for name, level, why in named]


def check(text: str, around: Around, definitions: Path | None = None) -> list[Finding]:
    """What is wrong in a launcher's file or in manifests, in the order of their lines. `definitions`: a folder with
    KubeRay's definitions, by which manifests are checked too."""
    try:
        documents = read(text)
    except Unreadable as error:
        return [Finding("yaml", "error", error.line, f"no YAML: {error.reason}", "mend this line or the one before it")]
    if not documents or not all(isinstance(document.value, dict) for document in documents):
        return [Finding("yaml", "error", 1, "the file is no map of settings", "write one, as rtrain cluster init does")]
    if "apiVersion" in documents[0].value:
        found = list(_of_manifests(documents, around, definitions))
    elif len(documents) > 1:
        what = f"the file holds {len(documents)} documents, and the launcher reads one"
        found = [Finding("yaml", "error", documents[1].line(), what, "write one map, as rtrain cluster init does")]
    else:
        found = list(_found(documents[0], rules(around)))
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def _of_manifests(documents: list[Document], around: Around, definitions: Path | None) -> Iterator[Finding]:
    from rtrain.cluster.kubernetes import crd, rules as manifests

    broken = False
    if definitions is not None:
        for finding in crd.check(documents, crd.read(definitions)):
            broken = True
            yield finding
    try:
        yield from manifests.check(documents, around)
    except UNEXPECTED as error:
        if not broken:
            what = f"a manifest is of another shape than KubeRay's ({error})"
            yield Finding("yaml", "error", documents[0].line(), what, "check it with --definitions")


def _found(document: Document, chosen: Sequence[Rule]) -> Iterator[Finding]:
    """The findings of all rules; where the schema is broken, those of the rules that can be asked still."""
    broken = False
    for rule in chosen:
        try:
            for finding in rule.findings(document):
                broken = broken or rule.name == "schema"
                yield finding
        except UNEXPECTED as error:
            if not broken:  # Ray's schema leaves open what a cloud is told of its machines
                what = f"a value is of another shape than the cloud's: {error}"
                yield Finding(
                    rule.name, "error", document.line("available_node_types"), what, "see the cloud's own form"
                )


def to_fill_in(text: str) -> list[int]:
    """The lines at which something is left to the user."""
    return [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if FILL_IN in line and not line.lstrip().startswith("#")
    ]


def find_fill_ins(text: str) -> list[Finding]:
    """A finding for each of these lines, with the key whose value it is."""
    keys: dict[int, Place] = {}
    with suppress(Unreadable):
        for document in read(text):
            for place, value in document.walk():
                if isinstance(value, str) and FILL_IN in value:
                    number = document.within(place, FILL_IN)
                    # An alias stands above: the value is at the anchor, and the line found is that of a later key.
                    if number not in keys or document.line(*keys[number]) < document.line(*place):
                        keys[number] = place
    return [
        Finding(
            *("fill-in", "error", number, f"{shown(keys.get(number, ()))} is left to be filled in"),
            f"replace {FILL_IN} by what the comment above it describes",
        )
        for number in to_fill_in(text)
    ]


def read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; {meant(file) or 'rtrain cluster init writes one'}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
