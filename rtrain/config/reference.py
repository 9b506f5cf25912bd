"""Every setting with its description, from the models themselves: as `docs/settings.md`, and as a recipe in full.

    python -m rtrain.config.reference > docs/settings.md

A test compares the file with `text()`, so that the page cannot fall behind the models.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from rtrain.config.deploy import Deploy
from rtrain.config.loading import load, recipe_text, to_document
from rtrain.config.recipe import LOCATION, SPEED, Recipe

WIDTH = 100
"""Characters of a line of a recipe that is shown in full."""
COMMAND = "python -m rtrain.config.reference > docs/settings.md"
HEAD = f"""# Settings

This page is generated from the configuration models: `{COMMAND}`.

Change one with `--set section.name=value`, or in a YAML file: `rtrain recipes show intent` prints one to start from,
and with `--all` every setting of this page with its comment. The defaults below are those of the models; a recipe has
its own values for some.

The column *of* says what a setting belongs to:

| of | meaning | `--resume` with another value |
|---|---|---|
| run | It changes the weights, so it is part of a run's identity. | is refused by name |
| rows | It says where the same rows lie; and `name`, the recipe. | is allowed, but for `name` |
| student | It changes the weights of a distilled student, and of no other run. | is refused for a student |
| int8 | It changes the int8 artefact only. | is allowed |
| gate | It says what a compressed artefact must be like to be released, and changes none. | is allowed |
| speed | It changes speed, memory or what is kept, never the weights (see below). | is allowed |
| deploy | It says where a run goes and how it is searched, served or reported. | is allowed |

`train.workers`, `train.micro_batch` and `train.aggregation_frequency` set `train.rows_per_update` where that
is not given. A run keeps the number that it was started with, so they change speed only from then on. With dropout,
they also change which activations are dropped.
"""
BOUNDS = (
    ("minimum", "{} or more"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "{} or less"),
    ("exclusiveMaximum", "less than {}"),
)


class _Unsorted(GenerateJsonSchema):
    """Defaults as the models have them: low before high."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


def text() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for title, rows in _sections():
        parts.append(f"\n## {title}\n\n| setting | type | default | of | what it is |\n|---|---|---|---|---|\n")
        parts += rows
    return "".join(parts)


def _sections() -> Iterator[tuple[str, list[str]]]:
    """A heading and its table rows: first what stands alone, then section by section, as the models have them."""
    for model in (Recipe, Deploy):
        schema = model.model_json_schema(schema_generator=_Unsorted)
        alone = [
            _row(name, field, name in schema["required"])
            for name, field in schema["properties"].items()
            if "$ref" not in field
        ]
        if alone:
            yield "name and task", alone
        for name, field in schema["properties"].items():
            if "$ref" in field:
                section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
                rows = [_row(f"{name}.{leaf}", inner) for leaf, inner in section["properties"].items()]
                yield name, rows


def whole_recipe(name: str) -> str:
    """A recipe that comes with rtrain, as YAML with every setting and its description. It loads as the recipe does."""
    comments = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    head = ["# Every setting of this recipe, those that it leaves at their defaults too.", "#", *comments]
    values = to_document(load(name))
    lines: list[str] = []
    for model in (Recipe, Deploy):
        schema = model.model_json_schema(schema_generator=_Unsorted)
        for key, field in schema["properties"].items():
            if "$ref" not in field:
                lines += ["", *_setting(key, field, values[key], "")]
                continue
            lines += ["", f"{key}:"]
            for leaf, inner in schema["$defs"][field["$ref"].rsplit("/", 1)[1]]["properties"].items():
                lines += _setting(leaf, inner, values[key][leaf], "  ")
    return "\n".join([*head, *lines]) + "\n"


def _setting(name: str, field: Mapping[str, Any], value: Any, indent: str) -> list[str]:
    """Lines of YAML: what a setting is, what it may be, and what it is."""
    meaning = f"{' '.join(field.get('description', '').split())} [{_kind(field).replace('`', '')}]"
    told = textwrap.wrap(meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    # In a list, since YAML marks the end of a document that is a lone word.
    flow: Any = {"default_flow_style": True, "allow_unicode": True, "width": 1 << 20, "sort_keys": False}
    shown = yaml.safe_dump([value], **flow).strip()[1:-1]
    return [*told, f"{indent}{name}: {shown}"]


def _row(name: str, field: Mapping[str, Any], required: bool = False) -> str:
    default = "required" if required else f"`{json.dumps(field.get('default'))}`"
    meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
    return f"| `{name}` | {_kind(field)} | {default} | {owner(name)} | {meaning} |\n"


def owner(name: str) -> str:
    """What a setting belongs to: the word of its table column, by its dotted name."""
    section, _, leaf = name.rpartition(".")
    if section in Deploy.model_fields:
        return "deploy"
    if name in LOCATION:
        return "rows"
    if section == "train" and leaf in SPEED:
        return "speed"
    return {"distill": "student", "quantize": "int8", "gate": "gate"}.get(section, "run")


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type in words, with its bounds."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_kind(one) for one in schema[union])
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1]).lower()
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if schema["items"] else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"mapping of {_kind(schema['additionalProperties'])}"
    name = {"object": "mapping", "null": "`null`"}.get(kind, kind)
    bounds = [
        words.format(format(schema[key], "," if isinstance(schema[key], int) else "g"))
        for key, words in BOUNDS
        if key in schema
    ]
    return f"{name} ({', '.join(bounds)})" if bounds else name


if __name__ == "__main__":
    sys.stdout.write(text())
