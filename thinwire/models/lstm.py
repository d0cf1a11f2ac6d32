"""LSTM models for next-character prediction.

Papers: Hochreiter and Schmidhuber; LEAF, MAPO and FedPara (Shakespeare).

The recurrence is implemented here, instead of `nn.LSTM`, for two reasons: the parameter counts of MAPO require one bias
vector per layer where torch has two, and the fused kernels of torch have no batching rule for `torch.func.vmap`.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.core.registry import register
from thinwire.core.text import Classes, PositiveInt
from thinwire.errors import ConfigError
from thinwire.kernels.recurrent import recurrence
from thinwire.kernels.support import dot_precision


class LSTM(nn.Module):
    """A multi-layer LSTM that returns the last hidden state.

        i, f, g, o = W_ih x_t + W_hh h_{t-1} + b
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)

    Parameter names, gate order and initialization (uniform within 1 / sqrt(hidden)) are those of `nn.LSTM`. With
    `biases=2` its state dict can be loaded; with `biases=1` a layer has only `bias_hh`.

    The input products of all steps of a layer are one matrix product before the recurrence (`kernels/recurrent.py`).
    Without gradients, in evaluation, the kernels of `nn.LSTM` are used; they differ by rounding.

    With `weight_norm` each row of a matrix has a length that is a parameter of its own (Salimans and Kingma, 2016):

        W = g v / |v|        v: `weight_*`;  g: `g_*`, at first the usual length, sqrt(inputs / (3 hidden))

    A space that replaces `weight_*` by factors then sets directions only.

    Args:
        inputs: size of an input vector.
        hidden: size of the hidden state.
        layers: number of layers.
        biases: bias vectors per layer, 1 or 2.
        weight_norm: whether lengths and directions of the rows are separate parameters.

    >>> LSTM(8, 16)(torch.zeros(3, 5, 8)).shape      # 3 sequences of 5 steps: the last state of each
    torch.Size([3, 16])
    """

    def __init__(
        self, inputs: int, hidden: int, *, layers: int = 2, biases: int = 1, weight_norm: bool = False
    ) -> None:
        if biases > 2:
            raise ConfigError(f"biases = {biases}: expected 1 (one vector per layer) or 2 (as in nn.LSTM)")
        super().__init__()
        self.hidden, self.layers, self.biases, self.weight_norm = hidden, layers, biases, weight_norm
        for layer in range(layers):
            shapes = {"weight_ih": [hidden if layer else inputs], "weight_hh": [hidden], "bias_ih": [], "bias_hh": []}
            for name, fan in shapes.items():
                if name != "bias_ih" or biases == 2:
                    self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.empty(4 * hidden, *fan)))
        for block in self.parameters():
            nn.init.uniform_(block, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
        for part in (f"{part}_l{layer}" for layer in range(layers) for part in ("ih", "hh")) if weight_norm else ():
            rows, fan = getattr(self, f"weight_{part}").shape  # a constant, since sums differ between machines
            self.register_parameter(f"g_{part}", nn.Parameter(torch.full((rows,), math.sqrt(fan / (3 * hidden)))))

    def forward(self, x: Tensor) -> Tensor:  # (n, steps, inputs) -> (n, hidden)
        """The hidden state of the last layer after the last step."""
        if not torch.is_grad_enabled():  # fused kernels take a fraction of the time
            return self._fused(x)
        states = x.transpose(0, 1)
        for layer in range(self.layers):
            inner, own, bias = self._layer(layer)
            states = recurrence(F.linear(states, inner, bias), own)
        return states[-1]

    def _layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The matrices of inputs and states, and the bias."""
        bias: Tensor = getattr(self, f"bias_hh_l{layer}")
        if self.biases == 2:
            bias = bias + getattr(self, f"bias_ih_l{layer}")
        return self._matrix(f"ih_l{layer}"), self._matrix(f"hh_l{layer}"), bias

    def _matrix(self, part: str) -> Tensor:
        """A matrix, of its directions and lengths where they are separate."""
        weight: Tensor = getattr(self, f"weight_{part}")
        return F.normalize(weight, dim=1) * getattr(self, f"g_{part}")[:, None] if self.weight_norm else weight

    def _fused(self, x: Tensor) -> Tensor:
        """The same by the kernels of `nn.LSTM`, which differ by rounding."""
        blocks = []
        for layer in range(self.layers):
            second = getattr(self, f"bias_hh_l{layer}")
            first = getattr(self, f"bias_ih_l{layer}") if self.biases == 2 else torch.zeros_like(second)
            blocks += [self._matrix(f"ih_l{layer}"), self._matrix(f"hh_l{layer}"), first, second]
        kind = x.dtype
        if x.is_cuda and kind == torch.float32 and dot_precision(kind) == "tf32":  # as precise as TF32, and faster
            x, blocks = x.half(), [block.half() for block in blocks]
        zero = x.new_zeros(self.layers, len(x), self.hidden)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")  # cuDNN
            output, _, _ = torch.lstm(x, [zero, zero], blocks, True, self.layers, 0.0, False, False, True)
        return output[:, -1].to(kind)


class NextCharacter(nn.Module):
    """A next-character model: embedding, LSTM and a linear head.

        Embedding(vocab, 8) -> LSTM layers -> state after the last character -> Linear(hidden -> classes)

    Args:
        classes: number of output characters.
        vocab: number of input characters; `classes` by default.
        embedding: size of an embedding vector.
        hidden: size of the hidden state.
        options: further arguments of `LSTM`.

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
        **options: int,
    ) -> None:
        vocab = classes if vocab is None else vocab
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm = LSTM(embedding, hidden, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(hidden, classes)

    def forward(self, codes: Tensor) -> Tensor:  # (n, steps) int64 -> (n, classes)
        """Logits of the character after each sequence."""
        return self.head(self.lstm(self.embedding(codes)))


@register("model", "lstm-shakespeare", doc="LSTM of two layers for the next character of Shakespeare.", paper="MAPO")
def lstm_shakespeare(
    classes: Classes = 69,
    vocab: int | None = None,
    embedding: PositiveInt = 8,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
) -> NextCharacter:
    """Two LSTM layers with one bias vector each: 814,957 parameters for 65 characters and 4 special tokens.

    Embedding(69, 8) -> 2 layers of 256 -> Linear(256 -> 69). Not `lstm80`, which has two bias vectors per layer.
    """
    return NextCharacter(classes, vocab=vocab, embedding=embedding, hidden=hidden, layers=layers)


@register("model", "lstm80", doc="LSTM of two layers over 80 characters, two biases each.", paper="LEAF; FedPara")
def lstm80(
    classes: Classes = 80,
    vocab: int | None = None,
    embedding: PositiveInt = 8,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
    weight_norm: bool = False,
) -> NextCharacter:
    """Two LSTM layers with two bias vectors each, as in torch: 819,920 parameters for 80 characters.

    Embedding(80, 8) -> 2 layers of 256 -> Linear(256 -> 80). Not `lstm-shakespeare`, with one bias vector per layer.
    With `weight_norm` (FedPara's tables) the 4,096 rows of the LSTM have a length each: 824,016 parameters.
    """
    return NextCharacter(
        classes,
        vocab=vocab,
        embedding=embedding,
        hidden=hidden,
        layers=layers,
        biases=2,
        weight_norm=weight_norm,
    )
