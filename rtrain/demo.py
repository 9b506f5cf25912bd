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
from rtrain.data import row_reader, sources, synthetic
from rtrain.data.splits import Splits
from rtrain.data.store import builder as store_builder
from rtrain.metrics.registry import get_metric
from rtrain.models import builder as models_builder
from rtrain.report.progress import ProgressLine, print_message
from rtrain.report.summary import summarize
from rtrain.runs import prepare, run_folders
from rtrain.tasks import base

NUM_QUERY_TEXTS = 200
QUERY_BATCH_SIZE = 16
# The endpoint and `rtrain predict` load the same artifact, so that their labels must be equal. Their scores may differ
# by so much, since an int8 engine's scores move a little with the batch.
SCORE_TOLERANCE = 0.02
ISOLATED_TASK_OPTIONS: dict[str, Any] = {"num_cpus": 1, "max_calls": 1}
"""A task in a process that ends with it, which frees the memory of scikit-learn, or of torch, NNCF and two engines."""


@dataclass
class DemoStage:
    """A line of the table. A figure that a stage does not have is None."""

    name: str
    seconds: float = 0.0
    score: float | None = None
    rows: int | None = None
    size_mb: float | None = None
    latency_ms: float | None = None


@dataclass
class DemoReport:
    stages: list[DemoStage] = field(default_factory=list)
    baseline: float = 0.0
    default_score: float = 0.0
    winner_score: float = 0.0
    answer_matches: bool = False

    @contextmanager
    def time_stage(self, name: str, line: ProgressLine) -> Iterator[DemoStage]:
        """Time the stage in the `with` block, and print a line at its start and end."""
        stage, start = DemoStage(name), time.perf_counter()
        line({"kind": "stage", "text": f"{name} ..."})
        yield stage
        stage.seconds = round(time.perf_counter() - start, 1)
        self.stages.append(stage)
        score_text = "" if stage.score is None else f"  score {stage.score:.4f}"
        line({"kind": "stage", "text": f"{name} done in {stage.seconds:.1f} s{score_text}"})


def run_demo(config: Config, out: str | None, keep_serving: bool = False) -> dict[str, Any]:
    """Run all stages; return the JSON object of `rtrain demo --json`.

    With `keep_serving`, the endpoint is served until Ctrl-C. Nothing is left running if a stage raises an error.
    """
    from rtrain.cluster.connection import session, wait_until_interrupted
    from serve.auth import preflight

    start_time = time.perf_counter()
    reason, fix = "the demo sends requests without a key", "leave it out, and serve the artifact of the demo"
    if problems := [
        Problem(f"serve.{name}", value, reason, fix, code="conflicting_settings")
        for name in ("keys", "tls_cert")
        if (value := getattr(config.deploy.serve, name))
    ]:
        raise ConfigError(problems)
    folder = run_folders.default_run_folder("demo", out)
    config = _write_demo_data(config, folder, must_be_empty=out is not None)
    prepare.check_run(config)
    preflight.check_access(config.deploy.serve, print_message)
    with ProgressLine() as line, session(config, folder, line):
        report = DemoReport()
        _run_training_stages(report, config, folder, line)
        with _run_serving_stages(report, config, folder, line) as url:
            document = _write_result(report, folder, time.perf_counter() - start_time)
            if keep_serving:
                print_message(
                    f"serving at {url} (Ctrl-C ends it)\nnext: {preflight.curl_command(url, config.deploy.serve)}"
                )
                wait_until_interrupted()
    return document


def _write_result(report: DemoReport, folder: Path, seconds: float) -> dict[str, Any]:
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
    print_message(format_table(report, document))
    return document


def _write_demo_data(config: Config, folder: Path, must_be_empty: bool) -> Config:
    if must_be_empty and folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; name a new folder", code="not_empty")
    train, test = synthetic.write_csv_files(folder / "data")
    return run_folders.resolve_paths(
        configuration.with_overrides(config, {"data.path": str(train), "data.test": str(test)})
    )


def _run_training_stages(report: DemoReport, config: Config, folder: Path, line: ProgressLine) -> None:
    import ray

    from rtrain.compress import distill, quantize
    from rtrain.evaluation import gate_table
    from tune import search
    from tune.report import table

    recipe = config.recipe
    with report.time_stage("ingest", line) as stage:
        source = row_reader.inspect_source(recipe.data)
        store, _ = store_builder.build_or_open(recipe, source, models_builder.resolve_folder(recipe.model.name), folder)
        stage.rows = sum(store.manifest.rows.values())
        report.baseline = ray.get(ray.remote(**ISOLATED_TASK_OPTIONS)(_score_baseline).remote(recipe))
    headline = get_metric(base.get_task(recipe.task).output).headline
    with report.time_stage("search", line) as stage:
        with line.follow_search(table.SearchFollower(headline, config.deploy.tune)):
            search_result = search.run_search(config, folder / "search", on_event=line, tokens_root=folder)
        default_metrics, winner_metrics = (
            summarize(run)["metrics"]["test"] for run in (search_result.search.trial(0), search_result.winner)
        )
        report.default_score, report.winner_score = default_metrics[headline], winner_metrics[headline]
        stage.score, stage.rows = winner_metrics[headline], search_result.trained_rows
    teacher = search_result.winner.folder
    with report.time_stage("distill", line) as stage:
        settings = configuration.load_config(str(Run(teacher).config))
        student, summary = distill.run_distillation(settings, teacher, folder / "student", on_event=line)
        stage.score, stage.rows = summary["metrics"]["test"][headline], summary["rows_seen"]
    with report.time_stage("quantize", line) as stage:
        task = ray.remote(**ISOLATED_TASK_OPTIONS)(quantize.run_quantization)
        quantize_report = ray.get(task.remote(recipe, store.folder, student, student / "artifact-int8"))
        stage.score = quantize_report["test"][headline]
        stage.size_mb = quantize_report["size_mb"]
        stage.rows = recipe.quantize.calibration_rows
    line(events.make_phase_event(f"gate: {gate_table.format_sentence(quantize_report['gate'])}", "gate"))


def _score_baseline(recipe: configuration.Recipe) -> float:
    """The test accuracy of the TF-IDF baseline, on the same training, validation and test rows as the encoder."""
    from rtrain.report import baselines

    rows_by_split: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in ("train", "valid", "test")}
    source = row_reader.inspect_source(recipe.data)
    splits = Splits.from_config(recipe.data, source)
    for source_file in source.files:
        for record in row_reader.read_rows(source_file, recipe.data):
            texts, labels = rows_by_split[splits.assign_split(record, source_file.role)]
            texts.append(record.text)
            labels.append(record.label)
    return baselines.measure_accuracy(rows_by_split["train"], rows_by_split["valid"], rows_by_split["test"])


@contextmanager
def _run_serving_stages(report: DemoReport, config: Config, folder: Path, line: ProgressLine) -> Iterator[str]:
    """Serve the int8 student and send requests to it. Yields the endpoint's address; the endpoint ends with the block.

    It is served whatever the gate's verdict, which was printed: the demo shows the whole path.
    """
    from serve import deployment

    artifact = folder / "student" / "artifact-int8"
    with report.time_stage("serve", line):
        endpoint = deployment.start_endpoint(artifact, config.deploy.serve.model_copy(update={"ungated": True}))
    with endpoint:
        with report.time_stage("ask", line) as stage:
            assert config.recipe.data.test
            rows = list(
                row_reader.read_rows(sources.SourceFile(config.recipe.data.test, "csv", "test"), config.recipe.data)
            )
            sample = rows[:: len(rows) // NUM_QUERY_TEXTS][:NUM_QUERY_TEXTS]
            answer = query_endpoint(endpoint.url, artifact, [row.text for row in sample])
            num_correct = sum(label == row.label for label, row in zip(answer.labels, sample, strict=True))
            report.answer_matches, stage.latency_ms = answer.matches_predict, answer.latency_ms
            stage.score, stage.rows = num_correct / len(sample), len(sample)
        yield endpoint.url


# --------------------------------------------------------------------------------------------------------------- ask


@dataclass(frozen=True)
class EndpointAnswers:
    """The endpoint's answers."""

    labels: list[str]
    matches_predict: bool
    latency_ms: float
    """Median of the single requests."""


def query_endpoint(url: str, artifact: Path, texts: Sequence[str]) -> EndpointAnswers:
    """Ask the endpoint for each text alone and for all in batches; compare the answers with `rtrain predict`'s."""
    import httpx

    single_answers, batch_answers, latencies_s = [], [], []
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for text in texts:
            start_time = time.perf_counter()
            single_answers.append(_parse_top_answers(client.post("/predict", json={"inputs": text}))[0])
            latencies_s.append(time.perf_counter() - start_time)
        for start_row in range(0, len(texts), QUERY_BATCH_SIZE):
            batch = list(texts[start_row : start_row + QUERY_BATCH_SIZE])
            batch_answers += _parse_top_answers(client.post("/predict", json={"inputs": batch}))
    predicted = _predict_with_cli(artifact, texts)
    matches = have_same_answers(single_answers, predicted) and have_same_answers(batch_answers, predicted)
    return EndpointAnswers(
        [label for label, _ in single_answers], matches, round(1000 * sorted(latencies_s)[len(latencies_s) // 2], 2)
    )


def have_same_answers(left: Sequence[tuple[str, float]], right: Sequence[tuple[str, float]]) -> bool:
    """Equal labels, and scores within the engine's tolerance, row by row."""
    return len(left) == len(right) and all(
        left_label == right_label and abs(left_score - right_score) <= SCORE_TOLERANCE
        for (left_label, left_score), (right_label, right_score) in zip(left, right, strict=True)
    )


def _parse_top_answers(response: Any) -> list[tuple[str, float]]:
    response.raise_for_status()
    return [(answer[0]["label"], answer[0]["score"]) for answer in response.json()]


def _predict_with_cli(artifact: Path, texts: Sequence[str]) -> list[tuple[str, float]]:
    """The answers of the `rtrain predict` command, in a process of its own."""
    from rtrain.cluster.connection import package_root

    command = [sys.executable, "-m", "rtrain", "predict", str(artifact), "--json"]
    lines = "\n".join(text.replace("\n", " ") for text in texts)
    completed_process = subprocess.run(
        command, input=lines, capture_output=True, text=True, check=False, cwd=package_root()
    )
    if completed_process.returncode:
        raise UserError(f"rtrain predict {artifact} failed: {completed_process.stderr.strip()}", code="failed")
    return [(answer[0]["label"], answer[0]["score"]) for answer in json.loads(completed_process.stdout)]


# ------------------------------------------------------------------------------------------------------------- table


def format_table(report: DemoReport, document: dict[str, Any]) -> str:
    """The table of the demo: a line per stage, and the scores of the baseline, the default recipe and the winner, which
    are shown even if the winner loses."""
    lines = [f"{'stage':<10} {'seconds':>8} {'rows':>8} {'score':>8} {'MB':>7} {'ms/text':>8}"]
    for stage in report.stages:
        cells = (
            (stage.rows, 8, ",d"),
            (stage.score, 8, ".4f"),
            (stage.size_mb, 7, ".1f"),
            (stage.latency_ms, 8, ".2f"),
        )
        formatted = (f"{'' if value is None else format(value, form):>{width}}" for value, width, form in cells)
        lines.append(f"{stage.name:<10} {stage.seconds:>8.1f} {' '.join(formatted)}")
    match_text = "the same as rtrain predict's" if report.answer_matches else "NOT THE SAME as rtrain predict's"
    return "\n".join(
        [
            *lines,
            f"test accuracy: TF-IDF baseline {report.baseline:.4f}, default recipe {report.default_score:.4f}, "
            f"winner {report.winner_score:.4f}",
            f"answers over HTTP are {match_text}; {document['seconds']:.0f} s",
            f"everything is in {document['run']}",
        ]
    )
