"""Render every setting with its description from the models: as `docs/settings.md`, and as a recipe in full.

    python -m rtrain.config.reference > docs/settings.md

A test compares the file with `render_settings_page()`.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from rtrain.config.deploy import DeployConfig
from rtrain.config.loading import load_config, read_recipe_text, to_document
from rtrain.config.recipe import LOCATION_SETTINGS, SPEED_SETTINGS, Recipe

WIDTH = 100
"""Characters of a line of a full recipe."""
COMMAND = "python -m rtrain.config.reference > docs/settings.md"
PAGE_HEADER = f"""# Settings

This page is generated from the configuration models: `{COMMAND}`.

Change a setting with `--set section.name=value`, or in a YAML file: `rtrain recipes show intent` prints one to start
from, and with `--all` every setting of this page with its comment. The table has the defaults of the models; a recipe
has its own values for some.

The column *of* is the setting's group:

| of | meaning | `--resume` with another value |
|---|---|---|
| run | It changes the weights, so it is part of the recipe digest. | is refused by name |
| rows | It is the location of the same rows; and `name`, the recipe. | is allowed, except for `name` |
| student | It changes the weights of a distilled student, and of no other run. | is refused for a student |
| int8 | It changes the int8 artifact only. | is allowed |
| decision | It sets how a finished model decides, and changes no weights. | is allowed |
| gate | It is a limit of the release gate, and changes no artifact. | is allowed |
| speed | It changes speed, memory or the files kept, never the weights (see below). | is allowed |
| deploy | It sets where a run runs and how it is searched, served or reported. | is allowed |

`train.workers`, `train.micro_batch_size` and `train.aggregation_frequency` set `train.global_batch_size` where it is
null. A run keeps its first value, so they change speed only from then on. Under dropout, they also change the
activations that are dropped.
"""
BOUNDS = (
    ("minimum", "{} or more"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "{} or less"),
    ("exclusiveMaximum", "less than {}"),
)


class _UnsortedJsonSchema(GenerateJsonSchema):
    """Keep the order of the models: low before high."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value


def render_settings_page() -> str:
    """Return the page as Markdown."""
    parts = [PAGE_HEADER]
    for title, rows in _iter_sections():
        parts.append(f"\n## {title}\n\n| setting | type | default | of | description |\n|---|---|---|---|---|\n")
        parts += rows
    return "".join(parts)


def _iter_sections() -> Iterator[tuple[str, list[str]]]:
    """Yield each heading with its table rows: first the settings without a section, then section by section."""
    for model in (Recipe, DeployConfig):
        schema = model.model_json_schema(schema_generator=_UnsortedJsonSchema)
        top_level_rows = [
            _format_row(name, field, name in schema["required"])
            for name, field in schema["properties"].items()
            if "$ref" not in field
        ]
        if top_level_rows:
            yield "name and task", top_level_rows
        for name, field in schema["properties"].items():
            if "$ref" in field:
                section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
                rows = [_format_row(f"{name}.{leaf}", inner) for leaf, inner in section["properties"].items()]
                yield name, rows


def render_full_recipe(name: str) -> str:
    """Return a recipe of rtrain as YAML with every setting and its description. It loads as the same recipe."""
    comments = [line for line in read_recipe_text(name).splitlines() if line.startswith("#")]
    header = ["# Every setting of this recipe, including defaults.", "#", *comments]
    values = to_document(load_config(name))
    lines: list[str] = []
    for model in (Recipe, DeployConfig):
        schema = model.model_json_schema(schema_generator=_UnsortedJsonSchema)
        for key, field in schema["properties"].items():
            if "$ref" not in field:
                lines += ["", *_format_setting(key, field, values[key], "")]
                continue
            lines += ["", f"{key}:"]
            for leaf, inner in schema["$defs"][field["$ref"].rsplit("/", 1)[1]]["properties"].items():
                lines += _format_setting(leaf, inner, values[key][leaf], "  ")
    return "\n".join([*header, *lines]) + "\n"


def _format_setting(name: str, field: Mapping[str, Any], value: Any, indent: str) -> list[str]:
    """Return the lines of YAML of a setting: its description and type as a comment, and its value."""
    meaning = f"{' '.join(field.get('description', '').split())} [{_format_type(field).replace('`', '')}]"
    comment_lines = textwrap.wrap(meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    # In a list: YAML ends a document of a single word with a marker.
    dump_options: Any = {"default_flow_style": True, "allow_unicode": True, "width": 1 << 20, "sort_keys": False}
    value_text = yaml.safe_dump([value], **dump_options).strip()[1:-1]
    if isinstance(value, str) and "\n" in value:  # YAML would write several lines
        value_text = json.dumps(value, ensure_ascii=False)
    return [*comment_lines, f"{indent}{name}: {value_text}"]


def _format_row(name: str, field: Mapping[str, Any], required: bool = False) -> str:
    default = "required" if required else f"`{json.dumps(field.get('default'))}`"
    meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
    return f"| `{name}` | {_format_type(field)} | {default} | {find_owner(name)} | {meaning} |\n"


def find_owner(name: str) -> str:
    """Return the group of a setting, the word of its table column, by its dotted name."""
    section, _, leaf = name.rpartition(".")
    if section in DeployConfig.model_fields:
        return "deploy"
    if name in LOCATION_SETTINGS:
        return "rows"
    if section == "train" and leaf in SPEED_SETTINGS:
        return "speed"
    return {"distill": "student", "quantize": "int8", "metrics": "decision", "gate": "gate"}.get(section, "run")


def _format_type(schema: Mapping[str, Any]) -> str:
    """Format a JSON schema's type with its bounds."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_format_type(member) for member in schema[union])
    if "$ref" in schema:
        name = str(schema["$ref"].rsplit("/", 1)[1])
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    type_name = schema["type"]
    if type_name == "array":
        return f"list of {_format_type(schema['items'])}" if schema["items"] else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"mapping of {_format_type(schema['additionalProperties'])}"
    type_text = {"object": "mapping", "null": "`null`"}.get(type_name, type_name)
    bounds = [
        words.format(format(schema[key], "," if isinstance(schema[key], int) else "g"))
        for key, words in BOUNDS
        if key in schema
    ]
    return f"{type_text} ({', '.join(bounds)})" if bounds else type_text


if __name__ == "__main__":
    sys.stdout.write(render_settings_page())
