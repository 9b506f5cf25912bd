"""What each Ray Train worker runs: build the model, follow the order, train, and (rank 0) make the artefact."""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain import artifact, engines, env, predict
from rtrain.batch import Head, Ragged, Tokens
from rtrain.checkpoints import replica
from rtrain.config import Recipe, parse
from rtrain.data import ingest
from rtrain.data.order import Order
from rtrain.data.store import Store, open_store
from rtrain.errors import ConfigError, UserError
from rtrain.exchange import ranks
from rtrain.exchange.alive import Watch
from rtrain.exchange.gradients import Exchange
from rtrain.metrics import scores
from rtrain.metrics.by_output import metric_for
from rtrain.network import model, packed, pooling, precision, sentence
from rtrain.report import events
from rtrain.runs import decisions, notice, predictions, recovery
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, reading_of
from rtrain.training import evaluate, loop, losses, pass_size

if TYPE_CHECKING:
    import torch
    import transformers

STALLED = "stalled-{}.txt"
"""Traceback of a worker, by rank, that hung in the newest start; empty where it did not."""
TOKENS_PER_PASS = 2048
"""On a CPU. Measured (MiniLM, bf16, one thread): 500 tokens 1.55, 1,000 1.72, 2,000 1.83, 3,000 1.9, 6,000 1.73
thousand tokens a second."""
PASS = "tokens_per_pass"
"""The decision's name."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


class _TrainReporter:
    """Events go to the run's log (rank 0), scores to Ray Train (every rank: it is a barrier)."""

    def __init__(self, run: Path, rank: int):
        self._run, self._rank = run, rank

    def event(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            events.append(self._run, kind, **fields)

    def score(self, metrics: dict[str, Any]) -> None:
        import ray.train

        ray.train.report(metrics)

    def notice(self) -> bool:
        return self._rank == 0 and notice.given(self._run)


def run(settings: dict[str, Any]) -> None:
    """The train function of `driver.fit`; `settings` is what `driver` put together, plain values only."""
    import ray.train
    import torch

    clock = loop.Clock()
    ingest.warm_up()
    with clock.section("setup"):
        context = ray.train.get_context()
        rank, world = context.get_world_rank(), context.get_world_size()
        torch.set_num_threads(max(1, env.cores() // context.get_local_world_size()))
        config = parse(settings["config"], {})
        recipe, folder, source = config.recipe, Path(settings["run"]), Path(settings["model"])
        stall_s = config.deploy.cluster.stall_s
        if not folder.is_dir():  # on a node that came after the driver had asked all nodes
            raise UserError(
                f"--out: {folder} is not there on {os.uname().nodename}; name one on storage that every node mounts"
            )
        watch = Watch(folder / STALLED.format(rank), stall_s)
        store, task = open_store(Path(settings["store"])), base.get(recipe.task)
        how = {"pack": recipe.train.packed, "fast_dropout": recipe.train.fast_dropout}
        labels, seed = store.manifest.labels, recipe.train.seed
        read = watch.busy()(lambda: model.build(source, task, labels, seed, recipe.model, **how))
        network = ranks.together(watch, read)
        if recipe.train.gradient_checkpointing:
            model.keep_inputs_alone(network)
        model.place(network, _device())
        loss = losses.for_run(task, recipe.distill, store.manifest.head, recipe.train.label_smoothing)
        chosen = _precision(watch, network.device, folder, recipe.train.precision)
        fits = _fitting(watch, network, folder, source, recipe, store, loss, chosen)
        reporter = _TrainReporter(folder, rank)
        exchange = Exchange(
            network,
            watch,
            reporter.event,
            touched_rows=recipe.train.touched_rows,
            by=recipe.train.transport,
            compressed=recipe.train.gradient_compression,
        )
        order = Order(
            store.manifest.digest, store.rows("train"), recipe.rows_per_update, recipe.train.epochs, recipe.train.seed
        )
        job = loop.Job(
            recipe=recipe,
            run=folder,
            store=store,
            task=task,
            loss=loss,
            order=order,
            pad_id=model.pad_id(source),
            precision=chosen,
            until=min(settings["until"] or order.updates, order.updates),
            evaluate_at=frozenset(settings["evaluate_at"]),
            replica=replica.of(config.deploy.cluster, folder, settings["owners"]),
        )
    # Where padding costs nothing, the rows of a worker are regrouped: tokens alone say how many fit into a pass.
    most_rows = None if packed.enabled(network) else recipe.train.micro_batch
    asked = recipe.train.tokens_per_pass or _smallest(exchange, folder, fits) or TOKENS_PER_PASS
    most_tokens = recovery.tokens_per_pass(asked, settings["halvings"])
    if rank == 0 and most_tokens < asked:
        events.append(folder, "smaller_passes", tokens=most_tokens)
    share = ingest.Share(store.folder, order, world, rank, most_rows, most_tokens, recipe.distill.teacher)
    outcome = loop.train(job, exchange, lambda start, stop: ingest.stream(share, start, stop), reporter, clock)
    if outcome.finished:
        answers = dict(outcome.outcomes)
        if job.validates and "valid" not in answers:  # the best weights are an earlier start's
            answers["valid"] = evaluate.gathered(
                exchange, task, store, "valid", pad_id=job.pad_id, precision=job.precision
            )

        @watch.busy()
        def finish() -> None:
            if rank == 0:
                _finish(network, source, *_calibrated(job, outcome, answers), answers, watch.alive)

        ranks.together(watch, finish)  # no rank leaves, and so ends the run, before the artefact is written
    watch.stop()


def _device() -> "torch.device":
    """The GPU that Ray gave this worker. One that is there but was given to nobody is left alone."""
    import ray
    import ray.train.torch
    import torch

    return ray.train.torch.get_device() if ray.get_gpu_ids() else torch.device("cpu")


def _precision(watch: Watch, device: "torch.device", run: Path, wanted: str) -> str:
    """Rank 0's device decides, once; a format that some other device lacks is refused there by name.

    Rank 0 alone reads what was decided before, and tells the others: on a mounted folder they may not see a file that
    was just written, and would decide apart.
    """
    native = precision.of(device)
    place = ranks.decided(watch, lambda: precision.FORMATS.index(precision.decide(run, wanted, native)))
    chosen = precision.FORMATS[place]
    if problems := precision.problems(chosen, native):
        raise ConfigError(problems)
    return chosen


def _fitting(
    watch: Watch,
    network: Any,
    run: Path,
    source: Path,
    recipe: Recipe,
    store: Store,
    loss: losses.RunLoss,
    chosen: str,
) -> int | None:
    """Tokens of a pass that fits on this worker's GPU; None on a CPU, or where the recipe says how many.

    Before the exchange, whose hooks an update's passes alone should meet.
    """
    if network.device.type == "cpu" or recipe.train.tokens_per_pass:
        return None
    if known := ranks.decided(watch, lambda: int(decisions.read(run).get(PASS, 0))):
        return known
    task, teacher = base.get(recipe.task), recipe.distill.teacher

    def made(tokens: int) -> Tokens:
        return pass_size.longest_rows(store, task, tokens, teacher)

    return pass_size.measured(network, loss, made, model.pad_id(source), chosen)


def _smallest(exchange: Exchange, run: Path, fits: int | None) -> int | None:
    """What fits on every worker's GPU: rank 0 decides, once."""
    if fits is None:
        return None
    smallest = int(np.concatenate(exchange.gather(np.array([fits]))).min())

    def keep() -> int:
        if PASS not in decisions.read(run):
            events.append(run, "pass_size", tokens=smallest)
        return int(decisions.keep(run, PASS, smallest))

    return ranks.decided(exchange.watch, keep)


def _calibrated(job: loop.Job, outcome: loop.Outcome, answers: dict[str, Ragged]) -> tuple[loop.Job, loop.Outcome]:
    """With what the task chooses on the validation rows, where there are any, and the scores of both splits by it."""
    chosen = job.task.calibrate(answers["valid"], job.store.targets("valid"), job.head) if job.validates else {}
    if not chosen:
        return job, outcome
    head = Head(job.head.labels, {**job.head.facts, **chosen})
    metric, update, measured = metric_for(job.task.output), outcome.best_update, {}
    for split, found in answers.items():
        measured[split] = metric.scores(found, job.store.targets(split), head)
        events.append(job.run, "evaluated", split=split, update=update, scores=measured[split], chosen=chosen)
    return replace(job, chosen=head), replace(outcome, scores=measured)


def _finish(
    network: "transformers.PreTrainedModel",
    source: Path,
    job: loop.Job,
    outcome: loop.Outcome,
    answers: dict[str, Ragged],
    alive: Callable[[], None],
) -> None:
    """Rank 0's part, after the last update."""
    _keep_answers(job, source, answers, alive)
    alive()
    export(network, source, job.run, job, outcome)


def _keep_answers(job: loop.Job, source: Path, outcomes: dict[str, Ragged], alive: Callable[[], None]) -> None:
    """Every row's prediction, for people; and the scores in full, of which the log keeps the slices' headlines."""
    tokenizer = load_tokenizer(source, job.recipe.data.max_tokens)
    for split, found in outcomes.items():
        alive()
        predictions.write(job.run, split, job.store, job.task, job.head, found, tokenizer, alive)
        document = predictions.measured(job.store, split, job.task, job.head, found, alive)
        scores.write(job.run, document)
        events.append(job.run, "sliced", split=split, slices=scores.headlines(document))


def export(
    network: "transformers.PreTrainedModel", source: Path, run: Path, job: loop.Job, outcome: loop.Outcome
) -> Path:
    """Write `<run>/artifact` from the model as it stands, through a hidden draft: it appears whole or not at all."""
    draft = run / f".artifact.{uuid.uuid4().hex[:8]}"
    mean = job.recipe.model.pooling == "mean"
    pooling.save(network, draft, mean=mean)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    max_tokens = reading_of(job.task, job.recipe.data).max_tokens
    if pooled := sentence_pooling(job.recipe, source):
        sentence.write(draft, pooled, network.config.hidden_size, max_tokens)
    made = artifact.Artifact(
        name=job.recipe.name,
        task=job.recipe.task,
        labels=job.store.manifest.labels,
        max_tokens=max_tokens,
        engine=engines.FLOAT,
        facts={**job.head.facts, **({pooling.FACT: "mean"} if mean else {})},
        data=job.recipe.data.model_dump(mode="json", include=set(artifact.COLUMNS)),
        metrics=outcome.scores,
        lineage={
            "run": run.name,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "recipe": job.recipe.identity(),
            "model": job.recipe.model.name,
            "data_digest": job.store.manifest.digest,
            "order_digest": outcome.ledger,
            "best_update": outcome.best_update,
        },
    )
    artifact.write(draft, made, predict.golden_logits, predict.golden_inputs(job.task, job.head))
    return artifact.publish(draft, run / "artifact")


def sentence_pooling(recipe: Recipe, source: Path) -> str | None:
    """By what others should pool the encoder of a run's artefact: as it was trained by the run, or, where the run made
    no vector of a text, as the model of `source` had been before. None where it is no sentence encoder."""
    if recipe.model.pooling == "mean":
        return "mean"
    before = sentence.pooling_of(source)
    return before if base.get(recipe.task).by_token or before == "cls" else None
