"""`samples.json` of a run directory: answers to a few test questions, before and after training.

Written when a run of a language model ends whose test records are questions: for each of the first few, the
prompt, the right answer, and the greedy answers of the initial and of the final model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.tree import Tree
from thinwire.federation.federation import Federation
from thinwire.federation.job import RunState
from thinwire.runs.files import read_as, write_json

SAMPLES = "samples.json"
QUESTIONS = 4
MAX_CHARACTERS = 2000  # of a text


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
    prompts = questions.prompts[:QUESTIONS]

    def answers(weights: Tree, buffers: Tree) -> list[str]:
        made = federation.model.run(weights, buffers, lambda module: module.generate(prompts, questions.new_tokens))
        return [questions.text(tokens) for tokens in made]

    first = federation.first
    before = answers(federation.weights(first), dict(first.buffers))
    after = answers(*federation.final(state))
    texts = [str(questions.tokenizer.decode(prompt, skip_special_tokens=True)).strip() for prompt in prompts]
    rows = zip(texts, questions.answers[:QUESTIONS], before, after, strict=True)
    return [Sample(*(text[:MAX_CHARACTERS] for text in row)) for row in rows]


def write_samples(folder: Path, samples: list[Sample]) -> None:
    """Write the file of a run directory; nothing without samples."""
    if samples:
        write_json(folder / SAMPLES, [one._asdict() for one in samples])


def read_samples(folder: Path) -> list[Sample]:
    """The samples of a run directory; empty if it has none, or a file in another form."""
    return [*(read_as(tuple[Sample, ...], folder / SAMPLES) or ())]
