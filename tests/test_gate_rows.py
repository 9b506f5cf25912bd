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
from rtrain.config import Data, Gate
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.data.store.store import Store
from rtrain.evaluation import gate, gate_rows as answered
from rtrain.inference import artifact, predictor, score
from rtrain.models import vocab_trimming
from rtrain.runs import trim_vocabulary
from rtrain.tasks import base
from tests.conftest import write_rows
from tests.gating import QUICK, turn_tokenizer
from tests.tiny import CORPUS, make_artifact, make_encoder, make_store, make_task_artifact

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
    given = {"model.name": str(make_encoder(folder / "encoder")), **overrides}
    recipe = config.load(names[task], given).recipe
    whole = make_store(recipe, folder / "encoder", folder)
    ids = vocab_trimming.kept(folder / "encoder", trim_vocabulary.counted(whole))
    store = make_store(recipe, vocab_trimming.trim(folder / "encoder", ids, folder / "small-encoder"), folder)
    most = recipe.data.window_tokens
    facts = {**whole.manifest.head.facts, "stride": recipe.data.stride, "max_windows": recipe.data.max_windows}
    head = Head(whole.manifest.labels, facts)
    made = make_task_artifact(folder / "made", task, head, max_tokens=most)
    trained = owned(made, folder / "base", whole)
    vocab_trimming.trim(trained, ids, folder / "cut")
    shutil.copyfile(trained / artifact.NAME, folder / "cut" / artifact.NAME)
    return Pair(trained, owned(folder / "cut", folder / "small", store), whole, store)


def owned(source: Path, target: Path, store: Store) -> Path:
    """A copy that says which store it was trained from."""
    shutil.copytree(source, target)
    made = artifact.read(target, verify=False)
    made = replace(made, lineage={"data_digest": store.manifest.digest}, golden=())
    inputs = predictor.golden_inputs(base.get(made.task), Head(made.labels, made.facts))
    artifact.write(target, made, predictor.golden_logits, inputs)
    return target


def gated(found: Pair, rows: Store | None = None, candidate: Path | None = None) -> dict[str, Any]:
    limits = config.load("intent", QUICK).recipe.gate
    first, further = rows or found.store, (found.whole, found.store)
    both = gate.Sides(candidate or found.small, found.base, first, found.whole, further=further, timed=False)
    return gate.run(both, limits)


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
    both = [store.column("test", "length").tolist() for store in (tags.whole, tags.store)]
    assert both[0] != both[1]  # some rows are cut into other pieces
    for rows in (tags.store, tags.whole):
        found = gated(tags, rows)
        assert found["rows"] == tags.store.rows("test") == len(CORPUS) + 1
        assert found["headline"] is not None
        assert found["source"] == "test rows of the run"
        # Those with a word that falls apart; that pieces have other numbers says nothing.
        assert 0 < found["read_otherwise"] < found["rows"]


def test_rows_are_joined_whatever_their_order(tags: Pair) -> None:
    """Rows whose pieces are the same have the same answers, so that none was set beside another one."""
    base_made, small = (predictor.Predictor.load(folder) for folder in (tags.base, tags.small))
    readings = [answered.Reading.of(one, artifact.read(one)) for one in (tags.base, tags.small)]
    among = np.array([9, 0, 4], dtype=np.int64)
    both = answered.of_store(
        base_made, small, (tags.store, tags.whole), "test", (readings[0], readings[1]), among=among
    )
    names = dict(enumerate(tags.store.column("test", "row_id").tolist()))
    assert both.base.tokens.row_ids.tolist() == both.candidate.tokens.row_ids.tolist() == [names[row] for row in among]
    known = vocab_trimming.read(tags.small.parent / "small-encoder")
    assert known is not None
    ids = vocab_trimming.old_ids(known.kept)
    alike = 0
    for row in range(len(among)):
        one, other = both.base.tokens.pick([row]), both.candidate.tokens.pick([row])
        if np.array_equal(one.ids, ids[other.ids]):
            alike += 1
            assert np.array_equal(one.targets, other.targets)
            assert np.allclose(both.base.answered.outputs[row], both.candidate.answered.outputs[row], atol=1e-4)
    assert alike


def test_questions_of_a_trimmed_student_are_set_beside_its_teacher_s(tmp_path: Path) -> None:
    def write(path: Path, contexts: list[str]) -> str:
        rows = [
            {
                "question": "what was it?",
                "context": text,
                "answers": json.dumps([{"text": text.split()[2], "start": text.index(text.split()[2])}]),
            }
            for text in contexts
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    columns = {
        "data.format": "jsonl",
        "data.text": "question",
        "data.text_pair": "context",
        "data.label": "answers",
        "data.split_by": None,
    }
    paths = {
        "data.path": write(tmp_path / "train.jsonl", [*CORPUS[:6], *(f"{text} now" for text in CORPUS[:6])]),
        "data.test": write(tmp_path / "test.jsonl", [LONG[place:] for place in range(24)]),
        "data.valid_share": 0.2,
    }
    found = gated(pair_of(tmp_path, "span_qa", {**columns, **paths, "data.window": 48, "data.stride": 12}))
    assert found["rows"] == 24
    assert found["headline"] is not None


def test_a_wrong_tokenizer_beside_a_store_of_its_own_is_still_seen(tags: Pair, tmp_path: Path) -> None:
    """Its store's tokens would hide it: they were made by the right one."""
    turned = shutil.copytree(tags.small, tmp_path / "turned")
    turn_tokenizer(turned, artifact.read(turned, verify=False))
    wrong = owned(turned, tmp_path / "wrong", tags.store)
    found = gated(tags, candidate=wrong)
    assert (found["verdict"], found["headline"]) == ("refuse", None)


def test_the_verb_finds_both_stores(tags: Pair) -> None:
    """The base lies in no run: its store is found beside the candidate's."""
    made = artifact.read(tags.base)
    assert score.trained_from(tags.base, made) is None
    beside = score.trained_from(tags.base, made, beside=tags.store)
    assert beside is not None
    assert beside.folder == tags.whole.folder
    assert score.trained_from(tags.base, replace(made, lineage={}), beside=tags.store) is None


def folded(folder: Path, *folds: tuple[int, int]) -> tuple[gate.Sides, list[Store]]:
    """A base and a candidate of one tokenizer, and their stores of the same texts, each by a fold out of so many."""
    texts = [f"{text} number {place}" for place, text in enumerate(CORPUS * 3)]
    path = write_rows(folder / "rows.csv", list(zip(texts, itertools.cycle(["a", "b"]), strict=False)))
    encoder = make_encoder(folder / "encoder")
    stores, made = [], []
    for name, (fold, of) in zip(("base", "candidate"), folds, strict=True):
        given = {"model.name": str(encoder), "data.path": str(path), "data.folds": of, "data.fold": fold}
        stores.append(make_store(config.load("intent", given).recipe, encoder, folder))
        model = make_artifact(folder / f"{name}-made", ("a", "b"), seed=len(stores))
        made.append(owned(model, folder / name, stores[-1]))
    return gate.Sides(made[1], made[0], stores[0], stores[0], further=(stores[1],), timed=False), stores


def test_rows_that_the_candidate_alone_was_trained_on_are_left_out(tmp_path: Path) -> None:
    """The second quarter of the rows is in part the first third, which the candidate has held out."""
    both, (theirs, own) = folded(tmp_path, (1, 4), (0, 3))
    found = gate.run(both, Gate())
    trained = np.isin(theirs.keys("test"), own.keys("train"))
    assert 0 < found["trained_on"] == trained.sum() < len(trained)
    assert found["rows"] == (~trained).sum()


def test_a_candidate_that_was_trained_on_all_rows_is_told_to_name_others(tmp_path: Path) -> None:
    both, _ = folded(tmp_path, (0, 4), (1, 4))
    with pytest.raises(UserError) as error:
        gate.run(both, Gate())
    assert error.value.code == "no_unseen_rows"


def test_a_store_that_is_gone_does_not_tell_what_was_trained_on(tmp_path: Path) -> None:
    both, (theirs, _) = folded(tmp_path, (0, 4), (1, 4))
    found = gate.run(replace(both, further=()), Gate())
    assert (found["rows"], found["trained_on"]) == (theirs.rows("test"), None)


def test_a_file_with_labels_of_another_model_is_refused_and_a_few_of_them_are_counted(tmp_path: Path) -> None:
    folders = [make_artifact(tmp_path / str(seed), ("late", "lost"), seed) for seed in (1, 2)]
    one, other = (predictor.Predictor.load(folder) for folder in folders)

    def rows(labels: list[str]) -> Data:
        path = write_rows(tmp_path / "rows.csv", list(zip(CORPUS[:10], itertools.cycle(labels), strict=False)))
        return score.settings(artifact.read(folders[0]), {"data.path": str(path)})

    with pytest.raises(ConfigError) as caught:
        answered.of_file(one, other, rows(["LATE", "LOST"]))
    assert [(one.field, one.code) for one in caught.value.problems] == [("data.label", "other_labels")]
    some = gate.run(gate.Sides(folders[1], folders[0], rows(["late", "LOST"]), timed=False), Gate())
    assert (some["rows"], some["unknown_labels"]) == (10, 5)


def test_outputs_of_masked_words_in_a_file_are_not_kept(tmp_path: Path) -> None:
    """A row has one for each piece of the vocabulary and each mask: 10,000 rows of 512 tokens would have 90 GB."""
    facts = {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": 300}
    folders = [make_task_artifact(tmp_path / str(seed), "masked_lm", Head((), facts), seed) for seed in (1, 2)]
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"{text}\n" for text in CORPUS * 3))
    named = {"data.path": str(tmp_path / "rows.csv"), "data.text": "text", "data.label": None}
    data = score.settings(artifact.read(folders[0]), named)
    one, other = (predictor.Predictor.load(folder) for folder in folders)
    both = answered.of_file(one, other, data)
    assert [side.answered.outputs for side in (both.base, both.candidate)] == [[], []]
    headline = answered.judge(both).headline
    assert headline is not None
    assert headline.name == "neg_loss"
    assert [headline.first, headline.other] == pytest.approx(
        [score.run(folder, data)["scores"]["neg_loss"] for folder in folders]
    )
