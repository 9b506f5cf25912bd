"""The gate on real artefacts: an honest int8 is promoted, each injected fault is refused for its own reason."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rtrain.compress import quantize
from rtrain.config import GateConfig, load_config
from rtrain.core.errors import ConfigError, UserError
from rtrain.evaluation import gate, gate_table
from rtrain.inference import artifact, predictor
from rtrain.report import baselines
from tests.conftest import Row, labelled_rows, write_rows
from tests.support import gating
from tests.support.gating import Gated
from tests.support.tiny import make_artifact
from tests.support.trained import ROWS, TEST_ROWS, Trained

pytestmark = pytest.mark.ray

LIMITS = load_config("intent", gating.QUICK).recipe.gate
QUICK = [word for name, value in gating.QUICK.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def gated(trained: Trained) -> Gated:
    return gating.quantized(trained, "gated")


@pytest.fixture(scope="module")
def file_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 labelled rows that the run has not seen."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", labelled_rows(ROWS + TEST_ROWS + 600)[-600:])


def against_float(
    candidate: Path, gated: Gated, data: Path | None = None, limits: GateConfig = LIMITS, **settings: Any
) -> dict[str, Any]:
    """A candidate beside the run's float artefact, on the run's test rows or those of a file."""
    keywords = {"data.path": str(data), **{f"data.{name}": value for name, value in settings.items()}} if data else {}
    config, _ = gate.prepare_request(candidate, gated.float_one, keywords)
    return gate.run_gate(config, limits)


def reasons(found: dict[str, Any]) -> str:
    return "; ".join(found["reasons"])


# ---------------------------------------------------------------------------------------------------------- the honest


def test_quantize_gates_what_it_makes(gated: Gated) -> None:
    result = artifact.read_artifact(gated.int8)
    assert result.gate is not None
    assert result.gate == json.loads(json.dumps(gated.report["gate"]))
    assert (result.gate["verdict"], result.gate["version"]) == ("promote", result.version)
    assert result.gate["baseline"]["version"] == artifact.read_artifact(gated.float_one).version
    assert (result.gate["rows"], result.gate["source"]) == (TEST_ROWS, "test rows of the run")
    values, tfidf = result.gate["rivals"]  # of the run's report: nothing was trained for it
    document = baselines.read_baselines(gated.run)
    assert document is not None
    (context,) = (item for item in document["baselines"] if item["name"] == tfidf["name"])
    assert (tfidf["score"], tfidf["ms"]) == (context["scores"]["test"], context["ms"])
    assert values["score"] == result.gate["headline"]["other"]
    assert quantize.format_report(gated.report)


def test_the_honest_int8_is_promoted_on_a_file_too(gated: Gated, file_of_rows: Path) -> None:
    result = against_float(gated.int8, gated, file_of_rows)
    assert result["verdict"] == "promote", reasons(result)
    assert (result["rows"], result["source"], result["is_student"]) == (600, str(file_of_rows), False)
    assert [item["column"] for item in result["slices"]].count("length") >= 2
    assert result["headline"]["other"] >= 0.99 * result["headline"]["first"]
    assert all(item["high"] >= item["low"] >= 0 and item["p99"] >= item["p50"] > 0 for item in result["latency"])
    sizes = [sum(path.stat().st_size for path in item.iterdir()) / 1e6 for item in (gated.int8, gated.float_one)]
    assert [result["megabytes"], result["baseline_megabytes"]] == pytest.approx(sizes, abs=0.01)
    assert set(result["host"]) == {"name", "processor", "int8", "cores", "threads", "python", "rtrain"}
    assert gate_table.format_verdict(result).splitlines()[-1].startswith("promote")


def test_answers_that_are_known_are_not_asked_for_again(gated: Gated) -> None:
    """What quantize hands over gives the verdict that the gate finds by itself."""
    values, handed = against_float(gated.int8, gated), gated.report["gate"]
    assert values["verdict"] == handed["verdict"] == "promote"
    for name in ("headline", "scores", "mcnemar", "slices", "rows"):
        assert json.loads(json.dumps(values[name])) == json.loads(json.dumps(handed[name]))


# ------------------------------------------------------------------------------------------------------ injected faults


def test_a_corrupted_layer_scale_is_refused(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    damaged = gating.damaged(gated.int8, tmp_path / "damaged", gating.scale_a_layer)
    result = against_float(damaged, gated)
    assert result["verdict"] == "refuse"
    assert result["headline"] is None  # it does not reproduce its golden answers, and is not asked
    # Also where it was corrupt before its golden answers were computed: then rows tell.
    created = gating.copy(gated.int8, tmp_path / "made", gating.by_files(gating.scale_a_layer))
    result = against_float(created, gated, file_of_rows)
    assert result["verdict"] == "refuse"
    assert result["headline"]["difference"] < 0 < result["mcnemar"]["lost"]


def test_swapped_labels_are_refused(gated: Gated, tmp_path: Path) -> None:
    swapped = gating.copy(gated.int8, tmp_path / "swapped", gating.swap_labels)
    result = against_float(swapped, gated)
    assert result["verdict"] == "refuse"
    assert result["headline"]["other"] <= 0.4  # of three labels, one stands where it was


def test_another_tokenizer_is_refused_and_told(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    other = gating.copy(gated.int8, tmp_path / "other", gating.turn_tokenizer)
    for rows in (None, file_of_rows):
        result = against_float(other, gated, rows)
        assert result["verdict"] == "refuse"
        assert result["differing_rows"] == result["rows"]


def test_an_engine_slower_than_float_is_refused(
    gated: Gated, file_of_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = predictor.OpenVinoEngine.logits

    def slow(engine: predictor.OpenVinoEngine, inputs: Any) -> Any:
        time.sleep(0.03)
        return quick(engine, inputs)

    monkeypatch.setattr(predictor.OpenVinoEngine, "logits", slow)
    result = against_float(gated.int8, gated, file_of_rows, LIMITS.model_copy(update={"min_speedup": 0.5}))
    assert result["verdict"] == "refuse"
    assert len(result["reasons"]) == len(result["latency"])
    assert all(item["high"] < 0.5 for item in result["latency"])


def test_good_overall_and_bad_in_one_slice_is_refused(gated: Gated, tmp_path: Path) -> None:
    """The word `parcel` is taken for another one; it stands in 30 of 1,200 rows, all of one channel."""
    change = gating.by_files(functools.partial(gating.mistake_a_word, word="parcel", other="password"))
    bad = gating.copy(gated.float_one, tmp_path / "bad", change)
    every = [row for row in labelled_rows(4000) if "with parcel" not in row[0]][-1170:]
    rows = [*(("web", row) for row in every), *(("fax", row) for row in parcels(30))]
    path = write_sliced(tmp_path / "rows.csv", rows)
    limits = LIMITS.model_copy(update={"max_score_drop": 0.06, "max_negative_flips": 0.06, "max_slice_drop": 0.1})
    result = against_float(bad, gated, path, limits, slices=["channel"])
    assert (result["verdict"], len(result["reasons"])) == ("refuse", 1), reasons(result)
    worst = result["slices"][0]
    assert (worst["column"], worst["value"]) == ("channel", "fax")
    assert result["headline"]["difference"] >= -0.06
    same = gating.copy(gated.float_one, tmp_path / "same")
    assert against_float(same, gated, path, limits, slices=["channel"])["verdict"] == "promote"


def parcels(count: int) -> list[Row]:
    """Rows that the run has not seen."""
    every = labelled_rows(ROWS + TEST_ROWS + 4000)[ROWS + TEST_ROWS :]
    return [row for row in every if row[0].startswith("please help with parcel ")][:count]


def write_sliced(path: Path, rows: list[tuple[str, Row]]) -> Path:
    lines = ["text,label,channel", *(f"{text},{label},{channel}" for channel, (text, label) in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------ held, or asked


def test_few_rows_hold_it(gated: Gated, tmp_path: Path) -> None:
    minority = write_rows(tmp_path / "few.csv", labelled_rows(ROWS + TEST_ROWS + 10)[-10:])
    result = against_float(gated.int8, gated, minority)
    assert (result["verdict"], result["rows"]) == ("hold", 10)


def test_a_base_that_was_held_back_hands_that_on(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    ungated = gating.copy(gated.int8, tmp_path / "ungated")
    same = gating.copy(gated.int8, tmp_path / "same")
    rows = {"data.path": str(file_of_rows)}
    config, _ = gate.prepare_request(same, ungated, rows)
    result = gate.run_gate(config, LIMITS)
    assert (result["verdict"], len(result["reasons"])) == ("hold", 1)
    gate.record_verdict(ungated, {**result, "verdict": "refuse", "reasons": ["it is worse"]})
    assert gate.run_gate(config, LIMITS)["verdict"] == "refuse"
    gate.record_verdict(
        ungated, {**result, "version": "0123456789ab", "verdict": "promote"}
    )  # the verdict on another one
    assert gate.run_gate(config, LIMITS)["verdict"] == "hold"


def test_a_float_base_that_was_refused_hands_that_on(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    """By its int8 copy what the gate has refused would be served all the same."""
    refused = gating.copy(gated.float_one, tmp_path / "refused")
    config, _ = gate.prepare_request(gated.int8, refused, {"data.path": str(file_of_rows)})
    document = {"version": artifact.read_artifact(refused).version, "verdict": "refuse", "reasons": ["it is worse"]}
    another = {**document, "version": "0123456789ab"}  # the verdict on another one
    for recorded, verdict in ((None, "promote"), (document, "refuse"), (another, "promote")):
        if recorded is not None:
            gate.record_verdict(refused, recorded)
        assert gate.run_gate(config, LIMITS)["verdict"] == verdict


def test_mistakes_are_told_from_verdicts(gated: Gated, tmp_path: Path) -> None:
    single = [gating.copy(gated.int8, tmp_path / name) for name in ("one", "two")]
    for ask, code in (
        (lambda: against_float(gated.float_one, gated), "duplicate_name"),
        (lambda: gate.prepare_request(single[0], single[1], {}), "no_rows"),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert error.value.code == code
    with pytest.raises(ConfigError) as refused:
        gate.prepare_request(gated.int8, gated.float_one, {"data.label": "intent"})
    assert [(problem.field, problem.code) for problem in refused.value.problems] == [
        ("data.label", "conflicting_settings")
    ]


def test_a_file_that_cannot_be_read_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    item, other = (make_artifact(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    (tmp_path / "rows.csv").write_text("text,kind\na,b\n")
    for name, field in (("nothing.csv", "data.path"), ("rows.csv", "data.label")):
        with pytest.raises(ConfigError) as error:
            gate.prepare_request(item, other, {"data.path": str(tmp_path / name)})
        assert field in {problem.field for problem in error.value.problems}


def test_limits_are_those_of_the_recipe(gated: Gated) -> None:
    _, limits = gate.prepare_request(gated.int8, gated.float_one, {"gate.max_megabytes": 0.001})
    assert limits.max_megabytes == 0.001
    result = against_float(gated.int8, gated, limits=LIMITS.model_copy(update={"max_megabytes": 0.001}))
    assert result["verdict"] == "refuse"
    assert len(result["reasons"]) == 1


# ------------------------------------------------------------------------------------------------------- the artefact


def test_a_verdict_is_written_and_nothing_else_changes(gated: Gated, tmp_path: Path) -> None:
    folder = gating.copy(gated.int8, tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    created = artifact.read_artifact(folder)
    result = against_float(folder, gated)
    gate.record_verdict(folder, result)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == set(artifact.FILES_REWRITTEN_BY_GATE)
    assert set(before) == set(after)
    told_of = artifact.read_artifact(folder)  # the manifest is that of the new files
    assert (told_of.version, told_of.golden) == (created.version, created.golden)
    assert told_of.gate == json.loads(json.dumps(result))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_verdict_goes_into_what_a_link_names(gated: Gated, tmp_path: Path) -> None:
    folder, link = gating.copy(gated.int8, tmp_path / "kept"), tmp_path / "current"
    link.symlink_to(folder)
    gate.record_verdict(link, against_float(folder, gated))
    assert (artifact.read_artifact(folder).gate or {})["verdict"] == "promote"
    assert link.readlink() == folder


def test_a_failed_record_leaves_the_artefact_as_it_was(gated: Gated, tmp_path: Path) -> None:
    folder = gating.copy(gated.int8, tmp_path / "kept")
    with pytest.raises(TypeError):
        gate.record_verdict(folder, {"verdict": object()})
    assert artifact.read_artifact(folder).gate is None
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# ----------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.slow
def test_the_verb_measures_all_and_its_exit_code_is_the_verdict(gated: Gated, tmp_path: Path) -> None:
    code, result = ask("gate", gated.int8, *QUICK, "--json")
    document = json.loads(result)
    assert (code, document["verdict"]) == (0, "promote"), reasons(document)
    assert document["memory_mb"] > 0
    assert document["baseline_memory_mb"] > 0
    values, tfidf = document["rivals"]
    assert values["score"] == document["headline"]["other"]
    assert tfidf["score"] > 0.5
    assert tfidf["ms"] > 0
    remaining = artifact.read_artifact(gated.int8).gate
    assert remaining is not None
    assert remaining["created_at"] == document["created_at"]
    assert remaining["rivals"] == document["rivals"]
    swapped = gating.copy(gated.int8, tmp_path / "swapped", gating.swap_labels)
    assert ask("gate", swapped, "--baseline", gated.run.folder, *QUICK)[0] == 1
    verdict = artifact.read_artifact(swapped).gate
    assert verdict is not None
    assert verdict["verdict"] == "refuse"
    assert ask("gate", swapped)[0] == 2


def ask(*words: object) -> tuple[int, str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "rtrain", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout
