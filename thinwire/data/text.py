"""Texts as rows of word ids, or of token ids of a pretrained model.

    words    0 padding, 1 unknown word, 2 separator of two texts, 3 ... the most frequent words of the training texts
    tokens   those of a checkpoint of transformers, tokenized once

A cache file of tokens contains, for the training and the test split, all ids concatenated (16 bits where they fit), the
length of every example, and for pairs the position of the second text. It comes from the cache, or from a folder
`tokens` next to the datasets: then neither texts nor a tokenizer are needed.

>>> vocabulary = Vocabulary.of([words("The cat. The dog!")])
>>> vocabulary.rows([(words("the bird"),)], length=4).tolist()
[[3, 1, 0, 0]]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.data.cache import cached, load
from thinwire.data.checkpoints import load_tokenizer
from thinwire.data.examples import Arrays
from thinwire.data.files import class_tensor
from thinwire.errors import DataError

PAD, UNKNOWN, SEPARATOR = 0, 1, 2
IDS = 20_000  # size of the vocabulary: an embedding of 20,000 rows fits every text task

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_SPLITS = ("train", "test")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
_BATCH = 4096  # texts that are tokenized in one call

TokenArrays = dict[str, np.ndarray]


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


def word_rows(splits: Sequence[LabeledTexts], length: int) -> TokenArrays:
    """Rows of word ids of training and test texts, in 16 bits, and labels; the vocabulary is that of training texts."""
    split_words = [[tuple(map(words, texts)) for texts in split.texts] for split in splits]
    vocabulary = Vocabulary.of(text for example in split_words[0] for text in example)
    rows = {
        f"{name}_rows": vocabulary.rows(examples, length).astype(np.uint16)
        for name, examples in zip(_SPLITS, split_words, strict=True)
    }
    return rows | {f"{name}_labels": split.labels for name, split in zip(_SPLITS, splits, strict=True)}


def tokens(
    data: str, texts: TextDataset, checkpoint: Path, length: int, folder: Path | None = None
) -> tuple[Arrays, Arrays]:
    """Training and test examples: `input_ids`, `attention_mask`, and `token_type_ids` for pairs of texts.

    Args:
        data: name of the dataset.
        texts: its texts.
        checkpoint: the folder of the model, with its tokenizer.
        length: maximum number of tokens of an example; longer ones are truncated.
        folder: a folder that may have the token ids already.
    """
    name, (vocab, pad) = file_name(data, checkpoint, length), _facts(checkpoint)

    def fits(arrays: TokenArrays) -> bool:
        return _fits(arrays, length, vocab)

    def make() -> TokenArrays:
        made = tokenize(texts.read(), checkpoint, length)
        if not fits(made):
            raise DataError(f"{checkpoint}: its tokenizer gives ids beyond the vocab_size in config.json")
        return made

    arrays = load(folder / name) if folder else None
    if arrays is None or not fits(arrays):
        arrays = cached(Path(name).stem, texts.files, make, fits)
    width = max(int(arrays[f"{split}_lengths"].max()) for split in _SPLITS)
    train, test = (_rows(arrays, split, width, pad, texts.classes, data) for split in _SPLITS)
    return train, test


def file_name(data: str, checkpoint: Path, length: int) -> str:
    """The file name of the token ids of a dataset; the same for two checkpoints with the same tokenizer."""
    digest = hashlib.sha256()
    found = [checkpoint / file for file in _TOKENIZER_FILES if (checkpoint / file).is_file()]
    if not found:  # some versions of transformers would return a tokenizer without a vocabulary
        raise DataError(
            f"{checkpoint}: no tokenizer there, such as tokenizer.json; copy it from the checkpoint's source"
        )
    for file in (*found[:1], checkpoint / "tokenizer_config.json"):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return f"tokens-v2-{data}-{length}-{digest.hexdigest()[:12]}.npz"


def tokenize(splits: list[LabeledTexts], checkpoint: Path, length: int) -> TokenArrays:
    """The token ids of all texts, as arrays for the cache."""
    tokenizer = load_tokenizer(checkpoint, "text-classification")
    out: TokenArrays = {}
    for name, (texts, labels) in zip(_SPLITS, splits, strict=True):
        ids, seconds = [], []
        for first in range(0, len(texts), _BATCH):
            columns = map(list, zip(*texts[first : first + _BATCH], strict=True))
            found = tokenizer(*columns, truncation=True, max_length=length, return_attention_mask=False)
            for i, row in enumerate(found["input_ids"]):
                row = row or [_number(tokenizer.eos_token_id)]  # an empty text needs one token to attend to
                ids.append(np.asarray(row, np.int32))
                kinds = found["token_type_ids"][i] if "token_type_ids" in found else []
                seconds.append(kinds.index(1) if 1 in kinds else len(row))
        flat = np.concatenate(ids)
        out[f"{name}_ids"] = flat.astype(np.uint16) if flat.max() < 1 << 16 else flat
        out[f"{name}_lengths"] = np.array([len(row) for row in ids], np.int32)
        out[f"{name}_seconds"] = np.array(seconds, np.int32)
        out[f"{name}_labels"] = np.asarray(labels, np.int64)
    return out


def _facts(checkpoint: Path) -> tuple[int, int]:
    """The vocabulary size and the padding id of the model."""
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
        return _number(config["vocab_size"]), _number(config.get("pad_token_id"), config.get("eos_token_id"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{checkpoint}: no config.json with a vocab_size; expected a checkpoint folder of transformers"
        ) from None


def _number(*values: Any) -> int:
    return next((value for value in values if isinstance(value, int)), 0)


def _fits(arrays: TokenArrays, length: int, vocab: int) -> bool:
    """Whether arrays have the layout of `tokenize`: files are not trusted."""
    for split in _SPLITS:
        names = (f"{split}_{what}" for what in ("ids", "lengths", "labels", "seconds"))
        ids, lengths, labels, seconds = found = [arrays.get(name, np.zeros(0)) for name in names]
        if any(one.ndim != 1 or one.dtype.kind not in "iu" or not len(one) for one in found):
            return False
        if not len(lengths) == len(labels) == len(seconds) or int(lengths.sum(dtype=np.int64)) != len(ids):
            return False
        if not (lengths.min() >= 1 and lengths.max() <= length and ids.min() >= 0 and ids.max() < vocab):
            return False
    return True


def _rows(arrays: TokenArrays, split: str, width: int, pad: int, classes: int, data: str) -> Arrays:
    """The examples of a split, padded to one length."""
    lengths = torch.from_numpy(arrays[f"{split}_lengths"].astype(np.int64))
    position = torch.arange(width)
    known = position < lengths[:, None]
    ids = torch.full(known.shape, pad, dtype=torch.int32)
    ids[known] = torch.from_numpy(arrays[f"{split}_ids"].astype(np.int32))
    inputs = {"input_ids": ids, "attention_mask": known}
    seconds = torch.from_numpy(arrays[f"{split}_seconds"].astype(np.int64))
    if (seconds < lengths).any():
        inputs["token_type_ids"] = ((position >= seconds[:, None]) & known).to(torch.int32)
    return Arrays(inputs, class_tensor(arrays[f"{split}_labels"], classes, data))
