"""A YAML file, or a recipe's name, and dotted overrides -> a checked configuration; and back.

The command line's `--set a.b=value` and a search trial change settings through the same function, `with_overrides`, and
every problem is reported at once.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import BaseModel

from rtrain.config import validation
from rtrain.config.deploy import Deploy, deploy_contradictions
from rtrain.config.recipe import Recipe
from rtrain.core.errors import ConfigError, Problem, UserError, meant


@dataclasses.dataclass(frozen=True)
class Config:
    recipe: Recipe
    deploy: Deploy
    named: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Dotted names of the settings that the user wrote: overrides, and those in a file of the user's own. A resume
    takes all others from the run."""


ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optim.lr"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "optim.warmup"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "optim.clip_norm"),
    **dict.fromkeys(("max_length", "max_len", "max_seq_length", "max_seq_len"), "data.max_tokens"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "train.micro_batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"), "train.aggregation_frequency"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("text_column", "text_column_name"), "data.text"),
    **dict.fromkeys(("label_column", "label_column_name"), "data.label"),
    **dict.fromkeys(("model_name", "model_name_or_path"), "model.name"),
}
"""What other programs call a setting, by the last part of the name."""
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises: the second for a date that the calendar has not, the third for thousands of brackets."""
RECIPE_FIELDS = frozenset(Recipe.model_fields)
DEPLOY_FIELDS = frozenset(Deploy.model_fields)


# ---------------------------------------------------------------------------------------------- reading and writing


def recipe_names() -> list[str]:
    folder = resources.files("rtrain.recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The commented YAML of a recipe that comes with rtrain."""
    if name not in recipe_names():
        near = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.7)
        of_task = [each for each in recipe_names() if f"\ntask: {name}\n" in recipe_text(each)]
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(of_task or recipe_names())}"
        raise ConfigError(
            [
                Problem(
                    "recipe",
                    name,
                    "a task, of which there are recipes" if of_task else "unknown",
                    fix,
                    code="unknown_name",
                )
            ]
        )
    return (resources.files("rtrain.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def _shipped(name: str) -> str:
    """`recipe_text`; a folder, most likely of a run, is refused with what to write."""
    inner = Path(name) / "config.yaml"
    if name not in recipe_names() and inner.is_file():
        raise ConfigError(
            [Problem("recipe", name, "a run's folder", f"write {inner}, or --resume --out {name}", code="not_a_recipe")]
        )
    return recipe_text(name)


def load(name_or_file: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a recipe's name or of a YAML file, changed by dotted `overrides`, checked as a whole."""
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            fix = meant(path) or "write a recipe's name or an existing file"
            raise ConfigError([Problem("recipe", name_or_file, "no such file", fix, code="not_found")])
        text, own = _read(path), True
    else:
        text, own = _shipped(name_or_file), False
    try:
        document = yaml.load(text, _Loader)
    except UNREADABLE as error:
        raise UserError(f"{name_or_file} is not YAML: {error}", code="unreadable") from None
    if not isinstance(document, dict):
        raise UserError(
            f"{name_or_file} must hold a mapping of sections (name, task, data, model, ...)", code="wrong_type"
        )
    try:
        config = parse(document, overrides or {})
    except ConfigError as error:
        if own and any(problem.field not in (overrides or {}) for problem in error.problems):
            raise ConfigError(error.problems, f"The settings are those of {name_or_file}.") from None
        raise
    return dataclasses.replace(config, named=config.named | (dotted(document).keys() if own else {"name", "task"}))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        fix = "convert it, e.g. iconv -f latin1 -t utf-8, or from utf-16"
        raise ConfigError([Problem("recipe", str(path), "the file is not UTF-8", fix, code="not_utf8")]) from None


class _Loader(yaml.SafeLoader):
    """YAML forbids a key that stands twice in one mapping; PyYAML would drop the first in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    reason = f"written twice, in the lines {lines[key.value]} and {line}"
                    raise ConfigError(
                        [
                            Problem(
                                key.value, None, reason, "write it once, with all that belongs to it", code="duplicate"
                            )
                        ]
                    )
                lines[key.value] = line
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def parse(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Build and check a configuration; `overrides` count as named. One `ConfigError` holds everything that is wrong."""
    merged: dict[str, Any] = json.loads(json.dumps(document, default=str))
    problems = [problem for key, value in overrides.items() if (problem := put(merged, key, value)) is not None]
    known = RECIPE_FIELDS | DEPLOY_FIELDS
    problems += [_unknown(name, None, known) for name in merged if name not in known]
    parts: list[Any] = []
    for model, names in ((Recipe, RECIPE_FIELDS), (Deploy, DEPLOY_FIELDS)):
        try:
            parts.append(model.model_validate({name: value for name, value in merged.items() if name in names}))
        except pydantic.ValidationError as error:
            problems += [_problem(details) for details in error.errors()]
    if len(parts) == 2:
        problems += [*validation.of_recipe(parts[0]), *deploy_contradictions(parts[1])]
    if problems:
        raise ConfigError(problems)
    recipe, deploy = parts
    return Config(recipe, deploy, frozenset(overrides))


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """`config` with dotted names set, e.g. `{"optim.lr": 3e-5}`; checked like a file."""
    changed = parse(to_document(config), overrides)
    return dataclasses.replace(changed, named=config.named | changed.named)


def to_document(config: Config) -> dict[str, Any]:
    return {**config.recipe.model_dump(mode="json"), **config.deploy.model_dump(mode="json")}


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return dotted(to_document(config))


def dotted(document: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a document of sections, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= (
            {f"{name}.{leaf}": inner for leaf, inner in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_document(config), sort_keys=False, allow_unicode=True)


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=value` as (name, value); the value is YAML, so numbers, lists and null are what they look like.

    A setting that is a text, such as a column's name, is the text as it is written, unless that is null or in quotes:
    YAML would make something else of a number, a date, yes and no, `a: b`, and a text with a #, a comment to it. So are
    the texts of a list, such as columns' names.
    """
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not name:
        raise ConfigError(
            [Problem("--set", text, "not an assignment", "write --set section.name=value", code="not_an_assignment")]
        )
    annotation = _annotation(name)
    kinds = _kinds(annotation)
    try:
        found = yaml.safe_load(value)
    except UNREADABLE:
        if str in kinds:
            return name, value
        raise ConfigError(
            [Problem("--set", text, "the value is not YAML", "put it into quotes", code="unreadable")]
        ) from None
    if isinstance(found, list) and _lists_texts(annotation):
        return name, yaml.load(value, yaml.BaseLoader)
    if str not in kinds or found is None:
        return name, found
    return name, found if isinstance(found, str) and value[0] in "'\"" else value


def assignment(name: str, value: str | list[str]) -> str:
    """What `parse_assignment` reads as this value of a setting."""
    plain = f"{name}={value}"
    return plain if parse_assignment(plain) == (name, value) else f"{name}={json.dumps(value, ensure_ascii=False)}"


def _annotation(name: str) -> Any:
    """The type of the setting with a dotted name; None for an unknown one."""
    section, _, leaf = name.rpartition(".")
    for model in (Recipe, Deploy):
        holder = model.model_fields[section].annotation if section in model.model_fields else model
        fields = getattr(holder, "model_fields", {})
        if (not section or holder is not model) and leaf in fields:
            return fields[leaf].annotation
    return None


def _kinds(annotation: Any) -> set[Any]:
    """The types that a setting takes, without what they hold."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kinds(inner[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, inner))
    return {origin or annotation}


def _lists_texts(annotation: Any) -> bool:
    """Whether a setting takes a list of texts."""
    return annotation == tuple[str, ...] or any(map(_lists_texts, typing.get_args(annotation)))


# ----------------------------------------------------------------------------------------------------------- checks


def put(document: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Set a dotted name in `document`; a name that no model has is a problem with its nearest neighbours."""
    known = set(dotted_names())
    if key not in known:
        return _unknown(key, None, known)
    *sections, name = key.split(".")
    for section in sections:
        inner = document.get(section)
        document[section] = document = dict(inner) if isinstance(inner, dict) else {}
    document[name] = value
    return None


def dotted_names() -> Iterator[str]:
    """Every name that `--set` accepts."""
    for model in (Recipe, Deploy):
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from (f"{name}.{leaf}" for leaf in inner.model_fields)
            else:
                yield name


def _unknown(field: str, value: Any, known: Any) -> Problem:
    last = field.rsplit(".", 1)[-1]
    near = (
        [ELSEWHERE[last]]
        if ELSEWHERE.get(last) in known
        else difflib.get_close_matches(str(value or field), list(known), n=1, cutoff=0.5)
    )
    near += [name for name in sorted(known) if name.endswith(f".{last}") and name not in near]  # in another section
    fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
    return Problem(field, value, "unknown", fix, code="unknown_setting" if value is None else "unknown_name")


def _problem(details: Any) -> Problem:
    field = ".".join(str(part) for part in details["loc"])
    reason = details["msg"][0].lower() + details["msg"][1:]
    if details["type"] == "extra_forbidden":
        return _unknown(field, None, set(dotted_names()))
    if details["type"] == "unknown_name":
        return _unknown(field, details["input"], details["ctx"]["known"])
    if details["type"] == "missing":
        return Problem(field, None, "missing", "add it", code="missing")
    if details["type"] == "tuple_type" and isinstance(details["input"], str):
        return Problem(field, details["input"], "no list", f"write {field}=[{details['input']}]", code="wrong_type")
    kinds = {"literal_error": "unknown_name", "string_pattern_mismatch": "wrong_form"}
    is_bound = details["type"].startswith(("greater_than", "less_than"))
    code = "out_of_range" if is_bound else kinds.get(details["type"], "wrong_type")
    return Problem(field, details["input"], reason, "correct the value", code=code)
