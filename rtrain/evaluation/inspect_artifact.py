"""Contents of an artifact: elements and bytes by part, operators, lineage, verdict, and the commands that made it.

Only files are read; no engine is loaded.
"""

import json
import math
import struct
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rtrain.core import engines
from rtrain.evaluation import gate_table
from rtrain.evaluation.graph_stats import ModelGraph, ModelPart, find_part, read_openvino_graph
from rtrain.evaluation.reproduce_commands import list_commands
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.models import compile_cache

SCHEMA_VERSION = 2
MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a safetensors header, by the specification of the format."""
PART_ORDER = ("word table", "other embeddings", "layers", "head", "tokenizer", "graph", "other files", "compression")


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
    present = engines.get_engine(metadata.engine).find_files(folder)
    model, unpacked = (
        sum(map(size, present)) for size in (lambda path: path.stat().st_size, compile_cache.content_size)
    )
    tokenizer = files.get("tokenizer.json", 0)
    sizes = {"tokenizer": tokenizer, "graph": unpacked - sum(part.bytes for part in parts.values())}
    if unpacked != model:
        sizes["compression"] = model - unpacked
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**sizes, "other files": total - model - tokenizer}


# ---------------------------------------------------------------------------------------------------------------- text


def format_inspection(inspection: dict[str, Any]) -> str:
    """Format the document of `inspect_artifact` for a terminal."""
    lines = [
        f"{inspection['name']} {inspection['version']}: {inspection['task']}, {inspection['labels']} labels, at most "
        f"{inspection['max_tokens']} "
        f"tokens, answered by {inspection['engine']}",
        "",
        f"{'part':<18}{'MB':>9}{'elements':>14}  precision",
    ]
    for name, size in inspection["bytes"].items():
        part = inspection["parts"].get(name)
        element_text, precision_text = (
            ("", "") if part is None else (f"{part['element_count']:,}", _format_precisions(part["precisions"]))
        )
        lines.append(f"{name:<18}{size / 1e6:>9.2f}{element_text:>14}  {precision_text}".rstrip())
    total = sum(inspection["bytes"].values())
    element_text = "unknown (ONNX)" if inspection["element_count"] is None else f"{inspection['element_count']:,}"
    lines.append(f"{'all':<18}{total / 1e6:>9.2f}{element_text:>14}")
    if inspection["operators"] is not None:
        lines += ["", "operators"]
        lines += [
            f"{name:<28}" + ", ".join(f"{count} {kind}" if kind != "-" else str(count) for kind, count in kinds.items())
            for name, kinds in inspection["operators"].items()
        ]
    scores = {split: split_scores for split, split_scores in inspection["metrics"].items() if split_scores}
    lines += ["", *(f"{split}: {_format_scores(split_scores)}" for split, split_scores in scores.items())]
    lines += [f"{name}: {value}" for name, value in inspection["lineage"].items()]
    lines += ["", f"gate: {_format_gate(inspection)}", *_format_rivals(inspection)]
    if inspection["commands"]:
        lines += ["", "commands", *(f"  {command}" for command in inspection["commands"])]
    return "\n".join(lines)


def _format_rivals(inspection: dict[str, Any]) -> list[str]:
    return (
        [f"  beside it, {line}" for line in gate_table.format_rivals(inspection["gate"])] if inspection["gate"] else []
    )


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
