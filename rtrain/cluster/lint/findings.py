"""What a check of a cluster's file has found, as text and as SARIF 2.1.0."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rtrain import __version__
from rtrain.cluster.lint.document import Document, Place

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in a file."""

    rule: str
    level: Level
    line: int
    what: str
    mend: str

    def text(self, file: str) -> str:
        return f"{file}:{self.line}: {self.level}: {self.what}; {self.mend} [{self.rule}]"


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong in a file, and how to find it."""

    name: str
    level: Level
    why: str
    """A sentence: what goes wrong otherwise."""
    look: "Look"

    def findings(self, document: Document) -> Iterator[Finding]:
        for line, what, mend in self.look(document):
            yield Finding(self.name, self.level, line, what, mend)


Found = Iterator[tuple[int, str, str]]
"""Line, what is wrong, and what to write instead."""
Look = Callable[[Document], Found]


def shown(place: Place) -> str:
    """A place as people write it: `provider.region`, `setup_commands[2]`."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


def sarif(findings: Sequence[Finding], rules: Sequence[Rule], file: str) -> dict[str, Any]:
    """The findings in the Static Analysis Results Interchange Format, version 2.1.0 (OASIS)."""
    names = [rule.name for rule in rules]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "rtrain cluster lint",
                        "version": __version__,
                        "rules": [
                            {
                                "id": rule.name,
                                "shortDescription": {"text": rule.why},
                                "defaultConfiguration": {"level": rule.level},
                            }
                            for rule in rules
                        ],
                    }
                },
                "results": [
                    {
                        "ruleId": finding.rule,
                        "ruleIndex": names.index(finding.rule),
                        "level": finding.level,
                        "message": {"text": f"{finding.what}; {finding.mend}"},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": file},
                                    "region": {"startLine": finding.line},
                                }
                            }
                        ],
                    }
                    for finding in findings
                ],
            }
        ],
    }
