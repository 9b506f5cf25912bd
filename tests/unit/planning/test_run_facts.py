"""Facts about a run before it starts: its rows, their tokens, its model's size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config as configuration
from rtrain.config import ModelConfig
from rtrain.core.errors import ConfigError, UserError
from rtrain.models import long_texts
from rtrain.planning import run_facts
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder
from tests.unit.planning.test_plan import configured


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def test_rows_are_counted_by_split_and_their_tokens_in_a_sample(tmp_path: Path, encoder: Path) -> None:
    rows = labelled_rows(600)
    recipe = configured(data__path=str(write_rows(tmp_path / "rows.csv", rows))).recipe
    row_stats = run_facts.measure_rows(recipe, encoder)
    assert row_stats.train + row_stats.valid + row_stats.test == 600
    assert row_stats.train == pytest.approx(480, abs=40)
    assert row_stats.valid == pytest.approx(60, abs=25)
    assert len(row_stats.window_tokens) == row_stats.train  # all of them are in the sample
    assert row_stats.windows_per_row == 1.0
    assert 3 < row_stats.tokens_per_row < 64
    assert row_stats.num_outputs == len({row[1] for row in rows})
    noisy = configured(data__path=recipe.data.path, augment__copies=9, augment__typo=0.1).recipe
    assert run_facts.measure_rows(noisy, encoder).train == 10 * row_stats.train


def test_rows_that_a_run_would_refuse_are_refused(tmp_path: Path, encoder: Path) -> None:
    def counted(rows: list[tuple[str, str]], **more: Any) -> run_facts.RowStats:
        return run_facts.measure_rows(
            configured(data__path=str(write_rows(tmp_path / "rows.csv", rows)), **more).recipe, encoder
        )

    some = [*labelled_rows(60), *((f"row {number}", "") for number in range(40))]
    for rows in ([], labelled_rows(3), some):
        with pytest.raises(UserError):
            counted(rows)
    assert counted(some, data__max_bad_rows=0.5).train > 30


def test_rows_that_are_not_read_are_as_long_as_is_said_or_as_the_blocks_of_the_task() -> None:
    intent, packed = configured(data__max_tokens=256).recipe, configuration.load_config("domain-adapt").recipe
    assert [run_facts.assumed_tokens_per_row(intent, tokens) for tokens in (None, 20, 999)] == [
        run_facts.DEFAULT_TOKENS_PER_ROW,
        20,
        256,
    ]
    assert run_facts.assumed_tokens_per_row(packed, None) == packed.data.max_tokens == 256
    with pytest.raises(ConfigError) as error:
        run_facts.assumed_tokens_per_row(packed, 64)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [("--tokens", "conflicting_settings")]


def test_rows_that_are_not_trained_on_are_not_counted(tmp_path: Path, encoder: Path) -> None:
    """Out-of-scope rows (`data.out_of_scope_label`), and rows that the task rejects."""
    rows = [*labelled_rows(300), *((f"nobody asked {number}", "other") for number in range(200)), ("no label", "")]
    path = str(write_rows(tmp_path / "rows.csv", rows))
    result = [
        run_facts.measure_rows(configured(data__path=path, **more).recipe, encoder)
        for more in ({}, {"data__out_of_scope_label": "other"})
    ]
    assert sum((result[0].train, result[0].valid, result[0].test)) == 500
    assert result[1].train == pytest.approx(240, abs=30)
    assert (result[1].valid, result[1].test) == (result[0].valid, result[0].test)
    assert result[0].num_outputs == result[1].num_outputs + 1


def test_a_model_s_sizes_have_several_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dim": 8, "n_layers": 2, "hidden_dim": 32, "vocab_size": 100}))
    shape = run_facts.read_encoder_shape(tmp_path)
    assert shape == run_facts.EncoderShape(8, 2, 32, 100)
    assert shape.weight_bytes == 4 * (800 + 2 * (4 * 64 + 2 * 256))
    (tmp_path / "config.json").write_text(json.dumps({"dim": 8, "vocab_size": 100}))
    with pytest.raises(ConfigError) as error:
        run_facts.read_encoder_shape(tmp_path)
    assert [problem.code for problem in error.value.problems] == ["unsupported_model"]


def test_products_are_those_of_the_matrices_and_of_attention() -> None:
    """MiniLM's 10.6 million weights, 128 tokens: 67 million FLOPs per token, a twentieth in attention."""
    flops = run_facts.EncoderShape(384, 6, 1536, 30522).flops(np.full(4, 128))
    assert flops / 512 == pytest.approx(6 * 10.6e6 + 12 * 6 * 384 * 128, rel=0.01)


MODERN = {
    **{"model_type": "modernbert", "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22},
    **{"vocab_size": 50368, "global_attn_every_n_layers": 3, "local_attention": 128},
}


def test_a_gated_model_that_mostly_reads_what_is_near_is_told_from_others(tmp_path: Path) -> None:
    """ModernBERT-base: 110.3 million weights in matrices, and 8 of 22 layers that read all. In the others a piece of
    128 tokens reads 64 more on either side."""
    (tmp_path / "config.json").write_text(json.dumps(MODERN))
    shape = run_facts.read_encoder_shape(tmp_path)
    assert (shape.is_gated, shape.attention_reach, shape.num_local_layers) == (True, 64, 14)
    matrices = shape.num_layers * shape.layer_bytes / 4
    assert matrices == pytest.approx(110.3e6, rel=0.001)
    read = 8 * 8192**2 + 14 * 8192 * 256
    assert shape.flops(np.array([8192])) == pytest.approx(3 * (2 * matrices * 8192 + 4 * 768 * read))
    # By name of each layer, as a model of fewer layers has them.
    few = {**MODERN, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(few))
    assert run_facts.read_encoder_shape(tmp_path).num_local_layers == 1


def test_attention_that_a_recipe_makes_local_is_so_in_each_layer(tmp_path: Path) -> None:
    """The recipe asks for it, or has made the model so before."""
    plain = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    full, local = (run_facts.read_encoder_shape(tmp_path, ModelConfig(attention_window=reach)) for reach in (None, 256))
    assert (full.num_local_layers, local.attention_reach, local.num_local_layers) == (0, 256, 2)
    long, short = np.array([4096]), np.array([64])
    assert full.flops(long) - local.flops(long) == 3 * 4 * 8 * 2 * 4096 * (4096 - 3 * 256)
    assert full.flops(short) == local.flops(short)
    (tmp_path / "config.json").write_text(json.dumps({**plain, long_texts.CONFIG_KEY: 256}))
    assert run_facts.read_encoder_shape(tmp_path) == local
