"""`data.path` and its like -> the files that hold the rows, each with its format and its role.

An address is a file, a folder, a glob, a folder of `datasets`, or the name of a data set on the hub.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem, find_nearest_file
from rtrain.data.readers.values import printable
from rtrain.data.sources import paths
from rtrain.data.sources.paths import is_glob, refused, suffix

LOCAL = "file://"
NO_FILE = "no such file, folder or glob"
SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".conll": "conll",
}
ROLES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "devel", "development"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The split (`train`, `valid` or `test`) by each name that a column or a data set may give it, in lower case."""
_SPLITS, _STATE = ("dataset_dict.json", "splits"), ("state.json", "_data_files")
"""Files of a `datasets` folder, each with its key under which its splits or its files are listed."""


class Piece(NamedTuple):
    """A file that one data task reads.

    `role` is `train`, `valid` or `test`; `format` is a value of `data.format`, and says how the file is read.
    """

    uri: str
    format: str
    role: str
    delimiter: str = ","
    """Sign between the columns of a csv file."""
    escape: str = ""
    """Sign that escapes quotes inside quotes in a csv file; empty where they are doubled."""


def find(field: str, uri: str, format: str | None, role: str, root: Path | None) -> list[Piece]:
    """The files of the address `uri`, sorted by name; a data set with several splits gives each file its split's role.

    `field` is the setting that holds the address, for the messages. A data set of the hub is read from its copy under
    `root` if there is one. Raises `ConfigError` if nothing is found, a format is unknown or a file is empty.
    """
    filesystem, path = paths.filesystem(field, uri)
    with paths.asked(field, uri):
        return _found(field, uri, filesystem, path, format, role, root)


def _found(
    field: str, uri: str, filesystem: Any, path: str, format: str | None, role: str, root: Path | None
) -> list[Piece]:
    if filesystem.isdir(path) and (format == "datasets" or _is_datasets(filesystem, path)):
        return _datasets_pieces(field, filesystem, path, role)
    # Plain files come before globs: a file may be called `rows [final].csv`, and a `?` in a URL begins its query.
    if filesystem.isfile(path):
        files = [path]
    elif filesystem.isdir(path):
        files = [name for name in filesystem.find(path) if suffix(name) in SUFFIXES and not _is_hidden(name, path)]
    elif is_glob(uri):
        above = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        asked = _is_hidden(path, above)
        found = (name for name in filesystem.glob(path) if asked or not _is_hidden(name, above))
        files = [name for name in found if filesystem.isfile(name)]
    elif is_hub_name(uri, format):
        return _hub_pieces(field, uri, role, root, _nearby(filesystem, path))
    elif filesystem.exists(path):
        fix = "its rows are read more than once: write them to a file"
        raise refused(field, uri, "no file or folder, but a pipe or the like", fix, "not_a_file")
    else:
        raise refused(field, uri, NO_FILE, _nearby(filesystem, path), "not_found")
    if not files:
        raise refused(field, uri, "no data file in it", f"expected {', '.join(sorted(SUFFIXES))}", "no_data_files")
    pieces = []
    for name in sorted(files):
        if printable(name) != name:
            fix = "rename it: what is kept of a row names its file"
            raise refused(field, name, "its name is not UTF-8", fix, "not_utf8")
        known = format or SUFFIXES.get(suffix(name))
        if known is None:
            fix = "set data.format to csv, tsv, jsonl, parquet, conll or squad"
            raise refused(field, name, "its name does not tell its format", fix, "unknown_format")
        try:
            size = filesystem.size(name)
        except FileNotFoundError:
            fix = "mend the link, or remove it"
            raise refused(field, name, "a link that leads to no file", fix, "not_found") from None
        if size == 0:
            raise refused(field, name, "the file is empty", "write a header line and rows, or remove it", "empty_file")
        pieces.append(Piece(filesystem.unstrip_protocol(name), known, role))
    return pieces


def tells_format(name: str) -> bool:
    """Whether a file's name says its format. `.json` does not: the file may hold rows or be a SQuAD file."""
    return suffix(name) in SUFFIXES.keys() - {".json"}


def _nearby(filesystem: Any, path: str) -> str:
    parent = str(Path(path).parent)
    found = filesystem.ls(parent, detail=False) if filesystem.isdir(parent) else []
    names = sorted(name for name in (Path(entry).name for entry in found) if name[0] != ".")
    if near := find_nearest_file(Path(path).name, names):
        return f"did you mean {Path(parent) / near}?"
    listed = ", ".join(names[:8])
    return f"{parent} holds {listed}" if names else "write the path of an existing file, or a hub name (owner/name)"


def _is_hidden(name: str, above: str) -> bool:
    """Whether a path has a hidden name below `above`: what editors and systems keep beside the rows, such as copies of
    them in .ipynb_checkpoints."""
    return any(part.startswith((".", "__MACOSX")) for part in name.removeprefix(above).split("/"))


def _is_datasets(filesystem: Any, path: str) -> bool:
    return any(_listed(filesystem, path, *place) is not None for place in (_SPLITS, _STATE))


def _listed(filesystem: Any, folder: str, name: str, key: str) -> list[Any] | None:
    """What a file of `save_to_disk` lists; None where it is missing, or is another program's file of that name."""
    try:
        found = json.loads(filesystem.cat_file(f"{folder}/{name}"))[key]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _datasets_pieces(field: str, filesystem: Any, path: str, role: str) -> list[Piece]:
    """The arrow files of a folder that `save_to_disk` wrote. `_roles` chooses among several splits."""
    folders = {path: role}
    if (names := _listed(filesystem, path, *_SPLITS)) is not None:
        folders = {f"{path}/{name}": found for name, found in _roles(field, path, names, role).items()}
    pieces = []
    for folder, found in folders.items():
        entries = _listed(filesystem, folder, *_STATE)
        if entries is None:
            fix = "name a folder that save_to_disk wrote, or leave out data.format"
            raise refused(field, folder, "no folder of `datasets` (state.json)", fix, "not_a_dataset")
        files = [f"{folder}/{entry['filename']}" for entry in entries]
        pieces += [Piece(filesystem.unstrip_protocol(file), "datasets", found) for file in files]
    return pieces


def _roles(field: str, source: str, names: Iterable[str], role: str) -> dict[str, str]:
    """The role of each split of a data set that is to be read, by the split's name.

    A set that data.path names (`role` is `train`) gives every split whose name is known, any other gives `role` alone.
    Raises `ConfigError` if no split has that role.
    """
    found = {name: ROLES[name.lower()] for name in names if name.lower() in ROLES}
    if role not in found.values():
        fix = f"it has {', '.join(names)}; name the folder of one"
        raise refused(field, source, f"no split {role!r}", fix, "unknown_split")
    return {name: known for name, known in found.items() if role in ("train", known)}


def is_hub_name(uri: str, format: str | None) -> bool:
    """Whether `uri` asks for rows of the hub: it has the form of a hub name, and no file here has that path.

    A name that ends as a data file does is taken as a mistyped path, not as a hub name.
    """
    return format in (None, "datasets") and (format or suffix(uri) not in SUFFIXES) and hub.is_name(uri)


def _hub_pieces(field: str, name: str, role: str, root: Path | None, nearby: str) -> list[Piece]:
    """The arrow files of a data set of the hub, each with the role of its split."""
    try:
        files = hub.dataset(name, root)
    except hub.Refused as error:
        problem = Problem(
            field, name, f"no such file or folder here, and {error.reason}", f"{error.fix}; {nearby}", code="not_found"
        )
        raise ConfigError([problem]) from None
    roles = _roles(field, name, files, role)
    return [Piece(f"file://{file}", "datasets", found) for split, found in roles.items() for file in files[split]]
