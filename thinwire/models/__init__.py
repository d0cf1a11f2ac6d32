"""The networks of the published experiments, with exactly the published number of weights, by name.

    cnn                 cnn2, cnn-cifar, cnn-cifar4, cnn-cifar-evofed, femnist-cnn
    mlp                 mlp, two-fc
    resnet, wrn, vgg    resnet18, resnet20, wrn16-4, wrn28-10, vgg16-gn
    lstm, transformer   lstm-shakespeare, lstm80, transformer-sent140
    roberta, pretrained roberta-large, pretrained: any checkpoint of transformers (need the extra `hf`)

Each is a plain `nn.Module` that maps a batch to logits. Its parameters are registered in the order in which the
forward pass meets them, a branch after the path it bypasses and weight before bias, because methods that cut the
flat vector of all weights depend on that order. Each runs under `torch.func.vmap` over stacked weights; a network with
running statistics (`norm="bn"`) wants its buffers stacked too, and one with dropout wants
`vmap(..., randomness="different")`.

>>> model = build("cnn2", classes=10)
>>> count(model)
11274
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from thinwire.core.registry import lookup
from thinwire.errors import UnknownName
from thinwire.models.cnn import ConvNet as ConvNet
from thinwire.models.lstm import LSTM as LSTM
from thinwire.models.lstm import NextCharacter as NextCharacter
from thinwire.models.mlp import MLP as MLP
from thinwire.models.pretrained import Pretrained as Pretrained
from thinwire.models.resnet import ResNet as ResNet
from thinwire.models.roberta import Roberta as Roberta
from thinwire.models.transformer import TextClassifier as TextClassifier
from thinwire.models.vgg import VGG16 as VGG16
from thinwire.models.wrn import WideResNet as WideResNet

__all__ = [
    "ConvNet",
    "LSTM",
    "MLP",
    "NextCharacter",
    "Pretrained",
    "ResNet",
    "Roberta",
    "TextClassifier",
    "VGG16",
    "WideResNet",
    "build",
    "count",
]


def build(name: str, **options: Any) -> nn.Module:
    """Make the network of that name, freshly initialised from torch's own generator.

    Args:
        name: a registered model, as `thinwire list models` shows them.
        options: the keyword arguments of that model; an unknown one is refused with the nearest right one.

    >>> import torch
    >>> build("mlp", hidden=32)(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    """
    entry = lookup("model", name)
    known = inspect.signature(entry.make).parameters
    for option in options:
        if option not in known:
            raise UnknownName(f"option of model {name!r}", option, known)
    model: nn.Module = entry.make(**options)
    return model


def count(model: nn.Module) -> int:
    """How many trainable numbers a network has; running statistics and frozen weights are not among them.

    >>> count(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
