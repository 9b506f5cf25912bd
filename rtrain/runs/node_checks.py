"""What every node must read: the rows that it tokenises, the model that it trains. Asked of those that are up before
anything starts."""

from pathlib import Path

from rtrain.cluster import capacity, preflight
from rtrain.config import Config
from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem
from rtrain.data import row_reader, unlabeled
from rtrain.data.store import builder as store_builder
from rtrain.models import builder as models_builder
from rtrain.runs import run_folders

LOCAL = "file://"


def share(config: Config, source: row_reader.Source, weights: Path, root: Path) -> tuple[row_reader.Source, Path]:
    """Rows and model folder as every node of the Ray cluster reads them; `root` holds the token stores.

    What came from the hub is copied under `root`, the packaged model only where some node lacks it, or where nodes may
    still come. Raises `UserError` where a node does not share `root`, or cannot read what the user named.
    """
    recipe, on_hub = config.recipe, run_folders.hub_names(config)
    for kind, name in on_hub.values():
        hub.keep(kind, name, root)
    if "model.name" in on_hub:
        weights = models_builder.resolve(recipe.model.name, root)
    if any(kind == "dataset" for kind, _ in on_hub.values()):
        source = unlabeled.source(recipe, root)

    folder = {} if root in weights.parents else hub.model_files(weights)
    pieces = [piece for piece in source.pieces if piece.uri.startswith(LOCAL)]
    files = {piece.uri: Path(piece.uri.removeprefix(LOCAL)) for piece in pieces}
    # By size alone: what was read is told from its digest, and there may be gigabytes.
    wanted: dict[str, preflight.Files] = {uri: {path: (path.stat().st_size, None)} for uri, path in files.items()}
    needed = {str(weights): preflight.described(folder.values()), **wanted}
    lacking = preflight.shared(root, needed)

    problems: list[Problem] = []
    is_packaged = recipe.model.name == hub.PACKAGED and bool(folder)
    without = lacking.pop(str(weights), None)
    if is_packaged and (without or (preflight.nodes_up() and capacity.autoscaler() is not None)):
        name = f"{hub.PACKAGED}@{models_builder.PACKAGED_SHA256[:16]}"
        weights = hub.keep_files(folder, root / hub.FOLDERS["model"] / name)
    elif without:
        problems.append(preflight.unreadable("model.name", str(weights), without))
    if lacking and not (root / ".tokens" / store_builder.digest(recipe, source, weights)).is_dir():
        named = {"train": "data.path", unlabeled.ROLE: unlabeled.SETTING}
        roles = {piece.uri: named.get(piece.role, f"data.{piece.role}") for piece in pieces}
        problems += [preflight.unreadable(roles[uri], str(files[uri]), nodes) for uri, nodes in lacking.items()]
    if problems:
        raise ConfigError(problems)
    return source, weights
