"""Verbs that train: `train`, `tune` and `distill`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from rtrain import config as configuration
from rtrain.api import keywords, rows
from rtrain.api.keywords import option_error
from rtrain.api.process import (
    OnEvent,
    connect_ray,
    name_interrupted_run,
    restore_process,
    save_on_interrupt,
    show_progress,
)
from rtrain.api.results import FoldsResult, StudyResult, TrainResult, TuneResult
from rtrain.config import Config
from rtrain.config.recipe import SETTINGS_RESET_FOR_STUDENTS
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, Problem, TemporaryFailureError, suggest_path
from rtrain.core.run_folder import Run, resolve_artifact, resolve_run

if TYPE_CHECKING:
    from rtrain.config import TuneConfig
    from rtrain.runs.run_folders import Reuse

PathLike = str | os.PathLike[str]


def resolve_reuse(resume: bool, new: bool) -> "Reuse":
    """Return the policy for a run folder that is in use."""
    if resume and new:
        reason, fix = "--resume and --new exclude each other", "continue, or start another"
        raise option_error("--new", None, reason, fix, "conflicting_settings")
    return "resume" if resume else "new" if new else "refuse"


@dataclass(frozen=True)
class RunRequest:
    """The arguments of a call that trains or searches."""

    verb: str
    recipe: str | None
    """Name of a recipe, or a YAML file; optional where `out` holds a run."""
    out: str | None
    reuse: "Reuse"
    overrides: Mapping[str, Any]
    """Settings by dotted name; the paths of rows may be rows in memory."""
    problems: tuple[Problem, ...] = ()
    """Problems of the keywords, which are raised together with those of the settings."""
    folds: int | None = None
    """Number of folds of a cross-validation."""

    @classmethod
    def from_arguments(
        cls,
        verb: str,
        recipe: PathLike | None,
        out: PathLike | None,
        settings: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> "RunRequest":
        """`options`: the keywords of the call; `resume`, `new` and, for `train`, `folds` are taken out of them."""
        reuse = resolve_reuse(bool(options.pop("resume", False)), bool(options.pop("new", False)))
        folds = options.pop("folds", None) if verb == "train" else None
        overrides, problems = keywords.resolve_settings(verb, settings, options)
        if folds is not None:
            overrides["data.folds"] = folds
        recipe_name, out_name = (None if path is None else os.fspath(path) for path in (recipe, out))
        return cls(verb, recipe_name, out_name, reuse, overrides, tuple(problems), folds)

    def load_settings(self) -> tuple[Config, Path]:
        """Load and check the settings; return them and the run's folder. Torch is not imported.

        A resumed run keeps its own configuration, changed by the settings of the call.
        """
        from rtrain.runs import run_folders

        config_source, overrides = self._find_recipe(), self.overrides
        if self.recipe is None and self.out and self.reuse == "resume":
            # The settings are the run's own: an open setting would contradict the run's decision.
            overrides = run_folders.resume_overrides(Run(run_folders.default_run_folder("", self.out)), overrides)
        config = self._check_settings(config_source, overrides)
        is_search = self.verb == "tune"
        if is_search and self.reuse == "resume" and config.recipe.distill.teacher is not None:
            resume_command = Run(run_folders.default_run_folder("", self.out)).resume_command
            reason, fix = "a search over students needs their teacher", f"write {resume_command}"
            raise option_error("distill.teacher", config.recipe.distill.teacher, reason, fix, "needs_teacher")
        if self.reuse != "resume":
            _refuse_student(Path(config_source).expanduser().absolute(), config)
        suffix = "-search" if is_search else "-folds" if self.folds else ""
        folder = run_folders.default_run_folder(f"{config.recipe.name}{suffix}", self.out)
        if any(rows.has_rows(overrides.get(name)) for name in keywords.ROW_SETTINGS):
            if self.reuse == "refuse":  # before rows are written, which may take minutes
                run_folders.choose_folder(folder, config, self.reuse)
            config = configuration.load_config(config_source, rows.store_rows(overrides, folder.parent))
        resumed_run = folder / "fold-0" if self.folds else folder
        return run_folders.resolve_paths(config, resumed_run if self.reuse == "resume" else None), folder

    def open_run(self) -> tuple[Config, Path]:
        """Return the settings and the folder to write."""
        config, folder = self.load_settings()
        from rtrain.runs import prepare

        if self.verb == "tune":
            prepare.refuse_lost_search(config, folder, self.reuse, "train", self.recipe or config.recipe.name)
        folder, config = prepare.resolve_run_folder(config, folder, self.reuse)
        return config, folder

    def _check_settings(self, config_source: str, overrides: Mapping[str, Any]) -> Config:
        """Load the settings, with all problems of the call in one error."""
        problems = [*self.problems, *rows.find_problems(overrides)]
        try:
            config = configuration.load_config(config_source, rows.with_placeholders(overrides))
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems], error.advice) from None
        keywords.refuse_problems(problems)
        return config

    def _find_recipe(self) -> str:
        """Return the recipe's name or file; optional where `out` holds a run, which is resumed or restarted."""
        out, reuse = self.out, self.reuse
        if reuse == "resume" and out is None:
            reason, fix = "continues the run in --out, which is missing", "write --out with the folder of the run"
            raise option_error("--resume", None, reason, fix, "missing")
        if self.recipe is not None:
            return self.recipe
        if self.folds is not None:
            fix = "write the command that started the folds, with --resume"
            raise option_error("recipe", None, "--folds needs it", fix, "missing")
        run_config = Path(out or ".").expanduser() / "config.yaml"
        if reuse != "refuse" and run_config.is_file():
            return str(run_config)
        fix = "write a recipe's name or a YAML file; to continue a run, write --resume --out RUN"
        reason = "missing"
        if reuse == "resume" and (hint := suggest_path(run_config.parent)):
            reason, fix = f"missing, and {out} holds no run", hint
        raise option_error("recipe", None, reason, fix, "missing")


def _refuse_student(file: Path, config: Config) -> None:
    """Raise `ConfigError` if `file` is a student's configuration: `train` would train it without its teacher's logits
    and without a gate."""
    if (teacher := config.recipe.distill.teacher) is None:
        return
    from rtrain.evaluation.inspect_artifact import make_distill_command

    run = Run(file.parent)
    distill_command = (
        make_distill_command(run, teacher) if file == run.config else "rtrain distill, with the run of that artifact"
    )
    reason, fix = "students are trained by rtrain distill", f"write {distill_command}"
    raise option_error("distill.teacher", teacher, reason, fix, "needs_teacher")


@contextmanager
def _follow_run(config: Config, folder: Path, on_event: OnEvent | None, concurrent_runs: int = 1) -> Iterator[OnEvent]:
    """Connect to Ray for a run in `folder`, and show its progress."""
    with (
        name_interrupted_run(folder),
        show_progress(on_event) as progress,
        connect_ray(config, folder.parent, progress, concurrent_runs),
        save_on_interrupt(),
    ):
        yield progress


# -------------------------------------------------------------------------------------------------------------- verbs


@restore_process()
def train(
    recipe: PathLike | None = None,
    data: Any = None,
    *,
    out: PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> TrainResult:
    """Fine-tune an encoder on texts, as `rtrain train` does.

    Args:
        recipe: name of a recipe, or a YAML file. With `resume=True` the run in `out` has its own.
        data: training rows: a pandas DataFrame, a list of dictionaries, an Arrow table, a data set of `datasets` or of
            Ray Data, a path, a URL or a hub name.
        out: folder of the run; default: runs/<recipe>-<time>.
        settings: settings by dotted name, e.g. {"train.epochs": 3}.
        on_event: called with each event of the run, in place of the progress line.
        options: resume=True continues the run in `out`, new=True takes the next free folder; valid, test, model,
            workers and address as on the command line; folds=5 trains a run for each fold of a cross-validation, and
            returns a `FoldsResult`; any setting by its last name, e.g. epochs=3, label="category".

    Raises:
        ConfigError: invalid arguments; `problems` has all of them.
        UserError: the training failed.
        RunInterruptedError: the call was interrupted; the newest checkpoint is saved.
    """
    request = RunRequest.from_arguments("train", recipe, out, settings, {"data": data, **options})
    if request.folds is not None:
        return cast(TrainResult, _train_folds(request, on_event))
    config, folder = request.open_run()
    from rtrain.runs import controller, prepare

    source, _ = prepare.check_run(config, folder.parent, is_resumed=request.reuse == "resume")
    with _follow_run(config, folder, on_event) as progress:
        progress(events.make_phase_event("reading the rows", "rows"))
        prepared = prepare.prepare_run(config, folder, request.reuse, source=source)
        summary = controller.fit(prepared, on_event=progress)
    return TrainResult.from_run(prepared.run, summary)


def _train_folds(request: RunRequest, on_event: OnEvent | None) -> FoldsResult:
    """Train each fold of a cross-validation."""
    from rtrain.runs import folds, prepare

    config, folder = request.load_settings()
    config, folder = folds.resolve_folds(config, folder, request.reuse)
    source, _ = prepare.check_run(config, folder.parent, is_resumed=request.reuse == "resume")
    with _follow_run(config, folder, on_event) as progress:
        document = folds.train_folds(config, folder, source, on_event=progress)
    runs = tuple(folds.get_fold_run(folder, fold) for fold in range(document["folds"]))
    return FoldsResult(folder, document, f"{folds.format_page(document)}\nfolder: {folder}", runs)


@restore_process()
def tune(
    recipe: PathLike | None = None,
    data: Any = None,
    *,
    out: PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> TuneResult:
    """Search learning rate and aggregation frequency, or another `space`, as `rtrain tune` does.

    The arguments are those of `train`. `space` has a range (`rtrain.loguniform`, `rtrain.uniform`) or a list of choices
    by the dotted name of a setting. With `tune.study` set, the result is a `StudyResult`, which has
    no winner.
    """
    request = RunRequest.from_arguments("tune", recipe, out, settings, {"data": data, **options})
    config, folder = request.open_run()
    if config.deploy.tune.study is not None:
        return cast(TuneResult, _run_study(config, folder, request.reuse, on_event))
    from rtrain.cluster import preflight

    # Before Ray is imported, which takes seconds.
    keywords.refuse_problems(preflight.check_oversubscription(config, env.available_cores()))
    from rtrain.models import builder as models
    from rtrain.runs import prepare
    from tune import search

    search.check_search(config)
    prepare.check_run(config, folder.parent, is_resumed=request.reuse == "resume")
    if request.reuse != "resume":
        search.check_model(config, models.resolve_folder(config.recipe.model.name, folder.parent))
    return run_search(config, folder, request.reuse, on_event)


def _run_study(config: Config, folder: Path, reuse: "Reuse", on_event: OnEvent | None) -> StudyResult:
    from rtrain.runs import prepare
    from tune import study

    study.check_study(config)
    prepare.check_run(config, folder.parent, is_resumed=reuse == "resume")
    with _follow_run(config, folder, on_event) as progress:
        progress(events.make_phase_event("reading the rows", "rows"))
        study_result = study.run_study(config, folder, reuse, on_event=progress)
    text = (
        f"{study_result.table.to_markdown}\n\nas a page: {study_result.study.study_page}; as JSON: "
        f"{study_result.study.study_table}"
    )
    return StudyResult(study_result.study.folder, dict(study_result.table.document), text)


def run_search(
    config: Config, folder: Path, reuse: "Reuse", on_event: OnEvent | None = None, teacher: Path | None = None
) -> TuneResult:
    """Run a checked search. `teacher`: artifact whose students are searched."""
    from rtrain.evaluation import gate_table
    from rtrain.report.progress import ProgressLine, format_summary
    from rtrain.report.summary import summarize
    from tune import search, trainable
    from tune.history import Journal
    from tune.report import table

    settings, journal, headline = config.deploy.tune, Journal(Run(folder).trials), trainable.headline_metric(config)
    with _follow_run(config, folder, on_event, settings.max_concurrent_trials or 1) as progress:
        follower = table.SearchFollower(headline, settings, journal.history)
        with (
            progress.follow_search(follower) if isinstance(progress, ProgressLine) else nullcontext(),
            _report_trials_on_interrupt(progress, folder, headline, settings),
        ):
            progress(events.make_phase_event("reading the rows", "rows"))
            search_result = search.run_search(config, folder, reuse, on_event=progress, teacher=teacher)
    summary, baseline_name = summarize(search_result.winner), "trial 0" if teacher is None else "the teacher"
    gate_lines = [] if search_result.gate_verdict is None else gate_table.format_brief(search_result.gate_verdict)
    if gate_lines:
        gate_lines = [f"gate, these weights against those of {baseline_name}: {gate_lines[0]}", *gate_lines[1:], ""]
    verdict = table.describe_search(search_result.search)
    winner_lines = format_summary(summary, search_result.winner)
    text = [
        f"{verdict}\n",
        *(["\n".join(gate_lines)] if gate_lines else []),
        table.format_table(search_result.history, headline, settings),
        f"settings of the winner: {search_result.search.best_config}; all trials: {search_result.search.search_page}",
        winner_lines,
    ]
    return TuneResult(
        search_result.search.folder,
        {**search_result.to_document(), "winner": summary, "verdict_text": verdict},
        "\n".join(text),
        TrainResult(search_result.winner.folder, summary, winner_lines),
        verdict,
        search_result.history,
        headline,
    )


@contextmanager
def _report_trials_on_interrupt(
    progress: OnEvent, folder: Path, headline: str, settings: "TuneConfig"
) -> Iterator[None]:
    """Report the trials so far when an interruption or a stop request ends a search."""
    try:
        yield
    except (KeyboardInterrupt, TemporaryFailureError):
        from tune.history import Journal
        from tune.report import table

        if (history := Journal(Run(folder).trials).history).trials:
            for line in table.format_table(history, headline, settings).splitlines():
                progress({"kind": "stage", "text": line})
        raise


def require_finished_run(run: PathLike) -> Path:
    """Return the folder of a finished run, or of a search's winner. Raises `UserError` for others, with the command
    that resumes them."""
    folder = Path(os.fspath(run)).expanduser().absolute()
    run_folder = resolve_run(folder).folder
    resolve_artifact(folder)
    return run_folder


@dataclass(frozen=True)
class DistillRequest:
    """The arguments of a distillation, or of a search over students."""

    run: Path
    """The folder of the call: a run, or a search."""
    teacher: Path
    """The run, or the search's winner."""
    config: Config
    folder: Path
    reuse: "Reuse"

    @classmethod
    def from_arguments(
        cls,
        run: PathLike,
        out: PathLike | None,
        settings: Mapping[str, Any] | None,
        options: dict[str, Any],
        search: bool,
    ) -> "DistillRequest":
        """Load the teacher's settings with those of the call. Torch is not imported."""
        from rtrain.runs import run_folders

        run_folder, teacher = Path(os.fspath(run)).expanduser().absolute(), require_finished_run(run)
        reuse = resolve_reuse(bool(options.pop("resume", False)), bool(options.pop("new", False)))
        overrides, problems = keywords.resolve_settings("distill", settings, options)
        problems += rows.find_problems(overrides)
        teacher_config = run_folders.load_config(teacher, SETTINGS_RESET_FOR_STUDENTS)
        teacher_config = replace(teacher_config, explicit_settings=frozenset())
        try:
            configuration.with_overrides(teacher_config, rows.with_placeholders(overrides))
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems], error.advice) from None
        keywords.refuse_problems(problems)
        default_folder = run_folder.with_name(f"{run_folder.name}-{'students' if search else 'student'}")
        folder = Path(os.fspath(out)).expanduser().absolute() if out else default_folder
        config = configuration.with_overrides(teacher_config, rows.store_rows(overrides, folder.parent))
        return cls(run_folder, teacher, run_folders.resolve_paths(config, teacher), folder, reuse)


@overload
def distill(run: PathLike, *, search: Literal[False] = False, **options: Any) -> TrainResult: ...


@overload
def distill(run: PathLike, *, search: Literal[True], **options: Any) -> TuneResult: ...


@restore_process()
def distill(
    run: PathLike,
    *,
    out: PathLike | None = None,
    search: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> TrainResult | TuneResult:
    """Train a smaller model on a run's rows and its model's answers, as `rtrain distill` does.

    Args:
        run: the teacher: a finished run, or a search.
        out: folder of the student; default: beside the run, with the suffix -student.
        search: search over students, by the settings `tune`; the result is a `TuneResult`.
        settings, on_event, options: as for `train`; epochs and lr are those of `distill`.
    """
    request = DistillRequest.from_arguments(run, out, settings, options, search)
    if search:
        return _search_students(request, on_event)
    from rtrain.compress import distill as distillation
    from rtrain.evaluation import gate_table
    from rtrain.report.progress import format_summary
    from rtrain.runs import run_folders

    config, folder, reuse = request.config, request.folder, request.reuse
    if reuse != "resume":
        folder = run_folders.choose_folder(folder, config, reuse)[0]
    resolved_config = distillation.resolve_config(config, folder, reuse)
    distillation.derive_student_config(
        resolved_config, distillation.Teacher.load(resolve_artifact(request.teacher)), folder.parent
    )  # before Ray starts
    with _follow_run(resolved_config, folder, on_event) as progress:
        student, summary = distillation.run_distillation(config, request.teacher, folder, reuse, on_event=progress)
    gate_lines = gate_table.format_brief(summary["gate"]) if "gate" in summary else []
    return TrainResult(student, summary, "\n".join([format_summary(summary, Run(student)), *gate_lines]))


def _search_students(request: DistillRequest, on_event: OnEvent | None) -> TuneResult:
    """Search over the students of a teacher's artifact."""
    from rtrain.compress import distill as distillation
    from rtrain.runs import prepare, run_folders
    from tune import search, students

    config, folder, reuse = request.config, request.folder, request.reuse
    prepare.refuse_lost_search(config, folder, reuse, "distill", request.teacher)
    teacher = distillation.Teacher.load(resolve_artifact(request.teacher))
    if reuse == "resume":
        prepare.restore_run(config, folder)
    else:
        folder = run_folders.choose_folder(folder, config, reuse)[0]
    search_config = students.derive_search_config(
        distillation.resolve_config(config, folder, reuse), teacher, folder.parent
    )
    search.check_students(search_config, teacher, folder.parent)
    if reuse != "resume":
        distillation.check_config(search_config, teacher, folder.parent)
    return run_search(search_config, folder, reuse, on_event, teacher.folder)
