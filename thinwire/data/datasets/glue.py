"""Four tasks of GLUE: judging one sentence (SST-2, CoLA) or a pair of them (RTE, MRPC).

Read from the official files, `glue/SST-2/train.tsv` and so on: lines split at tabs, quotation marks mean nothing. The
labels of the test files were never published, so the dev files serve as test data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.errors import DataError
from thinwire.data import hub
from thinwire.data.examples import Arrays, Half, Source, Texts
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, utf8
from thinwire.data.vocabulary import Vocabulary, words

_LIMIT = 1 << 28
_NOTE = "Test data is the dev split: GLUE does not publish the labels of its test split."
_PAPER = "Wang et al., GLUE: a multi-task benchmark, 2018"


@dataclass(frozen=True)
class _Sheet:
    """How one task is written down: its header line (or none), and which columns hold what."""

    task: str
    folder: str
    header: tuple[str, ...]
    columns: int
    texts: tuple[int, ...]
    label: int
    names: tuple[str, ...]  # how classes 0, 1, ... are written
    length: int
    hub_texts: tuple[str, ...]


_SST2 = _Sheet("sst2", "SST-2", ("sentence", "label"), 2, (0,), 1, ("0", "1"), 40, ("sentence",))
_COLA = _Sheet("cola", "CoLA", (), 4, (3,), 1, ("0", "1"), 40, ("sentence",))
_RTE = _Sheet(
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
_MRPC = _Sheet(
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


@register("dataset", "sst2", doc="67,349 + 872 phrases of film reviews, good or bad; 40 words.", paper=_PAPER)
def sst2(data_dir: Path | None = None) -> Source:
    """Is a phrase of a film review kind (1) or not (0)?"""
    return _source(_SST2, data_dir)


@register("dataset", "cola", doc="8,551 + 1,043 sentences, grammatical or not; 40 words.", paper=_PAPER)
def cola(data_dir: Path | None = None) -> Source:
    """Is a sentence good English (1) or not (0)?"""
    return _source(_COLA, data_dir)


@register("dataset", "rte", doc="2,490 + 277 pairs: does the second follow from the first? 128 words.", paper=_PAPER)
def rte(data_dir: Path | None = None) -> Source:
    """Does the second text follow from the first (0) or not (1)?"""
    return _source(_RTE, data_dir)


@register("dataset", "mrpc", doc="3,668 + 408 pairs: do both say the same? 128 words.", paper=_PAPER)
def mrpc(data_dir: Path | None = None) -> Source:
    """Do two sentences say the same (1) or not (0)?"""
    return _source(_MRPC, data_dir)


def texts(task: str, data_dir: Path | None = None) -> Texts:
    """The sentences of one of the four tasks as they are written, for models that bring words of their own."""
    sheet = next(sheet for sheet in (_SST2, _COLA, _RTE, _MRPC) if sheet.task == task)
    folder = find(data_dir, f"glue/{sheet.folder}", sheet.folder)
    if folder is None:
        return Texts((), lambda: _fetched(sheet), classes=2, note=_NOTE)
    files = tuple(pick(folder, name) for name in ("train.tsv", "dev.tsv"))
    return Texts(files, lambda: [_read(sheet, file) for file in files], classes=2, note=_NOTE)


def _source(sheet: _Sheet, data_dir: Path | None) -> Source:
    halves = [
        ([tuple(words(text) for text in example) for example in half.texts], half.labels)
        for half in texts(sheet.task, data_dir).read()
    ]
    vocabulary = Vocabulary.of(text for examples, _ in halves[:1] for pair in examples for text in pair)
    train, test = (
        Arrays(torch.from_numpy(vocabulary.rows(examples, sheet.length)), class_tensor(labels, 2, sheet.task))
        for examples, labels in halves
    )
    return Source(train, test, classes=2, note=_NOTE)


def _read(sheet: _Sheet, path: Path) -> Half:
    lines = utf8(path, _LIMIT).split("\n")  # not splitlines(): the texts may hold other line ends
    if lines and not lines[-1]:
        lines.pop()
    rows = [line.rstrip("\r").split("\t") for line in lines]
    first = 1
    if sheet.header:
        found = tuple(rows.pop(0)) if rows else ()
        if found != sheet.header:
            raise DataError(f"{path}: begins with {_shown(found)}, expected the header {_shown(sheet.header)}")
        first = 2
    if not rows:
        raise DataError(f"{path}: no examples")
    written, labels = [], np.empty(len(rows), np.int64)
    for i, row in enumerate(rows):
        if len(row) != sheet.columns:
            raise DataError(f"{path}: line {first + i} has {len(row)} fields, expected {sheet.columns} between tabs")
        if row[sheet.label] not in sheet.names:
            given, expected = _shown((row[sheet.label],)), " or ".join(sheet.names)
            raise DataError(f"{path}: line {first + i} has the label {given}, expected {expected}")
        labels[i] = sheet.names.index(row[sheet.label])
        written.append(tuple(row[column] for column in sheet.texts))
    return Half(written, labels)


def _fetched(sheet: _Sheet) -> list[Half]:
    layout = f"glue/{sheet.folder}/train.tsv and dev.tsv"
    wanted = (*sheet.hub_texts, "label")
    parts = hub.texts(sheet.task, "nyu-mll/glue", wanted, layout, sheet.task, ("train", "validation"))
    return [Half(rows, labels) for rows, labels in parts]


def _shown(fields: tuple[str, ...]) -> str:
    """Fields of a line, short enough for an error and with nothing that would break it."""
    return repr(" ".join(fields)[:60])
