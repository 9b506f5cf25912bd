"""What every node must read: the rows that it tokenises, the model that it trains. Asked of those that are up before
anything starts, and of each that joins later, which an autoscaler may start at any time."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from rtrain import hub
from rtrain.cluster import preflight, supply
from rtrain.config import Config
from rtrain.data import records, tokens, unlabelled
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.network import model
from rtrain.runs import opening

LOCAL = "file://"
LOOK_EVERY_S = 1.0
PATIENCE_S = 15.0
"""Seconds for which a failure waits for the answers of nodes that have joined: a node that does not share the folder
explains it."""


class Shared(NamedTuple):
    """What every node reads."""

    source: records.Source
    weights: Path
    needed: dict[str, preflight.Files]
    """Files by the name that a user gives them, which nodes that join later must see too: the rows' until they are
    read, and the model's."""
    asked: frozenset[str]
    """Ids of the nodes that see all of it."""

    def once_read(self, asked: Collection[str]) -> "Shared":
        """What is needed when the rows are in their store; nodes of `asked` have been asked meanwhile."""
        of_model = {what: files for what, files in self.needed.items() if what == str(self.weights)}
        return self._replace(needed=of_model, asked=frozenset(asked))


def share(config: Config, source: records.Source, weights: Path, root: Path) -> Shared:
    """Rows and model folder as every node of the Ray cluster reads them; `root` holds the token stores.

    What came from the hub is copied under `root`, the packaged model only where some node lacks it, or where nodes may
    still come. Raises `UserError` where a node does not share `root`, or cannot read what the user named.
    """
    recipe, on_hub = config.recipe, opening.hub_names(config)
    for kind, name in on_hub.values():
        hub.keep(kind, name, root)
    if "model.name" in on_hub:
        weights = model.resolve(recipe.model.name, root)
    if any(kind == "dataset" for kind, _ in on_hub.values()):
        source = unlabelled.source(recipe, root)

    folder = {} if root in weights.parents else hub.model_files(weights)
    pieces = [piece for piece in source.pieces if piece.uri.startswith(LOCAL)]
    files = {piece.uri: Path(piece.uri.removeprefix(LOCAL)) for piece in pieces}
    # By size alone: what was read is told from its digest, and there may be gigabytes.
    wanted: dict[str, preflight.Files] = {uri: {path: (path.stat().st_size, None)} for uri, path in files.items()}
    needed = {str(weights): preflight.described(folder.values()), **wanted}
    asked = frozenset(preflight.nodes_up())
    lacking = preflight.shared(root, needed)

    problems: list[Problem] = []
    is_packaged = recipe.model.name == hub.PACKAGED and bool(folder)
    without = lacking.pop(str(weights), None)
    if is_packaged and (without or (asked and supply.autoscaler() is not None)):
        name = f"{hub.PACKAGED}@{model.PACKAGED_SHA256[:16]}"
        needed.pop(str(weights))
        weights = hub.keep_files(folder, root / hub.FOLDERS["model"] / name)
    elif without:
        problems.append(preflight.unreadable("model.name", str(weights), without))
    if lacking and not (root / ".tokens" / tokens.digest(recipe, source, weights)).is_dir():
        named = {"train": "data.path", unlabelled.ROLE: unlabelled.SETTING}
        roles = {piece.uri: named.get(piece.role, f"data.{piece.role}") for piece in pieces}
        problems += [preflight.unreadable(roles[uri], str(files[uri]), nodes) for uri, nodes in lacking.items()]
    if problems:
        raise ConfigError(problems)
    return Shared(source, weights, needed, asked)


class Joined:
    """While it is entered, asks each node that joins the cluster, and may get workers or data tasks, for what every
    node must read. A node that lacks it is told; where the work fails, that is why: see `refuse`.

    Entered again and again by one thread at a time.
    """

    def __init__(
        self,
        root: Path,
        needed: Mapping[str, preflight.Files],
        asked: Collection[str],
        needs: supply.Needs,
        say: Callable[[dict[str, Any]], None],
    ):
        """`root` holds the runs and their token stores; `asked`: the nodes that need not be asked."""
        self._root, self._needed, self._needs, self._say = root, needed, needs, say
        self.asked = set(asked)
        self._question: preflight.Question | None = None
        self._asking, self._since = frozenset[str](), 0.0
        self._problem, self._lack = "", frozenset[str]()
        """What is wrong, and the ids of the nodes that have been asked."""
        self._lock, self._done = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        self._done.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rtrain-joined")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Before the session ends: a thread must not be inside Ray's core then.
        self._done.set()
        self._thread.join()
        if self._question is not None:
            self._question.close()
            self._question = None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """`refuse` for what the block raises, while it is watched."""
        with self:
            try:
                yield
            except Exception as error:
                self.refuse(error)
                raise

    def refuse(self, error: Exception) -> None:
        """Raise `UserError` in place of `error` where a node that has joined lacks something; one that has joined and
        not answered yet has some seconds for it."""
        end = time.monotonic() + PATIENCE_S
        with suppress(Exception):  # the error that is there says more than that of a look
            self._look(0)
            while self._question is not None and not self._problem and time.monotonic() < end:
                self._look(0.2)
            if not self._lack & preflight.nodes_up().keys():
                return
        if self._problem:
            raise UserError(self._problem) from error

    def _watch(self) -> None:
        failed = False
        while not self._done.wait(LOOK_EVERY_S):
            try:
                self._look(0)
            except Exception as error:  # a node that goes, a storage that is away: the next look may do better
                if not failed:
                    failed = True
                    text = f"nodes that join are not asked for what they read ({type(error).__name__}: {error})"
                    self._say({"kind": "stage", "text": f"{text}; looking on"})

    def _look(self, seconds: float) -> None:
        with self._lock:
            if self._question is None:
                names = preflight.nodes_up()
                hosts = supply.up_by_id() if names.keys() - self.asked else {}
                joined = (names.keys() & hosts.keys()) - self.asked
                new = {node: names[node] for node in joined if self._is_for(hosts[node])}
                self.asked |= new.keys()
                self._asking, self._since = frozenset(new), time.monotonic()
                self._question = preflight.Question(self._root, new, self._needed) if new else None
            elif self._question.is_answered(seconds) or time.monotonic() - self._since > preflight.ANSWER_S:
                answers = self._question.answers()
                self._question.close()
                self._question = None
                told = [answers.unshared] if answers.unshared else []
                told += [
                    f"{what} cannot be read, or is another file, on {', '.join(names)}: put it on storage that every "
                    "node mounts (NFS, EFS)"
                    for what, names in answers.lacking.items()
                ]
                if told:
                    self._problem, self._lack = "; ".join(told), self._asking
                    self._say({"kind": "stage", "text": f"a node that has joined cannot take part: {self._problem}"})

    def _is_for(self, host: supply.Host) -> bool:
        return supply.has(host.labels, self._needs.labels) or supply.has(host.labels, self._needs.data_labels)
