"""Answers of an int8 artifact: without the libraries of training, with its parent's tokenizer, labels, thresholds."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.compress import quantize
from rtrain.config import Recipe
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import precision
from rtrain.runs import run_folders
from tests.support import quantizing, reports
from tests.support.root import ROOT
from tests.support.tiny import CORPUS, make_artifact, make_store, make_task_artifact

NOT_NEEDED = ("torch", "transformers", "ray", "datasets", "pandas", "pyarrow", "nncf", "scipy", "rtrain.config")
THRESHOLD = 0.37


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a float artefact of several labels and its int8 one."""
    folder = tmp_path_factory.mktemp("served")
    overrides: dict[str, Any] = {"quantize.calibration_rows": 8, "gate.latency_seconds": 0.1}
    recipe: Recipe = config.with_overrides(reports.settings_of("multi_label", folder), overrides).recipe
    store = make_store(recipe, folder / "encoder", folder)
    head = replace(
        store.manifest.head,
        facts={**store.manifest.head.facts, "thresholds": dict.fromkeys(store.manifest.labels, THRESHOLD)},
    )
    make_task_artifact(folder / "artifact", recipe.task, head)
    quantize.run_quantization(recipe, store.folder, folder, folder / "artifact-int8")
    return folder


def test_tokenizer_labels_and_thresholds_travel(run: Path) -> None:
    before, after = (artifact.read_artifact(run / name) for name in ("artifact", "artifact-int8"))
    assert (after.labels, after.max_tokens, after.task) == (before.labels, before.max_tokens, before.task)
    assert dict(after.facts) == dict(before.facts)
    assert set(dict(after.facts["thresholds"]).values()) == {THRESHOLD}
    for path in (run / "artifact" / name for name in quantize.SERVING_FILES):
        if path.is_file():
            assert (run / "artifact-int8" / path.name).read_bytes() == path.read_bytes()
    inputs = list(CORPUS[:6])
    float_one, int8 = (Predictor.load(run / name) for name in ("artifact", "artifact-int8"))
    assert set((int8.task.label_thresholds(int8.head) or {}).values()) == {THRESHOLD}
    assert [row.ids for row in int8.encode(inputs)] == [row.ids for row in float_one.encode(inputs)]


def test_a_finished_model_is_not_trimmed_and_one_that_was_trimmed_is_quantized(tmp_path: Path) -> None:
    settings_used = config.with_overrides(
        reports.settings_of("classification", tmp_path), {"compress.vocabulary": "trim"}
    )
    store = make_store(settings_used.recipe, tmp_path / "encoder", tmp_path)
    run = Run(tmp_path / "run")
    make_task_artifact(run.artifact, "classification", store.manifest.head)
    with pytest.raises(ConfigError) as error:
        quantize.run_quantization(settings_used.recipe, store.folder, run.folder, run.int8_artifact)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("compress.vocabulary", "conflicting_settings")
    ]
    assert not run.int8_artifact.exists()
    # A student whose teacher was trimmed: nothing of its vocabulary had to go, so that its lineage says nothing.
    run_folders.write_frozen_config(run, settings_used)
    assert quantize.run_quantization(settings_used.recipe, store.folder, run.folder, run.int8_artifact)[
        "artifact"
    ] == str(run.int8_artifact)


def test_an_int8_artefact_is_asked_without_what_trains(run: Path) -> None:
    """The command itself, in a process."""
    script = (
        "import sys; from rtrain.cli.app import main\n"
        f"main(['predict', {str(run / 'artifact-int8')!r}, 'where is my parcel'])\n"
        f"print(sorted(set({NOT_NEEDED!r}) & set(sys.modules)), 'openvino.tools.ovc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    answer, loaded = done.stdout.splitlines()
    assert answer
    assert loaded == "[] False"


def test_a_model_is_exported_in_a_process_that_has_answered(run: Path) -> None:
    """Modules of OpenVINO that are skipped for a faster start are available on demand."""
    script = (
        "from pathlib import Path; from rtrain.inference.predictor import Predictor; import transformers, torch\n"
        f"Predictor.load(Path({str(run / 'artifact-int8')!r}))\nfrom rtrain.compress.exporters import openvino\n"
        "import numpy as np\n"
        f"network = transformers.AutoModelForSequenceClassification.from_pretrained({str(run / 'artifact')!r}).eval()\n"
        "sample = {name: np.ones((1, 8), np.int64) for name in ('input_ids', 'attention_mask', 'token_type_ids')}\n"
        "graph = openvino.export(network, sample)\nwith torch.inference_mode():\n"
        "    logits = network(**{name: torch.from_numpy(value) for name, value in sample.items()}).logits.numpy()\n"
        "print(np.abs(graph.load_engine(1).logits(sample) - logits).max() < 1e-4)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("options", ["mine", "run", "run/artifact"])
def test_a_folder_of_anything_else_is_not_replaced(options: str, tmp_path: Path) -> None:
    """The command fails before it looks for the run's rows, which do not exist."""
    make_artifact(tmp_path / "run" / "artifact")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    sizes = sorted(path.name for path in (tmp_path / options).iterdir())
    with pytest.raises(UserError) as error:
        quantize.run_quantization(
            config.load_config("intent").recipe, tmp_path / "store", tmp_path / "run", tmp_path / options
        )
    assert error.value.code == "not_empty"
    assert sorted(path.name for path in (tmp_path / options).iterdir()) == sizes


def test_an_older_int8_artefact_and_an_empty_folder_may_be_replaced(run: Path, tmp_path: Path) -> None:
    for folder in (run / "artifact-int8", tmp_path, tmp_path / "new"):
        quantize.check_output_folder(folder)


ANSWERS = """
import json, sys
from pathlib import Path
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
folder = Path(sys.argv[1])
predictor = Predictor(folder, artifact.read_artifact(folder))
print(json.dumps([row.tolist() for row in predictor.logits(json.loads(sys.argv[2]))]))
"""


def logits(folder: Path, texts: list[str], instructions: str) -> Any:
    """Answers of a process that may not use newer instructions of the processor."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions, "RTRAIN_CACHE": ""}
    command = [sys.executable, "-c", ANSWERS, str(folder), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return np.array(json.loads(done.stdout))


def test_with_the_overflow_fix_a_processor_without_vnni_answers_as_one_with_it(tmp_path: Path) -> None:
    created = quantizing.make(tmp_path / "rows")
    fixed = quantizing.complete(created, tmp_path / "int8", overflow_fix=True)
    texts, samples = list(CORPUS), random.Random(1)
    words = " ".join(CORPUS).split()
    texts += [" ".join(samples.choices(words, k=samples.randint(3, 40))) for _ in range(60)]
    exact = np.stack(Predictor.load(created.folder).logits(texts))
    new, old = (np.abs(logits(fixed, texts, name) - exact).mean() for name in ("AVX512_CORE_VNNI", "AVX2"))
    assert old < 1.1 * new
    assert old < 0.05 * np.ptp(exact)


def test_a_processor_that_answers_otherwise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = quantizing.complete(quantizing.make(tmp_path / "rows"), tmp_path / "int8")
    loaded = artifact.read_artifact(created)
    separate = tuple({**row, "logits": [value + 1 for value in row["logits"]]} for row in loaded.golden)
    predictor = Predictor(created, replace(loaded, golden=separate))
    for flags, keywords in ((frozenset({"avx2"}), True), (frozenset({"avx2", "avx_vnni"}), False)):
        monkeypatch.setattr(precision, "detect_int8", lambda flags=flags: precision.int8_support_from_flags(flags))
        with pytest.raises(artifact.ArtifactError) as caught:
            predictor.check_golden()
        assert (precision.read_cpu_name() in str(caught.value)) == keywords
        assert ("quantize.overflow_fix" in str(caught.value)) == keywords
