"""Verbs for artifacts: `quantize`, `evaluate`, `gate`, `compare` and `serve`."""

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import config as configuration
from rtrain.api import keywords, rows
from rtrain.api.keywords import option_error
from rtrain.api.model import PathOrUrl, find_artifact
from rtrain.api.process import OnEvent, close_ray, restore_process, show_progress
from rtrain.api.results import CompareResult, EvaluateResult, GateResult, QuantizeResult
from rtrain.api.training import PathLike, require_finished_run
from rtrain.config import Config
from rtrain.core.run_folder import Run, quote_path

if TYPE_CHECKING:
    from rtrain.config import ServeConfig
    from serve.deployment import Endpoint

DEFAULT_RECIPE = "intent"
"""The recipe whose settings apply where no run is involved."""


def _resolve_settings(
    verb: str, settings: Mapping[str, Any] | None, options: Mapping[str, Any], root: Path
) -> dict[str, Any]:
    """Return the settings of a call, with rows written below `root`. Raises `ConfigError` with all problems."""
    overrides, problems = keywords.resolve_settings(verb, settings, options)
    keywords.refuse_problems([*problems, *rows.find_problems(overrides)])
    return rows.store_rows(overrides, root)


def _find_root(artifact: Path) -> Path:
    """Return the folder of the runs that an artifact belongs to; runs/ for an artifact outside of a run."""
    return artifact.parent.parent if Run(artifact.parent).exists else Path("runs").absolute()


@restore_process()
def quantize(
    run: PathLike,
    *,
    out: PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> QuantizeResult:
    """Make an int8 artifact of a run, calibrated on training rows, and score it on the test rows.

    Args:
        run: a finished run, or a search.
        out: folder of the int8 artifact; default: artifact-int8 in the run.
        settings, options: settings by dotted name, or by last name.
        on_event: called with each event, in place of the progress line.

    Raises:
        UserError: the run is unfinished, or quantized already; `ConfigError` for invalid settings.
    """
    from rtrain.compress import quantize as quantization
    from rtrain.runs import run_folders

    parent = Run(require_finished_run(run))
    overrides = _resolve_settings("quantize", settings, options, parent.folder.parent)
    config = run_folders.load_config(parent.folder, overrides)
    out_folder = Path(os.fspath(out)).expanduser().absolute() if out is not None else parent.int8_artifact
    with show_progress(on_event) as progress:
        store, threads = quantization.find_token_store(parent.folder), config.deploy.serve.threads
        report = quantization.run_quantization(config.recipe, store, parent.folder, out_folder, progress, threads)
    return QuantizeResult(out_folder, report, quantization.format_report(report))


@restore_process()
def evaluate(
    artifact: PathOrUrl, data: Any, *, settings: Mapping[str, Any] | None = None, **options: Any
) -> EvaluateResult:
    """Score an artifact on labeled rows, through the path that answers requests.

    Args:
        artifact: folder of an artifact, a run or a search; the result of a verb; or a URL.
        data: rows as for `rtrain.train`. The columns are those of the training rows, but for settings such as label=.
        settings, options: settings `data`, by dotted name or by last name.
    """
    folder = find_artifact(artifact)
    overrides = _resolve_settings("evaluate", settings, {"data": data, **options}, _find_root(folder))
    from rtrain.inference import artifact as artifacts, score
    from rtrain.metrics import scores

    metadata = artifacts.read_artifact(folder)
    scoring_settings = score.resolve_scoring_settings(metadata, overrides)
    report = score.score_file(folder, scoring_settings)
    row_lines = score.describe_rows(report, scoring_settings, metadata.labels)
    return EvaluateResult(folder, report, "\n".join((scores.format_scores(report), "", *row_lines)))


@restore_process()
def gate(
    candidate: PathOrUrl,
    baseline: PathOrUrl | None = None,
    data: Any = None,
    *,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> GateResult:
    """Promote, hold or refuse an artifact by score, slices, latency and size against its baseline, on this machine.

    The verdict is written into a local artifact.

    Args:
        candidate: folder of an artifact, a run or a search; the result of a verb; or a URL.
        baseline: the same, to compare with; default: the float artifact of the candidate's run.
        data: rows as for `rtrain.train`; default: the test rows of the run.
        settings, options: settings by dotted name, or by last name, such as min_recall=.
        on_event: called with each event, in place of the progress line.
    """
    folder = find_artifact(candidate)
    overrides = _resolve_settings("gate", settings, {"data": data, **options}, _find_root(folder))
    from rtrain.evaluation import gate as gates, gate_table
    from rtrain.inference import artifact

    baseline_folder = gates.find_default_baseline(folder) if baseline is None else find_artifact(baseline)
    if baseline_folder is None:
        fix = "write --baseline with the artifact, or the run, to compare with"
        reason = "missing, and the candidate is not compressed from a run"
        raise option_error("--baseline", None, reason, fix, "missing")
    request, gate_settings = gates.prepare_request(folder, baseline_folder, overrides)
    with show_progress(on_event) as progress:
        verdict = gates.run_gate(request, gate_settings, measures_memory=True, trains_rivals=True, on_event=progress)
        if not (is_cached := artifact.is_cached(folder)):
            gates.record_verdict(folder, verdict)
    return GateResult(folder, verdict, gate_table.format_verdict(verdict), not is_cached)


@restore_process()
def compare(*runs: PathLike, out: PathLike | None = None) -> CompareResult:
    """Test whether one run is better than another, by their answers to the same rows, and write a page.

    Args:
        runs: runs, searches (their winners) or artifacts; each is compared with the first.
        out: the HTML page; default: beside the first run.
    """
    from rtrain.evaluation import compare as comparing, page

    folders = [Path(os.fspath(run)) for run in runs]
    comparison = comparing.compare_runs(folders)
    path = page.default_path(comparison) if out is None else Path(os.fspath(out)).expanduser().absolute()
    path = page.write_comparison(comparison, path)
    document = {**comparing.build_document(comparison), "page": str(path)}
    text = f"{page.format_comparison(comparison)}\n\npage: {path}"
    return CompareResult(folders[0].absolute(), document, text, comparison.verdict, path)


# ------------------------------------------------------------------------------------------------------------ endpoint


class EndpointHandle:
    """A running endpoint. It ends with `stop()`, with its `with` block, or with the process."""

    def __init__(self, stack: ExitStack, endpoint: "Endpoint", folders: Mapping[str, Path], settings: "ServeConfig"):
        self.url, self.port = endpoint.url, endpoint.port
        self.folders = dict(folders)
        """Folders of the artifacts by model name."""
        self.settings = settings
        self._stack = stack
        atexit.register(self.stop)

    def __enter__(self) -> "EndpointHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"EndpointHandle({self.url!r}, models={list(self.folders)})"

    def stop(self) -> None:
        """Let requests in progress end, and stop the endpoint. A second call does nothing."""
        atexit.unregister(self.stop)
        with restore_process():
            self._stack.close()


def prepare_endpoint(
    artifacts: Sequence[str], config: Config, notify: Callable[[str], None]
) -> tuple["ServeConfig", dict[str, Path]]:
    """Check the settings and the artifacts of an endpoint before it starts; return its settings with absolute paths,
    and the artifacts' folders by model name. `notify` receives the folder of each artifact that has another name."""
    from serve.auth import preflight

    def resolve_folder(name: str) -> Path:
        folder = find_artifact(name, notify)
        if str(folder) != os.path.abspath(name):
            notify(f"answering with {quote_path(folder)}")
        return folder

    settings = preflight.resolve_paths(config.deploy.serve)  # the session changes the folder
    preflight.check_access(settings, notify)
    folders = preflight.parse_model_specs(artifacts, resolve_folder)
    preflight.check_artifacts(folders, settings, notify)
    return settings, folders


@restore_process()
def serve(
    artifacts: PathOrUrl | Sequence[PathOrUrl] | Mapping[str, PathOrUrl],
    *,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    **options: Any,
) -> EndpointHandle:
    """Serve one or several artifacts over HTTP on Ray Serve; return when the endpoint answers.

    Args:
        artifacts: folder of an artifact, a run or a search, the result of a verb, or a URL; several as a list, or by
            model name.
        settings, options: settings `serve` by dotted name, or by last name: port=8000, host=, keys=, ungated=True.
        on_event: called with each event, in place of the progress line.

    Raises:
        UserError: an artifact may not be served, or the address is in use; `ConfigError` for invalid settings.
    """
    overrides = _resolve_settings("serve", settings, options, Path("runs").absolute())
    config = configuration.load_config(DEFAULT_RECIPE, overrides)
    if isinstance(artifacts, Mapping):
        specs = [f"{name}={os.fspath(artifact)}" for name, artifact in artifacts.items()]
    else:
        addresses = [artifacts] if isinstance(artifacts, str | os.PathLike) else artifacts
        specs = [os.fspath(address) for address in addresses]
    with show_progress(on_event) as progress, ExitStack() as stack:

        def notify(text: str) -> None:
            progress({"kind": "stage", "text": text})

        serve_settings, folders = prepare_endpoint(specs, config, notify)
        from serve import launcher
        from serve.rollout import admin_socket

        close_ray()  # an endpoint starts a Ray of its own, with prepared processes
        endpoint = stack.enter_context(launcher.launch_endpoint(config, serve_settings, folders, notify))
        stack.enter_context(admin_socket.serve_admin_socket(endpoint.port, endpoint.handle_command))
        return EndpointHandle(stack.pop_all(), endpoint, folders, serve_settings)
