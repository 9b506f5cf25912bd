"""The lines of a section's report, each of which is on disk before the next is measured; and the table of all lines."""

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import summary

Value = float | int | bool | str | None


class Report:
    """The lines of one section. Each stands by itself, with the circumstances under which it was measured."""

    def __init__(self, path: Path, section: str):
        self._path, self._section = path, section

    def line(
        self,
        key: str,
        value: Value = None,
        unit: str = "",
        *,
        values: Sequence[float] | None = None,
        most: float | None = None,
        floor: float | None = None,
        goal: float | None = None,
        **about: Any,
    ) -> None:
        """Add a line. `values` are those of the rounds; the line's value is then their median.

        A line is a check if its value is True or False, or has a bound: a value must not exceed `most`, the worst round
        must meet `floor`, and the median must meet `goal`.
        """
        found: dict[str, Any] = {"key": f"{self._section}.{key}", "value": value, "unit": unit}
        worst = value
        if values:
            spread = summary(values)
            found |= {"value": spread.pop("median"), **spread}
            worst = found["min"]
        for name, bound in (("most", most), ("floor", floor), ("goal", goal)):
            if bound is not None:
                found[name] = bound
        met = {
            "most": most is None or (_number(found["value"]) and found["value"] <= most),
            "floor": floor is None or (_number(worst) and worst >= floor),  # type: ignore[operator]
        }
        if isinstance(found["value"], bool):
            found["met"] = found["value"]
        elif most is not None or floor is not None:
            found["met"] = all(met.values())
        self._add({**found, **({"about": about} if about else {})})

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[None]:
        """Make an error inside the `with` block a line of the report, and let the section go on."""
        try:
            yield
        except Exception as error:
            shown = f"{type(error).__name__}: {error}".strip()
            self._add(
                {"key": f"{self._section}.{key}", "error": shown[:2000], "traceback": traceback.format_exc()[-4000:]}
            )
            _free()

    def _add(self, found: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, default=str) + "\n")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _free() -> None:
    """Free the memory that a failed line left on the GPU."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are complete; none where it is not there."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def table(document: Mapping[str, Any]) -> str:
    """Every line of every section, and how each section ended, as Markdown that a terminal shows well."""
    shown = ["| line | value | spread | wanted | met |", "|---|---|---|---|---|"]
    for name, section in document["sections"].items():
        for one in section["lines"]:
            if "error" in one:
                shown.append(f"| {one['key']} | {one['error'].splitlines()[0][:120]} | | | failed |")
                continue
            spread = f"{one['min']:.4g} .. {one['max']:.4g}" if "min" in one else ""
            bounds = (("most", "<= {:.3g}"), ("floor", ">= {:.3g}"), ("goal", "goal {:.3g}"))
            wanted = ", ".join(text.format(one[bound]) for bound, text in bounds if bound in one)
            met = {True: "yes", False: "NO", None: ""}[one.get("met")]
            shown.append(f"| {one['key']} | {_shown(one['value'])} {one['unit']} | {spread} | {wanted} | {met} |")
        shown.append(f"| **{name}** | {section['status']} | {section['seconds']:.0f} s | | |")
    return "\n".join(shown)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
