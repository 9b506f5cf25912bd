"""Differences between runs: settings by their dotted names, versions, digests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import redact
from rtrain.evaluation.candidates import Candidate

NO_VALUE = "-"


@dataclass(frozen=True)
class SettingDifference:
    """A value that differs between candidates."""

    name: str
    values: tuple[str, ...]
    """One per candidate; `-` if missing."""


@dataclass(frozen=True)
class SettingDifferences:
    weight_settings: tuple[SettingDifference, ...]
    """Settings that change the weights."""
    other_settings: tuple[SettingDifference, ...]
    """Settings of speed, cluster and serving."""
    versions: tuple[SettingDifference, ...]
    digests: tuple[SettingDifference, ...]


def collect_settings(candidates: Sequence[Candidate]) -> SettingDifferences:
    differences = _find_differences(
        candidates,
        lambda candidate: configuration.flatten_config(candidate.config) | _resolved_settings(candidate.config),
    )
    weight_names = {
        name
        for candidate in candidates
        for name in configuration.flatten_document(candidate.config.recipe.weight_settings())
    }
    return SettingDifferences(
        tuple(difference for difference in differences if difference.name in weight_names),
        tuple(difference for difference in differences if difference.name not in weight_names),
        _find_differences(candidates, lambda candidate: _created_event(candidate).get("versions") or {}),
        _find_differences(candidates, _collect_digests),
    )


def _resolved_settings(config: Config) -> dict[str, Any]:
    """The global batch size follows from workers, micro-batch size and aggregation frequency."""
    return {"train.global_batch_size": config.recipe.global_batch_size}


def _created_event(candidate: Candidate) -> dict[str, Any]:
    return candidate.run.first_event("created") or {}


def _collect_digests(candidate: Candidate) -> dict[str, Any]:
    created = _created_event(candidate)
    digests = {
        "rows": created.get("data_digest"),
        "row order": candidate.summary["order_digest"],
        "artifact": None if candidate.metadata is None else candidate.metadata.version,
    }
    for role, files in (created.get("origin") or {}).items():
        # By content: the same file may have another path.
        digests[f"files, {role}"] = ", ".join(sorted(sha256[:12] for sha256 in files.values()))
    return digests


def _find_differences(
    candidates: Sequence[Candidate], read_settings: Callable[[Candidate], dict[str, Any]]
) -> tuple[SettingDifference, ...]:
    values_by_candidate = [read_settings(candidate) for candidate in candidates]
    names = dict.fromkeys(name for settings in values_by_candidate for name in settings)
    rows = [(name, [settings.get(name) for settings in values_by_candidate]) for name in names]
    return tuple(
        SettingDifference(name, tuple(_format_value(value) for value in values))
        for name, values in rows
        if any(value != values[0] for value in values)
    )


def _format_value(value: Any) -> str:
    """Format a value; secrets in addresses are redacted."""
    return NO_VALUE if value is None else redact(str(value))
