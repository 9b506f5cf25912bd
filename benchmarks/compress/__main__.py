"""Score, size and latency of smaller models: `python -m benchmarks.compress [--json] DATA`.

Every model is made by a command of rtrain in its own process, and stays in the folder of its name beside the results:
a finished model is not made again, and each part can be run alone.

scores   student over teacher, and int8 over its float parent, on four sets: labels, questions, entities, essay scores
served   bytes and score of the trimmed student, its word table in 4 bits and compressed, beside the whole int8 one
beside   latency of the int8 student, beside its teacher in Transformers and the same student in other engines

The figures are printed with their floor and goal. `results` are written after
each part. ONNX Runtime takes part where `onnx` and `onnxruntime` are installed.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.compress import figures, parts
from benchmarks.compress.making import SETS, Set, Work, job_of
from benchmarks.results import Keep, PartResult, Results

PARTS: dict[str, Callable[[Work, Sequence[Set], Keep], PartResult]] = {
    "scores": parts.scores,
    "served": parts.served,
    "beside": parts.compare_engines,
}
NAMES = {job_of(dataset).folder: dataset for dataset in SETS}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compress", description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path, help="folder that holds the sets, each in a folder of its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a teacher")
    parser.add_argument("--seed", type=int, default=0, help="seed of teachers and of students")
    parser.add_argument("--student", action="append", default=[], metavar="NAME=VALUE", help="a setting of students")
    parser.add_argument("--sets", action="append", choices=NAMES, help="a set; repeatable (default: all)")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/compress.json"), help="file of the results")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: write 1 or more")
    return options


def main() -> None:
    options = parse()
    values = {name: getattr(options, name) for name in ("epochs", "seed", "student")}
    results = Results(options.out, **values)
    work = Work(options.data.absolute(), results.folder, **{**values, "student": tuple(options.student)})
    sets = [NAMES[name] for name in options.sets or NAMES]
    for name in options.only or PARTS:
        results.measure(name, partial(PARTS[name], work, sets))
    if options.json:
        print(results)
    else:
        print(figures.table(results.parts))
        if "beside" in results.parts:
            print(f"\n{figures.engines(results.parts['beside'])}")


if __name__ == "__main__":
    main()
