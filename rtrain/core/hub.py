"""Models and data sets by hub name: the commit that a name means, its files here, and a copy that every node reads.

A name is `owner/name` or `name`, with `:subset` behind it for a part of a data set, and `@revision` (a branch, a tag or
a commit) last.

Fetched files lie in the cache of this machine's user, which other nodes do not have, and a branch may be another commit
tomorrow. So a run freezes the commit into its configuration and keeps the files beside its token store, each with its
SHA-256. Workers and tasks on any node read that copy, and a resume asks no hub.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

from rtrain.core import atomic_write, manifest
from rtrain.core.errors import UserError

PACKAGED = "minilm"
"""The model that comes as a Python package. It has the form of a hub name, but the hub is not asked for it."""
Kind = Literal["model", "dataset"]
FOLDERS: dict[Kind, str] = {"model": ".models", "dataset": ".data"}
"""Folders of the copies under the run root, beside `.tokens`."""
CALLED: dict[Kind, str] = {"model": "model", "dataset": "data set"}
FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.safetensors"),
    *("model.safetensors.index.json", "modules.json", "1_Pooling/config.json"),
    *("generation_config.json", "vocab.json", "*.spm", "spiece.model"),
)
"""The files of a model that are fetched: `modules.json` and the next say how a sentence encoder pools, the last line is
of models that write."""
ANSWER_S = 10.0
"""Seconds in which the hub must answer the first question. Its client would try six times, the last time after 23 s."""
LINKED_BYTES = 1 << 20
"""Larger files are linked if copy and cache share a disk, so that they take no room. Smaller files are copied: someone
may edit them in place, and a link would change the cache too."""

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}(?:/{_WORD})?)(?::(?P<subset>{_WORD}))?(?:@(?P<revision>[A-Za-z0-9._/-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Name(NamedTuple):
    """A hub name in its parts."""

    repo: str
    subset: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repo}{subset}" + (f"@{self.revision}" if self.revision else "")


class Refused(UserError):
    """The hub lacks what was asked for, does not give it, or does not answer (`silent`).

    `reason` and `fix` are meant for a `Problem`.
    """

    def __init__(self, reason: str, fix: str, silent: bool = False, *, code: str = "refused"):
        self.reason, self.fix, self.silent = reason, fix, silent
        super().__init__(f"{reason}; {fix}", code=code)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return partial(type(self), code=self.code), (self.reason, self.fix, self.silent)  # from a Ray worker


def parse(text: str) -> Name | None:
    """The parts of a hub name, or None if the text does not have the form of one."""
    found = _NAME.fullmatch(text)
    return Name(**found.groupdict()) if found else None


def is_name(text: str) -> bool:
    """Whether a text has the form of a hub name, and no file or folder here has that path."""
    return parse(text) is not None and not Path(text).exists()


def takes_over(new: str, old: str) -> bool:
    """Whether a resumed run that asks for `new` goes on with `old`, whose commit is known.

    It does if the names are equal and `new` has no revision, or a branch or tag: these mean what they meant when the
    run began. A commit in `new` is another request.
    """
    asked, known = parse(new), parse(old)
    if asked is None or known is None or not _COMMIT.fullmatch(known.revision or ""):
        return False
    same = (asked.repo, asked.subset) == (known.repo, known.subset)
    return same and (asked.revision is None or not _COMMIT.fullmatch(asked.revision))


def pinned(kind: Kind, text: str) -> str:
    """The name with the commit that it means now. Raises `Refused`."""
    return str(_pinned(kind, _parsed(text)))


def model(text: str, root: Path | None = None) -> Path:
    """The folder of a hub model: its copy under `root`, or else in this machine's cache, where it is fetched if needed.

    Raises `Refused`.
    """
    import huggingface_hub

    name = _pinned("model", _parsed(text))
    if name.subset:
        raise Refused("a model has no subsets", f"write {name.repo}", code="conflicting_settings")
    if copy := _copy("model", name, root):
        return copy
    silent: Refused | None = None
    try:
        _commit("model", name.repo, name.revision, ask=True)
    except Refused as refused:
        if not refused.silent:
            raise
        silent = refused
    cached = huggingface_hub.try_to_load_from_cache(name.repo, FILES[0], revision=name.revision)
    if not silent and not isinstance(cached, str):
        _say("model", name)
    try:
        found = huggingface_hub.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=list(FILES), local_files_only=silent is not None
        )
    except Exception as error:  # the client's errors share no base class
        raise silent or _refused("model", name, error) from None
    return Path(found)


def dataset(text: str, root: Path | None = None) -> dict[str, list[Path]]:
    """The Arrow files of each split of a hub data set, sorted.

    They are those of its copy under `root`, or else in this machine's cache, where it is fetched if needed. Raises
    `Refused`.
    """
    name = _pinned("dataset", _parsed(text))
    if copy := _copy("dataset", name, root):
        found: dict[str, list[Path]] = {}
        for path in sorted(copy.glob("*.arrow")):
            found.setdefault(path.name.rpartition("-")[0], []).append(path)
        return found
    return _loaded(name)


def keep(kind: Kind, text: str, root: Path) -> None:
    """Copy the files of a hub name to their place under `root`, unless they are there. Raises `Refused`."""
    name = _pinned(kind, _parsed(text))
    if _copy(kind, name, root):
        return
    if kind == "model":
        files = model_files(model(text))
    else:
        splits = dataset(text).items()
        files = {f"{split}-{number:05}.arrow": path for split, paths in splits for number, path in enumerate(paths)}
    keep_files(files, place(kind, name, root))


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder that rtrain reads, by their names in it. The folder may hold the same weights in
    other formats too."""
    found = sorted(path for pattern in FILES for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): path for path in found}


def keep_files(files: Mapping[str, Path], final: Path) -> Path:
    """Make the folder `final` of these files, given by their names in it, and a manifest; returns the folder.

    The folder is complete or does not exist. Raises `UserError` if it exists and is damaged.
    """
    if final.is_dir():
        return _verified(final)
    atomic_write.sweep(final)
    draft = atomic_write.Draft(final)
    try:
        for name, path in files.items():
            target = draft.folder / name
            target.parent.mkdir(exist_ok=True)
            _lay(path.resolve(), target)
        (draft.folder / atomic_write.LOCK).unlink()
        manifest.write(draft.folder)
        try:
            atomic_write.publish_folder(draft.folder, final)
        except OSError:
            if not final.is_dir():
                raise
            # Another run has made the same folder meanwhile.
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    return _verified(final)


def _lay(path: Path, target: Path) -> None:
    if path.stat().st_size > LINKED_BYTES:
        with suppress(OSError):  # another disk, or one without links
            target.hardlink_to(path)
            return
    shutil.copyfile(path, target)


def place(kind: Kind, name: Name, root: Path) -> Path:
    """Where the copy of a hub name lies under a run root."""
    return root / FOLDERS[kind] / str(name).replace("/", "--").replace(":", "--")


def _copy(kind: Kind, name: Name, root: Path | None) -> Path | None:
    folder = None if root is None else place(kind, name, root)
    return _verified(folder) if folder and folder.is_dir() else None


@lru_cache
def _verified(folder: Path) -> Path:
    """The folder, if it matches its manifest. It is read once per process: it may hold gigabytes, and a run asks
    several times."""
    if problem := manifest.damage(folder):
        raise UserError(f"{folder}: {problem}; remove the folder, and it is fetched again", code="damaged_copy")
    return folder


def _parsed(text: str) -> Name:
    name = parse(text)
    if name is None:
        raise Refused(f"{text!r} is no hub name", "write owner/name, or owner/name@revision", code="invalid_name")
    return name


def _pinned(kind: Kind, name: Name) -> Name:
    return name._replace(revision=_commit(kind, name.repo, name.revision))


@lru_cache
def _commit(kind: Kind, repo: str, revision: str | None, ask: bool = False) -> str:
    """The commit that a revision means; the hub is asked once per process.

    If the hub does not answer, it is the commit of the hub's last answer. A `revision` that is a commit is returned
    without a question, unless `ask` is set.
    """
    import huggingface_hub

    if revision and _COMMIT.fullmatch(revision) and not ask:
        return revision
    api = huggingface_hub.HfApi()
    try:
        api.repo_info(repo, repo_type=kind, revision=revision, timeout=ANSWER_S)
        return str(api.resolve_revision(repo, repo_type=kind, revision=revision).resolved)  # this also remembers it
    except Exception as error:
        if not ask and _is_silence(error):
            with suppress(huggingface_hub.errors.RevisionResolutionError):
                known = api.resolve_revision(repo, repo_type=kind, revision=revision, local_files_only=True)
                return str(known.resolved)
        raise _refused(kind, Name(repo, None, revision), error) from None


@lru_cache
def _loaded(name: Name) -> dict[str, list[Path]]:
    import datasets
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        _commit("dataset", name.repo, name.revision, ask=True)
        _say("dataset", name)
    try:
        loaded = datasets.load_dataset(name.repo, name.subset, revision=name.revision, trust_remote_code=False)
    except Exception as error:
        raise _refused("dataset", name, error, _subsets(name)) from None
    found = {split: [Path(entry["filename"]) for entry in rows.cache_files] for split, rows in sorted(loaded.items())}
    # If anything fails, `datasets` takes the latest files in its cache, of whatever commit.
    if not all(name.revision in path.parts for paths in found.values() for path in paths):
        reason = f"the cache of `datasets` holds another commit of {name.repo} than {name.revision}"
        raise Refused(reason, "try again where the hub answers", code="other_commit")
    return found


def _subsets(name: Name) -> list[str]:
    import datasets

    with suppress(Exception):
        return list(datasets.get_dataset_config_names(name.repo, revision=name.revision))
    return []


def _say(kind: Kind, name: Name) -> None:
    sys.stderr.write(f"{CALLED[kind]} {name.repo}: fetched from {_endpoint()}\n")


def _endpoint() -> str:
    import huggingface_hub

    return str(huggingface_hub.constants.ENDPOINT)


def _is_silence(error: Exception) -> bool:
    """Whether the hub did not answer at all, or answered that it cannot now (status 500 and above)."""
    import huggingface_hub

    if isinstance(error, huggingface_hub.errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith("httpx")


def _refused(kind: Kind, name: Name, error: Exception, subsets: Iterable[str] = ()) -> Refused:
    from huggingface_hub import errors

    at = _endpoint()
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    token = "give a token that may read it: HF_TOKEN=..."
    if isinstance(error, errors.GatedRepoError):
        page = f"{at}/{'datasets/' if kind == 'dataset' else ''}{name.repo}"
        return Refused(
            f"{at} gives {name.repo} only to those with access",
            f"ask for it at {page}, and {token}",
            code="access_denied",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return Refused(
            f"{at} has {name.repo}, and no revision {name.revision!r} of it",
            "name a branch, tag or commit",
            code="not_found",
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        reason = f"{at} has no {CALLED[kind]} {name.repo} (not found, or private)"
        return Refused(reason, f"check the name; of a private one {token}", code="not_found")
    if status == 403:
        return Refused(f"{at} refuses {name.repo} ({first})", token, code="access_denied")
    if _is_silence(error):
        return Refused(
            f"{at} cannot be reached ({first})", "try again when it answers", silent=True, code="unreachable"
        )
    if len(names := list(subsets)) > 1 and name.subset not in names:
        some = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return Refused(
            f"{name.repo} has several subsets ({some})", f"name one: {name.repo}:{names[0]}", code="ambiguous_name"
        )
    return Refused(f"{name.repo} could not be loaded ({first})", "write a file or folder instead", code="unreadable")
