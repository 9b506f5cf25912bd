"""An artefact and texts -> answers, by the engine that artifact.json names. An int8 artefact needs no torch."""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rtrain.core import cgroup_limits, engines, env, json_files, manifest
from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Floats, Head, Ints, Outputs, Tokens, batches, pack, padded, round_up
from rtrain.inference import artifact
from rtrain.inference.artifact import GOLDEN_INPUTS, Artifact, ArtifactError
from rtrain.models import compile_cache, pooling, unpadded
from rtrain.models.auto_classes import auto_class
from rtrain.models.device import kind
from rtrain.models.forward import LAYOUT, accepted
from rtrain.tasks import base
from rtrain.tasks.base import Input, Task
from rtrain.tasks.encode import load_tokenizer

if TYPE_CHECKING:
    import openvino
    import torch
    import transformers

BATCH_ROWS = 32

MOST_TOKENS = 1 << 14
"""Most tokens of one engine call, padding included, since its memory grows with them: a text of 64 windows of 384
tokens has 24,576, and 32 such texts 786,432. Texts of many windows go in smaller groups, and the windows of one text in
several calls."""
SQUARES = 512
"""Most squares of texts' lengths in one engine call, per token that it may have: attention may hold one of each head.
Two texts of 8,192 tokens have 16 times those of 32 texts of 512, and are no faster together than one by one."""

HALF_TOLERANCE = 0.02
"""Most that fp16 logits may differ from golden answers: about twice the spacing of fp16 numbers near 10."""

COLUMNS = 8
"""Least difference in tokens between two widths of calls, for an engine that plans by shape."""

REVISION_DIGITS = 12
"""Digits of a SHA-256 in hex, as in an artefact's version."""

CONVERTER = "openvino.tools.ovc"


class InputError(UserError):
    """An input that no model can read; `position` is its place in the request."""

    code = "invalid_input"

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


class Engine(Protocol):
    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        """[windows, outputs] of padded inputs [windows, tokens]: input_ids, attention_mask, token_type_ids; or
        [windows, tokens, outputs]."""
        ...


class Predictor:
    """A loaded artefact. Thread-safe as far as its engine is; serving calls `run` from one thread."""

    def __init__(
        self,
        folder: Path,
        artifact: Artifact,
        threads: int | None = None,
        engine: "Engine | None" = None,
        device: str = "cpu",
        precision: str = "fp32",
    ):
        """`engine` answers in place of the artefact's own: a graph that is not written yet. `device`: torch's, of an
        engine that knows GPUs; `precision`: of its products there, fp32 or fp16."""
        self.folder = folder
        self.artifact = artifact
        self.task = base.get(artifact.task)
        self.head = Head(artifact.labels, artifact.facts)
        self.tokenizer = load_tokenizer(
            folder, artifact.max_tokens, artifact.facts.get("stride", 0), reads_special=self.task.reads_special
        )
        entry = engines.get(artifact.engine)
        options = {"device": device, "precision": precision} if entry.on_gpu else {}
        self.golden_tolerance = HALF_TOLERANCE if entry.on_gpu and precision == "fp16" else entry.golden_tolerance
        if threads is None and cgroup_limits.cpus() is not None:
            threads = env.cores()  # engines go by the machine's cores, and would wait for each other within a quota
        self._plans_by_shape = entry.plans_by_shape
        self._engine: Engine = engine or engines.named(entry.loader)(folder, artifact, threads, **options)
        self.pad_id = _pad_id(folder)
        self.revisions = _revisions(folder, artifact)
        """Digests that tell whether a part has changed: of the model as a whole, of its tokenizer, of its labels."""

    @classmethod
    def load(
        cls, folder: Path, threads: int | None = None, device: str = "cpu", precision: str = "fp32"
    ) -> "Predictor":
        """Verify the folder, load its engine and check that it reproduces its golden answers (I8)."""
        predictor = cls(folder, artifact.read(folder), threads, device=device, precision=precision)
        predictor.check_golden()
        return predictor

    def flaw(self, value: object) -> str | None:
        """Why an input cannot be read, as the end of a sentence, or None."""
        if not isinstance(value, str | Mapping):
            return "is no text; send a text"
        if not isinstance(value, str) and self.task.fields[0] not in value:
            return f"has other names; send {' and '.join(self.task.fields)}"
        text, pair = _texts(value, self.task)
        if not all(isinstance(part, str) for part in (text, pair or "")):
            return "holds something else than texts; send texts"
        if self.task.needs_pair and pair is None:
            return f"lacks one of two texts; send {' and '.join(self.task.fields)}"
        if self.task.needs_pair and not (pair or "").strip():
            return f"has an empty {self.task.fields[1]}; send a text"
        for part in (text, pair or ""):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError:
                return "is not valid Unicode (a lone surrogate); send UTF-8 text"
        return "is empty; send a text" if self.task.is_blank(text, pair) else None

    def encode(self, inputs: Sequence[Input]) -> list[Encoded]:
        """Tokens of each input, by the same `task.encode` as in training."""
        for position, value in enumerate(inputs):
            if (flaw := self.flaw(value)) is not None:
                raise InputError(f"input {position} {flaw}", position)
        read = [_texts(value, self.task) for value in inputs]
        most = self.artifact.facts.get("max_windows", 1)
        found: dict[int, Encoded] = {}
        # Pairs apart: beside them, a single text would get an empty second one, and another answer than alone (I8).
        for paired in (False, True):
            rows = [row for row, (_, pair) in enumerate(read) if (pair is not None) == paired]
            if not rows:
                continue
            pairs = [read[row][1] or "" for row in rows] if paired else None
            encoded = self.task.encode(self.tokenizer, [read[row][0] for row in rows], pairs, most)
            found.update(zip(rows, encoded, strict=True))
        return [found[row] for row in range(len(read))]

    def run(self, encoded: Sequence[Encoded], most_tokens: int = MOST_TOKENS) -> Outputs:
        """The output for each row (see `Task.outputs`), by as few engine calls as `most_tokens` allows."""
        tokens = pack(encoded)
        return self.task.outputs(self.run_tokens(tokens, most_tokens), tokens, self.head)

    def run_tokens(self, tokens: Tokens, most_tokens: int = MOST_TOKENS) -> Floats:
        """Logits of rows that are tokens already, as a token store gives them: [windows or wanted tokens, outputs]."""
        wanted = self.task.wanted(tokens, self.head)
        ends = np.concatenate([[0], np.cumsum(tokens.lengths, dtype=np.int64)])
        found = []
        for windows in parts(tokens.lengths.tolist(), most_tokens, self.call_shape, padded=not self.is_unpadded):
            first, last = ends[windows.start], ends[windows.stop]
            part = replace(
                tokens, ids=tokens.ids[first:last], lengths=tokens.lengths[windows], second=tokens.second[windows]
            )
            if isinstance(self._engine, Torch) and self._engine.is_unpadded:
                places = None if wanted is None else wanted[(wanted >= first) & (wanted < last)] - first
                found.append(self._engine.unpadded_logits(part, places))
                continue
            count = len(part.lengths)
            rows, width = self.call_shape(count, int(part.lengths.max()))
            inputs = padded(part, self.pad_id, width, rows)
            logits = self._engine.logits(inputs)[:count]
            if logits.ndim == 3:
                places = np.flatnonzero(inputs["attention_mask"][:count])
                if wanted is not None:
                    places = places[wanted[(wanted >= first) & (wanted < last)] - first]
                logits = logits.reshape(-1, logits.shape[2])[places]
            found.append(logits)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def call_shape(self, windows: int, tokens: int) -> tuple[int, int]:
        """Rows and columns of the engine call for so many windows, the longest of which has so many tokens. An engine
        that plans by shape gets ten numbers of rows up to 32 and 32 numbers of columns up to 512."""
        if not self._plans_by_shape:
            return windows, tokens
        width = COLUMNS * round_up(-(-tokens // COLUMNS), 4)
        return round_up(windows, 2), max(tokens, min(width, self.artifact.max_tokens))

    def outputs(self, encoded: Sequence[Encoded], batch_rows: int = BATCH_ROWS) -> list[Floats]:
        """The output for each of any number of rows, in batches of neighbours in length."""
        return side_by_side([self], encoded, batch_rows)

    def logits(self, inputs: Sequence[Input], batch_rows: int = BATCH_ROWS) -> list[Floats]:
        """The output for each input."""
        return self.outputs(self.encode(inputs), batch_rows)

    def __call__(
        self, inputs: Sequence[Input], parameters: Mapping[str, Any] | None = None, batch_rows: int = BATCH_ROWS
    ) -> list[Any]:
        """One answer per input, in the task's HTTP form."""
        if not inputs:
            return []
        encoded = self.encode(inputs)
        return self.decode(self.outputs(encoded, batch_rows), inputs, encoded, parameters or {})

    def decode(
        self, outputs: Outputs, inputs: Sequence[Input], encoded: Sequence[Encoded], parameters: Mapping[str, Any]
    ) -> list[Any]:
        """The answer to each input by its output, in the task's HTTP form. Where an answer is pieces of the vocabulary,
        which a task, having no tokenizer, gives by their numbers, they get their texts, alone and in the input."""
        answers = self.task.decode(outputs, inputs, encoded, self.head, parameters)
        if self.task.output == "tokens":
            for value, answer in zip(inputs, answers, strict=True):
                parts = _texts(value, self.task)[0].split(self.head.facts["mask"])
                for place, mask in enumerate(answer, 1):
                    before, after = (self.head.facts["mask"].join(side) for side in (parts[:place], parts[place:]))
                    for piece in mask:
                        piece["token_str"] = self.tokenizer.decode([piece["token"]], skip_special_tokens=False)
                        piece["sequence"] = before + piece["token_str"] + after
        return answers

    @property
    def is_unpadded(self) -> bool:
        """Whether the engine computes no padding, so that texts of all lengths may share a call."""
        return isinstance(self._engine, Torch) and self._engine.is_unpadded

    @property
    def network(self) -> tuple["transformers.PreTrainedModel", frozenset[str]]:
        """The float model itself, for its gradients, and the names that its forward takes."""
        if isinstance(self._engine, Torch):
            return self._engine.network, self._engine.accepted
        made = self.artifact
        parent = made.lineage.get("parent")
        version = f", version {parent}" if parent else ""
        raise UserError(
            f"artefact {made.name} {made.version} is int8 and has no gradients; "
            f"name the float artefact that it was made from{version}",
            code="no_gradients",
        )

    def check_golden(self) -> None:
        """Refuse to answer where the answers are not those that the artefact's maker recorded."""
        if not self.artifact.golden:
            raise ArtifactError("the artefact has no golden answers; make it again", code="damaged_artifact")
        found = self.logits([row["inputs"] for row in self.artifact.golden], batch_rows=1)
        apart = [
            _apart(output, np.array(row["logits"], dtype=np.float32))
            for output, row in zip(found, self.artifact.golden, strict=True)
        ]
        worst = float(np.max(apart))  # a NaN is the worst of all
        tolerance = self.golden_tolerance
        if not worst <= tolerance:  # also where it is not a number
            raise ArtifactError(
                f"artefact {self.artifact.name} {self.artifact.version} does not reproduce its golden answers: logits "
                f"differ by {worst:.3g} (at most {tolerance:g}). {self._why_apart()}",
                code="other_answers",
            )

    def _why_apart(self) -> str:
        from rtrain.models import int8_support  # of runs, which nothing else here needs

        here = int8_support.of_processor()
        if here.instructions or not here.known or engines.get(self.artifact.engine).gradients:
            return "Its tokenizer, weights or engine are not its maker's."
        return (
            f"This processor ({int8_support.processor()}) has neither VNNI nor AMX, so sums of int8 products saturate; "
            "quantize with quantize.overflow_fix=true, or name the float artifact."
        )


def side_by_side(copies: Sequence[Predictor], encoded: Sequence[Encoded], batch_rows: int) -> list[Floats]:
    """The output for each of any number of rows, in batches of neighbours in length. Each batch is computed by
    whichever of the `copies` of one artefact is free; which one it is does not change its output."""
    lengths = np.array([len(row.ids) for row in encoded], dtype=np.int32)
    order: Ints = np.argsort(lengths, kind="stable")
    groups = list(batches(lengths, order, batch_rows, MOST_TOKENS))
    free: SimpleQueue[Predictor] = SimpleQueue()
    for predictor in copies:
        free.put(predictor)

    def run(rows: Ints) -> Outputs:
        predictor = free.get()
        try:
            return predictor.run([encoded[row] for row in rows])
        finally:
            free.put(predictor)

    found: dict[int, Floats] = {}
    with ThreadPoolExecutor(len(copies)) as threads:
        # One copy computes in this thread: in a new one torch would make all of its own threads anew.
        every = map(run, groups) if len(copies) == 1 else threads.map(run, groups)
        for rows, outputs in zip(groups, every, strict=True):
            found.update(zip(rows.tolist(), outputs, strict=True))
    return [found[row] for row in range(len(encoded))]


def parts(
    lengths: Sequence[int],
    most_tokens: int,
    shape: Callable[[int, int], tuple[int, int]] = lambda windows, longest: (windows, longest),
    *,
    padded: bool = True,
) -> Iterator[slice]:
    """Consecutive windows of at most `most_tokens` tokens, padding included, and of `SQUARES` times as many squares of
    them; a longer window is alone. `shape`: rows and columns of a call, by its windows and the longest of them. Without
    padding the sum of the lengths counts, and no squares."""
    start, longest, total = 0, 0, 0
    for place, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        rows, width = shape(place + 1 - start, longest)
        computed = rows * width * max(1, width / SQUARES) if padded else total
        if place > start and computed > most_tokens:
            yield slice(start, place)
            start, longest, total = place, length, length
    if start < len(lengths):
        yield slice(start, len(lengths))


def golden_inputs(task: Task, head: Head) -> list[Input]:
    """What an artefact's golden answers are asked of."""
    return task.asks(GOLDEN_INPUTS, head)


def golden_logits(folder: Path, artifact: Artifact) -> list[list[Any]]:
    """The golden answers of a folder that has its model files but no artifact.json yet."""
    predictor = Predictor(folder, artifact)
    rows = predictor.logits(golden_inputs(predictor.task, predictor.head), batch_rows=1)
    return [[float(value) for value in row.ravel()] if row.ndim == 1 else row.tolist() for row in rows]


def _apart(found: Floats, expected: Floats) -> float:
    """The largest difference; endless where they are not of one shape."""
    return float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")


def _texts(value: Input, task: Task) -> tuple[str, str | None]:
    """The one or two texts of an input."""
    return (value, None) if isinstance(value, str) else (value[task.fields[0]], value.get(task.fields[1]))


def _revisions(folder: Path, artifact: Artifact) -> dict[str, str]:
    return {
        "model": artifact.version,
        "tokenizer": manifest.entry(folder / "tokenizer.json")["sha256"][:REVISION_DIGITS],
        "labels": hashlib.sha256("\n".join(artifact.labels).encode()).hexdigest()[:REVISION_DIGITS],
    }


def _pad_id(folder: Path) -> int:
    return int(json_files.read(folder / "config.json").get("pad_token_id") or 0)


class Torch:
    """The float model with torch. On a GPU it computes no padding, where the architecture can do without."""

    def __init__(
        self, folder: Path, artifact: Artifact, threads: int | None, device: str = "cpu", precision: str = "fp32"
    ):
        """`precision`: `fp16` answers by a copy of the encoder in half precision; gradients stay in fp32."""
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        network, _ = pooling.load(auto_class(base.get(artifact.task).auto_model), folder)
        if artifact.facts.get(pooling.FACT) == "mean":
            pooling.pool_by_mean(network)
        # Never trained: gradients are asked of inputs only, and what the weights' would need is not kept.
        self.network: transformers.PreTrainedModel = network.eval().requires_grad_(False).to(device)
        self._device = torch.device(device)
        self.accepted = accepted(self.network)
        self._answering = self.network
        self.is_unpadded = kind(self._device) != "cpu" and unpadded.supports(self.network)
        if self.is_unpadded or precision == "fp16":
            self._answering = copy.deepcopy(self.network)
        if self.is_unpadded:
            task = base.get(artifact.task)
            mean = artifact.facts.get(pooling.FACT) == "mean" or pooling.means(self._answering)
            unpadded.enable(self._answering, "tokens" if task.by_token else "mean" if mean else "first")
        if precision == "fp16":
            _halve(self._answering, self._device)

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        with self._torch.inference_mode():
            taken = {name: value for name, value in inputs.items() if name in self.accepted}
            return _numbers(
                self._answering(**{name: self._torch.from_numpy(one).to(self._device) for name, one in taken.items()})
            )

    def unpadded_logits(self, tokens: Tokens, places: Ints | None) -> Floats:
        """[windows, outputs] of windows without padding; or [tokens, outputs], of those at `places` in `tokens.ids`,
        None for all. For engines that are `is_unpadded`."""
        inputs, position = unpadded.inputs_of(self._answering, tokens, self._device)
        with self._torch.inference_mode():
            found = _numbers(
                self._answering(**{name: one for name, one in inputs.items() if name in self.accepted | {LAYOUT}})
            )
        if found.ndim == 2:
            return found
        return found.reshape(-1, found.shape[2])[position if places is None else position[places]]


def _halve(network: "transformers.PreTrainedModel", device: "torch.device") -> None:
    """Compute the encoder's products in fp16, from weights that are kept so. Sums of layers, LayerNorm, the pooler and
    the head stay in fp32: in fp16 alone a logit of 10 is rounded to a multiple of 0.008."""
    import torch

    encoder: Any = network.base_model
    for name, module in encoder.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler."):
            module.half()
    compute = encoder.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.float16):
            return compute(*inputs, **named)

    encoder.forward = forward


def _numbers(output: Any) -> Floats:
    """The logits of what a network of Transformers returns; a span's two ends are the last axis."""
    if hasattr(output, "start_logits"):
        ends = (output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy())
        return np.stack(ends, axis=-1)
    found: Floats = output.logits.float().cpu().numpy()
    return found


class OpenVino:
    """A graph on OpenVINO's CPU plugin."""

    def __init__(self, graph: "Path | openvino.Model", threads: int | None, cache: Path | None = None):
        """`cache`: a folder for the compiled graph, from which a later process loads it sooner."""
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            # What is not int8 stays fp32: the plugin would take bf16 on some processors, and answer differently there.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(threads)
        if cache is not None:
            options["CACHE_DIR"] = str(cache)
        loaded = _openvino().Core().compile_model(graph, "CPU", options)
        self._request = loaded.create_infer_request()
        self._names = [taken.any_name for taken in loaded.inputs]  # DistilBERT, for one, has no token types

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return _one(list(self._request.infer({name: inputs[name] for name in self._names}, share_inputs=True).values()))


def _openvino() -> Any:
    """OpenVINO without its converter of models, whose import takes as long as that of all the rest, and which no answer
    needs. OpenVINO does without where it is not installed, and so it does where its import is barred."""
    if "openvino" not in sys.modules:
        sys.modules[CONVERTER] = None  # type: ignore[assignment]
        try:
            import openvino
        finally:
            del sys.modules[CONVERTER]
    import openvino

    return openvino


def open_openvino(folder: Path, artifact: Artifact, threads: int | None) -> OpenVino:
    """The int8 graph of an artefact."""
    # A draft is hidden. OpenVINO names what it keeps by the path, which a draft has for this once.
    cache = None if folder.name.startswith(".") else compile_cache.folder(artifact.version)
    files = engines.get(artifact.engine).present(folder)
    if not _is_packed(files):
        return OpenVino(folder / engines.get(artifact.engine).files[0], threads, cache)
    if cache is not None:
        with suppress(OSError):  # no room there: into memory, as where nothing is kept
            return OpenVino(compile_cache.unpacked(files, cache)[0], threads, cache)
    graph, weights = map(compile_cache.contents, files)
    numbers = _openvino().Tensor(np.frombuffer(weights, dtype=np.uint8))
    return OpenVino(_openvino().Core().read_model(graph, numbers), threads)


def _is_packed(files: Sequence[Path]) -> bool:
    return any(path.name.endswith(engines.PACKED) for path in files)


class OnnxRuntime:
    """A graph on ONNX Runtime's CPU provider.

    Raises `UserError` where ONNX Runtime is not installed: it is no dependency of rtrain, but its extra `onnx`.
    """

    def __init__(self, graph: Path | bytes, threads: int | None):
        engines.needed("onnxruntime", ("onnxruntime",))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0  # 0: as many as there are cores
        options.log_severity_level = 3  # errors alone: it warns of each weight that it leaves as it is
        source = graph if isinstance(graph, bytes) else str(graph)
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._names = [taken.name for taken in self._session.get_inputs()]

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return _one(self._session.run(None, {name: inputs[name] for name in self._names}))


def open_onnxruntime(folder: Path, artifact: Artifact, threads: int | None) -> OnnxRuntime:
    """The int8 graph of an artefact."""
    files = engines.get(artifact.engine).present(folder)
    if not _is_packed(files):
        return OnnxRuntime(folder / engines.get(artifact.engine).files[0], threads)
    return OnnxRuntime(compile_cache.contents(files[0]), threads)


def _one(outputs: Sequence[Floats]) -> Floats:
    """A copy of a graph's output. A span model has two, its start and its end: they are the last axis of one array."""
    return outputs[0].copy() if len(outputs) == 1 else np.stack(outputs, axis=-1)
