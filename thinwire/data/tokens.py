"""Texts as token ids of a pretrained model, tokenized once and cached.

A cache file contains, for the training and the test split, all ids concatenated (16 bits where they fit), the length of
every example, and for pairs the position of the second text. Padded rows are made when the file is read. The file comes
from the cache, or from a folder `tokens` next to the datasets: then neither texts nor a tokenizer are needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.data.cache import cached, load
from thinwire.data.examples import Arrays, LabeledTexts, TextDataset
from thinwire.data.reading import class_tensor, one_line
from thinwire.errors import ConfigError, DataError

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
    name, facts = file_name(data, checkpoint, length), _facts(checkpoint)

    def fits(arrays: TokenArrays) -> bool:
        return _fits(arrays, length, facts["vocab_size"])

    def make() -> TokenArrays:
        made = tokenize(texts.read(), checkpoint, length)
        if not fits(made):
            raise DataError(f"{checkpoint}: its tokenizer gives ids beyond the vocab_size in config.json")
        return made

    arrays = load(folder / name) if folder else None
    if arrays is None or not fits(arrays):
        arrays = cached(Path(name).stem, texts.files, make, fits) if texts.files else make()
    width = max(int(arrays[f"{split}_lengths"].max()) for split in _SPLITS)
    train, test = (_rows(arrays, split, width, facts["pad"], texts.classes, data) for split in _SPLITS)
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
    return f"tokens-v1-{data}-{length}-{digest.hexdigest()[:12]}.npz"


def tokenize(splits: list[LabeledTexts], checkpoint: Path, length: int) -> TokenArrays:
    """The token ids of all texts, as arrays for the cache."""
    transformers = library()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
    except Exception as fault:  # the type varies: a missing or damaged file, an unknown model family, a missing package
        raise DataError(f"{checkpoint}: no tokenizer there that transformers can read ({one_line(fault)})") from None
    out: TokenArrays = {}
    for name, (texts, labels) in zip(_SPLITS, splits, strict=True):
        pairs = bool(texts) and len(texts[0]) == 2
        ids, lengths, seconds = [], [], []
        for first in range(0, len(texts), _BATCH):
            columns = [list(column) for column in zip(*texts[first : first + _BATCH], strict=True)]
            found = tokenizer(*columns, truncation=True, max_length=length, return_attention_mask=False)
            for i, row in enumerate(found["input_ids"]):
                # an empty text needs one token to attend to
                row = row or [_number(tokenizer.eos_token_id)]
                ids.append(np.asarray(row, np.int32))
                lengths.append(len(row))
                if pairs:
                    kinds = found["token_type_ids"][i] if "token_type_ids" in found else []
                    seconds.append(kinds.index(1) if 1 in kinds else len(row))
        flat = np.concatenate(ids)
        out[f"{name}_ids"] = flat.astype(np.uint16) if flat.max() < 1 << 16 else flat
        out[f"{name}_lengths"] = np.asarray(lengths, np.int32)
        if pairs:
            out[f"{name}_seconds"] = np.asarray(seconds, np.int32)
        out[f"{name}_labels"] = np.asarray(labels, np.int64)
    return out


def library() -> Any:
    """The package transformers, an optional dependency."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("text-classification needs transformers: pip install 'thinwire[hf]'") from error
    return transformers


def _facts(checkpoint: Path) -> dict[str, int]:
    """The vocabulary size and the padding id of the model."""
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
        vocab = config["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{checkpoint}: no config.json with a vocab_size; expected a checkpoint folder of transformers"
        ) from None
    return {"vocab_size": _number(vocab), "pad": _number(config.get("pad_token_id"), config.get("eos_token_id"))}


def _number(*values: Any) -> int:
    return next((value for value in values if isinstance(value, int)), 0)


def _fits(arrays: TokenArrays, length: int, vocab: int) -> bool:
    """Whether arrays have the layout of `tokenize`: files are not trusted."""
    for split in _SPLITS:
        parts = [arrays.get(f"{split}_{what}") for what in ("ids", "lengths", "labels")]
        if any(part is None or part.ndim != 1 or part.dtype.kind not in "iu" or not len(part) for part in parts):
            return False
        ids, lengths, labels = (part for part in parts if part is not None)
        seconds = arrays.get(f"{split}_seconds", lengths)
        if not (len(lengths) == len(labels) == len(seconds) and seconds.dtype.kind in "iu"):
            return False
        if lengths.min() < 1 or lengths.max() > length or int(lengths.sum(dtype=np.int64)) != len(ids):
            return False
        if ids.min() < 0 or ids.max() >= vocab:
            return False
    return True


def _rows(arrays: TokenArrays, split: str, width: int, pad: int, classes: int, data: str) -> Arrays:
    """The examples of a split, padded to one length."""
    lengths = torch.from_numpy(arrays[f"{split}_lengths"].astype(np.int64))
    position = torch.arange(width)
    words = position < lengths[:, None]
    ids = torch.full(words.shape, pad, dtype=torch.int32)
    ids[words] = torch.from_numpy(arrays[f"{split}_ids"].astype(np.int32))
    inputs = {"input_ids": ids, "attention_mask": words}
    if (seconds := arrays.get(f"{split}_seconds")) is not None and (seconds < arrays[f"{split}_lengths"]).any():
        second = position >= torch.from_numpy(seconds.astype(np.int64))[:, None]
        inputs["token_type_ids"] = (second & words).to(torch.int32)
    return Arrays(inputs, class_tensor(arrays[f"{split}_labels"], classes, data))
