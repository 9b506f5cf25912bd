"""An artifact as a model of MLflow: the flavor `pyfunc`, and versions in the model registry.

MLflow stores the artifact folder unchanged and imports this module to load it, so that no pickle is read. The input is
a table with a column for each text of the task (`text`, or `question` and `context`). The output is the table of
`rtrain predict --data`, or the JSON of /predict where a row has no single answer. An int8 artifact needs no torch.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import __version__
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Task

if TYPE_CHECKING:
    import mlflow
    import pandas as pd

VERSION_TAG, GATE_TAG = "rtrain.version", "rtrain.gate"
"""Tags of a registered version: digest of the artifact's model files, and the gate's verdict."""
ARTIFACTS_FOLDER = "mlflow-artifacts"
"""Files of the runs of a SQLite store, beside it. MLflow's default is the current folder."""


class ArtifactModel:
    """A loaded artifact with the method that MLflow calls."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor
        self._columns = list_answer_columns(predictor.task, predictor.head)

    def predict(self, model_input: "pd.DataFrame", params: Mapping[str, Any] | None = None) -> "pd.DataFrame":
        """Answer the rows of a table with the columns of the signature; a missing second text means a single text.

        `params` belongs to MLflow's interface and is unused. Raises `UserError` for an invalid text.
        """
        import pandas as pd

        first, second = self.predictor.task.fields  # MLflow has checked that required columns exist
        pairs = model_input[second] if second in model_input else [None] * len(model_input)
        inputs = [
            {first: text, second: pair} if isinstance(pair, str) else text
            for text, pair in zip(model_input[first], pairs, strict=True)
        ]
        answers = self.predictor(inputs)
        return pd.DataFrame({column.name: [column.value(answer) for answer in answers] for column in self._columns})


def list_answer_columns(task: Task, head: Head) -> list[AnswerColumn]:
    """Return the columns of the output. Lists and objects are JSON, since a signature describes plain columns."""
    try:
        columns = task.answer_columns(head)
    except UserError:  # e.g. masked words: a row has no single answer
        return [AnswerColumn("answer", str, lambda answer: json.dumps(answer, ensure_ascii=False))]
    return [
        column if column.kind in (str, float, int, bool) else column._replace(kind=str, value=_to_json(column))
        for column in columns
    ]


def _to_json(column: AnswerColumn) -> Any:
    return lambda answer: json.dumps(column.value(answer), ensure_ascii=False)


def _load_pyfunc(path: str) -> ArtifactModel:
    """Load the artifact folder `path`; MLflow calls this function by its name."""
    return ArtifactModel(Predictor.load(Path(path)))


def save_model(folder: Path, model_folder: Path) -> None:
    """Write the artifact of `folder` as a model of MLflow to `model_folder`, with signature and input example."""
    import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    facts = artifact.read_artifact(folder)
    task, head = base.get_task(facts.task), Head(facts.labels, facts.facts)
    first, second = task.fields
    inputs = Schema([ColSpec("string", first), ColSpec("string", second, required=task.needs_pair)])
    types = {str: "string", float: "double", int: "long", bool: "boolean"}
    columns = list_answer_columns(task, head)
    # Every value may be missing, e.g. the answer to a question that its text does not answer.
    outputs = Schema([ColSpec(types[column.kind], column.name, required=False) for column in columns])
    examples = [example if isinstance(example, Mapping) else {first: example} for example in task.example_inputs(head)]
    engine = engines.get_engine(facts.engine)
    extra = "train" if engine.has_gradients else engine.extra
    mlflow.pyfunc.save_model(
        str(model_folder),
        loader_module=__name__,
        data_path=str(folder),
        signature=ModelSignature(inputs=inputs, outputs=outputs),
        input_example=pd.DataFrame(examples),
        pip_requirements=[f"rtrain{f'[{extra}]' if extra else ''}=={__version__}", "mlflow-skinny", "pandas"],
        metadata={"task": facts.task, "version": facts.version, "engine": facts.engine, "lineage": dict(facts.lineage)},
    )


def resolve_server(uri: str | None, folder: Path) -> str:
    """Return the address of the server: `uri`, else MLFLOW_TRACKING_URI, else a SQLite file in `folder`."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"


def open_client(uri: str) -> "mlflow.MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def find_or_create_experiment(client: "mlflow.MlflowClient", name: str, uri: str) -> str:
    """Return the id of the experiment `name`."""
    if (experiment := client.get_experiment_by_name(name)) is not None:
        return str(experiment.experiment_id)
    store = uri.removeprefix("sqlite:///")
    location = None if store == uri else str(Path(store).absolute().with_name(ARTIFACTS_FOLDER))
    return str(client.create_experiment(name, artifact_location=location))


def register_artifact(folder: Path, name: str, client: "mlflow.MlflowClient", run_id: str) -> str:
    """Register the artifact of `folder` as a version of the model `name`, with its files in an MLflow run.

    Returns:
        The number of the version; an artifact with a version keeps it.
    """
    from mlflow.exceptions import MlflowException

    facts = artifact.read_artifact(folder)
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(name, tags={"rtrain.task": facts.task})
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.tags.get(VERSION_TAG) == facts.version:
            return str(version.version)
    model_folder = f"model-{facts.version}"  # a run may have a float and an int8 artifact
    with tempfile.TemporaryDirectory() as draft:
        save_model(folder, Path(draft) / model_folder)
        client.log_artifacts(run_id, str(Path(draft) / model_folder), model_folder)
    verdict = (facts.gate or {}).get("verdict") if (facts.gate or {}).get("version") == facts.version else None
    tags = {VERSION_TAG: facts.version, GATE_TAG: verdict or "none", "rtrain.engine": facts.engine}
    source = f"{client.get_run(run_id).info.artifact_uri}/{model_folder}"
    return str(client.create_model_version(name, source, run_id, tags=tags).version)
