"""One version of a model behind the routes: tokenizer, batcher and counters; no HTTP."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rtrain.config import ServeConfig
from rtrain.inference.predictor import InputError, Predictor
from rtrain.tasks.base import Input
from rtrain.tasks.masked_lm import DEFAULT_TOP_K
from serve import abstention, middleware
from serve.auth import api_keys
from serve.batching.batcher import Batcher, DeadlineExceeded, EngineError
from serve.batching.encode_queue import Encoder, count_characters
from serve.batching.scheduler import BatchLimits, Overloaded
from serve.explanations import AnsweredRow, ExplanationQueue
from serve.model_info import is_paired
from serve.observability import aggregation, tracing
from serve.observability.metrics import DriftMonitor, Telemetry
from serve.request_context import AccessLog, RequestStats
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


class ModelState:
    """State of a model that outlives its versions: counters and the authenticator."""

    def __init__(self, settings: ServeConfig, authenticator: api_keys.Authenticator | None):
        self.telemetry = Telemetry()
        self.authenticator = authenticator


class ModelService:
    """One version of a model: predictor, tokenizer, batcher, metrics. The routes share it."""

    def __init__(self, predictor: Predictor, settings: ServeConfig, model_state: ModelState | None = None):
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
        self.access_log = AccessLog(settings.access_log)
        self.telemetry = (model_state or ModelState(settings, middleware.make_authenticator(settings))).telemetry
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
        self.access_log.close()

    @property
    def is_ready(self) -> bool:
        """False while an engine call has run for longer than `serve.request_timeout_s`: nobody awaits it any more. The
        golden answers were checked when the artifact was loaded."""
        return self.batcher.current_call_s() <= self.settings.request_timeout_s

    def render_metrics(self) -> str:
        return aggregation.render_metrics({self.predictor.artifact.name: self.telemetry.registry})

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
        request_stats: RequestStats,
        client: str = "",
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and the number of truncated texts. `field_of`: name of a text's field in the request.
        `client`: name of the key. Updates `request_stats`."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        characters, max_characters = [count_characters(text) for text in texts], self.settings.max_text_characters
        if (longest := max(characters)) > max_characters:
            field = field_of(characters.index(longest))
            raise RequestError(413, f"a text of {longest} characters; send at most {max_characters}", field)
        if len(self.predictor.head.labels) > DEFAULT_MAX_LABELS and not parameters.get("top_k"):
            parameters = {**parameters, "top_k": DEFAULT_MAX_LABELS}
        if self.predictor.task.output == "tokens":
            self._check_repeated_characters(texts, parameters)
        remaining_s = deadline - asyncio.get_running_loop().time()
        try:
            with self.tracer.child_span("tokenize"):
                encoded = await self.encoder.encode(texts, deadline, request_stats.is_disconnected)
            with self.tracer.child_span("engine"):
                outputs = await self.batcher.submit(encoded, deadline, client)
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
        request_stats.texts, request_stats.tokens = len(texts), sum(len(row.ids) for row in encoded)
        request_stats.truncated_inputs = sum(row.is_truncated for row in encoded)
        self.telemetry.inputs.inc(len(texts))
        self._drift_monitor.observe(outputs, encoded)
        if self.mirror_texts is not None:
            self.mirror_texts(texts)
        with self.tracer.child_span("decode"):
            if parameters.get("abstain"):
                task, head = self.predictor.task, self.predictor.head
                answers = self.predictor.decode(outputs, texts, encoded, {**parameters, "top_k": None})
                answers = abstention.apply_abstention(answers, task, head, parameters["top_k"])
            else:
                answers = self.predictor.decode(outputs, texts, encoded, parameters)
        if parameters.get("explain"):
            rows = [AnsweredRow(*row) for row in zip(texts, encoded, outputs, strict=True)]
            with self.tracer.child_span("explain"):
                explanations = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [
                {"answer": answer, "explanation": why} for answer, why in zip(answers, explanations, strict=True)
            ]
        return answers, request_stats.truncated_inputs

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
        self,
        infer_request: open_inference.InferRequest,
        binary: bytes,
        deadline: float,
        request_stats: RequestStats,
        client: str = "",
    ) -> tuple[dict[str, Any], int]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC, and how many texts were cut."""
        task, artifact = self.predictor.task, self.predictor.artifact
        output_names = infer_request.requested_outputs(task.output)
        texts = infer_request.texts(task.fields, binary, self.settings.max_inputs)
        parameters = infer_request.decode_parameters(output_names, len(artifact.labels))
        if parameters["abstain"]:
            abstention.check_can_abstain(task, self.predictor.head)  # refused before the engine has worked for it
            abstention.check_labels(artifact.labels)
        field_of = "inputs.0.data.{}".format
        answers, truncated_inputs = await self.answer_texts(
            texts, deadline, field_of, parameters, request_stats, client
        )
        tensors = open_inference.build_output_tensors(answers, task.output, output_names)
        reply = {"model_name": artifact.name, "model_version": artifact.version, "outputs": tensors}
        return (reply if infer_request.id is None else {**reply, "id": infer_request.id}), truncated_inputs

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
        """The models at this address (`app_base.ModelProvider`): this one."""
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
