"""One version of a model behind the routes: tokenizer, batcher, abstention, explanations and counters; no HTTP."""

import asyncio
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, Head
from rtrain.inference.drift_baseline import ABSTAIN_FACT, NO_LABEL
from rtrain.inference.explainer import Explainer, LabelError
from rtrain.inference.integrated_gradients import ExplanationCancelled
from rtrain.inference.predictor import InputError, Predictor
from rtrain.metrics.classes import OPERATING_POINTS
from rtrain.tasks.base import Input, Task
from rtrain.tasks.masked_lm import DEFAULT_TOP_K
from serve.batching.batcher import Batcher, DeadlineExceeded, Encoder, EngineError, count_characters
from serve.batching.scheduler import BatchLimits, Overloaded
from serve.middleware import AccessLog, RequestContext, RequestRecorder
from serve.observability import metrics, tracing
from serve.observability.metrics import DriftMonitor, Telemetry
from serve.rollout.autoscaling import LoadMeter
from serve.schemas import open_inference
from serve.schemas.predict import DEFAULT_MAX_LABELS, RequestError

logger = logging.getLogger(__name__)

MAX_REPEATED_CHARACTERS = 5_000_000
"""Characters of texts in the answer of a masked language model."""
MIN_ENGINE_TIME_SHARE = 0.5
"""Minimum share of `serve.request_timeout_s` that a request should have left when its texts arrive. If less is left,
the client has set a deadline of its own or has sent its body slowly, and a timeout is not the fault of the version."""
VERSION_SEGMENT = "/versions/"
"""Part of a route that names a version."""
INFERENCE_SUFFIXES = ("/predict", "/infer", "/ModelInfer")
"""Suffixes of the routes that run inference."""
MAX_QUEUED_TEXTS = 16
"""Texts that may wait for an explanation or be in one, over all requests."""
NICENESS = 10


class ModelService:
    """One version of a model: predictor, tokenizer, batcher, metrics. The routes share it."""

    def __init__(self, predictor: Predictor, settings: ServeConfig, telemetry: Telemetry | None = None):
        """`telemetry`: metrics that several versions of the model share."""
        self.predictor, self.settings = predictor, settings
        self.requests = 0
        """Requests that count in the comparison of versions: answered or failed. Requests that name a version, and
        requests that missed a deadline of the client, are excluded."""
        self.errors = 0
        """Those with status 500 or above."""
        self._client_deadline_timeouts = 0
        """Requests that missed the client's own deadline, and are not yet reported to `record_response`."""
        self.mirror_texts: Callable[[Sequence[Input]], None] | None = None
        """Receives each answered text while a canary runs."""
        self.tracer = tracing.make_tracer(settings, predictor.artifact)
        self.recorder = RequestRecorder(
            self.record_response, self.tracer, AccessLog(settings.access_log, predictor.artifact)
        )
        self.telemetry = telemetry or Telemetry()
        limits = BatchLimits(
            max_batch_size=settings.max_batch_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_batch_latency_s=settings.max_batch_latency_s,
            max_queued_inputs=settings.max_queued_inputs,
            max_queued_tokens=settings.max_queued_tokens,
        )
        self.run_engine = functools.partial(predictor.run, max_tokens=settings.max_batch_tokens)
        """The engine, by the calls that requests make."""
        self.batcher = Batcher(self.run_engine, limits, self.telemetry.on_call, predictor.is_unpadded)
        self.encoder = Encoder(predictor, self.batcher.count_dropped)
        self._drift_monitor = DriftMonitor(predictor)
        self.telemetry.register(self.batcher, self._drift_monitor)
        self._load_meter = LoadMeter(time.monotonic())
        self.explanations = ExplanationQueue(predictor, self.telemetry.explain_seconds.observe)

    def close(self, wait: bool = True) -> None:
        """`wait`: until its spans have been sent; not on an event loop that answers requests."""
        self.telemetry.unregister(self.batcher)
        self.batcher.close()
        self.explanations.close()
        self.tracer.close(wait)
        self.recorder.access_log.close()

    @property
    def model_names(self) -> list[str]:
        return [self.predictor.artifact.name]

    @property
    def is_ready(self) -> bool:
        """False while an engine call has run for longer than `serve.request_timeout_s`: nobody awaits it any more. The
        golden answers were checked when the artifact was loaded."""
        return self.batcher.current_call_s() <= self.settings.request_timeout_s

    def render_metrics(self) -> str:
        return metrics.render_metrics({self.predictor.artifact.name: self.telemetry.registry})

    def record_response(self, route: str, status: int, seconds: float, is_canary_sample: bool = True) -> None:
        """A request has ended. `is_canary_sample`: whether it was not the client that chose the version."""
        if status == 504 and self._client_deadline_timeouts:
            self._client_deadline_timeouts -= 1
            is_canary_sample = False
        if is_canary_sample and route.endswith(INFERENCE_SUFFIXES) and VERSION_SEGMENT not in route:
            self.requests += status == 200 or status >= 500
            self.errors += status >= 500
        self.telemetry.record_response(self.predictor.artifact.version, route, status, seconds)

    def status(self) -> dict[str, Any]:
        """Totals since the replica's start, what waits now, and how far the input is from the validation rows."""
        queue = {"rows": self.batcher.queued_rows, "tokens": self.batcher.queued_tokens}
        return {
            "ready": self.is_ready,
            "queue": queue,
            "drift": self._drift_monitor.status(),
            **self.telemetry.totals(),
        }

    def report_load(self) -> dict[str, float]:
        """Return the load since the last call, for `serve.rollout.autoscaling`."""
        stats = self.batcher.stats
        return self._load_meter.report(time.monotonic(), self.batcher.queued_tokens, stats.seconds, stats.tokens)

    async def answer_texts(
        self,
        texts: list[Input],
        deadline: float,
        field_of: Callable[[int], str],
        parameters: Mapping[str, Any],
        context: RequestContext,
    ) -> list[Any]:
        """Answers to `texts`; counts them in `context`. `field_of`: name of a text's field in the request."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        characters, max_characters = [count_characters(text) for text in texts], self.settings.max_text_characters
        if (longest := max(characters)) > max_characters:
            field = field_of(characters.index(longest))
            raise RequestError(413, f"a text of {longest} characters; send at most {max_characters}", field)
        if len(self.predictor.head.labels) > DEFAULT_MAX_LABELS and not parameters.get("top_k"):
            parameters = {**parameters, "top_k": DEFAULT_MAX_LABELS}
        requested_texts = texts
        try:
            texts = [self.predictor.clean_input(text, position) for position, text in enumerate(texts)]
        except InputError as error:
            raise RequestError(422, str(error), field_of(error.position)) from None
        if self.predictor.task.output == "tokens":
            self._check_repeated_characters(texts, parameters)
        remaining_s = deadline - asyncio.get_running_loop().time()
        try:
            with self.tracer.child_span("tokenize"):
                encoded = await self.encoder.encode(texts, deadline, context.is_disconnected)
            with self.tracer.child_span("engine"):
                outputs = await self.batcher.submit(encoded, deadline, context.client)
        except InputError as error:
            raise RequestError(422, str(error), field_of(error.position)) from None
        except Overloaded as error:
            raise RequestError(503, str(error), retry_after=error.retry_after) from None
        except DeadlineExceeded as error:
            # An engine that does not return is at fault, whatever the client's deadline.
            self._client_deadline_timeouts += (
                remaining_s < MIN_ENGINE_TIME_SHARE * self.settings.request_timeout_s and self.is_ready
            )
            raise RequestError(504, str(error)) from None
        except EngineError:
            logger.exception("the engine failed")
            raise RequestError(500, "the model failed on this request") from None
        context.texts, context.tokens = len(texts), sum(len(row.ids) for row in encoded)
        context.truncated_inputs = sum(row.is_truncated for row in encoded)
        self.telemetry.inputs.inc(len(texts))
        self._drift_monitor.observe(outputs, encoded)
        if self.mirror_texts is not None:
            self.mirror_texts(requested_texts)
        with self.tracer.child_span("decode"):
            if parameters.get("abstain"):
                task, head = self.predictor.task, self.predictor.head
                answers = self.predictor.decode(outputs, texts, encoded, {**parameters, "top_k": None})
                answers = apply_abstention(answers, task, head, parameters["top_k"])
            else:
                answers = self.predictor.decode(outputs, texts, encoded, parameters)
        if parameters.get("explain"):
            rows = [AnsweredRow(*row) for row in zip(texts, encoded, outputs, strict=True)]
            with self.tracer.child_span("explain"):
                explanations = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [
                {"answer": answer, "explanation": why} for answer, why in zip(answers, explanations, strict=True)
            ]
        return answers

    def _check_repeated_characters(self, texts: Sequence[Input], parameters: Mapping[str, Any]) -> None:
        """Raise `RequestError` where the answer would be gigabytes: it has each text once for each word of each mask,
        and is made on the loop."""
        mask, top = str(self.predictor.head.facts["mask"]), parameters.get("top_k") or DEFAULT_TOP_K
        top = min(top, self.predictor.head.facts["vocabulary"])
        repeated_characters = sum(len(text) * text.count(mask) * top for text in texts if isinstance(text, str))
        if repeated_characters > MAX_REPEATED_CHARACTERS:
            reason = (
                f"the answer would have the texts {repeated_characters:,} characters long in all; "
                f"{MAX_REPEATED_CHARACTERS:,} are the most"
            )
            raise RequestError(413, f"{reason}: send a smaller top_k, or fewer texts", "parameters.top_k")

    async def infer(
        self, infer_request: open_inference.InferRequest, binary: bytes, deadline: float, context: RequestContext
    ) -> dict[str, Any]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC."""
        task, artifact = self.predictor.task, self.predictor.artifact
        output_names = infer_request.requested_outputs(task.output)
        texts = infer_request.texts(task.fields, binary, self.settings.max_inputs)
        parameters = infer_request.decode_parameters(output_names, len(artifact.labels))
        if parameters["abstain"]:
            check_can_abstain(task, self.predictor.head)  # refused before the engine has worked for it
            check_labels(artifact.labels)
        field_of = "inputs.0.data.{}".format
        answers = await self.answer_texts(texts, deadline, field_of, parameters, context)
        tensors = open_inference.build_output_tensors(answers, task.output, output_names)
        reply = {"model_name": artifact.name, "model_version": artifact.version, "outputs": tensors}
        return reply if infer_request.id is None else {**reply, "id": infer_request.id}

    def metadata(self) -> dict[str, Any]:
        """The model's in the Open Inference Protocol."""
        task, artifact = self.predictor.task, self.predictor.artifact
        return {
            "name": artifact.name,
            "versions": [artifact.version],
            "platform": f"rtrain_{artifact.engine}",
            "inputs": open_inference.describe_input_tensors(task.fields, is_paired(self.predictor)),
            "outputs": [
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": [-1, -1] if name in open_inference.RANKED_TENSORS else [-1],
                }
                for name, datatype in open_inference.output_datatypes(task.output).items()
            ],
        }

    def list_models(self, ready_only: bool, allowed_models: Collection[str] | None = None) -> list[dict[str, str]]:
        """The models at this address (`app.ModelProvider`): this one."""
        artifact = self.predictor.artifact
        if allowed_models is not None and artifact.name not in allowed_models:
            return []
        entry = {"name": artifact.name, "version": artifact.version}
        if self.is_ready:
            return [{**entry, "state": "READY", "reason": ""}]
        return [] if ready_only else [{**entry, "state": "UNAVAILABLE", "reason": "an engine call does not return"}]

    @contextmanager
    def service_for(self, model: str, version: str | None) -> Iterator["ModelService"]:
        """The service for one request over another protocol, of whatever model and version: there is this one."""
        yield self

    def check_target(self, name: str, version: str = "") -> None:
        """Raise a `RequestError` where another model is asked for, or another version of this one."""
        artifact = self.predictor.artifact
        if name != artifact.name:
            raise RequestError(404, f"no model of that name; this one is {artifact.name}", "name")
        if version not in ("", artifact.version):
            raise RequestError(404, f"no version of that name; this one is {artifact.version}", "version")


def is_paired(predictor: Predictor) -> bool:
    """Whether the model takes two texts, by its task or by its training data."""
    return predictor.task.needs_pair or bool(predictor.artifact.data.get("text_pair"))


def check_can_abstain(task: Task, head: Head) -> None:
    """Raise `RequestError` where the model has no threshold to abstain by."""
    if task.label_thresholds(head) is None:
        abstain_threshold(task, head)


def abstain_threshold(task: Task, head: Head) -> float:
    """Minimum score of an accepted class. Raises `RequestError` if the model has no threshold."""
    if task.output != "classes":
        raise RequestError(422, "this model's answers are not labels of a text", "parameters.abstain")
    threshold = head.facts.get("threshold" if "out_of_scope_label" in head.facts else ABSTAIN_FACT)
    if threshold is None:
        reason = "this artifact has no threshold that was chosen on validation rows; train the model again to have one"
        raise RequestError(422, reason, "parameters.abstain")
    return float(threshold)


def check_labels(labels: Sequence[str]) -> None:
    """Raise `RequestError` where tensors of labels could not tell an abstention from a label of the model."""
    if NO_LABEL in labels:
        reason = f"this model has a label {NO_LABEL!r}, which says here that it abstains; send the text to /predict"
        raise RequestError(422, reason, "parameters.abstain")


def apply_abstention(answers: list[list[dict[str, Any]]], task: Task, head: Head, top_k: int | None) -> list[Any]:
    """Prepend "none" to answers whose best score is below the threshold. `answers`: from `Task.decode`, with all
    labels. The score of "none" is 1 minus the best score. `abstained` distinguishes it from a label of that name. In a
    multi-label answer, accepted labels come first; each label has its own threshold."""
    thresholds, out_of_scope_label = task.label_thresholds(head), head.facts.get("out_of_scope_label")
    min_score = abstain_threshold(task, head) if thresholds is None else 0.0
    decided_labels = {point["label"] for point in head.facts.get(OPERATING_POINTS, ())}
    results = []
    for answer in answers:
        best = answer[0]
        none = {"label": NO_LABEL, "score": 1 - best["score"], "abstained": True}
        if thresholds is not None:
            accepted_labels = [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
            answer = [*(accepted_labels or [none]), *(entry for entry in answer if entry not in accepted_labels)]
        elif (
            best["label"] == out_of_scope_label
        ):  # by the same threshold, under the name that the training rows have for it
            answer = [{**best, "label": NO_LABEL, "abstained": True}, *answer[1:]]
        elif best["score"] < min_score and best["label"] not in decided_labels:
            answer = [none, *answer]
        results.append(answer[:top_k])
    return results


class AnsweredRow(NamedTuple):
    """An answered text."""

    text: Input
    encoded: EncodedRow
    output: Floats


class ExplanationQueue:
    """Explains answers, some dozens of engine calls each, on a low-priority thread that never holds up the batcher; it
    stops between two calls when nobody awaits the explanation. Belongs to one event loop."""

    def __init__(self, predictor: Predictor, on_done: Callable[[float], None] = lambda seconds: None):
        """`on_done` receives the seconds of each explanation, on the explaining thread."""
        self._predictor, self._on_done = predictor, on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="explain", initializer=_yield_processor)
        self._row_seconds = 0.0
        self.queued_texts = 0
        """Texts that have no explanation yet."""

    @functools.cached_property
    def _explainer(self) -> Explainer:
        """Made when first asked for: an int8 artifact answers, and has none."""
        return Explainer(self._predictor)

    def check_request(self, num_texts: int, label: str | None) -> None:
        """Refuse what cannot be explained before it is answered."""
        if num_texts > MAX_QUEUED_TEXTS:
            raise RequestError(413, f"{num_texts} texts to explain; send at most {MAX_QUEUED_TEXTS}", "inputs")
        try:
            self._explainer.check(label)
        except UserError as error:
            raise _to_request_error(error) from None

    async def submit(self, rows: Sequence[AnsweredRow], label: str | None, deadline: float) -> list[dict[str, Any]]:
        """The explanation of each row's answer, or of `label`; `deadline` is on the loop's clock. Where it passes, or
        the caller is cancelled, the work ends."""
        if self.queued_texts + len(rows) > MAX_QUEUED_TEXTS:
            retry_after = max(1, math.ceil(self.queued_texts * self._row_seconds))
            raise RequestError(503, "too many texts are waiting to be explained", retry_after=retry_after)
        loop, stop_event = asyncio.get_running_loop(), threading.Event()
        self.queued_texts += len(rows)
        try:
            async with asyncio.timeout_at(deadline):
                return await loop.run_in_executor(self._thread, self._explain, rows, label, stop_event)
        except TimeoutError:
            raise RequestError(504, "the deadline passed before the explanation was ready") from None
        except UserError as error:
            raise _to_request_error(error) from None
        finally:
            self.queued_texts -= len(rows)
            stop_event.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _explain(
        self, rows: Sequence[AnsweredRow], label: str | None, stop_event: threading.Event
    ) -> list[dict[str, Any]]:
        documents = []
        for row in rows:
            started_at = time.monotonic()
            try:
                documents.append(self._explainer.explain(*row, label, should_stop=stop_event.is_set).to_document())
            except ExplanationCancelled:
                break  # nobody reads the rest
            self._row_seconds = time.monotonic() - started_at
            self._on_done(self._row_seconds)
        return documents


def _to_request_error(error: UserError) -> RequestError:
    field = "parameters.label" if isinstance(error, LabelError) else "parameters.explain"
    return RequestError(422, str(error), field)


def _yield_processor() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
