"""What each Ray Train worker runs: build the model, follow the order, train, and (rank 0) make the artefact."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.checkpoint import remote_copy
from rtrain.cluster import capacity
from rtrain.config import Config, Model, Recipe
from rtrain.core import engines, env
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, Ragged, Tokens
from rtrain.core.run_folder import Run
from rtrain.data import stream as data_stream
from rtrain.data.order import Order
from rtrain.data.store.store import Store, open_store
from rtrain.inference import artifact, drift_baseline, predictor
from rtrain.metrics import per_class, scores
from rtrain.metrics.registry import metric_for
from rtrain.models import (
    auxiliary_params,
    builder,
    local_attention,
    pooling,
    precision as formats,
    sentence_transformers_format,
    tokenizer_files,
    unpadded,
    vocab_trimming,
)
from rtrain.parallel import collectives, dtensor_utils, factory as strategies, layout
from rtrain.parallel.watchdog import Watch
from rtrain.planning import memory_trace
from rtrain.report import cost
from rtrain.runs import decisions, node_info, predictions, recovery, stop_request, trim_vocabulary, untokenized_text
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, reading_of
from rtrain.trainer import batch_size, evaluate, feature_distillation, load_balancing, losses, trainer

if TYPE_CHECKING:
    import torch
    import transformers


@dataclass(frozen=True)
class Start:
    """One start of a run, up to `until` updates or to its end: what the driver hands to each worker."""

    config: Config
    run: Path
    store: Path
    model: Path
    teacher: Path | None = None
    """The artefact that a student learns from."""
    until: int | None = None
    rung: bool = False
    """Keep the answers to the validation rows at `until`."""
    head: Mapping[str, Any] | None = None
    """The head's machine (`machines.head`), which is paid for too."""
    owners: tuple[str, ...] = ()
    """Tokens of the run folder's starts, this one's last; see `checkpoints.replica`."""
    halvings: int = 0
    """How often passes were made half as large, since a start ran out of memory."""
    profile: bool = False
    """Keep where the time of each update goes, on each worker (`training.watched`)."""


class _TrainReporter:
    """Events go to the run's log (rank 0), scores to Ray Train (every rank: it is a barrier)."""

    def __init__(self, run: Run, rank: int):
        self._run, self._rank, self.look = run, rank, stop_request.Look(run)

    def event(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            self._run.append(kind, **fields)

    def score(self, metrics: dict[str, Any]) -> None:
        import ray.train

        ray.train.report(metrics)

    def notice(self) -> bool:
        return self.look.is_given


def run(start: Start) -> None:
    """The train function of `driver.fit`, on every worker: set up, train, finish."""
    clock = trainer.Clock()
    data_stream.warm_up()
    with env.freed_goes_back(layout.gives_back(start.config.recipe.train)):
        with clock.section("setup"):
            worker = _Worker(start)
            updates = worker.updates()
        with worker.reporter.look if collectives.first() else contextlib.nullcontext():
            outcome = trainer.train(worker.job, worker.exchange, updates, worker.reporter, clock)
        if outcome.finished:
            worker.finish(outcome)
        worker.watch.stop()


class _Worker:
    """One worker of a start: its network on its device, its exchange, and its job."""

    def __init__(self, start: Start):
        import ray.train
        import torch

        context = ray.train.get_context()
        available = max(1, env.cores() // context.get_local_world_size())
        torch.set_num_threads(available)
        recipe, self._start, self._source = start.config.recipe, start, start.model
        self._run, self._rank, self._world = Run(start.run), context.get_world_rank(), context.get_world_size()
        if not start.run.is_dir():  # on a node that came after the driver had asked all nodes
            raise UserError(
                f"--out: {start.run} is not there on {os.uname().nodename}; name one on storage that every node mounts",
                code="not_shared",
            )
        self.watch = Watch(self._run.stalled(self._rank), start.config.deploy.cluster.stall_s)
        self.reporter = _TrainReporter(self._run, self._rank)
        store, task = open_store(start.store), base.get(recipe.task)
        self._device = _device(recipe.train.gpus_per_worker)
        if self._device.type == "cpu":
            torch.set_num_threads(decisions.threads(self.watch, self._run, available))
        self._in_parts = strategies.in_parts(recipe.train, self._world)
        self.network = self._network(store, task)
        if self._rank == 0 and not start.rung and self._run.last("tokenizer") is None:
            self._compare_tokenizers()
        precision = decisions.precision(self.watch, self._device, self._run, recipe.train.precision)
        formats.widen(self.network, precision)
        within = self._inner(task, precision)
        loss = losses.for_run(task, recipe.distill, store.manifest.head, recipe.train.label_smoothing, within)
        self._fits = self._fitting(store, task, loss, precision)
        self._speeds = self._timed(store, task, loss, precision)
        self.exchange = strategies.build(
            *(self.network, recipe.train, self.watch, self.reporter.event),
            device=self._device,
        )
        if self._in_parts:
            builder.attend(self.network, training=True)
        self.reporter.event(
            cost.KIND,
            machines=node_info.told(dtensor_utils.device(self.network), recipe.train.gpus_per_worker),
            head=start.head,
            price=start.config.deploy.tune.price,
        )
        order = Order(
            store.manifest.digest, store.rows("train"), recipe.rows_per_update, recipe.train.epochs, recipe.train.seed
        )
        at_random, measures = decisions.measures(self.watch, self._run, self.exchange.tells_noise)
        self.job = trainer.Job(
            recipe=recipe,
            run=self._run,
            store=store,
            task=task,
            loss=loss,
            order=order,
            pad_id=builder.pad_id(self._source),
            precision=precision,
            until=min(start.until or order.updates, order.updates),
            rung=start.rung,
            replica=remote_copy.of(start.config.deploy.cluster, start.run, start.owners),
            at_random=at_random,
            measures=measures,
            profile=self._run.profile(self._rank) if start.profile else None,
        )

    def _compare_tokenizers(self) -> None:
        with self.watch.busy():
            differing = tokenizer_files.differing_texts(self._source)
        if differing:
            texts = len(tokenizer_files.STRANGE_TEXTS)
            self.reporter.event("tokenizer", model=str(self._source), differing=differing, texts=texts)

    def _network(self, store: Store, task: base.Task) -> "transformers.PreTrainedModel":
        recipe, labels = self._start.config.recipe, store.manifest.labels
        read = self.watch.busy()(lambda: builder.build(self._source, task, labels, recipe.train.seed, recipe.model))
        network = collectives.together(self.watch, read)
        if recipe.train.gradient_checkpointing:
            builder.keep_inputs_alone(network)
        if not self._in_parts:  # else it is cut where it was read, and no GPU needs room for the whole of it
            builder.place(network, self._device)
        return network

    def _inner(self, task: base.Task, precision: str) -> feature_distillation.Inner | None:
        """What is learned inside the teacher, which then runs beside the student; None where nothing is."""
        distill, folder = self._start.config.recipe.distill, self._start.teacher
        if not feature_distillation.active(distill):
            return None
        if folder is None:
            raise UserError(
                "distill.relations and distill.hidden are learned beside the teacher: train this student with "
                "`rtrain distill` and the teacher's run",
                code="missing",
            )
        made, trimmed = artifact.read(folder, verify=False), vocab_trimming.read(self._source)
        chosen = Model(pooling=made.facts.get(pooling.FACT, "own"))
        read = self.watch.busy()(lambda: builder.build(folder, task, made.labels, 0, chosen))
        teacher = collectives.together(self.watch, read)
        builder.place(teacher, self._device)
        teacher.requires_grad_(False).eval()
        formats.widen(teacher, precision)
        ids = None if trimmed is None else vocab_trimming.old_ids(trimmed.kept)
        return feature_distillation.Inner(self.network, teacher, distill, builder.pad_id(folder), precision, ids)

    def _fitting(self, store: Store, task: base.Task, loss: losses.RunLoss, precision: str) -> int | None:
        """Tokens of a pass that fits on this worker's GPU; None on a CPU, where the GPU has a part of the network, or
        where the recipe says how many.

        Measured before the exchange is made, whose hooks only the passes of updates should meet.
        """
        recipe = self._start.config.recipe
        if self._device.type == "cpu" or self._in_parts or recipe.train.tokens_per_pass:
            return None
        if known := decisions.size(self.watch, self._run):
            return known

        def made(tokens: int) -> Tokens:
            return batch_size.longest_rows(store, task, tokens, recipe.answers)

        longest = int(store.column("train", "length").max())
        tried = memory_trace.tried(self.network, self._source, task, recipe, longest, precision)
        return batch_size.measured(self.network, loss, made, builder.pad_id(self._source), precision, tried)

    def _timed(self, store: Store, task: base.Task, loss: losses.RunLoss, precision: str) -> tuple[float, ...]:
        """The speeds of all workers, where rows are dealt by them; measured before the exchange is made, too."""
        recipe = self._start.config.recipe
        if recipe.train.balance == "off" or self._world == 1:
            return ()
        tokens = batch_size.longest_rows(store, task, batch_size.ON_CPU, recipe.answers)
        timed = partial(load_balancing.seconds, self.network, loss, tokens, builder.pad_id(self._source), precision)
        return decisions.speeds(self.watch, self._run, timed)

    def updates(self) -> trainer.Updates:
        """This worker's part of the run's updates, in passes that its device holds."""
        start, train = self._start, self.job.recipe.train
        # Where padding costs nothing, the rows of a worker are regrouped: tokens alone say how many fit into a pass.
        most_rows = None if unpadded.enabled(self.network) else train.micro_batch
        unmeasured = batch_size.IN_PARTS if self._device.type != "cpu" and self._in_parts else batch_size.ON_CPU
        fits = decisions.smallest(self.watch, self._run, self._fits)
        asked = train.tokens_per_pass or self._dealt(fits or unmeasured)
        most_tokens = recovery.tokens_per_pass(asked, start.halvings)
        if self._rank == 0 and most_tokens < asked:
            self._run.append("smaller_passes", tokens=most_tokens)
        teacher = self.job.recipe.answers
        share = data_stream.Share(
            self.job.store.folder,
            self.job.order,
            *(self.exchange.world, self.exchange.rank, most_rows, most_tokens, teacher),
            at_random=self.job.at_random,
            speeds=self._speeds,
            task_cpus=capacity.task_cpus(start.config.deploy.cluster.data_cpus, self.exchange.workers),
            labels=start.config.deploy.cluster.data_labels,
        )
        return lambda first, last: self._told(data_stream.stream(share, first, last))

    def _dealt(self, most: int) -> int:
        """Tokens of a pass, of at most so many, with which an update has enough passes for all workers of a replica."""
        job, manifest = self.job, self.job.store.manifest
        tokens = manifest.tokens["train"] / max(1, job.store.rows("train")) * job.recipe.rows_per_update
        return batch_size.dealt(most, tokens / self.exchange.world, self.exchange.passes)

    def _told(self, stream: Iterator[data_stream.Update]) -> Iterator[data_stream.Update]:
        """The same updates; the log says when the first one is there, seconds before there is a loss to tell."""
        for number, update in enumerate(stream):
            if number == 0:
                self.reporter.event("first_rows")
            yield update

    def finish(self, outcome: trainer.Outcome) -> None:
        """After the last update: the answers to the rows, their scores, and the artefact, all made by rank 0."""
        self.reporter.event("writing")
        job, answers = self.job, dict(outcome.outcomes)
        if job.validates and "valid" not in answers:  # the best weights are an earlier start's
            answers["valid"] = evaluate.gathered(
                self.exchange, job.task, job.store, "valid", pad_id=job.pad_id, precision=job.precision
            )

        with self.watch.busy():
            weights = formats.narrowed(dict(self.exchange.whole(self.network.state_dict())))

        @self.watch.busy()
        def write() -> None:
            if self._rank == 0:
                chosen, scored = _calibrated(job, outcome, answers)
                _keep_answers(chosen, self._source, answers, self.watch.alive)
                self.watch.alive()
                formats.narrow(self.network)
                export(self.network, self._source, chosen, scored, answers.get("valid"), weights=weights)
                self.watch.alive()
                untokenized_text.measure(job.run, job.task, job.store)

        collectives.together(self.watch, write)  # no rank leaves, and so ends the run, before the artefact is written


def _device(share: float) -> "torch.device":
    """The GPU that Ray gave this worker, else the CPU; of the GPU's memory it takes no more than its share. A GPU that
    was given to nobody is left alone, and one that is only counted cannot be computed on."""
    import ray
    import ray.train.torch
    import torch

    given = ray.get_gpu_ids() and not env.gpus_are_counted()
    if not given:
        return torch.device("cpu")
    device = ray.train.torch.get_device()
    if share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device


def _calibrated(
    job: trainer.Job, outcome: trainer.Outcome, answers: dict[str, Ragged]
) -> tuple[trainer.Job, trainer.Outcome]:
    """The job with what its task chooses on the validation rows (a threshold, say), and both splits' scores by it."""
    chosen = job.task.calibrate(answers["valid"], job.store.targets("valid"), job.head) if job.validates else {}
    if not chosen:
        return job, outcome
    head = Head(job.head.labels, {**job.head.facts, **chosen})
    metric, update, measured = metric_for(job.task.output), outcome.best_update, {}
    for split, found in answers.items():
        measured[split] = metric.scores(found, job.store.targets(split), head)
        job.run.append("evaluated", split=split, update=update, scores=measured[split], chosen=chosen)
    return replace(job, chosen=head), replace(outcome, scores=measured)


def _keep_answers(job: trainer.Job, source: Path, outcomes: dict[str, Ragged], alive: Callable[[], None]) -> None:
    """Every row's prediction, for people; and the scores in full, of which the log keeps the slices' headlines."""
    reading = reading_of(job.task, job.recipe.data)
    tokenizer = load_tokenizer(source, reading.max_tokens, reading.stride)
    for split, found in outcomes.items():
        alive()
        predictions.write(job.run.predictions(split), split, job.store, job.task, job.head, found, tokenizer, alive)
        document = predictions.measured(job.store, split, job.task, job.head, found, alive)
        scores.write(job.run.scores(split), document)
        classes = per_class.collect_classes(document["tables"])
        job.run.append("sliced", split=split, slices=scores.headlines(document), classes=classes)
        if missing := document["tables"].get("words_without_tokens"):
            job.run.append("words_without_tokens", split=split, words=missing)
        for collapsed in document.get("collapsed", ()):
            job.run.append("collapsed", split=split, **collapsed)
        if unseen := document.get("unseen"):
            job.run.append("unseen", split=split, **unseen)


def export(
    network: "transformers.PreTrainedModel",
    source: Path,
    job: trainer.Job,
    outcome: trainer.Outcome,
    validated: Ragged | None = None,
    *,
    weights: "Mapping[str, torch.Tensor]",
) -> Path:
    """Write the run's artefact from whole `weights`, through a hidden draft: it appears whole or not at all.

    `validated`: the outcomes of the validation rows, of which the artefact keeps histograms.
    """
    draft = job.run.folder / f".artifact.{uuid.uuid4().hex[:8]}"
    mean, reach = job.recipe.model.pooling == "mean", local_attention.reach(network.config)
    max_tokens = reading_of(job.task, job.recipe.data).max_tokens
    write_model(network, source, draft, job.recipe, job.head, weights=auxiliary_params.without(weights))
    known, abstains = {}, {}
    if validated is not None:
        unknown_id = drift_baseline.unknown_id(load_tokenizer(source, max_tokens))
        known = drift_baseline.measure(job.task, job.head, job.store, validated, unknown_id)
        abstains = drift_baseline.abstain_below(job.task, job.head, validated, job.store.targets("valid"))
    made = artifact.Artifact(
        name=job.recipe.name,
        task=job.recipe.task,
        labels=job.store.manifest.labels,
        max_tokens=max_tokens,
        engine=engines.FLOAT,
        facts={
            **job.head.facts,
            **({pooling.FACT: "mean"} if mean else {}),
            **({local_attention.FACT: reach} if reach is not None else {}),
            **abstains,
            **untokenized_text.find_cuts(job.task, job.store),
        },
        data=job.recipe.data.model_dump(mode="json", include=set(artifact.COLUMNS)),
        metrics=outcome.scores,
        reference=known,
        lineage={
            "run": job.run.name,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "recipe": job.recipe.identity(),
            "model": job.recipe.model.name,
            "data_digest": job.store.manifest.digest,
            "order_digest": outcome.ledger,
            "best_update": outcome.best_update,
            **({"teacher": teacher} if (teacher := job.recipe.distill.teacher) else {}),
            **({"co_teachers": list(others)} if (others := job.recipe.distill.co_teachers) else {}),
            **trim_vocabulary.lineage(job.run),
        },
    )
    artifact.write(draft, made, predictor.golden_logits, predictor.golden_inputs(job.task, job.head))
    return artifact.publish(draft, job.run.artifact)


def write_model(
    network: "transformers.PreTrainedModel",
    source: Path,
    folder: Path,
    recipe: Recipe,
    head: Head,
    *,
    weights: "Mapping[str, torch.Tensor] | None" = None,
) -> None:
    """Write what other programs load of an artifact: weights, config.json, tokenizer, sentence-transformers' layout.

    What would answer otherwise there than here is written so that they refuse it. `weights`: as `pooling.save` has it.
    """
    task, reach = base.get(recipe.task), local_attention.reach(network.config)
    guarded = recipe.model.pooling == "mean" or reach is not None or not task.has_standard_head
    scale = (head.facts["mean"], head.facts["std"]) if task.problem_type == "regression" else None
    pooling.save(network, folder, guarded=guarded, weights=weights, scale=scale)
    reading = reading_of(task, recipe.data)
    tokenizer_files.write(source, folder, reading.max_tokens, reading.stride, task.reads_special)
    if reach is None and (pooled := sentence_pooling(recipe, source)):  # others' encoders would read all
        sentence_transformers_format.write(folder, pooled, network.config.hidden_size, reading.max_tokens, source)


def sentence_pooling(recipe: Recipe, source: Path) -> str | None:
    """How others should pool the encoder of a run's artefact: as the run trained it, or, where the run made no vector
    of a text, as the model of `source` was pooled before. None where it is no sentence encoder, or where more than
    pooling made its vectors."""
    if recipe.model.pooling == "mean":
        return "mean"
    before = (
        None if sentence_transformers_format.unsupported(source) else sentence_transformers_format.pooling_of(source)
    )
    return before if base.get(recipe.task).by_token or before == "cls" else None
