"""Results of the verbs. Each is a path too: any verb accepts it in place of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    import pandas

    from rtrain.api.model import Model
    from tune.history import History


@dataclass(frozen=True)
class ArtifactFolder:
    """The artifact of a result."""

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    def load(self, threads: int | None = None) -> "Model":
        """Load the model for answers in this process; see `rtrain.load`."""
        from rtrain.api.model import load

        return load(self.folder, threads=threads)


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a verb."""

    folder: Path
    """Folder of the run, of the search, or of the artifact."""
    document: Mapping[str, Any]
    """The JSON object that the command prints with `--json`."""
    text: str
    """The lines that the command prints."""

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        values = (
            (name, round(value, 4) if isinstance(value, float) else value) for name, value in self.figures.items()
        )
        return f"{type(self).__name__}({str(self.folder)!r}{''.join(f', {name}={value!r}' for name, value in values)})"

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Scores by split, `valid` and `test`; None for a split without rows."""
        return {}

    @property
    def figures(self) -> Mapping[str, Any]:
        """Named figures of the card and of the short form: the verdict, and the scores of the test rows."""
        scores = self.metrics.get("test") or self.metrics.get("valid") or self.metrics
        figures = {"verdict": getattr(self, "verdict", None), **scores}
        return {name: value for name, value in figures.items() if isinstance(value, int | float | str)}

    def _repr_html_(self) -> str:
        from rtrain.api import notebook

        return notebook.render_card(f"{type(self).__name__} {self.folder.name}", self.figures, self._card_parts())

    def _card_parts(self) -> list[str]:
        """Further HTML of the card."""
        return []


@dataclass(frozen=True, repr=False)
class TrainResult(Result):
    """A run: `rtrain.train`, `rtrain.distill`, and the winner of `rtrain.tune`."""

    @classmethod
    def from_run(cls, run: Run, summary: Mapping[str, Any]) -> "TrainResult":
        from rtrain.report.progress import format_summary

        return cls(run.folder, summary, format_summary(dict(summary), run))

    @property
    def run(self) -> Run:
        """The run's folder with its log."""
        return Run(self.folder)

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.document["metrics"]  # type: ignore[no-any-return]

    @property
    def artifact(self) -> ArtifactFolder:
        return ArtifactFolder(self.run.artifact)

    @property
    def report(self) -> Path:
        """The run's page, report.html."""
        return self.run.report

    @property
    def verdict(self) -> str | None:
        """The gate's verdict on a student: promote, hold or refuse; None for other runs."""
        return self.document["gate"]["verdict"] if "gate" in self.document else None

    def _card_parts(self) -> list[str]:
        from rtrain.api import notebook  # numpy and rich, which `import rtrain` does not need

        return [notebook.render_curve(self.run), notebook.render_link(self.report)]


@dataclass(frozen=True, repr=False)
class TuneResult(Result):
    """A search: `rtrain.tune`, and `rtrain.distill` with `search=True`."""

    winner: TrainResult
    verdict: str
    """Whether the winner is better than the first trial, in one sentence."""
    history: "History" = field(compare=False)
    headline: str
    """Name of the score that the search maximizes; errors have the prefix `neg_`."""

    @cached_property
    def dataframe(self) -> "pandas.DataFrame":
        """The trials, one row each, in Ray Tune's columns: `config/optim.lr` and so on. It needs pandas."""
        import pandas

        return pandas.DataFrame([self._make_row(trial) for trial in self.history.trials])

    def _make_row(self, trial: Any) -> dict[str, Any]:
        last_rung, final = (trial.rung_results[-1] if trial.rung_results else None), trial.final_result
        return {
            "trial_id": f"{trial.number:03d}",
            self.headline: None if last_rung is None else last_rung.score,
            f"holdout_{self.headline}": None if final is None else final.holdout_score,
            "training_iteration": len(trial.rung_results),
            "done": trial.status != "created",
            "status": trial.status,
            "time_total_s": trial.seconds,
            "logdir": str(Run(self.folder).trial(trial.number).folder),
            **{f"config/{name}": value for name, value in trial.settings.items()},
        }

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.winner.metrics

    def _card_parts(self) -> list[str]:
        from rtrain.api import notebook  # numpy and rich, which `import rtrain` does not need

        return [notebook.render_link(Run(self.folder).search_page)]


@dataclass(frozen=True, repr=False)
class StudyResult(Result):
    """A study of aggregation frequencies: `rtrain.tune` with `tune.study`."""


@dataclass(frozen=True, repr=False)
class FoldsResult(Result):
    """A cross-validation: `rtrain.train` with `folds`. `document` is the content of folds.json."""

    runs: tuple[Run, ...]
    """The run of each fold."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Mean, std, min and max of each score on the test rows of the folds."""
        return {"test": self.document["scores"]}


@dataclass(frozen=True, repr=False)
class QuantizeResult(Result):
    """An int8 artifact; `document` is the report."""

    @property
    def artifact(self) -> ArtifactFolder:
        return ArtifactFolder(self.folder)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Scores of the int8 model on the test rows."""
        return {"test": self.document["test"]}

    @property
    def verdict(self) -> str:
        """The gate's verdict: promote, hold or refuse."""
        return str(self.document["gate"]["verdict"])


@dataclass(frozen=True, repr=False)
class GateResult(Result):
    """A verdict about an artifact; `document` has the measurements."""

    is_recorded: bool
    """Whether the verdict is in the artifact: the copy of a URL is left alone."""

    @property
    def verdict(self) -> str:
        """promote, hold or refuse"""
        return str(self.document["verdict"])

    @property
    def reasons(self) -> list[str]:
        return list(self.document["reasons"])


@dataclass(frozen=True, repr=False)
class EvaluateResult(Result):
    """Scores of an artifact on rows; `document` is the report."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.document["scores"]  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class CompareResult(Result):
    """A comparison of runs; `folder` is that of the first run."""

    verdict: str
    """Whether each run is better than the first, in one sentence."""
    page: Path

    def _card_parts(self) -> list[str]:
        from rtrain.api import notebook  # numpy and rich, which `import rtrain` does not need

        return [notebook.render_link(self.page)]
