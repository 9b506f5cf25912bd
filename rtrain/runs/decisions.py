"""What a run decided once for all of its ranks and starts, since it was measured or depends on the machine.

Rank 0 alone reads and keeps decisions, and tells the other ranks (`ranks.decided`): a mounted folder may hide from them
what was just written.
"""

import json
from pathlib import Path
from typing import Any

NAME = "decisions.json"


def read(run: Path) -> dict[str, Any]:
    """The run's decisions by name, so far."""
    path = run / NAME
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def keep(run: Path, name: str, value: Any) -> Any:
    """The run's decision of that name: what was decided before, else `value`, which is then kept."""
    known = read(run)
    if name in known:
        return known[name]
    draft = (run / NAME).with_suffix(".draft")
    draft.write_text(json.dumps({**known, name: value}))
    draft.rename(run / NAME)  # at once: whoever reads it sees a whole file
    return value
