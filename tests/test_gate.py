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
from rtrain.config import Gate, load
from rtrain.core.errors import ConfigError, UserError
from rtrain.evaluation import gate, gate_table
from rtrain.inference import artifact, predictor
from rtrain.report import baselines
from tests import gating
from tests.conftest import Row, labelled_rows, write_rows
from tests.gating import Gated
from tests.tiny import make_artifact
from tests.trained import ROWS, TEST_ROWS, Trained

pytestmark = pytest.mark.ray

LIMITS = load("intent", gating.QUICK).recipe.gate
QUICK = [word for name, value in gating.QUICK.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def gated(trained: Trained) -> Gated:
    return gating.quantized(trained, "gated")


@pytest.fixture(scope="module")
def file_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 labelled rows that the run has not seen."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", labelled_rows(ROWS + TEST_ROWS + 600)[-600:])


def against_float(
    candidate: Path, gated: Gated, data: Path | None = None, limits: Gate = LIMITS, **settings: Any
) -> dict[str, Any]:
    """A candidate beside the run's float artefact, on the run's test rows or those of a file."""
    named = {"data.path": str(data), **{f"data.{name}": value for name, value in settings.items()}} if data else {}
    chosen, _ = gate.find(candidate, gated.float_one, named)
    return gate.run(chosen, limits)


def reasons(found: dict[str, Any]) -> str:
    return "; ".join(found["reasons"])


# ---------------------------------------------------------------------------------------------------------- the honest


def test_quantize_gates_what_it_makes(gated: Gated) -> None:
    found = artifact.read(gated.int8)
    assert found.gate is not None
    assert found.gate == json.loads(json.dumps(gated.report["gate"]))
    assert (found.gate["verdict"], found.gate["version"]) == ("promote", found.version)
    assert found.gate["against"]["version"] == artifact.read(gated.float_one).version
    assert (found.gate["rows"], found.gate["source"]) == (TEST_ROWS, "test rows of the run")
    own, tfidf = found.gate["rivals"]  # of the run's report: nothing was trained for it
    document = baselines.read(gated.run)
    assert document is not None
    (known,) = (one for one in document["baselines"] if one["name"] == tfidf["name"])
    assert (tfidf["score"], tfidf["ms"]) == (known["scores"]["test"], known["ms"])
    assert own["score"] == found.gate["headline"]["other"]
    assert quantize.report_text(gated.report)


def test_the_honest_int8_is_promoted_on_a_file_too(gated: Gated, file_of_rows: Path) -> None:
    found = against_float(gated.int8, gated, file_of_rows)
    assert found["verdict"] == "promote", reasons(found)
    assert (found["rows"], found["source"], found["student"]) == (600, str(file_of_rows), False)
    assert [one["column"] for one in found["slices"]].count("length") >= 2
    assert found["headline"]["other"] >= 0.99 * found["headline"]["first"]
    assert all(one["high"] >= one["low"] >= 0 and one["p99"] >= one["p50"] > 0 for one in found["latency"])
    sizes = [sum(path.stat().st_size for path in one.iterdir()) / 1e6 for one in (gated.int8, gated.float_one)]
    assert [found["megabytes"], found["base_megabytes"]] == pytest.approx(sizes, abs=0.01)
    assert set(found["host"]) == {"name", "processor", "int8", "cores", "threads", "python", "rtrain"}
    assert gate_table.text(found).splitlines()[-1].startswith("promote")


def test_answers_that_are_known_are_not_asked_for_again(gated: Gated) -> None:
    """What quantize hands over gives the verdict that the gate finds by itself."""
    own, handed = against_float(gated.int8, gated), gated.report["gate"]
    assert own["verdict"] == handed["verdict"] == "promote"
    for name in ("headline", "scores", "mcnemar", "slices", "rows"):
        assert json.loads(json.dumps(own[name])) == json.loads(json.dumps(handed[name]))


# ------------------------------------------------------------------------------------------------------ injected faults


def test_a_corrupted_layer_scale_is_refused(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    damaged = gating.damaged(gated.int8, tmp_path / "damaged", gating.scale_a_layer)
    found = against_float(damaged, gated)
    assert found["verdict"] == "refuse"
    assert found["headline"] is None  # it does not reproduce its golden answers, and is not asked
    # Also where it was corrupt before its golden answers were computed: then rows tell.
    made = gating.copy(gated.int8, tmp_path / "made", gating.by_files(gating.scale_a_layer))
    found = against_float(made, gated, file_of_rows)
    assert found["verdict"] == "refuse"
    assert found["headline"]["difference"] < 0 < found["mcnemar"]["lost"]


def test_swapped_labels_are_refused(gated: Gated, tmp_path: Path) -> None:
    swapped = gating.copy(gated.int8, tmp_path / "swapped", gating.swap_labels)
    found = against_float(swapped, gated)
    assert found["verdict"] == "refuse"
    assert found["headline"]["other"] <= 0.4  # of three labels, one stands where it was


def test_another_tokenizer_is_refused_and_told(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    other = gating.copy(gated.int8, tmp_path / "other", gating.turn_tokenizer)
    for rows in (None, file_of_rows):
        found = against_float(other, gated, rows)
        assert found["verdict"] == "refuse"
        assert found["read_otherwise"] == found["rows"]


def test_an_engine_slower_than_float_is_refused(
    gated: Gated, file_of_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = predictor.OpenVino.logits

    def slow(engine: predictor.OpenVino, inputs: Any) -> Any:
        time.sleep(0.03)
        return quick(engine, inputs)

    monkeypatch.setattr(predictor.OpenVino, "logits", slow)
    found = against_float(gated.int8, gated, file_of_rows, LIMITS.model_copy(update={"speedup": 0.5}))
    assert found["verdict"] == "refuse"
    assert len(found["reasons"]) == len(found["latency"])
    assert all(one["high"] < 0.5 for one in found["latency"])


def test_good_overall_and_bad_in_one_slice_is_refused(gated: Gated, tmp_path: Path) -> None:
    """The word `parcel` is taken for another one; it stands in 30 of 1,200 rows, all of one channel."""
    change = gating.by_files(functools.partial(gating.mistake_a_word, word="parcel", other="password"))
    bad = gating.copy(gated.float_one, tmp_path / "bad", change)
    every = [row for row in labelled_rows(4000) if "with parcel" not in row[0]][-1170:]
    rows = [*(("web", row) for row in every), *(("fax", row) for row in parcels(30))]
    path = write_sliced(tmp_path / "rows.csv", rows)
    limits = LIMITS.model_copy(update={"loss": 0.06, "lost": 0.06, "slice_loss": 0.1})
    found = against_float(bad, gated, path, limits, slices=["channel"])
    assert (found["verdict"], len(found["reasons"])) == ("refuse", 1), reasons(found)
    worst = found["slices"][0]
    assert (worst["column"], worst["value"]) == ("channel", "fax")
    assert found["headline"]["difference"] >= -0.06
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
    few = write_rows(tmp_path / "few.csv", labelled_rows(ROWS + TEST_ROWS + 10)[-10:])
    found = against_float(gated.int8, gated, few)
    assert (found["verdict"], found["rows"]) == ("hold", 10)


def test_a_base_that_was_held_back_hands_that_on(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    ungated = gating.copy(gated.int8, tmp_path / "ungated")
    same = gating.copy(gated.int8, tmp_path / "same")
    rows = {"data.path": str(file_of_rows)}
    chosen, _ = gate.find(same, ungated, rows)
    found = gate.run(chosen, LIMITS)
    assert (found["verdict"], len(found["reasons"])) == ("hold", 1)
    gate.record(ungated, {**found, "verdict": "refuse", "reasons": ["it is worse"]})
    assert gate.run(chosen, LIMITS)["verdict"] == "refuse"
    gate.record(ungated, {**found, "version": "0123456789ab", "verdict": "promote"})  # the verdict on another one
    assert gate.run(chosen, LIMITS)["verdict"] == "hold"


def test_a_float_base_that_was_refused_hands_that_on(gated: Gated, file_of_rows: Path, tmp_path: Path) -> None:
    """By its int8 copy what the gate has refused would be served all the same."""
    refused = gating.copy(gated.float_one, tmp_path / "refused")
    chosen, _ = gate.find(gated.int8, refused, {"data.path": str(file_of_rows)})
    assert gate.run(chosen, LIMITS)["verdict"] == "promote"  # a float model needs no verdict of its own
    document = {"version": artifact.read(refused).version, "verdict": "refuse", "reasons": ["accuracy 0.80 is less"]}
    gate.record(refused, document)
    assert gate.run(chosen, LIMITS)["verdict"] == "refuse"
    gate.record(refused, {**document, "version": "0123456789ab"})  # the verdict on another one
    assert gate.run(chosen, LIMITS)["verdict"] == "promote"


def test_mistakes_are_told_from_verdicts(gated: Gated, tmp_path: Path) -> None:
    alone = [gating.copy(gated.int8, tmp_path / name) for name in ("one", "two")]
    for ask, code in (
        (lambda: against_float(gated.float_one, gated), "named_twice"),
        (lambda: gate.find(alone[0], alone[1], {}), "no_rows"),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert error.value.code == code
    with pytest.raises(ConfigError) as refused:
        gate.find(gated.int8, gated.float_one, {"data.label": "intent"})
    assert [(one.field, one.code) for one in refused.value.problems] == [("data.label", "conflicting_settings")]


def test_a_file_that_cannot_be_read_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    one, other = (make_artifact(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    (tmp_path / "rows.csv").write_text("text,kind\na,b\n")
    for name, field in (("nothing.csv", "data.path"), ("rows.csv", "data.label")):
        with pytest.raises(ConfigError) as error:
            gate.find(one, other, {"data.path": str(tmp_path / name)})
        assert field in {one.field for one in error.value.problems}


def test_limits_are_those_of_the_recipe(gated: Gated) -> None:
    _, limits = gate.find(gated.int8, gated.float_one, {"gate.megabytes": 0.001})
    assert limits.megabytes == 0.001
    found = against_float(gated.int8, gated, limits=LIMITS.model_copy(update={"megabytes": 0.001}))
    assert found["verdict"] == "refuse"
    assert len(found["reasons"]) == 1


# ------------------------------------------------------------------------------------------------------- the artefact


def test_a_verdict_is_written_and_nothing_else_changes(gated: Gated, tmp_path: Path) -> None:
    folder = gating.copy(gated.int8, tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = artifact.read(folder)
    found = against_float(folder, gated)
    gate.record(folder, found)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == set(artifact.REWRITTEN)
    assert set(before) == set(after)
    told_of = artifact.read(folder)  # the manifest is that of the new files
    assert (told_of.version, told_of.golden) == (made.version, made.golden)
    assert told_of.gate == json.loads(json.dumps(found))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_verdict_goes_into_what_a_link_names(gated: Gated, tmp_path: Path) -> None:
    folder, link = gating.copy(gated.int8, tmp_path / "kept"), tmp_path / "current"
    link.symlink_to(folder)
    gate.record(link, against_float(folder, gated))
    assert (artifact.read(folder).gate or {})["verdict"] == "promote"
    assert link.readlink() == folder


def test_a_failed_record_leaves_the_artefact_as_it_was(gated: Gated, tmp_path: Path) -> None:
    folder = gating.copy(gated.int8, tmp_path / "kept")
    with pytest.raises(TypeError):
        gate.record(folder, {"verdict": object()})
    assert artifact.read(folder).gate is None
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# ----------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.slow
def test_the_verb_measures_all_and_its_exit_code_is_the_verdict(gated: Gated, tmp_path: Path) -> None:
    code, found, _ = ask("gate", gated.int8, *QUICK, "--json")
    document = json.loads(found)
    assert (code, document["verdict"]) == (0, "promote"), reasons(document)
    assert document["memory_mb"] > 0
    assert document["base_memory_mb"] > 0
    own, tfidf = document["rivals"]
    assert own["score"] == document["headline"]["other"]
    assert tfidf["score"] > 0.5
    assert tfidf["ms"] > 0
    kept = artifact.read(gated.int8).gate
    assert kept is not None
    assert kept["made"] == document["made"]
    assert kept["rivals"] == document["rivals"]
    swapped = gating.copy(gated.int8, tmp_path / "swapped", gating.swap_labels)
    code, _, _ = ask("gate", swapped, "--against", gated.run.folder, *QUICK)
    assert code == 1
    verdict = artifact.read(swapped).gate
    assert verdict is not None
    assert verdict["verdict"] == "refuse"
    assert ask("gate", swapped)[0] == 2


def ask(*words: object) -> tuple[int, str, str]:
    """A command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "rtrain", *map(str, words)], capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout, done.stderr
