"""JSON files that people hand in, in folders of models say: read, or refused by name."""

import json
from pathlib import Path
from typing import Any

from rtrain.core.errors import UserError

ARTIFACT_JSON = "artifact.json"
"""Name of the file that describes an artifact."""


def value(path: Path) -> Any:
    """What a JSON file holds. Raises `UserError` where it is cut off, or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}); copy it whole, or make it again", code="unreadable"
        ) from None


def read(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `UserError` where it holds none."""
    found = value(path)
    if not isinstance(found, dict):
        raise UserError(
            f"{path} holds a {type(found).__name__} in place of an object; copy it whole, or make it again",
            code="wrong_type",
        )
    return found
