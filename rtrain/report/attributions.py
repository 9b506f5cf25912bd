"""`attributions-<split>.json` of a run: which words the answers to its hardest rows rest on.

{"schema_version": 1, "split", "artifact": version, "steps", "rows": [{"row": position in the split, "texts",
"answers"}, ...]}, hardest first; see `rtrain.explain.rows`. The float artefact computes it once: it is kept so that a
page can be made again without torch.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtrain import artifact, config as configuration, drafts, engines
from rtrain.data.stores.store import open_store
from rtrain.report import answer_rows
from rtrain.run import Run

SCHEMA_VERSION = 1
SECONDS = 15.0
"""Most seconds in which rows are explained; those that are left then are not."""
EVERY_S = 5.0
"""Seconds after which it is said how many are explained."""


def read(run: Run, split: str, version: str | None) -> dict[str, Any] | None:
    """The document above, or None where there is none of this version of the artefact."""
    path = run.attributions(split)
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # cut off: they are computed again
        return None
    current = found["schema_version"] == SCHEMA_VERSION and found["artifact"] == version
    return found if current else None


def ensure(run: Run, say: Callable[[str], None] = lambda text: None, seconds: float = SECONDS) -> Path | None:
    """Make the file where it is missing and the run has an artefact, its rows, and a kind of answer that is explained.

    Returns the file, or None where there is nothing to explain. It takes at most so many `seconds`, and a moment in
    which the artefact is loaded; rows that are left out are said. torch is imported only where there is work. Raises
    `UserError` where the model's architecture cannot be explained.
    """
    config = configuration.load(str(run.config))
    most, answers = config.deploy.report.attributions, answer_rows.newest(run)
    if not most or answers is None or not run.finished:
        return None
    from rtrain.explain import targets
    from rtrain.tasks import base

    made = artifact.document_of(run.artifact)
    if not engines.get(made["engine"]).gradients or base.get(made["task"]).output not in targets.KINDS:
        return None
    hardest = answers.hardest(most)
    kept = read(run, answers.split, made["version"])
    if kept is not None and kept["asked"] >= len(hardest):
        return run.attributions(answers.split)
    if (store := run.store) is None:
        return None
    from rtrain.explain import rows
    from rtrain.predict import Predictor

    opened, paired, total = open_store(store), config.recipe.data.text_pair is not None, len(hardest)
    tokens, texts = opened.read(answers.split, hardest), opened.texts(answers.split, hardest)
    say(f"explaining the {total} hardest rows for the report, in at most {seconds:.0f} s; all else of the run is there")
    predictor, until, said = Predictor.load(run.artifact), time.monotonic() + seconds, time.monotonic()

    def count_explained(count: int) -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY_S:
            said = time.monotonic()
            say(f"explained {count} of the {total} hardest rows")

    found = rows.explain(
        predictor, tokens, paired, texts=texts, stop=lambda: time.monotonic() > until, explained=count_explained
    )
    if len(found["rows"]) < total:
        say(f"explained {len(found['rows'])} of the {total} hardest rows: the others would take too long")
    explained = [
        {"row": position, **row} for position, row in zip(hardest.tolist(), found["rows"], strict=False)
    ]  # the first rows only, where the budget was too small for all
    head = {"schema_version": SCHEMA_VERSION, "split": answers.split, "artifact": made["version"]}
    return _write(
        run.attributions(answers.split), {**head, "asked": len(hardest), "steps": found["steps"], "rows": explained}
    )


def _write(final: Path, document: dict[str, Any]) -> Path:
    drafts.write_text(final, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    return final
