"""Named datasets of texts: 20 Newsgroups as word ids; Shakespeare, as characters; 20 Newsgroups and four tasks of GLUE,
as tokens of a pretrained model.

20newsgroups: messages, split by date. Read from the archive `20newsgroups/20news-bydate.tar.xz` (or .tar.gz) without
unpacking it to disk: members are `20news-bydate-train/<group>/<id>` and `20news-bydate-test/<group>/<id>`, in Latin-1.
Headers, signatures and quotations reveal the group and are removed, by the rules of scikit-learn; papers that kept them
have higher accuracies.

GLUE: classification of a sentence (SST-2, CoLA) or of a pair of sentences (RTE, MRPC). Read from the official files,
`glue/SST-2/train.tsv` and so on: columns between tabs, without quoting. The labels of the test files are not published,
so the dev files are the test set.

text-classification: these texts for any checkpoint of transformers (`checkpoints.py`).

shakespeare: prediction of the next character after 80 characters of a role. Read from `shakespeare/all_data.json.gz`,

    {"users": [name, ...], "user_data": {name: {"raw": text}}}

in the layout of LEAF (Caldas et al., 2018). Line ends are spaces, and several spaces are one. Windows begin at every
character. The first 80 % of a role's windows are the training set and the rest the test set, without the 80 windows in
between, which share characters with both.
"""

from __future__ import annotations

import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data.checkpoints import MINILM, find_checkpoint
from thinwire.data.examples import Source, TextWindows
from thinwire.data.files import folder_of, one_line, pick, read_text
from thinwire.data.text import Split, TextDataset, token_examples, word_examples
from thinwire.errors import ConfigError, DataError, UnknownName

_GROUPS = 20
_MAX_MESSAGE_BYTES = 1 << 22  # bytes of a message; the largest has 161 thousand
_MAX_BYTES = 1 << 31  # bytes of a file of texts
_STRIPPED = "Headers, signatures and quoted lines are removed."
_WHOLE = "Whole messages: headers, signatures and quoted lines are kept, and reveal the group."
_DEV = "The test set is the dev split: GLUE does not publish the labels of its test split."
_ROLES = "Roles come from the mark-up of the text; this is not LEAF's file, which has 1,129 users."

# A line that contains one of the first, or begins with one of the second, is a quotation.
_CONTAINS = ("writes in", "writes:", "wrote:", "says:", "said:")
_BEGINS = ("In article", "Quoted from", "|", ">")


# -- 20 Newsgroups ---------------------------------------------------------------------------------------------------


@register(
    "dataset",
    "20newsgroups",
    doc="11,314 + 7,532 messages to 20 newsgroups, without headers, signatures and quotes; 256 words.",
    paper="Lang, NewsWeeder: learning to filter netnews, 1995",
)
def newsgroups(data_dir: Path | None = None) -> Source:
    """Messages to twenty newsgroups, split by date."""
    data = newsgroup_texts(data_dir)
    train, test = word_examples("20newsgroups", data, 256)
    return Source(train, test, data.classes, note=data.note)


def newsgroup_texts(data_dir: Path | None = None, whole: bool = False) -> TextDataset:
    """The messages; `whole`: with headers, signatures and quotations, as FLASC's authors have them."""
    layout = "20newsgroups/20news-bydate.tar.gz"
    folder = folder_of(data_dir, "20newsgroups", layout, "20newsgroups", "20news-bydate")
    path = pick(folder, "20news-bydate.tar.xz", "20news-bydate.tar.gz")
    read = partial(_read_archive, path, str if whole else strip_message)
    return TextDataset((path,), read, _GROUPS, _WHOLE if whole else _STRIPPED)


def _read_archive(path: Path, text_of: Callable[[str], str]) -> list[Split]:
    """Both splits of the archive, sorted by group and message; `text_of` makes the text of a message."""
    found: dict[str, dict[str, str]] = {"train": {}, "test": {}}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                split, _, name = member.name.removeprefix("./").removeprefix("20news-bydate-").partition("/")
                stream = archive.extractfile(member) if member.isreg() and split in found else None
                if stream is None:
                    continue
                if member.size > _MAX_MESSAGE_BYTES:
                    raise DataError(f"{path}: {member.name[:80]} is too large, expected a message of a newsgroup")
                found[split][name] = text_of(stream.read().decode("latin-1"))
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError) as fault:
        raise DataError(f"{path}: not a complete tar archive ({one_line(fault)})") from None
    groups, others = (sorted({name.partition("/")[0] for name in messages}) for messages in found.values())
    if len(groups) != _GROUPS or others != groups:
        raise DataError(
            f"{path}: {len(groups)} groups in 20news-bydate-train and {len(others)} in 20news-bydate-test, "
            f"expected the same {_GROUPS}"
        )
    return [
        Split(
            [(messages[name],) for name in sorted(messages)],
            [groups.index(name.partition("/")[0]) for name in sorted(messages)],
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
    lines = message.replace("\r\n", "\n").partition("\n\n")[2].strip().split("\n")
    last = next((i for i in range(len(lines) - 1, 0, -1) if not lines[i].strip().strip("-")), len(lines))
    kept = (line for line in lines[:last] if not any(phrase in line for phrase in _CONTAINS))
    return "\n".join(line for line in kept if not line.startswith(_BEGINS))


# -- GLUE ------------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The files of a task of GLUE: the number of columns, and which are read."""

    folder: str
    columns: int
    texts: tuple[int, ...]
    label: int
    names: tuple[str, ...] = ("0", "1")  # how classes 0, 1, ... are spelled
    header: bool = True


_LAYOUTS = {
    "sst2": _Layout("SST-2", 2, (0,), 1),
    "cola": _Layout("CoLA", 4, (3,), 1, header=False),
    "rte": _Layout("RTE", 4, (1, 2), 3, ("entailment", "not_entailment")),
    "mrpc": _Layout("MRPC", 5, (3, 4), 0),
}


def glue_texts(task: str, data_dir: Path | None = None) -> TextDataset:
    """The sentences of one of the four tasks."""
    layout = _LAYOUTS[task]
    place = f"glue/{layout.folder}"
    folder = folder_of(data_dir, task, f"{place}/train.tsv and dev.tsv", place, layout.folder)
    files = tuple(pick(folder, name) for name in ("train.tsv", "dev.tsv"))
    return TextDataset(files, lambda: [_read_sheet(layout, file) for file in files], 2, _DEV)


def _read_sheet(layout: _Layout, path: Path) -> Split:
    # not splitlines() or csv: texts contain quotation marks and other line ends
    lines = read_text(path, _MAX_BYTES).replace("\r\n", "\n").removesuffix("\n").split("\n")[layout.header :]
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, 1 + layout.header):
        if len(row) != layout.columns or row[layout.label] not in layout.names:
            raise DataError(
                f"{path}: line {number} is {' '.join(row)[:60]!r}, expected {layout.columns} fields between tabs and "
                f"the label {' or '.join(layout.names)}"
            )
    if not rows:
        raise DataError(f"{path}: no examples")
    texts = [tuple(row[column] for column in layout.texts) for row in rows]
    return Split(texts, [layout.names.index(row[layout.label]) for row in rows])


# -- pretrained models -----------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path | None], TextDataset]] = {
    "20newsgroups": newsgroup_texts,
    "20newsgroups-headers": partial(newsgroup_texts, whole=True),
    **{name: partial(glue_texts, name) for name in _LAYOUTS},
}


@register(
    "dataset",
    "text-classification",
    doc="Texts (20newsgroups, sst2, rte, cola, mrpc) for a pretrained Hugging Face model; MiniLM, 128 tokens.",
    paper="Lang, 1995; Wang et al., 2018",
)
def text_classification(
    data_dir: Path | None = None, data: str = "20newsgroups", checkpoint: str = MINILM, length: int = 128
) -> Source:
    """Texts as token ids of a checkpoint, with the official training and test splits (GLUE: dev)."""
    if data not in READERS:
        raise UnknownName("task.data", data, READERS)
    if not 4 <= length <= 1 << 16:
        raise ConfigError(f"task.length must be from 4 to 65536 tokens, not {length}")
    folder = find_checkpoint(checkpoint or MINILM, data_dir)
    texts = READERS[data](data_dir)
    train, test = token_examples(data, texts, folder, length)
    note = f"{texts.note} Texts are truncated after {length} tokens."
    return Source(train, test, texts.classes, note=note, model={"checkpoint": str(folder)})


# -- Shakespeare -----------------------------------------------------------------------------------------------------

# The 80 characters of LEAF. Line ends are replaced in all texts, so the code of a line end is used for unknown ones.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
_CODES = np.zeros(256, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


@register(
    "dataset",
    "shakespeare",
    doc="Next character after 80, by speaking role (1,074 of them); 80 characters.",
    paper="Caldas et al., LEAF, 2018; McMahan et al., AISTATS 2017",
)
def shakespeare(data_dir: Path | None = None) -> Source:
    """Next character of the lines of a role, one user per role."""
    folder = folder_of(data_dir, "shakespeare", "shakespeare/all_data.json.gz", "shakespeare")
    path = pick(folder, "all_data.json", "all_data.json.gz")
    text, starts = "", dict[str, list[np.ndarray]](train=[], test=[])
    for raw in _roles(path):
        windows = np.arange(len(text), len(text) + max(0, len(raw) - LENGTH))
        cut = max(1, int(0.8 * len(windows)))
        starts["train"].append(windows[:cut])
        starts["test"].append(windows[cut + LENGTH :])
        text += raw
    if not all(any(map(len, part)) for part in starts.values()):
        raise DataError(f"{path}: no role has enough text for training and test windows of {LENGTH} characters")
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    codes = torch.from_numpy(_CODES[np.minimum(points, 255)])
    train, test = (TextWindows(codes, torch.from_numpy(np.concatenate(part)), LENGTH) for part in starts.values())
    users, others = (torch.from_numpy(np.repeat(np.arange(len(p)), [*map(len, p)])) for p in starts.values())
    return Source(train, test, len(ALPHABET), users, others, note=_ROLES)


def _roles(path: Path) -> list[str]:
    """The text of each role, in the order of the file."""
    text = read_text(path, _MAX_BYTES)
    try:
        found = json.loads(text)
        return [re.sub("  +", " ", found["user_data"][name]["raw"].replace("\n", " ")) for name in found["users"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise DataError(
            f"{path}: {type(fault).__name__} ({one_line(fault)}), expected the JSON object of LEAF with 'users' and, "
            "under 'user_data', the text of each under 'raw'"
        ) from None
