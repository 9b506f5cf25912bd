"""Distillation: the training loop with the teacher's logits in the loss, also for rows without labels."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import student
from rtrain.compress.teacher import TeacherQuery, answer_with_all_teachers
from rtrain.config import Config
from rtrain.config.recipe import STUDENT_SETTINGS
from rtrain.core import engines, events, json_files, run_folder
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.data import augment, row_reader, sources
from rtrain.evaluation import gate
from rtrain.inference import artifact, score
from rtrain.models import builder, long_texts, pooling
from rtrain.runs import controller, prepare as runs_prepare, run_folders, worker_pool
from rtrain.tasks import base
from rtrain.trainer import losses

OUTPUT_SCALE_FACTS = ("mean", "std", "heads")
"""Facts of a head that set the scale of its outputs."""


@dataclass(frozen=True)
class Teacher:
    """The artifact of a teacher."""

    folder: Path
    metadata: artifact.Artifact

    @classmethod
    def load(cls, folder: Path) -> "Teacher":
        """Read the artifact. Raises `UserError` for a quantized one."""
        metadata = artifact.read_artifact(folder)
        if not engines.get_engine(metadata.engine).has_gradients:
            raise UserError(f"{folder} is quantized; distill its float parent", code="already_quantized")
        return cls(folder, metadata)

    def shares_tokenizer(self, model_folder: Path) -> bool:
        return sources.hash_tokenizer(self.folder) == sources.hash_tokenizer(model_folder)


def run_distillation(
    config: Config,
    teacher_run: Path,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    *,
    until: int | None = None,
    workers: worker_pool.BaseWorkerGroup | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Distill the artifact of `teacher_run` into a new run at `folder`; returns the run's folder and its summary.

    A finished student is gated against its teacher; the summary has the document as `gate`.

    Args:
        until: see `end_step` of `rtrain.runs.controller.fit`.
        workers: see `rtrain.runs.controller.fit`.
    """
    teacher = Teacher.load(run_folder.resolve_artifact(teacher_run))
    config = derive_student_config(resolve_config(config, folder, reuse), teacher, folder.parent)
    source, emit = None, on_event or (lambda event: None)
    if reuse != "resume":
        source = check_config(config, teacher, folder.parent)
        run_folders.choose_folder(folder, config, reuse)
    emit(events.make_phase_event("reading the rows", "rows"))
    prepared = prepare(config, teacher, folder, reuse, source=source, on_event=emit)
    summary = controller.fit(prepared, end_step=until, workers=workers, on_event=on_event)
    if prepared.run.is_finished:
        store, threads = prepared.store, config.deploy.serve.threads
        # A trimmed student, or a student with its own tokenizer, has other tokens than its teacher.
        teacher_store = score.find_training_store(teacher.folder, teacher.metadata, sibling_store=store)
        extra_stores = () if teacher_store is None else (teacher_store,)
        request = gate.GateRequest(
            prepared.run.artifact, teacher.folder, store, teacher_store, threads, extra_stores=extra_stores
        )
        summary["gate"] = gate.run_gate(request, config.recipe.gate, on_event=emit)
        gate.record_verdict(prepared.run.artifact, summary["gate"])
    return prepared.run.folder, summary


def check_config(config: Config, teacher: Teacher, root: Path) -> row_reader.DataSource:
    """Check a student's configuration (`derive_student_config`) before Ray starts; returns its data source.

    Raises one `ConfigError` with all problems.
    """
    source, weights = runs_prepare.check_run(config, root)
    if problems := find_problems(config, teacher, weights):
        raise ConfigError(problems)
    return source


def prepare(
    config: Config,
    teacher: Teacher,
    folder: Path,
    reuse: run_folders.Reuse,
    *,
    tokens_root: Path | None = None,
    source: row_reader.DataSource | None = None,
    is_begun: bool = False,
    on_event: controller.OnEvent = lambda event: None,
) -> runs_prepare.PreparedRun:
    """Prepare a student's run as `runs.prepare.prepare_run` does, and compute missing teacher logits.

    `config` is the result of `derive_student_config`.
    """
    weights = builder.resolve_folder(config.recipe.model.name, tokens_root or folder.parent)
    queries = [
        TeacherQuery(model.folder, model.metadata, model.shares_tokenizer(weights))
        for model in (teacher, *load_co_teachers(config, teacher))
    ]
    answer_rows = None
    if (name := config.recipe.teacher_logits_key) is not None:
        answer_rows = partial(answer_with_all_teachers, queries, name, on_event=on_event)
    prepared = runs_prepare.prepare_run(config, folder, reuse, tokens_root, source, answer_rows, is_begun)
    return replace(prepared, teacher=teacher.folder)


def resolve_config(config: Config, folder: Path, reuse: run_folders.Reuse) -> Config:
    """Return `config`, or for a resumed student its stored configuration with the explicit settings of `config`."""
    if reuse != "resume":
        return config
    return runs_prepare.resolve_run_folder(
        replace(config, explicit_settings=config.explicit_settings.difference(STUDENT_SETTINGS)), folder, reuse
    )[1]


def derive_student_config(config: Config, teacher: Teacher, root: Path) -> Config:
    """Add the settings that follow from the teacher, and the model folder that the student starts from.

    That folder lies beside the run's folder, which is created only after all checks.
    """
    if problems := _check_masked_lm(config, teacher):
        raise ConfigError(problems)
    settings, pooling_setting = config.recipe.distill, config.recipe.model.pooling
    derived = {"train.epochs": settings.epochs, "optim.lr": settings.lr, "distill.teacher": teacher.metadata.version}
    derived["distill.co_teachers"] = [co_teacher.metadata.version for co_teacher in load_co_teachers(config, teacher)]
    if settings.augmented_copies and not (
        settings.augmented_rows_path and Path(settings.augmented_rows_path).is_file()
    ):
        derived["distill.augmented_rows_path"] = str(augment.build_or_open_copies(config.recipe, root).absolute())
    depth = None if settings.student is not None else student.count_layers(teacher.folder)
    document = json_files.load_json_object(teacher.folder / "config.json")
    source_layers = depth if depth is None else student.count_source_layers(settings, document, depth)
    derived["distill.teacher_layers"] = "all" if source_layers == depth else source_layers
    if settings.student is not None:
        # The teacher's run resolved the pooling of its own model.
        pooling_override = {} if "model.pooling" in config.explicit_settings else {"model.pooling": "auto"}
        return configuration.with_overrides(config, {**derived, **pooling_override, "model.name": settings.student})
    # The student starts with the teacher's head, which was trained on this pooling.
    teacher_pooling = teacher.metadata.facts.get(pooling.FACT, "own")
    if pooling_setting not in ("auto", teacher_pooling):
        reason, fix = f"the teacher was trained with {teacher_pooling}", f"write {teacher_pooling}, or leave it out"
        raise ConfigError([Problem("model.pooling", pooling_setting, reason, fix, code="conflicting_settings")])
    start = student.create_student(teacher.folder, settings, root / run_folders.STUDENTS_FOLDER)
    return configuration.with_overrides(config, {**derived, "model.name": str(start), "model.pooling": teacher_pooling})


def load_co_teachers(config: Config, teacher: Teacher) -> list[Teacher]:
    """Load the models of `distill.teachers`. Raises `ConfigError` if their outputs cannot be averaged with the
    teacher's."""
    names, problems = config.recipe.distill.teachers, []
    co_teachers = [Teacher.load(run_folder.resolve_run(Path(name)).artifact) for name in names]
    for name, co_teacher in zip(names, co_teachers, strict=True):
        if reason := _explain_mismatch(co_teacher.metadata, teacher.metadata):
            fix = "name a run of the same rows and settings"
            problems.append(Problem("distill.teachers", name, reason, fix, code="model_mismatch"))
    versions = [model.metadata.version for model in (teacher, *co_teachers)]
    for name, co_teacher in zip(names, co_teachers, strict=True):
        if versions.count(co_teacher.metadata.version) > 1:
            reason, fix = "it is listed twice, or is the teacher itself", "name each run once"
            problems.append(Problem("distill.teachers", name, reason, fix, code="duplicate_name"))
    if problems:
        raise ConfigError(problems)
    return co_teachers


def _explain_mismatch(metadata: artifact.Artifact, teacher_metadata: artifact.Artifact) -> str:
    if metadata.task != teacher_metadata.task:
        return f"its task is {metadata.task}, the teacher's is {teacher_metadata.task}"
    if metadata.labels != teacher_metadata.labels:
        return "its labels, or their order, differ from the teacher's"
    if any(metadata.facts.get(name) != teacher_metadata.facts.get(name) for name in OUTPUT_SCALE_FACTS):
        return "its outputs have another scale than the teacher's: their training rows differ"
    return ""


def find_problems(config: Config, teacher: Teacher, weights: Path) -> list[Problem]:
    """List the problems of a student that starts from the model folder `weights`."""
    recipe, distill = config.recipe, config.recipe.distill
    teachers = (teacher, *load_co_teachers(config, teacher))
    problems = check_text_length(config, teachers)
    problems += [] if all(model.shares_tokenizer(weights) for model in teachers) else _check_tokenizer(config, weights)
    if losses.is_enabled(distill):
        problems += losses.check_feature_distillation(recipe, weights, teacher.folder)
    if distill.confidence and distill.unlabeled_rows_path is None and not distill.augmented_copies:
        reason = "there are no unlabeled rows to select"
        fix = "name them with distill.unlabeled_rows_path, write distill.augmented_copies, or leave it out"
        problems.append(Problem("distill.confidence", distill.confidence, reason, fix, code="conflicting_settings"))
    if distill.confidence and base.get_task(recipe.task).output == "number":
        reason = "the teacher gives a number and does not say how sure it is"
        problems.append(Problem("distill.confidence", distill.confidence, reason, "leave it out", code="unsupported"))
    return problems


def check_text_length(config: Config, teachers: Iterable[Teacher]) -> list[Problem]:
    """Check that the teachers' models have enough positions for the student's texts."""
    window_tokens, problems = config.recipe.data.window_tokens, []
    for teacher in teachers:
        max_positions = long_texts.max_text_tokens(json_files.load_json_object(teacher.folder / "config.json"))
        if max_positions and window_tokens > max_positions:
            reason = f"the teacher {teacher.folder} reads {max_positions} tokens at most"
            fix = f"write {max_positions} or less"
            problems.append(Problem("data.max_tokens", window_tokens, reason, fix, code="out_of_range"))
    return problems


def _check_masked_lm(config: Config, teacher: Teacher) -> list[Problem]:
    """Check the settings of a student of a masked language model.

    Its logits (30,000 per mask, other masks in each epoch) are not stored. Its hidden states and relations can be
    distilled.
    """
    if teacher.metadata.labels:
        return []
    distill, problems = config.recipe.distill, []
    predicts = f"the teacher predicts tokens of its vocabulary ({teacher.metadata.task})"
    if distill.alpha or not losses.is_enabled(distill):
        reason = f"{predicts}, and these logits are not stored"
        fix = (
            "write distill.alpha=0 and distill.hidden_loss_weight or distill.relation_loss_weight, or distill a model "
            "that was fine-tuned from it"
        )
        problems.append(Problem("distill.alpha", distill.alpha, reason, fix, code="unsupported"))
    for name in ("unlabeled_rows_path", "augmented_copies", "teachers"):
        if value := getattr(distill, name):
            reason = f"{predicts}, so it gives no label to these rows"
            problems.append(Problem(f"distill.{name}", value, reason, "leave it out", code="unsupported"))
    if config.recipe.compress.vocabulary == "trim":
        reason = "the student's text blocks would differ from the teacher's, so the gate could not compare them"
        problems.append(Problem("compress.vocabulary", "trim", reason, "write keep", code="unsupported"))
    return problems


def _check_tokenizer(config: Config, weights: Path) -> list[Problem]:
    """Check the settings of a student whose tokenizer differs from the teacher's."""
    recipe, mismatch = config.recipe, f"{weights} has another tokenizer than the teacher"
    fix, problems = "name a student with the teacher's tokenizer", []
    if base.get_task(recipe.task).is_token_level:
        reason = f"{mismatch}, and {recipe.task} predicts each token"
        problems.append(Problem("distill.student", recipe.distill.student, reason, fix, code="tokenizer_mismatch"))
    for name in losses.WEIGHT_SETTINGS:
        if weight := getattr(recipe.distill, name):
            reason, field = f"{mismatch}, and it compares tokens", f"distill.{name}"
            problems.append(Problem(field, weight, reason, f"{fix}, or write 0", code="tokenizer_mismatch"))
    return problems
