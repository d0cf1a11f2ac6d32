"""Four tasks of GLUE: classification of a sentence (SST-2, CoLA) or of a pair of sentences (RTE, MRPC).

Read from the official files, `glue/SST-2/train.tsv` and so on: columns between tabs, without quoting. The labels of the
test files are not published, so the dev files are the test set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.examples import Arrays, LabeledTexts, Source, TextDataset
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, read_text
from thinwire.data.vocabulary import Vocabulary, words
from thinwire.errors import DataError

_LIMIT = 1 << 28
_NOTE = "The test set is the dev split: GLUE does not publish the labels of its test split."
_PAPER = "Wang et al., GLUE: a multi-task benchmark, 2018"


@dataclass(frozen=True)
class _Layout:
    """The file layout of a task: its header line (or none) and its columns."""

    task: str
    folder: str
    header: tuple[str, ...]
    columns: int
    texts: tuple[int, ...]
    label: int
    names: tuple[str, ...]  # how classes 0, 1, ... are spelled
    length: int
    hub_texts: tuple[str, ...]


_SST2 = _Layout("sst2", "SST-2", ("sentence", "label"), 2, (0,), 1, ("0", "1"), 40, ("sentence",))
_COLA = _Layout("cola", "CoLA", (), 4, (3,), 1, ("0", "1"), 40, ("sentence",))
_RTE = _Layout(
    task="rte",
    folder="RTE",
    header=("index", "sentence1", "sentence2", "label"),
    columns=4,
    texts=(1, 2),
    label=3,
    names=("entailment", "not_entailment"),
    length=128,
    hub_texts=("sentence1", "sentence2"),
)
_MRPC = _Layout(
    task="mrpc",
    folder="MRPC",
    header=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    columns=5,
    texts=(3, 4),
    label=0,
    names=("0", "1"),
    length=128,
    hub_texts=("sentence1", "sentence2"),
)


@register("dataset", "sst2", doc="67,349 + 872 phrases of movie reviews, positive or negative; 40 words.", paper=_PAPER)
def sst2(data_dir: Path | None = None) -> Source:
    """Sentiment of phrases of movie reviews: positive (1) or negative (0)."""
    return _source(_SST2, data_dir)


@register("dataset", "cola", doc="8,551 + 1,043 sentences, grammatical or not; 40 words.", paper=_PAPER)
def cola(data_dir: Path | None = None) -> Source:
    """Acceptability of English sentences: grammatical (1) or not (0)."""
    return _source(_COLA, data_dir)


@register("dataset", "rte", doc="2,490 + 277 pairs of texts, entailment or not; 128 words.", paper=_PAPER)
def rte(data_dir: Path | None = None) -> Source:
    """Textual entailment: the second text follows from the first (0) or not (1)."""
    return _source(_RTE, data_dir)


@register("dataset", "mrpc", doc="3,668 + 408 pairs of sentences, paraphrases or not; 128 words.", paper=_PAPER)
def mrpc(data_dir: Path | None = None) -> Source:
    """Paraphrases: two sentences have the same meaning (1) or not (0)."""
    return _source(_MRPC, data_dir)


def texts(task: str, data_dir: Path | None = None) -> TextDataset:
    """The untokenized sentences of one of the four tasks, for models with their own tokenizer."""
    layout = next(layout for layout in (_SST2, _COLA, _RTE, _MRPC) if layout.task == task)
    folder = find(data_dir, f"glue/{layout.folder}", layout.folder)
    if folder is None:
        return TextDataset((), lambda: _download(layout), classes=2, note=_NOTE)
    files = tuple(pick(folder, name) for name in ("train.tsv", "dev.tsv"))
    return TextDataset(files, lambda: [_read(layout, file) for file in files], classes=2, note=_NOTE)


def _source(layout: _Layout, data_dir: Path | None) -> Source:
    splits = [
        ([tuple(words(text) for text in example) for example in split.texts], split.labels)
        for split in texts(layout.task, data_dir).read()
    ]
    vocabulary = Vocabulary.of(text for examples, _ in splits[:1] for pair in examples for text in pair)
    train, test = (
        Arrays(torch.from_numpy(vocabulary.rows(examples, layout.length)), class_tensor(labels, 2, layout.task))
        for examples, labels in splits
    )
    return Source(train, test, classes=2, note=_NOTE)


def _read(layout: _Layout, path: Path) -> LabeledTexts:
    lines = read_text(path, _LIMIT).split("\n")  # not splitlines(): texts may contain other line ends
    if lines and not lines[-1]:
        lines.pop()
    rows = [line.rstrip("\r").split("\t") for line in lines]
    first = 1
    if layout.header:
        found = tuple(rows.pop(0)) if rows else ()
        if found != layout.header:
            raise DataError(f"{path}: begins with {_shown(found)}, expected the header {_shown(layout.header)}")
        first = 2
    if not rows:
        raise DataError(f"{path}: no examples")
    written, labels = [], np.empty(len(rows), np.int64)
    for i, row in enumerate(rows):
        if len(row) != layout.columns:
            raise DataError(f"{path}: line {first + i} has {len(row)} fields, expected {layout.columns} between tabs")
        if row[layout.label] not in layout.names:
            given, expected = _shown((row[layout.label],)), " or ".join(layout.names)
            raise DataError(f"{path}: line {first + i} has the label {given}, expected {expected}")
        labels[i] = layout.names.index(row[layout.label])
        written.append(tuple(row[column] for column in layout.texts))
    return LabeledTexts(written, labels)


def _download(layout: _Layout) -> list[LabeledTexts]:
    files = f"glue/{layout.folder}/train.tsv and dev.tsv"
    wanted = (*layout.hub_texts, "label")
    parts = hub.texts(layout.task, "nyu-mll/glue", wanted, files, layout.task, ("train", "validation"))
    return [LabeledTexts(rows, labels) for rows, labels in parts]


def _shown(fields: tuple[str, ...]) -> str:
    """Fields of a line for an error message: at most 60 characters, escaped."""
    return repr(" ".join(fields)[:60])
