"""docs/adding.md: its plug-ins work from an empty folder, word for word; the names on the page exist."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer

from rtrain import config
from rtrain.cli import app as command_line
from rtrain.compress import calibrate
from rtrain.compress.exporters.base import Sample
from rtrain.config import Config, DistillConfig, Recipe, loading, recipe
from rtrain.config.recipe import OptimConfig, QuantizeConfig
from rtrain.core import engines, plugins
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Floats, Head, RaggedArray, TokenBatch, collate, single_window_batch
from rtrain.core.run_folder import Run
from rtrain.data.store import builder, store
from rtrain.inference import artifact, explainer
from rtrain.inference.batch import predict_files
from rtrain.inference.predictor import Predictor, compute_golden_logits
from rtrain.metrics import scores
from rtrain.metrics.registry import METRICS, get_metric
from rtrain.report import tracker_feed
from rtrain.runs import run_folders
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from rtrain.trainer import losses, registered_loss
from serve.app import build_app
from tests.conftest import labelled_rows
from tests.support import reports
from tests.support.adding import PAGE, write_page
from tests.support.refusing import refused, refused_fields
from tests.support.root import ROOT
from tests.support.tiny import CORPUS, make_encoder, make_store, make_task_artifact, make_tokenizer

HEAD = Head(("no", "yes"))


# ---------------------------------------------------------------------------------------------------------- the page
CLOSED_TRACKER = """
import rtrain


@rtrain.register_tracker("closed")
class Closed:
    def start(self, run): ...

    def log(self, event):
        raise OSError("closed")

    def finish(self, summary): ...

    def close(self): ...
"""


def items() -> list[str]:
    """The steps of all lists for contributors."""
    text = PAGE.partition("# For contributors")[2]
    actual: list[str] = re.findall(r"(?ms)^(?:\d\.|-) (.*?)(?=^(?:\d\.|-) |\n\n|\Z)", text)
    return [" ".join(step.split()) for step in actual]


def test_every_file_and_name_of_the_page_exists() -> None:
    assert len(items()) == 11
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
            if re.fullmatch(r"\w+", name) and name not in ("TASK", "train", "optim", "model", "dependencies"):
                assert re.search(rf"(?m)^\s*(?:def |class |const )?{name}\b", text), f"{name}: {step}"
    assert paths >= 14
    for name in re.findall(r"`((?:rtrain|serve|tune|tests)/[\w/]+\.(?:py|js))`", PAGE.replace("NAME", "__init__")):
        assert (ROOT / name).exists(), name


def test_the_kinds_of_output_that_the_page_lists_are_those_that_are_scored() -> None:
    actual = re.search(r"\(its `output`: (.*?)\)", PAGE, re.DOTALL)
    assert actual is not None
    assert set(re.findall(r"`(\w+)`", actual[1])) == set(METRICS)


# ------------------------------------------------------------------------------------------------------------ a task


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    plugins.unload_plugins()


@pytest.fixture
def added(tmp_path: Path) -> str:
    """The task of the page, by the file that it tells to write."""
    plugins.load_plugins([str(write_page(tmp_path / "page") / "my_ext.py")])
    return "yes_no"


@pytest.fixture
def other_plugin(tmp_path: Path) -> str:
    """The file with all other examples of the page."""
    return str(write_page(tmp_path / "page") / "other_ext.py")


def test_an_unknown_task_is_answered_with_the_nearest_names_among_all_other_problems(added: str) -> None:
    assert config.parse_config({"name": "x", "task": added}, {}).recipe.task == added
    with pytest.raises(ConfigError) as caught:
        config.parse_config({"name": "x", "task": "yes_on"}, {"optim.lr": 3})
    first, second = caught.value.problems
    assert (first.field, first.value, first.code) == ("task", "yes_on", "unknown_name")
    assert "yes_no" in first.fix
    assert second.field == "optim.lr"


def test_the_recipe_of_the_page_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_page(tmp_path))
    loaded = config.load_config("yes_no.yaml").recipe
    assert (loaded.task, loaded.plugins) == ("yes_no", ("my_ext",))


def test_a_task_that_lacks_members_is_refused_by_their_names(tmp_path: Path) -> None:
    text = "import rtrain\n\n\n@rtrain.register_task('empty')\nclass Empty:\n    output = 'classes'\n"
    (tmp_path / "empty_ext.py").write_text(text)
    plugins.load_plugins([str(tmp_path / "empty_ext.py")])
    with refused("incomplete_task"):
        base.get_task("empty")


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
    targets = task.build_targets(["yes", "no"], RaggedArray.from_rows([[], []], np.int32), HEAD).values
    tokens = collate(encoded)
    tokens = type(tokens)(**{**vars(tokens), "targets": targets.values, "targets_per_row": targets.counts})
    logits = np.array([[0.0, 2.0], [0.0, 1.0]], dtype=np.float32)
    actual = task.loss(torch.from_numpy(logits), tokens, HEAD)["loss"].item()
    assert actual == pytest.approx(np.log1p(np.exp(-2)) + np.log1p(np.exp(1)), rel=1e-6)
    assert task.decode(logits, CORPUS[:2], encoded, HEAD, {}) == [{"verdict": True}, {"verdict": True}]
    outcomes = task.row_results(task.row_outputs(logits, tokens, HEAD), tokens, HEAD)
    assert get_metric(task.output).main_scores(outcomes, targets, HEAD)["correct"] == 0.5


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
    request = predict_files.BatchRequest(folder, {"data.path": str(tmp_path / "rows.jsonl")})
    predict_files.answer_to_file(request, tmp_path / "answers.jsonl")
    actual = [json.loads(line)["verdict"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert actual == [answer["verdict"] for answer in Predictor.load(folder, threads=1)(CORPUS)]


def test_an_added_task_has_a_report(added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"{text} {number}", "no" if number % 3 else "yes") for number, (text, _) in enumerate(labelled_rows(200))]
    monkeypatch.setattr(reports, "settings_of", lambda task, folder: reports.settings(folder, rows, task=task))
    page = reports.page_of(reports.make_answered(tmp_path, added))
    assert "correct" in page.text


def test_an_artifact_needs_the_plugin_of_its_task_by_name(
    added: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests, file = plugins.owner_digests("task", added), tmp_path / "page" / "my_ext.py"
    assert list(digests) == ["my_ext"]
    head = Head(HEAD.labels, {artifact.PLUGINS_FACT: digests})
    folder = make_task_artifact(tmp_path / "artifact", added, head)
    plugins.unload_plugins()
    with refused("missing_plugin"):
        artifact.read_artifact(folder)
    file.write_text(file.read_text() + "# edited\n")
    plugins.load_plugins([str(file)])
    with caplog.at_level(logging.WARNING, "rtrain"):
        assert Predictor.load(folder, threads=1).task.name == added
    assert [message for message in caplog.messages if digests["my_ext"] in message]


def test_no_file_that_an_artifact_names_is_executed(tmp_path: Path) -> None:
    evil = tmp_path / "artifact" / "evil_ext.py"
    head = Head(HEAD.labels, {artifact.PLUGINS_FACT: {str(evil): "0" * 16}})
    folder = make_task_artifact(tmp_path / "artifact", "classification", head)
    evil.write_text(f"import pathlib, rtrain\npathlib.Path({str(tmp_path / 'executed')!r}).touch()\n")
    with refused("plugin_path"):
        artifact.read_artifact(folder, verify=False)
    assert not (tmp_path / "executed").exists()


def test_a_resume_with_an_edited_plugin_is_refused_by_its_name(added: str, tmp_path: Path) -> None:
    file, rows = tmp_path / "page" / "my_ext.py", [(text, "yes") for text in CORPUS]
    settings = config.with_overrides(reports.settings(tmp_path, rows), {"task": added})
    run = Run(tmp_path / "run")
    run_folders.write_frozen_config(run, settings)
    assert run_folders.choose_folder(run.folder, run_folders.load_config(run.folder), "resume")[0] == run.folder
    plugins.unload_plugins()
    with refused("not_found", "plugins"):
        run_folders.load_config(run.folder)
    file.write_text(file.read_text() + "# edited\n")
    plugins.load_plugins([str(file)])
    with refused("changed_setting", "plugins"):
        run_folders.choose_folder(run.folder, run_folders.load_config(run.folder), "resume")


def test_verbs_that_load_models_or_rows_take_a_plugin() -> None:
    verbs = typer.main.get_command(command_line.app).commands  # type: ignore[attr-defined]  # it is a group
    takers = {name for name, verb in verbs.items() if any(option.name == "plugin" for option in verb.params)}
    assert verbs.keys() - takers == {
        *("recipes", "cluster", "serve keys", "serve status", "runs", "clean", "export", "import", "demo")
    }


@pytest.mark.slow
def test_the_page_is_walked_from_an_empty_folder(tmp_path: Path) -> None:
    rows = [f"{text} {number},{'yes' if number % 2 else 'no'}" for number, (text, _) in enumerate(labelled_rows(120))]
    write_page(tmp_path)
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")

    def call(*words: str) -> str:
        process = subprocess.run([sys.executable, "-m", "rtrain", *words], cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    encoder = str(make_encoder(tmp_path / "encoder"))
    report = json.loads(call("train", "yes_no.yaml", "--model", encoder, "--out", "runs/first", "--json"))
    assert report["metrics"]["test"]["correct"] >= 0
    answer = call("predict", "runs/first/artifact", "--plugin", "my_ext.py", "Has my parcel arrived?", "--json")
    assert json.loads(answer)[0]["verdict"] in (True, False)


# ------------------------------------------------------------------------- loss, metric, source, tracker, augmentation


def batch(targets: Sequence[float]) -> TokenBatch:
    lengths = np.ones(len(targets), dtype=np.int32)
    ids, teacher = np.arange(len(targets), dtype=np.uint64), np.empty((len(targets), 0), dtype=np.float32)
    return single_window_batch(lengths, lengths, lengths, np.array(targets, dtype=np.float32), ids, teacher)


def make_loss(name: str, task: str = "classification", head: Head = HEAD) -> losses.RunLoss:
    chosen = base.get_task(task)
    function = registered_loss.RegisteredLoss(name, chosen, head)
    return losses.RunLoss(chosen, DistillConfig(), head, registered_loss=function)


def test_a_loss_of_a_plugin_is_summed_over_any_micro_batches(other_plugin: str) -> None:
    import torch

    plugins.load_plugins([other_plugin])
    logits = torch.tensor([[0.5, -1.0], [0.25, 2.0], [-3.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss, targets = make_loss("hinge"), [1, 0, 1]
    total = loss(logits, batch(targets))
    assert total.tolist() == pytest.approx([(1 + 1.5) / 2 + (1 + 1.75) / 2 + 0])
    parts = loss(logits[:1], batch(targets[:1])) + loss(logits[1:], batch(targets[1:]))
    assert parts.item() == pytest.approx(total.item(), rel=1e-15)
    assert loss.count_targets(batch(targets)) == [3]


LOSSES = """
import rtrain, torch

seen = {}

@rtrain.register_loss("mean")
def mean(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets), len(targets)

@rtrain.register_loss("scalar")
def scalar(logits, targets):
    return logits.sum()

@rtrain.register_loss("halves")
def halves(logits, targets):
    return logits.sum(), 0.5

@rtrain.register_loss("failing")
def failing(logits, targets):
    raise ValueError("mine")

@rtrain.register_loss("kept")
def kept(logits, targets):
    seen["targets"] = targets
    return (logits.sum(dim=1) * 0).sum(), len(targets)
"""


@pytest.mark.parametrize(
    ("name", "code"), [("mean", "not_additive"), ("scalar", "wrong_result"), ("halves", "wrong_result")]
)
def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "loss_ext.py").write_text(LOSSES)
    plugins.load_plugins([str(tmp_path / "loss_ext.py")])
    with refused(code):
        make_loss(name)
    with pytest.raises(ValueError, match="mine"):
        make_loss("failing")


def test_a_loss_gets_the_targets_of_each_kind(tmp_path: Path) -> None:
    import torch

    (tmp_path / "loss_ext.py").write_text(LOSSES)
    plugins.load_plugins([str(tmp_path / "loss_ext.py")])
    seen = sys.modules["loss_ext"].seen
    make_loss("kept")(torch.zeros(2, 2), batch([1, 0]))
    assert (seen["targets"].dtype, seen["targets"].tolist()) == (torch.int64, [1, 0])
    make_loss("kept", "regression", Head(("score",), {"mean": 3.0, "std": 2.0}))(torch.zeros(2, 1), batch([5, 1]))
    assert seen["targets"].tolist() == [1.0, -1.0]
    tokens = batch([0, 0])
    several = TokenBatch(
        **{**vars(tokens), "targets": np.array([0, 1, 1, 1], np.float32), "targets_per_row": np.array([2, 2], np.int32)}
    )
    make_loss("kept", "multi_label")(torch.zeros(2, 2), several)
    assert seen["targets"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    for task, codes in (("span_qa", ["conflicting_settings"]), ("classification", [])):
        settings = config.parse_config({"name": "x", "task": task}, {"train.loss": "kept"}).recipe
        assert [problem.code for problem in registered_loss.check_loss(settings)] == codes
    smoothed = {"train.loss": "kept", "train.label_smoothing": 0.1}
    [problem] = registered_loss.check_loss(
        config.parse_config({"name": "x", "task": "classification"}, smoothed).recipe
    )
    assert problem.field == "train.loss"


def test_metrics_of_a_plugin_are_scored_with_intervals(added: str, other_plugin: str) -> None:
    plugins.load_plugins([other_plugin])
    true = np.array([0, 1] * 20)
    answers = np.where(np.arange(40) < 8, 0, true)  # four rows of class 1 are taken for 0
    outcomes, targets = RaggedArray.from_matrix(np.eye(2)[answers]), RaggedArray.from_matrix(true.astype(np.float32))
    arguments: Any = (HEAD, "test", outcomes, targets, np.arange(40), {})
    document = scores.measure_split(base.get_task("classification"), *arguments)
    assert document["scores"]["refund_recall"] == pytest.approx(16 / 20)
    low, high = document["intervals"]["scores"]["refund_recall"]
    assert low < 16 / 20 < high
    plain = scores.measure_split(base.get_task(added), *arguments)
    assert plain["headline"] == "correct"
    assert plain["scores"]["correct"] == pytest.approx(36 / 40)
    # The interval by weights is that of the sums of accuracy: the resamples are the same.
    assert plain["intervals"]["scores"]["correct"] == pytest.approx(document["intervals"]["scores"]["accuracy"])
    assert [entry["scores"]["correct"] for entry in plain["slices"]["length"]]
    plugins.register_metric("accuracy", output="classes")(lambda targets, outputs, weights: 1.0)
    with refused("already_registered"):
        scores.measure_split(base.get_task("classification"), *arguments)
    empty = RaggedArray.from_matrix(np.empty((0, 2)))
    assert get_metric("verdict").main_scores(empty, RaggedArray.from_matrix(np.empty(0)), HEAD)["rows"] == 0
    plugins.unload_plugins()
    with refused("unknown_metric"):
        get_metric("verdict")


def source_settings(other_plugin: str, address: str) -> Config:
    document = {"name": "x", "task": "classification", "plugins": [other_plugin]}
    return config.parse_config(document, {"data.path": address})


def test_a_source_gives_rows_and_its_errors_name_the_row(
    other_plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = make_encoder(tmp_path / "encoder")
    rows = make_store(source_settings(other_plugin, "tickets://2026/60").recipe, encoder, tmp_path / "a").manifest.rows
    assert sum(rows.values()) == 60
    row = "yield {'text': 'a', 'label': 'b'}"
    text = f"import rtrain\n\n\n@rtrain.register_source('bad')\ndef read(address):\n    {row}\n    yield "
    for number, (value, code) in enumerate({"['a']": "wrong_type", "1 / 0": "plugin_failed"}.items()):
        (tmp_path / f"bad{number}_ext.py").write_text(text.replace("'bad'", f"'bad{number}'") + value + "\n")
        settings = source_settings(str(tmp_path / f"bad{number}_ext.py"), f"bad{number}://x").recipe
        with pytest.raises(ConfigError) as caught:
            make_store(settings, encoder, tmp_path / "b")
        [problem] = caught.value.problems
        assert (problem.field, problem.code) == ("data.path", code)
        assert f"row {2 - number}" in problem.reason
        assert number == 0 or f"bad{number}_ext.py, line 7" in problem.reason


def test_an_augmentation_makes_one_copy_of_each_training_row(other_plugin: str, tmp_path: Path) -> None:
    plain = reports.settings(tmp_path, labelled_rows(60))
    settings = config.with_overrides(plain, {"plugins": [other_plugin], "augment.functions": ["reverse"]})
    stores = [make_store(settings.recipe, tmp_path / "encoder", tmp_path / name) for name in "ab"]
    rows = make_store(plain.recipe, tmp_path / "encoder", tmp_path / "c").num_rows("train")
    # A copy whose text would be in another split is left out.
    assert rows + rows // 2 < stores[0].num_rows("train") == rows + stores[0].manifest.copies <= 2 * rows
    assert stores[0].manifest.files == stores[1].manifest.files
    with_task = config.with_overrides(settings, {"task": "token_tags"}).recipe
    assert "augment.functions" in [problem.field for problem in builder.find_problems(with_task)]


def test_the_exceptions_of_a_tracker_do_not_end_a_run(other_plugin: str, tmp_path: Path) -> None:
    (tmp_path / "bad_ext.py").write_text(CLOSED_TRACKER)
    settings = config.load_config(
        "intent", {"plugins": [other_plugin, str(tmp_path / "bad_ext.py")], "report.trackers": ["closed", "lines"]}
    )
    run, lines = Run(tmp_path / "run"), list[str]()
    run.folder.mkdir()
    with tracker_feed.follow_run(settings, run, lambda event: lines.append(event["text"])):
        reports.train(run.folder, 24)
    assert [line for line in lines if "closed" in line]
    assert not [line for line in lines if "lines" in line]
    assert max(int(line.split()[0]) for line in (run.folder / "lines.txt").read_text().splitlines()) == 20


# --------------------------------------------------------------------------------------------------------- an engine


class Halved:
    """Answers with half of the numbers in its file, for each window."""

    def __init__(self, folder: Path, new_artifact: artifact.Artifact, threads: int | None):
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
            actual: Floats = self.network(**{name: torch.from_numpy(inputs[name]) for name in inputs}).logits.numpy()
        return actual

    def calibrate(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "Toy":
        self.samples = len(samples)
        return self

    def write(self, path: Path) -> None:
        path.write_bytes(np.full(self.network.config.num_labels, self.samples, dtype=np.float32).tobytes())


def test_an_added_engine_is_set_quantizes_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = engines.EngineSpec(f"{__name__}:Halved", ("model.toy",), 1e-3, f"{__name__}:Toy")
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "toy": entry})
    settings = config.with_overrides(reports.settings(tmp_path, labelled_rows(60)), {"quantize.engine": "toy"}).recipe
    token_store: store.Store = make_store(settings, make_encoder(tmp_path / "encoder"), tmp_path)
    parent_folder = make_task_artifact(tmp_path / "parent", "classification", HEAD)
    parent, draft = artifact.read_artifact(parent_folder), tmp_path / "int8"
    draft.mkdir()
    job = calibrate.QuantizationJob(
        parent_folder, parent, token_store, QuantizeConfig(engine="toy", calibration_rows=4), draft, threads=1
    )
    calibrate.quantize_graph(job, lambda doing, word: None)
    for name in ("tokenizer.json", "config.json"):
        (draft / name).write_bytes((parent_folder / name).read_bytes())
    new_artifact = artifact.Artifact("toy", "classification", HEAD.labels, 16, settings.quantize.engine)
    new_artifact = artifact.write_artifact(draft, new_artifact, compute_golden_logits)
    assert new_artifact.version != parent.version
    assert artifact.model_size_mb(draft, new_artifact.engine) == 2 * 4 / 1e6
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
