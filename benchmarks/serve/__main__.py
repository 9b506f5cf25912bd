"""The endpoint beside others, and under load: `python -m benchmarks.serve [--json] [STUDENT PARENT]`.

STUDENT is an int8 artifact, PARENT the float artifact that it comes from; without them both are made of the embedded
messages first. Server and client are pinned to a core each.

beside    one connection and sixteen: rtrain serve, the same --standalone, stock Ray Serve, uvicorn, a Transformers
pipeline, the engine by itself tail      p99 over p50 at 70 % load, in an open loop shadow    p99 while a candidate
answers a fifth of the texts too, over p99 without overload  4 and 20 times the load: answers, rejections, memory kills
ten replicas killed at 70 % load soak      70 % load for minutes: memory and errors

`results` are written after each part; wrk has to be installed, and h2load for `overload`.
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Keep, PartResult, Results
from benchmarks.serve import models, parts
from benchmarks.serve.parts import Work

PARTS: dict[str, Callable[[Work], PartResult]] = {
    "beside": parts.compare_sides,
    "tail": parts.tail,
    "shadow": parts.shadow,
    "overload": parts.overload,
    "kills": parts.kills,
    "soak": parts.soak,
}
AIMS = {
    "overhead_ms_p50": (1.2, 0.6),
    "rps_vs_raw": (0.8, 1.3),
    "vs_hf_pipeline": (6.0, 12.0),
    "vs_stock_serve": (2.5, 4.0),
    "vs_uvicorn": (0.9, 1.3),
    "tail": (4.0, 2.5),
    "shadow_p99": (1.10, 1.05),
}
"""Floor and goal of a figure."""
TEXTS = (
    "Where is my parcel?",
    "I was charged twice for the same transfer, and nobody has answered me for three days.",
    "My card does not work abroad. What can I do?",
    "How do I change the address of my account?",
    "the app says my top-up is pending since monday",
)
"""In place of rows of a file."""
MAX_TEXTS = 500


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__, formatter_class=form)
    parser.add_argument("student", type=Path, nargs="?", help="an int8 artifact")
    parser.add_argument("parent", type=Path, nargs="?", help="the float artifact that it comes from")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--rows", type=Path, help="csv file whose column `text` is asked (default: five texts)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, interleaved")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of a loop")
    parser.add_argument("--minutes", type=float, default=15.0, help="minutes of the soak")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of rtrain serve")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/serve.json"), help="file of the results")
    options = parser.parse_args(arguments)
    if options.student and not options.parent:
        parser.error("name the float artifact that STUDENT comes from too, or neither: then both are made")
    for name in ("rounds", "seconds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: write 1 or more")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes}: write more than 0")
    return options


def read_texts(path: Path | None, max_texts: int = MAX_TEXTS) -> list[str]:
    """Our own, or so many of a file's from its beginning to its end: files are often in the order of their labels."""
    if path is None:
        return list(TEXTS)
    with path.open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    return texts[:: max(1, -(-len(texts) // max_texts))]


def table(results: dict[str, Any]) -> str:
    """The figures that have aims, a line each."""
    lines = [f"{'figure':18} {'floor':>8} {'goal':>8} {'measured':>10}"]
    for name, (floor, goal) in AIMS.items():
        for part in results.values():
            if name in part:
                lines.append(f"{name:18} {floor:8.2f} {goal:8.2f} {part[name]:10.3f}")
    return "\n".join(lines)


def at_once(part: Callable[[Work], PartResult], work: Work) -> Callable[[Keep], PartResult]:
    """A part that takes minutes, without partial results."""
    return lambda keep: part(work)


def main() -> None:
    options = parse()
    texts = read_texts(options.rows)
    results = Results(options.out, rounds=options.rounds, seconds=options.seconds, texts=len(texts))
    artifacts = (options.student, options.parent) if options.student else models.make_models(results.folder / "models")
    student, parent = (folder.absolute() for folder in artifacts)
    settings = tuple(options.set)
    work = Work(student, parent, texts, options.rounds, options.seconds, results.folder, settings, options.minutes)
    for name in options.only or PARTS:
        results.measure(name, at_once(PARTS[name], work))
    print(results if options.json else table(results.parts))


if __name__ == "__main__":
    main()
