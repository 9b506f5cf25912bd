"""What is in an artefact: numbers and bytes by part, operators, lineage, verdict, and how it was made.

Only files are read: no engine is loaded and nothing is computed.
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
from rtrain.evaluation.graph_stats import Graph, Part, of_openvino, part_of
from rtrain.evaluation.reproduce_commands import reproduce
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.models import compile_cache

SCHEMA_VERSION = 1
MOST_HEADER = 100_000_000
"""Most bytes of a safetensors header, by its own specification."""
ORDER = ("word table", "other embeddings", "layers", "head", "tokenizer", "graph", "other files", "compression")


def inspect(folder: Path) -> dict[str, Any]:
    """What `rtrain inspect --json` prints. Raises `ArtifactError` for a folder that is no artefact, or is damaged."""
    made = artifact.read(folder)
    graph, parts = _model(folder, made)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    sizes = {name: part.bytes for name, part in parts.items()} | _rest(folder, made, files, parts)
    names = ("verdict", "reasons", "made", "host", "headline", "rivals")
    gate = None if made.gate is None else {name: made.gate[name] for name in names}
    return {
        "schema_version": SCHEMA_VERSION,
        "artifact": str(folder),
        "name": made.name,
        "version": made.version,
        "task": made.task,
        "labels": len(made.labels),
        "max_tokens": made.max_tokens,
        "engine": made.engine,
        "numbers": sum(part.numbers for part in parts.values()) if parts else None,
        "parts": {name: asdict(parts[name]) for name in ORDER if name in parts},
        "bytes": {name: sizes[name] for name in ORDER if name in sizes},
        "files": files,
        "operators": None if graph is None else graph.operators(),
        "metrics": dict(made.metrics),
        "lineage": dict(made.lineage),
        "gate": gate,
        "gated": made.gate is not None and made.gate.get("version") == made.version,
        "needs_gate": artifact.is_compressed(made),
        "reproduce": reproduce(folder, made),
    }


def _model(folder: Path, made: Artifact) -> tuple[Graph | None, dict[str, Part]]:
    """(the graph of an int8 artefact, the model's numbers by part). None and nothing of ONNX."""
    path = next(iter(engines.get(made.engine).present(folder)), folder)
    if path.name.removesuffix(engines.PACKED).endswith(".xml"):
        graph = of_openvino(path)
        return graph, graph.parts()
    return None, _tensors(path) if path.name.endswith(".safetensors") else {}


def _tensors(path: Path) -> dict[str, Part]:
    """The tensors of a safetensors file by part, from its header: 8 bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MOST_HEADER:
            raise ArtifactError(
                f"{path} is no safetensors file: its header would have {length} bytes", code="damaged_artifact"
            )
        header = json.loads(file.read(length))
    precisions: dict[str, Counter[str]] = defaultdict(Counter)
    size: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__":
            part = part_of(name)
            precisions[part][tensor["dtype"].lower()] += math.prod(tensor["shape"])
            size[part] += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return {part: Part(found.total(), size[part], dict(found.most_common())) for part, found in precisions.items()}


def _rest(folder: Path, made: Artifact, files: dict[str, int], parts: dict[str, Part]) -> dict[str, int]:
    """Bytes that are no numbers of the model: what the engine's files hold beside them, the tokenizer, other files."""
    present = engines.get(made.engine).present(folder)
    model, unpacked = (sum(map(size, present)) for size in (lambda path: path.stat().st_size, compile_cache.size))
    tokenizer = files.get("tokenizer.json", 0)
    known = {"tokenizer": tokenizer, "graph": unpacked - sum(part.bytes for part in parts.values())}
    if unpacked != model:
        known["compression"] = model - unpacked
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**known, "other files": total - model - tokenizer}


# ---------------------------------------------------------------------------------------------------------------- text


def text(found: dict[str, Any]) -> str:
    """What `inspect` found, for a person."""
    lines = [
        f"{found['name']} {found['version']}: {found['task']}, {found['labels']} labels, at most {found['max_tokens']} "
        f"tokens, answered by {found['engine']}",
        "",
        f"{'part':<18}{'MB':>9}{'numbers':>14}  as",
    ]
    for name, size in found["bytes"].items():
        part = found["parts"].get(name)
        numbers, kinds = ("", "") if part is None else (f"{part['numbers']:,}", _kinds(part["precisions"]))
        lines.append(f"{name:<18}{size / 1e6:>9.2f}{numbers:>14}  {kinds}".rstrip())
    total = sum(found["bytes"].values())
    numbers = "not told of ONNX" if found["numbers"] is None else f"{found['numbers']:,}"
    lines.append(f"{'all':<18}{total / 1e6:>9.2f}{numbers:>14}")
    if found["operators"] is not None:
        lines += ["", "operators"]
        lines += [
            f"{name:<28}" + ", ".join(f"{count} {kind}" if kind != "-" else str(count) for kind, count in kinds.items())
            for name, kinds in found["operators"].items()
        ]
    scores = {split: own for split, own in found["metrics"].items() if own}
    lines += ["", *(f"{split}: {_scores(own)}" for split, own in scores.items())]
    lines += [f"{name}: {value}" for name, value in found["lineage"].items()]
    lines += ["", f"gate: {_gate(found)}", *_rivals(found)]
    if found["reproduce"]:
        lines += ["", "made by", *(f"  {command}" for command in found["reproduce"])]
    return "\n".join(lines)


def _rivals(found: dict[str, Any]) -> list[str]:
    return [f"  beside it, {line}" for line in gate_table.rivals(found["gate"])] if found["gate"] else []


def _kinds(precisions: dict[str, int]) -> str:
    total = sum(precisions.values())
    return ", ".join(f"{count / total:.1%} {name}" for name, count in precisions.items())


def _scores(own: Any) -> str:
    if not isinstance(own, dict):
        return str(own)
    return ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in own.items()
    )


def _gate(found: dict[str, Any]) -> str:
    gate = found["gate"]
    if gate is None:
        return "none has looked at it" + ("; serve asks for one" if found["needs_gate"] else ", and none is needed")
    other = "" if found["gated"] else "of another artefact, "
    where = (gate.get("host") or {}).get("name", "an unknown machine")
    return f"{gate_table.sentence(gate)} ({other}{gate['made']}, on {where})"
