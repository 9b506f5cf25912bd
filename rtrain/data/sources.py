"""`data.path`, `data.valid` and `data.test` -> the files that hold the rows: address, format, role and SHA-256.

An address is a file, a folder, a glob, a web address, a folder of `datasets`, or the name of a data set on the hub.

SHA-256s are computed in parallel and cached for the next start on the same files:

<root>/.digests.json     by file: its stamp (time, size and tag from the storage), and its SHA-256

A file counts as unchanged only if its storage would show any change: a local file by the time of its last change, which
no program can set, an object by the tag that the store gives to each content. The tasks that read the rows hash the
files again (`rtrain.data.file_ranges`), so no row is stored under the digest of another file.
"""

import hashlib
import json
import os
import re
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import fsspec.utils
from fsspec.implementations.local import LocalFileSystem

from rtrain.core import hub, json_files, plugins
from rtrain.core.errors import ConfigError, Problem, UserError, find_nearest_file, quote_value

SOURCES_FOLDER = ".sources"
"""Folder beside the runs with the rows of plug-ins' sources."""
NO_FILE_REASON = "no such file, folder or glob"
FORMAT_BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".conll": "conll",
    ".xlsx": "xlsx",
}
ROLE_BY_SPLIT_NAME = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devel", "development"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The split (`train`, `valid` or `test`) by each name that a column or a data set may give it, in lower case."""
_DATASET_SPLITS, _DATASET_FILES = ("dataset_dict.json", "splits"), ("state.json", "_data_files")
"""Files of a `datasets` folder, each with its key under which its splits or its files are listed."""


class SourceFile(NamedTuple):
    """A file that one data task reads.

    `role` is `train`, `valid` or `test`; `format` is a value of `data.format`, and says how the file is read.
    """

    uri: str
    format: str
    role: str
    delimiter: str = ","
    """Separator of the columns of a csv file."""
    escape: str = ""
    """Character that escapes quotes inside quotes in a csv file; empty if they are doubled."""
    sheet: str = ""
    """Name of the sheet of an xlsx file; empty for the first."""


def find_files(field: str, uri: str, format: str | None, role: str, root: Path | None) -> list[SourceFile]:
    """The files of the address `uri`, sorted by name; a data set with several splits gives each file its split's role.

    `field` is the setting that holds the address, for the messages. A data set of the hub is read from its copy under
    `root` if there is one. Raises `ConfigError` if nothing is found, a format is unknown or a file is empty.
    """
    if (read_rows := plugins.find_value("source", uri.partition("://")[0])) is not None:
        return [SourceFile(_write_source_rows(field, uri, read_rows, root).as_uri(), "jsonl", role)]
    uri, sheet = split_sheet(uri)
    if sheet:
        return [file._replace(sheet=sheet) for file in find_files(field, uri, format, role, root)]
    filesystem, path = resolve_filesystem(field, uri)
    address = _Address(field, uri, filesystem, path)
    with wrap_storage_errors(field, uri):
        if filesystem.isdir(path) and (format == "datasets" or _is_dataset_folder(filesystem, path)):
            return _list_dataset_files(address, role)
        if (paths := _list_paths(address)) is None:
            if is_hub_name(uri, format):
                return _list_hub_files(address, role, root)
            if filesystem.exists(path):
                fix = "its rows are read more than once: write them to a file"
                raise make_config_error(field, uri, "no file or folder, but a pipe or the like", fix, "not_a_file")
            raise make_config_error(field, uri, NO_FILE_REASON, address.suggest_path(), "not_found")
        if not paths:
            fix = f"expected {', '.join(sorted(FORMAT_BY_SUFFIX))}"
            raise make_config_error(field, uri, "no data file in it", fix, "no_data_files")
        return [_make_source_file(address, name, format, role) for name in sorted(paths)]


def _write_source_rows(field: str, uri: str, read_rows: Callable[[str], Iterable[Any]], root: Path | None) -> Path:
    """Write the rows of a plug-in's source to a file of JSON lines under `root`, or in the user's cache. The file is
    named by its content. A resume compares the rows, since the source may have changed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rtrain"
    folder, number, hasher = (root or cache) / SOURCES_FOLDER, 0, hashlib.sha256()
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{uuid.uuid4().hex[:8]}"
    try:
        with plugins.attribute_errors(), draft.open("wb") as file:
            for number, row in enumerate(read_rows(uri), start=1):
                if not isinstance(row, Mapping):
                    reason = f"row {number} of the source is {quote_value(row)}"
                    raise make_config_error(field, uri, reason, "yield dicts of columns", "wrong_type")
                line = json.dumps(dict(row), ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"
                hasher.update(line)
                file.write(line)
        if not number:
            raise make_config_error(field, uri, "the source has no rows", "correct the address", "empty_file")
        return draft.rename(folder / f"{hasher.hexdigest()[:16]}.jsonl")
    except ConfigError:
        raise
    except UserError as error:
        reason = f"after row {number}, {error}"
        raise make_config_error(field, uri, reason, "correct the plug-in", error.code) from error
    finally:
        draft.unlink(missing_ok=True)


class _Address(NamedTuple):
    """Where a setting points to: `path` in a file system of fsspec."""

    field: str
    uri: str
    filesystem: Any
    path: str

    def suggest_path(self) -> str:
        parent = str(Path(self.path).parent)
        entries = self.filesystem.ls(parent, detail=False) if self.filesystem.isdir(parent) else []
        names = sorted(name for name in (Path(entry).name for entry in entries) if name[0] != ".")
        if nearest := find_nearest_file(Path(self.path).name, names):
            return f"did you mean {Path(parent) / nearest}?"
        if not names:
            return "write the path of an existing file, or a hub name (owner/name)"
        return f"{parent} holds {', '.join(names[:8])}"


def _list_paths(address: _Address) -> list[str] | None:
    """The paths of the files of an address; None if it is no file, folder or glob."""
    _, uri, filesystem, path = address
    # Plain files come before globs: a file may be called `rows [final].csv`, and a `?` in a URL begins its query.
    if filesystem.isfile(path):
        return [path]
    if filesystem.isdir(path):
        files = filesystem.find(path)
        return [name for name in files if file_suffix(name) in FORMAT_BY_SUFFIX and not _is_hidden(name, path)]
    if not is_glob(uri):
        return None
    parent = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
    includes_hidden = _is_hidden(path, parent)
    matches = (name for name in filesystem.glob(path) if includes_hidden or not _is_hidden(name, parent))
    return [name for name in matches if filesystem.isfile(name)]


def _make_source_file(address: _Address, name: str, format: str | None, role: str) -> SourceFile:
    """The file, checked by its name and its size."""
    field, _, filesystem, _ = address
    if name.encode("utf-8", "replace").decode() != name:
        fix = "rename it: the token store records the file name of each row"
        raise make_config_error(field, name, "its name is not UTF-8", fix, "not_utf8")
    file_format = format or FORMAT_BY_SUFFIX.get(file_suffix(name))
    if file_format is None:
        fix = "set data.format to csv, tsv, jsonl, parquet, conll or squad"
        raise make_config_error(field, name, "its suffix names no format", fix, "unknown_format")
    try:
        size = filesystem.size(name)
    except FileNotFoundError:
        fix = "correct the link, or remove it"
        raise make_config_error(field, name, "a link that leads to no file", fix, "not_found") from None
    if size == 0:
        fix = "write a header line and rows, or remove it"
        raise make_config_error(field, name, "the file is empty", fix, "empty_file")
    return SourceFile(filesystem.unstrip_protocol(name), file_format, role)


def has_format_suffix(name: str) -> bool:
    """Whether a file's name says its format. `.json` does not: the file may hold rows or be a SQuAD file."""
    return file_suffix(name) in FORMAT_BY_SUFFIX.keys() - {".json"}


def _is_hidden(name: str, parent: str) -> bool:
    """Whether a path has a hidden name below `parent`, such as copies in .ipynb_checkpoints."""
    return any(part.startswith((".", "__MACOSX")) for part in name.removeprefix(parent).split("/"))


def _is_dataset_folder(filesystem: Any, path: str) -> bool:
    return any(_read_list(filesystem, path, *entry) is not None for entry in (_DATASET_SPLITS, _DATASET_FILES))


def _read_list(filesystem: Any, folder: str, name: str, key: str) -> list[Any] | None:
    """The list under `key` in a file of `save_to_disk`; None if it is missing or another program's file."""
    try:
        values = json.loads(filesystem.cat_file(f"{folder}/{name}"))[key]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return values if isinstance(values, list) else None


def _list_dataset_files(address: _Address, role: str) -> list[SourceFile]:
    """The arrow files of a folder that `save_to_disk` wrote. `_resolve_roles` chooses among several splits."""
    field, _, filesystem, path = address
    folders = {path: role}
    if (names := _read_list(filesystem, path, *_DATASET_SPLITS)) is not None:
        folders = {f"{path}/{name}": split for name, split in _resolve_roles(field, path, names, role).items()}
    source_files = []
    for folder, split_role in folders.items():
        entries = _read_list(filesystem, folder, *_DATASET_FILES)
        if entries is None:
            fix = "name a folder that save_to_disk wrote, or leave out data.format"
            raise make_config_error(field, folder, "no folder of `datasets` (state.json)", fix, "not_a_dataset")
        files = [filesystem.unstrip_protocol(f"{folder}/{entry['filename']}") for entry in entries]
        source_files += [SourceFile(file, "datasets", split_role) for file in files]
    return source_files


def _resolve_roles(field: str, source: str, names: Iterable[str], role: str) -> dict[str, str]:
    """The role of each split of a data set to read, by the split's name.

    A data set in data.path (`role` is `train`) gives every split with a known name, any other gives `role` alone.
    Raises `ConfigError` if no split has that role.
    """
    role_by_name = {name: ROLE_BY_SPLIT_NAME[name.lower()] for name in names if name.lower() in ROLE_BY_SPLIT_NAME}
    if role not in role_by_name.values():
        fix = f"it has {', '.join(names)}; name the folder of one"
        raise make_config_error(field, source, f"no split {role!r}", fix, "unknown_split")
    return {name: split_role for name, split_role in role_by_name.items() if role in ("train", split_role)}


def is_hub_name(uri: str, format: str | None) -> bool:
    """Whether `uri` has the form of a hub name.

    A name with the suffix of a data file is a mistyped path, not a hub name.
    """
    is_data_file = format is None and file_suffix(uri) in FORMAT_BY_SUFFIX
    return format in (None, "datasets") and not is_data_file and hub.is_hub_name(uri)


def _list_hub_files(address: _Address, role: str, root: Path | None) -> list[SourceFile]:
    """The arrow files of a data set of the hub, each with the role of its split."""
    field, name, _, _ = address
    try:
        files = hub.fetch_dataset(name, root)
    except hub.HubError as error:
        reason = f"no such file or folder here, and {error.reason}"
        fix = f"{error.fix}; {address.suggest_path()}"
        raise make_config_error(field, name, reason, fix, "not_found") from None
    roles = _resolve_roles(field, name, files, role)
    return [SourceFile(f"file://{file}", "datasets", roles[split]) for split in roles for file in files[split]]


# ----------------------------------------------------------------------------------------------------------- addresses

STORAGE_CLIENTS = ("aiohttp", "azure", "botocore", "gcsfs", "google")
"""Packages that fsspec uses for remote storage. Their errors share no base class."""
COMPRESSIONS = (".gz", ".bz2", ".xz")


def make_config_error(field: str, value: Any, reason: str, fix: str, code: str) -> ConfigError:
    """The error of a single problem."""
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def strip_query(uri: str) -> str:
    """The address without its query, which is a signature in presigned addresses and no part of the name."""
    return urllib.parse.urlsplit(uri).path if _is_web(uri) else uri


def _is_web(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def split_sheet(uri: str) -> tuple[str, str]:
    """The address of a file, and the name of the sheet behind it: file.xlsx#Sheet."""
    path, separator, sheet = uri.partition(".xlsx#")
    return (f"{path}.xlsx", sheet) if separator else (uri, "")


def file_suffix(uri: str) -> str:
    """The suffix that names the format of the rows, in lower case, without a compression suffix (.gz)."""
    path = Path(strip_query(uri).lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def is_glob(uri: str) -> bool:
    """Whether an address may stand for several files. A web address never does."""
    return not _is_web(uri) and any(sign in uri for sign in "*?[")


def open_file(uri: str) -> Any:
    """The file, decompressed, for a `with`."""
    path = strip_query(uri).lower()
    packed = fsspec.utils.infer_compression(path) if path.endswith(COMPRESSIONS) else None
    return fsspec.open(uri, "rb", compression=packed)


def resolve_filesystem(field: str, uri: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it. Raises `ConfigError` if no installed package reads the
    address; `field` is the setting that holds it."""
    try:
        filesystem_and_path: tuple[Any, str] = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        reason = f"a package that reads it is not installed ({error})"
        fix = "install it, e.g. the extra s3 of rtrain"
        raise make_config_error(field, uri, reason, fix, "not_installed") from None
    except ValueError as error:
        fix = "write a path, or an address such as https:// or s3://"
        raise make_config_error(field, uri, f"no such kind of address ({error})", fix, "unknown_protocol") from None
    return filesystem_and_path


@contextmanager
def wrap_storage_errors(field: str, uri: str) -> Iterator[None]:
    """Convert errors of the storage, such as a refusal or a timeout, to `ConfigError`."""
    try:
        yield
    except Exception as error:
        if not is_storage_error(error):
            raise
        reason = f"it cannot be read ({format_storage_error(error)})"
        fix = "check the address, the network and the credentials; a signed address may have expired"
        raise make_config_error(field, strip_query(uri), reason, fix, "unreachable") from None


def is_storage_error(error: Exception) -> bool:
    """Whether an error comes from remote storage or the network. fsspec raises Python's own errors for timeouts and
    refusals of S3."""
    is_client_error = type(error).__module__.partition(".")[0] in STORAGE_CLIENTS
    return is_client_error or isinstance(error, TimeoutError | PermissionError)


def format_storage_error(error: Exception) -> str:
    """The storage's error in one line, without the address: it may hold a signature."""
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answers {status} {getattr(error, 'message', '')}".strip()
    return (str(error).splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------------------- digests

CACHE_FILE = ".digests.json"
MAX_THREADS = 16
"""Files that are hashed at a time: hashing runs outside Python's global lock, and reading remote files is mostly
waiting."""
MIN_UNCHANGED_S = 3.0
"""Seconds without a change before a file's digest is cached. File systems have a time resolution of up to two seconds,
so two quick changes can have the same time."""
ETAG_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores, whose ETag depends on the content. A web server may derive it from size and seconds alone."""

DigestCache = Mapping[str, tuple[str, str]]
"""(text of the stamp, SHA-256) by URI."""


class FileDigest(NamedTuple):
    """SHA-256 of a file; cached if it has a `stamp`."""

    uri: str
    sha256: str
    stamp: str | None


def hash_file(uri: str) -> str:
    """SHA-256 of a file's stored (compressed) bytes, in hex."""
    with fsspec.open(uri, "rb") as file:
        hasher = hashlib.sha256()
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
        return hasher.hexdigest()


def hash_tokenizer(folder: Path) -> str:
    """SHA-256 of a folder's tokenizer.json, without its settings of truncation and padding, which an artifact takes
    from its run."""
    document = json_files.load_json_object(folder / "tokenizer.json") | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def compute_digests(uris: Sequence[str], cache: DigestCache) -> list[FileDigest]:
    """The digest of each file, in their order. A file is read only if `cache` has no digest for its present stamp."""

    def compute_digest(uri: str) -> FileDigest:
        started_at, stamp = time.time(), _read_stamp(uri)
        if stamp is not None and cache.get(uri, ("", ""))[0] == stamp.text:
            return FileDigest(uri, cache[uri][1], stamp.text)
        sha256 = hash_file(uri)
        is_stable = stamp is not None and stamp.changed_at < started_at - MIN_UNCHANGED_S and _read_stamp(uri) == stamp
        return FileDigest(uri, sha256, stamp.text if stamp and is_stable else None)

    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(uris)))) as threads:
        return list(threads.map(compute_digest, uris))


def load_cache(root: Path) -> DigestCache:
    """The cached digests under `root`; empty if unreadable."""
    try:
        document: Any = json.loads((root / CACHE_FILE).read_text(encoding="utf-8"))
        return {str(uri): (str(stamp), str(sha256)) for uri, (stamp, sha256) in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def update_cache(root: Path, file_digests: Sequence[FileDigest]) -> None:
    """Cache the digests that have a stamp. If two processes write at once, the digests of one are lost and computed
    again when needed."""
    old_cache = load_cache(root)
    new_digests = {digest.uri: (digest.stamp, digest.sha256) for digest in file_digests if digest.stamp is not None}
    new_cache = {**old_cache, **new_digests}
    if new_cache != old_cache:
        draft = root / f"{CACHE_FILE}.{uuid.uuid4().hex[:8]}"
        with suppress(OSError):  # where the folder cannot be written, the next start hashes again
            draft.write_text(json.dumps(new_cache), encoding="utf-8")
            draft.replace(root / CACHE_FILE)


def clear_cache(root: Path) -> None:
    """Delete the cache under `root`, since an entry was wrong."""
    (root / CACHE_FILE).unlink(missing_ok=True)


class _Stamp(NamedTuple):
    """Facts of a file that change whenever the file does."""

    text: str
    changed_at: float
    """Time of the last change, in seconds since 1970; 0 for storage that gives every change its own stamp."""


def _read_stamp(uri: str) -> _Stamp | None:
    """The stamp of a file; None if its storage keeps no fact that must change with the file."""
    filesystem, path = fsspec.core.url_to_fs(uri)
    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb") as file:  # opening makes a network file system ask its server
            stat = os.fstat(file.fileno())
        text = f"{stat.st_ctime_ns} {stat.st_mtime_ns} {stat.st_size} {stat.st_ino} {stat.st_dev}"
        return _Stamp(text, max(stat.st_ctime, stat.st_mtime))
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if not set(protocols) & set(ETAG_PROTOCOLS):
        return None
    filesystem.invalidate_cache()  # a cached listing may be older than the file
    information = filesystem.info(path)
    tag = information.get("ETag") or information.get("etag")
    return _Stamp(f"{tag} {information['size']}", 0.0) if tag else None
