"""Resize rehearsal: its cluster, its model, and its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rtrain.cluster import capacity
from rtrain.rehearsal import plan as plans, rehearse
from rtrain.rehearsal.faults import InjectedFault
from tests.support.refusals import refused_with
from tests.support.root import ROOT

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.parse_plan(TEXT)


@pytest.mark.parametrize(("workers", "nodes"), [(2, 2), (3, 2), (4, 3), (8, 5)])
def test_the_cluster_is_as_small_as_the_run_and_a_run_without_a_node_is_smaller(workers: int, nodes: int) -> None:
    tight = PLAN.shrink_to(workers, rehearse.DATA_CPUS)
    assert tight is not None
    [node_type] = tight.node_types
    assert (tight.max_workers, node_type.max_workers, node_type.resources) == (nodes, nodes, {"CPU": 2.0})
    request = capacity.ResourceRequest("cpu", rehearse.DATA_CPUS)
    assert tight.required_nodes(workers, request) == nodes
    fewer = replace(tight, node_types=(replace(node_type, max_workers=nodes - 1),), max_workers=nodes - 1)
    assert fewer.required_nodes(1, request) is not None
    assert fewer.required_nodes(workers, request) is None


def test_what_cannot_shrink_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    words = ["train", "intent", "--data", str(tmp_path / "rows.csv")]
    assert rehearse.check_request([*words, "--workers", "2"], TEXT, ("resize",))
    assert rehearse.check_request(words, TEXT, ("resize",))  # two by default
    unwatched = "\n".join(line for line in TEXT.splitlines() if "rtrain.cluster.spot_watcher" not in line)
    for arguments, text, also, code in (
        ([*words, "--set", "train.workers=1"], TEXT, "resize", "too_few_workers"),
        (words, TEXT, "grow", "unknown_name"),
        (words, unwatched, "resize", "cannot_resize"),
    ):
        with refused_with(code):
            rehearse.check_request(arguments, text, (also,))


def test_a_model_without_dropout_has_the_same_weights(tmp_path: Path) -> None:
    source, settings = tmp_path / "encoder", {"hidden_dropout_prob": 0.1, "drops": True, "hidden_size": 8}
    source.mkdir()
    (source / "config.json").write_text(json.dumps(settings))
    (source / "model.safetensors").touch()
    target = rehearse.copy_without_dropout(source, tmp_path / "out" / "model")
    assert json.loads((target / "config.json").read_text()) == {**settings, "hidden_dropout_prob": 0.0}
    assert json.loads((source / "config.json").read_text()) == settings
    assert (target / "model.safetensors").resolve() == (source / "model.safetensors").resolve()


def test_a_run_has_grown_once_it_has_trained_on_with_all_its_workers() -> None:
    log = [{"kind": "progress", "time": float(n), "step": n} for n in range(10)]
    notice = InjectedFault("notice", "worker-1", "worker", 2.0)
    assert not rehearse.has_trained_since(notice, log, 3)
    notice.full_size_at = 5.0
    assert [rehearse.has_trained_since(notice, log[:end], 3) for end in (8, 9)] == [False, True]
