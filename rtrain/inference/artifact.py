"""The deployable folder: a Transformers checkpoint with tokenizer, task, labels, lineage and golden answers.

config.json  model.safetensors  tokenizer.json ...   what `AutoModelFor...from_pretrained` loads, with the answers of
                                                     rtrain; it refuses to where it would answer otherwise: the head
                                                     reads the mean of the tokens, several heads, summaries
modules.json  1_Pooling/config.json ...              of a sentence encoder: what sentence-transformers loads
model.int8.xml  model.int8.bin                       the int8 graph, when quantized; or both with .gz
artifact.json                                        what rtrain needs to answer
MANIFEST.json                                        size and SHA-256 of each file; written last
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rtrain.core import atomic_write, engines, json_files, manifest
from rtrain.core.errors import UserError, meant

NAME = json_files.ARTIFACT_JSON
SCHEMA_VERSION = 1
DESCRIBING = (NAME, "config.json", "tokenizer.json")
"""The files that are read of every artefact, beside the model's."""
REWRITTEN = (NAME, manifest.NAME)
"""The files that a gate's verdict changes."""
COLUMNS = (
    *("format", "delimiter", "escape", "text", "text_pair", "label", "separator", "slices", "split", "split_by"),
    *("max_row_bytes", "max_bad_rows"),
)
"""Settings of `data` that say how a file of rows is read, and so how `rtrain evaluate` reads another one."""

GOLDEN_INPUTS = (
    "Hello",
    "Where is my order? It was due on Monday.",
    "¿Pueden devolverme el dinero de la factura 4711?",
    "Ich möchte mein Abonnement zum Monatsende kündigen, bitte bestätigen Sie das per E-Mail.",
    "Le colis est arrivé ouvert et il manque deux articles sur trois.",
    "I changed banks last week, so the card that you have on file will not work for the next payment; "
    "please tell me how to replace it, and whether I need to do anything about the invoice that is still open.",
)
"""Texts whose answers are stored by the artefact's maker: short and long, several scripts of punctuation."""


class ArtifactError(UserError):
    """A folder that is no artefact, is damaged, or does not answer as its maker recorded."""


@dataclass(frozen=True)
class Artifact:
    """The contents of artifact.json."""

    name: str
    task: str
    labels: tuple[str, ...]
    max_tokens: int
    engine: str
    """What answers: a name in `rtrain.core.engines`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the task needs to answer, beside the labels: how windows are pooled, the mean of the targets, ..."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """How the rows were read that it was trained on: `COLUMNS`. Empty in artefacts that were made without."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    gate: Mapping[str, Any] | None = None
    """What the gate has found of it (`rtrain.evaluation.gate`); None before."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """What its input and answers looked like on the validation rows (`rtrain.inference.drift_baseline.measure`). Empty
    in artefacts that were made without."""
    golden: tuple[Mapping[str, Any], ...] = ()
    """`{"inputs": text or texts, "logits": [...]}` each, as computed by the maker through
    `rtrain.inference.predictor`."""
    version: str = ""
    """Digest of the files that answer: two artefacts of one version answer alike."""
    schema_version: int = SCHEMA_VERSION


def write(
    folder: Path,
    artifact: Artifact,
    answer: Callable[[Path, Artifact], Sequence[Sequence[Any]]],
    inputs: Sequence[Any] = GOLDEN_INPUTS,
) -> Artifact:
    """Complete a folder that holds the model files: version, golden answers by `answer`, artifact.json, manifest."""
    answering = {*(path.name for path in engines.get(artifact.engine).present(folder)), "tokenizer.json"}
    parts = [path for path in sorted(folder.iterdir()) if path.name in answering]
    total = hashlib.sha256("\n".join(artifact.labels).encode())
    if artifact.facts:
        total.update(json.dumps(artifact.facts, sort_keys=True).encode())
    for path in parts:
        total.update(path.read_bytes())
    artifact = replace(artifact, version=total.hexdigest()[:12])
    logits = answer(folder, artifact)
    golden = tuple({"inputs": asked, "logits": row} for asked, row in zip(inputs, logits, strict=True))
    artifact = replace(artifact, golden=golden)
    path = _describe(folder, artifact)
    for part in parts:
        # safetensors lets its owner alone read what it writes; an endpoint often runs as another user.
        part.chmod(path.stat().st_mode)
    manifest.write(folder)
    return artifact


def judged(folder: Path, gate: Mapping[str, Any], reference: Mapping[str, Any] | None = None) -> Artifact:
    """Write a gate's verdict into the artefact of a draft folder, and its manifest anew (`REWRITTEN`); `reference` in
    place of its own, where it answers otherwise than what it was made from."""
    artifact = read(folder)
    artifact = replace(artifact, gate=gate, reference=artifact.reference if reference is None else reference)
    _describe(folder, artifact)
    manifest.write(folder)
    return artifact


def _describe(folder: Path, artifact: Artifact) -> Path:
    path = folder / NAME
    path.write_text(json.dumps(asdict(artifact), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def is_compressed(artifact: Artifact) -> bool:
    """Whether it was made smaller from another one, which it must not be much worse than: int8, or a student."""
    return not engines.get(artifact.engine).gradients or "teacher" in artifact.lineage


def refusal(gate: Mapping[str, Any] | None, version: str) -> str | None:
    """Why the gate has refused the artefact of a version: the reasons, in one line. None where it has not, or has
    looked at another one."""
    if gate is None or gate.get("verdict") != "refuse" or gate.get("version") != version:
        return None
    return "; ".join(gate.get("reasons") or ["no reason given"])


def use(artifact: Artifact) -> tuple[str, ...]:
    """The verb to which the artefact goes next, and what stands behind its folder: `serve` where an endpoint takes it,
    `inspect` where the gate has refused it, `gate` where it was made smaller and the gate has not looked at it."""
    if refusal(artifact.gate, artifact.version) is not None:
        return ("inspect",)
    if is_compressed(artifact) and (artifact.gate or {}).get("version") != artifact.version:
        return ("gate", "--against", "BASE")
    return ("serve",)


def read(folder: Path, verify: bool = True) -> Artifact:
    """The artefact of a folder; `verify` compares every file with the manifest, which has to record all that answer."""
    path = folder / NAME
    if not path.is_file():
        inner = folder / "artifact"
        named = f"did you mean {inner}?" if (inner / NAME).is_file() else meant(folder)
        hint = named or "name the artifact folder of a finished run"
        raise ArtifactError(f"{folder} is no artefact (no {NAME}); {hint}", code="not_an_artifact")
    if verify and (problem := manifest.damage(folder, _answering(folder))) is not None:
        raise ArtifactError(
            f"artefact {folder} is damaged: {problem}; make it again or copy it whole", code="damaged_artifact"
        )
    document = document_of(folder)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactError(
            f"artefact {folder} is of schema {document.get('schema_version')}, this rtrain reads {SCHEMA_VERSION}",
            code="other_version",
        )
    try:
        document["labels"], document["golden"] = tuple(document["labels"]), tuple(document["golden"])
        return Artifact(**document)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"artefact {folder}: its {NAME} has other fields than this rtrain writes ({error}); use the version that "
            "made it, or make it again",
            code="other_version",
        ) from None


def _answering(folder: Path) -> list[str]:
    """Names of the files there that any engine would read: which one answers is known once they are verified."""
    described = [path for path in (folder / name for name in DESCRIBING) if path.is_file()]
    models = [path for engine in engines.ENGINES.values() for path in engine.present(folder)]
    return [path.name for path in (*described, *models)]


def document_of(folder: Path) -> dict[str, Any]:
    """artifact.json as it stands, of whatever schema. Raises `ArtifactError` where it is cut off."""
    try:
        return json_files.read(folder / NAME)
    except UserError as error:
        raise ArtifactError(str(error), code=error.code) from None


def size_mb(folder: Path, engine: str) -> float:
    """Megabytes of the weights that answer."""
    return sum(path.stat().st_size for path in engines.get(engine).present(folder)) / 1e6


def publish(draft: Path, final: Path) -> Path:
    """Move a complete draft to its name; an older artefact there is replaced as a whole. Behind a link it is the folder
    that the link names: a deployment's `current` stays a link."""
    final = final.resolve()
    atomic_write.replace_folder(draft, final)
    return final
