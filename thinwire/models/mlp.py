"""Multilayer perceptrons with one hidden layer, for small images.

Paper: pFedPara (MNIST and FEMNIST).
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.core.text import PositiveInt
from thinwire.errors import ConfigError


class MLP(nn.Module):
    """A multilayer perceptron with one hidden layer; inputs of any shape are flattened.

        logits = W2 relu(W1 x + b1) + b2

    Args:
        inputs: number of input features.
        hidden: width of the hidden layer.
        classes: number of classes; for regression, of values to predict.

    >>> import torch
    >>> MLP(64, 32, 10)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.fc1 = nn.Linear(inputs, hidden)
        self.relu = nn.ReLU()
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, ...) -> (n, classes)
        """Logits of a batch of any shape."""
        if math.prod(x.shape[1:]) != self.inputs:
            raise ConfigError(f"examples of shape {tuple(x.shape[1:])} in a model with inputs={self.inputs}")
        return self.head(self.relu(self.fc1(x.flatten(1))))


@register("model", "mlp", doc="One hidden layer, for the digits of scikit-learn; trains in seconds on a CPU.")
def mlp(classes: PositiveInt = 10, inputs: PositiveInt = 64, hidden: PositiveInt = 64) -> MLP:
    """One small hidden layer, for the 8x8 digits of scikit-learn: 4,810 parameters, or 2,410 with hidden=32.

    Linear(64 -> hidden) -> ReLU -> Linear(hidden -> 10)

    >>> sum(p.numel() for p in mlp().parameters())
    4810
    """
    return MLP(inputs, hidden, classes)


@register("model", "two-fc", doc="Two linear layers of pFedPara, for MNIST and FEMNIST.", paper="pFedPara")
def two_fc(classes: PositiveInt = 10, inputs: PositiveInt = 784, hidden: PositiveInt = 256) -> MLP:
    """Two linear layers for 28x28 images: 203,530 parameters for 10 classes and 216,894 for 62.

    Linear(784 -> 256) -> ReLU -> Linear(256 -> classes)
    """
    return MLP(inputs, hidden, classes)
