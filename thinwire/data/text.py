"""Texts as rows of word ids, or of token ids of a pretrained model.

    words    0 padding, 1 unknown word, 2 separator of two texts, 3 ... the most frequent words of the training texts
    tokens   those of a checkpoint of transformers

Rows are made once and cached (`cache.py`).

>>> vocabulary = Vocabulary.of([words("The cat. The dog!")])
>>> vocabulary.rows([(words("the bird"),)], length=4).tolist()
[[3, 1, 0, 0]]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from thinwire.data.cache import cached
from thinwire.data.checkpoints import load_tokenizer, read_config
from thinwire.data.examples import Arrays
from thinwire.data.files import class_tensor
from thinwire.errors import DataError

PAD, UNKNOWN, SEPARATOR = 0, 1, 2
IDS = 20_000  # size of the vocabulary: an embedding of 20,000 rows fits every text task

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_SPLITS = ("train", "test")
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class LabeledTexts(NamedTuple):
    """Texts, one or two per example, and the class label of each example."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray


class TextDataset(NamedTuple):
    """A dataset of texts before tokenization.

    Args:
        files: all files that `read` reads.
        read: returns the training and the test split.
        classes: number of classes.
        note: as in `Source`.
    """

    files: tuple[Path, ...]
    read: Callable[[], list[LabeledTexts]]
    classes: int
    note: str = ""


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters and digits with an inner apostrophe; all else separates words.

    >>> words("Don't PANIC: it's 42.")
    ["don't", 'panic', "it's", '42']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The id of each known word."""

    ids: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], size: int = IDS) -> Vocabulary:
        """The most frequent words, as many as fit into `size` ids; equally frequent ones in alphabetical order."""
        counts = Counter(word for text in texts for word in text)
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - SEPARATOR - 1]
        return cls({word: i for i, (word, _) in enumerate(common, SEPARATOR + 1)})

    def rows(self, examples: Sequence[tuple[Sequence[str], ...]], length: int) -> np.ndarray:
        """(examples, length) int64 rows of ids, padded or truncated at the end.

        An example is one text or a pair. The second text of a pair takes up to half of the row, the first one the rest.
        A text without words becomes one unknown word, so that a mean over words is defined.
        """
        out = np.zeros((len(examples), length), np.int64)
        for row, texts in zip(out, examples, strict=True):
            line, *more = ([self.ids.get(word, UNKNOWN) for word in text] or [UNKNOWN] for text in texts)
            for second in more:
                second = second[: length // 2]
                line = [*line[: length - 1 - len(second)], SEPARATOR, *second]
            row[: len(line)] = line[:length]
        return out


def word_examples(name: str, texts: TextDataset, length: int) -> list[Arrays]:
    """Training and test examples of word ids; the vocabulary is that of the training texts."""

    def make() -> dict[str, np.ndarray]:
        splits = texts.read()
        split_words = [[tuple(map(words, one)) for one in split.texts] for split in splits]
        vocabulary, out = Vocabulary.of(text for example in split_words[0] for text in example), {}
        for split, examples, read in zip(_SPLITS, split_words, splits, strict=True):
            out[f"{split}_rows"] = vocabulary.rows(examples, length).astype(np.uint16)
            out[f"{split}_labels"] = read.labels
        return out

    arrays = cached(f"{name}-v1", texts.files, make)
    rows = {split: torch.from_numpy(arrays[f"{split}_rows"].astype(np.int64)) for split in _SPLITS}
    return [Arrays(rows[split], class_tensor(arrays[f"{split}_labels"], texts.classes, name)) for split in _SPLITS]


def token_examples(name: str, texts: TextDataset, checkpoint: Path, length: int) -> list[Arrays]:
    """Training and test examples: `input_ids`, `attention_mask`, and `token_type_ids` for pairs of texts.

    Args:
        name: of the dataset.
        texts: its texts.
        checkpoint: the folder of the model, with its tokenizer.
        length: maximum number of tokens of an example; longer ones are truncated.
    """
    files = (*texts.files, *sorted(path for path in checkpoint.glob("*") if path.is_file()))
    arrays = cached(f"tokens-v3-{name}-{length}", files, lambda: tokenize(texts.read(), checkpoint, length))
    width = max(int(arrays[f"{split}_attention_mask"].sum(1).max()) for split in _SPLITS)
    out = []
    for split in _SPLITS:
        inputs = {kind: torch.from_numpy(arrays[f"{split}_{kind}"][:, :width]) for kind in _INPUTS}
        if not inputs["token_type_ids"].any():
            del inputs["token_type_ids"]
        out.append(Arrays(inputs, class_tensor(arrays[f"{split}_labels"], texts.classes, name)))
    return out


def tokenize(splits: list[LabeledTexts], checkpoint: Path, length: int) -> dict[str, np.ndarray]:
    """The tokens of all texts in rows of `length`, padded at the end, and the labels."""
    config = read_config(checkpoint)
    vocabulary, ends = config.get("vocab_size"), (config.get("pad_token_id"), config.get("eos_token_id"))
    if not isinstance(vocabulary, int):
        raise DataError(f"{checkpoint}: no config.json with a vocab_size; expected a checkpoint folder of transformers")
    if not any(path.suffix == ".model" or path.stem in ("tokenizer", "vocab") for path in checkpoint.glob("*")):
        # some versions of transformers would return a tokenizer without a vocabulary
        raise DataError(
            f"{checkpoint}: no tokenizer there, such as tokenizer.json; copy it from the checkpoint's source"
        )
    tokenizer, out = load_tokenizer(checkpoint, "text-classification"), dict[str, np.ndarray]()
    for split, (texts, labels) in zip(_SPLITS, splits, strict=True):
        columns = map(list, zip(*texts, strict=True))
        found = tokenizer(*columns, truncation=True, max_length=length, return_attention_mask=False)
        ids = np.full((len(texts), length), next((one for one in ends if isinstance(one, int)), 0), np.int32)
        mask, types = np.zeros(ids.shape, bool), np.zeros_like(ids)
        for i, row in enumerate(found["input_ids"]):
            row = row or [tokenizer.eos_token_id or 0]  # an empty text needs one token to attend to
            ids[i, : len(row)], mask[i, : len(row)] = row, True
        for i, row in enumerate(found.get("token_type_ids", ())):
            types[i, : len(row)] = row
        if ids[mask].max() >= vocabulary:
            raise DataError(f"{checkpoint}: its tokenizer gives ids beyond the vocab_size in config.json")
        made = (ids, mask, types, np.asarray(labels, np.int64))
        out |= {f"{split}_{name}": block for name, block in zip((*_INPUTS, "labels"), made, strict=True)}
    return out
