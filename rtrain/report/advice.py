"""Recommendations for a run: pure rules from the run's facts to a recommendation or None.

A recommendation has an action, the figure that is its reason, and optionally a command. The rules have the order of the
page: repairs, then improvements of the score, then the path to the endpoint.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from rtrain.report.page import Recommendation
from rtrain.report.svg import format_significant, truncate

MAX_RECOMMENDATIONS = 6
"""Most repairs and improvements; users ignore longer lists. The path to the endpoint is added."""
MIN_TRUNCATED_SHARE = 0.02
"""Least share of truncated rows with a recommendation."""
MIN_QUARANTINED_SHARE = 0.005
OVERFIT_LOSS_RATIO = 2.0
"""Ratio of held-out loss to training loss of an overfitted model."""
MIN_LOSS_GAP = 0.1
"""Smaller differences of the losses are ignored."""
MIN_LAST_GAIN_SHARE = 0.05
"""Least share of the last evaluation in the total gain of the validation score."""
EARLY_BEST_SHARE = 0.6
"""A best step before this share of all steps is early."""
MAX_TOKENS = 512
"""Tokens that most encoders read at once. Longer texts need windows."""
MIN_LABEL_ROWS = 50
"""Labels with fewer training rows get the recommendation to add rows."""
LANGUAGE_COLUMNS = ("lang", "language", "locale")


@dataclass(frozen=True)
class WeakSlice:
    """A slice that is significantly worse than all rows."""

    column: str
    value: str
    rows: int
    score: float


@dataclass(frozen=True)
class WorstLabel:
    """The label with the lowest F1."""

    name: str
    f1: float
    train_rows: int | None


@dataclass(frozen=True)
class BaselineComparison:
    """Scores of the model and of the best baseline on the same rows."""

    score: float
    interval: tuple[float, float] | None
    """95 % interval of `score`."""
    baseline_name: str
    """Name of the baseline."""
    baseline_score: float
    """Score of the baseline."""

    @property
    def is_ahead(self) -> bool | None:
        """Whether the model is better; None if the difference is not significant."""
        low, high = self.interval or (self.score, self.score)
        return None if low <= self.baseline_score <= high else self.score > self.baseline_score


@dataclass(frozen=True)
class RunFacts:
    """Input of the rules. Scores are headline scores, larger is better; errors are negated."""

    folder: str
    status: str = "finished"
    output: str = "classes"
    score: float | None = None
    baseline_comparison: BaselineComparison | None = None
    train_loss: float | None = None
    """Mean over the last epoch, if comparable with `held_out_loss`."""
    held_out_loss: float | None = None
    validation_scores: tuple[tuple[int, float], ...] = ()
    """(step, score) of each evaluation, in order."""
    best_step: int | None = None
    steps: int = 0
    epochs: int = 1
    rows: int = 0
    """Rows of the store, with copies and unlabeled rows."""
    labeled_rows: int = 0
    """Labeled rows of the files."""
    truncated_rows: int = 0
    """Truncated rows of the store."""
    max_tokens: int = 64
    uses_windows: bool = False
    """Long rows have several windows of `max_tokens` tokens."""
    max_windows: int = 1
    quarantined_rows: int = 0
    quarantine_reason: str = ""
    """Most frequent reason of quarantined rows."""
    weak_slice: WeakSlice | None = None
    worst_label: WorstLabel | None = None
    confused_pair: tuple[str, str, int] | None = None
    """(true, predicted, rows) of the most frequent mistake, if it is frequent enough."""
    collapsed_answer: str = ""
    """The answer of almost all rows."""
    peak_lr: float = 0.0
    has_class_weights: bool | None = None
    """Whether labels are weighed; None if the targets are not labels."""
    suspect_rows: tuple[str, ...] = ()
    """file:line of rows with a confident wrong prediction."""
    has_student: bool = False
    """The run is a student, or its student exists."""
    has_artifact: bool = True
    has_int8: bool = False
    """The folder has an int8 artifact."""
    rejection_reason: str = ""
    """Why the gate refused the artifact to serve."""
    is_student: bool = False
    """The run is a student."""


def list_recommendations(facts: RunFacts) -> list[Recommendation]:
    """List the recommendations, the most urgent first."""
    recommendations = [recommendation for rule in RULES if (recommendation := rule(facts)) is not None]
    return [*recommendations[:MAX_RECOMMENDATIONS], *recommend_deployment(facts)]


# ---------------------------------------------------------------------------------------------------------- repairs


def resume_run(facts: RunFacts) -> Recommendation | None:
    if facts.status == "finished":
        return None
    # A student is resumed by `rtrain distill`, which needs the teacher and runs the gate.
    command = f"rtrain {'distill TEACHER' if facts.is_student else 'train'} --resume --out {shlex.quote(facts.folder)}"
    if facts.status == "failed":
        return Recommendation(
            "Fix the cause of the error, then resume from the newest checkpoint",
            "the newest attempt failed; see Interruptions under Training",
            command,
        )
    if facts.status == "running":
        return Recommendation(
            "Wait for its end, or resume if its process is gone", "the newest attempt has not ended", command
        )
    return Recommendation("Resume from the newest checkpoint", f"the run is {facts.status}", command)


def fix_rows(facts: RunFacts) -> Recommendation | None:
    total = facts.labeled_rows + facts.quarantined_rows
    if not total or facts.quarantined_rows < MIN_QUARANTINED_SHARE * total:
        return None
    reason = (
        f"{facts.quarantined_rows:,} of {total:,} rows ({_format_percent(facts.quarantined_rows / total)}) were "
        "quarantined"
    )
    reason += f", most often because: {truncate(facts.quarantine_reason, 120)}" if facts.quarantine_reason else ""
    return Recommendation("Fix the quarantined rows; the table under Data lists them", reason)


def check_labels(facts: RunFacts) -> Recommendation | None:
    """Confident wrong predictions often have wrong labels (Northcutt et al. 2021, "Confident learning")."""
    if len(facts.suspect_rows) < 2:
        return None
    first = ", ".join(facts.suspect_rows[:3]) + (" and others" if len(facts.suspect_rows) > 3 else "")
    return Recommendation(
        f"Check the labels of {first}",
        f"{len(facts.suspect_rows)} of the hardest rows contradict their label with a confidence of 0.9 or more",
    )


def increase_max_tokens(facts: RunFacts) -> Recommendation | None:
    if not facts.rows or facts.truncated_rows < MIN_TRUNCATED_SHARE * facts.rows:
        return None
    share = f"{facts.truncated_rows:,} of {facts.rows:,} rows ({_format_percent(facts.truncated_rows / facts.rows)})"
    if facts.uses_windows:
        setting = f"data.max_windows={2 * facts.max_windows}"
        return Recommendation(
            f"Read longer: {setting}",
            f"{share} have more than {facts.max_windows} windows",
            rerun_command(facts, setting),
        )
    if 2 * facts.max_tokens <= MAX_TOKENS:
        setting = f"data.max_tokens={2 * facts.max_tokens}"
    else:
        setting = f"data.window={facts.max_tokens}"
    return Recommendation(
        f"Read longer: {setting}", f"{share} were truncated at {facts.max_tokens} tokens", rerun_command(facts, setting)
    )


# -------------------------------------------------------------------------------------------------- improvements


def separate_answers(facts: RunFacts) -> Recommendation | None:
    if not facts.collapsed_answer or facts.status != "finished":
        return None
    reason = f"almost all rows get the answer “{truncate(facts.collapsed_answer, 40)}”, whatever their right answer"
    setting = "train.class_weights=balanced"
    if facts.has_class_weights is not False:
        setting = f"{'distill.lr' if facts.is_student else 'optim.lr'}={format_significant(facts.peak_lr / 4)}"
    return Recommendation(f"Separate the answers: {setting}", reason, rerun_command(facts, setting))


def beat_baseline(facts: RunFacts) -> Recommendation | None:
    if (comparison := facts.baseline_comparison) is None or comparison.is_ahead:
        return None
    verdict = "is not significantly worse" if comparison.is_ahead is None else "is better"
    return Recommendation(
        "Search the learning rate, and train longer, before anything else",
        f"{comparison.baseline_name} {verdict}: {format_significant(abs(comparison.baseline_score))} against "
        f"{format_significant(abs(comparison.score))} of the encoder",
        f"{_search_command(facts)} --out {shlex.quote(facts.folder + '-search')}",
    )


def train_longer(facts: RunFacts) -> Recommendation | None:
    values = [value for _, value in facts.validation_scores]
    if len(values) < 2 or facts.status != "finished":
        return None
    total_gain, last_gain = values[-1] - values[0], values[-1] - max(values[:-1])
    if last_gain <= 0 or last_gain < MIN_LAST_GAIN_SHARE * total_gain:
        return None
    setting = f"{_epochs_setting(facts)}={2 * facts.epochs}"
    return Recommendation(
        f"Train longer: {setting}", "the validation score was still rising at the end", rerun_command(facts, setting)
    )


def train_shorter(facts: RunFacts) -> Recommendation | None:
    if (
        facts.train_loss is not None
        and facts.held_out_loss is not None
        and facts.held_out_loss > max(OVERFIT_LOSS_RATIO * facts.train_loss, facts.train_loss + MIN_LOSS_GAP)
    ):
        reason = (
            f"the training loss ended at {format_significant(facts.train_loss)}, the held-out loss is "
            f"{format_significant(facts.held_out_loss)}"
        )
    elif (
        len(facts.validation_scores) >= 3
        and facts.best_step is not None
        and facts.best_step < EARLY_BEST_SHARE * facts.steps
        and facts.status == "finished"
    ):
        reason = f"validation was best at step {facts.best_step:,} of {facts.steps:,}"
    else:
        return None
    if facts.epochs == 1 or train_longer(facts) is not None:  # the model overfits, but the score still rises
        return Recommendation("Add training rows: the model overfits", reason)
    setting = f"{_epochs_setting(facts)}={max(1, facts.epochs // 2)}"
    return Recommendation(f"Add training rows, or train less: {setting}", reason, rerun_command(facts, setting))


def strengthen_slice(facts: RunFacts) -> Recommendation | None:
    if facts.weak_slice is None:
        return None
    weak = facts.weak_slice
    if weak.column == "length":
        reason = f"texts of {weak.value} tokens are significantly worse than all rows: {format_significant(weak.score)}"
        return Recommendation("Add training rows of that length", f"{reason} on {weak.rows:,} rows")
    slice_name = f"{weak.column} “{truncate(weak.value, 40)}”"
    reason = (
        f"{slice_name} is significantly worse than all rows: {format_significant(weak.score)} on {weak.rows:,} rows"
    )
    if weak.column.lower() in LANGUAGE_COLUMNS:
        return Recommendation(
            f"Add training rows of {slice_name}, or start from a multilingual encoder (--model)", reason
        )
    return Recommendation(f"Add training rows of {slice_name}", reason)


def strengthen_label(facts: RunFacts) -> Recommendation | None:
    if (
        facts.worst_label is None
        or facts.worst_label.train_rows is None
        or facts.worst_label.train_rows >= MIN_LABEL_ROWS
    ):
        return None
    name = truncate(facts.worst_label.name, 40)
    reason = (
        f"its F1 is the lowest, {facts.worst_label.f1:.2f}, and it has only {facts.worst_label.train_rows:,} training "
        "rows"
    )
    return Recommendation(f"Add training rows of “{name}”", reason)


def merge_or_split_labels(facts: RunFacts) -> Recommendation | None:
    if facts.confused_pair is None:
        return None
    true, predicted, rows = facts.confused_pair
    pair = f"“{truncate(true, 40)}” and “{truncate(predicted, 40)}”"
    return Recommendation(
        f"Define the difference between {pair}, or merge them",
        f"{rows:,} rows of the first were predicted as the second",
    )


RULES: tuple[Callable[[RunFacts], Recommendation | None], ...] = (
    resume_run,
    fix_rows,
    check_labels,
    separate_answers,
    beat_baseline,
    increase_max_tokens,
    train_longer,
    train_shorter,
    strengthen_slice,
    strengthen_label,
    merge_or_split_labels,
)


# ---------------------------------------------------------------------------------------------------------- to the
# endpoint


def recommend_deployment(facts: RunFacts) -> list[Recommendation]:
    """Recommend the path to the endpoint; empty without an artifact, or if a baseline is better."""
    if not facts.has_artifact or facts.status != "finished":
        return []
    if (comparison := facts.baseline_comparison) is not None and comparison.baseline_score > comparison.score:
        return []
    folder, artifact = shlex.quote(facts.folder), shlex.quote(f"{facts.folder}/artifact")
    if facts.output == "tokens":
        reason = "this run trained an encoder of the domain"
        return [
            Recommendation(
                "Fine-tune a task from this encoder", reason, f"rtrain train RECIPE --model {artifact} --data FILE"
            )
        ]
    recommendations = []
    if not facts.has_student:
        reason = "a student with fewer layers is faster and keeps most of the score of a good teacher"
        recommendations.append(Recommendation("Distill it into a smaller model", reason, f"rtrain distill {folder}"))
    if not facts.has_int8:
        reason = "int8 with static scales, gated on the test rows"
        recommendations.append(Recommendation("Quantize it", reason, f"rtrain quantize {folder}"))
    artifact_to_serve = shlex.quote(f"{facts.folder}/artifact-int8") if facts.has_int8 else artifact
    if facts.rejection_reason:
        return [*recommendations, _recommend_for_refused(facts, artifact_to_serve)]
    return [
        *recommendations,
        Recommendation("Serve it", "an HTTP endpoint with a test page", f"rtrain serve {artifact_to_serve}"),
    ]


def _recommend_for_refused(facts: RunFacts, artifact_path: str) -> Recommendation:
    reason = f"the gate refused {artifact_path}: {facts.rejection_reason}"
    folder = shlex.quote(facts.folder)
    if facts.has_int8:
        command = f"rtrain quantize {folder} --set quantize.calibration_rows=1024"
        return Recommendation("Quantize it again with more rows, or serve the float artifact", reason, command)
    if facts.is_student:
        return Recommendation(
            "Distill longer, or with more layers (distill.epochs, distill.layers), or serve the teacher", reason
        )
    return Recommendation("Do not serve it: the baseline is better", reason, f"rtrain inspect {artifact_path}")


def rerun_command(facts: RunFacts, setting: str) -> str:
    """Command that trains the run again with one changed setting."""
    verb = "rtrain distill TEACHER" if facts.is_student else f"rtrain train {_config_path(facts)}"
    return f"{verb} --set {setting} --out NEW_FOLDER"


def _search_command(facts: RunFacts) -> str:
    """Command of a search. TEACHER stands for the teacher's run: a student stores only its artifact's version."""
    return "rtrain distill TEACHER --search" if facts.is_student else f"rtrain tune {_config_path(facts)}"


def _epochs_setting(facts: RunFacts) -> str:
    return "distill.epochs" if facts.is_student else "train.epochs"


def _config_path(facts: RunFacts) -> str:
    return shlex.quote(f"{facts.folder}/config.yaml")


def _format_percent(share: float) -> str:
    return f"{100 * share:.2g} %"
