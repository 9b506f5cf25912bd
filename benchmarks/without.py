"""`rtrain train intent` without some of its shortcuts, to measure what each gains.

python -m benchmarks.without packed,touched_rows --data ROWS --test ROWS --out RUN --set NAME=VALUE ... --json
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from rtrain import config, env
from rtrain.cluster.session import session
from rtrain.runs.start import Shortcuts

PREFIX = "shortcuts."
"""Stands before a shortcut's name among settings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(field.name for field in fields(Shortcuts))
    parser.add_argument("shortcuts", help=f"what is left out, of {known}; several with commas")
    for name in ("--data", "--test", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="assignments", metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true", help="print the summary on stdout")
    given = parser.parse_args()
    env.prepare()
    from rtrain.runs import driver, preparing

    files = {"data.path": str(given.data.absolute()), "data.test": str(given.test.absolute())}
    chosen = config.load("intent", files | dict(config.parse_assignment(text) for text in given.assignments))
    shortcuts, folder = Shortcuts(**dict.fromkeys(given.shortcuts.split(","), False)), given.out.absolute()
    with session(chosen, folder.parent):
        summary = driver.fit(preparing.prepare(chosen, folder), shortcuts=shortcuts)
    if given.json:
        json.dump(summary, sys.stdout)


if __name__ == "__main__":
    main()
