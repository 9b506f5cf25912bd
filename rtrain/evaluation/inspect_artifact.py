"""Contents of an artifact: elements and bytes by part, operators, lineage, verdict, and the commands that made it.

Only files are read; no engine is loaded.
"""

import gzip
import json
import math
import re
import shlex
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from rtrain import config
from rtrain.config import Recipe
from rtrain.config.recipe import STUDENT_SETTINGS
from rtrain.core import engines
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.evaluation import gate_table
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.models import compile_cache
from rtrain.runs import run_folders

SCHEMA_VERSION = 2
MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a safetensors header, by the specification of the format."""
PART_ORDER = ("word table", "other embeddings", "layers", "head", "tokenizer", "graph", "other files", "compression")
NON_COMPUTE_LAYERS = ("Const", "Parameter", "Result")
"""Layers that compute nothing."""
PASS_THROUGH_OPS = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
"""Operators between a compressed weight and its user."""
QUANTIZER_OPS = ("FakeQuantize",)
"""Operators that quantize activations."""
WEIGHTED_OPS = ("MatMul", "Gather", "Convolution")
"""Operators whose precision follows from their weights."""
INTEGER_TYPES = ("i8", "u8", "i4", "u4")
TENSOR_TYPES = (*INTEGER_TYPES, "f32", "f16", "bf16", "f64")
"""Element types of weights; other types are indices and shapes."""
PART_PATTERNS = (
    (re.compile(r"word_embeddings|embed_tokens|tok_embeddings|wte"), "word table"),
    (re.compile(r"\.layers?\.\d+(\.|$|/)"), "layers"),
    (re.compile(r"embedding"), "other embeddings"),
)
"""The first matching pattern names the part; other weights belong to the head."""
HEAD = "head"


def inspect_artifact(folder: Path) -> dict[str, Any]:
    """Build the document of `rtrain inspect --json`. Raises `ArtifactError` for a missing or damaged artifact."""
    metadata = artifact.read_artifact(folder)
    graph, parts = _read_model(folder, metadata)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    sizes = {name: part.bytes for name, part in parts.items()} | _measure_other_files(folder, metadata, files, parts)
    gate_fields = ("verdict", "reasons", "created_at", "host", "headline", "rivals")
    gate = None if metadata.gate is None else {name: metadata.gate[name] for name in gate_fields}
    return {
        "schema_version": SCHEMA_VERSION,
        "artifact": str(folder),
        "name": metadata.name,
        "version": metadata.version,
        "task": metadata.task,
        "labels": len(metadata.labels),
        "max_tokens": metadata.max_tokens,
        "engine": metadata.engine,
        "element_count": sum(part.element_count for part in parts.values()) if parts else None,
        "parts": {name: asdict(parts[name]) for name in PART_ORDER if name in parts},
        "bytes": {name: sizes[name] for name in PART_ORDER if name in sizes},
        "files": files,
        "operators": None if graph is None else graph.count_operators(),
        "metrics": dict(metadata.metrics),
        "lineage": dict(metadata.lineage),
        "gate": gate,
        "is_gated": metadata.gate is not None and metadata.gate.get("version") == metadata.version,
        "needs_gate": artifact.is_compressed(metadata),
        "commands": list_commands(folder, metadata),
    }


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class ModelPart:
    element_count: int
    bytes: int
    precisions: Mapping[str, int]
    """Elements by type."""


@dataclass(frozen=True)
class GraphLayer:
    name: str
    type: str
    element_type: str
    """Element type of a constant; empty for other layers."""
    byte_count: int
    """Bytes of a constant."""
    element_count: int
    """Elements of a constant."""
    has_model_name: bool
    """Whether the name is from the model, not from the exporter."""


class ModelGraph:
    def __init__(self, layers: Mapping[str, GraphLayer], edges: Iterable[tuple[str, str]]):
        """`layers` by id; `edges`: (source, target), sorted by input index."""
        self.layers = layers
        self._inputs: dict[str, list[str]] = defaultdict(list)
        self._outputs: dict[str, list[str]] = defaultdict(list)
        for source, target in edges:
            self._inputs[target].append(source)
            self._outputs[source].append(target)

    def sum_by_part(self) -> dict[str, ModelPart]:
        """Sum the constants by part of the model. A constant without a model name belongs to its user's part."""
        layers_by_part: dict[str, list[GraphLayer]] = defaultdict(list)
        for layer_id, layer in self.layers.items():
            if layer.type == "Const" and layer.element_type in TENSOR_TYPES:
                layers_by_part[find_part(self._find_name(layer_id))].append(layer)
        return {part: _sum_layers(layers) for part, layers in layers_by_part.items()}

    def count_operators(self) -> dict[str, dict[str, int]]:
        """Count operators: type -> precision -> number, the most frequent type first.

        Precisions of operators with weights: `i8 x i8` (integer weights and activations), `i8 weights` or `u4 weights`
        (integer weights only), `float`. Other operators have `-`.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for layer_id, layer in self.layers.items():
            if layer.type not in NON_COMPUTE_LAYERS:
                counts[layer.type][self._find_precision(layer_id) if layer.type in WEIGHTED_OPS else "-"] += 1
        ordered = sorted(counts, key=lambda name: (-counts[name].total(), name))
        return {name: dict(counts[name].most_common()) for name in ordered}

    def _find_precision(self, layer_id: str) -> str:
        sources = [self._find_source(input_id) for input_id in self._inputs[layer_id]]
        weight_type = next(
            (layer.element_type for layer in sources if layer.type == "Const" and layer.element_type in INTEGER_TYPES),
            None,
        )
        if weight_type is None:
            return "float"
        return (
            f"i8 x {weight_type}" if any(layer.type in QUANTIZER_OPS for layer in sources) else f"{weight_type} weights"
        )

    def _find_source(self, layer_id: str) -> GraphLayer:
        while self.layers[layer_id].type in PASS_THROUGH_OPS and self._inputs[layer_id]:
            layer_id = self._inputs[layer_id][0]
        return self.layers[layer_id]

    def _find_name(self, layer_id: str) -> str:
        """Return the model name of a layer, or of the nearest user that has one."""
        queue, visited = [layer_id], {layer_id}
        while queue:
            current = queue.pop(0)
            if self.layers[current].has_model_name:
                return self.layers[current].name
            successors = [target for target in self._outputs[current] if target not in visited]
            visited.update(successors)
            queue += successors
        return ""


def find_part(name: str) -> str:
    """Return the part of the model of a weight or an operator."""
    return next((part for pattern, part in PART_PATTERNS if pattern.search(name)), HEAD)


def read_openvino_graph(path: Path) -> ModelGraph:
    is_compressed = path.name.endswith(engines.COMPRESSED_SUFFIX)
    with cast(IO[bytes], gzip.open(path)) if is_compressed else path.open("rb") as file:
        root = ElementTree.parse(file).getroot()
    layers = {node.attrib["id"]: _parse_layer(node) for node in root.iterfind("layers/layer")}
    edges = ((edge.attrib["from-layer"], edge.attrib["to-layer"]) for edge in root.iterfind("edges/edge"))
    return ModelGraph(layers, edges)


def _parse_layer(node: ElementTree.Element) -> GraphLayer:
    name, kind, data = node.attrib.get("name", ""), node.attrib["type"], node.find("data")
    has_model_name = name.startswith("__module")
    if kind != "Const" or data is None:  # only constants have static shapes
        return GraphLayer(name, kind, "", 0, 0, has_model_name)
    shape = [int(dimension) for dimension in data.attrib.get("shape", "").split(",") if dimension.strip()]
    size, element_count = int(data.attrib.get("size", 0)), math.prod(shape)
    return GraphLayer(name, kind, data.attrib.get("element_type", ""), size, element_count, has_model_name)


def _sum_layers(layers: Sequence[GraphLayer]) -> ModelPart:
    precisions = Counter[str]()
    for layer in layers:
        precisions[layer.element_type] += layer.element_count
    return ModelPart(precisions.total(), sum(layer.byte_count for layer in layers), dict(precisions.most_common()))


def _read_model(folder: Path, metadata: Artifact) -> tuple[ModelGraph | None, dict[str, ModelPart]]:
    """Read (graph of an OpenVINO artifact, weights by part); (None, {}) for ONNX."""
    path = next(iter(engines.get_engine(metadata.engine).find_files(folder)), folder)
    if path.name.removesuffix(engines.COMPRESSED_SUFFIX).endswith(".xml"):
        graph = read_openvino_graph(path)
        return graph, graph.sum_by_part()
    return None, _read_tensors(path) if path.name.endswith(".safetensors") else {}


def _read_tensors(path: Path) -> dict[str, ModelPart]:
    """Sum the tensors of a safetensors file by part, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ArtifactError(
                f"{path} is not a safetensors file: its header would have {length} bytes", code="damaged_artifact"
            )
        header = json.loads(file.read(length))
    precisions: dict[str, Counter[str]] = defaultdict(Counter)
    size: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__":
            part = find_part(name)
            precisions[part][tensor["dtype"].lower()] += math.prod(tensor["shape"])
            size[part] += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return {
        part: ModelPart(counts.total(), size[part], dict(counts.most_common())) for part, counts in precisions.items()
    }


def _measure_other_files(
    folder: Path, metadata: Artifact, files: dict[str, int], parts: dict[str, ModelPart]
) -> dict[str, int]:
    """Bytes of everything but weights: graph, compression, tokenizer, other files."""
    model_files = engines.get_engine(metadata.engine).find_files(folder)
    model = sum(path.stat().st_size for path in model_files)
    unpacked = sum(map(compile_cache.content_size, model_files))
    tokenizer = files.get("tokenizer.json", 0)
    sizes = {"tokenizer": tokenizer, "graph": unpacked - sum(part.bytes for part in parts.values())}
    if unpacked != model:
        sizes["compression"] = model - unpacked
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**sizes, "other files": total - model - tokenizer}


# ----------------------------------------------------------------------------------------------------------------- text


def format_inspection(inspection: dict[str, Any]) -> str:
    lines = [
        f"{inspection['name']} {inspection['version']}: {inspection['task']}, {inspection['labels']} labels, at most "
        f"{inspection['max_tokens']} tokens, answered by {inspection['engine']}",
        "",
        f"{'part':<18}{'MB':>9}{'elements':>14}  precision",
    ]
    for name, size in inspection["bytes"].items():
        line = f"{name:<18}{size / 1e6:>9.2f}"
        if part := inspection["parts"].get(name):
            line += f"{part['element_count']:>14,}  {_format_precisions(part['precisions'])}"
        lines.append(line.rstrip())
    count = "unknown (ONNX)" if inspection["element_count"] is None else f"{inspection['element_count']:,}"
    lines.append(f"{'all':<18}{sum(inspection['bytes'].values()) / 1e6:>9.2f}{count:>14}")
    if inspection["operators"] is not None:
        lines += ["", "operators"]
        lines += [
            f"{name:<28}" + ", ".join(f"{count} {kind}" if kind != "-" else str(count) for kind, count in kinds.items())
            for name, kinds in inspection["operators"].items()
        ]
    lines.append("")
    lines += [f"{split}: {_format_scores(scores)}" for split, scores in inspection["metrics"].items() if scores]
    lines += [f"{name}: {value}" for name, value in inspection["lineage"].items()]
    lines += ["", f"gate: {_format_gate(inspection)}"]
    if inspection["gate"]:
        lines += [f"  beside it, {line}" for line in gate_table.format_rivals(inspection["gate"])]
    if inspection["commands"]:
        lines += ["", "commands", *(f"  {command}" for command in inspection["commands"])]
    return "\n".join(lines)


def _format_precisions(precisions: dict[str, int]) -> str:
    total = sum(precisions.values())
    return ", ".join(f"{count / total:.1%} {name}" for name, count in precisions.items())


def _format_scores(scores: Any) -> str:
    if not isinstance(scores, dict):
        return str(scores)
    return ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in scores.items()
    )


def _format_gate(inspection: dict[str, Any]) -> str:
    gate = inspection["gate"]
    if gate is None:
        return "not gated" + ("; serve requires a verdict" if inspection["needs_gate"] else "; serve requires none")
    other_note = "" if inspection["is_gated"] else "of another artifact, "
    host_name = (gate.get("host") or {}).get("name", "an unknown machine")
    return f"{gate_table.format_sentence(gate)} ({other_note}{gate['created_at']}, on {host_name})"


# ------------------------------------------------------------------------------------------------------------- commands


def list_commands(folder: Path, metadata: Artifact) -> list[str]:
    """List the commands that reproduce the artifact.

    The list is empty outside of a run, or if the run's settings are of a later version.
    """
    run = Run(folder.absolute().parent)
    if not run.exists:
        return []
    try:
        return _build_commands(run, folder, metadata)
    except ConfigError:
        return []


def _build_commands(run: Run, folder: Path, metadata: Artifact) -> list[str]:
    new_run = f"{run}-again"
    if version := metadata.lineage.get("teacher"):
        commands = [make_distill_command(run, version)]
    else:
        commands = [shlex.join(["rtrain", "train", str(run.config), "--out", new_run])]
    if not engines.get_engine(metadata.engine).has_gradients:
        options, out = _set_options(_quantize_overrides(run, metadata)), f"{new_run}/{folder.absolute().name}"
        commands.append(shlex.join(["rtrain", "quantize", new_run, *options, "--out", out]))
    return commands


def make_distill_command(run: Run, version: str) -> str:
    """Build the command that reproduces a student's run; `version`: version of the teacher's artifact."""
    teacher = _find_teacher(run, version)
    name = "TEACHER" if teacher is None else str(teacher.folder)
    command = shlex.join(
        ["rtrain", "distill", name, *_set_options(_distill_overrides(run, teacher)), "--out", f"{run}-again"]
    )
    return command if teacher else f"{command}  # TEACHER: the run of artifact {version}"


def _find_teacher(run: Run, version: str) -> Run | None:
    """Find the run of a student's teacher by the gate document; None if unknown or missing."""
    if not (run.artifact / artifact.FILE_NAME).is_file():
        return None
    baseline = (artifact.read_artifact(run.artifact, verify=False).gate or {}).get("baseline", {})
    teacher_run = Run(Path(baseline.get("folder", "")).parent)
    return teacher_run if baseline.get("version") == version and teacher_run.exists else None


def _distill_overrides(run: Run, teacher: Run | None) -> dict[str, Any]:
    """Settings of a student that differ from the defaults of `rtrain distill`: the teacher's settings, or the
    recipe's."""
    settings = _flatten_settings(config.load_config(str(run.config)).recipe)
    if teacher is not None:
        defaults = run_folders.load_config(teacher.folder).recipe
    else:
        try:  # a built-in recipe
            defaults = config.load_config(settings["name"]).recipe
        except ConfigError:
            defaults = Recipe(name=settings["name"], task=settings["task"])
    default_values = _flatten_settings(defaults)
    return {
        name: value
        for name, value in settings.items()
        if name not in ("name", *STUDENT_SETTINGS) and default_values.get(name) != value
    }


def _flatten_settings(recipe: Recipe) -> dict[str, Any]:
    return config.flatten_document(recipe.model_dump(mode="json"))


def _quantize_overrides(run: Run, metadata: Artifact) -> dict[str, Any]:
    """Quantization settings in the lineage that differ from the run's settings."""
    settings, lineage = _flatten_settings(config.load_config(str(run.config)).recipe), metadata.lineage
    used_settings = {
        "quantize.kind": lineage.get("kind", "static"),
        "quantize.embedding_dtype": lineage.get("embedding_dtype", "int8"),
        "quantize.max_changed_predictions": lineage.get("max_changed_predictions"),
        "quantize.compressed": lineage.get("compressed", False),
        **({"quantize.calibration_rows": lineage["calibration_rows"]} if "calibration_rows" in lineage else {}),
        "quantize.engine": metadata.engine,
    }
    return {name: value for name, value in used_settings.items() if settings[name] != value}


def _set_options(settings: Mapping[str, Any]) -> list[str]:
    assignments = (
        config.format_assignment(name, value) if isinstance(value, str | list) else f"{name}={json.dumps(value)}"
        for name, value in settings.items()
    )
    return [word for assignment in assignments for word in ("--set", assignment)]
