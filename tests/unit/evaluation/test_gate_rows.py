"""Sides that read the same rows as other tokens: each by its own store, joined by row."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rtrain import config
from rtrain.config import DataConfig, GateConfig
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.data.store.store import Store
from rtrain.evaluation import gate, pairing as answered
from rtrain.inference import artifact, predictor, score
from rtrain.models import vocab_trimming
from rtrain.runs import trim_vocabulary
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.support.gating import QUICK, turn_tokenizer
from tests.support.tiny import CORPUS, make_artifact, make_encoder, make_store, make_task_artifact

LONG = " ".join(CORPUS * 4)
"""More characters than a store keeps of a text."""


class Pair(NamedTuple):
    """An artefact beside its copy with the pieces of the training rows alone, and the stores that both read."""

    base: Path
    small: Path
    whole: Store
    store: Store


def pair_of(folder: Path, task: str, overrides: dict[str, Any]) -> Pair:
    names = {"token_tags": "entities", "span_qa": "squad", "classification": "intent"}
    arguments = {"model.name": str(make_encoder(folder / "encoder")), **overrides}
    recipe = config.load_config(names[task], arguments).recipe
    full = make_store(recipe, folder / "encoder", folder)
    ids = vocab_trimming.select_folder_ids(folder / "encoder", trim_vocabulary.count_ids(full))
    store = make_store(recipe, vocab_trimming.trim(folder / "encoder", ids, folder / "small-encoder"), folder)
    limit = recipe.data.window_tokens
    facts = {**full.manifest.head.facts, "stride": recipe.data.stride, "max_windows": recipe.data.max_windows}
    head = Head(full.manifest.labels, facts)
    created = make_task_artifact(folder / "made", task, head, max_tokens=limit)
    trained = owned(created, folder / "base", full)
    vocab_trimming.trim(trained, ids, folder / "cut")
    shutil.copyfile(trained / artifact.FILE_NAME, folder / "cut" / artifact.FILE_NAME)
    return Pair(trained, owned(folder / "cut", folder / "small", store), full, store)


def owned(source: Path, target: Path, store: Store) -> Path:
    """A copy that says which store it was trained from."""
    shutil.copytree(source, target)
    created = artifact.read_artifact(target, verify=False)
    created = replace(created, lineage={"data_digest": store.manifest.digest}, golden=())
    inputs = predictor.make_golden_inputs(base.get_task(created.task), Head(created.labels, created.facts))
    artifact.write_artifact(target, created, predictor.compute_golden_logits, inputs)
    return target


def gated(found: Pair, rows: Store | None = None, candidate: Path | None = None) -> dict[str, Any]:
    further: dict[str, Any] = {"extra_stores": (found.whole, found.store), "measures_latency": False}
    pair = gate.GateRequest(candidate or found.small, found.base, rows or found.store, found.whole, **further)
    return gate.run_gate(pair, config.load_config("intent", QUICK).recipe.gate)


def conll(path: Path, texts: list[str]) -> Path:
    lines = [
        "\n".join(f"{word} {'B-X' if place % 3 == 0 else 'O'}" for place, word in enumerate(text.split()))
        for text in texts
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The test rows have words of which the training rows have no piece; one is longer than what stores keep."""
    folder = tmp_path_factory.mktemp("tags")
    paths = {
        "data.path": str(conll(folder / "train.conll", [*CORPUS[:6], *(f"{text} now" for text in CORPUS[:6])])),
        "data.test": str(conll(folder / "test.conll", [*CORPUS, LONG])),
        "data.valid_share": 0.2,
    }
    return pair_of(folder, "token_tags", {**paths, "data.max_tokens": 64, "data.stride": 8})


def test_tags_of_a_trimmed_student_are_set_beside_its_teacher_s(tags: Pair) -> None:
    pair = [store.column("test", "length").tolist() for store in (tags.whole, tags.store)]
    assert pair[0] != pair[1]  # some rows are cut into other pieces
    for rows in (tags.store, tags.whole):
        result = gated(tags, rows)
        assert result["rows"] == tags.store.num_rows("test") == len(CORPUS) + 1
        assert result["headline"] is not None
        assert result["source"] == "test rows of the run"
        # Those with a word that falls apart; that pieces have other numbers says nothing.
        assert 0 < result["differing_rows"] < result["rows"]


def test_rows_are_joined_whatever_their_order(tags: Pair) -> None:
    """Rows whose pieces are the same have the same answers, so that none was set beside another one."""
    base_made, small = (predictor.Predictor.load(folder) for folder in (tags.base, tags.small))
    among = np.array([9, 0, 4], dtype=np.int64)
    pair = answered.answer_store(base_made, small, (tags.store, tags.whole), "test", subset=among)
    names = dict(enumerate(tags.store.column("test", "row_id").tolist()))
    assert (
        pair.baseline.tokens.row_ids.tolist() == pair.candidate.tokens.row_ids.tolist() == [names[row] for row in among]
    )
    context = vocab_trimming.read_trimmed(tags.small.parent / "small-encoder")
    assert context is not None
    ids = vocab_trimming.original_ids(context.kept_ids)
    alike = 0
    for row in range(len(among)):
        item, other = pair.baseline.tokens.take([row]), pair.candidate.tokens.take([row])
        if np.array_equal(item.ids, ids[other.ids]):
            alike += 1
            assert np.array_equal(item.targets, other.targets)
            assert np.allclose(pair.baseline.answers.outputs[row], pair.candidate.answers.outputs[row], atol=1e-4)
    assert alike


def test_questions_of_a_trimmed_student_are_set_beside_its_teacher_s(tmp_path: Path) -> None:
    def write(path: Path, contexts: list[str]) -> str:
        answers = [[{"text": text.split()[2], "start": text.index(text.split()[2])}] for text in contexts]
        rows = [
            {"question": "what was it?", "context": text, "answers": json.dumps(answer)}
            for text, answer in zip(contexts, answers, strict=True)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    names = {"format": "jsonl", "text": "question", "text_pair": "context", "label": "answers", "group_column": None}
    columns = {f"data.{name}": value for name, value in names.items()}
    paths = {
        "data.path": write(tmp_path / "train.jsonl", [*CORPUS[:6], *(f"{text} now" for text in CORPUS[:6])]),
        "data.test": write(tmp_path / "test.jsonl", [LONG[place:] for place in range(24)]),
        "data.valid_share": 0.2,
    }
    result = gated(pair_of(tmp_path, "span_qa", {**columns, **paths, "data.window": 48, "data.stride": 12}))
    assert result["rows"] == 24
    assert result["headline"] is not None


def test_a_wrong_tokenizer_beside_a_store_of_its_own_is_still_seen(tags: Pair, tmp_path: Path) -> None:
    """Its store's tokens would hide it: they were made by the right one."""
    turned = shutil.copytree(tags.small, tmp_path / "turned")
    turn_tokenizer(turned, artifact.read_artifact(turned, verify=False))
    wrong = owned(turned, tmp_path / "wrong", tags.store)
    result = gated(tags, candidate=wrong)
    assert (result["verdict"], result["headline"]) == ("refuse", None)


def test_the_verb_finds_both_stores(tags: Pair) -> None:
    """The base lies in no run: its store is found beside the candidate's."""
    created = artifact.read_artifact(tags.base)
    assert score.find_training_store(tags.base, created) is None
    neighbor = score.find_training_store(tags.base, created, sibling_store=tags.store)
    assert neighbor is not None
    assert neighbor.folder == tags.whole.folder
    assert score.find_training_store(tags.base, replace(created, lineage={}), sibling_store=tags.store) is None


def folded(folder: Path, *folds: tuple[int, int]) -> tuple[gate.GateRequest, list[Store]]:
    """A base and a candidate of one tokenizer, and their stores of the same texts, each by a fold out of so many."""
    texts = [f"{text} number {place}" for place, text in enumerate(CORPUS * 3)]
    path = write_rows(folder / "rows.csv", list(zip(texts, itertools.cycle(["a", "b"]), strict=False)))
    encoder = make_encoder(folder / "encoder")
    stores, created = [], []
    for name, (fold, of) in zip(("base", "candidate"), folds, strict=True):
        arguments = {"model.name": str(encoder), "data.path": str(path), "data.folds": of, "data.fold": fold}
        stores.append(make_store(config.load_config("intent", arguments).recipe, encoder, folder))
        model = make_artifact(folder / f"{name}-made", ("a", "b"), seed=len(stores))
        created.append(owned(model, folder / name, stores[-1]))
    return gate.GateRequest(
        created[1], created[0], stores[0], stores[0], extra_stores=(stores[1],), measures_latency=False
    ), stores


def test_rows_that_the_candidate_alone_was_trained_on_are_left_out(tmp_path: Path) -> None:
    """The second quarter of the rows is in part the first third, which the candidate has held out."""
    pair, (theirs, values) = folded(tmp_path, (1, 4), (0, 3))
    result = gate.run_gate(pair, GateConfig())
    trained = np.isin(theirs.text_keys("test"), values.text_keys("train"))
    assert 0 < result["excluded_rows"] == trained.sum() < len(trained)
    assert result["rows"] == (~trained).sum()


def test_a_candidate_that_was_trained_on_all_rows_is_told_to_name_others(tmp_path: Path) -> None:
    pair, _ = folded(tmp_path, (0, 4), (1, 4))
    with pytest.raises(UserError) as error:
        gate.run_gate(pair, GateConfig())
    assert error.value.code == "no_unseen_rows"


def test_a_store_that_is_gone_does_not_tell_what_was_trained_on(tmp_path: Path) -> None:
    pair, (theirs, _) = folded(tmp_path, (0, 4), (1, 4))
    result = gate.run_gate(replace(pair, extra_stores=()), GateConfig())
    assert (result["rows"], result["excluded_rows"]) == (theirs.num_rows("test"), None)


def test_a_file_with_labels_of_another_model_is_refused_and_a_few_of_them_are_counted(tmp_path: Path) -> None:
    folders = [make_artifact(tmp_path / str(seed), ("late", "lost"), seed) for seed in (1, 2)]
    item, other = (predictor.Predictor.load(folder) for folder in folders)

    def rows(labels: list[str]) -> DataConfig:
        path = write_rows(tmp_path / "rows.csv", list(zip(CORPUS[:10], itertools.cycle(labels), strict=False)))
        return score.resolve_data_settings(artifact.read_artifact(folders[0]), {"data.path": str(path)})

    with pytest.raises(ConfigError) as caught:
        answered.answer_file(item, other, rows(["LATE", "LOST"]))
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [("data.label", "label_mismatch")]
    request = gate.GateRequest(folders[1], folders[0], rows(["late", "LOST"]), measures_latency=False)
    some = gate.run_gate(request, GateConfig())
    assert (some["rows"], some["unknown_labels"]) == (10, 5)


def test_outputs_of_masked_words_in_a_file_are_not_kept(tmp_path: Path) -> None:
    """A row has one for each piece of the vocabulary and each mask: 10,000 rows of 512 tokens would have 90 GB."""
    facts = {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300}
    folders = [make_task_artifact(tmp_path / str(seed), "masked_lm", Head((), facts), seed) for seed in (1, 2)]
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"{text}\n" for text in CORPUS * 3))
    keywords = {"data.path": str(tmp_path / "rows.csv"), "data.text": "text", "data.label": None}
    data = score.resolve_data_settings(artifact.read_artifact(folders[0]), keywords)
    item, other = (predictor.Predictor.load(folder) for folder in folders)
    pair = answered.answer_file(item, other, data)
    assert [side.answers.outputs for side in (pair.baseline, pair.candidate)] == [[], []]
    headline = gate.score_pair(pair)[0].headline
    assert headline is not None
    assert headline.name == "neg_loss"
    assert [headline.first, headline.other] == pytest.approx(
        [score.score_file(folder, data)["scores"]["neg_loss"] for folder in folders]
    )
