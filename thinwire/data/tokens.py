"""Texts as the token numbers of a pretrained model, made once and kept.

Kept are, for each half, all numbers one after another (16 bits where they fit), the length of every example, and for
pairs where the second text begins; rows filled up to one length are made when they are read. A file of them comes from
the cache, or from a folder `tokens` beside the data: with one, neither the texts nor a tokeniser are needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.data.cache import load, remember
from thinwire.data.examples import Arrays, Half, Texts
from thinwire.data.reading import class_tensor, one_line
from thinwire.errors import ConfigError, DataError

_HALVES = ("train", "test")
_WORD_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
_AT_ONCE = 4096  # texts given to a tokeniser at a time

Kept = dict[str, np.ndarray]


def tokens(data: str, texts: Texts, checkpoint: Path, length: int, beside: Path | None = None) -> tuple[Arrays, Arrays]:
    """Train and test examples: `input_ids`, `attention_mask`, and `token_type_ids` where texts come in pairs.

    Args:
        data: the name of the data set.
        texts: its texts.
        checkpoint: the folder of the model, with its tokeniser.
        length: most tokens of an example; what is longer is cut.
        beside: a folder that may hold the numbers already.
    """
    name, facts = file_name(data, checkpoint, length), _facts(checkpoint)

    def fits(kept: Kept) -> bool:
        return _fits(kept, length, facts["vocab_size"])

    def make() -> Kept:
        made = tokenise(texts.read(), checkpoint, length)
        if not fits(made):
            raise DataError(f"{checkpoint}: its tokeniser gives numbers that its model, by config.json, does not know")
        return made

    kept = load(beside / name) if beside else None
    if kept is None or not fits(kept):
        kept = remember(Path(name).stem, texts.files, make, fits) if texts.files else make()
    width = max(int(kept[f"{half}_lengths"].max()) for half in _HALVES)
    train, test = (_rows(kept, half, width, facts["pad"], texts.classes, data) for half in _HALVES)
    return train, test


def file_name(data: str, checkpoint: Path, length: int) -> str:
    """What the numbers of a data set are called: two checkpoints with the same tokeniser share them."""
    digest = hashlib.sha256()
    found = [checkpoint / file for file in _WORD_FILES if (checkpoint / file).is_file()]
    if not found:  # some versions of transformers would make do with a tokeniser that knows no word
        raise DataError(
            f"{checkpoint}: no tokeniser there, such as tokenizer.json; copy it from the checkpoint's source"
        )
    for file in (*found[:1], checkpoint / "tokenizer_config.json"):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return f"tokens-v1-{data}-{length}-{digest.hexdigest()[:12]}.npz"


def tokenise(halves: list[Half], checkpoint: Path, length: int) -> Kept:
    """The numbers of all texts, as they are kept."""
    transformers = library()
    try:
        tokeniser = transformers.AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
    except Exception as fault:  # of many kinds: a missing or damaged file, an unknown family, a missing package
        raise DataError(f"{checkpoint}: no tokeniser there that transformers can read ({one_line(fault)})") from None
    out: Kept = {}
    for name, (texts, labels) in zip(_HALVES, halves, strict=True):
        pairs = bool(texts) and len(texts[0]) == 2
        ids, lengths, seconds = [], [], []
        for first in range(0, len(texts), _AT_ONCE):
            columns = [list(column) for column in zip(*texts[first : first + _AT_ONCE], strict=True)]
            found = tokeniser(*columns, truncation=True, max_length=length, return_attention_mask=False)
            for i, row in enumerate(found["input_ids"]):
                # an empty text must still be something to look at
                row = row or [_number(tokeniser.eos_token_id)]
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
    """The package transformers, which an extra brings."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("text-classification needs transformers: pip install 'thinwire[hf]'") from error
    return transformers


def _facts(checkpoint: Path) -> dict[str, int]:
    """How many numbers the model knows, and which of them fills up."""
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


def _fits(kept: Kept, length: int, vocab: int) -> bool:
    """Whether arrays are what `tokenise` would make: files are not trusted."""
    for half in _HALVES:
        parts = [kept.get(f"{half}_{what}") for what in ("ids", "lengths", "labels")]
        if any(part is None or part.ndim != 1 or part.dtype.kind not in "iu" or not len(part) for part in parts):
            return False
        ids, lengths, labels = (part for part in parts if part is not None)
        seconds = kept.get(f"{half}_seconds", lengths)
        if not (len(lengths) == len(labels) == len(seconds) and seconds.dtype.kind in "iu"):
            return False
        if lengths.min() < 1 or lengths.max() > length or int(lengths.sum(dtype=np.int64)) != len(ids):
            return False
        if ids.min() < 0 or ids.max() >= vocab:
            return False
    return True


def _rows(kept: Kept, half: str, width: int, pad: int, classes: int, where: str) -> Arrays:
    """Examples of one length."""
    lengths = torch.from_numpy(kept[f"{half}_lengths"].astype(np.int64))
    place = torch.arange(width)
    words = place < lengths[:, None]
    ids = torch.full(words.shape, pad, dtype=torch.int32)
    ids[words] = torch.from_numpy(kept[f"{half}_ids"].astype(np.int32))
    inputs = {"input_ids": ids, "attention_mask": words}
    if (seconds := kept.get(f"{half}_seconds")) is not None and (seconds < kept[f"{half}_lengths"]).any():
        later = place >= torch.from_numpy(seconds.astype(np.int64))[:, None]
        inputs["token_type_ids"] = (later & words).to(torch.int32)
    return Arrays(inputs, class_tensor(kept[f"{half}_labels"], classes, where))
