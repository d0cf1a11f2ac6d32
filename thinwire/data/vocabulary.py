"""Word vocabulary: texts to rows of word ids.

    0 padding, 1 unknown word, 2 separator of two texts, 3 ... the most frequent words of the training texts

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

PAD, UNKNOWN, SEPARATOR = 0, 1, 2
IDS = 20_000  # size of the vocabulary: an embedding of 20,000 rows fits every text task

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters and digits with an inner apostrophe; all else separates words.

    >>> words("Don't PANIC: it's 42.")
    ["don't", 'panic', "it's", '42']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The id of each known word."""

    ids: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], size: int = IDS) -> Vocabulary:
        """The most frequent words, as many as fit into `size` ids; equally frequent ones in alphabetical order."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - SEPARATOR - 1]
        return cls({word: i for i, (word, _) in enumerate(common, SEPARATOR + 1)})

    def rows(self, examples: Sequence[tuple[Sequence[str], ...]], length: int) -> np.ndarray:
        """(examples, length) int64 rows of ids, padded or truncated at the end.

        An example is one text or a pair. The second text of a pair takes up to half of the row, the first one the rest.
        A text without words becomes one unknown word, so that a mean over words is defined.
        """
        out = np.zeros((len(examples), length), np.int64)
        for row, texts in zip(out, examples, strict=True):
            ids = [[self.ids.get(word, UNKNOWN) for word in text] or [UNKNOWN] for text in texts]
            if len(ids) == 2:
                second = ids[1][: length // 2]
                line = ids[0][: length - 1 - len(second)] + [SEPARATOR] + second
            else:
                line = ids[0][:length]
            row[: len(line)] = line
        return out
