"""The whole path on the embedded data, on real Ray: ingest, search, train, distill, quantize, serve, ask."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader, synthetic
from rtrain.data.sources import find
from rtrain.data.splits import Splits
from rtrain.data.store import builder as store_builder
from rtrain.metrics.registry import metric_for
from rtrain.models import builder as models_builder
from rtrain.report.live.progress import Line, say
from rtrain.report.summary import summarise
from rtrain.runs import prepare, run_folders
from rtrain.tasks import base

ASKED_TEXTS = 200
ASKED_TOGETHER = 16
# The endpoint and `rtrain predict` load the same artefact, so that their labels must be equal. Their scores may differ
# by so much, since an int8 engine's scores move a little with the batch.
SCORE_TOLERANCE = 0.02
ALONE: dict[str, Any] = {"num_cpus": 1, "max_calls": 1}
"""A task in a process that ends with it, which frees the memory of scikit-learn, or of torch, NNCF and two engines."""


@dataclass
class Stage:
    """A line of the table. A figure that a stage does not have is None."""

    name: str
    seconds: float = 0.0
    score: float | None = None
    rows: int | None = None
    size_mb: float | None = None
    latency_ms: float | None = None


@dataclass
class Report:
    stages: list[Stage] = field(default_factory=list)
    baseline: float = 0.0
    default_score: float = 0.0
    winner_score: float = 0.0
    answer_matches: bool = False

    @contextmanager
    def stage(self, name: str, line: Line) -> Iterator[Stage]:
        """Time the stage in the `with` block, and say when it begins and when it is done."""
        stage, start = Stage(name), time.perf_counter()
        line({"kind": "stage", "text": f"{name} ..."})
        yield stage
        stage.seconds = round(time.perf_counter() - start, 1)
        self.stages.append(stage)
        score = "" if stage.score is None else f"  score {stage.score:.4f}"
        line({"kind": "stage", "text": f"{name} done in {stage.seconds:.1f} s{score}"})


def run(config: Config, out: str | None, keep: bool = False) -> dict[str, Any]:
    """Run all stages; returns what `rtrain demo --json` prints.

    With `keep`, the endpoint is served until Ctrl-C. Nothing is left running if a stage raises an error.
    """
    from rtrain.cluster.connection import session, until_interrupted
    from serve.auth import preflight

    started = time.perf_counter()
    given = {name: value for name in ("keys", "tls_cert") if (value := getattr(config.deploy.serve, name))}
    if given:
        reason, fix = "the demo asks its endpoint itself, as anybody would", "leave it out, and serve what it has made"
        raise ConfigError(
            [Problem(f"serve.{name}", value, reason, fix, code="conflicting_settings") for name, value in given.items()]
        )
    folder = run_folders.folder_for("demo", out)
    config = _with_data(config, folder, refuse=out is not None)
    prepare.check(config)
    preflight.check(config.deploy.serve, say)
    with Line() as line, session(config, folder, line):
        report = Report()
        _train_stages(report, config, folder, line)
        with _serve_stages(report, config, folder, line) as url:
            document = _finish(report, folder, time.perf_counter() - started)
            if keep:
                say(f"serving at {url} (Ctrl-C ends it)\nnext: {preflight.curl(url, config.deploy.serve)}")
                until_interrupted()
    return document


def _finish(report: Report, folder: Path, seconds: float) -> dict[str, Any]:
    """Write and show the result. It must come before the endpoint is kept, which only Ctrl-C ends."""
    document = {
        "stages": [{"name": stage.name, "seconds": stage.seconds, "score": stage.score} for stage in report.stages],
        "baseline_score": round(report.baseline, 4),
        "default_score": round(report.default_score, 4),
        "winner_score": round(report.winner_score, 4),
        "answer_matches": report.answer_matches,
        "seconds": round(seconds, 1),
        "run": str(folder),
    }
    (folder / "demo.json").write_text(json.dumps(document, indent=1) + "\n")
    say(table(report, document))
    return document


def _with_data(config: Config, folder: Path, refuse: bool) -> Config:
    if refuse and folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder", code="not_empty")
    train, test = synthetic.write(folder / "data")
    return run_folders.absolute(configuration.with_overrides(config, {"data.path": str(train), "data.test": str(test)}))


def _train_stages(report: Report, config: Config, folder: Path, line: Line) -> None:
    import ray

    from rtrain.compress import distill, quantize
    from rtrain.evaluation import gate_table
    from tune import search
    from tune.report import table

    recipe = config.recipe
    with report.stage("ingest", line) as stage:
        source = row_reader.inspect(recipe.data)
        store, _ = store_builder.ensure(recipe, source, models_builder.resolve(recipe.model.name), folder)
        stage.rows = sum(store.manifest.rows.values())
        report.baseline = ray.get(ray.remote(**ALONE)(_baseline).remote(recipe))
    headline = metric_for(base.get(recipe.task).output).headline
    with report.stage("search", line) as stage:
        with line.following(table.Follower(headline, config.deploy.tune)):
            found = search.run(config, folder / "search", on_event=line, tokens_root=folder)
        default, winner = (summarise(run)["metrics"]["test"] for run in (found.search.trial(0), found.winner))
        report.default_score, report.winner_score = default[headline], winner[headline]
        stage.score, stage.rows = winner[headline], found.rows
    teacher = found.winner.folder
    with report.stage("distill", line) as stage:
        settings = configuration.load(str(Run(teacher).config))
        student, summary = distill.run(settings, teacher, folder / "student", on_event=line)
        stage.score, stage.rows = summary["metrics"]["test"][headline], summary["rows_seen"]
    with report.stage("quantize", line) as stage:
        task = ray.remote(**ALONE)(quantize.run)
        made = ray.get(task.remote(recipe, store.folder, student, student / "artifact-int8"))
        stage.score, stage.size_mb, stage.rows = (
            made["test"][headline],
            made["size_mb"],
            recipe.quantize.calibration_rows,
        )
    line(events.doing(f"gate: {gate_table.sentence(made['gate'])}", "gate"))


def _baseline(recipe: configuration.Recipe) -> float:
    """The test accuracy of the TF-IDF baseline, on the same training, validation and test rows as the encoder."""
    from rtrain.report import baselines

    parts: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in ("train", "valid", "test")}
    source = row_reader.inspect(recipe.data)
    splits = Splits.of(recipe.data, source)
    for piece in source.pieces:
        for record in row_reader.read(piece, recipe.data):
            texts, labels = parts[splits.split(record, piece.role)]
            texts.append(record.text)
            labels.append(record.label)
    return baselines.accuracy(parts["train"], parts["valid"], parts["test"])


@contextmanager
def _serve_stages(report: Report, config: Config, folder: Path, line: Line) -> Iterator[str]:
    """Serve the int8 student and ask it. Gives the endpoint's address; the endpoint lives as long as the block.

    It is served whatever the gate has said, which was shown: the demo shows the whole path.
    """
    from serve import deployment

    artifact = folder / "student" / "artifact-int8"
    with report.stage("serve", line):
        endpoint = deployment.start(artifact, config.deploy.serve.model_copy(update={"ungated": True}))
    with endpoint:
        with report.stage("ask", line) as stage:
            assert config.recipe.data.test
            rows = list(row_reader.read(find.Piece(config.recipe.data.test, "csv", "test"), config.recipe.data))
            asked = rows[:: len(rows) // ASKED_TEXTS][:ASKED_TEXTS]
            answer = ask(endpoint.url, artifact, [row.text for row in asked])
            right = sum(label == row.label for label, row in zip(answer.labels, asked, strict=True))
            report.answer_matches, stage.latency_ms = answer.matches, answer.latency_ms
            stage.score, stage.rows = right / len(asked), len(asked)
        yield endpoint.url


# --------------------------------------------------------------------------------------------------------------- ask


@dataclass(frozen=True)
class Answer:
    """What the endpoint answered."""

    labels: list[str]
    matches: bool
    latency_ms: float
    """Median of the single requests."""


def ask(url: str, artifact: Path, texts: Sequence[str]) -> Answer:
    """Ask the endpoint for each text alone and for all in batches; compare the answers with `rtrain predict`'s."""
    import httpx

    alone, together, times = [], [], []
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for text in texts:
            start = time.perf_counter()
            alone.append(_best(client.post("/predict", json={"inputs": text}))[0])
            times.append(time.perf_counter() - start)
        for start_row in range(0, len(texts), ASKED_TOGETHER):
            batch = list(texts[start_row : start_row + ASKED_TOGETHER])
            together += _best(client.post("/predict", json={"inputs": batch}))
    predicted = _predict(artifact, texts)
    matches = same_answers(alone, predicted) and same_answers(together, predicted)
    return Answer([label for label, _ in alone], matches, round(1000 * sorted(times)[len(times) // 2], 2))


def same_answers(left: Sequence[tuple[str, float]], right: Sequence[tuple[str, float]]) -> bool:
    """Equal labels, and scores within the engine's tolerance, row by row."""
    return len(left) == len(right) and all(
        one[0] == other[0] and abs(one[1] - other[1]) <= SCORE_TOLERANCE for one, other in zip(left, right, strict=True)
    )


def _best(response: Any) -> list[tuple[str, float]]:
    response.raise_for_status()
    return [(answer[0]["label"], answer[0]["score"]) for answer in response.json()]


def _predict(artifact: Path, texts: Sequence[str]) -> list[tuple[str, float]]:
    """The answers of the `rtrain predict` command, in a process of its own."""
    from rtrain.cluster.connection import package_root

    command = [sys.executable, "-m", "rtrain", "predict", str(artifact), "--json"]
    lines = "\n".join(text.replace("\n", " ") for text in texts)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, cwd=package_root())
    if done.returncode:
        raise UserError(f"rtrain predict {artifact} failed: {done.stderr.strip()}", code="failed")
    return [(answer[0]["label"], answer[0]["score"]) for answer in json.loads(done.stdout)]


# ------------------------------------------------------------------------------------------------------------- table


def table(report: Report, document: dict[str, Any]) -> str:
    """The table of the demo: a line per stage, and the scores of the baseline, the default recipe and the winner, which
    are shown even if the winner loses."""
    lines = [f"{'stage':<10} {'seconds':>8} {'rows':>8} {'score':>8} {'MB':>7} {'ms/text':>8}"]
    for stage in report.stages:
        cells = [
            (stage.rows, 8, ",d"),
            (stage.score, 8, ".4f"),
            (stage.size_mb, 7, ".1f"),
            (stage.latency_ms, 8, ".2f"),
        ]
        shown = " ".join(f"{'' if value is None else format(value, form):>{width}}" for value, width, form in cells)
        lines.append(f"{stage.name:<10} {stage.seconds:>8.1f} {shown}")
    matches = "the same as rtrain predict's" if report.answer_matches else "NOT THE SAME as rtrain predict's"
    return "\n".join(
        [
            *lines,
            f"test accuracy: TF-IDF baseline {report.baseline:.4f}, default recipe {report.default_score:.4f}, "
            f"winner {report.winner_score:.4f}",
            f"answers over HTTP are {matches}; {document['seconds']:.0f} s",
            f"everything is in {document['run']}",
        ]
    )
