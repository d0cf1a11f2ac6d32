"""Metrics of answers: exact match of generated ones, and the most likely of several options.

They call the model themselves (`ModelMetric`). The value under the name of the metric is the mean over the groups of
the questions, each group counting the same; the value of a group is under `NAME/GROUP`.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.metrics.base import ModelAccess, ModelMetric
from thinwire.metrics.classification import IGNORED

MOST_ROWS = 64  # answers that are generated together; fewer if they do not fit into memory


class ExactMatch(ModelMetric):
    """The share of questions whose generated answer is the right one, up to white space.

    Answers are generated greedily, in batches of prompts of similar length.
    """

    def measure(self, model: ModelAccess, examples: Any, index: Tensor) -> dict[str, float]:
        """Generate the answers of these examples and compare them."""
        questions = _questions(examples, "exact-match")
        lengths = torch.tensor([len(questions.prompts[i]) for i in index.tolist()])
        order, hits, first = index.cpu()[lengths.argsort(stable=True)].tolist(), dict[int, bool](), 0
        rows = MOST_ROWS
        while first < len(order):
            chosen = order[first : first + rows]
            prompts = [questions.prompts[i] for i in chosen]
            try:
                made = model.run(methodcaller("generate", prompts, questions.new_tokens))
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                rows //= 2
                continue
            for i, tokens in zip(chosen, made, strict=True):
                hits[i] = questions.result(questions.text(tokens)) == questions.result(questions.answers[i])
            first += rows
        return _by_group(questions, index.cpu(), torch.tensor([hits[i] for i in index.tolist()]))


class OptionAccuracy(ModelMetric):
    """The share of questions of which the right option has the highest likelihood.

    sum over the tokens t of an option of log softmax(output)[t]          the tokens that end an answer included
    """

    def measure(self, model: ModelAccess, examples: Any, index: Tensor) -> dict[str, float]:
        """Compute the likelihoods of all options of these examples."""
        questions = _questions(examples, "option-accuracy")
        if questions.options is None:
            raise ConfigError("metric 'option-accuracy' needs records with options; name their column: task.options")
        index = index.cpu()
        index = index[questions.right[index] >= 0]
        chosen = questions.options_of(index)
        scores = torch.full((len(questions.options),), -torch.inf, dtype=torch.float64)
        for part in model.batches(questions.options, chosen):
            inputs, targets = questions.options.gather(part)
            outputs = model.outputs(inputs)
            scores[part] = _log_likelihoods(outputs, targets.to(outputs.device)).cpu()
        first = torch.searchsorted(questions.owners, index)  # options of a question are neighbors
        last = torch.searchsorted(questions.owners, index, right=True)
        best = torch.stack([scores[a:b].argmax() for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        return _by_group(questions, index, best == questions.right[index])


@register("metric", "exact-match")
def exact_match() -> ModelMetric:
    """Share of questions whose answer, generated greedily, is the right one."""
    return ExactMatch()


@register("metric", "option-accuracy")
def option_accuracy() -> ModelMetric:
    """Share of questions of which the right option is the most likely one."""
    return OptionAccuracy()


def _questions(examples: Any, name: str) -> Any:
    found = getattr(examples, "questions", None)
    if found is None:
        raise ConfigError(
            f"metric {name!r} needs records with a prompt and an answer, one a row; the task 'causal-lm' makes them"
        )
    return found


def _log_likelihoods(outputs: Tensor, targets: Tensor) -> Tensor:
    """(rows,) the sum of the log-probabilities of all labels of a row, in float64."""
    flat = outputs.reshape(-1, outputs.shape[-1]).float()
    losses = F.cross_entropy(flat, targets.reshape(-1), reduction="none", ignore_index=IGNORED)
    return -losses.view(targets.shape).double().sum(1)


def _by_group(questions: Any, index: Tensor, hits: Tensor) -> dict[str, float]:
    """The share of hits of each group, and under "" their mean."""
    hits = hits.double()
    if questions.groups is None or not questions.names:
        return {"": float(hits.mean())}
    own = questions.groups[index]
    shares = {questions.names[g]: float(hits[own == g].mean()) for g in own.unique().tolist()}
    return {"": sum(shares.values()) / len(shares), **shares}
