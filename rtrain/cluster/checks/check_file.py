"""`rtrain cluster lint`: what is wrong in a cluster's file, before anything is started for it.

A file is Ray's launcher's, or holds manifests of Kubernetes. Nothing is asked of any cloud: what is checked is what the
file itself shows.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path

from rtrain.cluster.checks import node_rules, ray_start_rules
from rtrain.cluster.checks.clouds import CLOUDS
from rtrain.cluster.checks.findings import Around, Finding, Found, Level, shown
from rtrain.cluster.checks.yaml_document import Document, Place, Unreadable, read
from rtrain.core.errors import UserError, meant

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


def provider(document: Document, around: Around) -> Found:
    kind = document.get("provider", "type")
    if kind not in (None, "local", *CLOUDS):
        what = f"provider.type is {kind}: no rule about nodes, addresses and rights looks at such a file"
        yield document.line("provider", "type"), what, f"write {', '.join(CLOUDS)} or local"


RULES: tuple[tuple[str, Level, Check], ...] = (
    ("schema", "error", schema),
    ("provider", "error", provider),
    ("public-address", "error", node_rules.public_address),
    ("zone", "error", node_rules.zone),
    ("head-tasks", "warning", node_rules.head_without_tasks),
    ("resources", "error", node_rules.resources),
    ("limits", "error", node_rules.unbounded),
    ("spot-head", "error", node_rules.spot_head),
    ("spot-watch", "warning", node_rules.spot_watcher),
    ("spot-label", "warning", node_rules.spot_label),
    ("token-mode", "error", ray_start_rules.token_mode),
    ("token-file", "error", ray_start_rules.token_file),
    ("token-of-workers", "error", ray_start_rules.token_of_workers),
    ("version", "error", ray_start_rules.versions),
    ("mount", "error", ray_start_rules.missing_mounts),
    ("dashboard", "error", ray_start_rules.dashboard),
    ("autoscaler", "error", ray_start_rules.autoscaler_file),
    ("address", "error", ray_start_rules.joined),
    ("storage", "error", ray_start_rules.storage),
    ("hook", "error", ray_start_rules.hook),
    ("name", "error", ray_start_rules.names),
    ("room", "error", ray_start_rules.room),
)
FILL_IN = "FILL-IN"
UNEXPECTED = (TypeError, AttributeError, ValueError, KeyError, OverflowError)
"""What a rule raises where a value has another type than it reads, or is no finite number."""


def check(text: str, around: Around) -> list[Finding]:
    """What is wrong in a launcher's file or in manifests, in the order of their lines."""
    try:
        documents = read(text)
    except Unreadable as error:
        return [Finding("yaml", "error", error.line, f"no YAML: {error.reason}", "mend this line or the one before it")]
    if not documents or not all(isinstance(document.value, dict) for document in documents):
        return [Finding("yaml", "error", 1, "the file is no map of settings", "write one, as rtrain cluster init does")]
    if "apiVersion" in documents[0].value:
        found = list(_of_manifests(documents, around))
    elif len(documents) > 1:
        what = f"the file holds {len(documents)} documents, and the launcher reads one"
        found = [Finding("yaml", "error", documents[1].line(), what, "write one map, as rtrain cluster init does")]
    else:
        found = list(_of_launcher(documents[0], around))
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def _of_manifests(documents: list[Document], around: Around) -> Iterator[Finding]:
    from rtrain.cluster.kubernetes import rules

    try:
        yield from rules.check(documents, around)
    except UNEXPECTED as error:
        what = f"a manifest is of another shape than KubeRay's ({error})"
        yield Finding("yaml", "error", documents[0].line(), what, "check it with kubeconform and KubeRay's definitions")


def _of_launcher(document: Document, around: Around) -> Iterator[Finding]:
    """The findings of all rules; where the schema is broken, those of the rules that can be asked still."""
    broken = False
    for name, level, look in RULES:
        try:
            for line, what, mend in look(document, around):
                broken = broken or name == "schema"
                yield Finding(name, level, line, what, mend)
        except UNEXPECTED as error:
            if not broken:  # Ray's schema leaves open what a cloud is told of its machines
                what = f"a value is of another shape than the cloud's: {error}"
                yield Finding(name, "error", document.line("available_node_types"), what, "see the cloud's own form")


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
        raise UserError(
            f"{file}: no such file; {meant(file) or 'rtrain cluster init writes one'}", code="not_found"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", code="unreadable") from None
