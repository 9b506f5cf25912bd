"""Reading JSON files of users, for example in model folders; errors name the file."""

import json
from pathlib import Path
from typing import Any

from rtrain.core.errors import UserError

ARTIFACT_JSON = "artifact.json"
"""Name of the file that describes an artifact."""


def load_json(path: Path) -> Any:
    """Load a JSON file. Raises `UserError` if it is truncated or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}); copy it whole, or make it again", code="unreadable"
        ) from None


def load_json_object(path: Path) -> dict[str, Any]:
    """Load the object in a JSON file. Raises `UserError` if it holds another type."""
    document = load_json(path)
    if not isinstance(document, dict):
        raise UserError(
            f"{path} holds a {type(document).__name__} in place of an object; copy it whole, or make it again",
            code="wrong_type",
        )
    return document
