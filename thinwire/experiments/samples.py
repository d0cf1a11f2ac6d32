"""`samples.json` of a run directory: answers to a few test questions, before and after training.

Written when a run of a language model ends whose test records are questions: for each of a few, spread over the groups,
the prompt, the right answer, and the greedy answers of the initial and of the final model.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thinwire.core.tree import Tree
from thinwire.experiments.files import LONGEST_JSON, write_atomically
from thinwire.runtime.federation import Federation
from thinwire.runtime.job import RunState

SAMPLES = "samples.json"
FEW = 4
LONGEST = 2000  # characters of a text


class Sample(NamedTuple):
    """A test question: its prompt, the right answer, and the answers before and after training."""

    prompt: str
    answer: str
    before: str
    after: str


def make_samples(federation: Federation, state: RunState) -> list[Sample]:
    """The answers of the initial and the final model to a few test questions; empty if there are no questions."""
    questions: Any = getattr(federation.test, "questions", None)
    if questions is None or not hasattr(federation.model.module, "generate"):
        return []
    chosen = spread(len(questions), None if questions.groups is None else questions.groups.cpu().numpy())
    prompts = [questions.prompts[i] for i in chosen]

    def answers(weights: Tree, buffers: Tree) -> list[str]:
        made = federation.model.run(weights, buffers, partial(_generated, prompts=prompts, most=questions.new_tokens))
        return [questions.text(tokens) for tokens in made]

    first = federation.first
    before = answers(federation.weights(first), dict(first.buffers))
    after = answers(*federation.final(state))
    texts = [str(questions.tokenizer.decode(prompt, skip_special_tokens=True)).strip() for prompt in prompts]
    rows = zip(texts, [questions.answers[i] for i in chosen], before, after, strict=True)
    return [Sample(*(text[:LONGEST] for text in row)) for row in rows]


def spread(count: int, groups: np.ndarray | None, few: int = FEW) -> list[int]:
    """A few of so many questions: of each group in turn, its first ones.

    >>> spread(6, np.array([0, 0, 0, 1, 1, 2]), few=4)
    [0, 1, 3, 5]
    >>> spread(2, None)
    [0, 1]
    """
    if groups is None:
        return list(range(min(few, count)))
    turn = np.array([np.sum(groups[:i] == group) for i, group in enumerate(groups)])
    return sorted(np.lexsort((np.arange(count), turn))[:few].tolist())


def write_samples(folder: Path, samples: list[Sample]) -> None:
    """Write the file of a run directory; nothing without samples."""
    if samples:
        text = json.dumps([one._asdict() for one in samples], indent=1, ensure_ascii=False)
        write_atomically(folder / SAMPLES, (text + "\n").encode("utf-8", "replace"))


def read_samples(folder: Path) -> list[Sample]:
    """The samples of a run directory; empty if it has none, or a file in another form."""
    file = folder / SAMPLES
    try:
        if file.stat().st_size > LONGEST_JSON:
            return []
        rows = json.loads(file.read_bytes())
        found = [Sample(*(row[name] for name in Sample._fields)) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return [one for one in found if all(isinstance(text, str) for text in one)]


def _generated(module: Any, prompts: list[Any], most: int) -> Any:
    return module.generate(prompts, most)
