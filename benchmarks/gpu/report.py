"""Lines of a section's report, each written to disk before the next measurement; and the table of all lines."""

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
        maximum: float | None = None,
        floor: float | None = None,
        goal: float | None = None,
        **about: Any,
    ) -> None:
        """Add a line. `values` are those of the rounds; the line's value is then their median.

        A line is a check if its value is True or False, or has a bound: a value must not exceed `most`, the worst round
        must meet `floor`, and the median must meet `goal`.
        """
        line: dict[str, Any] = {"key": f"{self._section}.{key}", "value": value, "unit": unit}
        worst = value
        if values:
            spread = summary(values)
            line |= {"value": spread.pop("median"), **spread}
            worst = line["min"]
        for name, bound in (("most", maximum), ("floor", floor), ("goal", goal)):
            if bound is not None:
                line[name] = bound
        met = {
            "most": maximum is None or (_number(line["value"]) and line["value"] <= maximum),
            "floor": floor is None or (_number(worst) and worst >= floor),  # type: ignore[operator]
        }
        if isinstance(line["value"], bool):
            line["met"] = line["value"]
        elif maximum is not None or floor is not None:
            line["met"] = all(met.values())
        self._add({**line, **({"about": about} if about else {})})

    @contextlib.contextmanager
    def attempt(self, key: str) -> Iterator[None]:
        """Turn an error inside the `with` block into a line of the report; the section continues."""
        try:
            yield
        except Exception as error:
            shown = f"{type(error).__name__}: {error}".strip()
            self._add(
                {"key": f"{self._section}.{key}", "error": shown[:2000], "traceback": traceback.format_exc()[-4000:]}
            )
            _free()

    def _add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


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
        for line in section["lines"]:
            if "error" in line:
                shown.append(f"| {line['key']} | {line['error'].splitlines()[0][:120]} | | | failed |")
                continue
            spread = f"{line['min']:.4g} .. {line['max']:.4g}" if "min" in line else ""
            bounds = (("most", "<= {:.3g}"), ("floor", ">= {:.3g}"), ("goal", "goal {:.3g}"))
            bounds_text = ", ".join(text.format(line[bound]) for bound, text in bounds if bound in line)
            met = {True: "yes", False: "NO", None: ""}[line.get("met")]
            shown.append(
                f"| {line['key']} | {_shown(line['value'])} {line['unit']} | {spread} | {bounds_text} | {met} |"
            )
        shown.append(f"| **{name}** | {section['status']} | {section['seconds']:.0f} s | | |")
    return "\n".join(shown)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
