"""What a user is told of a run's rows and scores: a line of text for each kind of event, by `TEXTS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rtrain.core.errors import quoted
from rtrain.metrics.scores import LENGTH
from rtrain.metrics.slices import LEAST

Event = dict[str, Any]
MOST_SMALL = 5
"""Small slices that are named in a line."""
MOST_ANSWERS = 8
"""Labels of a model that is trained further that are named in a line."""
LEAST_UNKNOWN, LEAST_PIECES = 0.005, 0.1
"""Shares of unknown tokens, and of rows whose words are cut to pieces, from which on a line says so."""
SPLITS = {"valid": "validation", "test": "test"}


def evaluated(event: Event) -> str:
    """The scores of a split. Those of the best weights, at the end, say of which update these are."""
    scores = _scores(event["scores"])
    scores += f"  loss {event['loss']:.4f}" if event.get("loss") is not None else ""
    split, update, chosen = event["split"], event["update"], event.get("chosen")
    if split == "valid" and not chosen:
        head = f"update {update}  {split}"
    else:
        by = ", ".join(f"{name} {_range(value)}" for name, value in (chosen or {}).items() if value)
        head = f"{split}, by the weights of update {update}" + (f" and {by}" if by else "")
    return f"{head}: {scores}  ({event['scores']['rows']} rows)"


def best(event: Event) -> str:
    """Which evaluation's weights are the run's, and why: its score, or what parts it from others of that score."""
    name, sign = event["headline"].removeprefix("neg_"), -1 if event["headline"].startswith("neg_") else 1
    score, text = f"{name} {sign * event['score']:.4f}", f"best of {event['of']}: update {event['update']}"
    if event["why"] == "score":
        return f"{text}, {score}"
    return f"{text}, a tie by {score}, {'of the lower loss' if event['why'] == 'loss' else 'the first of them'}"


def head(event: Event) -> str:
    """That the folder's head is not taken over, since it answers other labels."""
    answers = event["answers"]
    named = ", ".join(answers[:MOST_ANSWERS]) + (", ..." if len(answers) > MOST_ANSWERS else "")
    return f"the model's head is begun anew: it answered {named}, which are not the labels of the rows"


def tokenizer(event: Event) -> str:
    """That the folder's tokenizer files contradict each other."""
    return (
        f"{event['model']}: tokenizer_config.json and tokenizer.json disagree on the tokens of "
        f"{len(event['differing'])} of {event['texts']} test texts, e.g. {quoted(event['differing'][0])}; "
        "rtrain and its artifact read tokenizer.json"
    )


def labels(event: Event) -> str:
    """What the training rows are labelled with."""
    if event["of"] == "numbers":
        return f"numbers from {event['low']:g} to {event['high']:g}, mean {event['mean']:.4g} ({event['rows']:,} rows)"
    if event["of"] == "questions":
        without = event["rows"] - event["answered"]
        return f"{event['rows']:,} questions, {without:,} of them without an answer in what is read"
    most, rarest = (", ".join(f"{name} {rows:,}" for name, rows in event[part]) for part in ("most", "rarest"))
    named = f"{most}, ... the rarest {rarest}" if rarest else most or "none"
    if event["of"] == "entities":
        return f"{event['marked']:,} of {event['rows']:,} training rows have entities, of {_types(event)}: {named}"
    head = f"{event['head']}: " if "head" in event else ""
    several = ""
    if "per_row" in event:
        several = f", {event['per_row']:.2f} per row ({event['without']:,} rows have none)"
    # As Python writes them, without signs that are not shown: in other form they would look the same.
    same = "; ".join(" and ".join(map(ascii, group)) for group in event.get("alike", ()))
    doubt = f"; labels that look alike, and are learned as different ones: {same}" if same else ""
    if missing := ", ".join(map(repr, event.get("missing", ()))):
        doubt += f"; labels that may stand for a missing value, and are learned: {missing}"
    return f"{head}{event['number']} labels{several}: {named}{doubt}"


def bad_rows(event: Event) -> str:
    """Why rows were set aside: the most frequent reasons, each with a place to look at."""
    named = "; ".join(f"{one['rows']:,} x {one['reason']} ({one['place']})" for one in event["reasons"])
    told = sum(one["rows"] for one in event["reasons"])
    more = f"; {event['rows'] - told:,} for other reasons" if told < event["rows"] else ""
    text = f"set aside: {named}{more}"
    return f"{text}; listed in {event['file']}" if Path(event["file"]).is_file() else text


def vocabulary(event: Event) -> str:
    """How many pieces are left, and how many rows are read otherwise for it."""
    changed = ", ".join(f"{rows:,} {split}" for split, rows in event["changed"].items())
    return f"vocabulary: {event['pieces']:,} of {event['of']:,} pieces; rows that are read otherwise: {changed}"


def unlabelled(event: Event) -> str:
    """How many rows without a label are trained on, and why others are not."""
    reasons = (
        ("unsure", f"of which the teacher is less sure than {event['confidence']:g}"),
        ("repeated", "with the texts of labelled rows"),
        ("bad", "that cannot be used"),
    )
    left_out = "; ".join(f"{event[name]:,} {why}" for name, why in reasons if event[name])
    return f"{event['rows']:,} rows without a label are trained on{f'; left out: {left_out}' if left_out else ''}"


def overlap(event: Event) -> str:
    """How many rows of a split are training rows too, and where some of them are."""
    of = f"{SPLITS[event['split']]} rows"
    return (
        f"WARNING: {event['seen']:,} of {event['rows']:,} {of} are training rows too, but for case, blanks and "
        f"punctuation: {event['places']}. The score without them will stand beside the score"
    )


def texts(event: Event) -> str | None:
    """What the model cannot read of the texts: their ends, unknown tokens, words in many pieces."""
    parts = []
    if event["cut"]:
        share = event["cut"] / event["rows"]
        parts.append(f"{event['cut']:,} of {event['rows']:,} rows ({share:.1%}) are cut at {event['limit']}")
    if (event["unknown"] or 0) >= LEAST_UNKNOWN:
        parts.append(f"{event['unknown']:.1%} of the tokens are unknown to the model's vocabulary")
    if (event["pieces"] or 0) >= LEAST_PIECES:
        parts.append(
            f"in {event['pieces']:.0%} of the training rows the vocabulary cuts most words to pieces: --model with a "
            "model for their language or field may do better"
        )
    return "; ".join(parts) or None


def conflicts(event: Event) -> str:
    """How many training rows have the text of another one and another label."""
    texts = "1 text" if event["texts"] == 1 else f"{event['texts']:,} texts"
    return (
        f"WARNING: {event['rows']:,} training rows have the text of another row and another label ({texts}): "
        f"{event['places']}"
    )


def unseen(event: Event) -> str:
    """The scores without the rows that are training rows too."""
    text = f"{event['split']} without the {event['seen']:,} rows that are training rows too: "
    return f"{text}{_scores(event['scores'])}  ({event['rows']} rows)" if event["rows"] else f"{text}no row is left"


def running_text(event: Event) -> str:
    """What the answers to running text are worth, beside the scores by the rows' own words."""
    scored = _scores({f"running_text_{name}": value for name, value in event["scores"].items()})
    return f"{event['split']}, words put together as running text and cut as requests are: {scored}"


def collapsed(event: Event) -> str:
    """That the model answers one thing to almost all rows."""
    return (
        f"WARNING: the model answers {quoted(event['answer'])} to {event['rows']:,} of {event['of']:,} "
        f"{SPLITS[event['split']]} rows, and to {event['given']:,} of the {event['others']:,} whose right answer is "
        "another one. Compare it with the baselines in the report; search optim.lr, or add rows of the other answers"
    )


def words_without_tokens(event: Event) -> str:
    """How many words the model does not see."""
    split = SPLITS[event["split"]]
    return f"{event['words']:,} words of the {split} rows have no token: each counts as answered O"


def sliced(event: Event) -> str | None:
    """The slices of the test rows that are too small to be judged; quarters by length are all alike in that."""
    small = [
        (f"{column} {value or '(empty)'}", one["rows"], _headline(one))
        for column, every in event["slices"].items()
        for value, one in every.items()
        if column != LENGTH and len(every) > 1 and one["rows"] < LEAST
    ]
    if event["split"] != "test" or not small:
        return None
    named = ", ".join(f"{name} ({rows} rows, {score:.3f})" for name, rows, score in small[:MOST_SMALL])
    more = f" and {len(small) - MOST_SMALL} more" if len(small) > MOST_SMALL else ""
    have = "1 slice has" if len(small) == 1 else f"{len(small)} slices have"
    return f"{have} fewer than {LEAST} rows: not judged: {named}{more}"


def _headline(scores: Mapping[str, float]) -> float:
    """The only score beside the number of rows; of the negative of an error, the error."""
    return next(-score if name.startswith("neg_") else score for name, score in scores.items() if name != "rows")


def _scores(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in scores.items() if name != "rows")


def _range(value: float | dict[str, float]) -> str:
    """A threshold, or the lowest and the highest of several."""
    return f"{value:.4f}" if isinstance(value, float) else f"{min(value.values()):.4f} to {max(value.values()):.4f}"


def _types(event: Event) -> str:
    return f"{event['number']} type{'' if event['number'] == 1 else 's'}"


def strategy(event: Event) -> str:
    """How the model lies on the workers, and why so."""
    return f"strategy: {event['why']}"


def of(event: Event) -> str | None:
    """The line of an event; None where there is none. The trials of a search have the same rows: the first tells."""
    kind = event["kind"]
    if kind not in TEXTS or (kind in ROWS and event.get("trial")):
        return None
    return TEXTS[kind](event)


ROWS = (
    *("bad_rows", "unlabelled", "head", "labels", "overlap", "vocabulary", "tokenizer", "texts"),
    "conflicts",
)
"""Kinds that are about the rows, not about what was learned from them."""
TEXTS: Mapping[str, Callable[[Event], str | None]] = {
    "bad_rows": bad_rows,
    "head": head,
    "tokenizer": tokenizer,
    "labels": labels,
    "overlap": overlap,
    "texts": texts,
    "conflicts": conflicts,
    "unlabelled": unlabelled,
    "vocabulary": vocabulary,
    "strategy": strategy,
    "unseen": unseen,
    "running_text": running_text,
    "collapsed": collapsed,
    "sliced": sliced,
    "words_without_tokens": words_without_tokens,
    "evaluated": evaluated,
    "best": best,
}
