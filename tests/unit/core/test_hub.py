"""Names of the hub, against a hub on loopback: what they mean, what is kept of them, and what is said where it fails.

`huggingface_hub` reads its settings when it is imported, so what asks a hub is a process of its own.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from rtrain import config
from rtrain.core import hub, manifest
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders
from tests.conftest import labelled_rows
from tests.support.hub import Hub, make_rows, serving
from tests.support.refusing import refused, refused_fields
from tests.support.root import ROOT
from tests.support.tiny import make_encoder
from tests.unit.data.test_paraphrase import tiny_tokenizer

ENCODER, ROWS = "someone/encoder", "someone/rows"
OLD, NEW = "0" * 40, "1" * 40
CLOSED = "http://127.0.0.1:9"
"""Where nothing listens."""


def environment(home: Path, url: str) -> dict[str, str]:
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": path}


def asked(home: Path, url: str, *questions: str, root: Path | None = None) -> list[Any]:
    """What each expression about `hub` and `root` gives, in a process that knows this hub; of a refusal, its code."""
    code = f"""
import json, sys
from pathlib import Path
from rtrain.core import env, hub
env.set_env_defaults()
root = Path({str(root)!r})
found = []
for question in {questions!r}:
    try:
        found.append(eval(question))
    except hub.HubError as error:
        found.append(f"refused: {{error.code}}")
sys.stdout.write(json.dumps(found, default=str))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(home, url), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A hub with an encoder, and a data set of two splits."""
    with serving() as found:
        found.add("models", ENCODER, make_encoder(tmp_path / "encoder"))
        found.add("datasets", ROWS, make_rows(tmp_path / "rows", 120))
        yield found


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("imdb", ("imdb", None, None)),
        ("mteb/banking77", ("mteb/banking77", None, None)),
        ("mteb/massive:de", ("mteb/massive", "de", None)),
        ("mteb/massive:de@v1.0", ("mteb/massive", "de", "v1.0")),
        ("a/b@refs/convert/parquet", ("a/b", None, "refs/convert/parquet")),
        ("a/b/c", None),
        ("./a", None),
        ("a/", None),
        ("/a/b", None),
        ("~/a", None),
        ("s3://a/b", None),
        ("*.csv", None),
        ("", None),
    ],
)
def test_the_form_of_a_name(text: str, name: tuple[str, str | None, str | None] | None) -> None:
    found = hub.parse_hub_name(text)
    assert found == name
    assert found is None or str(found) == text


def test_what_is_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_hub_name("mteb/banking77")
    (tmp_path / "mteb" / "banking77").mkdir(parents=True)
    assert not hub.is_hub_name("mteb/banking77")


@pytest.mark.parametrize(
    ("new", "old", "same"),
    [
        ("a/b", f"a/b@{OLD}", True),
        ("a/b@main", f"a/b@{OLD}", True),
        (f"a/b@{OLD}", f"a/b@{OLD}", False),
        (f"a/b@{NEW}", f"a/b@{OLD}", False),
        ("a/c", f"a/b@{OLD}", False),
        ("a/b:de", f"a/b@{OLD}", False),
        ("a/b", "a/b", False),
    ],
)
def test_a_resume_takes_over_the_commit_of_a_name(new: str, old: str, same: bool) -> None:
    assert hub.matches_pinned(new, old) == same


def test_a_run_is_resumed_by_the_names_that_it_was_started_with(tmp_path: Path) -> None:
    def made(model: str, rows: str) -> config.Config:
        return config.load_config("intent", {"model.name": model, "model.pooling": "mean", "data.path": rows})

    first = made(f"a/b@{OLD}", f"c/d:e@{OLD}")
    run_folders.write_frozen_config(Run(tmp_path), first)
    _, again = run_folders.choose_folder(tmp_path, made("a/b", "c/d:e"), "resume")
    assert again.recipe.recipe_digest() == first.recipe.recipe_digest()
    assert run_folders.resolve_paths(made("a/b", "c/d:e@main"), tmp_path).recipe.data.path == f"c/d:e@{OLD}"
    with refused_fields("model.name"):
        run_folders.choose_folder(tmp_path, made(f"a/b@{NEW}", "c/d:e"), "resume")


# --------------------------------------------------------------------------------------------------------- what is kept


def test_a_name_is_frozen_with_its_commit_and_its_files_are_kept(served: Hub, tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    model, rows, _, _, folder, splits = asked(
        home,
        served.url,
        f"hub.pin_revision('model', {ENCODER!r})",
        f"hub.pin_revision('dataset', {ROWS!r})",
        f"hub.save_copy('model', {ENCODER!r}, root)",
        f"hub.save_copy('dataset', {ROWS!r}, root)",
        f"hub.fetch_model({ENCODER!r}, root)",
        f"hub.fetch_dataset({ROWS!r}, root)",
        root=root,
    )
    commit = model.removeprefix(f"{ENCODER}@")
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert folder == str(root / ".models" / f"someone--encoder@{commit}")
    files = ["MANIFEST.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in Path(folder).iterdir()) == files
    kept = root / ".data" / rows.replace("/", "--")
    assert splits == {"test": [str(kept / "test-00000.arrow")], "train": [str(kept / "train-00000.arrow")]}
    assert manifest.find_damage(kept) is None

    # The hub has moved on: a name is what it is now, one with a commit what it was.
    make_encoder(tmp_path / "other", seed=7)
    newer = served.add("models", ENCODER, tmp_path / "other")
    pinned, latest, before = asked(
        home,
        served.url,
        f"hub.pin_revision('model', {ENCODER!r})",
        f"hub.fetch_model({ENCODER!r})",
        f"hub.fetch_model({model!r})",
    )
    assert pinned == f"{ENCODER}@{newer}"
    weights = [(Path(found) / "model.safetensors").read_bytes() for found in (latest, before, folder)]
    assert weights[0] == (tmp_path / "other" / "model.safetensors").read_bytes()
    assert weights[1] == weights[2] == (tmp_path / "encoder" / "model.safetensors").read_bytes()

    # Another machine, and no hub: what is kept suffices.
    questions = (f"hub.fetch_model({model!r}, root)", f"hub.fetch_dataset({rows!r}, root)")
    assert asked(tmp_path / "none", CLOSED, *questions, root=root) == [folder, splits]
    (Path(folder) / "tokenizer.json").write_text("{}")
    with refused("damaged_copy"):
        hub.fetch_model(model, root)


def test_large_files_are_linked_and_those_that_someone_may_edit_are_copied(tmp_path: Path) -> None:
    for name, size in (("model.safetensors", hub.MIN_HARDLINK_BYTES + 1), ("config.json", 2), ("pytorch_model.bin", 9)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    files = hub.list_model_files(tmp_path)
    folder = hub.save_files(files, tmp_path / "kept" / "a@1")
    assert manifest.find_damage(folder, files) is None
    links = {name: (folder / name).stat().st_nlink for name in files}
    assert links == {"config.json": 1, "model.safetensors": 2, "1_Pooling/config.json": 1}
    assert [path.name for path in folder.parent.iterdir()] == ["a@1"]


# -------------------------------------------------------------------------------------------------------- what is said


def test_what_the_hub_refuses_is_told_by_its_cause(served: Hub, tmp_path: Path) -> None:
    served.refused |= {"someone/gated": (403, "GatedRepo"), "someone/private": (401, "")}
    models = [f"hub.fetch_model('someone/{name}')" for name in ("none", "gated", "private", "encoder@v9")]
    sets = [f"hub.fetch_dataset('someone/{name}')" for name in ("none", "gated")]
    codes = ("not_found", "access_denied", "not_found", "not_found", "not_found", "access_denied")
    found = asked(tmp_path / "home", served.url, *models, *sets)
    assert found == [f"refused: {code}" for code in codes]


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    with serving() as found:
        found.refused |= {ENCODER: (503, ""), ROWS: (503, "")}
        said = asked(tmp_path, found.url, f"hub.fetch_model({ENCODER!r})", f"hub.fetch_dataset({ROWS!r})")
        requests = [path for path in found.asked if "someone" in path]
    assert said == ["refused: unreachable"] * 2
    assert requests == [f"/api/models/{ENCODER}", f"/api/datasets/{ROWS}"]
    for name in (ENCODER, f"{ENCODER}@{OLD}"):
        assert asked(tmp_path, CLOSED, f"hub.fetch_model({name!r})") == ["refused: unreachable"]


def test_of_several_subsets_one_must_be_named(served: Hub, tmp_path: Path) -> None:
    several = tmp_path / "several"
    for name in ("de", "en"):
        make_rows(several / name, 30)
    card = {"configs": [{"config_name": name, "data_dir": name} for name in ("de", "en")]}
    (several / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    served.add("datasets", "someone/several", several)
    questions = [f"hub.fetch_dataset('someone/several{subset}')" for subset in ("", ":en", ":fr")]
    none, english, french = asked(tmp_path / "home", served.url, *questions)
    assert none == french == "refused: ambiguous_name"
    assert sorted(english) == ["test", "train"]


def test_all_names_are_given_their_commit_and_models_that_write_are_copied(served: Hub, tmp_path: Path) -> None:
    writer = tmp_path / "writer"
    settings = transformers.T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(settings).save_pretrained(writer)
    tiny_tokenizer().save_pretrained(writer)
    commit = served.add("models", "someone/writer", writer)
    names = {
        "augment.paraphrase": "someone/writer",
        "augment.back_translation_model": "someone/writer@main",
        "model.name": ENCODER,
    }
    names |= {"data.path": ROWS, "distill.unlabeled_rows_path": ROWS, "compress.unlabeled_rows_path": ROWS}
    root = tmp_path / "runs"
    code = f"""
import json, sys
from pathlib import Path
from rtrain.core import env
env.set_env_defaults()
from rtrain import config
from rtrain.core import hub
from rtrain.data.store import builder
from rtrain.runs import run_folders
chosen = run_folders.resolve_paths(config.load_config("intent", {names!r}))
found = run_folders.hub_names(chosen)
for kind, name in found.values():
    hub.save_copy(kind, name, Path({str(root)!r}))
augment = builder.resolve_rewriters(chosen.recipe, Path({str(root)!r})).augment
pinned = {{field: name for field, (_, name) in found.items()}}
sys.stdout.write(json.dumps([pinned, augment.paraphrase, augment.back_translation_model]))
"""
    command = [sys.executable, "-c", code]
    environ = environment(tmp_path / "home", served.url)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    pinned, *folders = json.loads(done.stdout)
    assert pinned.keys() == names.keys()
    assert all(hub.matches_pinned(names[field], name) for field, name in pinned.items())
    assert pinned["augment.paraphrase"] == pinned["augment.back_translation_model"] == f"someone/writer@{commit}"
    for folder in map(Path, folders):
        assert folder.parent == root / ".models"
        assert {"config.json", "generation_config.json", "model.safetensors"} <= {
            path.name for path in folder.iterdir()
        }


def test_nothing_but_the_module_of_the_hub_asks_the_hub() -> None:
    """Every other loader reads folders alone, so that no name gets past its commit."""
    asking = []
    for path in [path for room in ("rtrain", "serve", "tune") for path in (ROOT / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            stays = any(one.arg == "local_files_only" and getattr(one.value, "value", None) for one in node.keywords)
            if node.func.attr in ("snapshot_download", "hf_hub_download", "load_dataset") or (
                node.func.attr == "from_pretrained" and not stays
            ):
                asking.append(path.relative_to(ROOT).as_posix())
    assert set(asking) == {"rtrain/core/hub.py"}


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_by_hub_names_is_resumed_without_hub_and_cache(served: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def train(url: str, *options: str) -> tuple[int, str]:
        settings = ("train.epochs=1", "train.precision=fp32", "train.global_batch_size=16")
        command = [sys.executable, "-m", "rtrain", "train", "intent", "--data", ROWS, "--model", ENCODER, *options]
        command += ["--workers", "1", "--out", "run", *(part for text in settings for part in ("--set", text))]
        environ = environment(home, url)
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stderr

    code, err = train(served.url)
    assert code == 0, err
    run = tmp_path / "run"
    recipe = config.load_config(str(run / "config.yaml")).recipe
    assert recipe.data.path is not None
    assert hub.matches_pinned(ROWS, recipe.data.path)
    assert hub.matches_pinned(ENCODER, recipe.model.name)
    assert f"data set {ROWS}: fetched from {served.url}\n" in err
    labels = sorted({label for _, label in labelled_rows(3)})
    # Names, not the numbers of the files.
    assert json.loads((run / "artifact" / "artifact.json").read_text())["labels"] == labels

    before = (run / "config.yaml").read_text()
    shutil.rmtree(home)
    shutil.rmtree(run / "artifact")  # as if it had ended before its last step
    code, err = train(CLOSED, "--resume")
    assert code == 0, err
    assert (run / "config.yaml").read_text() == before
    assert json.loads((run / "artifact" / "artifact.json").read_text())["labels"] == labels


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_without_the_cache_trains_by_hub_names(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (unshare --mount)")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "tests.support.apart", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    root, packaged = tmp_path / "runs", Path(found["packaged"])
    assert packaged.parent == root / ".models"
    assert manifest.find_damage(packaged) is None
    for field, path in (("model.name", "encoder"), ("data.path", "rows.csv")):
        wrong = rf"^{field}={tmp_path}/own/{path}: cannot be read, or is another file, on node \S+ [0-9a-f]{{8}}; "
        assert re.search(wrong, found["refused"], re.MULTILINE), found["refused"]
    assert (found["status"], found["asked"]) == ("finished", 0)
    assert found["updates"] > 0
    assert found["weights"] == str(root / ".models" / found["model"].replace("/", "--"))
