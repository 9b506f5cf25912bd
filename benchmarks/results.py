"""Results of the parts of a benchmark, saved after each part; any part can be measured alone."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PartResult = dict[str, Any]
Keep = Callable[[PartResult], None]
"""Saves the partial result of a part, in case it is interrupted."""


class Results:
    """Parts of one benchmark by name, in the JSON file `out`. A repeated part replaces its earlier result."""

    def __init__(self, out: Path, **metadata: Any):
        """`given`: the options that a reader of the figures has to know."""
        self._out, self._metadata = out.absolute(), metadata
        self.folder = self._out.parent / f"{self._out.stem}-work"
        """Folder for files that parts leave and reuse."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts: dict[str, PartResult] = json.loads(self._out.read_text("utf-8")) if self._out.is_file() else {}

    def measure(self, name: str, part: Callable[[Keep], PartResult]) -> PartResult:
        """Measure a part, and save its result and the machine."""
        about = {**machine(), **self._metadata}

        def write(result: PartResult) -> None:
            self.parts[name] = {**result, "about": about}
            self._out.write_text(json.dumps(self.parts, indent=1, default=str) + "\n", encoding="utf-8")

        write(part(lambda partial_result: write({**partial_result, "unfinished": True})))
        return self.parts[name]

    def __str__(self) -> str:
        """All parts as one JSON object, on one line."""
        return json.dumps(self.parts, default=str)


def machine() -> PartResult:
    """The machine of a measurement, and its load."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    measured = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    cores = len(os.sched_getaffinity(0))
    return {"measured": measured, "processor": name, "cores": cores, "load_before": os.getloadavg()[0]}
