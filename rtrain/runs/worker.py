"""What one worker of an attempt does: build the model, train, and (rank 0) write predictions, scores and the artifact.

Decisions are made once for a run: rank 0 reads or makes them and broadcasts them. Other ranks may not see a file that
was just written to a mounted folder, so they do not read it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.checkpoint import remote_copy
from rtrain.cluster import data_tasks
from rtrain.config import Config, ModelConfig
from rtrain.core import env, plugins
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head, RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data import sampling, stream as data_stream
from rtrain.data.store.store import Store, open_store
from rtrain.inference import artifact
from rtrain.metrics import operating_points, per_class, scores
from rtrain.metrics.classes import OPERATING_POINTS
from rtrain.metrics.registry import get_metric
from rtrain.models import (
    builder,
    model_files,
    network_parts,
    pooling,
    precision as formats,
    unpadded,
    used_vocabulary,
    vocab_trimming,
)
from rtrain.models.device import choose_worker_device
from rtrain.parallel import collectives, dtensor_utils, gradient_noise, layout
from rtrain.parallel.base import Strategy
from rtrain.parallel.watchdog import Watchdog
from rtrain.planning import memory_estimate
from rtrain.report import summary
from rtrain.runs import export, nodes, predictions, recovery, stop_request
from rtrain.tasks import base
from rtrain.tasks.defaults import BaseTask
from rtrain.tasks.encode import load_tokenizer, resolve_window_spec
from rtrain.trainer import batch_size, evaluate, imbalance, losses, optimizers, trainer

if TYPE_CHECKING:
    import torch
    import transformers

MICRO_BATCH_TOKENS_KEY, EMBEDDING_ROWS_KEY = "max_tokens_per_micro_batch", "embedding_rows"
"""Keys of decisions in decisions.json."""


@dataclass(frozen=True)
class WorkerArgs:
    """Arguments of each worker for one attempt, up to step `end_step` or to the end of the run."""

    config: Config
    run: Path
    store: Path
    model: Path
    teacher: Path | None = None
    """The artifact of a student's teacher."""
    end_step: int | None = None
    is_rung: bool = False
    """Keep the predictions for the validation rows at `end_step`."""
    head_machine: Mapping[str, Any] | None = None
    """The head's machine (`nodes.describe_head`), which is billed too."""
    owner_tokens: tuple[str, ...] = ()
    """Tokens of the commands that trained the run folder, this one's last; see `rtrain.checkpoint.remote_copy`."""
    halvings: int = 0
    """How many attempts ran out of memory; each has halved the micro-batch."""
    profile: bool = False
    """Keep the times of each step, on each rank (`rtrain.profiling`)."""


class _TrainReporter:
    """Writes events to the run log (rank 0) and reports scores to Ray Train (every rank: a barrier)."""

    def __init__(self, run: Run, rank: int):
        self._run, self._rank, self.stop_poller = run, rank, stop_request.StopRequestPoller(run)

    def event(self, kind: str, **fields: Any) -> None:
        if self._rank == 0:
            self._run.append_event(kind, **fields)

    def score(self, metrics: dict[str, Any]) -> None:
        import ray.train

        ray.train.report(metrics)

    def stop_requested(self) -> bool:
        return self.stop_poller.is_requested


@dataclass(frozen=True)
class _Worker:
    """A worker of an attempt: its place in the group, and its device."""

    args: WorkerArgs
    run: Run
    rank: int
    world_size: int
    watchdog: Watchdog
    reporter: _TrainReporter
    device: "torch.device"

    @property
    def is_model_parallel(self) -> bool:
        return layout.is_model_parallel(self.args.config.recipe.train, self.world_size)


@plugins.attribute_errors()
def run_worker(worker_args: WorkerArgs) -> None:
    """The train function of `controller.fit`, on every worker: set up, train, finish."""
    clock, recipe, deploy = trainer.Clock(), worker_args.config.recipe, worker_args.config.deploy
    data_stream.warm_up()
    with env.trim_malloc(layout.should_trim_malloc(recipe.train)):
        with clock.section("setup"):
            worker = _join_attempt(worker_args)
            run, watchdog, reporter = worker.run, worker.watchdog, worker.reporter
            store, task = open_store(worker_args.store), base.get_task(recipe.task)
            network = _build_network(worker, store, task)
            vocabulary = _restrict_embedding(worker, store, task, network)
            if not worker.is_model_parallel:  # otherwise it is sharded in place: no GPU needs memory for all of it
                builder.move_to_device(network, worker.device)
            if worker.rank == 0 and not worker_args.is_rung and run.last_event("tokenizer") is None:
                _compare_tokenizers(worker)
            precision = decide_precision(watchdog, worker.device, run, recipe.train.precision)
            formats.to_fp64_(network, precision)
            context = _make_context(worker, store, task, network, precision)
            # Measured before the strategy is built, whose hooks must only see the micro-batches of steps.
            fitting_tokens = _measure_fitting_tokens(worker, context, network)
            speeds = measure_speeds(worker, context, network)
            strategy = layout.build_strategy(network, recipe.train, watchdog, reporter.event, device=worker.device)
            if worker.is_model_parallel:
                builder.select_attention(network, training=True)
            reporter.event(
                summary.MACHINES_EVENT,
                machines=nodes.event_fields(dtensor_utils.module_device(network), recipe.train.gpus_per_worker),
                head=worker_args.head_machine,
                price=deploy.tune.worker_cost_per_hour,
            )
            interval, measures_noise = decide_noise_measurement(watchdog, run, strategy.supports_noise_scale)
            context = replace(context, random_step_interval=interval, measures_noise=measures_noise)
            max_tokens = _choose_micro_batch_tokens(worker, context, strategy, fitting_tokens)
            stream_spec = data_stream.StreamSpec(
                store.folder,
                context.order,
                workers=strategy.num_replicas,
                rank=strategy.replica_rank,
                # Without padding, tokens alone limit a micro-batch.
                micro_batch_size=None if unpadded.is_packed(network) else recipe.train.micro_batch_size,
                max_tokens_per_micro_batch=max_tokens,
                teacher_version=recipe.teacher_logits_key,
                task_cpus=data_tasks.cpus_per_data_task(deploy.cluster.data_cpus, strategy.num_workers),
                node_labels=deploy.cluster.data_labels,
                random_step_interval=interval,
                worker_speeds=speeds,
            )
        with reporter.stop_poller if worker.rank == 0 else contextlib.nullcontext():
            outcome = trainer.train(context, strategy, partial(_stream_batches, reporter, stream_spec), reporter, clock)
        if outcome.is_finished:
            _finish(worker, context, strategy, network, outcome, vocabulary)
        watchdog.stop()


def _join_attempt(worker_args: WorkerArgs) -> _Worker:
    import ray.train.torch
    import torch

    ray_context, recipe = ray.train.get_context(), worker_args.config.recipe
    available_threads = max(1, env.available_cores() // ray_context.get_local_world_size())
    torch.set_num_threads(available_threads)
    run, rank = Run(worker_args.run), ray_context.get_world_rank()
    if not run.folder.is_dir():  # on a node that joined after the driver's checks
        raise UserError(
            f"--out: {run} does not exist on {os.uname().nodename}; name a folder on storage that every node mounts",
            code="not_shared",
        )
    watchdog = Watchdog(run.hang_traceback(rank), worker_args.config.deploy.cluster.hang_timeout_s)
    device = choose_worker_device(ray.get_gpu_ids(), ray.train.torch.get_device, recipe.train.gpus_per_worker)
    if device.type == "cpu":
        torch.set_num_threads(decide_threads(watchdog, run, available_threads))
    reporter = _TrainReporter(run, rank)
    return _Worker(worker_args, run, rank, ray_context.get_world_size(), watchdog, reporter, device)


def _compare_tokenizers(worker: _Worker) -> None:
    model = worker.args.model
    with worker.watchdog.extended_timeout():
        differing_texts = model_files.find_differing_texts(model)
    if differing_texts:
        text_count = len(model_files.PROBE_TEXTS)
        worker.reporter.event("tokenizer", model=str(model), differing=differing_texts, texts=text_count)


def _build_network(worker: _Worker, store: Store, task: base.Task) -> "transformers.PreTrainedModel":
    recipe, labels = worker.args.config.recipe, store.manifest.labels
    build = worker.watchdog.extended_timeout()(
        lambda: builder.build_network(worker.args.model, task, labels, recipe.train.seed, recipe.model)
    )
    network = collectives.run_on_all_ranks(worker.watchdog, build)
    imbalance.initialize_output_bias(network, recipe, task, store)
    if recipe.train.gradient_checkpointing:
        builder.enable_activation_checkpointing(network)
    return network


def _restrict_embedding(
    worker: _Worker, store: Store, task: base.Task, network: "transformers.PreTrainedModel"
) -> used_vocabulary.UsedVocabulary | None:
    """Restrict the word embedding to the rows of the run's tokens, by `train.embedding_rows`; None for all rows."""

    @worker.watchdog.extended_timeout()
    def choose_vocabulary() -> used_vocabulary.UsedVocabulary | None:
        if worker.rank:
            return None
        run, vocabulary = worker.run, None
        makes_tokens = getattr(type(task), "prepare", None) is not BaseTask.prepare  # which the store lacks
        choice = run.decisions.get(EMBEDDING_ROWS_KEY, worker.args.config.recipe.train.embedding_rows)
        if choice != "all" and not makes_tokens:
            min_unused_weights = used_vocabulary.MIN_UNUSED_WEIGHTS if choice == "auto" else 1
            ids = used_vocabulary.special_ids(worker.args.model).union(store.used_ids().tolist())
            vocabulary = used_vocabulary.select_vocabulary(network, ids, min_unused_weights)
        if vocabulary is not None and EMBEDDING_ROWS_KEY not in run.decisions:
            run.append_event("embedding_rows", used=len(vocabulary.ids), total=vocabulary.size)
        run.decide_once(EMBEDDING_ROWS_KEY, "all" if vocabulary is None else "used")
        return vocabulary

    choice = collectives.run_on_all_ranks(worker.watchdog, choose_vocabulary)
    vocabulary: used_vocabulary.UsedVocabulary | None = collectives.all_gather_object(choice)[0]
    if vocabulary is not None:
        used_vocabulary.restrict_embedding(network, vocabulary)
    return vocabulary


def _make_context(
    worker: _Worker, store: Store, task: base.Task, network: "transformers.PreTrainedModel", precision: str
) -> trainer.TrainingContext:
    """Make the training context; only the strategy knows whether the gradient noise is measured."""
    args, recipe = worker.args, worker.args.config.recipe
    feature_loss = _build_feature_loss(worker, network, task, precision)
    order = sampling.make_order(recipe, store)
    return trainer.TrainingContext(
        recipe=recipe,
        run=worker.run,
        store=store,
        task=task,
        loss=losses.make_run_loss(recipe, task, store, feature_loss),
        order=order,
        pad_id=builder.pad_id(args.model),
        precision=precision,
        end_step=min(args.end_step or order.num_steps, order.num_steps),
        is_rung=args.is_rung,
        remote_copy=remote_copy.make_remote_copy(args.config.deploy.cluster, args.run, args.owner_tokens),
        profile_path=worker.run.profile(worker.rank) if args.profile else None,
    )


def _build_feature_loss(
    worker: _Worker, network: "transformers.PreTrainedModel", task: base.Task, precision: str
) -> losses.FeatureDistillationLoss | None:
    """Return the loss on the teacher's features, which needs the teacher on this worker; None if it is off."""
    distill, folder = worker.args.config.recipe.distill, worker.args.teacher
    if not losses.is_enabled(distill):
        return None
    if folder is None:
        raise UserError(
            "distill.relation_loss_weight and distill.hidden_loss_weight need the teacher: train this student with "
            "`rtrain distill` and the teacher's run",
            code="missing",
        )
    teacher_artifact = artifact.read_artifact(folder, verify=False)
    model_config = ModelConfig(pooling=teacher_artifact.facts.get(pooling.FACT, "own"))
    build = worker.watchdog.extended_timeout()(
        lambda: builder.build_network(folder, task, teacher_artifact.labels, 0, model_config)
    )
    teacher = collectives.run_on_all_ranks(worker.watchdog, build)
    builder.move_to_device(teacher, worker.device)
    teacher.requires_grad_(False).eval()
    formats.to_fp64_(teacher, precision)
    trimmed = vocab_trimming.read_trimmed(worker.args.model)
    ids = None if trimmed is None else vocab_trimming.original_ids(trimmed.kept_ids)
    return losses.FeatureDistillationLoss(network, teacher, distill, builder.pad_id(folder), precision, ids)


# ----------------------------------------------------------------------------------------------------- micro-batches


def _measure_fitting_tokens(
    worker: _Worker, context: trainer.TrainingContext, network: "transformers.PreTrainedModel"
) -> int | None:
    """Return the tokens of a micro-batch that fits on this worker's GPU; None on a CPU, with model parallelism, or if
    the recipe sets them."""
    recipe, store, task = context.recipe, context.store, context.task
    if worker.device.type == "cpu" or worker.is_model_parallel or recipe.train.max_tokens_per_micro_batch:
        return None
    if decided_tokens := load_micro_batch_tokens(worker.watchdog, worker.run):
        return decided_tokens
    max_length = int(store.column("train", "length").max())
    probe_sizes = memory_estimate.initial_probe_sizes(
        network, worker.args.model, task, recipe, max_length, context.precision
    )
    return batch_size.probe(
        network,
        context.loss,
        lambda tokens: batch_size.longest_rows(store, task, tokens, recipe.teacher_logits_key),
        context.pad_id,
        context.precision,
        probe_sizes,
    )


def measure_speeds(
    worker: _Worker, context: trainer.TrainingContext, network: "transformers.PreTrainedModel"
) -> tuple[float, ...]:
    """Return the speeds of all ranks for load balancing; empty without it."""
    recipe = context.recipe
    if recipe.train.load_balancing == "off" or worker.world_size == 1:
        return ()
    tokens = batch_size.longest_rows(context.store, context.task, batch_size.CPU_TOKENS, recipe.teacher_logits_key)
    measure_seconds = partial(
        batch_size.time_micro_batches, network, context.loss, tokens, context.pad_id, context.precision
    )
    return decide_speeds(worker.watchdog, worker.run, measure_seconds)


def _choose_micro_batch_tokens(
    worker: _Worker, context: trainer.TrainingContext, strategy: Strategy, fitting_tokens: int | None
) -> int:
    """Return the tokens of a micro-batch: of the recipe, else so many that they fit on every device and that a step
    has enough micro-batches for the pipeline of a replica; halved for each attempt that ran out of memory."""
    fitting_tokens = decide_micro_batch_tokens(worker.watchdog, worker.run, fitting_tokens)
    requested_tokens = context.recipe.train.max_tokens_per_micro_batch
    if not requested_tokens:
        is_sharded_gpu = worker.device.type != "cpu" and worker.is_model_parallel
        default_tokens = batch_size.MODEL_PARALLEL_TOKENS if is_sharded_gpu else batch_size.CPU_TOKENS
        tokens_per_row = context.store.manifest.tokens["train"] / max(1, context.store.num_rows("train"))
        requested_tokens = batch_size.cap_for_pipeline(
            fitting_tokens or default_tokens,
            tokens_per_row * context.recipe.global_batch_size / strategy.num_replicas,
            strategy.min_micro_batches,
        )
    max_tokens = recovery.halve_micro_batch_tokens(requested_tokens, worker.args.halvings)
    if worker.rank == 0 and max_tokens < requested_tokens:
        worker.run.append_event("micro_batch_shrunk", tokens=max_tokens)
    return max_tokens


def _stream_batches(
    reporter: _TrainReporter, stream_spec: data_stream.StreamSpec, first: int, last: int
) -> Iterator[data_stream.WorkerBatch]:
    """Yield the batches of this rank; log an event at the first one, seconds before the first loss."""
    for number, worker_batch in enumerate(data_stream.stream_batches(stream_spec, first, last)):
        if number == 0:
            reporter.event("first_rows")
        yield worker_batch


# ------------------------------------------------------------------------------------------------------------- the end


def _finish(
    worker: _Worker,
    context: trainer.TrainingContext,
    strategy: Strategy,
    network: "transformers.PreTrainedModel",
    outcome: trainer.TrainingResult,
    vocabulary: used_vocabulary.UsedVocabulary | None,
) -> None:
    """After the last step: rank 0 writes predictions, scores and the artifact."""
    worker.reporter.event("writing")
    row_results, heartbeat, source = dict(outcome.row_results), worker.watchdog.heartbeat, worker.args.model
    if context.has_validation_rows and "valid" not in row_results:  # the best weights are from an earlier attempt
        row_results["valid"] = evaluate.gather_row_results(
            strategy, context.task, context.store, "valid", pad_id=context.pad_id, precision=context.precision
        )
    with worker.watchdog.extended_timeout():
        weights = formats.as_fp32(dict(strategy.gather_full_tensors(network.state_dict())))

    @worker.watchdog.extended_timeout()
    def write_artifact() -> None:
        if worker.rank:
            return
        calibrated, result = _calibrate(context, outcome, row_results)
        _write_predictions(calibrated, source, row_results, heartbeat)
        heartbeat()
        if vocabulary is not None:
            steps = result.averaged_steps or (result.best_step or 0,)
            weights[vocabulary.name] = _complete_embedding(worker, context, vocabulary, weights, steps)
        formats.to_fp32_(network)
        export.export_artifact(network, source, calibrated, result, row_results.get("valid"), weights=weights)
        heartbeat()
        export.measure_running_text(context.run, context.task, context.store)

    # A rank that leaves would end the run before the artifact is written.
    collectives.run_on_all_ranks(worker.watchdog, write_artifact)


def _complete_embedding(
    worker: _Worker,
    context: trainer.TrainingContext,
    vocabulary: used_vocabulary.UsedVocabulary,
    weights: "Mapping[str, torch.Tensor]",
    steps: Sequence[int],
) -> "torch.Tensor":
    """The complete word embedding after a number of steps, or its mean over several numbers: the trained rows, and the
    other rows of the initial network with their decay."""
    recipe, labels = context.recipe, context.store.manifest.labels
    initial = builder.build_network(worker.args.model, context.task, labels, recipe.train.seed, recipe.model)
    table: Any = initial.get_input_embeddings().weight
    factor = network_parts.lr_factors(initial, recipe.optim.layerwise_lr_decay)[table]
    decays = [optimizers.decay_product(recipe, number, context.order.num_steps, factor) for number in steps]
    decay = sum(decays) / len(decays)
    return vocabulary.expand_rows(weights[vocabulary.name], table.detach(), decay)


def _calibrate(
    context: trainer.TrainingContext, outcome: trainer.TrainingResult, row_results: dict[str, RaggedArray]
) -> tuple[trainer.TrainingContext, trainer.TrainingResult]:
    """Return the context with the choices on the validation rows (the task's calibration, e.g. a threshold, and the
    operating points), and the scores with them."""
    calibration, points = {}, context.recipe.metrics.operating_point
    head, output = context.head, context.task.output
    if context.has_validation_rows:
        valid = row_results["valid"], context.store.targets("valid")
        calibration = context.task.calibrate(*valid, head)
        if points:
            head = Head(head.labels, {**head.facts, **calibration})
            requests = [point.model_dump() for point in points]
            calibration |= operating_points.choose_operating_points(output, *valid, head, requests)
    if not calibration:
        return context, outcome
    head = Head(context.head.labels, {**context.head.facts, **calibration})
    for split, split_results in row_results.items():
        targets = context.store.targets(split)
        for point in operating_points.measure_operating_points(output, split_results, targets, head):
            context.run.append_event("operating_point", split=split, **point)
    if points:
        calibration |= {
            OPERATING_POINTS: {point["label"]: point["threshold"] for point in calibration[OPERATING_POINTS]}
        }
    metric, scores_by_split = get_metric(output), {}
    for split, split_results in row_results.items():
        scores_by_split[split] = metric.main_scores(split_results, context.store.targets(split), head)
        fields = {"split": split, "step": outcome.best_step, "scores": scores_by_split[split]}
        context.run.append_event("evaluated", **fields, calibration=calibration)
    return replace(context, selected_head=head), replace(outcome, scores=scores_by_split)


def _write_predictions(
    context: trainer.TrainingContext, source: Path, row_results: dict[str, RaggedArray], heartbeat: Callable[[], None]
) -> None:
    """Write each row's prediction and all scores; the log gets the headline scores of the slices."""
    window_spec = resolve_window_spec(context.task, context.recipe.data)
    tokenizer = load_tokenizer(
        source,
        window_spec.max_tokens,
        window_spec.stride,
        parses_special_tokens=context.task.parses_special_tokens,
    )
    for split, split_results in row_results.items():
        heartbeat()
        predictions.write_predictions(
            context.run.predictions(split),
            split,
            context.store,
            context.task,
            context.head,
            split_results,
            tokenizer,
            heartbeat,
        )
        document = predictions.measure_scores(
            context.store, split, context.task, context.head, split_results, heartbeat
        )
        scores.write_scores(context.run.scores(split), document)
        classes = per_class.collect_classes(document["tables"])
        context.run.append_event("sliced", split=split, slices=scores.collect_headlines(document), classes=classes)
        if missing := document["tables"].get("words_without_tokens"):
            context.run.append_event("words_without_tokens", split=split, words=missing)
        for collapsed_answer in document.get("collapsed", ()):
            context.run.append_event("collapsed", split=split, **collapsed_answer)
        if unseen_scores := document.get("unseen"):
            context.run.append_event("unseen", split=split, **unseen_scores)


# ----------------------------------------------------------------------------------------------------------- decisions


def decide_precision(watchdog: Watchdog, device: "torch.device", run: Run, requested: str) -> str:
    """Decide the precision by rank 0's device, once. Raises `ConfigError` on a rank whose device lacks the format."""
    native_formats = formats.device_formats(device)
    index = collectives.decide_on_rank_zero(
        watchdog, lambda: formats.FORMATS.index(formats.decide_precision(run, requested, native_formats))
    )
    selected = formats.FORMATS[index]
    if problems := formats.check_precision(selected, native_formats):
        raise ConfigError(problems)
    return selected


def decide_noise_measurement(watchdog: Watchdog, run: Run, supports_noise_scale: bool) -> tuple[int, bool]:
    """Return (every how many steps the rows are assigned at random, whether these steps measure the gradient noise).

    Noise is measured if the strategy supports it (`supports_noise_scale`) and the run was created for it
    (`rtrain.parallel.gradient_noise`).
    """
    interval = collectives.decide_on_rank_zero(watchdog, lambda: int(run.decide_once("noise", 0)))
    return (interval or gradient_noise.DEFAULT_INTERVAL, interval > 0) if supports_noise_scale else (0, False)


def decide_threads(watchdog: Watchdog, run: Run, available: int) -> int:
    """Return this rank's number of threads: the same as in the first attempt with as many workers.

    The last bits of LayerNorm's gradients depend on it. A rank with fewer cores gets fewer threads; a `threads` event
    reports that.

    Args:
        available: threads that this rank's share of its node's cores allows.
    """
    available_by_rank = collectives.all_gather_object(available)
    key = f"threads_by_rank_{len(available_by_rank)}"
    collectives.decide_on_rank_zero(watchdog, lambda: len(run.decide_once(key, available_by_rank)))
    threads_by_rank: list[int] = _share_decision(run, key)
    short_ranks = [rank for rank, number in enumerate(threads_by_rank) if available_by_rank[rank] < number]
    if collectives.is_rank_zero() and short_ranks:
        run.append_event(
            "threads", threads_by_rank=threads_by_rank, available=available_by_rank, short_ranks=short_ranks
        )
    return min(threads_by_rank[collectives.rank()], available)


def decide_speeds(watchdog: Watchdog, run: Run, measure_seconds: Callable[[], float]) -> tuple[float, ...]:
    """Return the speed of each rank relative to the fastest.

    Args:
        measure_seconds: measures seconds of a micro-batch on this rank; called only if no attempt with as many workers
            has measured it.
    """
    key = f"speeds_{len(collectives.all_gather_object(None))}"
    if not collectives.decide_on_rank_zero(watchdog, lambda: int(key in run.decisions)):
        relative_speeds = batch_size.relative_speeds(
            collectives.all_gather_object(
                collectives.run_on_all_ranks(watchdog, watchdog.extended_timeout()(measure_seconds))
            )
        )
        collectives.decide_on_rank_zero(watchdog, lambda: len(run.decide_once(key, relative_speeds)))
        if collectives.is_rank_zero():
            run.append_event("speeds", speeds=relative_speeds)
    return tuple(_share_decision(run, key))


def _share_decision(run: Run, key: str) -> Any:
    """Return rank 0's decision. Collective."""
    return collectives.all_gather_object(run.decisions[key] if collectives.is_rank_zero() else None)[0]


def load_micro_batch_tokens(watchdog: Watchdog, run: Run) -> int | None:
    """Return the tokens of a micro-batch that an earlier attempt has decided. Collective."""
    return collectives.decide_on_rank_zero(watchdog, lambda: int(run.decisions.get(MICRO_BATCH_TOKENS_KEY, 0))) or None


def decide_micro_batch_tokens(watchdog: Watchdog, run: Run, fitting_tokens: int | None) -> int | None:
    """Decide the tokens of a micro-batch that fits on every worker's GPU, once. Collective."""
    if fitting_tokens is None:
        return None
    min_tokens = -collectives.all_reduce_max(-fitting_tokens)

    def record_decision() -> int:
        if MICRO_BATCH_TOKENS_KEY not in run.decisions:
            run.append_event("micro_batch_size_decided", tokens=min_tokens)
        return int(run.decide_once(MICRO_BATCH_TOKENS_KEY, min_tokens))

    return collectives.decide_on_rank_zero(watchdog, record_decision)
