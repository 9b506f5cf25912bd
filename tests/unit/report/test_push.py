"""Artifacts in registries: model cards, and uploads by the hub's real client to a hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.core import events
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.report import model_card, push
from tests.support.hub import Hub, serving
from tests.support.reports import answers_of, train, write_predictions
from tests.support.root import ROOT
from tests.support.tiny import make_task_artifact, refused

REPO, TOKEN, LABELS = "acme/support", "hf_for_tests_only", ("login", "parcel", "refund")
TEXTS = [f"a secret of row {row}" for row in range(60)]
COMMANDS = """
import json, sys
from rtrain.cli.app import _run
for words in json.loads(sys.argv[1]):
    print(json.dumps(_run(words) or 0), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run: its artifact is of random weights, its answers are made up."""
    run = Run(tmp_path_factory.mktemp("runs") / "mine")
    make_task_artifact(run.artifact, "classification", Head(LABELS))
    run.config.touch()
    events.append_event(run.folder, "created", run="mine", data_digest="0123456789abcdef")
    events.append_event(run.folder, "tokenized", rows={"train": 300, "valid": 40, "test": 60})
    train(run.folder, 24)
    target, prediction = answers_of(LABELS, 60, right=0.8)
    write_predictions(run.folder, target, prediction, text=TEXTS, language=["en", "de", "fr"] * 20)
    facts, document = artifact.read_artifact(run.artifact), json.loads(run.scores("test").read_text())
    lineage = {"data_digest": "0123456789abcdef", "model": "/home/me/encoder"}
    facts = replace(facts, metrics={"test": document["scores"]}, lineage=lineage)
    artifact.write_artifact(run.artifact, facts, lambda *_: [row["logits"] for row in facts.golden])
    return run


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving() as served:
        served.tokens, served.root = {TOKEN}, tmp_path
        yield served


def command(hub: Hub, home: Path, *commands: Sequence[str], token: str = TOKEN) -> tuple[list[Any], str, str]:
    """Exit codes, output and messages of commands in one process, whose client reads its variables once."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    # The other protocol for large files, Xet, needs a storage server of its own.
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home), "HF_TOKEN": token}
    words = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stderr.splitlines() if line.isdigit()], done.stdout, done.stderr


def read_card(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata of a card, and its sections by heading."""
    _, front, body = text.split("---\n", 2)
    sections = (part.partition("\n") for part in body.split("\n## "))
    return yaml.safe_load(front), {heading: section.strip() for heading, _, section in sections}


def test_a_push_is_one_private_commit_and_the_next_one_keeps_what_the_user_wrote(
    hub: Hub, run: Run, tmp_path: Path
) -> None:
    first = ["push", str(run.folder), f"hf://{REPO}", "--license", "mit", "--json"]
    predict = ["predict", f"hf://{REPO}", "where is my parcel", "--json"]
    codes, out, messages = command(hub, tmp_path / "home", first, predict)
    assert codes == [0, 0], messages
    files, names = hub.files(REPO), {path.name for path in run.artifact.iterdir() if path.is_file()}
    assert names | {"README.md", ".gitattributes"} <= files.keys()
    assert all(files[name] == (run.artifact / name).read_bytes() for name in names)
    assert (hub.private[REPO], hub.commits(REPO)) == (True, 2)  # the empty repository, and the push
    assert json.loads(out.splitlines()[0])["version"] == artifact.read_artifact(run.artifact).version
    assert any(path.startswith("/lfs/") for path in hub.asked)
    assert TOKEN not in out + messages
    metadata, sections = read_card(files["README.md"].decode())
    assert (metadata["license"], metadata["pipeline_tag"]) == ("mit", "text-classification")

    edited = files["README.md"].decode().replace(sections["Intended use"], "Support staff.\n\n### Not for\n\nHiring.")
    (folder := tmp_path / "edited").mkdir()
    (folder / "README.md").write_text(edited)
    (folder / "model.int8.bin").write_bytes(b"of an earlier version")
    hub.add("models", REPO, folder)
    assert command(hub, tmp_path / "home", ["push", str(run.artifact), f"hf://{REPO}", "--public"])[0] == [0]
    files = hub.files(REPO)
    metadata, sections = read_card(files["README.md"].decode())
    assert sections["Intended use"] == "Support staff.\n\n### Not for\n\nHiring."
    assert metadata["license"] == "mit"
    assert "model.int8.bin" not in files
    assert hub.private[REPO]  # an existing repository keeps its visibility


def test_who_may_not_write_and_what_the_gate_refused_is_not_pushed(hub: Hub, run: Run, tmp_path: Path) -> None:
    other = refused(make_task_artifact(tmp_path / "refused", "classification", Head(("a", "b"))))
    pushes = [["push", str(folder), f"hf://{REPO}", "--json"] for folder in (other, run.artifact)]
    codes, out, messages = command(hub, tmp_path / "home", *pushes, token="hf_of_somebody_else")
    assert codes == [1, 1]
    assert [json.loads(line)["error"]["code"] for line in out.splitlines()] == ["refused_by_gate", "access_denied"]
    assert "hf_of_somebody_else" not in out + messages
    assert not [path for path in hub.asked if "/commit/" in path or path.startswith("/lfs/")]


@pytest.mark.parametrize(
    "destination", ["acme/support", "hf://support", "hf://a/b/c", "models:/", "models:/a/1", "s3://b/c"]
)
def test_a_destination_without_a_registry_is_refused(destination: str) -> None:
    with pytest.raises(ConfigError) as raised:
        push.parse_destination(destination)
    (problem,) = raised.value.problems
    assert (problem.value, problem.code) == (destination, "invalid_name")


def test_a_card_has_the_scores_of_the_run_with_intervals_by_slice_and_no_text_of_a_row(run: Run) -> None:
    assert model_card.find_run(run.artifact) is not None
    source = model_card.CardSource(artifact.read_artifact(run.artifact), run, REPO, None)
    metadata, sections = read_card(model_card.format_card(source))
    document = json.loads(run.scores("test").read_text())
    headline, slices = document["headline"], document["slices"]
    rows = [line for line in sections["Scores by slice"].splitlines() if line.startswith("| ")][2:]
    assert len(rows) == sum(len(entries) for entries in slices.values())
    assert f"{next(iter(slices.values()))[0]['scores'][headline]:.4f}" in rows[0]
    assert "license" not in metadata
    results = {metric["name"]: metric["value"] for metric in metadata["model-index"][0]["results"][0]["metrics"]}
    assert results[headline] == pytest.approx(document["scores"][headline], abs=1e-6)
    low, high = document["intervals"]["scores"][headline]
    assert f"{low:.4f} to {high:.4f}" in sections["Scores"]
    assert "0123456789abcdef" in sections["Training data and cost"]
    assert "base_model" not in metadata  # the folder of a model on this machine
    assert not any(text in section for text in TEXTS for section in sections.values())


@pytest.mark.parametrize(
    ("task", "head", "tag", "is_loadable"),
    [
        ("classification", Head(("a", "b")), "text-classification", True),
        ("classification", Head(("a", "b"), {"token_pooling": "mean"}), "text-classification", False),
        ("token_tags", Head(("O", "B-X", "I-X")), "token-classification", True),
        ("span_qa", Head(("start", "end"), {"no_answer": True}), "question-answering", True),
    ],
)
def test_a_card_shows_a_pipeline_where_transformers_gives_the_same_answers(
    tmp_path: Path, task: str, head: Head, tag: str, is_loadable: bool
) -> None:
    folder = make_task_artifact(tmp_path / "artifact", task, head)
    facts = artifact.read_artifact(folder)
    metadata, sections = read_card(model_card.format_card(model_card.CardSource(facts, None, REPO, "mit")))
    assert metadata["pipeline_tag"] == tag
    assert metadata["library_name"] == ("transformers" if is_loadable else "rtrain")
    assert ("from transformers import pipeline" in sections["How to load"]) == is_loadable
    assert len(metadata["widget"]) > 0


def test_values_of_slices_do_not_change_the_table(run: Run, tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    document = json.loads(run.scores("test").read_text())
    (entry, *_), *_ = document["slices"].values()
    document["slices"] = {"na|me": [{**entry, "value": "a|b\n<b>`c`"}]}
    Run(folder).scores("test").write_text(json.dumps(document))
    facts = artifact.read_artifact(run.artifact)
    card = model_card.format_card(model_card.CardSource(facts, Run(folder), REPO, None))
    table = read_card(card)[1]["Scores by slice"].splitlines()[-3:]
    assert [line.replace("\\|", "").count("|") for line in table] == [6, 6, 6]
    assert "<b>" not in card.replace("\\<", "")
