"""What the parts of a benchmark have come to, on the disk after each of them; any part can be measured alone."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Keep = Callable[[Found], None]
"""Takes what a part knows so far, so that nothing is lost where it is cut off."""


class Results:
    """The parts of one benchmark by their names, in the JSON file `out`. A part that is measured again replaces what it
    came to before; the others stay."""

    def __init__(self, out: Path, **given: Any):
        """`given`: the options that a reader of the figures has to know."""
        self._out, self._given = out.absolute(), given
        self.folder = self._out.parent / f"{self._out.stem}-work"
        """For what the parts leave and use again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, Found] = json.loads(self._out.read_text("utf-8")) if self._out.is_file() else {}

    def measure(self, name: str, part: Callable[[Keep], Found]) -> Found:
        """Measure a part, and keep what it has come to and on which machine that was."""
        about = {**machine(), **self._given}

        def write(found: Found) -> None:
            self.parts[name] = {**found, "about": about}
            self._out.write_text(json.dumps(self.parts, indent=1, default=str) + "\n", encoding="utf-8")

        write(part(lambda known: write({**known, "unfinished": True})))
        return self.parts[name]

    def __str__(self) -> str:
        """All parts as one JSON object, on one line."""
        return json.dumps(self.parts, default=str)


def machine() -> Found:
    """The machine of a measurement, and its load."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    measured = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    cores = len(os.sched_getaffinity(0))
    return {"measured": measured, "processor": name, "cores": cores, "load_before": os.getloadavg()[0]}
