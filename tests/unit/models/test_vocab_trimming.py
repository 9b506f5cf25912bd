"""A model folder with fewer tokens: loading, answers, and the memory that it saves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from rtrain.core.errors import UserError
from rtrain.models import vocab_trimming
from tests.support.tiny import make_encoder, make_masked
from tests.support.vocabularies import ROWS, STRANGE, trimmed


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_a_trimmed_folder_loads_and_answers_as_before(family: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    make_masked(tmp_path / "whole", family)
    out, ids = trimmed(tmp_path / "whole", tmp_path / "out")
    folders = (tmp_path / "whole", out)
    tokenizer = [tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders]
    network = [transformers.AutoModelForMaskedLM.from_pretrained(folder).eval() for folder in folders]
    assert network[1].config.vocab_size == len(ids) < network[0].config.vocab_size
    weights = load_file(out / "model.safetensors")
    assert len(ids) in {len(value) for value in weights.values()}
    assert all(network[0].config.vocab_size not in value.shape for value in weights.values())
    for row in ROWS:
        tokens = [torch.tensor([instance.encode(row).ids]) for instance in tokenizer]
        with torch.inference_mode():
            hidden = [
                instance.base_model(part).last_hidden_state for instance, part in zip(network, tokens, strict=True)
            ]
            logits = [instance(part).logits for instance, part in zip(network, tokens, strict=True)]
        assert torch.equal(*hidden)
        # A matrix of fewer columns may be summed in another order.
        torch.testing.assert_close(logits[1], logits[0][..., ids])


def test_transformers_reads_the_tokenizer_of_a_trimmed_folder(tmp_path: Path) -> None:
    complete = make_encoder(tmp_path / "whole")
    document = json.loads((complete / "tokenizer.json").read_text())
    names = vocab_trimming.tokens_by_id(document)
    about: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer",
        "added_tokens_decoder": {str(token["id"]): {**token, "id": None} for token in document["added_tokens"]},
        **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
    }
    for token in about["added_tokens_decoder"].values():
        del token["id"]
    (complete / "tokenizer_config.json").write_text(json.dumps(about))
    (complete / "vocab.txt").write_text("".join(f"{names[number]}\n" for number in sorted(names)))
    (complete / "modules.json").write_text("[]")
    out, ids = trimmed(complete, tmp_path / "out")
    assert (out / "vocab.txt").read_text().splitlines() == [names[number] for number in ids]
    assert (out / "modules.json").is_file()
    instance = transformers.AutoTokenizer.from_pretrained(out)
    local_part = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert len(instance) == len(ids)
    for text in ROWS:
        assert instance(text)["input_ids"] == local_part.encode(text).ids
    for text in STRANGE:  # Transformers' class strips accents, whatever the file says
        assert max(instance(text)["input_ids"]) < len(ids)
    network = transformers.AutoModel.from_pretrained(out)
    assert tuple(network.get_input_embeddings().weight.shape) == (len(ids), 32)


def test_ids_in_the_settings_are_renumbered(tmp_path: Path) -> None:
    complete = make_encoder(tmp_path / "whole")
    names = {
        piece: number
        for number, piece in vocab_trimming.tokens_by_id(json.loads((complete / "tokenizer.json").read_text())).items()
    }
    settings = json.loads((complete / "config.json").read_text())
    last = max(names.values())
    ends = {"pad_token_id": names["[PAD]"], "sep_token_id": names["[SEP]"], "eos_token_id": last, "bos_token_id": None}
    (complete / "config.json").write_text(json.dumps({**settings, **ends, "decoder_start_token_id": 99_999}))
    out, ids = trimmed(complete, tmp_path / "out")
    after = json.loads((out / "config.json").read_text())
    assert [ids[after[name]] for name in ("pad_token_id", "sep_token_id", "eos_token_id")] == [0, 3, last]
    assert (after["bos_token_id"], after["decoder_start_token_id"]) == (None, None)
    assert after["vocab_size"] == len(ids)
    facts = vocab_trimming.read_trimmed(out)
    assert facts is not None
    assert (facts.original_size, list(facts.kept_ids)) == (len(names), ids)
    assert vocab_trimming.read_trimmed(complete) is None


def test_weights_in_several_files_are_read_together(tmp_path: Path) -> None:
    complete = make_encoder(tmp_path / "whole")
    _, ids = trimmed(complete, tmp_path / "one")
    parts = shutil.copytree(complete, tmp_path / "parts")
    network = transformers.AutoModel.from_pretrained(complete)
    (parts / "model.safetensors").unlink()
    network.save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("model*.safetensors"))) > 1
    vocab_trimming.trim(parts, ids, tmp_path / "other")
    item, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert item.keys() == other.keys()
    assert all(torch.equal(item[name], other[name]) for name in item)


def test_weights_that_do_not_fit_the_tokenizer_are_refused(tmp_path: Path) -> None:
    complete = make_encoder(tmp_path / "whole")
    weights = load_file(complete / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    save_file({**weights, name: weights[name][:190].clone()}, complete / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, check=lambda error: error.code == "damaged"):
        vocab_trimming.trim(complete, list(range(200)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
