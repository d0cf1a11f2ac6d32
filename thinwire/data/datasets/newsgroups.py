"""20 Newsgroups, sorted by date: which of twenty groups was a message posted to?

Read from the archive `20newsgroups/20news-bydate.tar.xz` (or .tar.gz) without unpacking it to disk: members are
`20news-bydate-train/<group>/<id>` and `20news-bydate-test/<group>/<id>`, in Latin-1. Headers, signatures and quotations
give the group away and are taken out, by the rules that scikit-learn made usual.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.errors import DataError
from thinwire.data import hub
from thinwire.data.cache import remember
from thinwire.data.examples import Arrays, Half, Source, Texts
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, one_line
from thinwire.data.vocabulary import Vocabulary, words

LENGTH = 256
_GROUPS = 20
_LARGEST = 1 << 22  # bytes of a message; the largest has 161 thousand
_MOST = 1 << 28  # bytes of all messages; they have 35 million
_NOTE = "Headers, signatures and quoted lines are removed."

# A line that says one of these, or begins with one of those, quotes somebody.
_SAYS = ("writes in", "writes:", "wrote:", "says:", "said:")
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
        return _source(_numbers(found.read()), "SetFit/20_newsgroups")
    return _source(remember("20newsgroups-v1", found.files, lambda: _numbers(found.read()), _fits), found.files[0])


def texts(data_dir: Path | None = None) -> Texts:
    """The messages as they were written, for models that bring words of their own."""
    folder = find(data_dir, "20newsgroups", "20news-bydate")
    if folder is None:
        return Texts((), _fetched, _GROUPS, _NOTE)
    path = pick(folder, "20news-bydate.tar.xz", "20news-bydate.tar.gz")
    return Texts((path,), lambda: _read(path), _GROUPS, _NOTE)


def _fetched() -> list[Half]:
    layout = "20newsgroups/20news-bydate.tar.gz"
    return [Half(*half) for half in hub.texts("20newsgroups", "SetFit/20_newsgroups", ("text", "label"), layout)]


def _source(kept: dict[str, np.ndarray], where: Path | str) -> Source:
    train, test = (
        Arrays(
            torch.from_numpy(kept[f"{half}_rows"].astype(np.int64)),
            class_tensor(kept[f"{half}_labels"], _GROUPS, where),
        )
        for half in ("train", "test")
    )
    return Source(train, test, classes=_GROUPS, note=_NOTE)


def _numbers(halves: Sequence[Half]) -> dict[str, np.ndarray]:
    """Rows of word numbers, in 16 bits for the cache, and labels."""
    split = [[(words(text),) for (text,) in half.texts] for half in halves]
    vocabulary = Vocabulary.of(text for (text,) in split[0])
    out: dict[str, np.ndarray] = {}
    for half, messages, (_, labels) in zip(("train", "test"), split, halves, strict=True):
        out[f"{half}_rows"] = vocabulary.rows(messages, LENGTH).astype(np.uint16)
        out[f"{half}_labels"] = labels
    return out


def _fits(kept: dict[str, np.ndarray]) -> bool:
    return set(kept) == {f"{half}_{what}" for half in ("train", "test") for what in ("rows", "labels")} and all(
        kept[f"{half}_rows"].shape == (len(kept[f"{half}_labels"]), LENGTH) for half in ("train", "test")
    )


def _read(path: Path) -> list[Half]:
    """Both halves of the archive, in the order of member names, whatever order the archive has."""
    found: dict[str, dict[tuple[str, str], str]] = {"train": {}, "test": {}}
    total = 0
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                parts = member.name.removeprefix("./").split("/")
                half = parts[0].removeprefix("20news-bydate-")
                if not member.isreg() or len(parts) != 3 or half not in found:
                    continue
                total += member.size
                if member.size > _LARGEST or total > _MOST:
                    raise DataError(f"{path}: {member.name[:80]} is too large, expected a message of a newsgroup")
                stream = archive.extractfile(member)
                text = stream.read().decode("latin-1") if stream else ""
                found[half][parts[1], parts[2]] = bare(text)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError) as fault:
        raise DataError(f"{path}: not a whole tar archive ({one_line(fault)})") from None
    groups = sorted({group for group, _ in found["train"]})
    others = {group for group, _ in found["test"]}
    if len(groups) != _GROUPS or others != set(groups):
        raise DataError(
            f"{path}: {len(groups)} groups in 20news-bydate-train and {len(others)} in 20news-bydate-test, "
            f"expected the same {_GROUPS}"
        )
    number = {group: i for i, group in enumerate(groups)}
    return [
        Half(
            [(messages[name],) for name in sorted(messages)], np.array([number[group] for group, _ in sorted(messages)])
        )
        for messages in found.values()
    ]


def bare(message: str) -> str:
    """What the writer of a message wrote: no header, no signature, no quotation.

    The header ends at the first empty line. The signature is what follows the last line that is empty or all hyphens:
    a rough rule, which also takes the last paragraph of a message without signature.

    >>> bare("From: me\\n\\nBob wrote:\\n> No.\\nYes!\\n\\n-- \\nme")
    'Yes!\\n'
    """
    body = message.replace("\r\n", "\n").partition("\n\n")[2].strip()
    lines = body.split("\n")
    last = next((i for i in range(len(lines) - 1, 0, -1) if not lines[i].strip().strip("-")), len(lines))
    return "\n".join(line for line in lines[:last] if not _quotes(line))


def _quotes(line: str) -> bool:
    return line.startswith(_BEGINS) or any(phrase in line for phrase in _SAYS)
