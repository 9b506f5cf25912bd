"""Load a configuration from a YAML file or a recipe's name and dotted overrides, check it, and write it.

`--set a.b=value` and search trials change settings through the same function, `with_overrides`. All problems are
reported together.
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

from rtrain.config.deploy import TRACKERS, DeployConfig, find_deploy_problems
from rtrain.config.recipe import LOSSES, TASKS, Recipe, find_recipe_problems
from rtrain.config.renamed import RENAMED
from rtrain.core import plugins
from rtrain.core.errors import ConfigError, Problem, UserError, suggest_path


@dataclasses.dataclass(frozen=True)
class Config:
    recipe: Recipe
    deploy: DeployConfig
    explicit_settings: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Dotted names of the settings in the overrides or in the user's own file. A resume takes all others from the
    run."""


COMMON_ALIASES = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optim.lr"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "optim.warmup"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "optim.max_grad_norm"),
    **dict.fromkeys(("max_length", "max_len", "max_seq_length", "max_seq_len"), "data.max_tokens"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"), "train.aggregation_frequency"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs"), "train.epochs"),
    **dict.fromkeys(("text_column", "text_column_name"), "data.text"),
    **dict.fromkeys(("label_column", "label_column_name"), "data.label"),
    **dict.fromkeys(("model_name", "model_name_or_path"), "model.name"),
}
"""Setting by its name in other programs (last part of the dotted name)."""
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML: `ValueError` for an invalid date, `RecursionError` for thousands of nested brackets."""
RUN_CONFIG = "config.yaml"
"""Name of the file in a run folder. Run folders come from other people too."""
RECIPE_FIELDS = frozenset(Recipe.model_fields)
DEPLOY_FIELDS = frozenset(DeployConfig.model_fields)
LIST_SETTINGS = ("augment.functions", "report.trackers")
BUILT_IN_NAMES: Mapping[plugins.Kind, tuple[str, ...]] = {
    **{"task": TASKS, "loss": LOSSES, "tracker": TRACKERS},
    "source": ("file", "http", "https", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"),
}


# ---------------------------------------------------------------------------------------------- reading and writing


def list_recipe_names() -> list[str]:
    folder = resources.files("rtrain.recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_recipe_text(name: str) -> str:
    """Return the commented YAML of a recipe of rtrain."""
    names = list_recipe_names()
    if name not in names:
        matches = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        recipes_for_task = [recipe for recipe in names if f"\ntask: {name}\n" in read_recipe_text(recipe)]
        fix = f"did you mean {matches[0]}?" if matches else f"known: {', '.join(recipes_for_task or names)}"
        raise _make_error("recipe", name, "this is a task" if recipes_for_task else "unknown", fix, "unknown_name")
    return (resources.files("rtrain.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def _make_error(field: str, value: Any, reason: str, fix: str, code: str) -> ConfigError:
    """The error of a single problem."""
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def load_config(name_or_file: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a recipe or a YAML file, apply dotted `overrides`, and check the result as a whole."""
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            fix = suggest_path(path) or "write a recipe's name or an existing file"
            raise _make_error("recipe", name_or_file, "no such file", fix, "not_found")
        text, is_user_file = _read_text(path), True
    else:
        if name_or_file not in list_recipe_names() and (path / "config.yaml").is_file():
            fix = f"write {path / 'config.yaml'}, or --resume --out {name_or_file}"
            raise _make_error("recipe", name_or_file, "this is a run folder", fix, "not_a_recipe")
        text, is_user_file = read_recipe_text(name_or_file), False
    try:
        document = yaml.load(text, _UniqueKeyLoader)
    except YAML_ERRORS as error:
        raise UserError(f"{name_or_file} is not YAML: {error}", code="unreadable") from None
    if not isinstance(document, dict):
        problem = f"{name_or_file} must hold a mapping of sections (name, task, data, model, ...)"
        raise UserError(problem, code="wrong_type")
    if path.name == RUN_CONFIG:
        _refuse_plugin_paths(document)
    try:
        config = parse_config(document, overrides or {})
    except ConfigError as error:
        if is_user_file and any(problem.field not in (overrides or {}) for problem in error.problems):
            raise ConfigError(error.problems, f"The settings are those of {name_or_file}.") from None
        raise
    explicit_settings = flatten_document(document).keys() if is_user_file else {"name", "task"}
    return dataclasses.replace(config, explicit_settings=config.explicit_settings | explicit_settings)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        fix = "convert it, e.g. iconv -f latin1 -t utf-8, or from utf-16"
        raise _make_error("recipe", str(path), "the file is not UTF-8", fix, "not_utf8") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML forbids duplicate keys in a mapping; PyYAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    reason = f"written twice, in lines {lines[key.value]} and {line}"
                    raise _make_error(key.value, None, reason, "write it once, with all its settings", "duplicate")
                lines[key.value] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def parse_config(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Build and check a configuration; `overrides` count as explicit. One `ConfigError` holds all problems."""
    merged: dict[str, Any] = json.loads(json.dumps(document, default=str))
    problems = [problem for key, value in overrides.items() if (problem := set_setting(merged, key, value)) is not None]
    try:
        _load_plugins(merged)
    except ConfigError as error:  # without them, their names would count as unknown
        raise ConfigError([*problems, *error.problems]) from None
    known_names = RECIPE_FIELDS | DEPLOY_FIELDS
    problems += [_make_unknown_problem(name, None, known_names) for name in merged if name not in known_names]
    validated_models: list[Any] = []
    for model, names in ((Recipe, RECIPE_FIELDS), (DeployConfig, DEPLOY_FIELDS)):
        try:
            section = {name: value for name, value in merged.items() if name in names}
            validated_models.append(model.model_validate(section))
        except pydantic.ValidationError as error:
            problems += [_make_problem(details) for details in error.errors()]
    if len(validated_models) == 2:
        problems += [*find_recipe_problems(validated_models[0]), *find_deploy_problems(validated_models[1])]
    if problems:
        raise ConfigError(problems)
    recipe, deploy = validated_models
    return Config(recipe, deploy, frozenset(overrides))


def _refuse_plugin_paths(document: Mapping[str, Any]) -> None:
    names = document.get(plugins.SETTING)
    for name in filter(plugins.is_path, map(str, names)) if isinstance(names, list) else ():
        reason = f"a {RUN_CONFIG}, as in a run folder, names modules only: no file is executed for it"
        fix = f"write {Path(name).stem}, and add --plugin {name} if you trust the file"
        raise _make_error(plugins.SETTING, name, reason, fix, "plugin_path")


def _load_plugins(document: dict[str, Any]) -> None:
    """Load the plug-ins of a document, and those of installed packages if it uses unknown names. In the document,
    module names replace files, and the plug-ins of the names that it uses are added. Raises `ConfigError`."""
    addresses, names = document.get(plugins.SETTING) or [], _list_plugin_names(document)
    if not isinstance(addresses, list | tuple):
        return
    modules = plugins.load_plugins([*map(str, addresses), *plugins.command_plugins])
    if any(plugins.find_value(kind, name) is None for kind, name in names):
        plugins.load_entry_points()
    owners = [owner for kind, name in names if (owner := plugins.find_owner(kind, name))]
    document[plugins.SETTING] = list(dict.fromkeys([*modules, *owners]))
    for kind, names_of_rtrain in BUILT_IN_NAMES.items():
        if clashes := set(names_of_rtrain) & set(plugins.list_names(kind)):
            reason = f"rtrain has the {kind} {min(clashes)} itself"
            owner = plugins.find_owner(kind, min(clashes))
            raise _make_error(plugins.SETTING, owner, reason, "choose another name", "already_registered")


def _list_plugin_names(document: Mapping[str, Any]) -> list[tuple[plugins.Kind, str]]:
    """(kind, name) of the names in a document that are not those of rtrain."""
    values = flatten_document(document)
    names: list[tuple[plugins.Kind, Any]] = [("task", values.get("task")), ("loss", values.get("train.loss"))]
    functions, trackers = (value if isinstance(value := values.get(name), list) else () for name in LIST_SETTINGS)
    names += [*(("augmentation", name) for name in functions), *(("tracker", name) for name in trackers)]
    addresses = (str(values.get(f"data.{leaf}")).partition("://") for leaf in ("path", "valid", "test"))
    names += [("source", scheme) for scheme, separator, _ in addresses if separator]
    return [(kind, name) for kind, name in names if isinstance(name, str) and name not in BUILT_IN_NAMES.get(kind, ())]


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return `config` with dotted names set, e.g. `{"optim.lr": 3e-5}`; checked like a file."""
    new_config = parse_config(to_document(config), overrides)
    return dataclasses.replace(new_config, explicit_settings=config.explicit_settings | new_config.explicit_settings)


def to_document(config: Config) -> dict[str, Any]:
    return {**config.recipe.model_dump(mode="json"), **config.deploy.model_dump(mode="json")}


def flatten_config(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted name."""
    return flatten_document(to_document(config))


def flatten_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a document of sections by dotted name."""
    values: dict[str, Any] = {}
    for name, value in document.items():
        is_section = isinstance(value, dict)
        values |= {f"{name}.{leaf}": inner for leaf, inner in value.items()} if is_section else {name: value}
    return values


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_document(config), sort_keys=False, allow_unicode=True)


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `a.b=value` to (name, value); the value is YAML.

    A text setting, such as a column's name, keeps the text literally, unless it is null or in quotes: YAML would change
    numbers, dates, yes and no, `a: b`, and a text with # (a comment). The same holds for lists of texts, such as
    columns' names.
    """
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not name:
        fix = "write --set section.name=value"
        raise _make_error("--set", text, "not an assignment", fix, "not_an_assignment")
    annotation = _find_annotation(name)
    value_types = _accepted_types(annotation)
    try:
        parsed_value = yaml.safe_load(value)
    except YAML_ERRORS:
        if str in value_types:
            return name, value
        raise _make_error("--set", text, "the value is not YAML", "put it into quotes", "unreadable") from None
    if isinstance(parsed_value, list) and _is_text_list(annotation):
        return name, yaml.load(value, yaml.BaseLoader)
    if str not in value_types or parsed_value is None:
        return name, parsed_value
    return name, parsed_value if isinstance(parsed_value, str) and value[0] in "'\"" else value


def format_assignment(name: str, value: str | list[str]) -> str:
    """Return the text that `parse_assignment` parses to this value of a setting."""
    text = f"{name}={value}"
    return text if parse_assignment(text) == (name, value) else f"{name}={json.dumps(value, ensure_ascii=False)}"


def _find_annotation(name: str) -> Any:
    """Return the type of the setting with a dotted name; None for an unknown setting."""
    section, _, leaf = name.rpartition(".")
    for model in (Recipe, DeployConfig):
        section_model = model.model_fields[section].annotation if section in model.model_fields else model
        fields = getattr(section_model, "model_fields", {})
        if (not section or section_model is not model) and leaf in fields:
            return fields[leaf].annotation
    return None


def _accepted_types(annotation: Any) -> set[Any]:
    """Return the types of a setting without their type arguments."""
    origin, type_args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _accepted_types(type_args[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_accepted_types, type_args))
    return {origin or annotation}


def _is_text_list(annotation: Any) -> bool:
    """Whether a setting is a list of texts."""
    return annotation == tuple[str, ...] or any(map(_is_text_list, typing.get_args(annotation)))


# ----------------------------------------------------------------------------------------------------------- checks


def set_setting(document: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Set a dotted name in `document`; an unknown name is a problem with the nearest names."""
    known_names = set(iter_setting_names())
    if key not in known_names:
        return _make_unknown_problem(key, None, known_names)
    *sections, name = key.split(".")
    for section in sections:
        section_values = document.get(section)
        document[section] = document = dict(section_values) if isinstance(section_values, dict) else {}
    document[name] = value
    return None


def iter_setting_names() -> Iterator[str]:
    """Yield every name that `--set` accepts."""
    for model in (Recipe, DeployConfig):
        for name, field in model.model_fields.items():
            field_type = field.annotation
            if isinstance(field_type, type) and issubclass(field_type, BaseModel):
                yield from (f"{name}.{leaf}" for leaf in field_type.model_fields)
            else:
                yield name


def _make_unknown_problem(field: str, value: Any, known_names: Any) -> Problem:
    if field in RENAMED:
        return Problem(field, value, f"renamed to {RENAMED[field]}", f"write {RENAMED[field]}", code="renamed_setting")
    leaf = field.rsplit(".", 1)[-1]
    suggestions = (
        [COMMON_ALIASES[leaf]]
        if COMMON_ALIASES.get(leaf) in known_names
        else difflib.get_close_matches(str(value or field), list(known_names), n=1, cutoff=0.5)
    )
    in_other_sections = (name for name in sorted(known_names) if name.endswith(f".{leaf}"))
    suggestions += [name for name in in_other_sections if name not in suggestions]
    fix = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"known: {', '.join(sorted(known_names))}"
    return Problem(field, value, "unknown", fix, code="unknown_setting" if value is None else "unknown_name")


def _make_problem(details: Any) -> Problem:
    field = ".".join(str(part) for part in details["loc"])
    reason = details["msg"][0].lower() + details["msg"][1:]
    if details["type"] == "extra_forbidden":
        return _make_unknown_problem(field, None, set(iter_setting_names()))
    if details["type"] == "unknown_name":
        return _make_unknown_problem(field, details["input"], details["ctx"]["known"])
    if details["type"] == "missing":
        return Problem(field, None, "missing", "add it", code="missing")
    if details["type"] == "tuple_type" and isinstance(details["input"], str):
        return Problem(field, details["input"], "not a list", f"write {field}=[{details['input']}]", code="wrong_type")
    codes = {"literal_error": "unknown_name", "string_pattern_mismatch": "wrong_form"}
    is_bound = details["type"].startswith(("greater_than", "less_than"))
    code = "out_of_range" if is_bound else codes.get(details["type"], "wrong_type")
    return Problem(field, details["input"], reason, "correct the value", code=code)
