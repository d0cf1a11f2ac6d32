"""Questions of a test set of a language model: prompts to generate answers for, and answers to choose from.

The metrics `exact-match` and `option-accuracy` read them (`metrics/questions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.data.token_rows import TokenRows


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
