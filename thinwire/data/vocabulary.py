"""Text as numbers: which words there are, and the rows of numbers that models read.

    0 padding, 1 a word that is not in the vocabulary, 2 between two texts, 3 ... the commonest words of the train texts

>>> vocabulary = Vocabulary.of([words("The cat. The dog!")])
>>> vocabulary.rows([(words("the bird"),)], length=4).tolist()
[[3, 1, 0, 0]]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PAD, UNKNOWN, BETWEEN = 0, 1, 2
IDS = 20_000  # numbers in all, so that an embedding of 20,000 rows fits every text task

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def words(text: str) -> list[str]:
    """Letters and digits in a row, lower-cased, with an inner apostrophe kept; all else separates.

    >>> words("Don't PANIC: it's 42.")
    ["don't", 'panic', "it's", '42']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The number of each known word."""

    number: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], ids: int = IDS) -> Vocabulary:
        """The commonest words, as many as fit into `ids` numbers; of two equally common, the first by alphabet."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: ids - BETWEEN - 1]
        return cls({word: i for i, (word, _) in enumerate(common, BETWEEN + 1)})

    def rows(self, examples: Sequence[tuple[Sequence[str], ...]], length: int) -> np.ndarray:
        """(examples, length) int64 rows, padded or cut at the end.

        An example is one text or a pair. Of a pair the second text has up to half the row, the first what is left. A
        text without any word becomes one unknown word: models that average over words then have something to average.
        """
        out = np.zeros((len(examples), length), np.int64)
        for row, texts in zip(out, examples, strict=True):
            ids = [[self.number.get(word, UNKNOWN) for word in text] or [UNKNOWN] for text in texts]
            if len(ids) == 2:
                second = ids[1][: length // 2]
                line = ids[0][: length - 1 - len(second)] + [BETWEEN] + second
            else:
                line = ids[0][:length]
            row[: len(line)] = line
        return out
