"""Where and how a recipe runs: cluster, search, endpoint and report; none of it changes a run's weights."""

from typing import Annotated, Literal

from pydantic import Field

from rtrain.config.data import Positive, Section
from rtrain.errors import Problem


class Cluster(Section):
    address: str | None = None
    """Address of a Ray cluster; by default RAY_ADDRESS (set inside a job), else a private local one."""
    max_crashes: Annotated[int, Field(ge=0)] = 3
    """Crashes without progress after which a run is given up. A start that came further than the last counts anew;
    nodes that are taken away are not counted."""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """A worker that makes no pass for this long (seconds) is ended, with its traceback in the run folder, and the run
    started again from its newest checkpoint. Where it writes, copies, reads or scores, it may show no sign of progress
    for twelve times as long; the workers that wait for it wait on."""
    data_cpus: Positive | None = None
    """Logical CPUs for the data tasks, beside the workers' own. Default: 2, and one more for every 8 workers: with
    1,000 of them a task takes 3 ms for a worker's part of an update of 32,000 rows, so that one CPU keeps up with 8
    workers whose updates take 24 ms."""
    storage: str | None = None
    """URL (s3://, gs://, file:// or another that fsspec knows) under which each run's checkpoints, log and artefact are
    copied as `<storage>/<run>`: `--resume` brings back from there a run whose folder is lost."""


class Tune(Section):
    trials: Annotated[int, Field(ge=1)] = 4
    """Trials in all; trial 0 is the recipe as it stands."""
    points: tuple[dict[str, float], ...] = ()
    """Settings to try right after trial 0, e.g. [{optim.lr: 1.0e-4}]; the rest is drawn from the lists below."""
    lr: tuple[float, ...] = (1e-4, 3e-4, 5e-4)
    """Learning rates to choose from."""
    aggregation_frequency: tuple[Positive, ...] = (2, 4, 8)
    """Aggregation frequencies to choose from."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the updates that a trial other than trial 0 may use; the winner is then continued to the end."""
    first_rung: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the updates at which a trial is first compared, and stopped if it is behind."""
    concurrent: Positive = 1
    """Trials at a time; each takes all of train.workers."""


class Serve(Section):
    host: str = "127.0.0.1"
    insecure: bool = False
    """Listen also where others can reach it, though nobody is asked for a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port."""
    replicas: Positive = 1
    threads: Positive = 1
    """Processor threads of one replica's engine."""
    max_batch_rows: Positive = 32
    """Most texts that one engine call answers."""
    max_batch_tokens: Positive = 16_384
    """Most tokens of one engine call, padding included: what bounds its memory and its time where texts are long. A
    text of more goes alone, its windows in parts. 16,384 are 32 texts of 512 tokens, as in evaluation."""
    max_queue_rows: Positive = 1024
    """Texts that may wait; beyond it a request is answered 503 with Retry-After."""
    max_inputs: Positive = 256
    """Most texts in one request."""
    max_body_bytes: Positive = 1_000_000
    deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """A request that has not been answered by then is answered 504."""


class Report(Section):
    attributions: Annotated[int, Field(ge=0, le=20)] = 20
    """Hardest rows whose answers are explained in the report, once, when the run has finished; 0 for none."""
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = ()
    """Trackers that are told what the run logs, e.g. [tensorboard, mlflow]; each needs the extra of its name."""
    tensorboard_dir: str | None = None
    """Folder under which each run gets one of its own. Default: `tensorboard` beside the run."""
    mlflow_uri: str | None = None
    """Tracking server or store. Default: MLFLOW_TRACKING_URI, else the file `mlflow.db` beside the run."""
    mlflow_experiment: str | None = None
    """Default: the name of the recipe."""


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
