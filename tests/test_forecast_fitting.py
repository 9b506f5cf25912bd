"""Which way to hold a model is taken: the first whose memory fits where a worker has least of it."""

from pathlib import Path

import pytest

from rtrain import config
from rtrain.doctor.forecast import fitting
from rtrain.doctor.forecast.fitting import Pass
from rtrain.strategies import ways
from rtrain.strategies.ways import Way
from tests.tiny import make_encoder

MB, GB = 1e6, 1e9


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


# ------------------------------------------------------------------------------------------------------------ the needs


def test_every_way_is_foretold_by_the_model_s_own_pass(encoder: Path) -> None:
    recipe = config.load("intent").recipe
    passes = Pass(fitting.lengths(recipe, "cpu", 64), tokens_of_update=8192.0)
    found = dict(fitting.needs(recipe, encoder, ways.possible(recipe, encoder, 4), passes, 4, "cpu"))
    assert len(found) == 14  # it has two attention heads, and two layers
    staged = found[Way(pipeline=2)]
    assert staged.weights < 0.8 * found[Way()].weights
    plain, cut, both = (found[way] for way in (Way(), Way(tensor=2), Way(3, 2)))
    assert cut.weights < plain.weights
    assert cut.activations < plain.activations
    assert both.weights == pytest.approx(cut.weights / 2)
    assert {need.checkpoint for need in found.values()} == {plain.checkpoint}
    assert {way for way, need in found.items() if need.segment} == set()
    again = found[Way(gradient_checkpointing=True)]
    assert again.activations < plain.activations


def test_two_workers_of_a_host_share_a_segment_where_they_have_whole_models(encoder: Path) -> None:
    recipe = config.load("intent").recipe
    passes = Pass((32,) * 4)
    found = dict(fitting.needs(recipe, encoder, ways.ordered(2), passes, 2, "cpu"))
    assert {way for way, need in found.items() if need.segment} == {
        Way(shard, gradient_checkpointing=again) for shard in (0, 1) for again in (False, True)
    }
    on_gpu = dict(fitting.needs(recipe, encoder, [Way()], passes, 2, "gpu"))[Way()]
    assert (on_gpu.segment, on_gpu.checkpoint) == (0, 0)


@pytest.mark.parametrize("shard", [2, 3])
def test_of_offloaded_shares_only_what_is_gathered_is_on_a_gpu(encoder: Path, shard: int) -> None:
    found = []
    for offload in (False, True):
        recipe = config.load("intent", {"train.shard": shard, "train.offload": offload, "train.workers": 4}).recipe
        passes = Pass((32,) * 4, tokens_of_update=8192.0)
        [(_, need)] = fitting.needs(recipe, encoder, [Way(shard)], passes, 4, "gpu")
        found.append(need)
    here, away = found
    assert min(here.weights, here.gradients, here.optimizer) > 0
    assert (away.weights, away.gradients, away.optimizer) == (0, 0, 0)
    assert away.gathered == here.gathered > 0
    assert away.activations == pytest.approx(here.activations, rel=0.05)  # of two traces


def test_passes_are_as_long_as_the_recipe_allows() -> None:
    recipe = config.load("intent", {"train.tokens_per_pass": 1000}).recipe
    assert fitting.lengths(recipe, "cpu", 300) == (300,) * 3
    assert fitting.lengths(recipe, "cpu", 3000) == (3000,)
    assert Pass((100,), tokens_of_update=400.0).several(2)
    assert not Pass((100,), tokens_of_update=400.0).several(4)
