"""Texts of events: a line for each kind of event, by `FORMATTERS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rtrain.core.errors import quote_value
from rtrain.metrics.operating_points import format_operating_point
from rtrain.metrics.scores import LENGTH_COLUMN, MIN_ROWS

Event = dict[str, Any]
MAX_SMALL_SLICES = 5
"""Small slices listed in a line."""
MAX_HEAD_LABELS = 8
"""Labels of a fine-tuned model listed in a line."""
MIN_UNKNOWN_SHARE, MIN_PIECES_SHARE = 0.005, 0.1
"""Least shares of unknown tokens, and of rows with split words, that are reported."""
SPLIT_NAMES = {"valid": "validation", "test": "test"}


def format_evaluated(event: Event) -> str:
    scores = _format_scores(event["scores"])
    scores += f"  loss {event['loss']:.4f}" if event.get("loss") is not None else ""
    split, step, thresholds = event["split"], event["step"], event.get("calibration")
    if split == "valid" and not thresholds:
        head = f"step {step}  {split}"
    else:
        settings_text = ", ".join(
            f"{name} {_format_range(value)}" for name, value in (thresholds or {}).items() if value
        )
        head = f"{split}, by the weights of step {step}" + (f" and {settings_text}" if settings_text else "")
    return f"{head}: {scores}  ({event['scores']['rows']} rows)"


def format_best(event: Event) -> str:
    name, sign = event["headline"].removeprefix("neg_"), -1 if event["headline"].startswith("neg_") else 1
    score, text = f"{name} {sign * event['score']:.4f}", f"best of {event['num_evaluations']}: step {event['step']}"
    if event["reason"] == "score":
        return f"{text}, {score}"
    return f"{text}, a tie by {score}, {'of the lower loss' if event['reason'] == 'loss' else 'the first of them'}"


def format_head(event: Event) -> str:
    answers = event["answers"]
    answer_list = ", ".join(answers[:MAX_HEAD_LABELS]) + (", ..." if len(answers) > MAX_HEAD_LABELS else "")
    return f"the model's head is begun anew: it answered {answer_list}, which are not the labels of the rows"


def format_tokenizer(event: Event) -> str:
    return (
        f"{event['model']}: tokenizer_config.json and tokenizer.json disagree on the tokens of "
        f"{len(event['differing'])} of {event['texts']} test texts, e.g. {quote_value(event['differing'][0])}; "
        "rtrain and its artifact read tokenizer.json"
    )


def format_labels(event: Event) -> str:
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
    reasons_text = "; ".join(
        f"{reason['rows']:,} x {reason['reason']} ({reason['location']})" for reason in event["reasons"]
    )
    listed_rows = sum(reason["rows"] for reason in event["reasons"])
    more_text = f"; {event['rows'] - listed_rows:,} for other reasons" if listed_rows < event["rows"] else ""
    text = f"set aside: {reasons_text}{more_text}"
    return f"{text}; listed in {event['file']}" if Path(event["file"]).is_file() else text


def format_selected_rows(event: Event) -> str:
    texts = (("left_out", "rows are left out"), ("relabeled", "rows have another label by data.labels"))
    return "; ".join(f"{event[name]:,} {text}" for name, text in texts if event[name])


def format_vocabulary(event: Event) -> str:
    changed = ", ".join(f"{rows:,} {split}" for split, rows in event["changed_rows"].items())
    return (
        f"vocabulary: {event['size']:,} of {event['original_size']:,} tokens; rows that are read otherwise: {changed}"
    )


def format_unlabeled(event: Event) -> str:
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
    split_rows = f"{SPLIT_NAMES[event['split']]} rows"
    return (
        f"WARNING: {event['trained_rows']:,} of {event['rows']:,} {split_rows} are training rows too, but for case, "
        f"blanks and punctuation: {event['row_places']}. The score without them will stand beside the score"
    )


def format_texts(event: Event) -> str | None:
    parts = []
    if event["truncated_rows"]:
        share = event["truncated_rows"] / event["rows"]
        parts.append(f"{event['truncated_rows']:,} of {event['rows']:,} rows ({share:.1%}) are cut at {event['limit']}")
    if (event["unknown_token_share"] or 0) >= MIN_UNKNOWN_SHARE:
        parts.append(f"{event['unknown_token_share']:.1%} of the tokens are unknown to the model's vocabulary")
    if (event["split_word_share"] or 0) >= MIN_PIECES_SHARE:
        parts.append(
            f"in {event['split_word_share']:.0%} of the training rows the vocabulary cuts most words to pieces: "
            "--model with a model for their language or field may do better"
        )
    return "; ".join(parts) or None


def format_conflicts(event: Event) -> str:
    texts = "1 text" if event["texts"] == 1 else f"{event['texts']:,} texts"
    return (
        f"WARNING: {event['rows']:,} training rows have the text of another row and another label ({texts}): "
        f"{event['places']}"
    )


def format_unseen(event: Event) -> str:
    text = f"{event['split']} without the {event['in_training_set']:,} rows that are training rows too: "
    return (
        f"{text}{_format_scores(event['scores'])}  ({event['rows']} rows)" if event["rows"] else f"{text}no row is left"
    )


def format_running_text(event: Event) -> str:
    scores_text = _format_scores({f"running_text_{name}": value for name, value in event["scores"].items()})
    return f"{event['split']}, words put together as running text and cut as requests are: {scores_text}"


def format_collapsed(event: Event) -> str:
    when = f"step {event['step']}: " if "step" in event else ""
    return (
        f"WARNING: {when}the model answers {quote_value(event['answer'])} to {event['rows']:,} of "
        f"{event['total_rows']:,} {SPLIT_NAMES[event['split']]} rows, and to {event['other_rows_with_answer']:,} of "
        f"the {event['other_rows']:,} whose right answer is another one. Compare it with the baselines in the report; "
        "search optim.lr, change the weights of labels (train.class_weights), or add rows of the other answers"
    )


def format_words_without_tokens(event: Event) -> str:
    split = SPLIT_NAMES[event["split"]]
    return f"{event['words']:,} words of the {split} rows have no token: each counts as answered O"


def format_sliced(event: Event) -> str | None:
    """Format the test slices with too few rows; quarters by length have equally many."""
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


def format_rows(event: Event) -> str:
    rows, bad_rows = event["rows"], event["quarantined"]
    text = f"{rows['train']:,} training, {rows['valid']:,} validation, {rows['test']:,} test rows"
    text += ", tokens reused" if event["kind"] == "tokens_reused" else ""
    if bad_rows:
        quarantine_path = Path(event["store"]) / "quarantine.parquet"
        text += f"; {bad_rows:,} bad row{'s' if bad_rows > 1 else ''} set aside, with reasons in {quarantine_path}"
    return text


def format_crash(event: Event) -> str:
    hung = f"; stack of the hang: {', '.join(event['hang_tracebacks'])}" if event["hang_tracebacks"] else ""
    return f"{event['cause']}: {event['error']}{hung}; going on from step {event['resumes_from']}"


def format_threads(event: Event) -> str:
    rank = event["short_ranks"][0]
    return (
        f"{event['available'][rank]} threads for worker {rank} in place of {event['threads_by_rank'][rank]} as before, "
        "as its cores are fewer: the weights differ in their last bits from those of an undisturbed run"
    )


def format_waiting(event: Event) -> str:
    needs_text = f"{event['workers']} workers" if event["workers"] else "train.min_workers"
    counts = f"the cluster has {event['total_workers']} {event['needs']}s, {event['free_workers']} of them free"
    if event.get("is_starting"):
        return f"waiting for {needs_text} to start; {counts}"
    request_text = f"; {event['autoscaler_request']}" if event.get("autoscaler_request") else ""
    return f"waiting for {event['needs']}: too few for {needs_text}; {counts}{request_text}"


def format_case(event: Event) -> str:
    figures = event["measurement"]
    ratios = f"weights {figures['weights_ratio']:.1e}, gradient {figures['gradient_ratio']:.1e}"
    return f"{event['name']}: {ratios}  ({figures['seconds']:.1f} s)"


def format_start(event: Event) -> str:
    rate = f", learning rate {event['lr']:.3g} at its peak" if "lr" in event else ""
    workers = f"{event['workers']} worker{'' if event['workers'] == 1 else 's'}"
    device_text = f" on {event['device']}" if "device" in event else ""
    rows = f", {event['global_batch_size']} rows per step" if "global_batch_size" in event else ""
    return f"{workers}{device_text}, {event['precision']}{rows}{rate}, from step {event['step']}"


def format_answered(event: Event) -> str:
    speed = event["rows_per_second"]
    pace = "" if speed is None else f"  {speed:,.0f} rows/s  {event['left_s']:.0f} s left"
    return f"row {event['rows']:,}/{event['of']:,}{pace}"


def _headline_value(scores: Mapping[str, float]) -> float:
    """Return the only score besides the number of rows; the error itself for a negated error."""
    return next(-score if name.startswith("neg_") else score for name, score in scores.items() if name != "rows")


def _format_scores(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in scores.items() if name != "rows")


def _format_range(value: float | dict[str, float] | list[int]) -> str:
    """Format a threshold, the lowest and the highest of several, or a list of steps."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4f}" if isinstance(value, float) else f"{min(value.values()):.4f} to {max(value.values()):.4f}"


def _format_type_count(event: Event) -> str:
    return f"{event['label_count']} type{'' if event['label_count'] == 1 else 's'}"


def format_event(event: Event) -> str | None:
    """Format the line of an event, or None. Trials have the same rows, so only the first prints events about rows."""
    kind = event["kind"]
    if kind not in FORMATTERS or (kind in ROW_EVENTS and event.get("trial")):
        return None
    return FORMATTERS[kind](event)


ROW_EVENTS = (
    *("quarantined_rows", "unlabeled", "head", "labels", "overlap", "vocabulary", "tokenizer", "texts"),
    *("conflicts", "selected_rows"),
)
"""Kinds of events about the rows."""
FORMATTERS: Mapping[str, Callable[[Event], str | None]] = {
    "tokenized": format_rows,
    "tokens_reused": format_rows,
    "quarantined_rows": format_quarantined_rows,
    "selected_rows": format_selected_rows,
    "head": format_head,
    "tokenizer": format_tokenizer,
    "labels": format_labels,
    "overlap": format_overlap,
    "texts": format_texts,
    "conflicts": format_conflicts,
    "unlabeled": format_unlabeled,
    "vocabulary": format_vocabulary,
    "embedding_rows": lambda event: (
        f"word embedding: the {event['used']:,} used of {event['total']:,} rows are trained; the others only decay"
    ),
    "strategy": lambda event: f"strategy: {event['reason']}",
    "unseen": format_unseen,
    "running_text": format_running_text,
    "collapsed": format_collapsed,
    "sliced": format_sliced,
    "words_without_tokens": format_words_without_tokens,
    "evaluated": format_evaluated,
    "best": format_best,
    "early_stop": lambda event: (
        f"ended at step {event['step']:,} of {event['total_steps']:,}: {event['patience']} evaluation"
        f"{'' if event['patience'] == 1 else 's'} without a better one than that of step {event['best_step']}"
    ),
    "operating_point": lambda event: format_operating_point(event, SPLIT_NAMES[event["split"]]),
    "crashed": format_crash,
    "step_skipped": lambda event: (
        f"step {event['step'] + 1}: the gradient is infinite in fp16; once more with loss scale {event['scale']:g}"
    ),
    "device": lambda event: str(event["reason"]),
    "micro_batch_size_decided": lambda event: (
        f"micro-batches of at most {event['tokens']:,} tokens, the limit of the GPU's memory"
    ),
    "speeds": lambda event: (
        f"rows are dealt by the workers' speeds: {', '.join(f'{speed:.2f}' for speed in event['speeds'])} of the "
        "fastest"
    ),
    "threads": format_threads,
    "micro_batch_shrunk": lambda event: f"passes of at most {event['tokens']:,} tokens, as a start ran out of memory",
    "restart_requested": lambda event: (
        f"{event['reason']}: stopped at step {event['step']} with a checkpoint, and going on from it"
    ),
    "quarantined": lambda event: f"{event['checkpoint']} does not verify ({event['reason']}): set aside",
    "best_lost": lambda event: (
        f"the best checkpoint, of step {event['step']}, does not verify: the best is sought anew"
    ),
    "remote_copy_incomplete": lambda event: f"not copied: {event['error']} The next save tries again.",
    "storage_unreachable": lambda event: (
        f"{event['error']} Continuing from the local checkpoint, step {event['step']}; the next save tries again."
    ),
    "gradient_compression": lambda event: (
        f"gradients are sent in fewer bits, with an error of {event['error']:.1e} of their norm"
    ),
    "waiting": format_waiting,
    "case": format_case,
    "stage": lambda event: str(event["text"]),
}
STATUS_FORMATTERS: Mapping[str, Callable[[Event], str]] = {
    "phase_started": lambda event: str(event["text"]),
    "started": format_start,
    "first_rows": lambda event: "the first rows are there",
    "writing": lambda event: "writing predictions, scores and the artifact",
    "answered": format_answered,
}
"""Events whose text replaces the live line."""
