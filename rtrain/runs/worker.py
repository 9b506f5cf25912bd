"""The train function of each Ray Train worker: build the model, train, and (rank 0) write the artifact."""

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
from rtrain.config import Config, ModelConfig, Recipe
from rtrain.core import engines, env
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, RaggedArray, TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data import stream as data_stream
from rtrain.data.order import RowOrder
from rtrain.data.store.store import Store, open_store
from rtrain.inference import artifact, drift_baseline, predictor
from rtrain.metrics import per_class, scores
from rtrain.metrics.registry import get_metric
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
from rtrain.parallel.watchdog import Watchdog
from rtrain.planning import memory_trace
from rtrain.report import cost
from rtrain.runs import decisions, node_info, predictions, recovery, stop_request, trim_vocabulary, untokenized_text
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, resolve_window_spec
from rtrain.trainer import batch_size, evaluate, feature_distillation, load_balancing, losses, trainer

if TYPE_CHECKING:
    import torch
    import transformers


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
    """The head's machine (`node_info.describe_head`), which is billed too."""
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


def run_worker(worker_args: WorkerArgs) -> None:
    """The train function of `controller.fit`, on every worker: set up, train, finish."""
    clock = trainer.Clock()
    data_stream.warm_up()
    with env.trim_malloc(layout.should_trim_malloc(worker_args.config.recipe.train)):
        with clock.section("setup"):
            worker = _Worker(worker_args)
            stream_batches = worker.make_batch_stream()
        with worker.reporter.stop_poller if collectives.is_rank_zero() else contextlib.nullcontext():
            outcome = trainer.train(worker.context, worker.strategy, stream_batches, worker.reporter, clock)
        if outcome.is_finished:
            worker.finish(outcome)
        worker.watchdog.stop()


class _Worker:
    """A worker of an attempt: its network on its device, its strategy and its training context."""

    def __init__(self, worker_args: WorkerArgs):
        import ray.train
        import torch

        ray_context = ray.train.get_context()
        available = max(1, env.available_cores() // ray_context.get_local_world_size())
        torch.set_num_threads(available)
        recipe, self._args, self._source = worker_args.config.recipe, worker_args, worker_args.model
        self._run, self._rank, self._world = (
            Run(worker_args.run),
            ray_context.get_world_rank(),
            ray_context.get_world_size(),
        )
        if not worker_args.run.is_dir():  # on a node that joined after the driver's checks
            raise UserError(
                f"--out: {worker_args.run} does not exist on {os.uname().nodename}; name a folder on storage "
                "that "
                "every node mounts",
                code="not_shared",
            )
        self.watchdog = Watchdog(self._run.hang_traceback(self._rank), worker_args.config.deploy.cluster.hang_timeout_s)
        self.reporter = _TrainReporter(self._run, self._rank)
        store, task = open_store(worker_args.store), base.get_task(recipe.task)
        self._device = _worker_device(recipe.train.gpus_per_worker)
        if self._device.type == "cpu":
            torch.set_num_threads(decisions.decide_threads(self.watchdog, self._run, available))
        self._is_model_parallel = strategies.is_model_parallel(recipe.train, self._world)
        self.network = self._build_network(store, task)
        if self._rank == 0 and not worker_args.is_rung and self._run.last_event("tokenizer") is None:
            self._compare_tokenizers()
        precision = decisions.decide_precision(self.watchdog, self._device, self._run, recipe.train.precision)
        formats.to_fp64_(self.network, precision)
        feature_loss = self._build_feature_loss(task, precision)
        loss = losses.make_loss(task, recipe.distill, store.manifest.head, recipe.train.label_smoothing, feature_loss)
        self._fitting_tokens = self._measure_fitting_tokens(store, task, loss, precision)
        self._speeds = self._measure_speeds(store, task, loss, precision)
        self.strategy = strategies.build_strategy(
            *(self.network, recipe.train, self.watchdog, self.reporter.event),
            device=self._device,
        )
        if self._is_model_parallel:
            builder.select_attention(self.network, training=True)
        self.reporter.event(
            cost.MACHINES_EVENT,
            machines=node_info.event_fields(dtensor_utils.module_device(self.network), recipe.train.gpus_per_worker),
            head=worker_args.head_machine,
            price=worker_args.config.deploy.tune.worker_cost_per_hour,
        )
        order = RowOrder(
            store.manifest.digest,
            store.num_rows("train"),
            recipe.global_batch_size,
            recipe.train.epochs,
            recipe.train.seed,
        )
        random_step_interval, measures_noise = decisions.decide_noise_measurement(
            self.watchdog, self._run, self.strategy.supports_noise_scale
        )
        self.context = trainer.TrainingContext(
            recipe=recipe,
            run=self._run,
            store=store,
            task=task,
            loss=loss,
            order=order,
            pad_id=builder.pad_id(self._source),
            precision=precision,
            end_step=min(worker_args.end_step or order.num_steps, order.num_steps),
            is_rung=worker_args.is_rung,
            remote_copy=remote_copy.make_remote_copy(
                worker_args.config.deploy.cluster, worker_args.run, worker_args.owner_tokens
            ),
            random_step_interval=random_step_interval,
            measures_noise=measures_noise,
            profile_path=self._run.profile(self._rank) if worker_args.profile else None,
        )

    def _compare_tokenizers(self) -> None:
        with self.watchdog.extended_timeout():
            differing_texts = tokenizer_files.find_differing_texts(self._source)
        if differing_texts:
            text_count = len(tokenizer_files.PROBE_TEXTS)
            self.reporter.event("tokenizer", model=str(self._source), differing=differing_texts, texts=text_count)

    def _build_network(self, store: Store, task: base.Task) -> "transformers.PreTrainedModel":
        recipe, labels = self._args.config.recipe, store.manifest.labels
        build = self.watchdog.extended_timeout()(
            lambda: builder.build_network(self._source, task, labels, recipe.train.seed, recipe.model)
        )
        network = collectives.run_on_all_ranks(self.watchdog, build)
        if recipe.train.gradient_checkpointing:
            builder.enable_activation_checkpointing(network)
        if not self._is_model_parallel:  # otherwise it is sharded in place: no GPU needs memory for all of it
            builder.move_to_device(network, self._device)
        return network

    def _build_feature_loss(
        self, task: base.Task, precision: str
    ) -> feature_distillation.FeatureDistillationLoss | None:
        """Return the loss on the teacher's features, which needs the teacher on this worker; None if it is off."""
        distill, folder = self._args.config.recipe.distill, self._args.teacher
        if not feature_distillation.is_enabled(distill):
            return None
        if folder is None:
            raise UserError(
                "distill.relation_loss_weight and distill.hidden_loss_weight need the teacher: train this "
                "student "
                "with `rtrain distill` and the teacher's run",
                code="missing",
            )
        teacher_artifact, trimmed_vocabulary = (
            artifact.read_artifact(folder, verify=False),
            vocab_trimming.read_trimmed(self._source),
        )
        teacher_model_config = ModelConfig(pooling=teacher_artifact.facts.get(pooling.FACT, "own"))
        build = self.watchdog.extended_timeout()(
            lambda: builder.build_network(folder, task, teacher_artifact.labels, 0, teacher_model_config)
        )
        teacher = collectives.run_on_all_ranks(self.watchdog, build)
        builder.move_to_device(teacher, self._device)
        teacher.requires_grad_(False).eval()
        formats.to_fp64_(teacher, precision)
        ids = None if trimmed_vocabulary is None else vocab_trimming.original_ids(trimmed_vocabulary.kept_ids)
        return feature_distillation.FeatureDistillationLoss(
            self.network, teacher, distill, builder.pad_id(folder), precision, ids
        )

    def _measure_fitting_tokens(
        self, store: Store, task: base.Task, loss: losses.RunLoss, precision: str
    ) -> int | None:
        """Return the tokens of a micro-batch that fits on this worker's GPU; None on a CPU, with model parallelism, or
        if the recipe sets them.

        Measured before the strategy is built, whose hooks must only see the micro-batches of steps.

        """
        recipe = self._args.config.recipe
        if self._device.type == "cpu" or self._is_model_parallel or recipe.train.max_tokens_per_micro_batch:
            return None
        if decided_tokens := decisions.load_micro_batch_tokens(self.watchdog, self._run):
            return decided_tokens

        def make_batch(tokens: int) -> TokenBatch:
            return batch_size.longest_rows(store, task, tokens, recipe.teacher_logits_key)

        max_length = int(store.column("train", "length").max())
        probe_sizes = memory_trace.initial_probe_sizes(self.network, self._source, task, recipe, max_length, precision)
        return batch_size.probe(self.network, loss, make_batch, builder.pad_id(self._source), precision, probe_sizes)

    def _measure_speeds(self, store: Store, task: base.Task, loss: losses.RunLoss, precision: str) -> tuple[float, ...]:
        """Return the speeds of all ranks for load balancing, measured before the strategy is built."""
        recipe = self._args.config.recipe
        if recipe.train.load_balancing == "off" or self._world == 1:
            return ()
        tokens = batch_size.longest_rows(store, task, batch_size.CPU_TOKENS, recipe.teacher_logits_key)
        measure_seconds = partial(
            load_balancing.time_micro_batches, self.network, loss, tokens, builder.pad_id(self._source), precision
        )
        return decisions.decide_speeds(self.watchdog, self._run, measure_seconds)

    def make_batch_stream(self) -> trainer.BatchSource:
        """Return the source of this rank's rows, in micro-batches that fit on its device."""
        worker_args, train = self._args, self.context.recipe.train
        # Without padding, tokens alone limit a micro-batch.
        max_rows = None if unpadded.is_packed(self.network) else train.micro_batch_size
        default_tokens = (
            batch_size.MODEL_PARALLEL_TOKENS
            if self._device.type != "cpu" and self._is_model_parallel
            else batch_size.CPU_TOKENS
        )
        fitting_tokens = decisions.decide_micro_batch_tokens(self.watchdog, self._run, self._fitting_tokens)
        requested_tokens = train.max_tokens_per_micro_batch or self._cap_tokens(fitting_tokens or default_tokens)
        max_tokens = recovery.halve_micro_batch_tokens(requested_tokens, worker_args.halvings)
        if self._rank == 0 and max_tokens < requested_tokens:
            self._run.append_event("micro_batch_shrunk", tokens=max_tokens)
        teacher_answers = self.context.recipe.teacher_logits_key
        stream_spec = data_stream.StreamSpec(
            self.context.store.folder,
            self.context.order,
            *(self.strategy.num_replicas, self.strategy.replica_rank, max_rows, max_tokens, teacher_answers),
            random_step_interval=self.context.random_step_interval,
            worker_speeds=self._speeds,
            task_cpus=capacity.cpus_per_data_task(
                worker_args.config.deploy.cluster.data_cpus, self.strategy.num_workers
            ),
            node_labels=worker_args.config.deploy.cluster.data_labels,
        )
        return lambda first, last: self._log_first_batch(data_stream.stream_batches(stream_spec, first, last))

    def _cap_tokens(self, max_tokens: int) -> int:
        """Return the tokens of a micro-batch so that a step has enough micro-batches for the pipeline of a replica."""
        context, manifest = self.context, self.context.store.manifest
        tokens_per_step = (
            manifest.tokens["train"] / max(1, context.store.num_rows("train")) * context.recipe.global_batch_size
        )
        return batch_size.cap_for_pipeline(
            max_tokens, tokens_per_step / self.strategy.num_replicas, self.strategy.min_micro_batches
        )

    def _log_first_batch(self, stream: Iterator[data_stream.WorkerBatch]) -> Iterator[data_stream.WorkerBatch]:
        """Yield the same batches; log an event at the first one, seconds before the first loss."""
        for number, worker_batch in enumerate(stream):
            if number == 0:
                self.reporter.event("first_rows")
            yield worker_batch

    def finish(self, outcome: trainer.TrainingResult) -> None:
        """After the last step: rank 0 writes predictions, scores and the artifact."""
        self.reporter.event("writing")
        context, row_results = self.context, dict(outcome.row_results)
        if context.has_validation_rows and "valid" not in row_results:  # the best weights are from an earlier attempt
            row_results["valid"] = evaluate.gather_row_results(
                self.strategy, context.task, context.store, "valid", pad_id=context.pad_id, precision=context.precision
            )

        with self.watchdog.extended_timeout():
            weights = formats.as_fp32(dict(self.strategy.gather_full_tensors(self.network.state_dict())))

        @self.watchdog.extended_timeout()
        def write_artifact() -> None:
            if self._rank == 0:
                calibrated_context, calibrated_outcome = _calibrate(context, outcome, row_results)
                _write_predictions(calibrated_context, self._source, row_results, self.watchdog.heartbeat)
                self.watchdog.heartbeat()
                formats.to_fp32_(self.network)
                export_artifact(
                    self.network,
                    self._source,
                    calibrated_context,
                    calibrated_outcome,
                    row_results.get("valid"),
                    weights=weights,
                )
                self.watchdog.heartbeat()
                untokenized_text.measure_running_text(context.run, context.task, context.store)

        collectives.run_on_all_ranks(
            self.watchdog, write_artifact
        )  # a rank that leaves would end the run before the artifact is written


def _worker_device(gpu_share: float) -> "torch.device":
    """Return the GPU that Ray assigned to this worker, limited to its share of memory; otherwise the CPU. Unassigned
    GPUs are not used, and fake GPUs cannot compute."""
    import ray
    import ray.train.torch
    import torch

    has_gpu = ray.get_gpu_ids() and not env.uses_fake_gpus()
    if not has_gpu:
        return torch.device("cpu")
    device = ray.train.torch.get_device()
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share, device)
    return device


def _calibrate(
    context: trainer.TrainingContext, outcome: trainer.TrainingResult, row_results: dict[str, RaggedArray]
) -> tuple[trainer.TrainingContext, trainer.TrainingResult]:
    """Return the context with the task's calibration on the validation rows (e.g. a threshold), and the scores with
    it."""
    calibration = (
        context.task.calibrate(row_results["valid"], context.store.targets("valid"), context.head)
        if context.has_validation_rows
        else {}
    )
    if not calibration:
        return context, outcome
    head = Head(context.head.labels, {**context.head.facts, **calibration})
    metric, best_step, scores_by_split = get_metric(context.task.output), outcome.best_step, {}
    for split, split_results in row_results.items():
        scores_by_split[split] = metric.main_scores(split_results, context.store.targets(split), head)
        context.run.append_event(
            "evaluated", split=split, step=best_step, scores=scores_by_split[split], calibration=calibration
        )
    return replace(context, selected_head=head), replace(outcome, scores=scores_by_split)


def _write_predictions(
    context: trainer.TrainingContext, source: Path, row_results: dict[str, RaggedArray], heartbeat: Callable[[], None]
) -> None:
    """Write each row's prediction and all scores; the log gets the headline scores of the slices."""
    reading = resolve_window_spec(context.task, context.recipe.data)
    tokenizer = load_tokenizer(source, reading.max_tokens, reading.stride)
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


def export_artifact(
    network: "transformers.PreTrainedModel",
    source: Path,
    context: trainer.TrainingContext,
    outcome: trainer.TrainingResult,
    validation_results: RaggedArray | None = None,
    *,
    weights: "Mapping[str, torch.Tensor]",
) -> Path:
    """Write the run's artifact from full `weights`, atomically through a hidden draft.

    `validation_results`: results of the validation rows; the artifact keeps their histograms.

    """
    draft = context.run.folder / f".artifact.{uuid.uuid4().hex[:8]}"
    is_mean_pooled, attention_window = (
        context.recipe.model.pooling == "mean",
        local_attention.attention_window(network.config),
    )
    max_tokens = resolve_window_spec(context.task, context.recipe.data).max_tokens
    write_model(network, source, draft, context.recipe, context.head, weights=auxiliary_params.drop_auxiliary(weights))
    baseline, abstain_facts = {}, {}
    if validation_results is not None:
        unknown_id = drift_baseline.find_unknown_id(load_tokenizer(source, max_tokens))
        baseline = drift_baseline.build_split_baseline(
            context.task, context.head, context.store, validation_results, unknown_id
        )
        abstain_facts = drift_baseline.choose_abstain_threshold(
            context.task, context.head, validation_results, context.store.targets("valid")
        )
    new_artifact = artifact.Artifact(
        name=context.recipe.name,
        task=context.recipe.task,
        labels=context.store.manifest.labels,
        max_tokens=max_tokens,
        engine=engines.FLOAT_ENGINE,
        facts={
            **context.head.facts,
            **({pooling.FACT: "mean"} if is_mean_pooled else {}),
            **({local_attention.FACT: attention_window} if attention_window is not None else {}),
            **abstain_facts,
            **untokenized_text.find_word_boundaries(context.task, context.store),
        },
        data=context.recipe.data.model_dump(mode="json", include=set(artifact.ROW_FORMAT_SETTINGS)),
        metrics=outcome.scores,
        drift_baseline=baseline,
        lineage={
            "run": context.run.name,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "recipe": context.recipe.recipe_digest(),
            "model": context.recipe.model.name,
            "data_digest": context.store.manifest.digest,
            "order_digest": outcome.ledger,
            "best_step": outcome.best_step,
            **({"teacher": teacher} if (teacher := context.recipe.distill.teacher) else {}),
            **({"co_teachers": list(co_teachers)} if (co_teachers := context.recipe.distill.co_teachers) else {}),
            **trim_vocabulary.vocabulary_lineage(context.run),
        },
    )
    artifact.write_artifact(
        draft, new_artifact, predictor.compute_golden_logits, predictor.make_golden_inputs(context.task, context.head)
    )
    return artifact.publish_artifact(draft, context.run.artifact)


def write_model(
    network: "transformers.PreTrainedModel",
    source: Path,
    folder: Path,
    recipe: Recipe,
    head: Head,
    *,
    weights: "Mapping[str, torch.Tensor] | None" = None,
) -> None:
    """Write the files that other programs load: weights, config.json, tokenizer, sentence-transformers layout.

    A model that other programs would compute differently is written so that they refuse it. `weights`: see
    `pooling.save_weights`.

    """
    task, attention_window = base.get_task(recipe.task), local_attention.attention_window(network.config)
    is_guarded = recipe.model.pooling == "mean" or attention_window is not None or not task.has_standard_head
    scale = (head.facts["mean"], head.facts["std"]) if task.problem_type == "regression" else None
    pooling.save_weights(network, folder, guard_head=is_guarded, weights=weights, scale=scale)
    reading = resolve_window_spec(task, recipe.data)
    tokenizer_files.write_tokenizer_files(
        source, folder, reading.max_tokens, reading.stride, task.parses_special_tokens
    )
    if attention_window is None and (
        pooling_mode := find_sentence_pooling(recipe, source)
    ):  # other encoders would attend to all tokens
        sentence_transformers_format.write_sentence_files(
            folder, pooling_mode, network.config.hidden_size, reading.max_tokens, source
        )


def find_sentence_pooling(recipe: Recipe, source: Path) -> str | None:
    """Return how other programs should pool the encoder: as the run trained it or, for token-level tasks, as the model
    of `source` was pooled. None if it is no sentence encoder, or if its vectors need more than pooling."""
    if recipe.model.pooling == "mean":
        return "mean"
    base_pooling = (
        None
        if sentence_transformers_format.find_unsupported(source)
        else sentence_transformers_format.read_pooling(source)
    )
    return base_pooling if base.get_task(recipe.task).is_token_level or base_pooling == "cls" else None
