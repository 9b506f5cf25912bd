"""What to do next with a run: pure rules, each from the run's facts to one step, or to None where it does not apply.

A rule says what to do, the figure that calls for it, and the command where one command does it. The rules stand in the
order of the page: what must be mended first, then what would raise the score, then the path to the endpoint.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from rtrain.report.drawing.blocks import Step
from rtrain.report.drawing.svg import short, three

MOST_STEPS = 6
"""Steps that mend or improve: of a longer list nothing is done. The path to the endpoint comes on top."""
CUT_SHARE = 0.02
"""Share of rows cut at the end above which their missing words matter."""
SET_ASIDE_SHARE = 0.005
OVERFITTED = 2.0
"""Held-out loss over training loss, from which on the model has learned its rows by heart."""
SMALL_LOSS = 0.1
"""Losses that differ by less are both small."""
STILL_RISING = 0.05
"""Share of the whole gain of the validation score that the last evaluation must have added."""
EARLY_BEST = 0.6
"""The best update is early where it lies before this share of all."""
LONGEST = 512
"""Tokens that most encoders read at once. What is longer is read in windows, of as many tokens as this one reads."""
FEW_ROWS = 50
"""Training rows of a label below which more of them are the first remedy."""
LANGUAGES = ("lang", "language", "locale")


@dataclass(frozen=True)
class Weak:
    """A slice of the rows whose score is worse than that of all rows by more than chance."""

    column: str
    value: str
    rows: int
    score: float


@dataclass(frozen=True)
class Label:
    """The label that is answered worst."""

    name: str
    f1: float
    train_rows: int | None


@dataclass(frozen=True)
class Facts:
    """What the rules look at. Scores are the headline's, larger is better: an error is given as its negative."""

    folder: str
    status: str = "finished"
    output: str = "classes"
    score: float | None = None
    interval: tuple[float, float] | None = None
    """95 % interval of `score`."""
    baseline: tuple[str, float] | None = None
    """The best baseline on the same split: its name and score."""
    train_loss: float | None = None
    """Mean over the last epoch, where it is comparable with `held_out_loss`."""
    held_out_loss: float | None = None
    validation: tuple[tuple[int, float], ...] = ()
    """(update, score) of each evaluation, in order."""
    best_update: int | None = None
    updates: int = 0
    epochs: int = 1
    rows: int = 0
    """Those of the store, copies and such without labels among them."""
    given: int = 0
    """Those with labels that the files hold."""
    cut: int = 0
    """Rows of the store that are longer than what is read."""
    max_tokens: int = 64
    windows: bool = False
    """Long rows are read in several windows of `max_tokens` tokens."""
    max_windows: int = 1
    set_aside: int = 0
    reason: str = ""
    """The most frequent reason for which rows were set aside."""
    weak: Weak | None = None
    label: Label | None = None
    confused: tuple[str, str, int] | None = None
    """(true, answered, rows) of the most frequent mistake, where it is worth a remedy of its own."""
    suspects: tuple[str, ...] = ()
    """file:line of rows that are answered wrongly with much confidence."""
    student: bool = False
    """The run is a distilled student, or has one beside it."""
    artifact: bool = True
    int8: bool = False
    """There is an int8 artefact in the folder."""
    refused: str = ""
    """Why the gate has refused the artefact that would be served."""
    teacher: bool = False
    """The run is a distilled student."""


def steps(facts: Facts) -> list[Step]:
    """The steps that the facts call for, the most urgent first."""
    found = [step for rule in RULES if (step := rule(facts)) is not None]
    return [*found[:MOST_STEPS], *path(facts)]


# ---------------------------------------------------------------------------------------------------------- to mend


def go_on(facts: Facts) -> Step | None:
    if facts.status == "finished":
        return None
    # As a plain training a student would lack its teacher, and end without its gate.
    command = f"rtrain {'distill TEACHER' if facts.teacher else 'train'} --resume --out {shlex.quote(facts.folder)}"
    if facts.status == "failed":
        return Step(
            "Mend what the error names, then go on from the newest checkpoint",
            "the newest start failed; what interrupted it is under Training",
            command,
        )
    if facts.status == "running":
        return Step(
            "Wait for its end, or go on if its process is gone", "the log has no end of the newest start", command
        )
    return Step("Go on from the newest checkpoint", f"the run is {facts.status}", command)


def mend_rows(facts: Facts) -> Step | None:
    total = facts.given + facts.set_aside
    if not total or facts.set_aside < SET_ASIDE_SHARE * total:
        return None
    why = f"{facts.set_aside:,} of {total:,} rows ({_percent(facts.set_aside / total)}) were set aside"
    why += f", most often because: {short(facts.reason, 120)}" if facts.reason else ""
    return Step("Mend the rows that were set aside; the table under Data names their lines", why)


def check_labels(facts: Facts) -> Step | None:
    """Confident wrong answers are where wrong labels are found first (Northcutt et al. 2021, "Confident learning")."""
    if len(facts.suspects) < 2:
        return None
    first = ", ".join(facts.suspects[:3]) + (" and others" if len(facts.suspects) > 3 else "")
    return Step(
        f"Check the labels of {first}",
        f"{len(facts.suspects)} of the hardest rows contradict their label with a confidence of 0.9 or more",
    )


def read_longer(facts: Facts) -> Step | None:
    if not facts.rows or facts.cut < CUT_SHARE * facts.rows:
        return None
    share = f"{facts.cut:,} of {facts.rows:,} rows ({_percent(facts.cut / facts.rows)})"
    if facts.windows:
        setting = f"data.max_windows={2 * facts.max_windows}"
        return Step(
            f"Read longer: {setting}", f"{share} have more than {facts.max_windows} windows", again(facts, setting)
        )
    if 2 * facts.max_tokens <= LONGEST:
        setting = f"data.max_tokens={2 * facts.max_tokens}"
    else:
        setting = f"data.window={facts.max_tokens}"
    return Step(f"Read longer: {setting}", f"{share} were cut at {facts.max_tokens} tokens", again(facts, setting))


# -------------------------------------------------------------------------------------------------- to raise the score


def beat_baseline(facts: Facts) -> Step | None:
    if facts.score is None or facts.baseline is None:
        return None
    name, reached = facts.baseline
    low, high = facts.interval or (facts.score, facts.score)
    if low > reached:
        return None
    said = "is better" if reached > high else "is not told apart from it by these rows"
    return Step(
        "Search the learning rate, and train longer, before anything else",
        f"{name} {said}: {three(abs(reached))} against {three(abs(facts.score))} of the encoder",
        f"{_searching(facts)} --out {shlex.quote(facts.folder + '-search')}",
    )


def train_longer(facts: Facts) -> Step | None:
    values = [value for _, value in facts.validation]
    if len(values) < 2 or facts.status != "finished":
        return None
    gained, last = values[-1] - values[0], values[-1] - max(values[:-1])
    if last <= 0 or last < STILL_RISING * gained:
        return None
    setting = f"{_epochs(facts)}={2 * facts.epochs}"
    return Step(f"Train longer: {setting}", "the validation score was still rising at the end", again(facts, setting))


def train_shorter(facts: Facts) -> Step | None:
    if (
        facts.train_loss is not None
        and facts.held_out_loss is not None
        and facts.held_out_loss > max(OVERFITTED * facts.train_loss, facts.train_loss + SMALL_LOSS)
    ):
        why = f"the training loss ended at {three(facts.train_loss)}, the held-out loss is {three(facts.held_out_loss)}"
    elif (
        len(facts.validation) >= 3
        and facts.best_update is not None
        and facts.best_update < EARLY_BEST * facts.updates
        and facts.status == "finished"
    ):
        why = f"validation was best at update {facts.best_update:,} of {facts.updates:,}; what followed did not help"
    else:
        return None
    if facts.epochs == 1 or train_longer(facts) is not None:  # the rows are learned by heart, and yet the score rises
        return Step("Bring more training rows: the model learns these by heart", why)
    setting = f"{_epochs(facts)}={max(1, facts.epochs // 2)}"
    return Step(f"Bring more training rows, or train less: {setting}", why, again(facts, setting))


def strengthen_slice(facts: Facts) -> Step | None:
    if facts.weak is None:
        return None
    weak = facts.weak
    if weak.column == "length":
        why = f"texts of {weak.value} tokens are answered worse than all beyond chance: {three(weak.score)}"
        return Step("Look at the texts of that length first: add rows like them", f"{why} on {weak.rows:,} rows")
    named = f"{weak.column} “{short(weak.value, 40)}”"
    why = f"{named} is worse than all rows beyond chance: {three(weak.score)} on {weak.rows:,} rows"
    if weak.column.lower() in LANGUAGES:
        return Step(f"Add training rows of {named}, or start from a multilingual encoder (--model)", why)
    return Step(f"Add training rows of {named}", why)


def strengthen_label(facts: Facts) -> Step | None:
    if facts.label is None or facts.label.train_rows is None or facts.label.train_rows >= FEW_ROWS:
        return None
    name = short(facts.label.name, 40)
    why = f"its F1 is the lowest, {facts.label.f1:.2f}, and only {facts.label.train_rows:,} training rows have it"
    return Step(f"Add training rows of “{name}”", why)


def part_labels(facts: Facts) -> Step | None:
    if facts.confused is None:
        return None
    true, said, rows = facts.confused
    pair = f"“{short(true, 40)}” and “{short(said, 40)}”"
    return Step(
        f"Draw the line between {pair} more sharply, or merge them",
        f"{rows:,} rows of the first were answered as the second",
    )


RULES: tuple[Callable[[Facts], Step | None], ...] = (
    go_on,
    mend_rows,
    check_labels,
    beat_baseline,
    read_longer,
    train_longer,
    train_shorter,
    strengthen_slice,
    strengthen_label,
    part_labels,
)


# ---------------------------------------------------------------------------------------------------------- the path


def path(facts: Facts) -> list[Step]:
    """From the run to the endpoint; nothing where there is no artefact yet, or a baseline answers better."""
    if not facts.artifact or facts.status != "finished":
        return []
    if facts.baseline is not None and facts.score is not None and facts.baseline[1] > facts.score:
        return []
    folder, artifact = shlex.quote(facts.folder), shlex.quote(f"{facts.folder}/artifact")
    if facts.output == "tokens":
        why = "this run has made an encoder of the domain; a task is fine-tuned from it"
        return [Step("Fine-tune a task from this encoder", why, f"rtrain train RECIPE --model {artifact} --data FILE")]
    found = []
    if not facts.student:
        why = "a student of fewer layers answers faster; it keeps most of the score where the teacher is good"
        found.append(Step("Distil it into a smaller model", why, f"rtrain distill {folder}"))
    if not facts.int8:
        why = "int8 with static scales; its score is measured on the test rows before it is taken"
        found.append(Step("Quantize it", why, f"rtrain quantize {folder}"))
    served = shlex.quote(f"{facts.folder}/artifact-int8") if facts.int8 else artifact
    if facts.refused:
        return [*found, _instead(facts, served)]
    return [*found, Step("Serve it", "answers over HTTP, with a page to try it", f"rtrain serve {served}")]


def _instead(facts: Facts, served: str) -> Step:
    """What to do with an artefact that the gate has refused."""
    why = f"the gate has refused {served}: {facts.refused}"
    folder = shlex.quote(facts.folder)
    if facts.int8:
        command = f"rtrain quantize {folder} --set quantize.calibration_rows=1024"
        return Step("Quantize it again with more rows, or serve the float artefact", why, command)
    if facts.teacher:
        return Step("Distil longer, or with more layers (distill.epochs, distill.layers), or serve the teacher", why)
    return Step("Do not serve it: the one that it was set beside is better", why, f"rtrain inspect {served}")


def again(facts: Facts, setting: str) -> str:
    """The command that trains the run anew with one setting changed."""
    verb = "rtrain distill TEACHER" if facts.teacher else f"rtrain train {_config(facts)}"
    return f"{verb} --set {setting} --out NEW_FOLDER"


def _searching(facts: Facts) -> str:
    """TEACHER is a run's folder: a student knows its teacher by the version of its artefact alone."""
    return "rtrain distill TEACHER --search" if facts.teacher else f"rtrain tune {_config(facts)}"


def _epochs(facts: Facts) -> str:
    return "distill.epochs" if facts.teacher else "train.epochs"


def _config(facts: Facts) -> str:
    return shlex.quote(f"{facts.folder}/config.yaml")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
