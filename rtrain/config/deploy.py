"""The sections `cluster`, `tune`, `serve` and `report`: where and how a recipe runs. They change no run's weights."""

from typing import Annotated, Literal

from pydantic import Field

from rtrain.config.data import Positive, Section
from rtrain.errors import Problem


class Cluster(Section):
    address: str | None = None
    """Address of a Ray cluster; by default RAY_ADDRESS (set inside a job), else a private local one."""
    max_crashes: Annotated[int, Field(ge=0)] = 3
    """Crashes without progress after which a run is given up. Progress sets the count back to 0; nodes that are taken
    away do not count."""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without a pass after which a worker counts as hung: it is ended, its traceback is left in the run folder,
    and the run starts again from its newest checkpoint. While a worker writes, copies, reads or scores, it gets twelve
    times as long, and so do the workers that wait for it."""
    data_cpus: Positive | None = None
    """Logical CPUs for the data tasks, beside the workers' own. Default: 2, and one more for every 8 workers. (Measured
    with 1,000 workers and updates of 32,000 rows: a task takes 3 ms for one worker's part, so one CPU keeps up with 8
    workers whose updates take 24 ms.)"""
    storage: str | None = None
    """URL (s3://, gs://, file:// or another that fsspec knows). Each run's checkpoints, log and artefact are copied to
    `<storage>/<run>`; where the run folder is lost, `--resume` brings it back from there."""


class Tune(Section):
    trials: Annotated[int, Field(ge=1)] = 4
    """Number of trials; trial 0 is the recipe as it stands."""
    points: tuple[dict[str, float], ...] = ()
    """Settings to try right after trial 0, e.g. [{optim.lr: 1.0e-4}]; further trials draw from tune.lr and
    tune.aggregation_frequency."""
    lr: tuple[float, ...] = (1e-4, 3e-4, 5e-4)
    """Learning rates that trials draw from."""
    aggregation_frequency: tuple[Positive, ...] = (2, 4, 8)
    """Aggregation frequencies that trials draw from."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the updates that each trial but trial 0 may use; the winner is then continued to the end."""
    first_rung: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the updates after which a trial is first compared with the others, and stopped if it is behind."""
    concurrent: Positive = 1
    """Trials that run at a time; each has train.workers workers."""


class Serve(Section):
    host: str = "127.0.0.1"
    """Address to listen on; the default answers this machine alone."""
    insecure: bool = False
    """Allow an address that others can reach, although the endpoint asks nobody for a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    replicas: Positive = 1
    """Copies of the model that answer side by side."""
    threads: Positive = 1
    """Processor threads of one replica's engine."""
    max_batch_rows: Positive = 32
    """Most texts of one engine call."""
    max_batch_tokens: Positive = 16_384
    """Most tokens of one engine call, padding included; this bounds memory and time where texts are long. A longer text
    goes alone, a few windows at a time. 16,384 are 32 texts of 512 tokens, as in evaluation."""
    max_queue_rows: Positive = 1024
    """Most texts that may wait; a request beyond them is answered 503 with Retry-After."""
    max_inputs: Positive = 256
    """Most texts in one request."""
    max_body_bytes: Positive = 1_000_000
    """Most bytes of a request's body; a larger one is answered 413."""
    deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a request without an answer is answered 504."""


class Report(Section):
    attributions: Annotated[int, Field(ge=0, le=20)] = 20
    """How many of the hardest rows the report explains; they are computed once, when the run has finished. 0: none."""
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = ()
    """Trackers that get what the run logs, e.g. [tensorboard, mlflow]; each needs the extra of its name."""
    tensorboard_dir: str | None = None
    """Folder in which each run gets a folder of its own. Default: `tensorboard` beside the run."""
    mlflow_uri: str | None = None
    """Tracking server or store. Default: MLFLOW_TRACKING_URI, else the file `mlflow.db` beside the run."""
    mlflow_experiment: str | None = None
    """Name of the experiment. Default: the name of the recipe."""


class Deploy(Section):
    cluster: Cluster = Cluster()
    tune: Tune = Tune()
    serve: Serve = Serve()
    report: Report = Report()


def deploy_contradictions(deploy: Deploy) -> list[Problem]:
    """Settings that are valid alone and impossible together."""
    tune = deploy.tune
    if tune.first_rung <= tune.budget:
        return []
    return [Problem("tune.first_rung", tune.first_rung, f"above tune.budget={tune.budget}", "write a smaller share")]
