"""What to do next: the facts of a run that `rtrain.report.advice` looks at, and the block of its steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet

from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.metrics import per_class
from rtrain.metrics.registry import metric_for
from rtrain.report import advice
from rtrain.report.advice import Compared, Facts, Label, Weak
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Note, Steps
from rtrain.report.sections import curves, slices

SURE = 0.9
"""Confidence of a wrong answer from which on its label is suspect."""
PAIR_SHARE = 0.1
"""Share of all mistakes from which on a confused pair is worth a remedy of its own."""
PAIR_ROWS = 5
HARDEST = 20
"""Rows of the largest loss among which wrong labels are looked for."""


def block(run: Collected) -> Block:
    steps = advice.steps(facts(run))
    if not steps:
        return Note("Nothing calls for a next step: the run has no artefact yet, and nothing in it stands out.")
    note = (
        "Derived from this run's figures alone, by fixed rules: a hint where to look first, not a promise. NEW_FOLDER, "
        "RECIPE, FILE and TEACHER, the run that a student is distilled from, are for you to name."
    )
    return Steps("What to do next", steps, note)


def facts(run: Collected) -> Facts:
    name = metric_for(run.output).headline
    split = next((split for split in ("test", "valid") if name in metrics(run, split)), "test")
    score = metrics(run, split).get(name)
    cut = run.store.manifest.truncated if run.store else 0
    train_loss, held_out_loss = _losses(run)
    return Facts(
        folder=str(run.folder),
        status=run.summary["status"],
        output=run.output,
        score=score,
        compared=compared(run, split),
        train_loss=train_loss,
        held_out_loss=held_out_loss,
        validation=tuple(_validation(run, name)),
        best_update=run.summary["best_update"],
        updates=run.summary["updates"],
        epochs=run.config.recipe.train.epochs,
        rows=sum(run.store.manifest.rows.values()) if run.store else 0,
        given=run.store.given if run.store else 0,
        cut=cut,
        max_tokens=run.reading.max_tokens,
        windows=run.reading.max_windows > 1,
        max_windows=run.reading.max_windows,
        set_aside=run.store.manifest.quarantined if run.store else 0,
        reason=_reason(run),
        weak=_weak(run),
        label=_label(run),
        confused=_confused(run),
        suspects=tuple(_suspects(run)),
        student=bool(run.config.recipe.distill.teacher) or run.folder.with_name(f"{run.folder.name}-student").is_dir(),
        artifact=run.artifact is not None,
        int8=Run(run.folder).int8.joinpath(artifact.NAME).is_file(),
        refused=_refused(Run(run.folder)),
        teacher=bool(run.config.recipe.distill.teacher),
    )


def _refused(run: Run) -> str:
    """Why the gate has refused the artefact that the advice would serve; empty where it has not."""
    served = next((place for place in (run.int8, run.artifact) if (place / artifact.NAME).is_file()), None)
    if served is None:
        return ""
    made = artifact.read(served, verify=False)
    return artifact.refusal(made.gate, made.version) or ""


def baselines(run: Collected, split: str) -> list[tuple[str, float]]:
    """(name, headline) of each baseline on a split: measured ones, and of summaries the first sentences."""
    found = [
        (one["name"], float(one["scores"][split]))
        for one in (run.baselines or {"baselines": []})["baselines"]
        if split in one["scores"]
    ]
    document = scores_of(run, split)
    if run.output == "summary" and document is not None and "lead_rouge" in document["scores"]:
        found.append(("the first sentences", float(document["scores"]["lead_rouge"])))
    return found


def best_baseline(run: Collected, split: str) -> tuple[str, float] | None:
    return max(baselines(run, split), key=lambda one: one[1], default=None)


def beside_baselines(run: Collected, split: str) -> Mapping[str, Any] | None:
    """{"rows", "scores", "intervals"} of the model on the rows that the baselines of a split are scored on; None where
    that is not known."""
    document = scores_of(run, split)
    if document is None:
        return None
    rows = document["rows"] if run.output == "summary" else (run.baselines or {}).get("rows", {}).get(split)
    return next((one for one in (document, document.get("sample")) if one is not None and one["rows"] == rows), None)


def compared(run: Collected, split: str) -> Compared | None:
    """The model beside the best baseline, on the same rows; None where one of the two is not known."""
    name, best, document = metric_for(run.output).headline, best_baseline(run, split), beside_baselines(run, split)
    if best is None or document is None or name not in document["scores"]:
        return None
    ends = document.get("intervals", {}).get("scores", {}).get(name)
    return Compared(float(document["scores"][name]), (ends[0], ends[1]) if ends else None, *best)


def scores_of(run: Collected, split: str) -> dict[str, Any] | None:
    """scores-<split>.json."""
    return next((one for one in (run.scores, run.validation) if one is not None and one["split"] == split), None)


def metrics(run: Collected, split: str) -> Mapping[str, Any]:
    """The logged scores of the best weights; until these are chosen, those of the newest validation; or none."""
    if found := run.summary["metrics"][split]:
        return dict(found)
    evaluated = [event["scores"] for event in run.of("evaluated") if event["split"] == split]
    return dict(evaluated[-1]) if evaluated else {}


def _losses(run: Collected) -> tuple[float | None, float | None]:
    """(training loss of the last epoch, mean loss of the held-out rows), where both are the plain loss of a text."""
    recipe, answers = run.config.recipe, run.answers
    if run.output != "classes" or recipe.train.label_smoothing or recipe.distill.teacher or answers is None:
        return None, None
    known = answers.loss[np.isfinite(answers.loss)]
    per_epoch, progress = run.updates_per_epoch() or 1, curves.newest(run.of("progress"))
    last = [event["loss"] for event in progress if event["update"] > run.summary["updates"] - per_epoch]
    return (float(np.mean(last)), float(known.mean())) if last and len(known) else (None, None)


def _validation(run: Collected, name: str) -> list[tuple[int, float]]:
    found = curves.newest([event for event in run.of("evaluated") if event["split"] == "valid"])
    return [(event["update"], float(event["scores"][name])) for event in found if name in event["scores"]]


def _reason(run: Collected) -> str:
    path = None if run.store is None else run.store.folder / "quarantine.parquet"
    if path is None or not path.is_file():
        return ""
    reasons = Counter(pyarrow.parquet.read_table(path, columns=["reason"])["reason"].to_pylist())
    return str(reasons.most_common(1)[0][0]) if reasons else ""


def _weak(run: Collected) -> Weak | None:
    """The worst slice, where it is worse than all rows by more than chance."""
    if run.scores is None or not run.scores["rows"]:
        return None
    whole = slices.measure(run.scores)
    found = slices.told(run, slices.slices(run.scores))
    worse = next((one for one, said in zip(found, slices.verdicts(found, whole), strict=True) if said == "worse"), None)
    if worse is None:
        return None
    column, _, value = worse.name.partition(": ")
    return Weak(column, value, worse.rows, worse.value)


def tables(run: Collected) -> list[tuple[str, Mapping[str, Any]]]:
    """(what goes before a label's name, its tables): one for each head, else one for all."""
    if run.scores is None:
        return []
    found = run.scores["tables"]
    return [(f"{name}: ", own) for name, own in found["heads"].items()] if "heads" in found else [("", found)]


def worst_labels(run: Collected) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, scores) of the labels or types of entities that occur often enough, the lowest F1 first."""
    return sorted(((one["class"], one) for one in _parted(run)[1]), key=lambda item: float(item[1]["f1"]))


def rare_labels(run: Collected) -> list[per_class.Class]:
    """Labels or types of entities with too few rows to judge, the rarest first."""
    return _parted(run)[0]


def _parted(run: Collected) -> tuple[list[per_class.Class], list[per_class.Class]]:
    return per_class.split_by_support([] if run.scores is None else per_class.collect_classes(run.scores["tables"]))


def confused_pairs(run: Collected) -> list[tuple[str, str, int]]:
    """(true, answered, rows), the most frequent first."""
    found = [
        (f"{head}{one['true']}", f"{head}{one['predicted']}", int(one["rows"]))
        for head, own in tables(run)
        for one in own.get("confused", ())
    ]
    return sorted(found, key=lambda item: -item[2])


def _label(run: Collected) -> Label | None:
    worst = next(iter(worst_labels(run)), None)
    codes = run.classes()
    if worst is None or codes is None or run.store is None:
        return None
    names: Sequence[str] = run.store.manifest.labels
    rows = int((codes == names.index(worst[0])).sum()) if worst[0] in names else None
    return Label(worst[0], float(worst[1]["f1"]), rows)


def _confused(run: Collected) -> tuple[str, str, int] | None:
    pairs = confused_pairs(run)
    total = sum(rows for _, _, rows in pairs)
    return pairs[0] if pairs and pairs[0][2] >= max(PAIR_ROWS, PAIR_SHARE * total) else None


def _suspects(run: Collected) -> list[str]:
    """file:line of the hardest rows that are wrong and sure; of texts with one label, whose score is their chance."""
    answers = run.answers
    if answers is None or run.output != "classes":
        return []
    right = answers.right
    rows = [int(row) for row in answers.hardest(HARDEST) if not right[row] and answers.score[row] >= SURE]
    return [answers.place(row) for row in rows]
