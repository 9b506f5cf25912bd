"""Results that are no single figure: scores of each class, the confusion matrix, calibration. Plain JSON, bounded.

classes   per_class: [{class, precision, recall, f1, auc, support, predicted}, ...], worst F1 first, at most
          `MOST_CLASSES`, with `classes` saying how many there are; confusion: {labels, counts [true][predicted],
          without_class: how often each was predicted of a row that has no class} up to `MOST_CONFUSED` classes;
          with `data.outside` that label is a class too, and threshold the chance below which it is given;
          confused: the `MOST_PAIRS` most frequent mistakes [{true, predicted, rows}, ...]; calibration: {ece, bins:
          [{low, high, rows, confidence, accuracy}, ...]}
labels    per_class (auc is left out, the threshold of each label is added), classes, calibration of each label's yes
          or no
heads     heads: {head: what `classes` has, over the rows with a label of that head}
number    residuals: {edges, rows}, a histogram of predicted - true in `BINS` bins; scale: confusion on the scale of
          the training scores where there is one
tags      per_class by type of entity, classes, calibration of the words' tags; words_without_tokens, where there are
          some: each is answered O
summary   positions: {tenths: 10, oracle, picked}, how many sentences of each tenth of their documents the oracle takes
          and the model; calibration of the sentences' yes or no; lengths: {budget: words, over_budget: summaries that
          are longer, document, picked, oracle: {sentences, words}, each a mean over the documents}; beside_lead:
          {better, same, worse}: summaries by their ROUGE against that of the first sentences
spans     by_length: [{low, high, rows, f1, exact_match}, ...], over the questions with an answer, by its tokens;
          where some have none: no_answer: {rows, silent: the share of them left unanswered, threshold, curve:
          [{threshold, f1, exact_match, answered}, ...] of at most `MOST_POINTS` + 1 points, falling thresholds}
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rtrain.core.ragged import IGNORED, OUTSIDE, Head, Ragged
from rtrain.metrics import calibration, classification, entities, regression, summary_rows
from rtrain.metrics.calibration import softmax
from rtrain.metrics.rouge import BLEU_COUNTS, ROUGES
from rtrain.metrics.sums import Bools, Floats, Ints

MOST_CLASSES = 500
MOST_CONFUSED = 200
"""Classes up to which the whole confusion matrix is kept: 200 x 200 numbers."""
MOST_PAIRS = 50
BINS = 30
TENTHS = 10
"""Parts of a document, with equally many sentences each."""
SAME = 1e-9
"""A difference of two summaries' ROUGE up to this is one of rounding."""
MOST_POINTS = 100
ANSWER_TOKENS = (1, 2, 3, 4, 5, 7, 10, 15, 25)
"""Lengths at which a group of answers begins."""


def classes(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    chances, true = chances_of(outcomes, head), targets.values.astype(np.int64)
    if "outside" not in head.facts:
        return _of_classes(chances, true, head.labels)
    # Being outside is one class more; its probability is what the best class leaves over.
    sure, place = chances.max(axis=1), len(head.labels)
    refused = sure < head.facts.get("threshold", 0.0)
    outside, wide = true == OUTSIDE, np.concatenate([chances, 1 - sure[:, None]], axis=1)
    given = np.where(refused, place, classification.best(chances))
    return {
        **_of_classes(wide, np.where(outside, place, true), (*head.labels, head.facts["outside"]), given),
        "threshold": head.facts.get("threshold"),
        "calibration": _calibration(sure[~outside], (chances.argmax(axis=1) == true)[~outside]),
    }


def labels(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    true, given = labels_given(outcomes, targets, head)
    chances = _sigmoid(outcomes.matrix(len(head.labels)))
    found = []
    for name, own, have, chance in zip(head.labels, true.T, given.T, thresholds_of(head).tolist(), strict=True):
        one = classification.per_class(classification.confusion(own.astype(np.int64), have.astype(np.int64), 2))[1]
        found.append({"class": name, **one._asdict(), "threshold": chance})
    sure = np.maximum(chances, 1 - chances).ravel()
    return {
        **_listed(found),
        "calibration": _calibration(sure, ((chances >= 0.5) == true).ravel()),
    }


def heads(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    found = {}
    for name, own, logits, true in of_heads(outcomes, targets, head):
        rows = np.flatnonzero(true != IGNORED)
        found[name] = {"rows": len(rows), **_of_classes(softmax(logits[rows]), true[rows], own)}
    return {"heads": found}


def number(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    found, true = outcomes.values.astype(np.float64), targets.values.astype(np.float64)
    if not len(found):
        return {}
    counts, edges = np.histogram(found - true, bins=BINS)
    tables: dict[str, Any] = {"residuals": {"edges": edges.tolist(), "rows": counts.tolist()}}
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        graded, answered = (regression.ratings(side, low, high, step) for side in (true, found))
        names = [f"{low + place * step:g}" for place in range(round((high - low) / step) + 1)]
        tables["scale"] = _confusion(classification.confusion(graded, answered, len(names)), names)
    return tables


def tags(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    true, found = tags_of(outcomes, targets)
    each = entities.per_type(names_of(true, head), names_of(found, head))
    rows = [{"class": name, **scores._asdict()} for name, scores in each.items()]
    sure = outcomes.values.reshape(-1, 3)[:, 1]
    right = np.concatenate([one == other for one, other in zip(true, found, strict=True)] or [np.empty(0, np.bool_)])
    begins = np.cumsum([0, *map(len, true)])
    without = [begin + entities.true_tags(row)[1] for begin, row in zip(begins, targets, strict=False)]
    places = np.concatenate([*without, np.empty(0, np.int64)])
    missing = {"words_without_tokens": len(places)} if len(places) else {}
    # The model has not seen them, and is as sure as nothing.
    return {**_listed(rows), "calibration": _calibration(np.delete(sure, places), np.delete(right, places)), **missing}


def summary(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    taken, picked, chances, tenths = sentences_of(outcomes, targets)
    rows = {"oracle": tenths[taken], "picked": tenths[picked]}
    right = (chances >= 0.5) == taken
    read = chances >= 0
    return {
        "positions": {
            "tenths": TENTHS,
            **{name: np.bincount(places, minlength=TENTHS).tolist() for name, places in rows.items()},
        },
        "calibration": _calibration(np.maximum(chances, 1 - chances)[read], right[read]),
        **_lengths_of_summaries(outcomes, targets, head),
    }


def _lengths_of_summaries(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    if not len(outcomes):
        return {}
    budget, sums, over = int(head.facts["max_words"]), np.zeros((3, 2)), 0
    for row, wanted in zip(outcomes, targets, strict=True):
        sentences, (_, given) = summary_rows.sentences_of(wanted), summary_rows.answered(row)
        chosen = (np.ones_like(given), given, sentences.taken)
        sums += [[int(own.sum()), int(sentences.words[own].sum())] for own in chosen]
        over += int(sentences.words[given].sum()) > budget
    means = [{"sentences": float(a), "words": float(b)} for a, b in sums / len(outcomes)]
    size, second = len(ROUGES), len(ROUGES) + BLEU_COUNTS
    gained = np.array([row[:size].mean() - row[second : second + size].mean() for row in outcomes])
    sides = {"better": gained > SAME, "same": np.abs(gained) <= SAME, "worse": gained < -SAME}
    return {
        "lengths": {
            "budget": budget,
            "over_budget": over,
            **dict(zip(("document", "picked", "oracle"), means, strict=True)),
        },
        "beside_lead": {name: int(rows.sum()) for name, rows in sides.items()},
    }


def spans(outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
    rows = outcomes.matrix(7)
    f1, exact, given, there = answers_of(outcomes, head)
    # Its tokens in the first window that holds it; 0 where none does as a whole.
    lengths = np.zeros(len(rows), dtype=np.int64)
    for row, windows in enumerate(targets):
        places = windows.reshape(-1, 2).astype(np.int64)
        lengths[row] = next((last - first + 1 for first, last in places.tolist() if last > 0), 0)
    found: dict[str, Any] = {"by_length": []}
    group = np.searchsorted(ANSWER_TOKENS, lengths, side="right")
    for number in np.unique(group[there & (lengths > 0)]).tolist():
        inside = there & (group == number)
        own = lengths[inside]
        means = {"f1": float(f1[inside].mean()), "exact_match": float(exact[inside].mean())}
        found["by_length"].append({"low": int(own.min()), "high": int(own.max()), "rows": int(inside.sum()), **means})
    if head.facts.get("no_answer") and not np.isnan(rows[:, 2]).all():
        silent = float(np.mean(~given[~there])) if (~there).any() else None
        curve = _no_answer(rows[:, 0], rows[:, 1], rows[:, 2], there)
        found["no_answer"] = {"rows": int((~there).sum()), "silent": silent, "threshold": least_margin(head), **curve}
    return found


def _no_answer(f1: Floats, exact: Floats, margin: Floats, there: Bools) -> dict[str, Any]:
    """Scores at thresholds from above all margins, where nothing is answered, to below all, where everything is."""
    # A margin that is no number is an answer at each threshold, and wrong.
    known, every = ~np.isnan(margin), len(margin)
    f1, exact, margin, there = f1[known], exact[known], margin[known], there[known]
    order = np.argsort(-margin, kind="stable")
    sums = [
        np.concatenate([[0.0], np.cumsum((np.where(there, part, 0.0) - ~there)[order])]) + (~there).sum()
        for part in (f1, exact)
    ]
    falling = margin[order]
    # Rows of one margin are answered together: a threshold lies only where the margin falls.
    ends = np.concatenate([[0], np.flatnonzero(np.diff(falling) < 0) + 1, [len(margin)]])
    if len(ends) > MOST_POINTS:
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, MOST_POINTS).round().astype(np.int64))]
    edges = np.concatenate([[falling[0] + 1], falling, [falling[-1] - 1]])
    points = [
        {
            "threshold": float(edges[end] + edges[end + 1]) / 2,
            "f1": float(sums[0][end]) / every,
            "exact_match": float(sums[1][end]) / every,
            "answered": float(end + every - len(margin)) / every,
        }
        for end in ends.tolist()
    ]
    return {"curve": points}


# -------------------------------------------------------------------------------------- what outcomes and targets say


def chances_of(outcomes: Ragged, head: Head) -> Floats:
    """Probabilities [rows, classes] of rows with a single label."""
    found: Floats = softmax(outcomes.matrix(len(head.labels)))
    return found


def ece(chances: Floats, true: Ints) -> float:
    return calibration.expected_calibration_error(chances.max(axis=1), chances.argmax(axis=1) == true)


def thresholds_of(head: Head) -> Floats:
    """Chance from which each of several labels is given, [labels]; 0.5 where none was chosen."""
    chosen = head.facts.get("thresholds", {})
    return np.array([chosen.get(label, 0.5) for label in head.labels], dtype=np.float64)


def labels_given(outcomes: Ragged, targets: Ragged, head: Head) -> tuple[Bools, Bools]:
    """For rows with several labels, which are true and which are given; [rows, labels] each. A logit that is no number
    is a wrong answer, whatever is true."""
    size, chances = len(head.labels), thresholds_of(head)
    true, logits = targets.matrix(size) > 0, outcomes.matrix(size)
    with np.errstate(divide="ignore"):  # thresholds of 0 and 1
        least = np.log(chances) - np.log1p(-chances)
    return true, np.where(np.isnan(logits), ~true, logits >= least)


def of_heads(outcomes: Ragged, targets: Ragged, head: Head) -> Iterator[tuple[str, tuple[str, ...], Floats, Ints]]:
    """(name, own labels, logits [rows, own labels], targets; IGNORED where a row lacks the label) of each head."""
    logits, true = outcomes.matrix(len(head.labels)), targets.matrix(len(head.facts["heads"])).astype(np.int64)
    start = 0
    for place, (name, size) in enumerate(head.facts["heads"]):
        own = tuple(label.removeprefix(f"{name}=") for label in head.labels[start : start + size])
        yield name, own, logits[:, start : start + size], true[:, place]
        start += size


def least_margin(head: Head) -> float | None:
    """Margin over no answer above which an answer is given; None where each question has one."""
    return float(head.facts.get("threshold", 0.0)) if head.facts.get("no_answer") else None


def answers_of(outcomes: Ragged, head: Head) -> tuple[Floats, Floats, Bools, Bools]:
    """For each question: F1, exact match, whether an answer is given, whether there is one. Where there is none, giving
    none scores 1."""
    rows, least = outcomes.matrix(7), least_margin(head)
    given = ~(rows[:, 2] <= (-np.inf if least is None else least))  # one that is no number too: it is wrong
    there = rows[:, 3] > 0
    f1, exact = (np.where(given & there, rows[:, column], ~given & ~there) for column in (0, 1))
    return f1.astype(np.float64), exact.astype(np.float64), given, there


def tags_of(outcomes: Ragged, targets: Ragged) -> tuple[list[Any], list[Any]]:
    """For each row the numbers of its words' true tags, and of the tags that were found."""
    return [entities.true_tags(row)[0] for row in targets], [row.reshape(-1, 3)[:, 0] for row in outcomes]


def names_of(rows: Sequence[Any], head: Head) -> list[list[str]]:
    """Tags by their numbers. A tag that the head lacks (-1) is shown as outside: no answer to it can be right."""
    return [[head.labels[int(place)] if place >= 0 else "O" for place in row] for row in rows]


def sentences_of(outcomes: Ragged, targets: Ragged) -> tuple[Bools, Bools, Floats, Ints]:
    """For each sentence of all rows: taken by the oracle; in the summary; its chance; its tenth of the document."""
    rows = [
        (summary_rows.sentences_of(wanted).taken, *summary_rows.answered(row))
        for row, wanted in zip(outcomes, targets, strict=True)
    ]
    tenths = [np.arange(len(taken)) * TENTHS // max(1, len(taken)) for taken, _, _ in rows]
    return (
        np.concatenate([taken for taken, _, _ in rows] or [np.empty(0, np.bool_)]),
        np.concatenate([given for _, _, given in rows] or [np.empty(0, np.bool_)]),
        np.concatenate([chances for _, chances, _ in rows] or [np.empty(0)]),
        np.concatenate(tenths or [np.empty(0, np.int64)]),
    )


# -------------------------------------------------------------------------------------------------------------- shared


def _of_classes(chances: Floats, true: Ints, names: Sequence[str], given: Ints | None = None) -> dict[str, Any]:
    """`given`: the predicted class of each row, by default the most probable. A row whose chances are no numbers is
    given none: it is one more of its class, and stands in no column of the confusion."""
    given = classification.best(chances) if given is None else given
    answered = given >= 0
    counts = classification.confusion(true[answered], given[answered], len(names))
    missed = np.bincount(true[~answered & (true >= 0)], minlength=len(names))
    _, found = classification.auc(true, chances)
    areas = [None if area is None or np.isnan(area) else area for area in found]
    each = zip(names, classification.per_class(counts, missed), areas, strict=True)
    return {
        **_listed([{"class": name, **scores._asdict(), "auc": area} for name, scores, area in each]),
        **_confusion(counts, names),
        "calibration": _calibration(chances.max(axis=1), chances.argmax(axis=1) == true),
    }


def _listed(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst F1 first; of equals, the more frequent class first. Classes that neither occur nor are predicted come
    last."""
    each.sort(key=lambda one: (not one["support"] + one["predicted"], one["f1"], -one["support"]))
    return {"classes": len(each), "per_class": each[:MOST_CLASSES]}


def _confusion(counts: Ints, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts[:-1] - np.diag(np.diag(counts[:-1]))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [(int(place) // len(names), int(place) % len(names)) for place in order]
    found: dict[str, Any] = {
        "confused": [
            {"true": names[row], "predicted": names[column], "rows": int(wrong[row, column])}
            for row, column in pairs
            if wrong[row, column]
        ]
    }
    if len(names) <= MOST_CONFUSED:
        found["confusion"] = {
            "labels": list(names),
            "counts": counts[:-1].tolist(),
            "without_class": counts[-1].tolist(),
        }
    return found


def _calibration(confidence: Floats, right: Bools) -> dict[str, Any]:
    return {
        "ece": calibration.expected_calibration_error(confidence, right),
        "bins": [one._asdict() for one in calibration.reliability(confidence, right)],
    }


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-logits.clip(-700, 700)))
    return found
