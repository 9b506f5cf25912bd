"""Push an artifact to a registry: the Hugging Face Hub (`hf://OWNER/NAME`) or MLflow's (`models:/NAME`)."""

import re
from pathlib import Path
from typing import Literal

from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem, UserError, redact
from rtrain.core.run_folder import Run
from rtrain.inference import artifact, mlflow_model
from rtrain.report import model_card
from rtrain.report.tracker_feed import find_missing_library
from rtrain.report.trackers import TrackerState

_HUB_NAME = re.compile(r"hf://([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)/?")
_MODEL_NAME = re.compile(r"models:/([^/:%\"']+)")  # MLflow refuses the slash and the colon in a name


def parse_destination(text: str) -> tuple[Literal["hub", "mlflow"], str]:
    """Return the registry and the name in it of `hf://owner/name` or `models:/name`. Raises `ConfigError`."""
    if match := _HUB_NAME.fullmatch(text):
        return "hub", match[1]
    if match := _MODEL_NAME.fullmatch(text):
        return "mlflow", match[1]
    reason, fix = "it names no registry", "write hf://OWNER/NAME for the hub, or models:/NAME for MLflow"
    raise ConfigError([Problem("DESTINATION", text, reason, fix, code="invalid_name")])


def push_to_hub(folder: Path, repo: str, *, license: str | None = None, is_private: bool = True) -> str:
    """Push the files of an artifact and its model card in one commit, and return the commit's URL.

    License and intended use of an existing card stay. Raises `HubError`.
    """
    facts = artifact.read_artifact(folder)
    previous_card = hub.read_model_card(repo) or ""
    source = model_card.CardSource(facts, model_card.find_run(folder), repo, license, previous_card)
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    files["README.md"] = model_card.format_card(source).encode()
    return hub.push_files(repo, files, f"{facts.name} {facts.version}", is_private=is_private)


def push_to_mlflow(folder: Path, name: str, uri: str | None = None) -> tuple[str, str]:
    """Register an artifact as a version of a model; its files go to the MLflow run of its training, or to a new one.

    Args:
        uri: tracking server; default: MLFLOW_TRACKING_URI, else the SQLite file beside the run.

    Returns:
        The server's address, and the version.

    Raises:
        UserError: MLflow is not installed; the server does not answer, or refuses.
    """
    if (problem := find_missing_library("DESTINATION", "mlflow")) is not None:
        raise ConfigError([problem])
    from mlflow.exceptions import MlflowException

    facts, run = artifact.read_artifact(folder), model_card.find_run(folder)
    server = mlflow_model.resolve_server(uri, (run or Run(folder)).folder.parent)
    try:
        client = mlflow_model.open_client(server)
        run_id = None
        if run is not None:
            state = TrackerState(run.folder, "mlflow")
            state.select(redact(server))
            run_id = state.values.get("run_id")
        if run_id is None:
            experiment_id = mlflow_model.find_or_create_experiment(client, facts.name, server)
            run_id = client.create_run(experiment_id, run_name=f"{facts.name} {facts.version}").info.run_id
            client.set_terminated(run_id)
        return redact(server), mlflow_model.register_artifact(folder, name, client, run_id)
    except MlflowException as error:
        reason = redact((str(error).splitlines() or [""])[0][:300])
        text = f"{redact(server)} cannot be used ({reason}); name a server that answers by --mlflow-uri"
        raise UserError(text, code="unreachable") from None
