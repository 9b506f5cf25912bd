"""Models and data sets by hub name: the commit of a name, its cached files, and a copy that every node can read.

A name is `owner/name` or `name`, with an optional `:subset` of a data set, and an optional `@revision` (a branch, a tag
or a commit) at the end.

Other nodes lack the user's cache, and a branch may be another commit tomorrow. So a run freezes the commit into its
configuration and keeps the files beside its token store, each with its SHA-256. Workers and tasks on any node read that
copy, and a resume needs no hub.
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

PACKAGED_MODEL = "minilm"
"""The model in a Python package. It has the form of a hub name, but is never fetched."""
RepoType = Literal["model", "dataset"]
COPY_FOLDERS: dict[RepoType, str] = {"model": ".models", "dataset": ".data"}
"""Folders of the copies under the run root, beside `.tokens`."""
REPO_TYPE_NAMES: dict[RepoType, str] = {"model": "model", "dataset": "data set"}
MODEL_FILE_PATTERNS = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.safetensors"),
    *("model.safetensors.index.json", "modules.json", "1_Pooling/config.json"),
    *("generation_config.json", "vocab.json", "*.spm", "spiece.model"),
)
"""Fetched files of a model: `modules.json` and the next describe the pooling of a sentence encoder, the last line is of
models that generate text."""
HUB_TIMEOUT_S = 10.0
"""Timeout of the first request to the hub. Its client would try six times, the last time after 23 s."""
MIN_HARDLINK_BYTES = 1 << 20
"""Larger files are linked if copy and cache share a disk, which costs no space. Smaller files are copied: a user may
edit them in place, and a link would change the cache too."""

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_NAME = re.compile(rf"(?P<repo>{_WORD}(?:/{_WORD})?)(?::(?P<subset>{_WORD}))?(?:@(?P<revision>[A-Za-z0-9._/-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A hub name in its parts."""

    repo: str
    subset: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repo}{subset}" + (f"@{self.revision}" if self.revision else "")


class HubError(UserError):
    """The hub does not have the repository, refuses access, or does not answer (`is_unreachable`).

    `reason` and `fix` are meant for a `Problem`.
    """

    def __init__(self, reason: str, fix: str, is_unreachable: bool = False, *, code: str = "refused"):
        self.reason, self.fix, self.is_unreachable = reason, fix, is_unreachable
        super().__init__(f"{reason}; {fix}", code=code)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return partial(type(self), code=self.code), (self.reason, self.fix, self.is_unreachable)  # from a Ray worker


def parse_hub_name(text: str) -> HubName | None:
    """The parts of a hub name, or None if the text does not have the form of one."""
    match = _HUB_NAME.fullmatch(text)
    return HubName(**match.groupdict()) if match else None


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a hub name, and no file or folder here has that path."""
    return parse_hub_name(text) is not None and not Path(text).exists()


def matches_pinned(requested: str, pinned_text: str) -> bool:
    """Whether a resumed run with `requested` in its settings continues with `pinned_text`, which has a commit.

    True if the names are equal and `requested` has no revision, or a branch or tag: these keep the commit of the run's
    start. A commit in `requested` is another request.
    """
    requested_name, pinned_name = parse_hub_name(requested), parse_hub_name(pinned_text)
    if requested_name is None or pinned_name is None or not _COMMIT.fullmatch(pinned_name.revision or ""):
        return False
    is_same_repo = (requested_name.repo, requested_name.subset) == (pinned_name.repo, pinned_name.subset)
    return is_same_repo and (requested_name.revision is None or not _COMMIT.fullmatch(requested_name.revision))


def pin_revision(repo_type: RepoType, hub_name: str) -> str:
    """The name with the commit that it means now. Raises `HubError`."""
    return str(_pin(repo_type, hub_name))


def fetch_model(hub_name: str, root: Path | None = None) -> Path:
    """The folder of a hub model: its copy under `root`, or else in this machine's cache, where it is fetched if needed.

    Raises `HubError`.
    """
    import huggingface_hub

    name = _pin("model", hub_name)
    if name.subset:
        raise HubError("a model has no subsets", f"write {name.repo}", code="conflicting_settings")
    if copied_folder := _find_copy("model", name, root):
        return copied_folder
    connection_error: HubError | None = None
    try:
        _resolve_commit("model", name.repo, name.revision, force_query=True)
    except HubError as refused:
        if not refused.is_unreachable:
            raise
        connection_error = refused
    cached_file = huggingface_hub.try_to_load_from_cache(name.repo, MODEL_FILE_PATTERNS[0], revision=name.revision)
    if not connection_error and not isinstance(cached_file, str):
        _report_fetch("model", name)
    try:
        snapshot_folder = huggingface_hub.snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(MODEL_FILE_PATTERNS),
            local_files_only=connection_error is not None,
        )
    except Exception as error:  # the client's errors share no base class
        raise connection_error or _make_hub_error("model", name, error) from None
    return Path(snapshot_folder)


def fetch_dataset(hub_name: str, root: Path | None = None) -> dict[str, list[Path]]:
    """The Arrow files of each split of a hub data set, sorted.

    They are those of its copy under `root`, or else in this machine's cache, where it is fetched if needed. Raises
    `HubError`.
    """
    name = _pin("dataset", hub_name)
    if copied_folder := _find_copy("dataset", name, root):
        files_by_split: dict[str, list[Path]] = {}
        for path in sorted(copied_folder.glob("*.arrow")):
            files_by_split.setdefault(path.name.rpartition("-")[0], []).append(path)
        return files_by_split
    return _load_dataset_files(name)


def push_files(repo: str, files: Mapping[str, Path | bytes], message: str, *, is_private: bool) -> str:
    """Make one commit that leaves exactly these files in a model repository, and return its URL.

    The token is that of the client (HF_TOKEN, or `hf auth login`). A new repository is private with `is_private`; an
    existing one keeps its visibility. Raises `HubError`.
    """
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=is_private, exist_ok=True)
        stale_names = set(api.list_repo_files(repo)) - files.keys() - {".gitattributes"}
        operations = [CommitOperationDelete(path_in_repo=name) for name in sorted(stale_names)]
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=source) for name, source in files.items()]
        return str(api.create_commit(repo, [*operations, *additions], commit_message=message).commit_url)
    except Exception as error:  # the client's errors share no base class
        raise _make_push_error(repo, error) from None


def read_model_card(repo: str) -> str | None:
    """Return README.md of a model repository, or None if it is missing. Raises `HubError`."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, "README.md")).read_text(encoding="utf-8")
    except huggingface_hub.errors.LocalEntryNotFoundError:  # no answer; its base class means a missing file
        reason = f"{_hub_endpoint()} cannot be reached"
        raise HubError(reason, "try again when it answers", is_unreachable=True, code="unreachable") from None
    except (huggingface_hub.errors.EntryNotFoundError, huggingface_hub.errors.RepositoryNotFoundError):
        return None
    except Exception as error:
        raise _make_push_error(repo, error) from None


def _make_push_error(repo: str, error: Exception) -> HubError:
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
        reason = f"{_hub_endpoint()} does not let this user write the model {repo}"
        return HubError(reason, "log in with write access: hf auth login, or HF_TOKEN=...", code="access_denied")
    return _make_hub_error("model", HubName(repo), error)


def save_copy(repo_type: RepoType, hub_name: str, root: Path) -> None:
    """Copy the files of a hub name to their place under `root`, unless they are there. Raises `HubError`."""
    name = _pin(repo_type, hub_name)
    if _find_copy(repo_type, name, root):
        return
    if repo_type == "model":
        files = list_model_files(fetch_model(hub_name))
    else:
        splits = fetch_dataset(hub_name).items()
        files = {f"{split}-{number:05}.arrow": path for split, paths in splits for number, path in enumerate(paths)}
    save_files(files, copy_folder(repo_type, name, root))


def list_model_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder that rtrain reads, by their names in it. The folder may hold the same weights in
    other formats too."""
    paths = sorted(path for pattern in MODEL_FILE_PATTERNS for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): path for path in paths}


def save_files(files: Mapping[str, Path], final_path: Path) -> Path:
    """Make the folder `final_path` of these files, given by their names in it, and a manifest; returns the folder.

    The folder is complete or does not exist. Raises `UserError` if it exists and is damaged.
    """
    if final_path.is_dir():
        return _verify_copy(final_path)
    atomic_write.remove_stale_drafts(final_path)
    draft = atomic_write.Draft(final_path)
    try:
        for name, path in files.items():
            target = draft.folder / name
            target.parent.mkdir(exist_ok=True)
            _link_or_copy(path.resolve(), target)
        (draft.folder / atomic_write.LOCK_FILE).unlink()
        manifest.write_manifest(draft.folder)
        try:
            atomic_write.publish_folder(draft.folder, final_path)
        except OSError:
            if not final_path.is_dir():
                raise
            # Another run has made the same folder meanwhile.
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    return _verify_copy(final_path)


def _link_or_copy(path: Path, target: Path) -> None:
    if path.stat().st_size > MIN_HARDLINK_BYTES:
        with suppress(OSError):  # another disk, or one without links
            target.hardlink_to(path)
            return
    shutil.copyfile(path, target)


def copy_folder(repo_type: RepoType, name: HubName, root: Path) -> Path:
    """Where the copy of a hub name lies under a run root."""
    return root / COPY_FOLDERS[repo_type] / str(name).replace("/", "--").replace(":", "--")


def _find_copy(repo_type: RepoType, name: HubName, root: Path | None) -> Path | None:
    folder = None if root is None else copy_folder(repo_type, name, root)
    return _verify_copy(folder) if folder and folder.is_dir() else None


@lru_cache
def _verify_copy(folder: Path) -> Path:
    """The folder, if it matches its manifest. It is read once per process: it may hold gigabytes, and a run asks
    several times."""
    if problem := manifest.find_damage(folder):
        raise UserError(f"{folder}: {problem}; remove the folder, and it is fetched again", code="damaged_copy")
    return folder


def _pin(repo_type: RepoType, text: str) -> HubName:
    """Parse a hub name and resolve its commit."""
    name = parse_hub_name(text)
    if name is None:
        raise HubError(f"{text!r} is no hub name", "write owner/name, or owner/name@revision", code="invalid_name")
    return name._replace(revision=_resolve_commit(repo_type, name.repo, name.revision))


@lru_cache
def _resolve_commit(repo_type: RepoType, repo: str, revision: str | None, force_query: bool = False) -> str:
    """The commit that a revision means; the hub is asked once per process.

    If the hub does not answer, it is the commit of the hub's last answer. A `revision` that is a commit is returned
    without a question, unless `force_query` is set.
    """
    import huggingface_hub

    if revision and _COMMIT.fullmatch(revision) and not force_query:
        return revision
    api = huggingface_hub.HfApi()
    try:
        api.repo_info(repo, repo_type=repo_type, revision=revision, timeout=HUB_TIMEOUT_S)
        return str(
            api.resolve_revision(repo, repo_type=repo_type, revision=revision).resolved
        )  # this also remembers it
    except Exception as error:
        if not force_query and _is_unreachable(error):
            with suppress(huggingface_hub.errors.RevisionResolutionError):
                resolution = api.resolve_revision(repo, repo_type=repo_type, revision=revision, local_files_only=True)
                return str(resolution.resolved)
        raise _make_hub_error(repo_type, HubName(repo, None, revision), error) from None


@lru_cache
def _load_dataset_files(name: HubName) -> dict[str, list[Path]]:
    import datasets
    import huggingface_hub

    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        _resolve_commit("dataset", name.repo, name.revision, force_query=True)
        _report_fetch("dataset", name)
    try:
        dataset_dict = datasets.load_dataset(name.repo, name.subset, revision=name.revision, trust_remote_code=False)
    except Exception as error:
        raise _make_hub_error("dataset", name, error, _list_subsets(name)) from None
    files_by_split = {
        split: [Path(entry["filename"]) for entry in rows.cache_files] for split, rows in sorted(dataset_dict.items())
    }
    # If anything fails, `datasets` takes the latest files in its cache, of whatever commit.
    if not all(name.revision in path.parts for paths in files_by_split.values() for path in paths):
        reason = f"the cache of `datasets` holds another commit of {name.repo} than {name.revision}"
        raise HubError(reason, "try again where the hub answers", code="other_commit")
    return files_by_split


def _list_subsets(name: HubName) -> list[str]:
    import datasets

    with suppress(Exception):
        return list(datasets.get_dataset_config_names(name.repo, revision=name.revision))
    return []


def _report_fetch(repo_type: RepoType, name: HubName) -> None:
    sys.stderr.write(f"{REPO_TYPE_NAMES[repo_type]} {name.repo}: fetched from {_hub_endpoint()}\n")


def _hub_endpoint() -> str:
    import huggingface_hub

    return str(huggingface_hub.constants.ENDPOINT)


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub did not answer at all, or answered that it cannot now (status 500 and above)."""
    import huggingface_hub

    if isinstance(error, huggingface_hub.errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith("httpx")


def _make_hub_error(repo_type: RepoType, name: HubName, error: Exception, subsets: Iterable[str] = ()) -> HubError:
    from huggingface_hub import errors

    endpoint = _hub_endpoint()
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    subset_names, token_hint = list(subsets), "set a token with access: HF_TOKEN=..."
    if isinstance(error, errors.GatedRepoError):
        page = f"{endpoint}/{'datasets/' if repo_type == 'dataset' else ''}{name.repo}"
        reason, code = f"{endpoint} gives {name.repo} only to those with access", "access_denied"
        fix = f"ask for it at {page}, and {token_hint}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, code = f"{endpoint} has {name.repo}, and no revision {name.revision!r} of it", "not_found"
        fix = "name a branch, tag or commit"
    elif isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        reason = f"{endpoint} has no {REPO_TYPE_NAMES[repo_type]} {name.repo} (not found, or private)"
        fix, code = f"check the name; of a private one {token_hint}", "not_found"
    elif status == 403:
        reason, fix, code = f"{endpoint} refuses {name.repo} ({first_line})", token_hint, "access_denied"
    elif _is_unreachable(error):
        reason, code = f"{endpoint} cannot be reached ({first_line})", "unreachable"
        fix = "try again when it answers"
    elif len(subset_names) > 1 and name.subset not in subset_names:
        more = f" and {len(subset_names) - 20} more" if len(subset_names) > 20 else ""
        reason = f"{name.repo} has several subsets ({', '.join(subset_names[:20])}{more})"
        fix, code = f"name one: {name.repo}:{subset_names[0]}", "ambiguous_name"
    else:
        reason, code = f"{name.repo} could not be loaded ({first_line})", "unreadable"
        fix = "write a file or folder instead"
    return HubError(reason, fix, is_unreachable=code == "unreachable", code=code)
