"""What the routes ask: one version of a model with its tokenizer, its batcher and its counters; no HTTP."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rtrain.config import Serve
from rtrain.inference.predictor import InputError, Predictor
from rtrain.tasks.base import Input
from rtrain.tasks.masked_lm import DEFAULT_TOP
from serve import abstention
from serve.auth import api_keys, middleware
from serve.batching.batcher import Batcher, EngineError, Expired
from serve.batching.encoding import Encoder, characters_of
from serve.batching.scheduler import Limits, Overloaded
from serve.explanations import Explanations, Row
from serve.model_info import is_paired
from serve.observability import aggregation, tracing
from serve.observability.metrics import Telemetry, Watch
from serve.request_context import AccessLog, Record
from serve.rollout.autoscaling import Meter
from serve.schemas import open_inference
from serve.schemas.predict import DEFAULT_LABELS, RequestError

logger = logging.getLogger(__name__)

MOST_REPEATED = 5_000_000
"""Characters of texts in the answer of a masked language model."""
HURRIED = 0.5
"""Share of `serve.deadline_s` that is left for the engine when a request's texts are there. With less the client has
set a deadline of its own, or has sent its body slowly, and that it is too late says nothing of the version."""
NAMED = "/versions/"
"""In a route by which a client names the version that it asks."""
ASKING = ("/predict", "/infer", "/ModelInfer")
"""How the paths end by which a model is asked."""


class Lasting:
    """What a replica keeps of a model while versions of it come and go: its counters, and who asks for keys."""

    def __init__(self, settings: Serve, door: api_keys.Door | None):
        self.telemetry = Telemetry()
        self.door = door


class Service:
    """What the routes share: the model, its tokenizer, its batcher, its metrics."""

    def __init__(self, predictor: Predictor, settings: Serve, lasting: Lasting | None = None):
        self.predictor, self.settings = predictor, settings
        self.requests = 0
        """Questions by which this version is judged beside another one: those that it has answered or failed on. Left
        out is what a client has chosen: those that name the version, and those that were too late by a deadline of the
        client's."""
        self.errors = 0
        """How many of these had the status 500 or above."""
        self._hurried = 0
        """Requests that were too late by their own deadlines, and of which `answered` has not been told yet."""
        self.mirror: Callable[[Sequence[Input]], None] | None = None
        """Told each text that was answered, while a candidate is on trial."""
        self.spans = tracing.spans(settings, predictor.artifact)
        self.access_log = AccessLog(settings.access_log)
        self.telemetry = (lasting or Lasting(settings, middleware.door(settings))).telemetry
        limits = Limits(
            batch_rows=settings.max_batch_rows,
            batch_tokens=settings.max_batch_tokens,
            batch_s=settings.max_batch_s,
            queue_rows=settings.max_queue_rows,
            queue_tokens=settings.max_queue_tokens,
        )
        self.run = functools.partial(predictor.run, most_tokens=settings.max_batch_tokens)
        """The engine, by the calls that requests make."""
        self.batcher = Batcher(self.run, limits, self.telemetry.on_call, predictor.is_unpadded)
        self.encoder = Encoder(predictor, self.batcher.count_dropped)
        self._drift = Watch(predictor)
        self.telemetry.watch(self.batcher, self._drift)
        self._meter = Meter(time.monotonic())
        self.explanations = Explanations(predictor, self.telemetry.explained.observe)

    def close(self, wait: bool = True) -> None:
        """`wait`: until its spans have been sent; not on an event loop that answers requests."""
        self.telemetry.forget(self.batcher)
        self.batcher.close()
        self.explanations.close()
        self.spans.close(wait)
        self.access_log.close()

    @property
    def ready(self) -> bool:
        """False while an engine call has run for longer than `serve.deadline_s`: nobody awaits it any more. The golden
        answers were checked when the artefact was loaded."""
        return self.batcher.stalled_s() <= self.settings.deadline_s

    def exposition(self) -> str:
        return aggregation.exposition({self.predictor.artifact.name: self.telemetry.registry})

    def answered(self, route: str, status: int, seconds: float, judged: bool = True) -> None:
        """A request has ended. `judged`: whether it was not the client that chose the version."""
        if status == 504 and self._hurried:
            self._hurried -= 1
            judged = False
        if judged and route.endswith(ASKING) and NAMED not in route:
            self.requests += status == 200 or status >= 500
            self.errors += status >= 500
        self.telemetry.answered(self.predictor.artifact.version, route, status, seconds)

    def status(self) -> dict[str, Any]:
        """Totals since the replica's start, what waits now, and how far the input is from the validation rows."""
        waiting = {"rows": self.batcher.waiting, "tokens": self.batcher.waiting_tokens}
        return {"ready": self.ready, "queue": waiting, "drift": self._drift.status(), **self.telemetry.totals()}

    def load(self) -> dict[str, float]:
        """What `scaling.policy` decides by, of the time since the last call."""
        stats = self.batcher.stats
        return self._meter.report(time.monotonic(), self.batcher.waiting_tokens, stats.seconds, stats.tokens)

    async def answers(
        self,
        texts: list[Input],
        deadline: float,
        place: Callable[[int], str],
        parameters: Mapping[str, Any],
        record: Record,
        client: str = "",
    ) -> tuple[list[Any], int]:
        """Answers to `texts`, and how many of them were cut; `place` names the field of a text in the request, and
        `client` whose it is. What is counted of it is put into its `record`."""
        if len(texts) > self.settings.max_inputs:
            raise RequestError(413, f"{len(texts)} texts; send at most {self.settings.max_inputs}", "inputs")
        characters, most = [characters_of(text) for text in texts], self.settings.max_text_characters
        if (longest := max(characters)) > most:
            where = place(characters.index(longest))
            raise RequestError(413, f"a text of {longest} characters; send at most {most}", where)
        if len(self.predictor.head.labels) > DEFAULT_LABELS and not parameters.get("top_k"):
            parameters = {**parameters, "top_k": DEFAULT_LABELS}
        if self.predictor.task.output == "tokens":
            self._refuse_repeats(texts, parameters)
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            with self.spans.part("tokens"):
                encoded = await self.encoder.encode(texts, deadline, record.has_left)
            with self.spans.part("engine"):
                outputs = await self.batcher.submit(encoded, deadline, client)
        except InputError as error:
            raise RequestError(422, str(error), place(error.position)) from None
        except Overloaded as error:
            raise RequestError(503, str(error), retry_after=error.retry_after) from None
        except Expired as error:
            # An engine that does not return is at fault, whatever the client's deadline.
            self._hurried += left_s < HURRIED * self.settings.deadline_s and self.ready
            raise RequestError(504, str(error)) from None
        except EngineError:
            logger.exception("the engine failed")
            raise RequestError(500, "the model failed on this request") from None
        record.texts, record.tokens = len(texts), sum(len(row.ids) for row in encoded)
        record.cut = sum(row.truncated for row in encoded)
        self.telemetry.rows.inc(len(texts))
        self._drift.observe(outputs, encoded)
        if self.mirror is not None:
            self.mirror(texts)
        with self.spans.part("answers"):
            if parameters.get("abstain"):
                task, head = self.predictor.task, self.predictor.head
                answers = self.predictor.decode(outputs, texts, encoded, {**parameters, "top_k": None})
                answers = abstention.abstain(answers, task, head, parameters["top_k"])
            else:
                answers = self.predictor.decode(outputs, texts, encoded, parameters)
        if parameters.get("explain"):
            rows = [Row(*row) for row in zip(texts, encoded, outputs, strict=True)]
            with self.spans.part("explanations"):
                found = await self.explanations.submit(rows, parameters["label"], deadline)
            answers = [{"answer": answer, "explanation": why} for answer, why in zip(answers, found, strict=True)]
        return answers, record.cut

    def _refuse_repeats(self, texts: Sequence[Input], parameters: Mapping[str, Any]) -> None:
        """Raise `RequestError` where the answer would be gigabytes: it has each text once for each word of each mask,
        and is made on the loop."""
        mask, top = str(self.predictor.head.facts["mask"]), parameters.get("top_k") or DEFAULT_TOP
        top = min(top, self.predictor.head.facts["vocabulary"])
        repeated = sum(len(text) * text.count(mask) * top for text in texts if isinstance(text, str))
        if repeated > MOST_REPEATED:
            told = (
                f"the answer would have the texts {repeated:,} characters long in all; {MOST_REPEATED:,} are the most"
            )
            raise RequestError(413, f"{told}: send a smaller top_k, or fewer texts", "parameters.top_k")

    async def infer(
        self, asked: open_inference.InferRequest, binary: bytes, deadline: float, record: Record, client: str = ""
    ) -> tuple[dict[str, Any], int]:
        """The reply of the Open Inference Protocol, over HTTP or gRPC, and how many texts were cut."""
        task, artifact = self.predictor.task, self.predictor.artifact
        wanted = asked.wanted(task.output)
        texts = asked.texts(task.fields, binary, self.settings.max_inputs)
        parameters = asked.asks(wanted, len(artifact.labels))
        if parameters["abstain"]:
            abstention.check(task, self.predictor.head)  # refused before the engine has worked for it
            abstention.refuse_label(artifact.labels)
        place = "inputs.0.data.{}".format
        answers, cut = await self.answers(texts, deadline, place, parameters, record, client)
        tensors = open_inference.tensors(answers, task.output, wanted)
        reply = {"model_name": artifact.name, "model_version": artifact.version, "outputs": tensors}
        return (reply if asked.id is None else {**reply, "id": asked.id}), cut

    def metadata(self) -> dict[str, Any]:
        """The model's in the Open Inference Protocol."""
        task, artifact = self.predictor.task, self.predictor.artifact
        return {
            "name": artifact.name,
            "versions": [artifact.version],
            "platform": f"rtrain_{artifact.engine}",
            "inputs": open_inference.input_tensors(task.fields, is_paired(self.predictor)),
            "outputs": [
                {"name": name, "datatype": datatype, "shape": [-1, -1] if name in open_inference.RANKED else [-1]}
                for name, datatype in open_inference.output_tensors(task.output).items()
            ],
        }

    def index(self, ready: bool, only: Collection[str] | None = None) -> list[dict[str, str]]:
        """The models at this address (`base.Desk`): this one."""
        artifact = self.predictor.artifact
        if only is not None and artifact.name not in only:
            return []
        named = {"name": artifact.name, "version": artifact.version}
        if self.ready:
            return [{**named, "state": "READY", "reason": ""}]
        return [] if ready else [{**named, "state": "UNAVAILABLE", "reason": "an engine call does not return"}]

    @contextmanager
    def answering(self, model: str, version: str | None) -> Iterator["Service"]:
        """The service for one request over another protocol, of whatever model and version: there is this one."""
        yield self

    def named(self, name: str, version: str = "") -> None:
        """Raise a `RequestError` where another model is asked for, or another version of this one."""
        artifact = self.predictor.artifact
        if name != artifact.name:
            raise RequestError(404, f"no model of that name; this one is {artifact.name}", "name")
        if version not in ("", artifact.version):
            raise RequestError(404, f"no version of that name; this one is {artifact.version}", "version")
