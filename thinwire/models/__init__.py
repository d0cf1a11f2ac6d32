"""The models of the published experiments, with exactly the published number of parameters.

    cnn                 cnn, auto (fit any images), cnn2, cnn-cifar, cnn-cifar4, femnist-cnn
    mlp                 mlp, two-fc
    resnet, vgg         resnet18, resnet20, wrn16-4, vgg16-gn
    lstm, transformer   lstm-shakespeare, lstm80, transformer-sent140
    pretrained          pretrained: any text classifier of transformers (extra `hf`)
    causal_lm           causal-lm: any causal language model of transformers, or a GGUF file

Each is an `nn.Module` that maps a batch to logits. Parameters are registered in the order of the forward pass, a branch
after the path that it bypasses and weight before bias, because methods that partition the flat vector of all parameters
depend on that order. Each model runs under `torch.func.vmap` over stacked parameters; a model with running statistics
(`norm="bn"`) also needs stacked buffers, and one with dropout needs `vmap(..., randomness="different")`.

>>> model = build("cnn2", classes=10)
>>> count(model)
11274
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import nn

from thinwire.core.registry import lookup
from thinwire.core.text import check_value, types_of
from thinwire.errors import UnknownName
from thinwire.models import cnn as cnn, resnet as resnet, vgg as vgg
from thinwire.models.causal_lm import CausalLM as CausalLM
from thinwire.models.lstm import LSTM as LSTM, NextCharacter as NextCharacter
from thinwire.models.mlp import MLP as MLP
from thinwire.models.pretrained import Pretrained as Pretrained
from thinwire.models.transformer import TextClassifier as TextClassifier


def build(name: str, **options: Any) -> nn.Module:
    """Build a model by name, initialized from the global generator of torch.

    Args:
        name: a registered model; `thinwire list models` lists them.
        options: the keyword arguments of the model; an unknown one raises UnknownName with the nearest valid one.

    >>> import torch
    >>> build("mlp", hidden=32)(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    """
    entry = lookup("model", name)
    known, types = inspect.signature(entry.make).parameters, {}
    with suppress(NameError):  # of a name that only a type checker imports
        types = types_of(entry.make)
    for option, value in options.items():
        if option not in known:
            raise UnknownName(f"option of model {name!r}", option, known)
        check_value(option, value, types.get(option))
    return entry.make(**options)


def count(model: nn.Module) -> int:
    """The number of trainable parameters of a model, without running statistics and frozen parameters.

    >>> count(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
