"""Messages of events about a run's rows and scores: a line of text per kind of event, by `FORMATTERS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rtrain.core.errors import quote_value
from rtrain.metrics.scores import LENGTH_COLUMN
from rtrain.metrics.slices import MIN_ROWS

Event = dict[str, Any]
MAX_SMALL_SLICES = 5
"""Small slices listed in a line."""
MAX_HEAD_LABELS = 8
"""Labels of a fine-tuned model listed in a line."""
MIN_UNKNOWN_SHARE, MIN_PIECES_SHARE = 0.005, 0.1
"""Least shares of unknown tokens, and of rows with split words, that are reported."""
SPLIT_NAMES = {"valid": "validation", "test": "test"}


def format_evaluated(event: Event) -> str:
    """Format the scores of a split; those of the best weights, at the end, have their step."""
    scores = _format_scores(event["scores"])
    scores += f"  loss {event['loss']:.4f}" if event.get("loss") is not None else ""
    split, step, thresholds = event["split"], event["step"], event.get("calibration")
    if split == "valid" and not thresholds:
        head = f"update {step}  {split}"
    else:
        settings_text = ", ".join(
            f"{name} {_format_range(value)}" for name, value in (thresholds or {}).items() if value
        )
        head = f"{split}, by the weights of update {step}" + (f" and {settings_text}" if settings_text else "")
    return f"{head}: {scores}  ({event['scores']['rows']} rows)"


def format_best(event: Event) -> str:
    """Which evaluation's weights are the run's, and why: its score, or what parts it from others of that score."""
    name, sign = event["headline"].removeprefix("neg_"), -1 if event["headline"].startswith("neg_") else 1
    score, text = f"{name} {sign * event['score']:.4f}", f"best of {event['num_evaluations']}: update {event['step']}"
    if event["reason"] == "score":
        return f"{text}, {score}"
    return f"{text}, a tie by {score}, {'of the lower loss' if event['reason'] == 'loss' else 'the first of them'}"


def format_head(event: Event) -> str:
    """That the folder's head is not taken over, since it answers other labels."""
    answers = event["answers"]
    answer_list = ", ".join(answers[:MAX_HEAD_LABELS]) + (", ..." if len(answers) > MAX_HEAD_LABELS else "")
    return f"the model's head is begun anew: it answered {answer_list}, which are not the labels of the rows"


def format_tokenizer(event: Event) -> str:
    """That the folder's tokenizer files contradict each other."""
    return (
        f"{event['model']}: tokenizer_config.json and tokenizer.json disagree on the tokens of "
        f"{len(event['differing'])} of {event['texts']} test texts, e.g. {quote_value(event['differing'][0])}; "
        "rtrain and its artifact read tokenizer.json"
    )


def format_labels(event: Event) -> str:
    """Format the labels of the training rows."""
    if event["target_kind"] == "numbers":
        return f"numbers from {event['low']:g} to {event['high']:g}, mean {event['mean']:.4g} ({event['rows']:,} rows)"
    if event["target_kind"] == "questions":
        unanswered = event["rows"] - event["answered"]
        return f"{event['rows']:,} questions, {unanswered:,} of them without an answer in the tokens that are read"
    frequent_text, rarest = (
        ", ".join(f"{name} {rows:,}" for name, rows in event[part]) for part in ("most_frequent", "rarest")
    )
    label_list = f"{frequent_text}, ... the rarest {rarest}" if rarest else frequent_text or "none"
    if event["target_kind"] == "entities":
        return (
            f"{event['rows_with_entities']:,} of {event['rows']:,} training rows have entities, of "
            f"{_format_type_count(event)}: {label_list}"
        )
    head = f"{event['head']}: " if "head" in event else ""
    per_row_text = ""
    if "labels_per_row" in event:
        per_row_text = f", {event['labels_per_row']:.2f} per row ({event['rows_without_labels']:,} rows have none)"
    # As Python writes them, without signs that are not shown: in other form they would look the same.
    similar_text = "; ".join(" and ".join(map(ascii, group)) for group in event.get("similar", ()))
    warning_text = (
        f"; labels that look alike, and are learned as different ones: {similar_text}" if similar_text else ""
    )
    if missing := ", ".join(map(repr, event.get("missing_value_names", ()))):
        warning_text += f"; labels that may stand for a missing value, and are learned: {missing}"
    return f"{head}{event['label_count']} labels{per_row_text}: {label_list}{warning_text}"


def format_quarantined_rows(event: Event) -> str:
    """Why rows were set aside: the most frequent reasons, each with a place to look at."""
    reasons_text = "; ".join(
        f"{reason['rows']:,} x {reason['reason']} ({reason['location']})" for reason in event["reasons"]
    )
    listed_rows = sum(reason["rows"] for reason in event["reasons"])
    more_text = f"; {event['rows'] - listed_rows:,} for other reasons" if listed_rows < event["rows"] else ""
    text = f"set aside: {reasons_text}{more_text}"
    return f"{text}; listed in {event['file']}" if Path(event["file"]).is_file() else text


def format_vocabulary(event: Event) -> str:
    """How many pieces are left, and how many rows are read otherwise for it."""
    changed = ", ".join(f"{rows:,} {split}" for split, rows in event["changed_rows"].items())
    return (
        f"vocabulary: {event['size']:,} of {event['original_size']:,} tokens; rows that are read otherwise: {changed}"
    )


def format_unlabeled(event: Event) -> str:
    """How many rows without a label are trained on, and why others are not."""
    reasons = (
        ("low_confidence", f"with a teacher confidence below {event['confidence']:g}"),
        ("duplicates", "with the texts of labelled rows"),
        ("bad", "that cannot be used"),
    )
    excluded_text = "; ".join(f"{event[name]:,} {why}" for name, why in reasons if event[name])
    return (
        f"{event['rows']:,} rows without a label are trained "
        f"on{f'; left out: {excluded_text}' if excluded_text else ''}"
    )


def format_overlap(event: Event) -> str:
    """How many rows of a split are training rows too, and where some of them are."""
    split_rows = f"{SPLIT_NAMES[event['split']]} rows"
    return (
        f"WARNING: {event['trained_rows']:,} of {event['rows']:,} {split_rows} are training rows too, but for case, "
        "blanks and "
        f"punctuation: {event['row_places']}. The score without them will stand beside the score"
    )


def format_texts(event: Event) -> str | None:
    """Format truncated rows, unknown tokens and split words."""
    parts = []
    if event["truncated_rows"]:
        share = event["truncated_rows"] / event["rows"]
        parts.append(f"{event['truncated_rows']:,} of {event['rows']:,} rows ({share:.1%}) are cut at {event['limit']}")
    if (event["unknown_token_share"] or 0) >= MIN_UNKNOWN_SHARE:
        parts.append(f"{event['unknown_token_share']:.1%} of the tokens are unknown to the model's vocabulary")
    if (event["split_word_share"] or 0) >= MIN_PIECES_SHARE:
        parts.append(
            f"in {event['split_word_share']:.0%} of the training rows the vocabulary cuts most words to pieces: "
            "--model with a "
            "model for their language or field may do better"
        )
    return "; ".join(parts) or None


def format_conflicts(event: Event) -> str:
    """How many training rows have the text of another one and another label."""
    texts = "1 text" if event["texts"] == 1 else f"{event['texts']:,} texts"
    return (
        f"WARNING: {event['rows']:,} training rows have the text of another row and another label ({texts}): "
        f"{event['places']}"
    )


def format_unseen(event: Event) -> str:
    """The scores without the rows that are training rows too."""
    text = f"{event['split']} without the {event['in_training_set']:,} rows that are training rows too: "
    return (
        f"{text}{_format_scores(event['scores'])}  ({event['rows']} rows)" if event["rows"] else f"{text}no row is left"
    )


def format_running_text(event: Event) -> str:
    """Format the scores on running text."""
    scores_text = _format_scores({f"running_text_{name}": value for name, value in event["scores"].items()})
    return f"{event['split']}, words put together as running text and cut as requests are: {scores_text}"


def format_collapsed(event: Event) -> str:
    """That the model answers one thing to almost all rows."""
    return (
        f"WARNING: the model answers {quote_value(event['answer'])} to {event['rows']:,} of {event['total_rows']:,} "
        f"{SPLIT_NAMES[event['split']]} rows, and to {event['other_rows_with_answer']:,} of the "
        f"{event['other_rows']:,} whose right "
        "answer is "
        "another one. Compare it with the baselines in the report; search optim.lr, or add rows of the other answers"
    )


def format_words_without_tokens(event: Event) -> str:
    """How many words the model does not see."""
    split = SPLIT_NAMES[event["split"]]
    return f"{event['words']:,} words of the {split} rows have no token: each counts as answered O"


def format_sliced(event: Event) -> str | None:
    """The slices of the test rows that are too small to be judged; quarters by length are all alike in that."""
    small = [
        (f"{column} {value or '(empty)'}", slice_scores["rows"], _headline_value(slice_scores))
        for column, values in event["slices"].items()
        for value, slice_scores in values.items()
        if column != LENGTH_COLUMN and len(values) > 1 and slice_scores["rows"] < MIN_ROWS
    ]
    if event["split"] != "test" or not small:
        return None
    slices_text = ", ".join(f"{name} ({rows} rows, {score:.3f})" for name, rows, score in small[:MAX_SMALL_SLICES])
    more_text = f" and {len(small) - MAX_SMALL_SLICES} more" if len(small) > MAX_SMALL_SLICES else ""
    subject = "1 slice has" if len(small) == 1 else f"{len(small)} slices have"
    return f"{subject} fewer than {MIN_ROWS} rows: not judged: {slices_text}{more_text}"


def _headline_value(scores: Mapping[str, float]) -> float:
    """The only score beside the number of rows; of the negative of an error, the error."""
    return next(-score if name.startswith("neg_") else score for name, score in scores.items() if name != "rows")


def _format_scores(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in scores.items() if name != "rows")


def _format_range(value: float | dict[str, float]) -> str:
    """A threshold, or the lowest and the highest of several."""
    return f"{value:.4f}" if isinstance(value, float) else f"{min(value.values()):.4f} to {max(value.values()):.4f}"


def _format_type_count(event: Event) -> str:
    return f"{event['label_count']} type{'' if event['label_count'] == 1 else 's'}"


def format_strategy(event: Event) -> str:
    """How the model lies on the workers, and why so."""
    return f"strategy: {event['reason']}"


def format_event(event: Event) -> str | None:
    """Format the line of an event, or None. Trials have the same rows, so only the first prints events about rows."""
    kind = event["kind"]
    if kind not in FORMATTERS or (kind in ROW_EVENTS and event.get("trial")):
        return None
    return FORMATTERS[kind](event)


ROW_EVENTS = (
    *("quarantined_rows", "unlabeled", "head", "labels", "overlap", "vocabulary", "tokenizer", "texts"),
    "conflicts",
)
"""Kinds of events about the rows."""
FORMATTERS: Mapping[str, Callable[[Event], str | None]] = {
    "quarantined_rows": format_quarantined_rows,
    "head": format_head,
    "tokenizer": format_tokenizer,
    "labels": format_labels,
    "overlap": format_overlap,
    "texts": format_texts,
    "conflicts": format_conflicts,
    "unlabeled": format_unlabeled,
    "vocabulary": format_vocabulary,
    "strategy": format_strategy,
    "unseen": format_unseen,
    "running_text": format_running_text,
    "collapsed": format_collapsed,
    "sliced": format_sliced,
    "words_without_tokens": format_words_without_tokens,
    "evaluated": format_evaluated,
    "best": format_best,
}
