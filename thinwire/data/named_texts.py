"""Named datasets of texts: 20 Newsgroups and four tasks of GLUE, as word ids or as tokens of a pretrained model.

20newsgroups: messages, split by date. Read from the archive `20newsgroups/20news-bydate.tar.xz` (or .tar.gz) without
unpacking it to disk: members are `20news-bydate-train/<group>/<id>` and `20news-bydate-test/<group>/<id>`, in Latin-1.
Headers, signatures and quotations reveal the group and are removed, by the rules of scikit-learn; papers that kept them
have higher accuracies.

GLUE: classification of a sentence (SST-2, CoLA) or of a pair of sentences (RTE, MRPC). Read from the official files,
`glue/SST-2/train.tsv` and so on: columns between tabs, without quoting. The labels of the test files are not published,
so the dev files are the test set.

text-classification: the same texts for any checkpoint of transformers (`checkpoints.py`).
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data.cache import cached
from thinwire.data.checkpoints import MINILM, find_checkpoint
from thinwire.data.examples import Arrays, Source
from thinwire.data.files import class_tensor, find, no_data, one_line, pick, read_text
from thinwire.data.text import LabeledTexts, TextDataset, TokenArrays, tokens, word_rows
from thinwire.errors import ConfigError, DataError, UnknownName

_GROUPS = 20
_LARGEST = 1 << 22  # bytes of a message; the largest has 161 thousand
_MOST = 1 << 28  # bytes of all messages (they have 35 million), or of a file of GLUE
_STRIPPED = "Headers, signatures and quoted lines are removed."
_WHOLE = "Whole messages: headers, signatures and quoted lines are kept, and reveal the group."
_DEV = "The test set is the dev split: GLUE does not publish the labels of its test split."
_GLUE = "Wang et al., GLUE: a multi-task benchmark, 2018"

# A line that contains one of the first, or begins with one of the second, is a quotation.
_CONTAINS = ("writes in", "writes:", "wrote:", "says:", "said:")
_BEGINS = ("In article", "Quoted from", "|", ">")


def _word_source(name: str, texts: TextDataset, length: int) -> Source:
    """Texts as rows of word ids, from the cache if they were read from the same files before."""

    def make() -> TokenArrays:
        return word_rows(texts.read(), length)

    def fits(arrays: TokenArrays) -> bool:
        names = [f"{split}_{what}" for split in ("train", "test") for what in ("rows", "labels")]
        shapes = [arrays[name].shape if name in arrays else () for name in names]
        return all(shapes) and (shapes[0], shapes[2]) == ((*shapes[1], length), (*shapes[3], length))

    arrays = cached(f"{name}-v1", texts.files, make, fits)
    parts = [
        Arrays(
            torch.from_numpy(arrays[f"{split}_rows"].astype(np.int64)),
            class_tensor(arrays[f"{split}_labels"], texts.classes, name),
        )
        for split in ("train", "test")
    ]
    return Source(parts[0], parts[1], texts.classes, note=texts.note)


def _absent(task: str, layout: str) -> list[LabeledTexts]:
    """Raised when texts are read, because token ids in the folder `tokens` need none."""
    raise no_data(task, layout)


# -- 20 Newsgroups ---------------------------------------------------------------------------------------------------


@register(
    "dataset",
    "20newsgroups",
    doc="11,314 + 7,532 messages to 20 newsgroups, without headers, signatures and quotes; 256 words.",
    paper="Lang, NewsWeeder: learning to filter netnews, 1995",
)
def newsgroups(data_dir: Path | None = None) -> Source:
    """Messages to twenty newsgroups, split by date."""
    return _word_source("20newsgroups", newsgroup_texts(data_dir), 256)


def newsgroup_texts(data_dir: Path | None = None, whole: bool = False) -> TextDataset:
    """The messages; `whole`: with headers, signatures and quotations, as FLASC's authors have them."""
    folder = find(data_dir, "20newsgroups", "20news-bydate")
    if folder is None:
        return TextDataset(
            (), partial(_absent, "20newsgroups", "20newsgroups/20news-bydate.tar.gz"), _GROUPS, _STRIPPED
        )
    path = pick(folder, "20news-bydate.tar.xz", "20news-bydate.tar.gz")
    read = partial(_read_archive, path, str if whole else strip_message)
    return TextDataset((path,), read, _GROUPS, _WHOLE if whole else _STRIPPED)


def _read_archive(path: Path, text_of: Callable[[str], str]) -> list[LabeledTexts]:
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
                found[split][parts[1], parts[2]] = text_of(stream.read().decode("latin-1") if stream else "")
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError) as fault:
        raise DataError(f"{path}: not a complete tar archive ({one_line(fault)})") from None
    groups, others = (sorted({group for group, _ in messages}) for messages in found.values())
    if len(groups) != _GROUPS or others != groups:
        raise DataError(
            f"{path}: {len(groups)} groups in 20news-bydate-train and {len(others)} in 20news-bydate-test, "
            f"expected the same {_GROUPS}"
        )
    return [
        LabeledTexts(
            [(messages[name],) for name in sorted(messages)],
            np.array([groups.index(group) for group, _ in sorted(messages)]),
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
    """The file layout of a task of GLUE: its header line (or none) and its columns."""

    folder: str
    header: tuple[str, ...]
    columns: int
    texts: tuple[int, ...]
    label: int
    names: tuple[str, ...] = ("0", "1")  # how classes 0, 1, ... are spelled
    length: int = 40


_RTE = ("index", "sentence1", "sentence2", "label")
_MRPC = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_LAYOUTS = {
    "sst2": _Layout("SST-2", ("sentence", "label"), 2, (0,), 1),
    "cola": _Layout("CoLA", (), 4, (3,), 1),
    "rte": _Layout("RTE", _RTE, 4, (1, 2), 3, ("entailment", "not_entailment"), length=128),
    "mrpc": _Layout("MRPC", _MRPC, 5, (3, 4), 0, length=128),
}


def _glue(task: str, doc: str) -> Callable[..., Source]:
    """The loader of one of the tasks, registered."""

    @register("dataset", task, doc=doc, paper=_GLUE)
    def read(data_dir: Path | None = None) -> Source:
        return _word_source(task, glue_texts(task, data_dir), _LAYOUTS[task].length)

    return read


sst2 = _glue("sst2", "67,349 + 872 phrases of movie reviews, positive or negative; 40 words.")
cola = _glue("cola", "8,551 + 1,043 sentences, grammatical or not; 40 words.")
rte = _glue("rte", "2,490 + 277 pairs of texts, entailment or not; 128 words.")
mrpc = _glue("mrpc", "3,668 + 408 pairs of sentences, paraphrases or not; 128 words.")


def glue_texts(task: str, data_dir: Path | None = None) -> TextDataset:
    """The sentences of one of the four tasks."""
    layout = _LAYOUTS[task]
    folder = find(data_dir, f"glue/{layout.folder}", layout.folder)
    if folder is None:
        return TextDataset((), partial(_absent, task, f"glue/{layout.folder}/train.tsv and dev.tsv"), 2, _DEV)
    files = tuple(pick(folder, name) for name in ("train.tsv", "dev.tsv"))
    return TextDataset(files, lambda: [_read_sheet(layout, file) for file in files], 2, _DEV)


def _read_sheet(layout: _Layout, path: Path) -> LabeledTexts:
    lines = read_text(path, _MOST).removesuffix("\n").split("\n")  # not splitlines(): texts may contain other line ends
    rows = {number: tuple(line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if lines != [""]}
    if layout.header and (found := rows.pop(1, ())) != layout.header:
        raise DataError(f"{path}: begins with {_shown(found)}, expected the header {_shown(layout.header)}")
    if not rows:
        raise DataError(f"{path}: no examples")
    for number, row in rows.items():
        if len(row) != layout.columns:
            raise DataError(f"{path}: line {number} has {len(row)} fields, expected {layout.columns} between tabs")
        if row[layout.label] not in layout.names:
            given, expected = _shown((row[layout.label],)), " or ".join(layout.names)
            raise DataError(f"{path}: line {number} has the label {given}, expected {expected}")
    return LabeledTexts(
        [tuple(row[column] for column in layout.texts) for row in rows.values()],
        np.array([layout.names.index(row[layout.label]) for row in rows.values()], np.int64),
    )


def _shown(fields: tuple[str, ...]) -> str:
    """Fields of a line for an error message: at most 60 characters, escaped."""
    return repr(" ".join(fields)[:60])


# -- pretrained models -----------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path | None], TextDataset]] = {
    "20newsgroups": newsgroup_texts,
    "20newsgroups-headers": partial(newsgroup_texts, whole=True),
    **{name: partial(glue_texts, name) for name in ("sst2", "rte", "cola", "mrpc")},
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
    train, test = tokens(data, texts, folder, length, find(data_dir, "tokens"))
    note = f"{texts.note} Texts are truncated after {length} tokens."
    return Source(train, test, texts.classes, note=note.strip(), model={"checkpoint": str(folder)})
