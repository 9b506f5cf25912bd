"""Check that every live node can read the rows and the model, before a run starts."""

from pathlib import Path

from rtrain.cluster import capacity, preflight
from rtrain.config import Config
from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem
from rtrain.data import row_reader, unlabeled
from rtrain.data.store import builder as store_builder
from rtrain.models import builder as models_builder
from rtrain.runs import run_folders

LOCAL_PREFIX = "file://"


def check_nodes(
    config: Config, source: row_reader.DataSource, weights: Path, root: Path
) -> tuple[row_reader.DataSource, Path]:
    """Return the rows and the model folder that every node of the Ray cluster can read.

    Hub files are copied under `root`, the folder of the token stores. The packaged model is copied only if a node lacks
    it or nodes may still join.

    Raises:
        UserError: a node does not share `root`, or cannot read a file that the user named.

    """
    recipe, hub_sources = config.recipe, run_folders.hub_names(config)
    for kind, name in hub_sources.values():
        hub.save_copy(kind, name, root)
    if "model.name" in hub_sources:
        weights = models_builder.resolve_folder(recipe.model.name, root)
    if any(kind == "dataset" for kind, _ in hub_sources.values()):
        source = unlabeled.inspect_all_sources(recipe, root)

    model_files = {} if root in weights.parents else hub.list_model_files(weights)
    local_files = [piece for piece in source.files if piece.uri.startswith(LOCAL_PREFIX)]
    paths_by_uri = {piece.uri: Path(piece.uri.removeprefix(LOCAL_PREFIX)) for piece in local_files}
    # By size alone: files may have gigabytes, and their digests are checked when they are read.
    expected_files: dict[str, preflight.FileFingerprints] = {
        uri: {path: (path.stat().st_size, None)} for uri, path in paths_by_uri.items()
    }
    required_files = {str(weights): preflight.fingerprint_files(model_files.values()), **expected_files}
    unreadable_nodes = preflight.check_shared_folder(root, required_files)

    problems: list[Problem] = []
    is_packaged = recipe.model.name == hub.PACKAGED_MODEL and bool(model_files)
    nodes_without_model = unreadable_nodes.pop(str(weights), None)
    if is_packaged and (
        nodes_without_model or (preflight.live_node_names() and capacity.load_autoscaler_config() is not None)
    ):
        name = f"{hub.PACKAGED_MODEL}@{models_builder.PACKAGED_SHA256[:16]}"
        weights = hub.save_files(model_files, root / hub.COPY_FOLDERS["model"] / name)
    elif nodes_without_model:
        problems.append(preflight.unreadable_file_problem("model.name", str(weights), nodes_without_model))
    if unreadable_nodes and not (root / ".tokens" / store_builder.compute_digest(recipe, source, weights)).is_dir():
        setting_by_role = {"train": "data.path", unlabeled.ROLE: unlabeled.SETTING}
        setting_by_uri = {piece.uri: setting_by_role.get(piece.role, f"data.{piece.role}") for piece in local_files}
        problems += [
            preflight.unreadable_file_problem(setting_by_uri[uri], str(paths_by_uri[uri]), nodes)
            for uri, nodes in unreadable_nodes.items()
        ]
    if problems:
        raise ConfigError(problems)
    return source, weights
