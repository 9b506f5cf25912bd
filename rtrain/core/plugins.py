"""Plug-ins: Python modules of users that register tasks, losses, metrics, sources, trackers and augmentations.

A recipe names a plug-in in `plugins`, a command by `--plugin`, an installed package by an entry point of the group
`rtrain.plugins`. Its digest is that of its source files: all of a package, else one file.

Artifacts and run folders hold names and digests of plug-ins, never code or paths. A plug-in is loaded from the user's
own module path, from a file that the user names, or in Ray's workers from where the command has loaded it.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rtrain.core.errors import ConfigError, Problem, UserError

Kind = Literal["task", "loss", "metric", "source", "tracker", "augmentation"]
WEIGHT_KINDS: tuple[Kind, ...] = ("task", "loss", "metric", "augmentation")
"""Kinds that identify a run. A tracker changes no weight, and the rows of a source have a digest of their own."""
ENTRY_POINT_GROUP = "rtrain.plugins"
ENVIRONMENT_VARIABLE = "RTRAIN_PLUGINS"
"""The loaded plug-ins, as JSON, for the processes that Ray starts."""
SETTING = "plugins"
T = TypeVar("T")


class Registration(NamedTuple):
    value: Any
    module: str
    """The plug-in that registered it; the module where that was imported in another way."""
    output: str | None = None
    """The kind of answers that a metric scores."""


class Plugin(NamedTuple):
    """A loaded plug-in, as another process finds it."""

    name: str
    """Name of its module."""
    address: str
    """The file or the module name that the user gave."""
    digest: str
    source: str
    """The module's file, the `__init__.py` for a package."""


_registrations: dict[tuple[Kind, str], Registration] = {}
_plugins: dict[str, Plugin] = {}
_received: dict[str, Plugin] = {}
"""Plug-ins of the process that sent a recipe."""
_importing: list[str] = []
command_plugins: list[str] = []
"""Plug-ins of `--plugin`: every recipe of this process has them."""


# ------------------------------------------------------------------------------------------------------- registration


def register_task(name: str) -> Callable[[T], T]:
    """Register a class with the protocol `rtrain.tasks.base.Task`, such as a subclass of
    `rtrain.tasks.defaults.PooledTask` or of a task of rtrain."""
    return _make_decorator("task", name)


def register_loss(name: str) -> Callable[[T], T]:
    """Register `f(logits, targets) -> (sum, count)` as a value of `train.loss`.

    `logits` is a tensor [targets, outputs] of a micro-batch; `targets` is int64 [targets] for classes and tags, float
    [targets] for numbers, in standard deviations, and float [targets, labels] for several labels. `sum` is the loss
    summed over the targets. `count`, a whole number that does not depend on the logits, is its divisor. Both are added
    over the micro-batches and workers of a step.
    """
    return _make_decorator("loss", name)


def register_metric(name: str, output: str) -> Callable[[T], T]:
    """Register `f(targets, outputs, weights) -> float` as a score of tasks whose answers have the kind `output`.

    `targets` and `outputs` (`Task.row_results`) are arrays [rows] or [rows, n], or a `RaggedArray` if rows have several
    lengths. `weights` [rows] says how often a row counts: resamples for the confidence interval differ in it. A
    function that returns a `rtrain.metrics.bootstrap.SumMetric` is called once. The first metric of a new kind of
    answers ranks models; larger is better.
    """
    return _make_decorator("metric", name, output)


def register_source(scheme: str) -> Callable[[T], T]:
    """Register `f(address) -> iterator of dicts`, which yields the rows of `scheme://...`."""
    return _make_decorator("source", scheme)


def register_tracker(name: str) -> Callable[[T], T]:
    """Register a class with the protocol `rtrain.report.trackers.Tracker`, called without arguments, as a value of
    `report.trackers`."""
    return _make_decorator("tracker", name)


def register_augmentation(name: str) -> Callable[[T], T]:
    """Register `f(text, rng) -> text` for `augment.functions`; `rng`, a `numpy.random.Generator`, is its only source of
    randomness."""
    return _make_decorator("augmentation", name)


def _make_decorator(kind: Kind, name: str, output: str | None = None) -> Callable[[T], T]:
    def register(value: T) -> T:
        module = _importing[-1] if _importing else str(getattr(value, "__module__", ""))
        former = _registrations.get((kind, name))
        if module == "__main__":
            reason = f"the {kind} {name!r} is defined in a script or notebook, which Ray's workers cannot import"
            raise _make_error(None, reason, "write it to a file, such as my_ext.py, and import that", "not_a_module")
        if former and not _contains(module, former.module) and not _contains(former.module, module):
            reason = f"the {kind} {name!r} is registered by {former.module} already"
            raise _make_error(module, reason, "choose another name", "already_registered")
        _registrations[kind, name] = Registration(value, module, output)
        return value

    return register


def _contains(plugin: str, module: str) -> bool:
    return module == plugin or module.startswith(f"{plugin}.")


def _make_error(address: str | None, reason: str, fix: str, code: str) -> ConfigError:
    return ConfigError([Problem(SETTING, address, reason, fix, code=code)])


def list_names(kind: Kind) -> tuple[str, ...]:
    """Registered names of a kind."""
    return tuple(sorted(name for entry_kind, name in _registrations if entry_kind == kind))


def find_value(kind: Kind, name: str) -> Any:
    """The registered class or function, or None."""
    registration = _registrations.get((kind, name))
    return None if registration is None else registration.value


def list_metrics(output: str) -> list[tuple[str, Callable[..., Any]]]:
    """(name, function) of the metrics of a kind of answers, in the order of registration."""
    return [(name, entry.value) for (kind, name), entry in _registrations.items() if entry.output == output]


def find_owner(kind: Kind, name: str) -> str | None:
    """The plug-in that registered a name; None for a name of rtrain."""
    if (registration := _registrations.get((kind, name))) is None:
        return None
    return next((plugin for plugin in _plugins if _contains(plugin, registration.module)), registration.module)


# ------------------------------------------------------------------------------------------------------------ loading


def load_plugins(addresses: Iterable[str]) -> list[str]:
    """Import plug-ins by module name or file, and return their module names. Raises `ConfigError` with all problems."""
    names, problems = list[str](), list[Problem]()
    for address in addresses:
        try:
            names.append(_load(address).name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return names


def load_entry_points() -> None:
    """Load the plug-ins of installed packages. Raises `ConfigError`."""
    load_plugins(entry.module for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def unload_plugins() -> None:
    """Forget all plug-ins of this process, e.g. to load an edited file."""
    for name in list(_plugins):
        _forget(name)
    for entries in (_registrations, _received, command_plugins):
        entries.clear()
    os.environ.pop(ENVIRONMENT_VARIABLE, None)


def _forget(name: str) -> None:
    for key in [key for key, entry in _registrations.items() if _contains(name, entry.module)]:
        del _registrations[key]
    for module in [module for module in sys.modules if _contains(name, module)]:
        del sys.modules[module]
    _plugins.pop(name, None)


def is_path(address: str) -> bool:
    """Whether an address is a file and not a module's name."""
    return address.endswith(".py") or "/" in address


def _load(address: str) -> Plugin:
    name = Path(address).stem if is_path(address) else address
    file = os.path.abspath(os.path.expanduser(address)) if is_path(address) else ""
    if name in _plugins:
        if file and _plugins[name].source != file:
            reason = f"{_plugins[name].source} has the same name"
            raise _make_error(address, reason, "rename one of them", "already_registered")
        return _plugins[name]
    sent = None if file else _received.get(name) or _read_environment().get(name)
    # A file of the user is not on a worker's module path, unless Ray has sent it there (`list_upload_paths`).
    if sent and Path(sent.source).is_file() and "." not in name and _find_spec(name) is None:
        file = sent.source
    source = _check_file(address, name, Path(file)) if file else _find_module(name)
    digest = hash_files(source)
    if sent and digest != sent.digest:
        reason = f"{source} has the digest {digest}, and {sent.digest} where the command runs"
        fix = "install the same version on every node; after an edit, start the command again"
        raise _make_error(name, reason, fix, "other_plugin")
    _import_module(address, name, file, str(source))
    _plugins[name] = Plugin(name, file or name, digest, str(source))
    os.environ[ENVIRONMENT_VARIABLE] = json.dumps(list(_plugins.values()))
    return _plugins[name]


def hash_files(source: Path) -> str:
    """Digest of a plug-in's source files and their names, 16 hex digits of a SHA-256."""
    parts = (f"{file.relative_to(source.parent)} {hashlib.sha256(text).hexdigest()}" for file, text in _read(source))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(source: Path) -> Iterator[tuple[Path, bytes]]:
    files = sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]
    return ((file, file.read_bytes()) for file in files)


def _check_file(address: str, name: str, file: Path) -> Path:
    if not file.is_file():
        raise _make_error(address, "no such file", "write a .py file, or the name of a module", "not_found")
    spec = _find_spec(name) if name.isidentifier() else None
    if not name.isidentifier() or (spec and spec.origin != str(file)):
        reason = f"{spec.origin or 'Python'} has the module name {name}" if spec else "its name is no module name"
        raise _make_error(address, reason, "rename the file, e.g. my_ext.py", "wrong_name")
    return file


def _find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module. A folder without an `__init__.py`, such as a run of that name, does not count."""
    spec = importlib.util.find_spec(name)
    return spec if spec is not None and spec.origin is not None else None


def _find_module(name: str) -> Path:
    """The file of a module, which is not imported: an artifact or a run folder may name any module. Raises
    `ConfigError` for a module whose source does not name rtrain."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() and top != "__main__" else None
    paths = [Path(folder, *rest) for folder in (spec and spec.submodule_search_locations) or ()]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    files += [Path(spec.origin or "")] if spec and not rest else []
    source = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    if source is None:
        fix = f"install its package, or name its file: --plugin path/to/{name.rpartition('.')[2]}.py"
        raise _make_error(name, "no such module is installed", fix, "not_found")
    if not any(b"rtrain" in text for _, text in _read(source)):
        raise _make_error(name, "it registers nothing with rtrain", "correct the name", "registers_nothing")
    return source


def _import_module(address: str, name: str, file: str, source: str) -> None:
    _importing.append(name)
    try:
        if file and name not in sys.modules:
            spec: Any = importlib.util.spec_from_file_location(name, file)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        else:
            importlib.import_module(name)
    except Exception as error:
        _forget(name)
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {error} ({find_place(error, source)})"
        raise _make_error(address, reason, "correct the plug-in", "plugin_failed") from error
    finally:
        _importing.pop()


# ------------------------------------------------------------------------------------- other processes, runs, artifacts


def describe_plugins(names: Iterable[str]) -> list[Plugin]:
    """The plug-ins of these names. Raises `ConfigError` if one cannot be loaded."""
    return [_plugins[name] for name in load_plugins(names)]


def receive_plugins(plugins: Iterable[Plugin]) -> None:
    """Load the plug-ins of a recipe from another process. Raises `ConfigError`."""
    for plugin in plugins:
        _received[plugin.name] = plugin
        if plugin.name in _plugins and _plugins[plugin.name].digest != plugin.digest:  # loaded before an edit
            _forget(plugin.name)
    load_plugins(plugin.name for plugin in plugins)


def _read_environment() -> dict[str, Plugin]:
    return {plugin[0]: Plugin._make(plugin) for plugin in json.loads(os.environ.get(ENVIRONMENT_VARIABLE) or "[]")}


def list_upload_paths() -> list[str]:
    """The files and packages that workers on other machines need (`py_modules` of Ray)."""
    paths = []
    for plugin in _plugins.values():
        depth = plugin.name.count(".") + plugin.source.endswith("__init__.py")
        paths.append(str(Path(plugin.source).parents[depth - 1]) if depth else plugin.source)
    return list(dict.fromkeys(paths))


def format_options() -> list[str]:
    """The options `--plugin` of another command, for the plug-ins of this process that are files."""
    addresses = [plugin.address for plugin in _plugins.values() if is_path(plugin.address)]
    return [word for address in addresses for word in ("--plugin", address)]


def weight_digests(names: Iterable[str]) -> list[str]:
    """NAME@DIGEST of the plug-ins that identify a run (`WEIGHT_KINDS`)."""
    modules = {entry.module for (kind, _), entry in _registrations.items() if kind in WEIGHT_KINDS}
    plugins = describe_plugins(names)
    return [f"{name}@{digest}" for name, _, digest, _ in plugins if any(_contains(name, each) for each in modules)]


def owner_digests(kind: Kind, *names: str) -> dict[str, str]:
    """Digests of the plug-ins that registered the names, by the plug-in's name; empty for names of rtrain."""
    owners = (find_owner(kind, name) for name in names)
    return {plugin.name: plugin.digest for plugin in describe_plugins(owner for owner in owners if owner)}


def require_plugins(digests: Mapping[str, str], artifact: str) -> None:
    """Load the plug-ins of an artifact. Raises `UserError` if one is not installed.

    Another digest is a warning: an artifact is ready only if it reproduces its golden answers.
    """
    for name, digest in digests.items():
        if is_path(name):
            raise UserError(f"{artifact} names a file as a plug-in, {name}; no file is executed", code="plugin_path")
        try:
            actual = _load(name).digest
        except ConfigError as error:
            raise UserError(
                f"{artifact} needs the plug-in {name} of digest {digest}: {error.problems[0].reason}; install it, or "
                f"name its file: --plugin path/to/{name.rpartition('.')[2]}.py",
                code="missing_plugin",
            ) from None
        if actual != digest:
            text = "%s was made with the plug-in %s of digest %s; the digest here is %s"
            logging.getLogger("rtrain").warning(text, artifact, name, digest, actual)


# ------------------------------------------------------------------------------------------------- errors in a plug-in


@contextmanager
def attribute_errors() -> Iterator[None]:
    """Convert exceptions in the code of a plug-in to `UserError` with the user's file and line."""
    try:
        yield
    except Exception as error:
        place = find_place(error)
        # A micro-batch that exceeds the memory is made smaller and tried again.
        if place is None or isinstance(error, UserError) or "out of memory" in str(error):
            raise
        raise UserError(f"a plug-in failed: {type(error).__name__}: {error} ({place})", code="plugin_failed") from error


def find_place(error: BaseException, *sources: str) -> str | None:
    """The last line of a plug-in's code in a traceback, or None."""
    files = [*sources, *(plugin.source for plugin in _plugins.values())]
    prefixes = tuple(file.removesuffix("__init__.py") for file in files)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(prefixes)]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else None
