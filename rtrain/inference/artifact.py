"""The deployable folder: a Transformers checkpoint with tokenizer, task, labels, lineage and golden answers.

config.json  model.safetensors  tokenizer.json ...   what `AutoModelFor...from_pretrained` loads, with the answers of
                                                     rtrain; it refuses to where it would answer otherwise: the head
                                                     reads the mean of the tokens, several heads, summaries
modules.json  1_Pooling/config.json ...              of a sentence encoder: what sentence-transformers loads
model.int8.xml  model.int8.bin                       the int8 graph, when quantized; or both with .gz
artifact.json                                        what rtrain needs to answer
MANIFEST.json                                        size and SHA-256 of each file; written last

An artifact by URL (s3://bucket/path/artifact, a folder of fsspec, or its run) is fetched once into this user's cache
and verified. Its MANIFEST.json is read each time; the SHA-256 of it is the digest, which may follow the URL:
#sha256=HEX. An incomplete download, or one with another digest, never gets its name in the cache.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urldefrag, urlsplit

from rtrain.core import atomic_write, engines, json_files, manifest, plugins
from rtrain.core.errors import UserError, suggest_path
from rtrain.core.run_folder import Run

FILE_NAME = json_files.ARTIFACT_JSON
SCHEMA_VERSION = 2
PLUGINS_FACT = "plugins"
"""Fact of an artifact whose task is a plug-in's: the digest by the plug-in's name (`rtrain.core.plugins`)."""
METADATA_FILES = (FILE_NAME, "config.json", "tokenizer.json")
"""The files of every artifact, in addition to the model's."""
FILES_REWRITTEN_BY_GATE = (FILE_NAME, manifest.FILE_NAME)
"""The files that a gate's verdict changes."""
ROW_FORMAT_SETTINGS = (
    *(
        "format",
        "delimiter",
        "escape",
        "text",
        "text_pair",
        "label",
        "separator",
        "slices",
        "split_column",
        "group_column",
    ),
    *("max_row_bytes", "max_bad_rows"),
    *("where", "text_separator", "features", "strip_html", "labels"),
)
"""Settings of `data` for reading a file of rows, which `rtrain evaluate` applies to another file."""
GOLDEN_INPUTS = (
    "Hello",
    "Where is my order? It was due on Monday.",
    "¿Pueden devolverme el dinero de la factura 4711?",
    "Ich möchte mein Abonnement zum Monatsende kündigen, bitte bestätigen Sie das per E-Mail.",
    "Le colis est arrivé ouvert et il manque deux articles sur trois.",
    "I changed banks last week, so the card that you have on file will not work for the next payment; "
    "please tell me how to replace it, and whether I need to do anything about the invoice that is still open.",
)
"""Texts whose logits are stored in the artifact: short and long, with punctuation of several scripts."""


class ArtifactError(UserError):
    """A folder that is no artifact, is damaged, or does not reproduce its golden answers."""


@dataclass(frozen=True)
class Artifact:
    """The contents of artifact.json."""

    name: str
    task: str
    labels: tuple[str, ...]
    max_tokens: int
    engine: str
    """The engine: a name in `rtrain.core.engines`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values that the task needs in addition to the labels: pooling of windows, mean of the targets, ..."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the training rows were read with (`ROW_FORMAT_SETTINGS`), possibly empty."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    gate: Mapping[str, Any] | None = None
    """The gate's verdict (`rtrain.evaluation.gate`); None before."""
    drift_baseline: Mapping[str, Any] = field(default_factory=dict)
    """Distribution of inputs and answers on the validation rows
    (`rtrain.inference.drift_baseline.build_split_baseline`), possibly empty."""
    golden: tuple[Mapping[str, Any], ...] = ()
    """`{"inputs": text or texts, "logits": [...]}` each, as computed by the maker through
    `rtrain.inference.predictor`."""
    version: str = ""
    """Digest of the model's files: two artifacts of one version give the same answers."""
    schema_version: int = SCHEMA_VERSION


def write_artifact(
    folder: Path,
    artifact: Artifact,
    compute_logits: Callable[[Path, Artifact], Sequence[Sequence[Any]]],
    inputs: Sequence[Any] = GOLDEN_INPUTS,
) -> Artifact:
    """Complete a folder that holds the model files: version, golden answers by `compute_logits`, artifact.json,
    manifest."""
    model_file_names = {
        *(path.name for path in engines.get_engine(artifact.engine).find_files(folder)),
        "tokenizer.json",
    }
    model_files = [path for path in sorted(folder.iterdir()) if path.name in model_file_names]
    digest = hashlib.sha256("\n".join(artifact.labels).encode())
    if artifact.facts:
        digest.update(json.dumps(artifact.facts, sort_keys=True).encode())
    for path in model_files:
        digest.update(path.read_bytes())
    artifact = replace(artifact, version=digest.hexdigest()[:12])
    logits = compute_logits(folder, artifact)
    golden = tuple({"inputs": texts, "logits": row} for texts, row in zip(inputs, logits, strict=True))
    artifact = replace(artifact, golden=golden)
    path = _write_artifact_json(folder, artifact)
    for model_file in model_files:
        # safetensors makes its files readable by their owner alone; an endpoint often runs as another user.
        model_file.chmod(path.stat().st_mode)
    manifest.write_manifest(folder)
    return artifact


def write_gate_verdict(
    folder: Path, gate: Mapping[str, Any], drift_baseline: Mapping[str, Any] | None = None
) -> Artifact:
    """Write a gate's verdict into the artifact of a draft folder, and rewrite its manifest (`FILES_REWRITTEN_BY_GATE`).

    `drift_baseline` replaces its own, for an int8 artifact whose answers differ from the float artifact's."""
    artifact = read_artifact(folder)
    artifact = replace(
        artifact, gate=gate, drift_baseline=artifact.drift_baseline if drift_baseline is None else drift_baseline
    )
    _write_artifact_json(folder, artifact)
    manifest.write_manifest(folder)
    return artifact


def _write_artifact_json(folder: Path, artifact: Artifact) -> Path:
    path = folder / FILE_NAME
    path.write_text(json.dumps(asdict(artifact), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def is_compressed(artifact: Artifact) -> bool:
    """Whether it is compressed from another artifact, int8 or a student, which the gate compares it with."""
    return not engines.get_engine(artifact.engine).has_gradients or "teacher" in artifact.lineage


def rejection_reason(gate: Mapping[str, Any] | None, version: str) -> str | None:
    """Return the gate's reasons for refusing the artifact of a version, in one line; None without a refusal of that
    version."""
    if gate is None or gate.get("verdict") != "refuse" or gate.get("version") != version:
        return None
    return "; ".join(gate.get("reasons") or ["no reason given"])


def next_command(artifact: Artifact) -> tuple[str, ...]:
    """Return the next verb for the artifact, and the arguments after its folder: `inspect` if the gate has refused it,
    `gate` if it is compressed and not judged yet, else `serve`."""
    if rejection_reason(artifact.gate, artifact.version) is not None:
        return ("inspect",)
    if is_compressed(artifact) and (artifact.gate or {}).get("version") != artifact.version:
        return ("gate", "--baseline", "BASE")
    return ("serve",)


def read_artifact(folder: Path, verify: bool = True) -> Artifact:
    """Read the artifact of a folder; `verify` compares every file with the manifest, which must record all model
    files."""
    path = folder / FILE_NAME
    if not path.is_file():
        nested_folder = folder / "artifact"
        suggestion = f"did you mean {nested_folder}?" if (nested_folder / FILE_NAME).is_file() else suggest_path(folder)
        hint = suggestion or "name the artifact folder of a finished run"
        raise ArtifactError(f"{folder} is no artifact (no {FILE_NAME}); {hint}", code="not_an_artifact")
    if verify and (problem := manifest.find_damage(folder, _required_file_names(folder))) is not None:
        raise ArtifactError(
            f"artifact {folder} is damaged: {problem}; make it again or copy it completely", code="damaged_artifact"
        )
    document = read_artifact_json(folder)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactError(
            f"artifact {folder} is of schema {document.get('schema_version')}, this rtrain reads {SCHEMA_VERSION}",
            code="other_version",
        )
    try:
        document["labels"], document["golden"] = tuple(document["labels"]), tuple(document["golden"])
        artifact = Artifact(**document)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"artifact {folder}: its {FILE_NAME} has other fields than this rtrain writes ({error}); use the version "
            "that made it, or make it again",
            code="other_version",
        ) from None
    plugins.require_plugins(artifact.facts.get(PLUGINS_FACT, {}), f"artifact {folder}")
    return artifact


def _required_file_names(folder: Path) -> list[str]:
    """Return the existing files of all engines: the engine is only known after verification."""
    metadata_files = [path for path in (folder / name for name in METADATA_FILES) if path.is_file()]
    model_files = [path for engine in engines.ENGINES.values() for path in engine.find_files(folder)]
    return [path.name for path in (*metadata_files, *model_files)]


def read_artifact_json(folder: Path) -> dict[str, Any]:
    """Load artifact.json of any schema. Raises `ArtifactError` if it is truncated."""
    try:
        return json_files.load_json_object(folder / FILE_NAME)
    except UserError as error:
        raise ArtifactError(str(error), code=error.code) from None


def model_size_mb(folder: Path, engine: str) -> float:
    return sum(path.stat().st_size for path in engines.get_engine(engine).find_files(folder)) / 1e6


def publish_artifact(draft: Path, final_path: Path) -> Path:
    """Move a complete draft to its final name, replacing an older artifact as a whole. A link is followed: a
    deployment's `current` stays a link."""
    final_path = final_path.resolve()
    atomic_write.replace_folder(draft, final_path)
    return final_path


DIGEST_PATTERN = re.compile(r"sha256=([0-9a-fA-F]{64})")
ARTIFACT_FOLDERS = ("", Run(Path()).artifact.name, Run(Path()).int8_artifact.name)
"""Folders of an artifact under a URL: the URL itself or, for a run, the folders of its artifacts."""
PrintLine = Callable[[str], None]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder, with a folder for each digest. It may be removed at any time."""
    root = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "rtrain" / "artifacts"


def is_cached(folder: Path, root: Path | None = None) -> bool:
    """Whether a folder is in the cache, and must not be changed: it is a copy of its URL."""
    return folder.resolve().is_relative_to((root or cache_folder()).resolve())


def fetch_artifact(address: str, root: Path | None = None, print_line: PrintLine = lambda line: None) -> Path:
    """Return the folder of the artifact of a URL in the cache `root`, fetched unless it is there intact. `print_line`
    reports downloads.

    Raises `UserError` for a URL that cannot or must not be read, and `ArtifactError` for a folder that is no artifact,
    is damaged, or has another digest.
    """
    url, digest = _split_address(address)
    root = root or cache_folder()
    if urlsplit(url).scheme in ("http", "https"):
        raise UserError(
            f"{_redact_url(url)}: a folder cannot be listed over http(s); fetch it, and name the folder here",
            code="unknown_scheme",
        )
    return _fetch_folder(url, digest, root, print_line)


def _split_address(address: str) -> tuple[str, str | None]:
    """(URL, digest in hex)"""
    url, fragment = urldefrag(address)
    match = DIGEST_PATTERN.fullmatch(fragment)
    if fragment and match is None:
        raise UserError(
            f"{_redact_url(url)}: invalid fragment {fragment!r}; write #sha256= and 64 hexadecimal digits",
            code="invalid_digest",
        )
    return url, match[1].lower() if match else None


def _redact_url(url: str) -> str:
    """Format a URL for a message, without user and query, which may be secret."""
    url_parts = urlsplit(url)
    return f"{url_parts.scheme}://{url_parts.netloc.rpartition('@')[2]}{url_parts.path}"


def _is_safe_path(name: str) -> bool:
    path = PurePosixPath(name)
    is_relative = (
        bool(name) and name == path.as_posix() and not path.is_absolute() and "\\" not in name and name.isprintable()
    )
    return is_relative and ".." not in path.parts


def _fetch_folder(url: str, digest: str | None, root: Path, print_line: PrintLine) -> Path:
    import fsspec

    filesystem, path = _call_storage(url, lambda: fsspec.core.url_to_fs(url))
    _call_storage(url, filesystem.invalidate_cache)  # other processes write here too
    candidate_paths = [f"{str(path).rstrip('/')}/{name}".rstrip("/") for name in ARTIFACT_FOLDERS]
    exists_by_path: dict[str, bool] = _call_storage(
        url, lambda: {path: filesystem.exists(f"{path}/{manifest.FILE_NAME}") for path in candidate_paths}
    )
    artifact_path = next((path for path in candidate_paths if exists_by_path[path]), None)
    if artifact_path is None:
        raise ArtifactError(
            f"{_redact_url(url)} is neither an artifact nor a run with one (no {manifest.FILE_NAME})",
            code="not_an_artifact",
        )
    manifest_bytes: bytes = _call_storage(url, lambda: filesystem.cat_file(f"{artifact_path}/{manifest.FILE_NAME}"))
    manifest_digest = hashlib.sha256(manifest_bytes).hexdigest()
    if digest not in (None, manifest_digest):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} has the SHA-256 {manifest_digest}, not {digest}",
            code="other_digest",
        )
    final_path = root / manifest_digest
    if final_path.is_dir() and manifest.find_damage(final_path) is None:
        return final_path
    shutil.rmtree(final_path, ignore_errors=True)
    with _open_draft(final_path) as draft:
        print_line(f"fetching {_redact_url(url)}")
        staging_folder = draft / "inside"
        staging_folder.mkdir()
        for name in _list_manifest_files(url, manifest_bytes):
            (staging_folder / name).parent.mkdir(parents=True, exist_ok=True)
            _call_storage(
                url,
                lambda name=name: filesystem.get_file(f"{artifact_path}/{name}", str(staging_folder / name)),  # type: ignore[misc]
            )
        (staging_folder / manifest.FILE_NAME).write_bytes(manifest_bytes)
        if (problem := manifest.find_damage(staging_folder)) is not None:
            raise ArtifactError(
                f"{_redact_url(url)} is damaged, or was changed while it was fetched: {problem}; nothing of it was "
                "kept",
                code="damaged_artifact",
            )
        try:
            atomic_write.publish_folder(staging_folder, final_path)
        except OSError:  # another process may have been faster: then its copy stands
            if not final_path.is_dir():
                raise
    return final_path


def _list_manifest_files(url: str, document: bytes) -> list[str]:
    try:
        names = list(json.loads(document)["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} cannot be read", code="unreadable"
        ) from None
    if unsafe_name := next((name for name in names if not _is_safe_path(name)), None):
        raise ArtifactError(
            f"the {manifest.FILE_NAME} of {_redact_url(url)} names {unsafe_name!r}, which leads out of the folder",
            code="unsafe_path",
        )
    return names


def _call_storage(url: str, operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except Exception as error:  # every kind of storage has errors of its own
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{_redact_url(url)} cannot be fetched: {reason}. Credentials come from the environment; s3:// needs the "
            "extra s3, gs:// gcsfs",
            code="unreachable",
        ) from error


@contextmanager
def _open_draft(final_path: Path) -> Iterator[Path]:
    """A draft of `final_path`, which is gone with the block; what killed fetches have left goes first."""
    try:
        atomic_write.remove_stale_drafts(final_path)
        draft = atomic_write.Draft(final_path)
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that can"
        raise UserError(
            f"{final_path.parent} cannot be written ({error.strerror}); {fix}", code="not_writable"
        ) from None
    try:
        yield draft.folder
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
