"""Rows of tokens of different lengths, for language models: gathered without the padding that no batch needs.

Rows of a test set may have questions: prompts to generate answers for, and answers to choose from, which the metrics
`exact-match` and `option-accuracy` read (`metrics/questions.py`).

    input_ids         (n, width)   tokens, padded at the end to the longest row of the batch
    label_positions   (n, labels)  positions of which the model predicts the next token; only these get logits
    targets           (n, labels)  the next tokens; -100 for padding

Padding is behind all tokens and attention is causal, so no token sees it and no mask is needed.

>>> rows = TokenRows.of([([5, 6, 7], [False, True, True]), ([8, 9], [False, True])])
>>> inputs, targets = rows.gather(torch.tensor([0, 1]))
>>> inputs["input_ids"][:, :4].tolist(), inputs["label_positions"].tolist(), targets.tolist()
([[5, 6, 7, 0], [8, 9, 0, 0]], [[0, 1], [0, 0]], [[6, 7], [9, -100]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.recording import is_recorded
from thinwire.data.examples import Examples, Inputs
from thinwire.metrics.classification import IGNORED

STEP = 8  # widths are multiples of it, so that few different shapes occur


@dataclass(frozen=True, eq=False)
class TokenRows(Examples):
    """Examples that are rows of tokens.

    Args:
        ids: (tokens,) int32, the tokens of all rows.
        starts: (n + 1,) int64, where each row begins in `ids`.
        labeled: (labels,) int32, the positions in their row of which the next token is a label, of all rows.
        label_starts: (n + 1,) int64, where each row begins in `labeled`.
        groups: (n,) int64, the group of each row, by which partitions go; or None.
        pad: the token of padding.
        window: batches within which rows of similar length are put together in training; 1 for none.
        questions: prompts, answers and options of the rows (`Questions`), or None.
    """

    ids: Tensor
    starts: Tensor
    labeled: Tensor
    label_starts: Tensor
    groups: Tensor | None = None
    pad: int = 0
    window: int = 1
    questions: Any = None

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, Any]], **settings: Any) -> TokenRows:
        """Rows from tokens, each with whether it is learned; the first token of a row never is.

        Args:
            rows: tokens, and whether each is learned.
            **settings: further arguments of the class.
        """
        learned = [np.flatnonzero(np.asarray(flags, bool)[1:]) for _, flags in rows]
        return cls(
            torch.from_numpy(np.concatenate([np.asarray(ids, np.int32) for ids, _ in rows])),
            _starts([len(ids) for ids, _ in rows]),
            torch.from_numpy(np.concatenate(learned).astype(np.int32)),
            _starts([len(one) for one in learned]),
            **settings,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def sizes(self) -> Tensor:  # type: ignore[override]
        """(n,) the number of tokens of each row."""
        return self.starts.diff()

    @cached_property
    def labels(self) -> Tensor:
        """(n,) the number of labels of each row."""
        return self.label_starts.diff()

    @cached_property
    def targets(self) -> Tensor:  # type: ignore[override]
        """(n, labels) int32, padded with -100."""
        index = torch.arange(len(self), device=self.starts.device)
        return self._labels(index, int(self.labels.max()))[1].to(torch.int32)

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Rows by index, as wide as the longest of them."""
        flat = index.reshape(-1)
        width = -(-self._most(self.sizes, flat) // STEP) * STEP
        ids = _padded(self.ids, self.starts, flat, width, self.pad).long()
        positions, targets = self._labels(flat, max(1, self._most(self.labels, flat)))
        inputs = {"input_ids": ids, "label_positions": positions}
        shaped = {name: block.reshape(*index.shape, -1) for name, block in inputs.items()}
        return shaped, targets.reshape(*index.shape, -1)

    def widest(self, index: Tensor) -> Tensor:
        """Two of these rows that together are gathered as wide as any of them: the longest, and that of most labels."""
        return torch.stack([index[counts[index].argmax()] for counts in (self.sizes, self.labels)])

    def _most(self, counts: Tensor, flat: Tensor) -> int:
        """The largest count of some rows; of all rows while a CUDA graph is recorded, which has one shape."""
        largest = self._largest if flat.is_cuda else (0, 0)  # before a recording, which cannot compute it
        if is_recorded(flat):
            return largest[0 if counts is self.sizes else 1]
        return int(counts[flat].max())

    @cached_property
    def _largest(self) -> tuple[int, int]:
        return int(self.sizes.max()), int(self.labels.max())

    def _labels(self, flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(rows, count) positions of labels and the labels."""
        found = _padded(self.labeled, self.label_starts, flat, count, -1).long()
        following = (self.starts[flat][:, None] + found + 1).clamp(max=len(self.ids) - 1)
        return found.clamp(min=0), torch.where(found >= 0, self.ids[following].long(), IGNORED)


def _padded(values: Tensor, starts: Tensor, flat: Tensor, width: int, fill: int) -> Tensor:
    """(rows, width) the values of some rows, row i from `starts[i]` to `starts[i + 1]`, filled up at the end."""
    at = starts[flat][:, None] + torch.arange(width, device=flat.device)
    if not len(values):
        return torch.full_like(at, fill)
    return torch.where(at < starts[flat + 1][:, None], values[at.clamp(max=len(values) - 1)], fill)


def _starts(sizes: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(np.asarray(sizes, np.int64)))).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of some rows of tokens, one for each row.

    Args:
        prompts: the tokens of each prompt.
        answers: the right answer of each, as text.
        names: names of the groups, for the names of metrics; empty for none.
        groups: (n,) the group of each question, or None.
        options: rows of prompt and option, those of one question after those of the other; None without options.
        owners: (options,) the question of each option.
        right: (n,) which of its options is right; -1 for a question without options.
        new_tokens: the most tokens of a generated answer.
        answer_after: what is compared begins after the last one of this text; "" for all of an answer.
        tokenizer: decodes tokens; it has `decode`, `eos_token_id`.
    """

    prompts: tuple[np.ndarray, ...]
    answers: tuple[str, ...]
    names: tuple[str, ...] = ()
    groups: Tensor | None = None
    options: TokenRows | None = None
    owners: Tensor | None = None
    right: Tensor | None = None
    new_tokens: int = 32
    answer_after: str = ""
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.prompts)

    def result(self, text: str) -> str:
        """What is compared of an answer.

        >>> Questions((), (), answer_after="####").result("6 + 12 = 18\\n#### 18 ")
        '18'
        """
        return " ".join((text.rpartition(self.answer_after)[2] if self.answer_after else text).split())

    def text(self, tokens: Sequence[int]) -> str:
        """Generated tokens as text, up to the token that ends an answer."""
        found = list(tokens)
        end = self.tokenizer.eos_token_id
        return str(self.tokenizer.decode(found[: found.index(end)] if end in found else found))

    def options_of(self, index: Tensor) -> Tensor:
        """The rows of the options of some questions."""
        assert self.owners is not None
        return torch.isin(self.owners, index.to(self.owners.device)).nonzero()[:, 0]
