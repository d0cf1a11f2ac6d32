"""Metrics of language models: outputs (n, length, tokens), next tokens (n, length), labels of -100 ignored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.core.registry import register
from thinwire.metrics.base import SumMetric
from thinwire.metrics.classification import IGNORED, with_labels


@register("metric", "perplexity")
def perplexity() -> SumMetric:
    """Perplexity, exp of the mean cross entropy over tokens.

        exp(sum of -log softmax(output)[label] / labels)

    >>> round(perplexity()(torch.zeros(1, 3, 8), torch.tensor([[1, 2, -100]])), 4)
    8.0
    """
    return SumMetric(_token_losses, lambda sums: float(torch.exp(sums[0] / sums[1])), False)


def _token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies and the number of tokens, (2,)."""
    scores, labels = with_labels(outputs, targets)
    flat = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
    losses = F.cross_entropy(*flat, reduction="none", ignore_index=IGNORED)
    return torch.stack((losses.double().sum(), (labels != IGNORED).sum()))
