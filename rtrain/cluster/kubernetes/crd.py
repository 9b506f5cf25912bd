"""Manifests against KubeRay's own definitions (CustomResourceDefinition), which its repository and its chart have.

Kubernetes drops fields that a schema does not know, without a word; here they are findings. Rules in CEL, which it asks
beside the schema, are asked too where cel-python is installed; those that compare with an earlier state are not.
"""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rtrain.cluster.lint.document import Document, Place
from rtrain.cluster.lint.findings import Finding, shown
from rtrain.errors import UserError

RULE, CEL_RULE = "k8s-schema", "k8s-cel"
RULES = (
    (RULE, "KubeRay's definition refuses it, or Kubernetes drops it without a word."),
    (CEL_RULE, "A rule beside the schema refuses it."),
)


class Definition(NamedTuple):
    """KubeRay's definition of one kind, in version v1."""

    schema: dict[str, Any]
    strict: dict[str, Any]
    """The same with unknown fields refused."""


def read(folder: Path) -> dict[str, Definition]:
    """Definitions by kind, from the definitions in a folder. Raises `UserError` where there is none, and where a file
    is no YAML or holds half a definition."""
    found = {}
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            for document in yaml.load_all(file.read_text(encoding="utf-8"), Loader=loader):
                found.update(_defined(document))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            told = " ".join(str(error).split())
            raise UserError(f"{file} is no YAML ({told}); keep KubeRay's definitions alone in {folder}") from None
        except (LookupError, TypeError, AttributeError):
            raise UserError(f"{file} holds half a definition; take it anew from KubeRay's config/crd/bases") from None
    if not found:
        raise UserError(f"{folder} holds no CustomResourceDefinition; take them from KubeRay's config/crd/bases")
    return found


def _defined(document: Any) -> dict[str, Definition]:
    """The definition in a document, by its kind; none in one of another kind. Raises what looking into half of one
    does."""
    if not isinstance(document, dict) or document.get("kind") != "CustomResourceDefinition":
        return {}
    kind, versions = document["spec"]["names"]["kind"], document["spec"]["versions"]
    schemas = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1"]
    return {kind: Definition(schemas[0], strict(schemas[0]))} if schemas else {}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as JSON Schema knows it, with unknown fields refused; the metadata of an object is Kubernetes' own."""
    made: dict[str, Any] = _strict(copy.deepcopy(schema))
    made["properties"]["metadata"] = {"type": "object"}
    return made


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(value) if name != "properties" else {} for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def check(documents: list[Document], definitions: dict[str, Definition]) -> Iterator[Finding]:
    import jsonschema

    for document in documents:
        definition = definitions.get(str(document.get("kind")))
        if definition is None:
            continue
        for error in jsonschema.Draft7Validator(definition.strict).iter_errors(document.value):
            place: Place = tuple(error.absolute_path)
            what = f"{shown(place)}: {error.message[:200]}"
            yield Finding(RULE, "error", document.line(*place), what, "write what KubeRay's definition takes")
        yield from _cel(document, definition.schema, document.value, ())


def _cel(document: Document, schema: dict[str, Any], value: Any, place: Place) -> Iterator[Finding]:
    """What the rules of a schema, and of the schemas in it, refuse."""
    for rule in schema.get("x-kubernetes-validations") or ():
        if "oldSelf" not in rule["rule"] and holds(rule["rule"], value) is False:
            what = f"{shown(place)}: {rule.get('message') or rule['rule']}"
            yield Finding(CEL_RULE, "error", document.line(*place), what, "mend it as KubeRay says")
    if isinstance(value, dict):
        inner = schema.get("properties") or {}
        for name, one in value.items():
            below = inner.get(name) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield from _cel(document, below, one, (*place, name))
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, one in enumerate(value):
            yield from _cel(document, schema["items"], one, (*place, number))


def holds(rule: str, value: Any) -> bool | None:
    """Whether a rule in the Common Expression Language holds of `self`; None where no library is there to ask, and
    where the rule cannot be asked of such a value, which the schema refuses."""
    program = _program(rule)
    if program is None:
        return None
    from celpy.adapter import json_to_cel
    from celpy.evaluation import CELEvalError

    try:
        return bool(program.evaluate({"self": json_to_cel(value)}))
    except (CELEvalError, ValueError, TypeError):
        return None


@functools.cache
def _program(rule: str) -> Any:
    try:
        import celpy
    except ImportError:
        return None
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def knows_cel() -> bool:
    return _program("true") is not None
