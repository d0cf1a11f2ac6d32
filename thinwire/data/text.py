"""Texts with classes as rows of word ids, or of token ids of a pretrained model.

    words    0 padding, 1 unknown word, 3 ... the most frequent words of the training texts
    tokens   those of a checkpoint of transformers

Rows are made once and cached (`cache.py`).

>>> ids = vocabulary([words("The cat. The dog!")])
>>> id_rows([words("the bird")], ids, length=4).tolist()
[[3, 1, 0, 0]]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.data.cache import cached
from thinwire.data.checkpoints import load_tokenizer, read_config
from thinwire.data.examples import Arrays
from thinwire.errors import DataError

PAD, UNKNOWN, FIRST_WORD = 0, 1, 3
IDS = 20_000  # size of the vocabulary: an embedding of 20,000 rows fits every text task

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


class Split(NamedTuple):
    """Texts, one or two per example, and the class of each example."""

    texts: list[tuple[str, ...]]
    labels: list[int]


class TextDataset(NamedTuple):
    """A dataset of texts before tokenization.

    Args:
        files: all files that `read` reads.
        read: returns the training and the test split.
        classes: number of classes.
        note: as in `Source`.
    """

    files: tuple[Path, ...]
    read: Callable[[], list[Split]]
    classes: int
    note: str = ""


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters and digits with an inner apostrophe; all else separates words.

    >>> words("Don't PANIC: it's 42.")
    ["don't", 'panic', "it's", '42']
    """
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[Sequence[str]], size: int = IDS) -> dict[str, int]:
    """The ids of the most frequent words, below `size`; equally frequent ones in alphabetical order."""
    counts = Counter(word for text in texts for word in text)
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - FIRST_WORD]
    return {word: i for i, (word, _) in enumerate(common, FIRST_WORD)}


def id_rows(texts: Sequence[Sequence[str]], ids: Mapping[str, int], length: int) -> np.ndarray:
    """(texts, length) int64 rows of the ids of words, padded or truncated at the end.

    A text without words becomes one unknown word, so that a mean over words is defined.
    """
    out = np.zeros((len(texts), length), np.int64)
    for row, text in zip(out, texts, strict=True):
        line = [ids.get(word, UNKNOWN) for word in text[:length]] or [UNKNOWN]
        row[: len(line)] = line
    return out


def word_examples(name: str, data: TextDataset, length: int) -> list[Arrays]:
    """Training and test examples of word ids; the vocabulary is that of the training texts."""

    def make() -> list[tuple[Tensor, Tensor]]:
        splits = data.read()
        texts = [[words(text) for (text,) in split.texts] for split in splits]
        ids = vocabulary(texts[0])
        rows = [torch.from_numpy(id_rows(some, ids, length)).short() for some in texts]
        return [(one, torch.tensor(split.labels)) for one, split in zip(rows, splits, strict=True)]

    return [Arrays(rows.long(), labels) for rows, labels in cached(f"{name}-v2", data.files, make)]


def token_examples(name: str, data: TextDataset, checkpoint: Path, length: int) -> list[Arrays]:
    """Training and test examples: `input_ids`, `attention_mask`, and `token_type_ids` for pairs of texts.

    Args:
        name: of the dataset.
        data: its texts.
        checkpoint: the folder of the model, with its tokenizer.
        length: maximum number of tokens of an example; longer ones are truncated.
    """
    files = (*data.files, *sorted(path for path in checkpoint.glob("*") if path.is_file()))
    made = cached(f"tokens-v4-{name}-{length}", files, lambda: tokenize(data.read(), checkpoint, length))
    return [Arrays(inputs, labels) for inputs, labels in made]


def tokenize(splits: list[Split], checkpoint: Path, length: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """The tokens of all texts, padded at the end to the longest of them, and the labels."""
    config = read_config(checkpoint)
    vocabulary, ends = config.get("vocab_size"), (config.get("pad_token_id"), config.get("eos_token_id"))
    if not isinstance(vocabulary, int):
        raise DataError(f"{checkpoint}: no config.json with a vocab_size; expected a checkpoint folder of transformers")
    if not any(path.suffix == ".model" or path.stem in ("tokenizer", "vocab") for path in checkpoint.glob("*")):
        # some versions of transformers would return a tokenizer without a vocabulary
        raise DataError(
            f"{checkpoint}: no tokenizer there, such as tokenizer.json; copy it from the checkpoint's source"
        )
    tokenizer = load_tokenizer(checkpoint, "text-classification")
    pad = next((one for one in ends if isinstance(one, int)), 0)
    columns = [map(list, zip(*split.texts, strict=True)) for split in splits]
    found = [tokenizer(*texts, truncation=True, max_length=length, return_attention_mask=False) for texts in columns]
    # an empty text needs one token to attend to
    tokens = [[row or [tokenizer.eos_token_id or 0] for row in one["input_ids"]] for one in found]
    width, out = max(len(row) for rows in tokens for row in rows), []

    def padded(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int32)

    for rows, one, split in zip(tokens, found, splits, strict=True):
        mask = padded(([1] * len(row) for row in rows), 0).bool()
        inputs = {"input_ids": padded(rows, pad), "attention_mask": mask}
        if int(inputs["input_ids"][mask].max()) >= vocabulary:
            raise DataError(f"{checkpoint}: its tokenizer gives ids beyond the vocab_size in config.json")
        if "token_type_ids" in one and (types := padded(one["token_type_ids"], 0)).any():
            inputs["token_type_ids"] = types
        out.append((inputs, torch.tensor(split.labels)))
    return out
