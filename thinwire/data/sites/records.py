"""Records of a site for a language model: conversations or texts in a file of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data.conversations import RecordForm
from thinwire.data.examples import Examples
from thinwire.data.language import Encoder, Learned, TemplateName, TooLong, load_tokenizer
from thinwire.data.language_checkpoint import SMOLLM2, find_checkpoint
from thinwire.data.records import read_records
from thinwire.data.sites.base import Pair, SiteData
from thinwire.data.token_rows import TokenRows
from thinwire.metrics.labels import IGNORED
from thinwire.models.causal_lm import library, location

NOTHING = -1  # stands for no token in rows that are filled up to one length


@dataclass(frozen=True)
class SiteRecords(SiteData):
    """Conversations or texts in a JSONL, JSON, CSV or parquet file of each site.

    Args:
        file: the name of the file in the folder of a site.
        checkpoint: of the model, the same at all sites: a folder, a GGUF file, `smollm2`, or owner/name on the hub.
        prompt, response, messages, text: the columns, as in the task `causal-lm`; by default the usual names.
        template, learned, length, too_long: as in that task.
        window: batches within which rows of similar length are put together in training.
    """

    file: str = "records.jsonl"
    checkpoint: str = SMOLLM2
    prompt: str = ""
    response: str = ""
    messages: str = ""
    text: str = ""
    template: TemplateName = "auto"
    learned: Learned = "answers"
    length: int = 512
    too_long: TooLong = "drop"
    window: int = 8

    @property
    def encoder(self) -> Encoder:
        """How records become tokens."""
        return Encoder(_tokenizer(self.checkpoint), self.length, self.template, self.learned, self.too_long)

    @property
    def outputs(self) -> int:
        """The number of tokens."""
        return len(self.encoder.tokenizer)

    @property
    def shapes(self) -> Mapping[str, int]:
        """The most tokens of a row."""
        return {"length": self.length}

    @property
    def expected(self) -> str:
        """The file."""
        return f"the file {self.file}"

    @property
    def loss(self) -> str:
        """Cross entropy of the next token."""
        return "cross-entropy"

    @property
    def note(self) -> str:
        """What was done to the records."""
        how = "the chat template of the checkpoint" if self.encoder.is_chat else "plain lines"
        return f"Rows of at most {self.length} tokens, conversations written by {how}."

    def is_site(self, folder: Path) -> bool:
        """Whether the folder has the file."""
        return (folder / self.file).is_file()

    def read(self, folder: Path) -> Pair:
        """The records of the file: (rows, length) tokens, and the tokens that are learned, else -100."""
        records = read_records(folder / self.file)
        columns = {"prompt": self.prompt, "response": self.response, "messages": self.messages, "text": self.text}
        rows = self.encoder.encode(records, RecordForm.of(records[0], **columns)).rows
        ids = torch.full((len(rows), self.length), NOTHING)
        ids[torch.arange(self.length) < rows.sizes[:, None]] = rows.ids.long()
        learned = torch.zeros(len(rows), self.length + 1, dtype=torch.bool)
        learned[torch.arange(len(rows)).repeat_interleave(rows.labels), rows.labeled.long() + 1] = True
        return ids, torch.where(learned[:, : self.length], ids, IGNORED)

    def blank(self, rows: int) -> Pair:
        """Rows of two equal tokens."""
        ids = torch.full((rows, self.length), NOTHING)
        ids[:, :2] = 0
        targets = torch.full_like(ids, IGNORED)
        targets[:, 1] = 0
        return ids, targets

    def examples(self, inputs: Tensor, targets: Tensor) -> Examples:
        """The rows without what fills them up."""
        sizes = (inputs != NOTHING).sum(1).tolist()
        pairs = zip(inputs.tolist(), (targets != IGNORED).tolist(), sizes, strict=True)
        rows = [(ids[:size], learned[:size]) for ids, learned, size in pairs]
        return TokenRows.of(rows, pad=self.encoder.pad, window=self.window)


@lru_cache(maxsize=4)
def _tokenizer(checkpoint: str) -> Any:
    folder, more = location(find_checkpoint(checkpoint))
    return load_tokenizer(folder, more, library("SiteRecords"))
