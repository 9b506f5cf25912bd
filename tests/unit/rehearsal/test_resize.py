"""Resize rehearsal: its cluster, its model, and its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from rtrain.cluster import capacity
from rtrain.core.errors import ConfigError
from rtrain.rehearsal import plan as plans, rehearse, resize
from rtrain.rehearsal.faults import InjectedFault
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
PLAN = plans.parse_plan(TEXT)


@pytest.mark.parametrize(("workers", "nodes"), [(2, 2), (3, 2), (4, 3), (8, 5)])
def test_the_cluster_is_as_small_as_the_run_and_a_run_without_a_node_is_smaller(workers: int, nodes: int) -> None:
    tight = PLAN.shrink_to(workers, resize.DATA_CPUS)
    assert tight is not None
    assert (tight.max_workers, tight.node_types[0].max_workers, tight.node_types[0].resources) == (
        nodes,
        nodes,
        {"CPU": 2.0},
    )
    assert tight.required_nodes(workers, capacity.ResourceRequest("cpu", resize.DATA_CPUS)) == nodes
    fewer = replace(tight, node_types=(replace(tight.node_types[0], max_workers=nodes - 1),), max_workers=nodes - 1)
    assert fewer.required_nodes(1, capacity.ResourceRequest("cpu", resize.DATA_CPUS)) is not None
    assert fewer.required_nodes(workers, capacity.ResourceRequest("cpu", resize.DATA_CPUS)) is None


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
        with pytest.raises(ConfigError) as refused:
            rehearse.check_request(arguments, text, (also,))
        assert [problem.code for problem in refused.value.problems] == [code]


def test_a_model_without_dropout_has_the_same_weights(tmp_path: Path) -> None:
    source = make_encoder(tmp_path / "encoder")
    target = resize.copy_without_dropout(source, tmp_path / "out" / "model")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    changed = {name for name, value in before.items() if after[name] != value}
    assert changed == {"hidden_dropout_prob", "attention_probs_dropout_prob"}
    assert {after[name] for name in changed} == {0.0}
    models = [transformers.AutoModel.from_pretrained(folder, trust_remote_code=False) for folder in (source, target)]
    first, second = (model.state_dict() for model in models)
    assert all(first[name].equal(second[name]) for name in first)


def test_a_run_has_grown_once_it_has_trained_on_with_all_its_workers() -> None:
    log = [{"kind": "progress", "time": float(n), "step": n} for n in range(10)]
    notice = InjectedFault("notice", "worker-1", "worker", 2.0)
    assert not resize.has_trained_since(notice, log, 3)
    notice.full_size_at = 5.0
    assert [resize.has_trained_since(notice, log[:end], 3) for end in (8, 9)] == [False, True]
