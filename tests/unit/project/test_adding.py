"""docs/adding.md: what it names exists, and its steps, taken as they are written, lead to the end."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import rtrain.tasks
from rtrain import config
from rtrain.compress import calibrate
from rtrain.compress.exporters.base import Sample
from rtrain.config import Recipe, loading, recipe
from rtrain.config.recipe import OptimConfig, QuantizeConfig
from rtrain.core import engines
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Floats, Head, RaggedArray, collate
from rtrain.data.store.store import Store
from rtrain.inference import artifact, explainer
from rtrain.inference.batch import predict_files
from rtrain.inference.predictor import Predictor, compute_golden_logits
from rtrain.metrics import classes, registry, scores
from rtrain.metrics.bootstrap import SumMetric, combine_metrics, ratio
from rtrain.metrics.registry import METRICS, Metric, get_metric
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from serve.app import build_app
from tests.conftest import labelled_rows
from tests.support import reports
from tests.support.refusing import refused, refused_fields
from tests.support.root import ROOT
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact, make_tokenizer

PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
HEAD = Head(("no", "yes"))


# ---------------------------------------------------------------------------------------------------------- the page


def items() -> list[str]:
    """The steps of all lists."""
    text = re.sub(r"(?ms)^```.*?^```", "", PAGE)
    found: list[str] = re.findall(r"(?ms)^(?:\d\.|-) (.*?)(?=^(?:\d\.|-) |\n\n|\Z)", text)
    return [" ".join(step.split()) for step in found]


def test_every_file_and_name_of_the_page_exists() -> None:
    assert len(items()) == 19
    paths = 0
    for step in items():
        words = re.findall(r"`([^`]+)`", step)
        files = [word for word in words if ("/" in word and not word.startswith("/")) or word.endswith(".toml")]
        paths += len(files)
        text = ""
        for file in files:
            if "NAME" in file:
                assert (ROOT / file).parent.is_dir(), step
            else:
                assert (ROOT / file).exists(), step
                text += (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        for name in words:
            if re.fullmatch(r"\w+", name) and name not in ("TASK", "train", "optim", "model"):
                assert re.search(rf"(?m)^\s*(?:def |class |const )?{name}\b", text), f"{name}: {step}"
    assert paths >= 20


def test_the_kinds_of_output_that_the_page_lists_are_those_that_are_scored() -> None:
    found = re.search(r"\(its `output`: (.*?)\)", PAGE, re.DOTALL)
    assert found is not None
    assert set(re.findall(r"`(\w+)`", found[1])) == set(METRICS)


# ------------------------------------------------------------------------------------------------------------ a task


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example of the page as a module of the package, its name among the tasks, its kind of answer scored."""
    assert EXAMPLE is not None
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "yes_no.py").write_text(EXAMPLE[1])
    monkeypatch.setattr(rtrain.tasks, "__path__", [*rtrain.tasks.__path__, str(folder)])
    monkeypatch.setattr(recipe, "TASKS", (*recipe.TASKS, "yes_no"))
    metric = Metric("accuracy", classes.make_classes_metric)
    monkeypatch.setattr(registry, "METRICS", {**METRICS, "verdict": metric})
    return "yes_no"


def test_an_unknown_task_is_answered_with_the_nearest_names_among_all_other_problems(added: str) -> None:
    assert config.parse_config({"name": "x", "task": added}, {}).recipe.task == added
    with pytest.raises(ConfigError) as caught:
        config.parse_config({"name": "x", "task": "yes_on"}, {"optim.lr": 3})
    first, second = caught.value.problems
    assert (first.field, first.value, first.reason) == ("task", "yes_on", "unknown")
    assert "did you mean yes_no" in first.fix
    assert second.field == "optim.lr"


def test_every_task_that_is_listed_is_found_under_its_name() -> None:
    assert len(recipe.TASKS) >= 8
    assert [base.get_task(name).name for name in recipe.TASKS] == list(recipe.TASKS)
    assert {base.get_task(name).output for name in recipe.TASKS} == set(METRICS)


def test_an_added_task_learns_and_is_scored(added: str, tmp_path: Path) -> None:
    import torch

    task = base.get_task(added)
    assert task.validate_row("a text", None, "perhaps") == "the label 'perhaps' is neither yes nor no"
    assert task.build_head({"yes": 2, "no": 1}, load_tokenizer(make_tokenizer(tmp_path), 16)) == HEAD
    encoded = task.encode(load_tokenizer(tmp_path, 16), CORPUS[:2])
    wanted = task.build_targets(["yes", "no"], RaggedArray.from_rows([[], []], np.int32), HEAD).values
    tokens = collate(encoded)
    tokens = type(tokens)(**{**vars(tokens), "targets": wanted.values, "targets_per_row": wanted.counts})
    logits = np.array([[0.0, 2.0], [0.0, 1.0]], dtype=np.float32)
    found = task.loss(torch.from_numpy(logits), tokens, HEAD)["loss"].item()
    assert found == pytest.approx(np.log1p(np.exp(-2)) + np.log1p(np.exp(1)), rel=1e-6)
    assert task.decode(logits, CORPUS[:2], encoded, HEAD, {}) == [{"verdict": True}, {"verdict": True}]
    outcomes = task.row_results(task.row_outputs(logits, tokens, HEAD), tokens, HEAD)
    assert get_metric(task.output).main_scores(outcomes, wanted, HEAD)["accuracy"] == 0.5


async def _post(predictor: Predictor, path: str, document: dict[str, Any]) -> Any:
    transport = httpx.ASGITransport(app=build_app(predictor, config.DeployConfig().serve))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.post(path, json=document)).json()


def test_an_added_task_answers_requests(added: str, tmp_path: Path) -> None:
    predictor = Predictor.load(make_task_artifact(tmp_path / "artifact", added, HEAD), threads=1)
    answers = asyncio.run(_post(predictor, "/predict", {"inputs": list(CORPUS)}))
    assert answers == [{"verdict": bool(row.argmax() == 1)} for row in predictor.logits(CORPUS)]
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [CORPUS[0]]}
    reply = asyncio.run(_post(predictor, "/v2/models/tiny/infer", {"inputs": [tensor]}))
    verdict = str(answers[0]["verdict"]).lower()
    assert reply["outputs"] == [
        {"name": "answer", "datatype": "BYTES", "shape": [1], "data": [f'{{"verdict": {verdict}}}']}
    ]
    with refused("not_explainable"):
        explainer.check_explainable(predictor.task)


def test_an_added_task_answers_rows_of_files(added: str, tmp_path: Path) -> None:
    folder = make_task_artifact(tmp_path / "artifact", added, HEAD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    asked = predict_files.BatchRequest(folder, {"data.path": str(tmp_path / "rows.jsonl")})
    predict_files.answer_to_file(asked, tmp_path / "answers.jsonl")
    found = [json.loads(line)["verdict"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert found == [answer["verdict"] for answer in Predictor.load(folder, threads=1)(CORPUS)]


def test_an_added_task_has_a_report(added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"{text} {number}", "no" if number % 3 else "yes") for number, (text, _) in enumerate(labelled_rows(200))]
    monkeypatch.setattr(reports, "settings_of", lambda task, folder: reports.settings(folder, rows, task=task))
    page = reports.page_of(reports.make_answered(tmp_path, added))
    assert "Scores with intervals" in page.text
    assert "accuracy" in page.text


# --------------------------------------------------------------------------------------------------------- an engine


class Halved:
    """Answers with half of the numbers in its file, for each window."""

    def __init__(self, folder: Path, made: artifact.Artifact, threads: int | None):
        self._logits = np.frombuffer((folder / "model.toy").read_bytes(), dtype=np.float32) / 2

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return np.tile(self._logits, (len(inputs["input_ids"]), 1))


class Toy:
    """A float graph, which is the network itself, and the int8 graph of it: a file of as many numbers as labels."""

    operations = ()

    def __init__(self, network: Any, sample: Sample):
        self.network = network

    def load_engine(self, threads: int | None) -> "Toy":
        return self

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        import torch

        with torch.inference_mode():
            found: Floats = self.network(**{name: torch.from_numpy(inputs[name]) for name in inputs}).logits.numpy()
        return found

    def calibrate(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "Toy":
        self.samples = len(samples)
        return self

    def write(self, path: Path) -> None:
        path.write_bytes(np.full(self.network.config.num_labels, self.samples, dtype=np.float32).tobytes())


def test_an_added_engine_is_set_quantizes_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = engines.EngineSpec(f"{__name__}:Halved", ("model.toy",), 1e-3, f"{__name__}:Toy")
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "toy": entry})
    chosen = config.with_overrides(reports.settings(tmp_path, labelled_rows(60)), {"quantize.engine": "toy"}).recipe
    store: Store = make_store(chosen, make_encoder(tmp_path / "encoder"), tmp_path)
    parent_folder = make_task_artifact(tmp_path / "parent", "classification", HEAD)
    parent, draft = artifact.read_artifact(parent_folder), tmp_path / "int8"
    draft.mkdir()
    job = calibrate.QuantizationJob(
        parent_folder, parent, store, QuantizeConfig(engine="toy", calibration_rows=4), draft, threads=1
    )
    calibrate.quantize_graph(job, lambda doing, word: None)
    for name in ("tokenizer.json", "config.json"):
        (draft / name).write_bytes((parent_folder / name).read_bytes())
    made = artifact.Artifact("toy", "classification", HEAD.labels, 16, chosen.quantize.engine)
    made = artifact.write_artifact(draft, made, compute_golden_logits)
    assert made.version != parent.version
    assert artifact.model_size_mb(draft, made.engine) == 2 * 4 / 1e6
    predictor = Predictor.load(draft)
    assert [row.tolist() for row in predictor.logits(CORPUS[:2])] == [[2.0, 2.0], [2.0, 2.0]]
    with refused("no_gradients"):
        _ = predictor.network


def test_the_table_names_what_exists_and_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    assert len(engines.ENGINES) >= 2
    for entry in engines.ENGINES.values():
        assert callable(engines.import_object(entry.loader))
        assert entry.quantizer is None or callable(engines.import_object(entry.quantizer))
    with refused("unknown_name"):
        engines.get_engine("abacus")
    with refused_fields("quantize.engine"):
        config.parse_config({"name": "x", "task": "classification"}, {"quantize.engine": "torch"})


# ---------------------------------------------------------------------------------------------------------- a metric


def worst_class(outcomes: RaggedArray, wanted: RaggedArray, head: Head) -> SumMetric:
    """Recall of the class that is found worst: a function of sums over rows."""
    predicted, true = outcomes.to_matrix(2).argmax(axis=1), wanted.values.astype(np.int64)
    own = np.eye(2)[true]
    columns = np.concatenate([own * (predicted == true)[:, None], own], axis=1)
    return SumMetric(columns, lambda sums: {"worst_recall": ratio(sums[..., :2], sums[..., 2:]).min(axis=-1)})


def test_an_added_metric_is_measured_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    def additive(outcomes: RaggedArray, wanted: RaggedArray, head: Head) -> SumMetric:
        return combine_metrics(classes.make_classes_metric(outcomes, wanted, head), worst_class(outcomes, wanted, head))

    metric = METRICS["classes"]._replace(make_sum_metric=additive)
    monkeypatch.setattr(registry, "METRICS", {**METRICS, "classes": metric})
    true = np.array([0, 1] * 20)
    said = np.where(np.arange(40) < 8, 0, true)  # four rows of class 1 are taken for 0
    outcomes, wanted = RaggedArray.from_matrix(np.eye(2)[said]), RaggedArray.from_matrix(true.astype(np.float32))
    found = scores.measure_split(base.get_task("classification"), HEAD, "test", outcomes, wanted, np.arange(40), {})
    assert found["scores"]["worst_recall"] == pytest.approx(16 / 20)
    low, high = found["intervals"]["scores"]["worst_recall"]
    assert low < 16 / 20 < high


# --------------------------------------------------------------------------------------------------------- a setting


class WithSetting(OptimConfig):
    momentum: float = 0.5
    """A setting that no other recipe has."""


class Grown(Recipe):
    optim: WithSetting = WithSetting()


def test_an_added_setting_is_set_and_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"name": "x", "task": "classification"}
    monkeypatch.setattr(loading, "Recipe", Grown)
    assert "optim.momentum" in set(config.iter_setting_names())
    before = config.parse_config(document, {}).recipe
    changed = config.parse_config(document, {"optim.momentum": 0.9}).recipe
    assert changed.model_dump()["optim"]["momentum"] == 0.9
    assert changed.recipe_digest() != before.recipe_digest()
