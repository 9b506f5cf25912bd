"""What was set otherwise: settings by their dotted names, versions, digests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import hide
from rtrain.evaluation.candidates import Side

NONE = "-"


@dataclass(frozen=True)
class Setting:
    """Something that is not the same for all sides."""

    name: str
    values: tuple[str, ...]
    """One for each side; `-` where it has none."""


@dataclass(frozen=True)
class Settings:
    weights: tuple[Setting, ...]
    """Settings that change what is learned."""
    others: tuple[Setting, ...]
    """Those of speed, cluster, serving: they change no weight."""
    versions: tuple[Setting, ...]
    digests: tuple[Setting, ...]


def of(sides: Sequence[Side]) -> Settings:
    every = _differing(sides, lambda side: configuration.flat(side.config) | _resolved(side.config))
    learned = {name for side in sides for name in configuration.dotted(side.config.recipe.weights())}
    return Settings(
        tuple(one for one in every if one.name in learned),
        tuple(one for one in every if one.name not in learned),
        _differing(sides, lambda side: _created(side).get("versions") or {}),
        _differing(sides, _digests),
    )


def _resolved(config: Config) -> dict[str, Any]:
    """A run's rows per update are what its workers, passes and frequency came to."""
    return {"train.rows_per_update": config.recipe.rows_per_update}


def _created(side: Side) -> dict[str, Any]:
    return side.run.first("created") or {}


def _digests(side: Side) -> dict[str, Any]:
    created = _created(side)
    found = {
        "rows": created.get("data_digest"),
        "order of training": side.summary["order_digest"],
        "artefact": None if side.made is None else side.made.version,
    }
    for role, files in (created.get("origin") or {}).items():
        # By content alone: the same file may lie elsewhere.
        found[f"files, {role}"] = ", ".join(sorted(sha256[:12] for sha256 in files.values()))
    return found


def _differing(sides: Sequence[Side], read: Callable[[Side], dict[str, Any]]) -> tuple[Setting, ...]:
    known = [read(side) for side in sides]
    names = dict.fromkeys(name for one in known for name in one)
    rows = [(name, [one.get(name) for one in known]) for name in names]
    return tuple(
        Setting(name, tuple(_text(value) for value in values))
        for name, values in rows
        if any(value != values[0] for value in values)
    )


def _text(value: Any) -> str:
    """Without what is secret in an address."""
    return NONE if value is None else hide(str(value))
