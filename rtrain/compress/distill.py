"""Teacher -> student: the same loop, with the teacher's answers to the rows in the loss, and to rows without labels."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import student, teacher as answers
from rtrain.config import Config
from rtrain.config.recipe import OF_STUDENTS
from rtrain.core import engines, events, json_files, run_folder as runs
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.data import row_reader
from rtrain.data.augment import word_replacement
from rtrain.data.sources import digests
from rtrain.evaluation import gate
from rtrain.inference import artifact, score
from rtrain.models import builder, pooling, position_embeddings
from rtrain.runs import controller, prepare as runs_prepare, run_folders, worker_group
from rtrain.tasks import base
from rtrain.trainer import feature_distillation

SCALES = ("mean", "std", "heads")
"""Facts of a head that say what its outputs mean."""


@dataclass(frozen=True)
class Teacher:
    """The artefact that is learned from."""

    folder: Path
    made: artifact.Artifact

    @classmethod
    def read(cls, folder: Path) -> "Teacher":
        """Raises `UserError` for an artefact that cannot teach."""
        made = artifact.read(folder)
        if not engines.get(made.engine).gradients:
            raise UserError(f"{folder} is quantized; distil its float parent", code="already_quantized")
        return cls(folder, made)

    def reads_alike(self, other: Path) -> bool:
        """Whether a model's tokenizer is the teacher's own."""
        return digests.tokenizer_digest(self.folder) == digests.tokenizer_digest(other)


def run(
    config: Config,
    teacher_run: Path,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    *,
    until: int | None = None,
    workers: worker_group.Workers | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Distil the artefact of `teacher_run` into a new run at `folder`; returns the run's folder and its summary.
    `until` and `workers` are those of `driver.fit`.

    A student that has come to its end is gated against its teacher; the document is the summary's `gate`.
    """
    teacher = Teacher.read(runs.artifact_of(teacher_run))
    config = started(settled(config, folder, reuse), teacher, folder.parent)
    source, say = None, on_event or (lambda event: None)
    if reuse != "resume":
        source = checked(config, teacher, folder.parent)
        run_folders.choose(folder, config, reuse)
    say(events.doing("reading the rows", "rows"))
    prepared = prepare(config, teacher, folder, reuse, source=source, on_event=say)
    summary = controller.fit(prepared, until=until, workers=workers, on_event=on_event)
    if prepared.run.finished:
        store, threads = prepared.store, config.deploy.serve.threads
        # A trimmed student, or one by name, reads the rows as other tokens than its teacher.
        whole = score.trained_from(teacher.folder, teacher.made, beside=store)
        further = () if whole is None else (whole,)
        both = gate.Sides(prepared.run.artifact, teacher.folder, store, whole, threads, further=further)
        summary["gate"] = gate.run(both, config.recipe.gate, on_event=say)
        gate.record(prepared.run.artifact, summary["gate"])
    return prepared.run.folder, summary


def checked(config: Config, teacher: Teacher, root: Path) -> row_reader.Source:
    """The rows of a student whose configuration is `started`: the teacher's, as it read them. Raises one `ConfigError`
    with everything that can be refused before Ray starts."""
    source, weights = runs_prepare.check(config, root)
    if problems := refused(config, teacher, weights):
        raise ConfigError(problems)
    return source


def prepare(
    config: Config,
    teacher: Teacher,
    folder: Path,
    reuse: run_folders.Reuse,
    *,
    tokens_root: Path | None = None,
    source: row_reader.Source | None = None,
    begun: bool = False,
    on_event: controller.OnEvent = lambda event: None,
) -> runs_prepare.Prepared:
    """As `preparing.prepare`, for a student whose configuration is `started`: its teacher answers the rows, where it
    has not yet."""
    weights = builder.resolve(config.recipe.model.name, tokens_root or folder.parent)
    every = [
        answers.Asked(one.folder, one.made, one.reads_alike(weights))
        for one in (teacher, *co_teachers(config, teacher))
    ]
    taught = None
    if (name := config.recipe.answers) is not None:
        taught = partial(answers.teach_together, every, name, on_event=on_event)
    prepared = runs_prepare.prepare(config, folder, reuse, tokens_root, source, taught, begun)
    return replace(prepared, teacher=teacher.folder)


def settled(config: Config, folder: Path, reuse: run_folders.Reuse) -> Config:
    """What to distil by: `config`, or a resumed student's own configuration with what `config` names."""
    if reuse != "resume":
        return config
    return runs_prepare.chosen(replace(config, named=config.named.difference(OF_STUDENTS)), folder, reuse)[1]


def started(config: Config, teacher: Teacher, root: Path) -> Config:
    """The configuration with what follows from the teacher, and with the model that the student starts from. That lies
    beside the run, not in it: the run's folder is made once nothing is wrong."""
    if problems := _of_words(config, teacher):
        raise ConfigError(problems)
    chosen, asked = config.recipe.distill, config.recipe.model.pooling
    derived = {"train.epochs": chosen.epochs, "optim.lr": chosen.lr, "distill.teacher": teacher.made.version}
    derived["distill.co_teachers"] = [one.made.version for one in co_teachers(config, teacher)]
    if chosen.copies and not (chosen.copied and Path(chosen.copied).is_file()):
        derived["distill.copied"] = str(word_replacement.ensure(config.recipe, root).absolute())
    depth = None if chosen.student is not None else student.depth_of(teacher.folder)
    document = json_files.read(teacher.folder / "config.json")
    of = depth if depth is None else student.taken_from(chosen, document, depth)
    derived["distill.teacher_layers"] = "all" if of == depth else of
    if chosen.student is not None:
        # The teacher's run has decided it for its own model.
        way = {} if "model.pooling" in config.named else {"model.pooling": "auto"}
        return configuration.with_overrides(config, {**derived, **way, "model.name": chosen.student})
    # The teacher's head was trained on this pooling, and the student starts with that head.
    pooled = teacher.made.facts.get(pooling.FACT, "own")
    if asked not in ("auto", pooled):
        fix = f"write {pooled}, or leave it out"
        raise ConfigError(
            [
                Problem(
                    "model.pooling", asked, f"the teacher was trained with {pooled}", fix, code="conflicting_settings"
                )
            ]
        )
    start = student.start(teacher.folder, chosen, root / run_folders.STUDENTS)
    return configuration.with_overrides(config, {**derived, "model.name": str(start), "model.pooling": pooled})


def co_teachers(config: Config, teacher: Teacher) -> list[Teacher]:
    """The models of `distill.teachers`. Raises `ConfigError` for those whose outputs have no mean with its own."""
    found: list[Teacher] = []
    problems: list[Problem] = []
    for name in config.recipe.distill.teachers:
        one = Teacher.read(runs.chosen(Path(name)).artifact)
        found.append(one)
        if reason := _unlike(one.made, teacher.made):
            problems.append(
                Problem(
                    "distill.teachers", name, reason, "name a run of the same rows and settings", code="other_model"
                )
            )
    versions = [one.made.version for one in (teacher, *found)]
    problems += [
        Problem(
            "distill.teachers",
            name,
            "it is named twice, or is the teacher itself",
            "name each run once",
            code="named_twice",
        )
        for name, one in zip(config.recipe.distill.teachers, found, strict=True)
        if versions.count(one.made.version) > 1
    ]
    if problems:
        raise ConfigError(problems)
    return found


def _unlike(one: artifact.Artifact, teacher: artifact.Artifact) -> str:
    """Why two models' outputs to the same row have no mean, or nothing."""
    if one.task != teacher.task:
        return f"it answers by the task {one.task}, the teacher by {teacher.task}"
    if one.labels != teacher.labels:
        return "its labels, or their order, are others than the teacher's"
    if any(one.facts.get(name) != teacher.facts.get(name) for name in SCALES):
        return "its numbers are on another scale than the teacher's, by the mean and the spread of other rows"
    return ""


def refused(config: Config, teacher: Teacher, weights: Path) -> list[Problem]:
    """What a student that starts from the model folder `weights` cannot learn from this teacher."""
    recipe = config.recipe
    every = (teacher, *co_teachers(config, teacher))
    found = too_long(config, every)
    found += [] if all(one.reads_alike(weights) for one in every) else _of_other_tokens(config, weights)
    if feature_distillation.active(recipe.distill):
        found += feature_distillation.problems(recipe, weights, teacher.folder)
    if recipe.distill.confidence and recipe.distill.unlabelled is None and not recipe.distill.copies:
        fix = "name them with distill.unlabelled, write distill.copies, or leave it out"
        found.append(
            Problem(
                "distill.confidence",
                recipe.distill.confidence,
                "there are no rows to choose from",
                fix,
                code="conflicting_settings",
            )
        )
    if recipe.distill.confidence and base.get(recipe.task).output == "number":
        reason = "the teacher gives a number and does not say how sure it is"
        found.append(
            Problem("distill.confidence", recipe.distill.confidence, reason, "leave it out", code="unsupported")
        )
    return found


def too_long(config: Config, teachers: Iterable[Teacher]) -> list[Problem]:
    """Texts that a student reads and its teachers cannot: they answer the rows as long as it reads them, whatever they
    were trained on, by the positions that their models have."""
    asked = config.recipe.data.window_tokens
    found = []
    for one in teachers:
        most = position_embeddings.reached(json_files.read(one.folder / "config.json"))
        if most and asked > most:
            reason = f"the teacher {one.folder} reads {most} tokens at most"
            found.append(Problem("data.max_tokens", asked, reason, f"write {most} or less", code="out_of_range"))
    return found


def _of_words(config: Config, teacher: Teacher) -> list[Problem]:
    """What cannot be learned from a masked language model: its answers, one of 30,000 words for each mask and others in
    each epoch, are not kept; what is inside it can be learned beside its student's own guesses."""
    if teacher.made.labels:
        return []
    distill, reason = config.recipe.distill, f"the teacher answers with the words of a vocabulary ({teacher.made.task})"
    way = "write distill.alpha=0 and distill.hidden or distill.relations, or distil the model that was tuned from it"
    found = []
    if distill.alpha or not feature_distillation.active(distill):
        found.append(
            Problem(
                "distill.alpha", distill.alpha, f"{reason}, which are not kept for a student", way, code="unsupported"
            )
        )
    for name in ("unlabelled", "copies", "teachers"):
        if value := getattr(distill, name):
            found.append(
                Problem(
                    f"distill.{name}",
                    value,
                    f"{reason}, and gives rows none to learn",
                    "leave it out",
                    code="unsupported",
                )
            )
    if config.recipe.compress.vocabulary == "trim":
        cut = "its student's blocks of text would be others than its own, and the gate could not compare them"
        found.append(Problem("compress.vocabulary", "trim", cut, "write keep", code="unsupported"))
    return found


def _of_other_tokens(config: Config, weights: Path) -> list[Problem]:
    """What cannot be learned by a student whose tokenizer differs from the teacher's."""
    recipe, why = config.recipe, f"{weights} has another tokenizer than the teacher"
    fix = "name a student with the teacher's tokenizer"
    found = []
    if base.get(recipe.task).by_token:
        reason = f"{why}, and {recipe.task} answers each token"
        found.append(Problem("distill.student", recipe.distill.student, reason, fix, code="other_tokenizer"))
    for name in feature_distillation.NAMES:
        if weight := getattr(recipe.distill, name):
            found.append(
                Problem(
                    f"distill.{name}",
                    weight,
                    f"{why}, and it compares tokens",
                    f"{fix}, or write 0",
                    code="other_tokenizer",
                )
            )
    return found
