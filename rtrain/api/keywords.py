"""Keyword arguments -> settings by dotted name, and the ranges of a search space."""

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.core.errors import ConfigError, Problem

SETTINGS_BY_OPTION = {
    "data": "data.path",
    "valid": "data.valid",
    "test": "data.test",
    "model": "model.name",
    "workers": "train.workers",
    "address": "cluster.address",
    "host": "serve.host",
    "port": "serve.port",
    "keys": "serve.keys",
    "insecure": "serve.insecure",
    "ungated": "serve.ungated",
    "shadow": "serve.shadow_fraction",
}
"""Setting by the name of its short option on the command line, which is a keyword too."""
ROW_SETTINGS = ("data.path", "data.valid", "data.test")
"""Settings that accept rows in memory."""
_TRAINING_SECTIONS = ("data", "train", "optim", "model")
SECTIONS_BY_VERB: Mapping[str, Sequence[Sequence[str]]] = {
    "train": (_TRAINING_SECTIONS,),
    "tune": (("tune",), _TRAINING_SECTIONS),
    "distill": (("distill",), _TRAINING_SECTIONS),
    "quantize": (("quantize",), ("gate",)),
    "evaluate": (("data",),),
    "gate": (("gate",), ("data",)),
    "serve": (("serve",),),
}
"""Sections that decide between settings of the same last name, by verb: the first group with one of them."""


def option_error(field: str, value: Any, reason: str, fix: str, code: str) -> ConfigError:
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def resolve_settings(
    verb: str, settings: Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the settings of a call by dotted name, and the problems of its keywords.

    A keyword is a short option of the command line, or the last part of a setting's name. `settings` has dotted names,
    and wins over keywords, as `--set` wins over options. A keyword that is None counts as left out.
    """
    overrides: dict[str, Any] = {}
    problems: list[Problem] = []
    for keyword, value in keywords.items():
        if value is None:
            continue
        names = find_settings(verb, keyword)
        if len(names) == 1:
            overrides[names[0]] = value
        elif names:
            fix = f"write settings={{...}} with {' or '.join(map(repr, names))}"
            problems.append(Problem(keyword, None, "several settings have this name", fix, code="ambiguous_setting"))
        else:
            problems.append(make_unknown_problem(keyword))
    overrides |= settings or {}
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in overrides.items()}
    return plain, problems


def find_settings(verb: str, keyword: str) -> list[str]:
    """Return the settings that a keyword may stand for: one, none, or several if the verb's sections do not decide."""
    from rtrain import config as configuration  # commands that load a model do not need it

    if keyword in SETTINGS_BY_OPTION:
        return [SETTINGS_BY_OPTION[keyword]]
    names = [name for name in configuration.iter_setting_names() if name.rpartition(".")[2] == keyword]
    if len(names) < 2 or keyword in names:
        return [keyword] if keyword in names else names
    for sections in SECTIONS_BY_VERB[verb]:
        if matches := [name for name in names if name.partition(".")[0] in sections]:
            return matches
    return names


def make_unknown_problem(keyword: str) -> Problem:
    from rtrain import config as configuration

    leaves = sorted({name.rpartition(".")[2] for name in configuration.iter_setting_names()} | {*SETTINGS_BY_OPTION})
    if matches := difflib.get_close_matches(keyword, leaves, n=2, cutoff=0.7):
        return Problem(keyword, None, "unknown", f"did you mean {' or '.join(matches)}?", code="unknown_setting")
    problem = configuration.set_setting({}, keyword, None)  # knows renamed settings, and names of other programs
    assert problem is not None
    return problem


def refuse_problems(problems: Sequence[Problem]) -> None:
    """Raise `ConfigError` with the problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def loguniform(low: float, high: float) -> dict[str, Any]:
    """Return a range of a search space, sampled uniformly in the logarithm."""
    return {"low": low, "high": high, "log": True}


def uniform(low: float, high: float) -> dict[str, Any]:
    """Return a range of a search space, sampled uniformly."""
    return {"low": low, "high": high, "log": False}
