"""Guess the next character of a text with two long short-term memory layers.

Papers: Hochreiter and Schmidhuber; LEAF, MAPO and FedPara (Shakespeare).

The recurrence is written out, instead of taken from `nn.LSTM`, for two reasons: the counts of MAPO need one bias
vector a layer where torch has two, and torch's fused kernels have no rule for `torch.func.vmap`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.checks import at_least


class LSTM(nn.Module):
    """Layers that read a sequence step by step and carry a memory along.

        i, f, g, o = W_ih x_t + W_hh h_{t-1} + b
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)

    Parameter names, gate order and initialisation (uniform within 1 / sqrt(hidden)) are those of `nn.LSTM`. With
    `biases=2` its weights fit this module as they are; with `biases=1` a layer has only `bias_hh`.

    All input products of a layer are one matrix product before the loop over time; only W_hh h stays inside it.

    >>> LSTM(8, 16)(torch.zeros(3, 5, 8)).shape      # 3 sequences of 5 steps: the last state of each
    torch.Size([3, 16])
    """

    def __init__(self, inputs: int, hidden: int, *, layers: int = 2, biases: int = 1) -> None:
        at_least(1, inputs=inputs, hidden=hidden, layers=layers, biases=biases)
        if biases > 2:
            raise ConfigError(f"biases = {biases}: expected 1 (one vector a layer) or 2 (as in nn.LSTM)")
        super().__init__()
        self.hidden, self.layers, self.biases = hidden, layers, biases
        for layer in range(layers):
            fan = hidden if layer else inputs
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(torch.empty(4 * hidden, fan)))
            self.register_parameter(f"weight_hh_l{layer}", nn.Parameter(torch.empty(4 * hidden, hidden)))
            if biases == 2:
                self.register_parameter(f"bias_ih_l{layer}", nn.Parameter(torch.empty(4 * hidden)))
            self.register_parameter(f"bias_hh_l{layer}", nn.Parameter(torch.empty(4 * hidden)))
        for block in self.parameters():
            nn.init.uniform_(block, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:  # (n, steps, inputs) -> (n, hidden)
        """The last layer's state after the last step."""
        states = list(x.unbind(1))
        for layer in range(self.layers):
            bias = getattr(self, f"bias_hh_l{layer}")
            if self.biases == 2:
                bias = bias + getattr(self, f"bias_ih_l{layer}")
            w_ih, w_hh = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
            states = recur(torch.stack(states), w_ih, w_hh, bias)
        return states[-1]


def recur(
    x: Tensor,  # (steps, n, inputs)
    w_ih: Tensor,  # (4 hidden, inputs)
    w_hh: Tensor,  # (4 hidden, hidden)
    bias: Tensor,  # (4 hidden,)
) -> list[Tensor]:  # steps times (n, hidden)
    """The states of one layer, from zero memory."""
    # unbind, not indexing: its gradient is one stack instead of a full-size tensor of zeros per step.
    inputs = F.linear(x, w_ih, bias).unbind(0)
    back = w_hh.t()
    h = c = x.new_zeros(x.shape[1], w_hh.shape[1])
    states = []
    for step in inputs:
        i, f, g, o = torch.addmm(step, h, back).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return states


class NextCharacter(nn.Module):
    """Characters in, a guess of the one that follows out.

        Embedding(vocab, 8) -> LSTM layers -> state after the last character -> Linear(hidden -> classes)

    Args:
        classes: characters that may follow.
        vocab: characters that may come in; as many as classes if not given.
        embedding: numbers a character.
        hidden: numbers in a layer's state.
        layers: how many.
        biases: vectors a layer, see `LSTM`.

    >>> NextCharacter(69, hidden=16)(torch.zeros(2, 80, dtype=torch.int64)).shape
    torch.Size([2, 69])
    """

    def __init__(
        self,
        classes: int,
        *,
        vocab: int | None = None,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
        biases: int = 1,
    ) -> None:
        vocab = classes if vocab is None else vocab
        at_least(2, classes=classes, vocab=vocab)
        at_least(1, embedding=embedding)
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm = LSTM(embedding, hidden, layers=layers, biases=biases)
        self.head = nn.Linear(hidden, classes)

    def forward(self, codes: Tensor) -> Tensor:  # (n, steps) int64 -> (n, classes)
        """Logits of the character after each window."""
        out: Tensor = self.head(self.lstm(self.embedding(codes)))
        return out


@register("model", "lstm-shakespeare", doc="Two memory layers guess Shakespeare's next character.", paper="MAPO")
def lstm_shakespeare(
    classes: int = 69, vocab: int | None = None, embedding: int = 8, hidden: int = 256, layers: int = 2
) -> NextCharacter:
    """Two memory layers with one bias vector each: 814,957 weights for 65 characters and 4 special codes.

    Embedding(69, 8) -> 2 layers of 256 -> Linear(256 -> 69). Not `lstm80`, which has torch's two bias vectors.
    """
    return NextCharacter(classes, vocab=vocab, embedding=embedding, hidden=hidden, layers=layers, biases=1)


@register("model", "lstm80", doc="Two memory layers over 80 characters, two biases each.", paper="LEAF; FedPara")
def lstm80(
    classes: int = 80, vocab: int | None = None, embedding: int = 8, hidden: int = 256, layers: int = 2
) -> NextCharacter:
    """Two memory layers with torch's two bias vectors each: 819,920 weights for 80 characters.

    Embedding(80, 8) -> 2 layers of 256 -> Linear(256 -> 80). Not `lstm-shakespeare`, which has one bias vector.
    """
    return NextCharacter(classes, vocab=vocab, embedding=embedding, hidden=hidden, layers=layers, biases=2)
