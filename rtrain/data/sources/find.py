"""`data.path`, `data.valid` and `data.test` -> the files that hold the rows, each with its format and its role.

An address is a file, a folder, a glob, a folder of `datasets`, or the name of a data set on the hub.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem, find_nearest_file
from rtrain.data.readers.values import replace_surrogates
from rtrain.data.sources import paths
from rtrain.data.sources.paths import file_suffix, is_glob, make_config_error

LOCAL_SCHEME = "file://"
NO_FILE_REASON = "no such file, folder or glob"
FORMAT_BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".conll": "conll",
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


def find_files(field: str, uri: str, format: str | None, role: str, root: Path | None) -> list[SourceFile]:
    """The files of the address `uri`, sorted by name; a data set with several splits gives each file its split's role.

    `field` is the setting that holds the address, for the messages. A data set of the hub is read from its copy under
    `root` if there is one. Raises `ConfigError` if nothing is found, a format is unknown or a file is empty.
    """
    filesystem, path = paths.resolve_filesystem(field, uri)
    with paths.wrap_storage_errors(field, uri):
        return _list_files(field, uri, filesystem, path, format, role, root)


def _list_files(
    field: str, uri: str, filesystem: Any, path: str, format: str | None, role: str, root: Path | None
) -> list[SourceFile]:
    if filesystem.isdir(path) and (format == "datasets" or _is_dataset_folder(filesystem, path)):
        return _list_dataset_files(field, filesystem, path, role)
    # Plain files come before globs: a file may be called `rows [final].csv`, and a `?` in a URL begins its query.
    if filesystem.isfile(path):
        files = [path]
    elif filesystem.isdir(path):
        files = [
            name
            for name in filesystem.find(path)
            if file_suffix(name) in FORMAT_BY_SUFFIX and not _is_hidden(name, path)
        ]
    elif is_glob(uri):
        parent = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        includes_hidden = _is_hidden(path, parent)
        matches = (name for name in filesystem.glob(path) if includes_hidden or not _is_hidden(name, parent))
        files = [name for name in matches if filesystem.isfile(name)]
    elif is_hub_name(uri, format):
        return _list_hub_files(field, uri, role, root, _suggest_path(filesystem, path))
    elif filesystem.exists(path):
        fix = "its rows are read more than once: write them to a file"
        raise make_config_error(field, uri, "no file or folder, but a pipe or the like", fix, "not_a_file")
    else:
        raise make_config_error(field, uri, NO_FILE_REASON, _suggest_path(filesystem, path), "not_found")
    if not files:
        raise make_config_error(
            field, uri, "no data file in it", f"expected {', '.join(sorted(FORMAT_BY_SUFFIX))}", "no_data_files"
        )
    source_files = []
    for name in sorted(files):
        if replace_surrogates(name) != name:
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
            raise make_config_error(
                field, name, "the file is empty", "write a header line and rows, or remove it", "empty_file"
            )
        source_files.append(SourceFile(filesystem.unstrip_protocol(name), file_format, role))
    return source_files


def has_format_suffix(name: str) -> bool:
    """Whether a file's name says its format. `.json` does not: the file may hold rows or be a SQuAD file."""
    return file_suffix(name) in FORMAT_BY_SUFFIX.keys() - {".json"}


def _suggest_path(filesystem: Any, path: str) -> str:
    parent = str(Path(path).parent)
    entries = filesystem.ls(parent, detail=False) if filesystem.isdir(parent) else []
    names = sorted(name for name in (Path(entry).name for entry in entries) if name[0] != ".")
    if nearest := find_nearest_file(Path(path).name, names):
        return f"did you mean {Path(parent) / nearest}?"
    listed = ", ".join(names[:8])
    return f"{parent} holds {listed}" if names else "write the path of an existing file, or a hub name (owner/name)"


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


def _list_dataset_files(field: str, filesystem: Any, path: str, role: str) -> list[SourceFile]:
    """The arrow files of a folder that `save_to_disk` wrote. `_resolve_roles` chooses among several splits."""
    folders = {path: role}
    if (names := _read_list(filesystem, path, *_DATASET_SPLITS)) is not None:
        folders = {
            f"{path}/{name}": split_role for name, split_role in _resolve_roles(field, path, names, role).items()
        }
    source_files = []
    for folder, split_role in folders.items():
        entries = _read_list(filesystem, folder, *_DATASET_FILES)
        if entries is None:
            fix = "name a folder that save_to_disk wrote, or leave out data.format"
            raise make_config_error(field, folder, "no folder of `datasets` (state.json)", fix, "not_a_dataset")
        files = [f"{folder}/{entry['filename']}" for entry in entries]
        source_files += [SourceFile(filesystem.unstrip_protocol(file), "datasets", split_role) for file in files]
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
    return (
        format in (None, "datasets") and (format or file_suffix(uri) not in FORMAT_BY_SUFFIX) and hub.is_hub_name(uri)
    )


def _list_hub_files(field: str, name: str, role: str, root: Path | None, suggestion: str) -> list[SourceFile]:
    """The arrow files of a data set of the hub, each with the role of its split."""
    try:
        files = hub.fetch_dataset(name, root)
    except hub.HubError as error:
        problem = Problem(
            field,
            name,
            f"no such file or folder here, and {error.reason}",
            f"{error.fix}; {suggestion}",
            code="not_found",
        )
        raise ConfigError([problem]) from None
    roles = _resolve_roles(field, name, files, role)
    return [
        SourceFile(f"file://{file}", "datasets", split_role)
        for split, split_role in roles.items()
        for file in files[split]
    ]
