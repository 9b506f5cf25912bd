"""The outcome, before all else: the scores beside the baselines, what is wrong most, and what to do next."""

from collections.abc import Sequence
from typing import Any

from rtrain.metrics import per_class
from rtrain.metrics.registry import metric_for
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Note, Section, Table, Tile
from rtrain.report.drawing.svg import duration, number, rate, score_name, short, three
from rtrain.report.outputs import entities
from rtrain.report.sections import answers, next_steps, slices

EACH, HARDEST = 3, 10
"""Lines of each kind in the table of what is wrong, and of the hardest rows."""
TEXT = 160
"""Characters of a row's text."""
PLACE = 90
"""Characters of the place that a row came from."""


def section(run: Collected) -> Section:
    blocks = [_scores(run), *_collapsed(run), *_wrong(run), next_steps.block(run)]
    return Section("outcome", "Outcome", _intro(run), blocks)


def _collapsed(run: Collected) -> list[Block]:
    """That almost all rows get one answer."""
    found = (run.scores or {}).get("collapsed", ())
    return [
        Note(
            f"The model answers “{short(one['answer'], 60)}” to {one['rows']:,} of {one['of']:,} rows, and to "
            f"{one['given']:,} of the {one['others']:,} whose right answer is another one: it hardly tells rows apart."
        )
        for one in found
    ]


def tiles(run: Collected) -> list[Tile]:
    """The figures that a reader looks for first: the score, how the run ended, what it cost."""
    found = run.summary
    shown = [Tile(f"{split} {name}", f"{value:.4f}", note) for split, name, value, note in _headlines(run)[:1]]
    shown += [
        Tile("status", found["status"], f"{len(run.starts)} start{'' if len(run.starts) == 1 else 's'}"),
        Tile(
            "updates",
            f"{found['updates']:,}",
            f"best: {found['best_update'] if found['best_update'] is not None else '-'}",
        ),
        Tile("rows trained on", f"{found['rows_seen']:,}", f"{rate(found['rows_per_second'])} rows/s while training"),
        Tile(
            "total time", duration(found["seconds"]["total"]), f"{duration(found['seconds']['train'])} of it training"
        ),
        Tile("restarts", str(found["restarts"]), _restarts(run)),
    ]
    return shown


def _restarts(run: Collected) -> str:
    lost = sum(event["cause"] == "lost" for event in run.of("crashed"))
    crashes = f"{len(run.of('crashed')) - lost} after a crash"
    return f"{crashes}, {lost} after a lost node" if lost else crashes


def _intro(run: Collected) -> str:
    recipe = run.config.recipe
    workers = run.summary["workers"] or recipe.train.workers
    on = f" on {run.summary['device']}" if run.summary["device"] else ""
    rows = f"{run.store.rows('train'):,} training rows" if run.store else "its training rows"
    laid_out = [f" The forecast of memory chose {event['why']}." for event in run.of("strategy")[-1:]]
    return (
        f"The recipe {recipe.name} fine-tunes the encoder {short(recipe.model.name, 60)} for {recipe.train.epochs} "
        f"epoch{'' if recipe.train.epochs == 1 else 's'} of {rows}, {recipe.rows_per_update} rows per update, on "
        f"{workers} worker{'' if workers == 1 else 's'}{on} in {run.summary['precision'] or recipe.train.precision}."
        f"{''.join(laid_out)}"
    )


# -------------------------------------------------------------------------------------------------------------- scores


def _sign(run: Collected) -> tuple[str, int]:
    """(the headline as a reader knows it, 1 or -1): of the negative of an error, the error."""
    name = metric_for(run.output).headline
    return score_name(name.removeprefix("neg_")), -1 if name.startswith("neg_") else 1


def _headlines(run: Collected) -> list[tuple[str, str, float, str]]:
    """(split, score, value, its 95 % interval or its rows), of the test rows first."""
    (shown, sign), found = _sign(run), []
    for split, name in answers.SPLITS.items():
        scores, headline = next_steps.metrics(run, split), metric_for(run.output).headline
        if headline not in scores:
            continue
        ends = _interval(run, split, headline, sign)
        note = "95 % interval {:.3f} to {:.3f}".format(*ends) if ends else f"{scores.get('rows', 0):,} rows"
        found.append((name, shown, sign * float(scores[headline]), note))
    return found


def _interval(run: Collected, split: str, headline: str, sign: int) -> tuple[float, float] | None:
    """Ends of the bootstrap interval; None where all rows are alike, which says nothing of other rows."""
    ends = (next_steps.scores_of(run, split) or {}).get("intervals", {}).get("scores", {}).get(headline)
    if not ends or ends[0] == ends[1]:
        return None
    low, high = sorted(sign * float(end) for end in ends)
    return low, high


def _scores(run: Collected) -> Block:
    headline, (shown, sign) = metric_for(run.output).headline, _sign(run)
    rows: list[Sequence[str | int]] = []
    for split, name in answers.SPLITS.items():
        scores = next_steps.metrics(run, split)
        if headline not in scores:
            continue
        ends = _interval(run, split, headline, sign)
        between = "{:.4f} to {:.4f}".format(*ends) if ends else "-"
        rows.append((name, "this model", f"{sign * scores[headline]:.4f}", between))
        known = run.summary["overlap"].get(split) or {}
        if headline in (known.get("without") or {}):
            without = f"this model, without the {known['seen']:,} rows that are training rows too"
            rows.append((name, without, f"{sign * known['without'][headline]:.4f}", "-"))
        beside = next_steps.beside_baselines(run, split)
        if beside is not None and beside is not next_steps.scores_of(run, split) and headline in beside["scores"]:
            same = f"this model, on the {beside['rows']:,} rows of the baselines"
            rows.append((name, same, f"{sign * beside['scores'][headline]:.4f}", "-"))
        rows += [
            (name, other, f"{sign * value:.4f}", "-")
            for other, value in sorted(next_steps.baselines(run, split), key=lambda one: -one[1])
        ]
    if not rows:
        return Note("There is no score yet: the run has not come to an evaluation.")
    direction = "smaller is better" if sign < 0 else "larger is better"
    note = (
        f"The score by which models are compared ({direction}). The validation rows choose the weights; the test rows "
        "do not."
    )
    if run.baselines is None and run.output != "summary":
        note += " No baseline was measured: that is done for labels, numbers, tags and spans once the run has ended."
    elif run.baselines is not None and run.store is not None:
        used, every = run.baselines["trained_on"], run.store.labelled("train")
        note += f" Baselines learned from {used:,} of the {every:,} training rows." if used < every else ""
    return Table(_verdict(run, shown, sign), ("rows", "model", shown, "95 % interval"), rows, note, wide=True)


def _verdict(run: Collected, shown: str, sign: int) -> str:
    split, _, value, _ = _headlines(run)[0]
    key = next(key for key, name in answers.SPLITS.items() if name == split)
    title, found = f"{split.capitalize()} {shown} {three(value)}", next_steps.compared(run, key)
    if found is None:
        return title
    side = {True: "ahead of", False: "NOT ahead of", None: "not told apart from"}[found.is_ahead]
    of_sample = next_steps.beside_baselines(run, key) is not next_steps.scores_of(run, key)
    some = f", {three(sign * found.score)} of the model on the same rows" if of_sample else ""
    return f"{title}, {side} the best baseline ({found.name}: {three(sign * found.reached)}{some})"


# ------------------------------------------------------------------------------------------------------ what is wrong


def _wrong(run: Collected) -> list[Block]:
    rows = [*_slices(run), *_labels(run), *_pairs(run), *_of_kind(run), *_hardest(run)]
    if not rows:
        return []
    note = "The worst of each kind; the parts below have all of them, with how they are measured."
    return [Table("What is wrong most", ("where", "which", "how bad"), rows, note, wide=True)]


def _slices(run: Collected) -> list[tuple[str, str, str]]:
    if run.scores is None or not run.scores["rows"]:
        return []
    whole, found = slices.measure(run.scores), slices.told(run, slices.slices(run.scores))
    worse = [one for one, said in zip(found, slices.verdicts(found, whole), strict=True) if said == "worse"]
    return [
        (
            "slice",
            short(one.name, 60),
            f"{whole.name} {three(one.value)} on {one.rows:,} rows, {three(whole.whole)} on all",
        )
        for one in worse[:EACH]
    ]


def _labels(run: Collected) -> list[tuple[str, str, str]]:
    kind, rare = "type of entity" if run.output == "tags" else "label", next_steps.rare_labels(run)
    few = [
        (kind, short(one["class"], 60), f"{per_class.TOO_FEW}: {one['support']:,}, recall {one['recall']:.2f}")
        for one in rare[:EACH]
    ]
    if len(rare) > EACH:
        few.append((kind, f"{len(rare) - EACH:,} more", per_class.TOO_FEW))
    return few + [
        (
            kind,
            short(name, 60),
            f"F1 {one['f1']:.2f} (precision {one['precision']:.2f}, recall {one['recall']:.2f}) on {one['support']:,}",
        )
        for name, one in next_steps.worst_labels(run)[:EACH]
        if one["f1"] < 1
    ]


def _pairs(run: Collected) -> list[tuple[str, str, str]]:
    return [
        ("confusion", f"{short(true, 40)} → {short(said, 40)}", f"{rows:,} row{'' if rows == 1 else 's'}")
        for true, said, rows in next_steps.confused_pairs(run)[:EACH]
    ]


def _of_kind(run: Collected) -> list[tuple[str, str, str]]:
    """What only questions and summaries have."""
    found: dict[str, Any] = (run.scores or {"tables": {}})["tables"]
    rows = []
    if run.output == "spans" and found.get("by_length"):
        worst = min(found["by_length"], key=lambda one: float(one["f1"]))
        length = " to ".join(str(end) for end in sorted({worst["low"], worst["high"]})) + " tokens"
        rows.append(("length of the answer", length, f"F1 {worst['f1']:.2f} on {worst['rows']:,} questions"))
    if run.output == "summary" and "beside_lead" in found:
        sides = found["beside_lead"]
        every = sum(sides.values())
        rows.append(("summaries", "worse than the first sentences", f"{sides['worse']:,} of {every:,}"))
    return rows


def _hardest(run: Collected) -> list[tuple[str, str, str]]:
    known = run.answers
    if known is None:
        return []
    rows = [int(row) for row in known.hardest(4 * HARDEST)]
    if run.output not in ("number", "tokens", "summary"):  # a hard row whose answer is right is no mistake
        rows = [row for row in rows if not known.right[row]]
    rows, found = rows[:HARDEST], list[tuple[str, str, str]]()
    for row, text in zip(rows, known.texts(rows), strict=True):
        place = known.place(row)
        place = place if len(place) <= PLACE else f"...{place[3 - PLACE :]}"  # its end names the file and the line
        found.append(("hardest row", f"{short(text, TEXT)} ({place})", _mistake(run, row)))
    return found


def _mistake(run: Collected, row: int) -> str:
    known = run.answers
    assert known is not None  # _hardest
    loss = f"loss {number(float(known.loss[row]))}"
    if run.output in ("tokens", "summary"):
        return loss
    if run.output == "tags":
        sides = [entities.named(side[row]) for side in (known.target, known.prediction)]
    else:
        sides = [_said(side[row]) for side in (known.target, known.prediction)]
    return f"{short(sides[0], 80)} answered as {short(sides[1], 80)}, {loss}"


def _said(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value or "nothing" if isinstance(value, str) else ", ".join(str(part) or "-" for part in value) or "nothing"
