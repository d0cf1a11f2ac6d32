"""20 Newsgroups, split by date: classification of messages into twenty newsgroups.

Read from the archive `20newsgroups/20news-bydate.tar.xz` (or .tar.gz) without unpacking it to disk: members are
`20news-bydate-train/<group>/<id>` and `20news-bydate-test/<group>/<id>`, in Latin-1. Headers, signatures and quotations
reveal the group and are removed, by the rules of scikit-learn; papers that kept them have higher accuracies.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.cache import cached
from thinwire.data.examples import Arrays, LabeledTexts, Source, TextDataset
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, one_line
from thinwire.data.vocabulary import Vocabulary, words
from thinwire.errors import DataError

LENGTH = 256
_GROUPS = 20
_LARGEST = 1 << 22  # bytes of a message; the largest has 161 thousand
_MOST = 1 << 28  # bytes of all messages; they have 35 million
_NOTE = "Headers, signatures and quoted lines are removed."
_WHOLE = "Whole messages: headers, signatures and quoted lines are kept, and reveal the group."

# A line that contains one of the first, or begins with one of the second, is a quotation.
_CONTAINS = ("writes in", "writes:", "wrote:", "says:", "said:")
_BEGINS = ("In article", "Quoted from", "|", ">")


@register(
    "dataset",
    "20newsgroups",
    doc="11,314 + 7,532 messages to 20 newsgroups, without headers, signatures and quotes; 256 words.",
    paper="Lang, NewsWeeder: learning to filter netnews, 1995",
)
def newsgroups(data_dir: Path | None = None) -> Source:
    """Messages to twenty newsgroups, split by date."""
    found = texts(data_dir)
    if not found.files:
        return _source(_word_ids(found.read()), "SetFit/20_newsgroups")
    return _source(cached("20newsgroups-v1", found.files, lambda: _word_ids(found.read()), _fits), found.files[0])


def texts(data_dir: Path | None = None) -> TextDataset:
    """The untokenized messages, for models with their own tokenizer."""
    folder = find(data_dir, "20newsgroups", "20news-bydate")
    if folder is None:
        return TextDataset((), _download, _GROUPS, _NOTE)
    path = pick(folder, "20news-bydate.tar.xz", "20news-bydate.tar.gz")
    return TextDataset((path,), lambda: _read(path, strip_message), _GROUPS, _NOTE)


def whole_texts(data_dir: Path | None = None) -> TextDataset:
    """The messages with headers, signatures and quotations, as FLASC's authors have them; needs the archive."""
    folder = find(data_dir, "20newsgroups", "20news-bydate")
    if folder is None:
        raise DataError(
            "20newsgroups-headers: the copy on the hub has no headers; put 20news-bydate.tar.gz into the folder "
            "20newsgroups of --data-dir, or write data = '20newsgroups'"
        )
    path = pick(folder, "20news-bydate.tar.xz", "20news-bydate.tar.gz")
    return TextDataset((path,), lambda: _read(path, str), _GROUPS, _WHOLE)


def _download() -> list[LabeledTexts]:
    layout = "20newsgroups/20news-bydate.tar.gz"
    return [
        LabeledTexts(*split) for split in hub.texts("20newsgroups", "SetFit/20_newsgroups", ("text", "label"), layout)
    ]


def _source(arrays: dict[str, np.ndarray], where: Path | str) -> Source:
    train, test = (
        Arrays(
            torch.from_numpy(arrays[f"{split}_rows"].astype(np.int64)),
            class_tensor(arrays[f"{split}_labels"], _GROUPS, where),
        )
        for split in ("train", "test")
    )
    return Source(train, test, classes=_GROUPS, note=_NOTE)


def _word_ids(splits: Sequence[LabeledTexts]) -> dict[str, np.ndarray]:
    """Rows of word ids, in 16 bits for the cache, and labels."""
    tokenized = [[(words(text),) for (text,) in split.texts] for split in splits]
    vocabulary = Vocabulary.of(text for (text,) in tokenized[0])
    out: dict[str, np.ndarray] = {}
    for name, messages, (_, labels) in zip(("train", "test"), tokenized, splits, strict=True):
        out[f"{name}_rows"] = vocabulary.rows(messages, LENGTH).astype(np.uint16)
        out[f"{name}_labels"] = labels
    return out


def _fits(arrays: dict[str, np.ndarray]) -> bool:
    return set(arrays) == {f"{split}_{what}" for split in ("train", "test") for what in ("rows", "labels")} and all(
        arrays[f"{split}_rows"].shape == (len(arrays[f"{split}_labels"]), LENGTH) for split in ("train", "test")
    )


def _read(path: Path, text_of: Callable[[str], str]) -> list[LabeledTexts]:
    """Both splits of the archive, sorted by member name; `text_of` makes the text of a message."""
    found: dict[str, dict[tuple[str, str], str]] = {"train": {}, "test": {}}
    total = 0
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                parts = member.name.removeprefix("./").split("/")
                split = parts[0].removeprefix("20news-bydate-")
                if not member.isreg() or len(parts) != 3 or split not in found:
                    continue
                total += member.size
                if member.size > _LARGEST or total > _MOST:
                    raise DataError(f"{path}: {member.name[:80]} is too large, expected a message of a newsgroup")
                stream = archive.extractfile(member)
                text = stream.read().decode("latin-1") if stream else ""
                found[split][parts[1], parts[2]] = text_of(text)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError) as fault:
        raise DataError(f"{path}: not a complete tar archive ({one_line(fault)})") from None
    groups = sorted({group for group, _ in found["train"]})
    others = {group for group, _ in found["test"]}
    if len(groups) != _GROUPS or others != set(groups):
        raise DataError(
            f"{path}: {len(groups)} groups in 20news-bydate-train and {len(others)} in 20news-bydate-test, "
            f"expected the same {_GROUPS}"
        )
    class_of = {group: i for i, group in enumerate(groups)}
    return [
        LabeledTexts(
            [(messages[name],) for name in sorted(messages)],
            np.array([class_of[group] for group, _ in sorted(messages)]),
        )
        for messages in found.values()
    ]


def strip_message(message: str) -> str:
    """The text of a message without header, signature and quotations.

    The header ends at the first empty line. The signature begins at the last line that is empty or all hyphens: a
    rough rule, which also removes the last paragraph of a message without a signature.

    >>> strip_message("From: me\\n\\nBob wrote:\\n> No.\\nYes!\\n\\n-- \\nme")
    'Yes!\\n'
    """
    body = message.replace("\r\n", "\n").partition("\n\n")[2].strip()
    lines = body.split("\n")
    last = next((i for i in range(len(lines) - 1, 0, -1) if not lines[i].strip().strip("-")), len(lines))
    return "\n".join(line for line in lines[:last] if not _is_quotation(line))


def _is_quotation(line: str) -> bool:
    return line.startswith(_BEGINS) or any(phrase in line for phrase in _CONTAINS)
