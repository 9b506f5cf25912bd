"""What an int8 artefact answers with: nothing of what it was trained with, but its parent's tokenizer, labels and
thresholds."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain import artifact, config
from rtrain.compress import quantize
from rtrain.config import Recipe
from rtrain.errors import UserError
from rtrain.predict import Predictor
from tests import reports
from tests.tiny import CORPUS, make_artifact, make_store, make_task_artifact

ROOT = Path(__file__).resolve().parents[1]
NOT_NEEDED = ("torch", "transformers", "ray", "datasets", "pandas", "pyarrow", "nncf", "scipy", "rtrain.config")
THRESHOLD = 0.37


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a float artefact of several labels and its int8 one."""
    folder = tmp_path_factory.mktemp("served")
    overrides: dict[str, Any] = {"quantize.calibration_rows": 8, "gate.seconds": 0.1}
    recipe: Recipe = config.with_overrides(reports.settings_of("multi_label", folder), overrides).recipe
    store = make_store(recipe, folder / "encoder", folder)
    head = replace(store.manifest.head, facts={**store.manifest.head.facts, "threshold": THRESHOLD})
    make_task_artifact(folder / "artifact", recipe.task, head)
    quantize.run(recipe, store.folder, folder, folder / "artifact-int8")
    return folder


def test_tokenizer_labels_and_thresholds_travel(run: Path) -> None:
    before, after = (artifact.read(run / name) for name in ("artifact", "artifact-int8"))
    assert (after.labels, after.max_tokens, after.task) == (before.labels, before.max_tokens, before.task)
    assert dict(after.facts) == dict(before.facts)
    assert after.facts["threshold"] == THRESHOLD
    for name in quantize.SERVED:
        assert (run / "artifact-int8" / name).read_bytes() == (run / "artifact" / name).read_bytes()
    asked = list(CORPUS[:6])
    float_one, int8 = (Predictor.load(run / name) for name in ("artifact", "artifact-int8"))
    assert int8.task.least(int8.head) == THRESHOLD
    assert [row.ids for row in int8.encode(asked)] == [row.ids for row in float_one.encode(asked)]


def test_an_int8_artefact_is_asked_without_what_trains(run: Path) -> None:
    """By the command itself, in a process of its own."""
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
    """What was left out of OpenVINO to answer sooner is had where it is needed."""
    script = (
        "from pathlib import Path; from rtrain.predict import Predictor; import transformers, torch\n"
        f"Predictor.load(Path({str(run / 'artifact-int8')!r}))\n"
        "from rtrain.compress import openvino_graph\n"
        "import numpy as np\n"
        f"network = transformers.AutoModelForSequenceClassification.from_pretrained({str(run / 'artifact')!r}).eval()\n"
        "sample = {name: np.ones((1, 8), np.int64) for name in ('input_ids', 'attention_mask', 'token_type_ids')}\n"
        "graph = openvino_graph.export(network, sample)\n"
        "with torch.inference_mode():\n"
        "    logits = network(**{name: torch.from_numpy(value) for name, value in sample.items()}).logits.numpy()\n"
        "print(np.abs(graph.answering(1).logits(sample) - logits).max() < 1e-4)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("named", ["mine", "run", "run/artifact"])
def test_a_folder_of_anything_else_is_not_replaced(named: str, tmp_path: Path) -> None:
    """It is refused before the run's rows are looked for, of which there are none."""
    make_artifact(tmp_path / "run" / "artifact")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    held = sorted(path.name for path in (tmp_path / named).iterdir())
    with pytest.raises(UserError, match="it holds something else than an int8 artefact, which would be lost; name"):
        quantize.run(config.load("intent").recipe, tmp_path / "store", tmp_path / "run", tmp_path / named)
    assert sorted(path.name for path in (tmp_path / named).iterdir()) == held


def test_an_older_int8_artefact_and_an_empty_folder_may_be_replaced(run: Path, tmp_path: Path) -> None:
    for folder in (run / "artifact-int8", tmp_path, tmp_path / "new"):
        quantize.refuse_out(folder)
