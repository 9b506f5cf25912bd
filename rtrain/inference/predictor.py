"""Answer texts with an artifact, by the engine in its artifact.json. An int8 artifact needs no torch."""

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

from rtrain.core import engines, env, json_files, manifest, row_text
from rtrain.core.errors import UserError
from rtrain.core.ragged import (
    EncodedRow,
    Floats,
    Head,
    Ints,
    Outputs,
    TokenBatch,
    collate,
    iter_batches,
    pad_batch,
    round_up,
)
from rtrain.inference import artifact
from rtrain.inference.artifact import GOLDEN_INPUTS, Artifact, ArtifactError
from rtrain.models import compile_cache, model_files, pooling, unpadded
from rtrain.models.device import effective_type
from rtrain.models.model_files import auto_class
from rtrain.models.network_parts import LAYOUT, accepted_inputs
from rtrain.tasks import base
from rtrain.tasks.base import Input, Task
from rtrain.tasks.encode import canonical_name, load_tokenizer

if TYPE_CHECKING:
    import openvino
    import torch
    import transformers

DEFAULT_BATCH_SIZE = 32
MAX_TOKENS_PER_CALL = 1 << 14
"""Most tokens of one engine call, padding included, since its memory grows with them: a text of 64 windows of 384
tokens has 24,576, and 32 such texts 786,432. Texts of many windows go in smaller groups, and the windows of one text in
several calls."""
MAX_ATTENTION_RATIO = 512
"""Most squares of texts' lengths in one engine call, per token that it may have: attention may hold one of each head.
Two texts of 8,192 tokens have 16 times those of 32 texts of 512, and are no faster together than one by one."""
FP16_TOLERANCE = 0.02
"""Most that fp16 logits may differ from golden answers: about twice the spacing of fp16 numbers near 10."""
PAD_MULTIPLE = 8
"""Least difference in tokens between two widths of calls, for an engine that plans by shape."""
REVISION_DIGITS = 12
"""Digits of a SHA-256 in hex, as in an artifact's version."""
OPENVINO_CONVERTER_MODULE = "openvino.tools.ovc"


class InputError(UserError):
    """An invalid input; `position` is its index in the request."""

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
    """A loaded artifact. Thread-safe if its engine is; `serve.batching` calls the engine from one thread."""

    def __init__(
        self,
        folder: Path,
        artifact: Artifact,
        threads: int | None = None,
        engine: "Engine | None" = None,
        device: str = "cpu",
        precision: str = "fp32",
    ):
        """`engine` replaces the artifact's own, for a graph that is not written yet. `device`: of torch, for an engine
        with GPU support; `precision`: of its products there, fp32 or fp16."""
        self.folder = folder
        self.artifact = artifact
        self.task = base.get_task(artifact.task)
        self.head = Head(artifact.labels, artifact.facts)
        self.tokenizer = load_tokenizer(
            folder,
            artifact.max_tokens,
            artifact.facts.get("stride", 0),
            parses_special_tokens=self.task.parses_special_tokens,
        )
        spec = engines.get_engine(artifact.engine)
        options = {"device": device, "precision": precision} if spec.supports_gpu else {}
        self.golden_tolerance = FP16_TOLERANCE if spec.supports_gpu and precision == "fp16" else spec.golden_tolerance
        # Engines count the machine's cores, and too many threads would wait for each other within a quota.
        if threads is None and env.cpu_quota() is not None:
            threads = env.available_cores()
        self._compiles_per_shape = spec.compiles_per_shape
        self._engine: Engine = engine or engines.import_object(spec.loader)(folder, artifact, threads, **options)
        self.pad_id = _read_pad_id(folder)
        self.revisions = _compute_revisions(folder, artifact)
        """Return digests of the whole model, of its tokenizer and of its labels."""

    @classmethod
    def load(
        cls, folder: Path, threads: int | None = None, device: str = "cpu", precision: str = "fp32"
    ) -> "Predictor":
        """Verify the folder, load its engine and check that it reproduces its golden answers."""
        predictor = cls(folder, artifact.read_artifact(folder), threads, device=device, precision=precision)
        predictor.check_golden()
        return predictor

    def validate_input(self, value: object) -> str | None:
        """Return why an input is invalid, as the end of a sentence, or None."""
        if not isinstance(value, str | Mapping):
            return "is no text; send a text"
        if not isinstance(value, str) and self.task.fields[0] not in value:
            return f"has other names; send {' and '.join(self.task.fields)}"
        text, pair = _split_pair(value, self.task)
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

    def clean_input(self, value: Any, position: int = 0) -> Any:
        """Return an input of a request as the rows of the training were read: HTML stripped, features before the text
        (`rtrain.core.row_text`). Rows of files are read so already. Raises `InputError`."""
        try:
            fields, settings = self.task.fields, self.artifact.data
            return row_text.clean_input(value, fields[0], settings, lambda cell: canonical_name(cell.strip()))
        except ValueError as error:
            raise InputError(f"input {position} {error}", position) from None

    def encode(self, inputs: Sequence[Input]) -> list[EncodedRow]:
        """Turn the texts of each input into token ids, by the same `task.encode` as in training."""
        for position, value in enumerate(inputs):
            if (problem := self.validate_input(value)) is not None:
                raise InputError(f"input {position} {problem}", position)
        text_pairs = [_split_pair(value, self.task) for value in inputs]
        max_windows = self.artifact.facts.get("max_windows", 1)
        encoded_by_row: dict[int, EncodedRow] = {}
        # Pairs are encoded separately: in one call with pairs, a single text would get an empty second text, and
        # another answer.
        for is_pair in (False, True):
            rows = [row for row, (_, pair) in enumerate(text_pairs) if (pair is not None) == is_pair]
            if not rows:
                continue
            pairs = [text_pairs[row][1] or "" for row in rows] if is_pair else None
            encoded = self.task.encode(self.tokenizer, [text_pairs[row][0] for row in rows], pairs, max_windows)
            encoded_by_row.update(zip(rows, encoded, strict=True))
        return [encoded_by_row[row] for row in range(len(text_pairs))]

    def run(self, encoded: Sequence[EncodedRow], max_tokens: int = MAX_TOKENS_PER_CALL) -> Outputs:
        """The output for each row (see `Task.row_outputs`), by as few engine calls as `max_tokens` allows."""
        tokens = collate(encoded)
        return self.task.row_outputs(self.run_tokens(tokens, max_tokens), tokens, self.head)

    def run_tokens(self, tokens: TokenBatch, max_tokens: int = MAX_TOKENS_PER_CALL) -> Floats:
        """Return the logits of tokenized rows, as of a token store: [windows or requested tokens, outputs]."""
        positions = self.task.logit_positions(tokens, self.head)
        window_ends = np.concatenate([[0], np.cumsum(tokens.window_lengths, dtype=np.int64)])
        logit_chunks = []
        for windows in split_windows(
            tokens.window_lengths.tolist(), max_tokens, self.call_shape, is_padded=not self.is_unpadded
        ):
            start, stop = window_ends[windows.start], window_ends[windows.stop]
            window_batch = replace(
                tokens,
                ids=tokens.ids[start:stop],
                window_lengths=tokens.window_lengths[windows],
                pair_start=tokens.pair_start[windows],
            )
            in_windows = None if positions is None else positions[(positions >= start) & (positions < stop)] - start
            if isinstance(self._engine, TorchEngine) and self._engine.is_unpadded:
                logit_chunks.append(self._engine.unpadded_logits(window_batch, in_windows))
                continue
            num_windows = len(window_batch.window_lengths)
            rows, width = self.call_shape(num_windows, int(window_batch.window_lengths.max()))
            inputs = pad_batch(window_batch, self.pad_id, width, rows)
            logits = self._engine.logits(inputs)[:num_windows]
            if logits.ndim == 3:
                token_indices = np.flatnonzero(inputs["attention_mask"][:num_windows])
                logits = logits.reshape(-1, logits.shape[2])[
                    token_indices if in_windows is None else token_indices[in_windows]
                ]
            logit_chunks.append(logits)
        return logit_chunks[0] if len(logit_chunks) == 1 else np.concatenate(logit_chunks)

    def call_shape(self, windows: int, tokens: int) -> tuple[int, int]:
        """Return rows and columns of the engine call for this number of windows and the longest window. An engine that
        compiles per shape gets ten numbers of rows up to 32 and 32 numbers of columns up to 512."""
        if not self._compiles_per_shape:
            return windows, tokens
        width = PAD_MULTIPLE * round_up(-(-tokens // PAD_MULTIPLE), 4)
        return round_up(windows, 2), max(tokens, min(width, self.artifact.max_tokens))

    def outputs(self, encoded: Sequence[EncodedRow], batch_size: int = DEFAULT_BATCH_SIZE) -> list[Floats]:
        """Return the output of each row, in batches of similar length."""
        return compute_outputs_in_parallel([self], encoded, batch_size)

    def logits(self, inputs: Sequence[Input], batch_size: int = DEFAULT_BATCH_SIZE) -> list[Floats]:
        """The output for each input."""
        return self.outputs(self.encode(inputs), batch_size)

    def __call__(
        self, inputs: Sequence[Input], parameters: Mapping[str, Any] | None = None, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[Any]:
        """One answer per input, in the task's HTTP form."""
        if not inputs:
            return []
        inputs = [self.clean_input(value, position) for position, value in enumerate(inputs)]
        encoded = self.encode(inputs)
        return self.decode(self.outputs(encoded, batch_size), inputs, encoded, parameters or {})

    def decode(
        self, outputs: Outputs, inputs: Sequence[Input], encoded: Sequence[EncodedRow], parameters: Mapping[str, Any]
    ) -> list[Any]:
        """Return the answer to each input from its output, in the task's HTTP form. Answers that are token ids (a task
        has no tokenizer) get the tokens' texts, alone and in the input."""
        answers = self.task.decode(outputs, inputs, encoded, self.head, parameters)
        if self.task.output == "tokens":
            mask = self.head.facts["mask"]
            for value, answer in zip(inputs, answers, strict=True):
                segments = _split_pair(value, self.task)[0].split(mask)
                for position, tokens in enumerate(answer, 1):
                    prefix, suffix = (mask.join(side) for side in (segments[:position], segments[position:]))
                    for token in tokens:
                        token["token_str"] = self.tokenizer.decode([token["token"]], skip_special_tokens=False)
                        token["sequence"] = prefix + token["token_str"] + suffix
        return answers

    @property
    def is_unpadded(self) -> bool:
        """Whether the engine computes without padding, so that texts of all lengths may share a call."""
        return isinstance(self._engine, TorchEngine) and self._engine.is_unpadded

    @property
    def network(self) -> tuple["transformers.PreTrainedModel", frozenset[str]]:
        """Return the float model, for gradients, and the argument names of its forward."""
        if isinstance(self._engine, TorchEngine):
            return self._engine.network, self._engine.forward_args
        parent = self.artifact.lineage.get("parent")
        version = f", version {parent}" if parent else ""
        raise UserError(
            f"artifact {self.artifact.name} {self.artifact.version} is int8 and has no gradients; "
            f"name the float artifact that it was made from{version}",
            code="no_gradients",
        )

    def check_golden(self) -> None:
        """Raise `ArtifactError` if the logits differ from the golden answers."""
        if not self.artifact.golden:
            raise ArtifactError("the artifact has no golden answers; make it again", code="damaged_artifact")
        outputs = self.logits([row["inputs"] for row in self.artifact.golden], batch_size=1)
        differences = [
            _max_difference(output, np.array(row["logits"], dtype=np.float32))
            for output, row in zip(outputs, self.artifact.golden, strict=True)
        ]
        max_difference = float(np.max(differences))  # a NaN is the worst of all
        tolerance = self.golden_tolerance
        if not max_difference <= tolerance:  # also for NaN
            raise ArtifactError(
                f"artifact {self.artifact.name} {self.artifact.version} does not reproduce its golden answers: logits "
                f"differ by {max_difference:.3g} (at most {tolerance:g}). {self._explain_difference()}",
                code="other_answers",
            )

    def _explain_difference(self) -> str:
        from rtrain.models import precision  # imported here: nothing else needs it

        host_int8 = precision.detect_int8()
        if host_int8.instructions or not host_int8.is_known or engines.get_engine(self.artifact.engine).has_gradients:
            return "Its tokenizer, weights or engine are not its maker's."
        return (
            f"This processor ({precision.read_cpu_name()}) has neither VNNI nor AMX, so sums of int8 products "
            "saturate; quantize with quantize.overflow_fix=true, or name the float artifact."
        )


def compute_outputs_in_parallel(
    predictors: Sequence[Predictor], encoded: Sequence[EncodedRow], batch_size: int
) -> list[Floats]:
    """Return the output of each row, in batches of similar length. Each batch is computed by any free one of the
    `predictors`, which have the same artifact."""
    lengths = np.array([len(row.ids) for row in encoded], dtype=np.int32)
    order: Ints = np.argsort(lengths, kind="stable")
    groups = list(iter_batches(lengths, order, batch_size, MAX_TOKENS_PER_CALL))
    idle_predictors: SimpleQueue[Predictor] = SimpleQueue()
    for predictor in predictors:
        idle_predictors.put(predictor)

    def run_batch(rows: Ints) -> Outputs:
        predictor = idle_predictors.get()
        try:
            return predictor.run([encoded[row] for row in rows])
        finally:
            idle_predictors.put(predictor)

    outputs_by_row: dict[int, Floats] = {}
    with ThreadPoolExecutor(len(predictors)) as executor:
        # One predictor computes in this thread: in a new one torch would create its thread pool again.
        batch_outputs = map(run_batch, groups) if len(predictors) == 1 else executor.map(run_batch, groups)
        for rows, outputs in zip(groups, batch_outputs, strict=True):
            outputs_by_row.update(zip(rows.tolist(), outputs, strict=True))
    return [outputs_by_row[row] for row in range(len(encoded))]


def split_windows(
    lengths: Sequence[int],
    max_tokens: int,
    call_shape: Callable[[int, int], tuple[int, int]] = lambda windows, longest: (windows, longest),
    *,
    is_padded: bool = True,
) -> Iterator[slice]:
    """Consecutive windows of at most `max_tokens` tokens, padding included, and of `MAX_ATTENTION_RATIO` times as many
    squares of them; a longer window is alone. `call_shape`: rows and columns of a call, by its windows and the longest
    of them. Without padding the sum of the lengths counts, and no squares."""
    start, longest, num_tokens = 0, 0, 0
    for position, length in enumerate(lengths):
        longest, num_tokens = max(longest, length), num_tokens + length
        rows, width = call_shape(position + 1 - start, longest)
        call_tokens = rows * width * max(1, width / MAX_ATTENTION_RATIO) if is_padded else num_tokens
        if position > start and call_tokens > max_tokens:
            yield slice(start, position)
            start, longest, num_tokens = position, length, length
    if start < len(lengths):
        yield slice(start, len(lengths))


def make_golden_inputs(task: Task, head: Head) -> list[Input]:
    return task.golden_inputs(GOLDEN_INPUTS, head)


def compute_golden_logits(folder: Path, artifact: Artifact) -> list[list[Any]]:
    """Compute the golden answers of a folder with model files but no artifact.json yet."""
    predictor = Predictor(folder, artifact)
    rows = predictor.logits(make_golden_inputs(predictor.task, predictor.head), batch_size=1)
    return [[float(value) for value in row.ravel()] if row.ndim == 1 else row.tolist() for row in rows]


def _max_difference(actual: Floats, expected: Floats) -> float:
    """Return the largest difference; infinity for different shapes."""
    return float(np.abs(actual - expected).max()) if actual.shape == expected.shape else float("inf")


def _split_pair(value: Input, task: Task) -> tuple[str, str | None]:
    """Return the one or two texts of an input."""
    return (value, None) if isinstance(value, str) else (value[task.fields[0]], value.get(task.fields[1]))


def _compute_revisions(folder: Path, artifact: Artifact) -> dict[str, str]:
    return {
        "model": artifact.version,
        "tokenizer": manifest.compute_entry(folder / "tokenizer.json")["sha256"][:REVISION_DIGITS],
        "labels": hashlib.sha256("\n".join(artifact.labels).encode()).hexdigest()[:REVISION_DIGITS],
    }


def _read_pad_id(folder: Path) -> int:
    return int(json_files.load_json_object(folder / "config.json").get("pad_token_id") or 0)


class TorchEngine:
    """The float model with torch. On a GPU it computes without padding, if the architecture allows."""

    def __init__(
        self, folder: Path, artifact: Artifact, threads: int | None, device: str = "cpu", precision: str = "fp32"
    ):
        """`precision`: `fp16` computes with a copy of the encoder in half precision; gradients stay in fp32."""
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        network, _ = model_files.load_network(auto_class(base.get_task(artifact.task).auto_model), folder)
        if artifact.facts.get(pooling.FACT) == "mean":
            pooling.pool_by_mean(network)
        # Never trained: gradients of inputs only, so that nothing is kept for gradients of weights.
        self.network: transformers.PreTrainedModel = network.eval().requires_grad_(False).to(device)
        self._device = torch.device(device)
        self.forward_args = accepted_inputs(self.network)
        self._inference_network = self.network
        self.is_unpadded = effective_type(self._device) != "cpu" and unpadded.supports_packing(self.network)
        if self.is_unpadded or precision == "fp16":
            self._inference_network = copy.deepcopy(self.network)
        if self.is_unpadded:
            pools_by_mean = artifact.facts.get(pooling.FACT) == "mean" or pooling.pools_by_mean(self._inference_network)
            is_token_level = base.get_task(artifact.task).is_token_level
            unpadded.enable_packing(
                self._inference_network, "tokens" if is_token_level else "mean" if pools_by_mean else "first"
            )
        if precision == "fp16":
            _convert_to_fp16(self._inference_network, self._device)

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        tensors = {
            name: self._torch.from_numpy(value).to(self._device)
            for name, value in inputs.items()
            if name in self.forward_args
        }
        with self._torch.inference_mode():
            return _to_numpy_logits(self._inference_network(**tensors))

    def unpadded_logits(self, tokens: TokenBatch, token_indices: Ints | None) -> Floats:
        """[windows, outputs] of windows without padding; or [tokens, outputs], of those at `token_indices` in
        `tokens.ids`, None for all. For engines that are `is_unpadded`."""
        inputs, position = unpadded.make_inputs(self._inference_network, tokens, self._device)
        tensors = {name: value for name, value in inputs.items() if name in self.forward_args | {LAYOUT}}
        with self._torch.inference_mode():
            logits = _to_numpy_logits(self._inference_network(**tensors))
        if logits.ndim == 2:
            return logits
        return logits.reshape(-1, logits.shape[2])[position if token_indices is None else position[token_indices]]


def _convert_to_fp16(network: "transformers.PreTrainedModel", device: "torch.device") -> None:
    """Compute the encoder's products in fp16, from fp16 weights. Residual sums, LayerNorm, the pooler and the head stay
    in fp32: in fp16 a logit of 10 is rounded to a multiple of 0.008."""
    import torch

    encoder: Any = network.base_model
    for name, module in encoder.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler."):
            module.half()
    original_forward = encoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.float16):
            return original_forward(*args, **kwargs)

    encoder.forward = forward


def _to_numpy_logits(output: Any) -> Floats:
    """Return the logits in a Transformers output; a span's start and end are the last axis."""
    if hasattr(output, "start_logits"):
        ends = (output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy())
        return np.stack(ends, axis=-1)
    logits: Floats = output.logits.float().cpu().numpy()
    return logits


class OpenVinoEngine:
    """A graph on OpenVINO's CPU plugin."""

    def __init__(self, graph: "Path | openvino.Model", threads: int | None, cache: Path | None = None):
        """`cache`: a folder for the compiled graph, which later processes load faster."""
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            # Float operations stay fp32: the plugin would use bf16 on some CPUs, with other answers.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(threads)
        if cache is not None:
            options["CACHE_DIR"] = str(cache)
        compiled_model = _import_openvino().Core().compile_model(graph, "CPU", options)
        self._request = compiled_model.create_infer_request()
        # DistilBERT, for example, has no token types.
        self._input_names = [graph_input.any_name for graph_input in compiled_model.inputs]

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return _merge_outputs(
            list(self._request.infer({name: inputs[name] for name in self._input_names}, share_inputs=True).values())
        )


def _import_openvino() -> Any:
    """Import OpenVINO without its model converter, whose import takes as long as the rest, and which inference does not
    need. A blocked import looks to OpenVINO like a missing package."""
    if "openvino" not in sys.modules:
        sys.modules[OPENVINO_CONVERTER_MODULE] = None  # type: ignore[assignment]
        try:
            import openvino
        finally:
            del sys.modules[OPENVINO_CONVERTER_MODULE]
    import openvino

    return openvino


def open_openvino(folder: Path, artifact: Artifact, threads: int | None) -> OpenVinoEngine:
    # Drafts are hidden folders. OpenVINO names its cache by the path, and a draft's path is temporary.
    cache = None if folder.name.startswith(".") else compile_cache.cache_folder(artifact.version)
    files = engines.get_engine(artifact.engine).find_files(folder)
    if not _is_compressed(files):
        return OpenVinoEngine(folder / engines.get_engine(artifact.engine).files[0], threads, cache)
    if cache is not None:
        with suppress(OSError):  # disk full: unpack into memory, as without a cache
            return OpenVinoEngine(compile_cache.unpack_files(files, cache)[0], threads, cache)
    graph, weights = map(compile_cache.read_compressed, files)
    weights_tensor = _import_openvino().Tensor(np.frombuffer(weights, dtype=np.uint8))
    return OpenVinoEngine(_import_openvino().Core().read_model(graph, weights_tensor), threads)


def _is_compressed(files: Sequence[Path]) -> bool:
    return any(path.name.endswith(engines.COMPRESSED_SUFFIX) for path in files)


class OnnxRuntimeEngine:
    """A graph on ONNX Runtime's CPU provider.

    Raises `UserError` if ONNX Runtime (the extra `onnx`) is not installed.
    """

    def __init__(self, graph: Path | bytes, threads: int | None):
        engines.require_libraries("onnxruntime", ("onnxruntime",))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0  # 0: one per core
        options.log_severity_level = 3  # errors only: it warns about each unchanged weight
        source = graph if isinstance(graph, bytes) else str(graph)
        self._session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        self._input_names = [graph_input.name for graph_input in self._session.get_inputs()]

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return _merge_outputs(self._session.run(None, {name: inputs[name] for name in self._input_names}))


def open_onnxruntime(folder: Path, artifact: Artifact, threads: int | None) -> OnnxRuntimeEngine:
    files = engines.get_engine(artifact.engine).find_files(folder)
    if not _is_compressed(files):
        return OnnxRuntimeEngine(folder / engines.get_engine(artifact.engine).files[0], threads)
    return OnnxRuntimeEngine(compile_cache.read_compressed(files[0]), threads)


def _merge_outputs(outputs: Sequence[Floats]) -> Floats:
    """Copy a graph's output. A span model has two outputs, start and end: they become the last axis of one array."""
    return outputs[0].copy() if len(outputs) == 1 else np.stack(outputs, axis=-1)
